//! Writable layers: where the changes to a root go.

mod directory;

use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use kernel::loopdev;
use kernel::mount::{
    Detached, Durability, Ext4Options, MountError, TmpfsOptions, Upper, XattrNamespace,
};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use crate::bundle::userns::IdMap;
use crate::root::filestore;
use crate::root::headroom::{self, Headroom, HeadroomError};

pub(crate) use directory::{at_rest, last_use, open_upper, settle};
use directory::{prepare_directory, prepare_folder};

/// Where changes go. The kinds have gVisor's names (`--overlay2`).
#[derive(Debug, Clone, Copy)]
pub enum Writable<'a> {
    /// Nowhere: the root is read-only.
    None,
    /// Into memory, and away with it.
    Memory {
        /// The most that may be written, in bytes; none means half of the machine's memory.
        bytes: Option<NonZeroU64>,
    },
    /// `self`: into one file of the host, which has a file system inside: see [`crate::root::filestore`].
    Filestore {
        /// The file, open for reading and writing.
        file: BorrowedFd<'a>,
        /// Data that a crash of the host may cost.
        durability: Durability,
    },
    /// To a directory of the host, whose contents outlive the root.
    Directory {
        /// The directory, not `O_PATH`. It gets two directories, `upper` and `work`, if it has none.
        directory: BorrowedFd<'a>,
        /// Data that a crash of the host may cost.
        durability: Durability,
    },
    /// To a new directory on the store's disk, which is removed with its container.
    Folder {
        /// The directory, empty, not `O_PATH`.
        directory: BorrowedFd<'a>,
        /// Data that a crash of the host may cost.
        durability: Durability,
    },
}

/// Why a writable layer cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum UpperError {
    /// The kernel refused a mount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The kernel refused something else.
    #[error("cannot prepare its directories")]
    Prepare(#[from] Errno),
    /// It was used without syncing, and the host has crashed or restarted since.
    #[error(
        "its files were written without syncing, and the host has restarted since then: parts may be missing. {REMOVE}"
    )]
    Crashed,
    /// It was used without syncing, and it is not known in which run of the host.
    #[error(
        "its files were written without syncing, and its \"{BOOT}\", which says when, is gone: parts may be missing. \
         {REMOVE}"
    )]
    Unknown,
    /// The owners of its files are those of another map of ids.
    #[error(
        "its files were written {0}, and would have other owners now: use the same map again, or an empty directory"
    )]
    OtherMap(String),
    /// The directory holds other things.
    #[error("\"{0}\" in it is not a directory")]
    Obstacle(&'static str),
}

/// In the layer's directory: which start of the host the mark is of.
const BOOT: &str = "boot_id";

/// The way out. A user's layer has directories of others in the user's namespace, and one without any permission.
const REMOVE: &str = "Remove its \"upper\" and \"work\" directories to begin with an empty one, or the \"incompat\" in its \
                      \"work\" to use it as it is. Who is not root may need `unshare --user --map-auto --map-root-user rm -r`";

/// The root directory of what an overlay shows, which the overlay's own is to be like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown<'a> {
    /// A mount of the image.
    pub(crate) root: BorrowedFd<'a>,
    /// Which xattrs in it are an overlay's marks, and not the image's.
    pub(crate) marks: XattrNamespace,
}

/// A writable layer that is ready for an overlay.
#[derive(Debug)]
pub(crate) struct Layer {
    /// What it lies on. Overlayfs takes no layer from a mount that is gone already. None where a directory's mount is the
    /// host's.
    pub(crate) mount: Option<Detached>,
    upper: OwnedFd,
    work: OwnedFd,
    durability: Durability,
}

