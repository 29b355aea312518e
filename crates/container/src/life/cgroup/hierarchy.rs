//! Paths of the kernel's cgroup hierarchies.

use std::path::Path;

/// Mount point of the cgroup file systems. Source: cgroups(7).
pub(in crate::life) const CGROUPS: &str = "/sys/fs/cgroup";

/// Prefix of the names of all containers' cgroups.
pub(in crate::life) const CGROUP: &str = "/quire-";

/// Whether a directory is on a cgroup file system of version 2.
pub(in crate::life) fn is_unified(path: &Path) -> bool {
    magic(path) == Some(CGROUP2_MAGIC)
}

/// Source: Linux `include/uapi/linux/magic.h`.
const CGROUP1_MAGIC: u32 = 0x0027_e0eb;

/// Source: Linux `include/uapi/linux/magic.h`.
const CGROUP2_MAGIC: u32 = 0x6367_7270;

fn magic(path: &Path) -> Option<u32> {
    rustix::fs::statfs(path).ok().and_then(|it| u32::try_from(it.f_type).ok())
}

/// Whether a directory is of a cgroup file system.
pub(in crate::life) fn is_hierarchy(path: &Path) -> bool {
    magic(path).is_some_and(|it| [CGROUP1_MAGIC, CGROUP2_MAGIC].contains(&it))
}
