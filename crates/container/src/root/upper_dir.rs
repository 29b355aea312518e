//! Writable layers: where the changes to a root are stored.

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
use store::OperationError;

use crate::bundle::userns::IdMap;
use crate::root::filestore;
use crate::root::headroom::{self, Headroom};

pub(crate) use directory::{at_rest, last_use, open_upper, settle};
use directory::{check_map, note_use, prepare_used, remove_mark};

/// Location of changes. The kinds have gVisor's names (`--overlay2`).
#[derive(Debug, Clone, Copy)]
pub enum Writable<'a> {
    /// The root is read-only.
    None,
    /// In memory, until the root is unmounted.
    Memory {
        /// Size limit in bytes; `None` means half of the machine's memory.
        bytes: Option<NonZeroU64>,
    },
    /// `self`: the layer is in a file of the host that contains a file system; see [`crate::root::filestore`].
    Filestore {
        /// The file, open for reading and writing.
        file: BorrowedFd<'a>,
        /// Whether a crash of the host may lose data.
        durability: Durability,
    },
    /// In a directory of the host, whose contents outlive the root.
    Directory {
        /// The directory, not `O_PATH`. The subdirectories `upper` and `work` are created in it if they do not exist.
        directory: BorrowedFd<'a>,
        /// Whether a crash of the host may lose data.
        durability: Durability,
    },
    /// In a directory of the host, as [`Directory`](Self::Directory), which the same container used last, before it
    /// ended.
    Continued {
        /// The directory, not `O_PATH`.
        directory: BorrowedFd<'a>,
        /// Whether a crash of the host may lose data.
        durability: Durability,
    },
    /// In a directory on the store's disk, which is removed with its container.
    Folder {
        /// The directory, not `O_PATH`. It is empty, or the same container used it before it ended.
        directory: BorrowedFd<'a>,
        /// Whether a crash of the host may lose data.
        durability: Durability,
    },
}

/// Reason why a writable layer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UpperError {
    /// The kernel refused a mount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The kernel refused another operation.
    #[error("cannot prepare its directories")]
    Prepare(#[from] Errno),
    /// The layer was used without syncing, and the host has crashed or restarted since.
    #[error(
        "its files were written without syncing, and the host has restarted since then: data may \
        be missing. {REMOVE}"
    )]
    Crashed,
    /// The layer was used without syncing, and the boot of that use is unknown.
    #[error(
        "its files were written without syncing, and the record of that boot, \"{BOOT}\", is \
        missing: data may be missing. {REMOVE}"
    )]
    Unknown,
    /// The owners of the layer's files belong to another map of ids.
    #[error(
        "its files were written {0}, and would now have other owners: use the same map again, or \
        an empty directory"
    )]
    OtherMap(String),
    /// The directory contains other files.
    #[error("\"{0}\" in it is not a directory")]
    Obstacle(&'static str),
}

/// File in the layer's directory with the id of the boot to which the mark belongs.
const BOOT: &str = "boot_id";

/// Remedy in messages. A user's layer has directories of other users of the user's namespace, and one without any
/// permission.
const REMOVE: &str = "Remove its \"upper\" and \"work\" directories to begin with an empty one, \
    or the \"incompat\" in its \"work\" to use it as it is. Without root, you may need `unshare \
    --user --map-auto --map-root-user rm -r`";

/// The root directory below an overlay, from which the overlay's own root directory is copied.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown<'a> {
    /// Mount of the image.
    pub(crate) root: BorrowedFd<'a>,
    /// Namespace of the xattrs that are an overlay's marks instead of the image's own.
    pub(crate) marks: XattrNamespace,
}

/// A writable layer that is ready for an overlay.
#[derive(Debug)]
pub(crate) struct WritableLayer {
    /// Mount that contains the layer, which must exist because overlayfs accepts no layer of a removed mount. `None`
    /// if it is the host's own mount.
    pub(crate) mount: Option<Detached>,
    upper: OwnedFd,
    work: OwnedFd,
    durability: Durability,
}

impl WritableLayer {
    /// Returns the parameters for an overlay.
    pub(crate) fn options(&self) -> Upper<'_> {
        let (upper, work) = (self.upper.as_fd(), self.work.as_fd());
        Upper { upper, work, durability: self.durability }
    }

    pub(crate) fn directories(&self) -> [BorrowedFd<'_>; 2] {
        [self.upper.as_fd(), self.work.as_fd()]
    }

    /// Returns the same layer with descriptors of `upper` and `work` in another mount namespace; `None` if there are
    /// not exactly two descriptors.
    pub(crate) fn again(&self, directories: Vec<OwnedFd>) -> Option<Self> {
        let [upper, work] = directories.try_into().ok()?;
        Some(Self { mount: None, upper, work, durability: self.durability })
    }

    /// Returns the action for the end of the root.
    pub(crate) fn into_doomed(self, writable: Writable<'_>) -> Doomed {
        match writable {
            Writable::Filestore { .. } => Doomed::of_filestore(self.upper, self.durability),
            Writable::Memory { .. } => Doomed { fate: Fate::Free, upper: Some(self.upper) },
            Writable::Folder { .. } => {
                Doomed { fate: Fate::Remove(self.durability), upper: Some(self.upper) }
            }
            Writable::None | Writable::Directory { .. } | Writable::Continued { .. } => {
                Doomed { fate: Fate::Stay, upper: Some(self.upper) }
            }
        }
    }
}

