//! Mounts made from descriptors: nothing is attached anywhere until [`Detached::attach`], so a
//! mount that is never attached vanishes with its descriptor, and with the process that held it.

mod attributes;
mod backing;
mod context;
mod erofs;
mod error;
mod ext4;
mod few;
mod fuse;
mod locked;
mod overlay;
mod source;
mod table;
mod thread;
mod tmpfs;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

pub use crate::propagation::Propagation;
pub use attributes::{Attributes, set_attributes};
pub use backing::{NATIVE_READ_AHEAD_MAX, native_read_ahead};
pub(crate) use erofs::try_sharing;
pub use erofs::{Acl, Backing, Domain, Erofs, ErofsOptions, Io, Sharing, erofs};
pub use error::{KernelMessages, MountError, Step};
pub use ext4::{Ext4Options, ext4};
pub use few::FewMounts;
pub use fuse::{FuseAccess, FuseOptions, fuse, is_on_fuse};
pub(crate) use overlay::by_descriptor;
pub use overlay::{
    Credentials, DATA_LAYERS, Durability, OVERLAY_USER_DATA, OVERLAY_VERITY, OverlayOptions, Upper,
    Verity, XattrNamespace, overlay,
};
pub use rustix::mount::MountAttrFlags;
pub use table::{Mounted, mounted};
pub use tmpfs::{TmpfsOptions, tmpfs};

use crate::fd_name::{name_of, proc_path};
use crate::version::KernelVersion;

/// Before Linux 6.15 a mount that is attached nowhere, or whose descriptor is `O_PATH` (as those
/// of mounts are), can be attached, read and closed, but be no source of clones and overlays.
pub const DETACHED_SOURCES: KernelVersion = KernelVersion { major: 6, minor: 15 };

/// The first Linux version that maps the owners of EROFS mounts, and takes such for layers of overlays.
const MAPPED_EROFS: KernelVersion = KernelVersion { major: 5, minor: 19 };

/// A mount that is made but not attached anywhere. Dropping it unmounts it, unless it has been
/// attached or something (another overlay, an open file) still uses it.
#[derive(Debug)]
pub struct Detached {
    fd: OwnedFd,
}

/// Does an operation on a mount cover the mounts below it?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The one mount.
    One,
    /// The mount and everything mounted below it.
    Recursive,
}

/// May a mount be in use when it is unmounted?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// No: `EBUSY` if it is.
    Now,
    /// Yes: it leaves the tree of names at once, and is freed when its last user has gone.
    Lazy,
}

impl Detached {
    /// Takes a descriptor that came from elsewhere (another process, say) as a mount.
    /// It must be what `fsmount(2)` or `open_tree(2)` with `OPEN_TREE_CLONE` gives.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Attaches the mount on top of an open directory (any descriptor will do, `O_PATH` too).
    /// The descriptor stays good: through it the tree is reached also when more is mounted above.
    ///
    /// # Errors
    /// The kernel's answer, naming both.
    pub fn attach(&self, directory: BorrowedFd<'_>) -> Result<(), MountError> {
        attach(self.as_fd(), directory)
    }