impl Layer {
    /// As an overlay takes it.
    pub(crate) fn options(&self) -> Upper<'_> {
        let (upper, work) = (self.upper.as_fd(), self.work.as_fd());
        Upper { upper, work, durability: self.durability }
    }

    pub(crate) fn directories(&self) -> [BorrowedFd<'_>; 2] {
        [self.upper.as_fd(), self.work.as_fd()]
    }

    /// The same by descriptors of another mount namespace: of `upper` and `work`, or none.
    pub(crate) fn again(&self, directories: Vec<OwnedFd>) -> Option<Self> {
        let [upper, work] = directories.try_into().ok()?;
        Some(Self { mount: None, upper, work, durability: self.durability })
    }

    /// What to do about it when the root is done with.
    pub(crate) fn into_doomed(self, writable: Writable<'_>) -> Doomed {
        match writable {
            Writable::Filestore { .. } => Doomed::of_filestore(self.upper, self.durability),
            Writable::Memory { .. } => Doomed { fate: Fate::Free, upper: Some(self.upper) },
            Writable::Folder { .. } => {
                Doomed { fate: Fate::Remove(self.durability), upper: Some(self.upper) }
            }
            Writable::None | Writable::Directory { .. } => {
                Doomed { fate: Fate::Stay, upper: Some(self.upper) }
            }
        }
    }
}

/// A writable layer that goes with its root.
#[derive(Debug, Default)]
pub struct Doomed {
    fate: Fate,
    /// As long as it is open, the layer's file system stays.
    upper: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Fate {
    /// It belongs to the caller, or there is none.
    #[default]
    Stay,
    /// Data that is not on disk yet is dropped: the layer is removed with its container.
    ShutDown(Durability),
    /// It is in memory.
    Free,
    /// It is a directory that is removed with its container, file by file.
    Remove(Durability),
}

/// A layer in memory with more than so many bytes, or files, takes longer to free than a process to start.
const FREED_AT_ONCE: (u64, u64) = (64 << 20, 1000);

/// Whether a file system in memory is large.
pub(crate) fn takes_long_to_free(file_system: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatvfs(file_system).is_ok_and(|it| {
        let bytes = it.f_blocks.saturating_sub(it.f_bfree).saturating_mul(it.f_frsize);
        let (most_bytes, most_files) = FREED_AT_ONCE;
        bytes > most_bytes || it.f_files.saturating_sub(it.f_ffree) > most_files
    })
}

impl Doomed {
    /// A file system of its own, by a directory in it.
    pub(crate) fn of_filestore(directory: OwnedFd, durability: Durability) -> Self {
        let fate = Fate::ShutDown(durability);
        Self { fate, upper: Some(directory) }
    }

    /// Returns the directory with the changes; `None` for a read-only root.
    #[must_use]
    pub fn upper(&self) -> Option<BorrowedFd<'_>> {
        self.upper.as_ref().map(|it| it.as_fd())
    }

    /// Returns whether unmounting the root takes too long to wait for.
    #[must_use]
    pub fn takes_long(&self) -> bool {
        match (self.fate, &self.upper) {
            (Fate::ShutDown(_) | Fate::Remove(_), _) => true,
            (Fate::Free, Some(upper)) => takes_long_to_free(upper.as_fd()),
            _ => false,
        }
    }