/// Action on a writable layer when its root is no longer needed.
#[derive(Debug, Default)]
pub struct Doomed {
    fate: Fate,
    /// Keeps the layer's file system mounted as long as this descriptor is open.
    upper: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Fate {
    /// The layer belongs to the caller, or there is no layer.
    #[default]
    Stay,
    /// Unwritten data is dropped, because the layer is removed with its container.
    ShutDown(Durability),
    /// The layer is in memory.
    Free,
    /// The layer is a directory that is removed with its container, file by file.
    Remove(Durability),
}

/// Maximum number of bytes and files of a layer in memory that is freed in the foreground. Freeing more takes longer
/// than starting a process.
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
    /// Returns the action for a filestore. `directory` is a directory in it.
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

    /// Returns whether some writes are lost because the host's disk was full or failed, so that readers may get
    /// zeros. `root` is the overlay. (Only for layers that are not synced; otherwise the syncing program gets an
    /// error.) For a directory on the host's disk, the lost writes may also be those of another program, because the
    /// kernel counts failures per file system.
    #[must_use]
    pub fn has_lost(&self, root: BorrowedFd<'_>) -> bool {
        let volatile = Durability::Volatile;
        if self.fate != Fate::ShutDown(volatile) && self.fate != Fate::Remove(volatile) {
            return false;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(root) = rustix::fs::openat(root, c".", flags, Mode::empty()) else { return false };
        // A volatile overlay writes no data for this call, but returns an error if its upper file system has failed
        // to write.
        rustix::fs::syncfs(root).is_err()
    }

    /// Returns the reserve of disk space for a filestore; `None` for other layers.
    pub fn headroom(&self, filestore: &Path) -> Result<Option<Headroom>, OperationError> {
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

    /// Drops unwritten data, so that unmounting need not wait for it. Programs that still use the layer get `EIO`.
    pub fn shut_down(self) {
        let (Fate::ShutDown(_), Some(upper)) = (self.fate, self.upper) else { return };
        if let Err(error) = kernel::files::shut_down_file_system(upper.as_fd()) {
            tracing::debug!(%error, "cannot shut down the file system: unmounting writes all its data back");
        }
    }

    /// Writes unwritten data to the disk, in order to keep it. After that, unmounting does not have to wait for it.
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

/// Size of the empty file system that `df` shows instead of an image, in bytes. It takes no memory.
const SHOWN: NonZeroU64 = NonZeroU64::new(1 << 20).expect("not zero");

/// Returns an empty file system whose root directory is a copy of the image's.
pub(crate) fn empty(image: Shown<'_>) -> Result<Detached, UpperError> {
    let options = TmpfsOptions { name: "quire-df", bytes: Some(SHOWN), inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(&mount, ".", flags, Mode::empty())?;
    copy_root(image, root.as_fd())?;
    Ok(mount)
}

/// Returns a file system that contains only empty files and directories at these paths, which belong to the
/// container's root.
pub(crate) fn files(paths: &[String], map: Option<&IdMap>) -> Result<Detached, UpperError> {
    let options =
        TmpfsOptions { name: "quire-places", bytes: Some(SHOWN), inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options)?;
    add_files(mount.as_fd(), paths, map)?;
    Ok(mount)
}

/// Creates empty files at these paths, and directories at those that end with a slash, with all parent directories.
/// All of them belong to the container's root. Existing directories keep their times.
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

/// Prepares the layer; `None` for a read-only root. `image` is the image's root, with mapped owners if there is a
/// map.
pub(crate) fn prepare(
    writable: Writable<'_>,
    image: Shown<'_>,
    map: Option<&IdMap>,
) -> Result<Option<WritableLayer>, UpperError> {
    let (mount, durability) = match writable {
        Writable::None => return Ok(None),
        Writable::Memory { bytes } => {
            let inodes = bytes.and_then(crate::bundle::mounts::files_of);
            let options = TmpfsOptions { name: "quire-upper", bytes, inodes, mode: 0o700 };
            // Data in memory is never synced.
            (kernel::mount::tmpfs(&options)?, Durability::Volatile)
        }
        Writable::Filestore { file, durability } => {
            let mount = mount_ext4(file, durability)?;
            // A file system that was used before was unmounted cleanly, with all its data.
            remove_mark(mount.as_fd())?;
            (mount, durability)
        }
        Writable::Directory { directory, durability } => {
            check_map(directory, map)?;
            let layer = prepare_used(directory, image, durability)?;
            note_use(directory)?;
            return Ok(Some(layer));
        }
        Writable::Continued { directory, durability } => {
            check_map(directory, map)?;
            return Ok(Some(prepare_used(directory, image, durability)?));
        }
        Writable::Folder { directory, durability } => {
            return Ok(Some(prepare_used(directory, image, durability)?));
        }
    };
    let (upper, work) = directories(mount.as_fd(), image)?;
    Ok(Some(WritableLayer { mount: Some(mount), upper, work, durability }))
}

pub(crate) fn mount_ext4(
    file: BorrowedFd<'_>,
    durability: Durability,
) -> Result<Detached, MountError> {
    let options = Ext4Options { durability, direct_io: true, access: loopdev::Access::ReadWrite };
    let mount = kernel::mount::ext4(file, &options)?;
    // If this fails, less space is available for files.
    if let Err(error) = filestore::reserve(mount.as_fd(), filestore::RESERVED) {
        tracing::debug!(%error, "ext4 keeps 16 MiB for itself");
    }
    Ok(mount)
}

/// Mounts a filestore with one directory in it, for other uses than a root.
pub(crate) fn volume(
    file: BorrowedFd<'_>,
    durability: Durability,
    name: &str,
    mode: u32,
    user: u32,
    group: u32,
) -> Result<(Detached, OwnedFd), UpperError> {
    let mount = mount_ext4(file, durability)?;
    rustix::fs::mkdirat(&mount, name, Mode::RWXU)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(&mount, name, flags, Mode::empty())?;
    rustix::fs::fchown(&directory, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
    // The mode is set after the owner, because changing the owner clears the set-id bits. It is set explicitly,
    // because the umask applies only at the creation.
    rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode))?;
    Ok((mount, directory))
}

/// Creates the two directories that overlayfs needs, or opens existing ones. The root of an overlay is its upper
/// directory, so a new one gets the owner, mode, time and xattrs of the image's root.
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
    let (work, _) = make("work")?;
    let (upper, is_new) = make("upper")?;
    if is_new && let Err(errno) = copy_root(image, upper.as_fd()) {
        // Otherwise the next start would take the directory for a used one, whose owner, mode and xattrs are right.
        let _left = rustix::fs::unlinkat(parent, "upper", AtFlags::REMOVEDIR);
        return Err(errno.into());
    }
    Ok((upper, work))
}

fn copy_root(image: Shown<'_>, upper: BorrowedFd<'_>) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // xattr calls treat the mount's own descriptor like an `O_PATH` one.
    let root = rustix::fs::openat(image.root, ".", flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&root)?;
    rustix::fs::fchown(upper, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
    copy_xattrs(root.as_fd(), upper, image.marks)?;
    // The mode is set after the owner, because changing the owner clears the set-id bits, and after the ACLs, because
    // these change the group's bits.
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

/// Copies all xattrs except overlayfs's own marks, which belong to their layer. A mark of a nested overlay has an
/// additional prefix (`OVL_XATTR_ESCAPE_PREFIX` in Linux `fs/overlayfs/overlayfs.h`), and belongs to the image.
///
/// xattrs that the file system of `to` does not support (`EOPNOTSUPP`) are left out: a tmpfs has `user.*` only since
/// Linux 6.6, and an image may have prefixes that no tmpfs supports. Then one directory loses an attribute, which the
/// read-only root still shows. This must not prevent a start. All other errors may concern security or space, so they
/// are returned.
fn copy_xattrs(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    marks: XattrNamespace,
) -> Result<(), Errno> {
    let mut names = vec![0_u8; 64 << 10];
    let length = match rustix::fs::flistxattr(from, &mut names[..]) {
        // A FUSE server returns this if no file has xattrs.
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
                tracing::debug!(name = %name.escape_ascii(), "the writable layer does not support this xattr");
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

    /// An upper directory that exists is used as it is.
    #[test]
    fn a_failed_start_leaves_no_root_directory() {
        let folder = tempfile::tempdir().unwrap();
        let [image, parent] = ["image", "parent"].map(|name| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            File::open(path).unwrap()
        });
        rustix::fs::fchmod(&image, Mode::from_raw_mode(0o711)).unwrap();
        let no_directory = File::create(folder.path().join("file")).unwrap();
        let upper = |root: &File| {
            let shown = Shown { root: root.as_fd(), marks: XattrNamespace::Trusted };
            directories(parent.as_fd(), shown)
        };
        assert!(matches!(upper(&no_directory), Err(UpperError::Prepare(Errno::NOTDIR))));
        let (made, _) = upper(&image).unwrap();
        assert_eq!(rustix::fs::fstat(&made).unwrap().st_mode & 0o7777, 0o711);
        // One that was used keeps its mode.
        let (again, _) = upper(&no_directory).unwrap();
        assert_eq!(rustix::fs::fstat(&again).unwrap().st_mode & 0o7777, 0o711);
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
        // procfs does not support xattrs.
        check("/proc", Ok(()));
        // A device cannot have `user.*` xattrs, which results in a different error.
        check("/dev/null", Err(Errno::PERM));
    }
}
