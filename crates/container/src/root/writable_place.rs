//! Location of the changes to a root: the caller's choice, and the files that must be open for it.

use std::ffi::OsStr;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::mount::Durability;
use kernel::process::Who;
use kernel::quota::QuotaError;
use kernel::version::KernelVersion;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use store::{ContainerDir, ContainerError, OperationError, Store, WritableDraft};

use crate::backoff::GLANCE;
use crate::bundle::Access;
use crate::folder::LAYER;
use crate::root::filestore::{self, Backing};
use crate::root::{Space, Writable};
use crate::stored_choices::StoredDurability;

/// Location of changes that the caller chose.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WritableChoice {
    /// The root is read-only.
    None,
    /// In memory, with a size limit in bytes.
    Memory(Option<NonZeroU64>),
    /// In a file system in a file, with its size in bytes.
    Filestore(Option<NonZeroU64>, #[serde(with = "StoredDurability")] Durability),
    /// In a directory of the host.
    Directory(PathBuf, #[serde(with = "StoredDurability")] Durability),
    /// In a directory in the container's folder, which is removed with the container. The number is a size limit in
    /// bytes.
    Folder(Option<NonZeroU64>, #[serde(with = "StoredDurability")] Durability),
}

/// Location of changes, with the files that must be open while a root is made.
#[derive(Debug)]
pub enum WritablePlace {
    /// The root is read-only.
    None,
    /// In memory, with a size limit in bytes.
    Memory(Option<NonZeroU64>),
    /// In this file.
    Filestore(OwnedFd, Durability),
    /// In this directory, which is locked as long as it is open.
    Directory(OwnedFd, Durability),
    /// In this directory, which is not in the container's folder yet.
    Draft(WritableDraft, Durability),
    /// In this locked directory of the container's folder, which the container used before it ended.
    Kept(OwnedFd, Durability),
    /// In this locked directory of the host, which the container used last, before it ended.
    Continued(OwnedFd, Durability),
}

/// Reason why a location of changes cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaceError {
    /// The store's file system cannot be inspected.
    #[error(transparent)]
    Size(Errno),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The directory cannot be opened.
    #[error("cannot open \"{}\" for --writable", path.display())]
    Open { path: PathBuf, source: std::io::Error },
    /// The path is not a directory.
    #[error("--writable: \"{}\" is not a directory", .0.display())]
    NoDirectory(PathBuf),
    /// Another container uses the directory.
    #[error(
        "--writable: \"{}\" is in use by another container: stop it (see `quire ps`), or use another directory", .0.display()
    )]
    InUse(PathBuf),
    /// The container's directory cannot be limited.
    #[error("cannot use --writable dir,size= in this store: {way_out}")]
    Limit {
        /// Alternatives that work.
        way_out: &'static str,
        source: QuotaError,
    },
}

/// Error of requesting free space for a root with a writable layer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--df is for read-only roots: with a writable layer, `df` shows that layer")]
pub struct SpaceError;

/// Returns the free space that `df` shows of a root. With `wants_space`, a read-only root shows some.
///
/// # Errors
/// [`SpaceError`] if the root is writable.
pub const fn space(wants_space: bool, access: Access) -> Result<Space, SpaceError> {
    match (wants_space, access) {
        (false, _) => Ok(Space::AsIs),
        (true, Access::ReadOnly) => Ok(Space::Free),
        (true, Access::Writable) => Err(SpaceError),
    }
}

impl WritableChoice {
    /// Returns the default location for a container: a directory in its folder, if the container gets a folder in the
    /// store at `store` and the store's file system supports an overlay. Otherwise, the default is a filestore for the
    /// host's root, and memory for other users, or if a file system cannot be made.
    pub fn default_of(
        who: Who,
        store: Option<&Path>,
        search: &OsStr,
        remark: &dyn Fn(&str),
    ) -> Self {
        if store.is_some_and(suits_overlay) {
            return Self::Folder(None, Durability::Volatile);
        }
        if !who.is_host_root() {
            return Self::Memory(None);
        }
        if filestore::program(search).is_none() {
            remark(
                "mkfs.ext4 is not installed (package e2fsprogs), so the container's changes are \
                in memory: select this with `--writable memory`",
            );
            return Self::Memory(None);
        }
        if let Err(error) = kernel::loopdev::probe() {
            let why = match std::error::Error::source(&error) {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            };
            remark(&format!(
                "no loop device is available for the container's file system ({why}), so the \
                container's changes are in memory: select this with `--writable memory`"
            ));
            return Self::Memory(None);
        }
        Self::Filestore(None, Durability::Volatile)
    }