    /// Returns whether some writes are lost, because the host's disk was full or failed: readers may get zeros. `root`
    /// is the overlay. (Only for layers that are not synced; otherwise the syncing program gets an error.) Of a directory on
    /// the host's disk, the lost writes may also be those of another program: the kernel counts failures per file system.
    #[must_use]
    pub fn has_lost(&self, root: BorrowedFd<'_>) -> bool {
        let volatile = Durability::Volatile;
        if self.fate != Fate::ShutDown(volatile) && self.fate != Fate::Remove(volatile) {
            return false;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(root) = rustix::fs::openat(root, c".", flags, Mode::empty()) else { return false };
        // A volatile overlay writes nothing at this, and answers whether its upper file system has failed to.
        rustix::fs::syncfs(root).is_err()
    }

    /// Returns what reserves space on the host's disk for a filestore, ahead of its writes; `None` for other layers.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn headroom(&self, filestore: &Path) -> Result<Option<Headroom>, HeadroomError> {
        match (self.fate, &self.upper) {
            (Fate::ShutDown(durability), Some(upper)) => {
                Headroom::open(upper.as_fd(), filestore, durability).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns the size of a layer that is removed with its root, in bytes; `None` if unknown.
    #[must_use]
    pub fn written(&self) -> Option<u64> {
        match (self.fate, &self.upper) {
            (Fate::ShutDown(_) | Fate::Free, Some(upper)) => headroom::written(upper.as_fd()).ok(),
            _ => None,
        }
    }

    /// Drops unwritten data, so that unmounting need not wait for it. Programs that still use it get `EIO`.
    pub fn shut_down(self) {
        let (Fate::ShutDown(_), Some(upper)) = (self.fate, self.upper) else { return };
        if let Err(error) = kernel::files::shut_down_file_system(upper.as_fd()) {
            tracing::debug!(%error, "the file system is unmounted with all that is in it");
        }
    }

    /// Writes unwritten data to disk, so that it is there later. Unmounting need not wait for it then.
    ///
    /// # Errors
    /// An error of the kernel: some data could not be written.
    pub fn keep(self) -> Result<(), Errno> {
        match (self.fate, self.upper) {
            (Fate::ShutDown(_), Some(upper)) => rustix::fs::syncfs(upper),
            _ => Ok(()),
        }
    }
}

/// How large the empty file system is that `df` shows in the place of an image. It takes no memory.
const SHOWN: NonZeroU64 = NonZeroU64::new(1 << 20).expect("not zero");

/// An empty file system whose root directory is as the image's.
pub(crate) fn empty(image: Shown<'_>) -> Result<Detached, UpperError> {
    let options = TmpfsOptions { name: "quire-df", bytes: Some(SHOWN), inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(&mount, ".", flags, Mode::empty())?;
    copy_root(image, root.as_fd())?;
    Ok(mount)
}

/// A file system that has empty files and directories at these paths, which belong to the container's root, and nothing else.
pub(crate) fn files(paths: &[String], map: Option<&IdMap>) -> Result<Detached, UpperError> {
    let options =
        TmpfsOptions { name: "quire-places", bytes: Some(SHOWN), inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options)?;
    add_files(mount.as_fd(), paths, map)?;
    Ok(mount)
}

/// Makes empty files at these paths, and directories at those that end with a slash and on their ways. All of them belong to the
/// container's root. Existing directories keep their times.
pub(crate) fn add_files(
    mount: BorrowedFd<'_>,
    paths: &[String],
    map: Option<&IdMap>,
) -> Result<(), UpperError> {
    let owner = map.and_then(|map| map.root().ok());
    let give = |fd: BorrowedFd<'_>| match owner {
        Some((user, group)) => {
            let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
            rustix::fs::fchown(fd, Some(user), Some(group))
        }
        None => Ok(()),
    };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    for path in paths {
        let mut names: Vec<_> = path.split('/').filter(|it| !it.is_empty()).collect();
        let last = if path.ends_with('/') { None } else { names.pop() };
        let open = flags | OFlags::DIRECTORY;
        let mut here = rustix::fs::openat(mount, ".", open, Mode::empty())?;
        for name in names {
            let time = modified(here.as_fd())?;
            let is_new = match rustix::fs::mkdirat(&here, name, Mode::from_raw_mode(0o755)) {
                Ok(()) => true,
                Err(Errno::EXIST) => false,
                Err(errno) => return Err(errno.into()),
            };
            if is_new {
                set_modified(here.as_fd(), time)?;
            }
            here = rustix::fs::openat(&here, name, open, Mode::empty())?;
            if is_new {
                rustix::fs::fchmod(&here, Mode::from_raw_mode(0o755))?;
                give(here.as_fd())?;
            }
        }
        let Some(last) = last else { continue };
        let mode = Mode::from_raw_mode(0o644);
        let time = modified(here.as_fd())?;
        let file = rustix::fs::openat(&here, last, flags | OFlags::CREATE, mode)?;
        set_modified(here.as_fd(), time)?;
        rustix::fs::fchmod(&file, mode)?;
        give(file.as_fd())?;
    }
    Ok(())
}

/// Makes the layer; none for a read-only root. `image` is the image's root, whose owners are mapped if there is a map.
pub(crate) fn prepare(
    writable: Writable<'_>,
    image: Shown<'_>,
    map: Option<&IdMap>,
) -> Result<Option<Layer>, UpperError> {
    let (mount, durability) = match writable {
        Writable::None => return Ok(None),
        Writable::Memory { bytes } => {
            let inodes = bytes.and_then(crate::bundle::mounts::files_of);
            let options = TmpfsOptions { name: "quire-upper", bytes, inodes, mode: 0o700 };
            // What lies in memory has nothing to sync.
            (kernel::mount::tmpfs(&options)?, Durability::Volatile)
        }
        Writable::Filestore { file, durability } => (mount_ext4(file, durability)?, durability),
        Writable::Directory { directory, durability } => {
            return Ok(Some(prepare_directory(directory, image, durability, map)?));
        }
        Writable::Folder { directory, durability } => {
            return Ok(Some(prepare_folder(directory, image, durability)?));
        }
    };
    let (upper, work) = directories(mount.as_fd(), image)?;
    Ok(Some(Layer { mount: Some(mount), upper, work, durability }))
}

pub(crate) fn mount_ext4(
    file: BorrowedFd<'_>,
    durability: Durability,
) -> Result<Detached, MountError> {
    let options = Ext4Options { durability, direct_io: true, access: loopdev::Access::ReadWrite };
    let mount = kernel::mount::ext4(file, &options)?;
    // Without it there is as much less for others.
    if let Err(error) = filestore::reserve(mount.as_fd(), filestore::RESERVED) {
        tracing::debug!(%error, "ext4 keeps 16 MiB for itself");
    }
    Ok(mount)
}

/// A filestore with one directory in it, for something else than a root.
pub(crate) fn volume(
    file: BorrowedFd<'_>,
    durability: Durability,
    name: &str,
    mode: u32,
    (user, group): (u32, u32),
) -> Result<(Detached, OwnedFd), UpperError> {
    let mount = mount_ext4(file, durability)?;
    rustix::fs::mkdirat(&mount, name, Mode::RWXU)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(&mount, name, flags, Mode::empty())?;
    rustix::fs::fchown(&directory, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
    // After the owner, whose change clears set-id bits; and past the umask.
    rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode))?;
    Ok((mount, directory))
}

/// Makes the two directories that overlayfs wants, or takes those that are there. The root of an overlay is its upper
/// directory, so that a new one gets owner, mode, time and xattrs of the image's root.
fn directories(parent: BorrowedFd<'_>, image: Shown<'_>) -> Result<(OwnedFd, OwnedFd), UpperError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let make = |name: &'static str| {
        let is_new = match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(UpperError::Prepare(errno)),
        };
        match rustix::fs::openat(parent, name, flags, Mode::empty()) {
            Ok(directory) => Ok((directory, is_new)),
            Err(Errno::NOTDIR | Errno::LOOP) => Err(UpperError::Obstacle(name)),
            Err(errno) => Err(UpperError::Prepare(errno)),
        }
    };
    let (upper, is_new) = make("upper")?;
    let (work, _) = make("work")?;
    if is_new {
        copy_root(image, upper.as_fd())?;
    }
    Ok((upper, work))
}

