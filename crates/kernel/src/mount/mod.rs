//! Makes detached mounts from descriptors. Only [`Detached::attach`] attaches a mount. A mount that is never attached
//! disappears when its descriptor is closed or its process exits.

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
pub use fuse::{FuseAccess, FuseOptions, fuse};
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

/// The first Linux version on which a detached mount, or a mount with an `O_PATH` descriptor (as mounts have), can be
/// a source of clones and overlays. In older versions, such a mount can only be attached, read and closed.
pub const DETACHED_SOURCES: KernelVersion = KernelVersion { major: 6, minor: 15 };

/// The first Linux version with idmapped EROFS mounts, which overlays accept as layers.
const MAPPED_EROFS: KernelVersion = KernelVersion { major: 5, minor: 19 };

/// A mount that is not attached. Dropping it unmounts it, unless it has been attached or something (another overlay,
/// an open file) still uses it.
#[derive(Debug)]
pub struct Detached {
    fd: OwnedFd,
}

/// Whether an operation on a mount includes its submounts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Only the mount itself.
    One,
    /// The mount and all of its submounts.
    Recursive,
}

/// Whether a mount may be in use when it is unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// The mount may not be in use; if it is, the unmount fails with `EBUSY`.
    Now,
    /// The mount may be in use. It disappears from the directory tree at once, and is freed when its last user is
    /// gone.
    Lazy,
}

impl Detached {
    /// Takes a descriptor of a mount, which another process may have sent. It must come from `fsmount(2)`, or from
    /// `open_tree(2)` with `OPEN_TREE_CLONE`.
    #[must_use]
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Attaches the mount on an open directory, whose descriptor may be `O_PATH`. `self` stays valid: its descriptor
    /// reaches the tree even if another mount covers it.
    ///
    /// # Errors
    /// An error of the kernel, with the directory.
    pub fn attach(&self, directory: BorrowedFd<'_>) -> Result<(), MountError> {
        attach(self.as_fd(), directory)
    }

    /// Attaches the mount at a path, and follows symbolic links in the path.
    ///
    /// # Errors
    /// An error of the kernel, with the path.
    pub fn attach_at(&self, path: &Path) -> Result<(), MountError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
        rustix::mount::move_mount(&self.fd, c"", CWD, path, flags)
            .map_err(|errno| MountError::call(Step::Attach, path.display(), errno))
    }

    /// Attaches the mount at a path, beneath the top mount at that path, so that it appears when the top mount is
    /// unmounted. This needs Linux 6.5, and works only if the mount cannot propagate onto a peer.
    ///
    /// # Errors
    /// An error of the kernel, with the path.
    pub fn attach_beneath(&self, path: &Path) -> Result<(), MountError> {
        // Source: include/uapi/linux/mount.h, MOVE_MOUNT_BENEATH.
        let beneath = MoveMountFlags::from_bits_retain(0x200);
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
        rustix::mount::move_mount(&self.fd, c"", CWD, path, flags | beneath)
            .map_err(|errno| MountError::call(Step::Attach, path.display(), errno))
    }

    /// Makes a second detached mount of the same superblock, with the same pages in memory but its own attributes.
    /// Needs Linux 6.15 while this mount is not attached.
    ///
    /// # Errors
    /// An error of the kernel; [`MountError::Unsupported`] on older kernels.
    pub fn clone_detached(&self) -> Result<Self, MountError> {
        bind(self.as_fd(), Reach::One)
            .map_err(|error| error.if_older(DETACHED_SOURCES, "clone a detached mount"))
    }

    /// Maps the owners of files through a user namespace (`/proc/PID/ns/user`). This works only before the mount is
    /// attached, only once, and not for an overlay: map the owners of its lower EROFS mount instead.
    ///
    /// # Errors
    /// An error of the kernel: `EINVAL` for a file system that cannot be idmapped.
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

    pub fn set(&self, change: &Attributes<'_>) -> Result<(), MountError> {
        set_attributes(self.as_fd(), change, Reach::One)
    }

    /// Whether both the mount and its superblock are writable. (A user may still lack permission to write.)
    ///
    /// # Errors
    /// The error of `fstatfs`.
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

/// Makes a detached copy of the mount or directory behind a descriptor.
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

/// Unmounts the top mount at a path. Does not follow a symbolic link at the path's end.
///
/// # Errors
/// An error of the kernel: `EINVAL` if nothing is mounted there, `EBUSY` if the mount is in use.
pub fn unmount(path: &Path, how: Unmount) -> Result<(), MountError> {
    let flags = UnmountFlags::NOFOLLOW | detach(how);
    rustix::mount::unmount(path, flags)
        .map_err(|errno| MountError::call(Step::Unmount, path.display(), errno))
}

/// Outcome of [`expire`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expired {
    /// The mount is unused and still attached.
    Unused,
    /// The mount was unused since an earlier call, and is now unmounted.
    Gone,
}

/// Marks the top mount at a path as expired, or unmounts it if it was unused since an earlier call. Source:
/// umount(2), `MNT_EXPIRE`.
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

/// Unmounts the mount whose root a descriptor is. The unmount is always lazy, because the descriptor itself uses the
/// mount.
///
/// # Errors
/// An error of the kernel: `EINVAL` if the descriptor is not the root of a mount in this namespace.
pub fn unmount_fd(root: BorrowedFd<'_>) -> Result<(), MountError> {
    // Without NOFOLLOW, because the path is a link in /proc.
    rustix::mount::unmount(proc_path(root), UnmountFlags::DETACH)
        .map_err(|errno| MountError::call(Step::Unmount, name_of(root), errno))
}

fn detach(how: Unmount) -> UnmountFlags {
    match how {
        Unmount::Now => UnmountFlags::empty(),
        Unmount::Lazy => UnmountFlags::DETACH,
    }
}
