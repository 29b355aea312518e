//! File systems whose files a process of ours has: FUSE.

use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, MountError, Step};

/// Source: `linux/magic.h`, FUSE_SUPER_MAGIC.
const FUSE_SUPER_MAGIC: i64 = 0x6573_5546;

/// What is served, and to whom.
#[derive(Debug, Clone, Copy)]
pub struct FuseOptions<'a> {
    /// What the root is: a regular file, for example, that is the whole file system.
    pub root: FileType,
    /// The user and the group that it belongs to.
    pub owner: (u32, u32),
    /// Who gets in.
    pub access: FuseAccess,
    /// What lists of mounts show.
    pub name: &'a str,
}

/// Who gets into a file system on FUSE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FuseAccess {
    /// Its owner. Nothing can be executed, and there are no devices.
    Owner,
    /// Everybody in the user namespace that mounts it, as far as the modes of files allow.
    Everybody,
}

/// Mounts the file system whose requests come through `connection`, a descriptor of `/dev/fuse`. It is read-only, and the
/// modes of files are obeyed.
///
/// Nothing is asked of the connection before this returns, but for the first request.
///
/// # Errors
/// The kernel's error in the step that failed.
pub fn fuse(connection: BorrowedFd<'_>, options: &FuseOptions<'_>) -> Result<Detached, MountError> {
    let object = format!("FUSE {}", options.name);
    let context = Context::open("fuse", &object)?;
    context.string("source", options.name)?;
    // As text: before Linux 6.13 it takes no descriptor.
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

/// Whether a file lies on FUSE. If its server does not reply, this waits.
///
/// # Errors
/// The kernel's answer to `fstatfs`.
pub fn is_on_fuse(file: BorrowedFd<'_>) -> Result<bool, MountError> {
    match rustix::fs::fstatfs(file) {
        Ok(found) => Ok(found.f_type == FUSE_SUPER_MAGIC),
        // No other file system says so.
        Err(Errno::NOTCONN | Errno::CONNABORTED) => Ok(true),
        Err(errno) => Err(MountError::call(Step::Examine, crate::fd_name::name_of(file), errno)),
    }
}
