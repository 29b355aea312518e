//! Changes the attributes of an existing mount (mount_setattr(2)).
#![expect(unsafe_code, reason = "rustix has no mount_setattr")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

use rustix::mount::MountAttrFlags;

use super::{MountError, Reach, Step};
use crate::fd_name::name_of;
use crate::propagation::Propagation;

/// A change of a mount's attributes. The default changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    /// Attributes to set.
    pub set: MountAttrFlags,
    /// Attributes to clear first.
    pub clear: MountAttrFlags,
    /// Propagation type to set.
    pub propagation: Option<Propagation>,
    /// User namespace whose maps translate the owners of files; see [`super::Detached::idmap`].
    pub idmap: Option<BorrowedFd<'a>>,
}

impl Default for Attributes<'_> {
    fn default() -> Self {
        Self {
            set: MountAttrFlags::empty(),
            clear: MountAttrFlags::empty(),
            propagation: None,
            idmap: None,
        }
    }
}

/// Changes the attributes of the mount whose root `mount` is.
///
/// # Errors
/// An error of the kernel: `EINVAL` for a descriptor that is not the root of a mount.
pub fn set_attributes(
    mount: BorrowedFd<'_>,
    change: &Attributes<'_>,
    reach: Reach,
) -> Result<(), MountError> {
    let failed = |errno| MountError::call(Step::SetAttributes, name_of(mount), errno);
    let mut set = u64::from(change.set.bits());
    let mut userns_fd = 0;
    if let Some(namespace) = change.idmap {
        set |= u64::from(MountAttrFlags::MOUNT_ATTR_IDMAP.bits());
        userns_fd = namespace.as_raw_fd().unsigned_abs().into();
    }
    let mut clear = u64::from(change.clear.bits());
    // The kernel treats the four atime modes as one field, so setting one requires clearing all.
    let atime = u64::from(MountAttrFlags::MOUNT_ATTR__ATIME.bits());
    if (set | clear) & atime != 0 {
        clear |= atime;
    }
    let argument = libc::mount_attr {
        attr_set: set,
        attr_clr: clear,
        propagation: match change.propagation {
            None => 0,
            Some(Propagation::Private) => libc::MS_PRIVATE,
            Some(Propagation::Downstream) => libc::MS_SLAVE,
            Some(Propagation::Shared) => libc::MS_SHARED,
        },
        userns_fd,
    };
    let flags = libc::AT_EMPTY_PATH
        | match reach {
            Reach::One => 0,
            Reach::Recursive => libc::AT_RECURSIVE,
        };
    // SAFETY: mount_setattr reads a NUL-terminated path and `size_of` bytes of a mount_attr, both alive for the call,
    // and writes to neither.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const argument,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(failed(crate::last_errno())) }
}
