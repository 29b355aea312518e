//! tmpfs: the writable layer that lives in memory.

use std::num::NonZeroU64;

use rustix::mount::MountAttrFlags;

use super::context::Context;
use super::{Detached, MountError};

/// How to make a tmpfs.
#[derive(Clone, Copy, Debug)]
pub struct TmpfsOptions<'a> {
    /// Its source in `/proc/self/mountinfo`.
    pub name: &'a str,
    /// The most it may hold, in bytes; the kernel rounds up to whole pages. None: half of memory.
    /// (Zero would mean no limit at all to the kernel.)
    pub bytes: Option<NonZeroU64>,
    /// The most files it may hold. None: the kernel's default.
    pub inodes: Option<NonZeroU64>,
    /// Permission bits of its root, such as `0o755`.
    pub mode: u32,
}

/// A new, empty, writable tmpfs.
///
/// # Errors
/// The kernel's answer.
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