    /// Attaches the mount at a path, following symbolic links in it.
    ///
    /// # Errors
    /// The kernel's answer, naming the path.
    pub fn attach_at(&self, path: &Path) -> Result<(), MountError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
        rustix::mount::move_mount(&self.fd, c"", CWD, path, flags)
            .map_err(|errno| MountError::call(Step::Attach, path.display(), errno))
    }

    /// Attaches the mount at a path, beneath the uppermost mount there: it is seen when that is unmounted. Needs Linux 6.5, and
    /// a kernel that can tell that no peer of the mounts would cover it.
    ///
    /// # Errors
    /// The kernel's answer, naming the path.
    pub fn attach_beneath(&self, path: &Path) -> Result<(), MountError> {
        // Source: include/uapi/linux/mount.h, MOVE_MOUNT_BENEATH.
        let beneath = MoveMountFlags::from_bits_retain(0x200);
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
        rustix::mount::move_mount(&self.fd, c"", CWD, path, flags | beneath)
            .map_err(|errno| MountError::call(Step::Attach, path.display(), errno))
    }

    /// A second detached mount of the same superblock: same pages in memory, own attributes.
    /// While the mount is attached nowhere this needs Linux 6.15.
    ///
    /// # Errors
    /// The kernel's answer; [`MountError::Unsupported`] on older kernels.
    pub fn clone_detached(&self) -> Result<Self, MountError> {
        bind(self.as_fd(), Reach::One)
            .map_err(|error| error.if_older(DETACHED_SOURCES, "clone a detached mount"))
    }

    /// Maps owners through a user namespace (`/proc/PID/ns/user`). Only before attaching, only
    /// once, and not for a finished overlay: idmap the EROFS clone below it instead.
    ///
    /// # Errors
    /// The kernel's answer: `EINVAL` for a file system that cannot be mapped.
    pub fn idmap(&self, user_namespace: BorrowedFd<'_>) -> Result<(), MountError> {
        let change = Attributes { idmap: Some(user_namespace), ..Attributes::default() };
        set_attributes(self.as_fd(), &change, Reach::One).map_err(|error| match error {
            MountError::Call { object, messages, source, .. } => {
                MountError::Call { step: Step::Idmap, object, messages, source }
                    .if_older(MAPPED_EROFS, "map the owners of an image")
            }
            other => other,
        })
    }

    /// Changes the attributes of this mount.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn set(&self, change: &Attributes<'_>) -> Result<(), MountError> {
        set_attributes(self.as_fd(), change, Reach::One)
    }

    /// Whether neither the mount nor the file system below it is read-only. (A user may still
    /// lack the permission to write.)
    ///
    /// # Errors
    /// The kernel's answer to `fstatfs`.
    pub fn is_writable(&self) -> Result<bool, MountError> {
        // statfs ORs the flags of the mount and of the superblock.
        let flags = rustix::fs::fstatvfs(&self.fd)
            .map_err(|errno| MountError::call(Step::Examine, name_of(self.as_fd()), errno))?
            .f_flag;
        Ok(!flags.contains(StatVfsMountFlags::RDONLY))
    }
}

impl AsFd for Detached {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Detached> for OwnedFd {
    fn from(mount: Detached) -> Self {
        mount.fd
    }
}

fn attach(mount: BorrowedFd<'_>, directory: BorrowedFd<'_>) -> Result<(), MountError> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(mount, c"", directory, c"", flags)
        .map_err(|errno| MountError::call(Step::Attach, name_of(directory), errno))
}

/// Makes a detached copy of the mount, or of the directory, at an open directory.
///
/// # Errors
/// An error of the kernel.
pub fn bind(source: BorrowedFd<'_>, reach: Reach) -> Result<Detached, MountError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | match reach {
            Reach::One => OpenTreeFlags::empty(),
            Reach::Recursive => OpenTreeFlags::AT_RECURSIVE,
        };
    rustix::mount::open_tree(source, c"", flags)
        .map(Detached::from_fd)
        .map_err(|errno| MountError::call(Step::Clone, name_of(source), errno))
}

/// Unmounts the mount at a path. A symbolic link at its end is not followed.
///
/// # Errors
/// An error of the kernel: `EINVAL` if nothing is mounted there, `EBUSY` if it is in use.
pub fn unmount(path: &Path, how: Unmount) -> Result<(), MountError> {
    let flags = UnmountFlags::NOFOLLOW | detach(how);
    rustix::mount::unmount(path, flags)
        .map_err(|errno| MountError::call(Step::Unmount, path.display(), errno))
}

/// What [`expire`] has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expired {
    /// The mount is unused and still there.
    Unused,
    /// The mount is gone: it was unused since an earlier call.
    Gone,
}

/// Checks whether the uppermost mount at a path is in use. Source: umount(2), `MNT_EXPIRE`.
///
/// # Errors
/// An error of the kernel: `EBUSY` if the mount is in use.
pub fn expire(path: &Path) -> Result<Expired, MountError> {
    match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | UnmountFlags::EXPIRE) {
        Ok(()) => Ok(Expired::Gone),
        Err(Errno::AGAIN) => Ok(Expired::Unused),
        Err(errno) => Err(MountError::call(Step::Unmount, path.display(), errno)),
    }
}

/// Unmounts the mount whose root this descriptor is. It is always lazy, since the descriptor itself uses the mount.
///
/// # Errors
/// An error of the kernel: `EINVAL` for a descriptor that is not the root of a mount here.
pub fn unmount_fd(root: BorrowedFd<'_>) -> Result<(), MountError> {
    // No NOFOLLOW: the link in /proc is what leads there.
    rustix::mount::unmount(proc_path(root), UnmountFlags::DETACH)
        .map_err(|errno| MountError::call(Step::Unmount, name_of(root), errno))
}

fn detach(how: Unmount) -> UnmountFlags {
    match how {
        Unmount::Now => UnmountFlags::empty(),
        Unmount::Lazy => UnmountFlags::DETACH,
    }
}
