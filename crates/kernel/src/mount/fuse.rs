//! Mounts FUSE file systems, whose server is a process of Quire.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::FileType;
use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, MountError};

/// Options of [`fuse`].
#[derive(Debug, Clone, Copy)]
pub struct FuseOptions<'a> {
    /// File type of the root. A regular file, for example, is the whole file system.
    pub root: FileType,
    /// User and group id of the root's owner.
    pub owner: (u32, u32),
    /// Users who may access the file system.
    pub access: FuseAccess,
    /// Source in `mountinfo`.
    pub name: &'a str,
}

/// The users who may access a FUSE file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FuseAccess {
    /// The owner only. The mount is `nosuid`, `nodev` and `noexec`.
    Owner,
    /// All users in the user namespace that mounts it, subject to the modes of files.
    Everybody,
}

/// Mounts a file system whose requests come through `connection`, a descriptor of `/dev/fuse`. The mount is read-only
/// and detached, and the kernel enforces the modes of files.
///
/// Before this function returns, the kernel sends only the first request.
///
/// # Errors
/// The error of the step that failed.
pub fn fuse(connection: BorrowedFd<'_>, options: &FuseOptions<'_>) -> Result<Detached, MountError> {
    let object = format!("FUSE {}", options.name);
    let context = Context::open("fuse", &object)?;
    context.string("source", options.name)?;
    // The descriptor is passed as text, because before Linux 6.13 the option takes no descriptor.
    context.string("fd", &connection.as_raw_fd().to_string())?;
    context.string("rootmode", &format!("{:o}", options.root.as_raw_mode()))?;
    context.string("user_id", &options.owner.0.to_string())?;
    context.string("group_id", &options.owner.1.to_string())?;
    context.flag("default_permissions")?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
    match options.access {
        FuseAccess::Owner => {
            attributes |= MountAttrFlags::MOUNT_ATTR_NOSUID
                | MountAttrFlags::MOUNT_ATTR_NODEV
                | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        }
        FuseAccess::Everybody => context.flag("allow_other")?,
    }
    context.flag("ro")?;
    context.create()?;
    context.mount(attributes)
}
