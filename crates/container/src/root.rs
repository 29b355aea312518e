//! Root file systems: an image of the store, its objects, and perhaps a writable layer, in one detached mount.
//!
//! Every mount that Quire makes of an image comes from [`assemble`], so that whoever has to stand behind a mount (a
//! holder of lazy blobs, a monitor that shares superblocks) has one place to do so.

use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use kernel::mount::{
    Acl, Backing, Credentials, Detached, Durability, ErofsOptions, Io, MountError, OverlayOptions,
    Propagation, TmpfsOptions, Upper, Verity, XattrNamespace,
};
use kernel::process::{ProcessError, own_mounts};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
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

/// A root that cannot be made.
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
    /// There is no mount namespace to stack it in, which kernels before 6.15 need.
    #[error("cannot make a mount namespace to stack {name} in")]
    Namespace {
        /// The image.
        name: String,
        /// The kernel's answer.
        #[source]
        source: ProcessError,
    },
    /// The objects are not, or no longer, where their descriptor came from; kernels before 6.15 need a path.
    #[error("cannot find the objects of {name} by their path")]
    Objects {
        /// The image.
        name: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Stacks the image, its objects and the writable layer, all from descriptors. Whatever has to be attached somewhere
/// meanwhile, since the kernel is older than 6.15, is attached where nobody else sees it.
///
/// # Errors
/// [`RootError`] with the step that failed; nothing is left mounted then.
pub fn assemble(
    layers: &Layers<'_>,
    checked: Checked,
    writable: Writable,
) -> Result<Root, RootError> {
    assemble_in(layers, checked, writable, Workshop::AsNeeded)
}

/// Where an overlay with a writable layer is stacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Workshop {
    /// Here, if the kernel can do without attached layers.
    AsNeeded,
    /// In a mount namespace of its own, as for kernels that cannot. For tests.
    #[cfg(test)]
    Apart,
}

fn assemble_in(
    layers: &Layers<'_>,
    checked: Checked,
    writable: Writable,
    workshop: Workshop,
) -> Result<Root, RootError> {
    let failed = |source| RootError::Mount { name: layers.name.to_owned(), source };
    // Buffered: the image holds metadata only, and its pages outlive the mount, so the next mount of it reads no disk.
    // (Direct I/O, which keeps file data once and not twice, would read the disk anew for every container.)
    let options = ErofsOptions { devices: &[], io: Io::Buffered, acl: layers.acl };
    let image = kernel::mount::erofs(layers.image, &options).map_err(failed)?;
    let Writable::Memory { bytes } = writable else {
        let mount = stack(layers, checked, &image.mount, layers.objects, None).map_err(failed)?;
        return Ok(Root { mount, backing: image.backing });
    };
    let options = TmpfsOptions { name: "quire-upper", bytes, inodes: None, mode: 0o700 };
    let tmpfs = kernel::mount::tmpfs(&options).map_err(failed)?;
    let (upper, work) = prepare_upper(tmpfs.as_fd(), image.mount.as_fd())
        .map_err(|source| RootError::Upper { name: layers.name.to_owned(), source })?;
    let memory = Memory { tmpfs, upper, work };
    let here = match workshop {
        Workshop::AsNeeded => {
            Some(stack(layers, checked, &image.mount, layers.objects, Some(&memory)))
        }
        #[cfg(test)]
        Workshop::Apart => None,
    };
    let mount = match here {
        // It says so before it has touched any layer.
        Some(Err(MountError::Unsupported { .. })) | None => {
            stack_apart(layers, checked, &image.mount, &memory)?
        }
        Some(result) => result.map_err(failed)?,
    };
    Ok(Root { mount, backing: image.backing })
}

/// A writable layer in memory.
struct Memory {
    /// Overlayfs takes no layer from a mount that is gone already.
    tmpfs: Detached,
    upper: OwnedFd,
    work: OwnedFd,
}

