//! Mounts an ext4 file system in a file, as a writable layer that is one file on the host.

use std::os::fd::BorrowedFd;

use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, Durability, MountError};
use crate::fd_name::name_of;
use crate::loopdev::{self, Access, LoopBlockSize, LoopOptions};

/// Options of [`ext4`].
#[derive(Clone, Copy, Debug)]
pub struct Ext4Options {
    /// The data that a crash of the host may lose.
    pub durability: Durability,
    /// Whether the loop device bypasses the page cache of the file, so that data is in memory once. The kernel ignores
    /// this without an error if the file system does not support this.
    pub direct_io: bool,
    /// Access mode of the mount. The file must be open for it.
    pub access: Access,
}

/// Mounts the ext4 file system in a file, detached.
///
/// The kernel keeps the file and the loop device for as long as the mount lives.
///
/// # Errors
/// The error of the step that failed, with the messages of ext4.
pub fn ext4(file: BorrowedFd<'_>, options: &Ext4Options) -> Result<Detached, MountError> {
    let object = format!("ext4 in {}", name_of(file));
    let loop_options = LoopOptions {
        block_size: LoopBlockSize::B4096,
        access: options.access,
        direct_io: options.direct_io,
    };
    let device = loopdev::attach(file, &loop_options)
        .map_err(|source| MountError::Loop { object: object.clone(), source })?;
    let context = Context::open("ext4", &object)?;
    context.string("source", &device.path())?;
    let attributes = match options.access {
        Access::ReadOnly => {
            context.flag("ro")?;
            MountAttrFlags::MOUNT_ATTR_RDONLY
        }
        Access::ReadWrite => {
            // A new file already reads as zeros, so the background initialisation would only write more zeros.
            context.flag("noinit_itable")?;
            MountAttrFlags::empty()
        }
    };
    if options.durability == Durability::Volatile {
        context.flag("nobarrier")?;
        // Without this option, a file that replaces another one, by a rename or after truncation, is written to the
        // disk when it is closed.
        context.flag("noauto_da_alloc")?;
        // Timestamps are written together with other changes of an inode.
        context.flag("lazytime")?;
    }
    context.create()?;
    context.mount(attributes)
}