fn copy_root(image: Shown<'_>, upper: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // The mount's own descriptor is O_PATH-like to xattr calls.
    let root = rustix::fs::openat(image.root, ".", flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&root)?;
    rustix::fs::fchown(upper, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    copy_xattrs(root.as_fd(), upper, image.marks)?;
    // After the owner, whose change clears set-id bits, and after the ACLs, which change the group's bits.
    rustix::fs::fchmod(upper, Mode::from_raw_mode(stat.st_mode))?;
    let time = modified(root.as_fd())?;
    rustix::fs::futimens(upper, &Timestamps { last_access: time, last_modification: time })
}

fn modified(of: BorrowedFd<'_>) -> Result<Timespec, Errno> {
    let time = rustix::fs::statx(of, "", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::MTIME)?;
    Ok(Timespec { tv_sec: time.stx_mtime.tv_sec, tv_nsec: time.stx_mtime.tv_nsec.into() })
}

fn set_modified(of: BorrowedFd<'_>, time: Timespec) -> Result<(), Errno> {
    let omitted = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    rustix::fs::futimens(of, &Timestamps { last_access: omitted, last_modification: time })
}

/// Copies all xattrs but overlayfs's own marks, which belong to the layer they are in. A mark of an overlay further inside has
/// one more prefix (`OVL_XATTR_ESCAPE_PREFIX` in Linux `fs/overlayfs/overlayfs.h`), and is the image's.
///
/// Those that the file system of `to` has no place for (`EOPNOTSUPP`) are left out: a tmpfs has `user.*` only since
/// Linux 6.6, and an image may have prefixes that no tmpfs knows. That loses an attribute of one directory, which the
/// read-only root still shows, and is no reason not to run. Any other refusal may be one of security, or of space, and
/// is an error.
fn copy_xattrs(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    marks: XattrNamespace,
) -> Result<(), Errno> {
    let mut names = vec![0_u8; 64 << 10];
    let length = match rustix::fs::flistxattr(from, &mut names[..]) {
        // A server on FUSE says so where no file has any.
        Err(Errno::OPNOTSUPP) => return Ok(()),
        listed => listed?,
    };
    let mut value = vec![0_u8; 64 << 10];
    for name in names[..length].split(|&byte| byte == 0).filter(|name| !name.is_empty()) {
        let mark = name.strip_prefix(marks.prefix().as_bytes());
        if mark.is_some_and(|it| !it.starts_with(b"overlay.")) {
            continue;
        }
        let length = rustix::fs::fgetxattr(from, name, &mut value[..])?;
        match rustix::fs::fsetxattr(to, name, &value[..length], XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => {
                tracing::debug!(name = %name.escape_ascii(), "an xattr of the image's root has no place in the writable layer");
            }
            result => result?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn marks_stay_in_their_layer() {
        if !rustix::process::geteuid().is_root() {
            testing::skipped("trusted.* need root");
            return;
        }
        let [image, upper] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let root = File::open(image.path()).unwrap();
        for name in ["trusted.overlay.", "user.overlay."] {
            for name in [format!("{name}opaque"), format!("{name}overlay.opaque")] {
                rustix::fs::fsetxattr(&root, &*name, b"y", XattrFlags::empty()).unwrap();
            }
        }
        rustix::fs::fsetxattr(&root, "user.overlayed", b"1", XattrFlags::empty()).unwrap();
        let check = |marks, expect: &[&str]| {
            let to = tempfile::tempdir_in(upper.path()).unwrap();
            let to = File::open(to.path()).unwrap();
            copy_root(Shown { root: root.as_fd(), marks }, to.as_fd()).unwrap();
            let mut names = vec![0; 4096];
            let length = rustix::fs::flistxattr(&to, &mut names[..]).unwrap();
            let mut found: Vec<_> =
                names[..length].split(|&it| it == 0).filter(|it| !it.is_empty()).collect();
            found.sort_unstable();
            assert_eq!(found, expect.iter().map(|it| it.as_bytes()).collect::<Vec<_>>());
        };
        let (trusted, user) = ("trusted.overlay.opaque", "user.overlay.opaque");
        let (inner_trusted, inner_user) =
            ("trusted.overlay.overlay.opaque", "user.overlay.overlay.opaque");
        check(XattrNamespace::Trusted, &[inner_trusted, user, inner_user, "user.overlayed"]);
        check(XattrNamespace::User, &[trusted, inner_trusted, inner_user, "user.overlayed"]);
    }

    #[test]
    fn files_are_added_without_a_trace_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let etc = folder.path().join("etc");
        std::fs::create_dir(&etc).unwrap();
        let [root, etc] = [folder.path(), &etc].map(|it| File::open(it).unwrap());
        let time = Timespec { tv_sec: 1_000_000, tv_nsec: 5 };
        for it in [&root, &etc] {
            set_modified(it.as_fd(), time).unwrap();
        }
        let paths = ["/etc/hosts", "/run/secrets/x", "/data/deep/", "/etc/"].map(str::to_owned);
        add_files(root.as_fd(), &paths, None).unwrap();
        assert!(folder.path().join("data/deep").is_dir());
        assert!(folder.path().join("etc/hosts").is_file());
        assert!(folder.path().join("run/secrets/x").is_file());
        for it in [&root, &etc] {
            assert_eq!(modified(it.as_fd()).unwrap(), time);
        }
    }

    #[test]
    fn an_xattr_without_a_place_is_left_out() {
        if !rustix::process::geteuid().is_root() {
            testing::skipped("xattrs of a root need root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let from = File::open(folder.path()).unwrap();
        rustix::fs::fsetxattr(&from, "user.quire", b"1", XattrFlags::empty()).unwrap();
        let check = |to: &str, expect| {
            let to = File::open(to).unwrap();
            assert_eq!(copy_xattrs(from.as_fd(), to.as_fd(), XattrNamespace::Trusted), expect);
        };
        // procfs has no xattrs.
        check("/proc", Ok(()));
        // A device takes no user.*, for another reason.
        check("/dev/null", Err(Errno::PERM));
    }
}
