//! Root file systems: an image of the store, its objects, and perhaps a writable layer, in one detached mount.
//!
//! Every mount that Quire makes of an image comes from [`assemble`], so that whoever has to stand behind a mount (a
//! holder of lazy blobs, a monitor that shares superblocks) has one place to do so.

use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use kernel::mount::{
    Acl, Backing, Credentials, Detached, Durability, ErofsOptions, Io, MountError, OverlayOptions,
    TmpfsOptions, Upper, Verity, XattrNamespace,
};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

/// What is mounted: descriptors that the store has checked.
#[derive(Debug, Clone, Copy)]
pub struct Layers<'a> {
    /// What messages and `mountinfo` call it.
    pub name: &'a str,
    /// The EROFS image, open for reading.
    pub image: BorrowedFd<'a>,
    /// The directories that hold the objects, searched in this order.
    pub objects: &'a [BorrowedFd<'a>],
    /// Whether any inode of the image has a POSIX ACL.
    pub acl: Acl,
}

/// Where changes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writable {
    /// Nowhere: the root is read-only.
    None,
    /// Into memory, and away with it.
    Memory {
        /// The most that may be written, in bytes; none means half of the machine's memory.
        bytes: Option<NonZeroU64>,
    },
}

/// Who checks what is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checked {
    /// The kernel, at every read: fs-verity on the image and on the objects.
    ByKernel,
    /// Nobody, after the import.
    AtImport,
}

/// A root file system that is attached nowhere yet.
#[derive(Debug)]
pub struct Root {
    /// The mount.
    pub mount: Detached,
    /// How the kernel reads the image.
    pub backing: Backing,
}

/// A root that can not be made.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// The kernel refused a mount.
    #[error("cannot mount {name}")]
    Mount {
        /// The image.
        name: String,
        /// The kernel's answer.
        #[source]
        source: MountError,
    },
    /// The writable layer could not be prepared.
    #[error("cannot prepare the writable layer of {name}")]
    Upper {
        /// The image.
        name: String,
        /// The kernel's answer.
        #[source]
        source: Errno,
    },
}

/// Stacks the image, its objects and the writable layer, all from descriptors.
///
/// # Errors
/// [`RootError`] with the step that failed; nothing is left mounted then.
pub fn assemble(
    layers: &Layers<'_>,
    checked: Checked,
    writable: Writable,
) -> Result<Root, RootError> {
    let failed = |source| RootError::Mount { name: layers.name.to_owned(), source };
    let options = ErofsOptions { devices: &[], io: Io::Direct, acl: layers.acl };
    let image = kernel::mount::erofs(layers.image, &options).map_err(failed)?;
    let memory = match writable {
        Writable::None => None,
        Writable::Memory { bytes } => {
            let options = TmpfsOptions { name: "quire-upper", bytes, inodes: None, mode: 0o700 };
            let tmpfs = kernel::mount::tmpfs(&options).map_err(failed)?;
            let prepared = prepare_upper(tmpfs.as_fd(), image.mount.as_fd());
            let (upper, work) = prepared
                .map_err(|source| RootError::Upper { name: layers.name.to_owned(), source })?;
            // The mount itself too: overlayfs takes no layer from a mount that is gone already.
            Some((upper, work, tmpfs))
        }
    };
    let upper = memory.as_ref().map(|(upper, work, _)| Upper {
        upper: upper.as_fd(),
        work: work.as_fd(),
        // What lies in memory has nothing to sync.
        durability: Durability::Volatile,
    });
    let mount = kernel::mount::overlay(&OverlayOptions {
        name: layers.name,
        lower: &[image.mount.as_fd()],
        data: layers.objects,
        upper,
        verity: match checked {
            Checked::ByKernel => Verity::Required,
            Checked::AtImport => Verity::Off,
        },
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    });
    Ok(Root { mount: mount.map_err(failed)?, backing: image.backing })
}

/// Makes the two directories that overlayfs wants. The root of an overlay is its upper directory, so that one gets
/// owner, mode, time and xattrs of the image's root.
fn prepare_upper(
    tmpfs: BorrowedFd<'_>,
    image: BorrowedFd<'_>,
) -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for name in ["upper", "work"] {
        rustix::fs::mkdirat(tmpfs, name, Mode::RWXU)?;
    }
    let upper = rustix::fs::openat(tmpfs, "upper", flags, Mode::empty())?;
    let work = rustix::fs::openat(tmpfs, "work", flags, Mode::empty())?;
    // The mount's own descriptor is O_PATH-like to xattr calls.
    let root = rustix::fs::openat(image, ".", flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&root)?;
    rustix::fs::fchown(&upper, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    copy_xattrs(root.as_fd(), upper.as_fd())?;
    // After the owner, whose change clears set-id bits, and after the ACLs, which change the group's bits.
    rustix::fs::fchmod(&upper, Mode::from_raw_mode(stat.st_mode))?;
    let time = rustix::fs::statx(&root, "", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::MTIME)?;
    let time = Timespec { tv_sec: time.stx_mtime.tv_sec, tv_nsec: time.stx_mtime.tv_nsec.into() };
    rustix::fs::futimens(&upper, &Timestamps { last_access: time, last_modification: time })?;
    Ok((upper, work))
}

/// Copies all xattrs but overlayfs's own marks, which belong to the layer they are in.
fn copy_xattrs(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut names = vec![0_u8; 64 << 10];
    let length = rustix::fs::flistxattr(from, &mut names[..])?;
    let mut value = vec![0_u8; 64 << 10];
    for name in names[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(b"trusted.overlay.") {
            continue;
        }
        let length = rustix::fs::fgetxattr(from, name, &mut value[..])?;
        rustix::fs::fsetxattr(to, name, &value[..length], rustix::fs::XattrFlags::empty())?;
    }
    Ok(())
}
