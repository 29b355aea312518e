//! Mounts tmpfs file systems, for writable layers in memory.

use std::num::NonZeroU64;

use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, MountError};

/// Options of [`tmpfs`].
#[derive(Clone, Copy, Debug)]
pub struct TmpfsOptions<'a> {
    /// Source in `mountinfo`.
    pub name: &'a str,
    /// Maximum size in bytes, which the kernel rounds up to whole pages. `None` means half of the memory. (Zero would
    /// mean no limit to the kernel.)
    pub bytes: Option<NonZeroU64>,
    /// Maximum number of files. `None` means the kernel's default.
    pub inodes: Option<NonZeroU64>,
    /// Permission bits of the root, such as `0o755`.
    pub mode: u32,
}

/// Mounts a new, empty, writable tmpfs, detached.
pub fn tmpfs(options: &TmpfsOptions<'_>) -> Result<Detached, MountError> {
    let object = format!("tmpfs {}", options.name);
    let context = Context::open("tmpfs", &object)?;
    context.string("source", options.name)?;
    context.string("mode", &format!("{:o}", options.mode))?;
    if let Some(bytes) = options.bytes {
        context.string("size", &bytes.to_string())?;
    }
    if let Some(inodes) = options.inodes {
        context.string("nr_inodes", &inodes.to_string())?;
    }
    context.create()?;
    context.mount(MountAttrFlags::empty())
}