fn stack(
    layers: &Layers<'_>,
    checked: Checked,
    image: &Detached,
    objects: &[BorrowedFd<'_>],
    memory: Option<&Memory>,
) -> Result<Detached, MountError> {
    kernel::mount::overlay(&OverlayOptions {
        name: layers.name,
        lower: &[image.as_fd()],
        data: objects,
        upper: memory.map(|memory| Upper {
            upper: memory.upper.as_fd(),
            work: memory.work.as_fd(),
            // What lies in memory has nothing to sync.
            durability: Durability::Volatile,
        }),
        verity: match checked {
            Checked::ByKernel => Verity::Required,
            Checked::AtImport => Verity::Off,
        },
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    })
}

/// Stacks an overlay whose writable layer has to be attached somewhere, and all layers in one mount namespace: in a
/// new one, which ends with the thread that this makes. The overlay has clones of its own of the layers' mounts by
/// then, and is detached, so it can be attached in any namespace.
fn stack_apart(
    layers: &Layers<'_>,
    checked: Checked,
    image: &Detached,
    memory: &Memory,
) -> Result<Detached, RootError> {
    let name = || layers.name.to_owned();
    let lost = |source| RootError::Objects { name: name(), source };
    let work = || {
        // Where the objects are: asked before the namespace is new, since paths are those of this one.
        let paths = layers.objects.iter().map(|fd| path_of(*fd));
        let paths = paths.collect::<Result<Vec<_>, _>>().map_err(lost)?;
        own_mounts(Propagation::Private)
            .map_err(|source| RootError::Namespace { name: name(), source })?;
        // A descriptor from before leads to a mount of the namespace that we left, which can be no layer here.
        let objects = paths.iter().zip(layers.objects).map(|(path, fd)| open_again(path, *fd));
        let objects = objects.collect::<Result<Vec<_>, _>>().map_err(lost)?;
        let objects: Vec<_> = objects.iter().map(|fd| fd.as_fd()).collect();
        let failed = |source| RootError::Mount { name: name(), source };
        // The one directory that is always there and that covers nothing: every path begins below what is mounted
        // on it.
        memory.tmpfs.attach_at(Path::new("/")).map_err(failed)?;
        stack(layers, checked, image, &objects, Some(memory)).map_err(failed)
    };
    match std::thread::scope(|scope| scope.spawn(work).join()) {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn path_of(fd: BorrowedFd<'_>) -> std::io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/thread-self/fd/{}", fd.as_raw_fd()))
}

/// Opens a directory by its path, and makes sure that it is the one that is meant.
fn open_again(path: &Path, expected: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let again = rustix::fs::open(path, flags, Mode::empty())?;
    let identity = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).map(|it| (it.st_dev, it.st_ino));
    if identity(again.as_fd())? != identity(expected)? {
        return Err(Errno::STALE.into());
    }
    Ok(again)
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
///
/// Those that the file system of `to` has no place for (`EOPNOTSUPP`) are left out: a tmpfs has `user.*` only since
/// Linux 6.6, and an image may have prefixes that no tmpfs knows. That loses an attribute of one directory, which the
/// read-only root still shows, and is no reason not to run. Any other refusal may be one of security, or of space, and
/// is an error.
fn copy_xattrs(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut names = vec![0_u8; 64 << 10];
    let length = rustix::fs::flistxattr(from, &mut names[..])?;
    let mut value = vec![0_u8; 64 << 10];
    for name in names[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(b"trusted.overlay.") {
            continue;
        }
        let length = rustix::fs::fgetxattr(from, name, &mut value[..])?;
        match rustix::fs::fsetxattr(to, name, &value[..length], XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                tracing::debug!(name = %name.escape_ascii(), "an xattr of the image's root has no place in memory");
            }
            result => result?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use image::erofs::{Profile, Versions};
    use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
    use image::verity::{Algorithm, digest};

    use super::*;

    /// What needs root says so where there is none.
    fn is_root() -> bool {
        let root = rustix::process::geteuid().is_root();
        if !root {
            writeln!(std::io::stderr(), "SKIPPED: mounts need root").unwrap();
        }
        root
    }

    #[test]
    fn an_xattr_without_a_place_is_left_out() {
        if !is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let from = File::open(folder.path()).unwrap();
        rustix::fs::fsetxattr(&from, "user.quire", b"1", XattrFlags::empty()).unwrap();
        let check = |to: &str, expect| {
            let to = File::open(to).unwrap();
            assert_eq!(copy_xattrs(from.as_fd(), to.as_fd()), expect);
        };
        // procfs has no xattrs.
        check("/proc", Ok(()));
        // A device takes no user.*, for another reason.
        check("/dev/null", Err(Errno::PERM));
    }

    /// As on kernels before 6.15, whose layers by name the `kernel` crate tests.
    #[test]
    fn a_root_stacked_apart_is_one_like_others() {
        if !is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let bytes = [b'x'; 100];
        let object = digest(Algorithm::Sha256, &bytes);
        let place = folder.path().join(object.path());
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        std::fs::write(&place, bytes).unwrap();
        let mut builder = Builder::new();
        let node = Node::Regular(Content::External {
            size: 100,
            object: Some(object),
            location: Location::Object,
        });
        let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
        builder.insert(InodeId::ROOT, b"file", inode, Link::Equal).unwrap();
        let path = folder.path().join("image");
        let profile = Profile::Composefs(Versions::default());
        image::erofs::write(&builder.finish(), &profile, &mut File::create(&path).unwrap())
            .unwrap();
        let (image, objects) = (File::open(&path).unwrap(), File::open(folder.path()).unwrap());
        let layers = Layers {
            name: "quire:test",
            image: image.as_fd(),
            objects: &[objects.as_fd()],
            acl: Acl::Ignore,
        };
        let mounts = || std::fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
        let before = mounts();
        let writable = Writable::Memory { bytes: None };
        let root = assemble_in(&layers, Checked::AtImport, writable, Workshop::Apart).unwrap();
        assert_eq!(mounts(), before);
        // Used where containers use it: attached in another namespace than the one it was made in.
        own_mounts(Propagation::Private).unwrap();
        let point = tempfile::tempdir().unwrap();
        root.mount.attach_at(point.path()).unwrap();
        drop(root);
        let file = point.path().join("file");
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
        File::options().append(true).open(&file).unwrap().write_all(b"y").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), [&bytes[..], b"y"].concat());
        assert_eq!(std::fs::read(&place).unwrap(), bytes);
        assert!(mounts().contains(" overlay quire:test "));
        kernel::mount::unmount(point.path(), kernel::mount::Unmount::Now).unwrap();
    }
}
