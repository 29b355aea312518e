//! ext4 in a file: a writable layer that is one file on the host.

use std::os::fd::BorrowedFd;

use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, Durability, MountError};
use crate::fd_name::name_of;
use crate::loopdev::{self, Access, LoopBlockSize, LoopOptions};

/// How to mount an ext4.
#[derive(Clone, Copy, Debug)]
pub struct Ext4Options {
    /// Data that a crash of the host may cost.
    pub durability: Durability,
    /// Whether the loop device reads and writes past the page cache of the file, so that data is in memory once. The
    /// kernel quietly does without where the file system cannot.
    pub direct_io: bool,
    /// Whether it can be written. The file must be open for that.
    pub access: Access,
}

/// Mounts the ext4 that a file holds, attached nowhere.
///
/// The kernel keeps file and loop device for as long as the mount lives.
///
/// # Errors
/// The kernel's answer to the step that failed, with what ext4 said about it.
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
            // A new file is zeros: writing more of them into it is what this would do in the background.
            context.flag("noinit_itable")?;
            MountAttrFlags::empty()
        }
    };
    if options.durability == Durability::Volatile {
        context.flag("nobarrier")?;
        // Else a file that replaces another, by rename or after truncate, is written out when it is closed.
        context.flag("noauto_da_alloc")?;
        // Times are written with what else is written of an inode.
        context.flag("lazytime")?;
    }
    context.create()?;
    context.mount(attributes)
}