    /// Limits changes in memory without a limit to half of the container's memory limit.
    #[must_use]
    pub fn within(self, memory: Option<NonZeroU64>) -> Self {
        if self == Self::Memory(None) {
            return Self::Memory(memory.and_then(|it| NonZeroU64::new(it.get() / 2)));
        }
        self
    }

    /// Whether the root is writable.
    #[must_use]
    pub const fn access(&self) -> Access {
        match self {
            Self::None => Access::ReadOnly,
            Self::Memory(_) | Self::Filestore(..) | Self::Directory(..) | Self::Folder(..) => {
                Access::Writable
            }
        }
    }

    /// Creates the location, or opens an existing one. Programs are searched in `search`, which has the syntax of
    /// `PATH`.
    pub fn make(
        &self,
        store: &Store,
        backing: Backing,
        search: &OsStr,
    ) -> Result<WritablePlace, PlaceError> {
        Ok(match self {
            Self::None => WritablePlace::None,
            Self::Memory(size) => WritablePlace::Memory(*size),
            Self::Filestore(size, durability) => {
                let folder = store.containers.fd();
                let size = size.map_or_else(|| filestore::default_size(folder, backing), Ok);
                let size = size.map_err(PlaceError::Size)?;
                let file = filestore::make(folder, size, *durability, backing, search);
                WritablePlace::Filestore(
                    file.map_err(OperationError::of("use", "--writable self"))?,
                    *durability,
                )
            }
            Self::Directory(path, durability) => {
                let failed = |source| PlaceError::Open { path: path.clone(), source };
                // `File::open` would wait for the writer of a FIFO.
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let opened = match rustix::fs::open(path, flags, Mode::empty()) {
                    Ok(opened) => File::from(opened),
                    Err(Errno::NOTDIR) => return Err(PlaceError::NoDirectory(path.clone())),
                    Err(errno) => return Err(failed(errno.into())),
                };
                if !lock(&opened) {
                    return Err(PlaceError::InUse(path.clone()));
                }
                WritablePlace::Directory(opened.into(), *durability)
            }
            Self::Folder(size, durability) => {
                let draft = store.containers.layer();
                let draft = draft.map_err(OperationError::of(
                    "make",
                    "a directory for the container's changes",
                ))?;
                if let Some(bytes) = *size {
                    kernel::quota::limit(draft.fd(), bytes).map_err(limit_error)?;
                }
                WritablePlace::Draft(draft, *durability)
            }
        })
    }
}

impl WritablePlace {
    /// Whether the root is writable.
    #[must_use]
    pub const fn access(&self) -> Access {
        match self {
            Self::None => Access::ReadOnly,
            Self::Memory(_)
            | Self::Filestore(..)
            | Self::Directory(..)
            | Self::Draft(..)
            | Self::Kept(..)
            | Self::Continued(..) => Access::Writable,
        }
    }

    /// Moves a draft into the container's folder.
    pub fn settle(self, folder: &ContainerDir) -> Result<Self, ContainerError> {
        Ok(match self {
            Self::Draft(draft, durability) => {
                Self::Directory(draft.keep(folder, LAYER)?, durability)
            }
            other => other,
        })
    }

    /// Returns the file whose lock excludes other containers while it is open.
    #[must_use]
    pub fn into_locked(self) -> Option<OwnedFd> {
        match self {
            Self::Directory(directory, _)
            | Self::Kept(directory, _)
            | Self::Continued(directory, _) => Some(directory),
            // The lock of a draft ends with the draft.
            Self::None | Self::Memory(_) | Self::Filestore(..) | Self::Draft(..) => None,
        }
    }

    /// Returns the parameter for making a root.
    #[must_use]
    pub fn writable(&self) -> Writable<'_> {
        match self {
            Self::None => Writable::None,
            Self::Memory(bytes) => Writable::Memory { bytes: *bytes },
            Self::Filestore(file, durability) => {
                Writable::Filestore { file: file.as_fd(), durability: *durability }
            }
            Self::Directory(directory, durability) => {
                Writable::Directory { directory: directory.as_fd(), durability: *durability }
            }
            Self::Draft(draft, durability) => {
                Writable::Folder { directory: draft.fd(), durability: *durability }
            }
            Self::Kept(directory, durability) => {
                Writable::Folder { directory: directory.as_fd(), durability: *durability }
            }
            Self::Continued(directory, durability) => {
                Writable::Continued { directory: directory.as_fd(), durability: *durability }
            }
        }
    }
}

