//! A mount namespace with few mounts, for a process that outlives the mounts of its caller.
#![expect(unsafe_code, reason = "rustix calls unshare unsafe")]

use std::path::{Path, PathBuf};

use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

use super::table::mounted;
use crate::Errno;
use crate::process::set_root_propagation;
use crate::propagation::Propagation;

/// Paths that a server needs: its tasks, another FUSE descriptor, and its number of processors.
const NEEDED: [&str; 3] = ["/proc/self", "/dev/fuse", "/sys/fs/cgroup"];

/// A copied mount namespace, whose mounts [`detach_others`](Self::detach_others) reduces.
#[derive(Debug)]
pub struct FewMounts {
    are_apart: bool,
}

impl FewMounts {
    /// Moves this process, which must have one thread, into a copy of its mount namespace. Mounts that are attached
    /// in the old namespace later do not appear in the copy. Unmounts propagate to it if the mount was shared.
    ///
    /// # Errors
    /// An error of the kernel: `EPERM` without `CAP_SYS_ADMIN`, `ENOSPC` at the limit of namespaces.
    pub fn unshare() -> Result<Self, Errno> {
        // SAFETY: without CLONE_FILES, all threads keep the same descriptor table.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
        // The call fails in a chroot whose root is not a mount.
        let are_apart = set_root_propagation(Propagation::Downstream).is_ok();
        for mount in mounted().unwrap_or_default().iter().filter(|it| is_needed(&it.point)) {
            // These mounts are kept, so they must not receive mounts of the old namespace, which the copy would keep
            // after the old namespace has ended.
            let _kept_apart =
                rustix::mount::mount_change(&mount.point, MountPropagationFlags::PRIVATE);
        }
        Ok(Self { are_apart })
    }

    /// Detaches all mounts except the root, `/proc`, `/dev`, `/sys` and the mounts in them that a server needs. Mounts
    /// that belong to the owner of another user namespace are locked together, so they are kept; the old namespace
    /// cannot detach them either.
    pub fn detach_others(self) {
        // There are several rounds, because a covered mount appears only when the mount on top of it is detached.
        for _ in 0..8 {
            let mut gone: Vec<PathBuf> = Vec::new();
            for mount in mounted().unwrap_or_default() {
                let point = mount.point;
                let is_below = |it: &PathBuf| point.starts_with(it);
                if is_needed(&point) || gone.iter().any(is_below) {
                    continue;
                }
                let private =
                    || rustix::mount::mount_change(&point, MountPropagationFlags::PRIVATE).is_ok();
                // Detaching a shared mount would detach it in other namespaces as well.
                if !self.are_apart && !private() {
                    continue;
                }
                let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
                if rustix::mount::unmount(&point, flags).is_ok() {
                    gone.push(point);
                }
            }
            if gone.is_empty() {
                return;
            }
        }
    }
}

fn is_needed(point: &Path) -> bool {
    NEEDED.iter().any(|it| Path::new(it).starts_with(point))
}
