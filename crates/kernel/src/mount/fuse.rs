//! File systems whose files a process of ours has: FUSE.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, MountError, Step};

/// Source: `linux/magic.h`, FUSE_SUPER_MAGIC.
const FUSE_SUPER_MAGIC: i64 = 0x6573_5546;

/// Mounts the file system whose requests come through `connection`, a descriptor of `/dev/fuse`. It is read-only, and only
/// this user and group get in. The root is of this kind: a regular file, for example, that is the whole file system. `name` is
/// what lists of mounts show.
///
/// Nothing is asked of the connection before this returns, but for the first request.
///
/// # Errors
/// The kernel's error in the step that failed.
pub fn fuse(
    connection: BorrowedFd<'_>,
    root: FileType,
    (user, group): (u32, u32),
    name: &str,
) -> Result<Detached, MountError> {
    let object = format!("FUSE {name}");
    let context = Context::open("fuse", &object)?;
    context.string("source", name)?;
    // As text: before Linux 6.13 it takes no descriptor.
    context.string("fd", &connection.as_raw_fd().to_string())?;
    context.string("rootmode", &format!("{:o}", root.as_raw_mode()))?;
    context.string("user_id", &user.to_string())?;
    context.string("group_id", &group.to_string())?;
    // The modes of files are obeyed.
    context.flag("default_permissions")?;
    context.flag("ro")?;
    context.create()?;
    context.mount(
        MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )
}

/// Whether a file lies on FUSE. If its server does not reply, this waits.
///
/// # Errors
/// The kernel's answer to `fstatfs`.
pub fn is_on_fuse(file: BorrowedFd<'_>) -> Result<bool, MountError> {
    match rustix::fs::fstatfs(file) {
        Ok(found) => Ok(found.f_type == FUSE_SUPER_MAGIC),
        // No other file system says so.
        Err(Errno::NOTCONN | Errno::CONNABORTED) => Ok(true),
        Err(errno) => Err(MountError::call(Step::Examine, crate::object::name_of(file), errno)),
    }
}