/// Adds an alternative to an error.
const fn limit_error(source: QuotaError) -> PlaceError {
    let way_out = match source {
        QuotaError::Kernel { source: Errno::PERM, .. } => {
            "only the host's root can set quotas: use memory,size=SIZE"
        }
        _ => {
            "mount the store's disk with project quotas (ext4: `tune2fs -O quota,project -Q prjquota`, then the mount option \
             prjquota; XFS: the mount option prjquota), or use self,size=SIZE (memory,size=SIZE without root)"
        }
    };
    PlaceError::Limit { way_out, source }
}

/// First Linux version whose tmpfs supports `user.*` xattrs.
pub(crate) const TMPFS_USER_XATTRS: KernelVersion = KernelVersion { major: 6, minor: 6 };

/// Whether a tmpfs supports the `user.*` xattrs by which an overlay hides directories.
pub(crate) fn memory_takes_marks() -> bool {
    KernelVersion::running().is_none_or(|it| it >= TMPFS_USER_XATTRS)
}

/// Whether the file system of a directory can be the upper layer of an overlay: it must be local and have extended
/// attributes. Network file systems and FUSE cannot be used (Linux `fs/overlayfs/super.c`, `ovl_mount_dir_check`), nor
/// can another overlay. If the directory does not exist, its nearest existing parent is tested.
#[must_use]
pub fn suits_overlay(directory: &Path) -> bool {
    // Source: `linux/magic.h`: ext4, XFS, btrfs, F2FS; and tmpfs.
    const DISKS: [i64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010];
    const TMPFS: i64 = 0x0102_1994;
    let found = directory.ancestors().find_map(|it| rustix::fs::statfs(it).ok());
    found.is_some_and(|it| match it.f_type {
        TMPFS => memory_takes_marks(),
        other => DISKS.contains(&other),
    })
}

/// How long to wait for a lock, because the monitor of an ended container may still hold it.
const PATIENCE: Duration = Duration::from_secs(3);

/// Locks the directory, and returns whether this process now holds the lock. Two overlays that write to the same
/// directory damage it, and the kernel only warns of that. Mounts of `quire mount` hold no lock, because no process
/// stays with them, and some file systems do not support locks.
fn lock(directory: &File) -> bool {
    let since = Instant::now();
    loop {
        match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if since.elapsed() >= PATIENCE => return false,
            Err(Errno::WOULDBLOCK) => std::thread::sleep(GLANCE),
            _ => return true,
        }
    }
}

#[cfg(test)]
mod tests {
    use kernel::process::UserNamespace;

    use super::*;

    /// A container gets a directory in a folder on a file system that supports an overlay. `/proc` represents a file
    /// system that does not.
    #[test]
    fn the_default_depends_on_user_and_disk() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("mkfs.ext4");
        std::fs::write(&program, "").unwrap();
        let check = |user, namespace, store: Option<&str>, expect: &WritableChoice| {
            let who = Who { user, group: 0, namespace };
            let search = folder.path().as_os_str();
            let found = WritableChoice::default_of(who, store.map(Path::new), search, &|_| {});
            assert_eq!(&found, expect, "{who:?} {store:?}");
        };
        let filestore = WritableChoice::Filestore(None, Durability::Volatile);
        for store in [None, Some("/proc"), Some("/proc/absent/store")] {
            check(0, UserNamespace::Initial, store, &filestore);
            check(0, UserNamespace::Other, store, &WritableChoice::Memory(None));
            check(1000, UserNamespace::Initial, store, &WritableChoice::Memory(None));
        }
        let target = env!("CARGO_MANIFEST_DIR");
        if !suits_overlay(Path::new(target)) {
            testing::skipped("the disk of the sources takes no overlay");
            return;
        }
        let folder = WritableChoice::Folder(None, Durability::Volatile);
        for store in [Some(target.to_owned()), Some(format!("{target}/absent/store"))] {
            check(0, UserNamespace::Initial, store.as_deref(), &folder);
            check(1000, UserNamespace::Other, store.as_deref(), &folder);
        }
    }
}
