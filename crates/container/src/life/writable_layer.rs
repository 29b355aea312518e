//! A container's writable layer, which other commands can read while the container runs, and afterwards until its
//! folder is removed.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::lease::LeaseError;
use kernel::loopdev::Access;
use kernel::mount::{Detached, Durability, Ext4Options, MountError};
use rustix::fs::{FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use store::{ContainerSnapshotDraft, ContainerSnapshotError, OperationError};

use crate::backoff::GLANCE;
use crate::fd_handoff;
use crate::folder::{FILESTORE, LAYER, UPPER, WRITABLE};
use crate::root::upper_dir::{UpperError, at_rest, last_use, open_upper};
use crate::root::{WritableChoice, WritablePlace};

/// Location of a container's writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum WritesPlace {
    /// The root is read-only.
    None,
    /// In memory.
    Memory,
    /// `self`: a file system in a file of the container's folder.
    Filestore {
        /// Whether some writes were lost; if so, the layer is removed.
        lost: bool,
    },
    /// A directory in the container's folder.
    Folder {
        /// Whether some writes were lost.
        lost: bool,
    },
    /// A directory of the host.
    Directory {
        path: PathBuf,
        /// Device number of the upper directory.
        device: u64,
        /// Inode number of the upper directory.
        inode: u64,
        /// Identifier of this use of the directory, if known.
        last_use: Option<String>,
    },
}

/// Reason why a container's changes cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeptError {
    /// The container cannot write.
    #[error("it has no writable layer: its root is read-only")]
    ReadOnly,
    /// The changes were in memory.
    #[error(
        "its writable layer was in memory, and was lost when it ended: read it while the \
        container runs, or use --writable dir"
    )]
    Memory,
    /// The disk was full or failing.
    #[error("some of its writes are lost, because the disk of the store was full or failing")]
    Lost,
    /// The folder does not record the location of the writes, or the record is invalid.
    #[error("its directory does not record the location of its writable layer")]
    Unknown,
    /// The container's process is ending, or belongs to another user.
    #[error("cannot get the descriptor of its writable layer from its process")]
    Offer,
    /// The filestore is still mounted.
    #[error("its filestore is in use, and may still change")]
    Busy,
    /// The filestore was not unmounted cleanly.
    #[error(
        "its filestore was not unmounted, because its monitor was killed while the disk failed, \
        or the host crashed: `e2fsck -f {}` may repair it", .0.display()
    )]
    Unclean(PathBuf),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// Another container is writing to the directory.
    #[error("{} is in use by another container", .0.display())]
    InUse(PathBuf),
    /// The path leads to another directory, or another container has used the directory since.
    #[error(
        "{} was written to after the container ended: it no longer contains only the container's \
        changes", .0.display()
    )]
    Other(PathBuf),
    /// The kernel refuses to mount the filestore.
    #[error("cannot mount its filestore")]
    Mount(#[from] MountError),
    /// The upper directory cannot be opened.
    #[error("cannot use its writable layer")]
    Upper(#[from] UpperError),
}

impl WritesPlace {
    /// Writes the location into the container's folder.
    pub fn save(&self, folder: &Path) -> std::io::Result<()> {
        std::fs::write(folder.join(WRITABLE), serde_json::to_vec(self)?)
    }

    /// Returns the location that is recorded in the folder, or `None` if there is no record.
    #[must_use]
    pub fn load(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(folder.join(WRITABLE)).ok()?).ok()
    }

    /// Returns the location for a directory of the host, by its path and its upper directory.
    pub fn directory(path: &Path, upper: BorrowedFd<'_>) -> std::io::Result<Self> {
        let Stat { st_dev, st_ino, .. } = rustix::fs::fstat(upper)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let last_use = last_use(rustix::fs::open(path, flags, Mode::empty())?.as_fd());
        Ok(Self::Directory { path: path.to_owned(), device: st_dev, inode: st_ino, last_use })
    }
}

/// Offers the upper directory to other processes, as long as this process holds it open.
pub fn offer(folder: &Path, upper: BorrowedFd<'_>) -> std::io::Result<()> {
    fd_handoff::offer(&folder.join(UPPER), upper, &[])
}

/// The open upper directory of a container.
#[derive(Debug)]
pub struct Changes {
    upper: OwnedFd,
    /// The copy that contains the upper directory, which is removed with this value.
    _copy: Option<ContainerSnapshotDraft>,
    /// The mount that contains the upper directory. The next field is the lock of a directory.
    _mount: Option<Detached>,
    _lock: Option<OwnedFd>,
}

impl Changes {
    /// Returns a descriptor of the upper directory.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.upper.as_fd()
    }

    /// Takes the upper directory of a running container from the process that holds it.
    pub fn of_running(folder: &Path) -> Result<Self, KeptError> {
        if WritesPlace::load(folder) == Some(WritesPlace::None) {
            return Err(KeptError::ReadOnly);
        }
        let (upper, _) = fd_handoff::take(&folder.join(UPPER)).ok_or(KeptError::Offer)?;
        let is_directory = |stat: Stat| stat.st_mode & 0o170_000 == 0o040_000;
        if !rustix::fs::fstat(&upper).is_ok_and(is_directory) {
            return Err(KeptError::Offer);
        }
        Ok(Self { upper, _copy: None, _mount: None, _lock: None })
    }

    /// Opens the upper directory in a copy.
    pub(crate) fn of_copy(copy: ContainerSnapshotDraft) -> Result<Self, ContainerSnapshotError> {
        Ok(Self { upper: copy.upper()?, _copy: Some(copy), _mount: None, _lock: None })
    }

    /// Opens the upper directory of an ended container, whose lock the caller holds.
    pub fn of_ended(folder: &Path) -> Result<Self, KeptError> {
        match WritesPlace::load(folder).ok_or(KeptError::Unknown)? {
            WritesPlace::None => Err(KeptError::ReadOnly),
            WritesPlace::Memory => Err(KeptError::Memory),
            WritesPlace::Filestore { lost: true } | WritesPlace::Folder { lost: true } => {
                Err(KeptError::Lost)
            }
            WritesPlace::Filestore { lost: false } => of_filestore(&folder.join(FILESTORE)),
            WritesPlace::Folder { lost: false } => {
                let opened = lock_directory(&folder.join(LAYER))?;
                let upper = at_rest(opened.as_fd())?;
                Ok(Self { upper, _copy: None, _mount: None, _lock: Some(opened) })
            }
            place @ WritesPlace::Directory { .. } => {
                let (opened, upper) = of_directory(place)?;
                Ok(Self { upper, _copy: None, _mount: None, _lock: Some(opened) })
            }
        }
    }
}

/// Opens and locks the directory of the host to which an ended container wrote last, and its upper directory.
fn of_directory(place: WritesPlace) -> Result<(OwnedFd, OwnedFd), KeptError> {
    let WritesPlace::Directory { path, device, inode, last_use: own } = place else {
        return Err(KeptError::Unknown);
    };
    let opened = lock_directory(&path)?;
    let upper = at_rest(opened.as_fd())?;
    let found = rustix::fs::fstat(&upper).map_err(OperationError::at("open", &path))?;
    let is_last = last_use(opened.as_fd()) == own;
    if (found.st_dev, found.st_ino) != (device, inode) || !is_last {
        return Err(KeptError::Other(path));
    }
    Ok((opened, upper))
}

/// Opens the writable layer of an ended container, which was made as `choice`, to continue with it. The caller holds
/// the container's lock.
pub(crate) fn reopen(folder: &Path, choice: &WritableChoice) -> Result<WritablePlace, KeptError> {
    let place = WritesPlace::load(folder).ok_or(KeptError::Unknown)?;
    Ok(match (place, choice) {
        (WritesPlace::None, WritableChoice::None) => WritablePlace::None,
        (WritesPlace::Memory, WritableChoice::Memory(bytes)) => WritablePlace::Memory(*bytes),
        (WritesPlace::Filestore { lost: true } | WritesPlace::Folder { lost: true }, _) => {
            return Err(KeptError::Lost);
        }
        (WritesPlace::Filestore { lost: false }, WritableChoice::Filestore(_, durability)) => {
            let file = open_filestore(&folder.join(FILESTORE), OFlags::RDWR)?;
            WritablePlace::Filestore(file.into(), *durability)
        }
        (WritesPlace::Folder { lost: false }, WritableChoice::Folder(_, durability)) => {
            WritablePlace::Kept(lock_directory(&folder.join(LAYER))?, *durability)
        }
        (place @ WritesPlace::Directory { .. }, WritableChoice::Directory(_, durability)) => {
            WritablePlace::Continued(of_directory(place)?.0, *durability)
        }
        _ => return Err(KeptError::Unknown),
    })
}

/// How long to wait for a directory's lock. A monitor that exits releases the container's lock before the
/// directory's.
const RELEASED: Duration = Duration::from_secs(1);

/// Opens and locks a directory that is not locked by another process.
fn lock_directory(path: &Path) -> Result<OwnedFd, KeptError> {
    let failed = OperationError::at("open", path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
    let since = Instant::now();
    loop {
        match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if since.elapsed() < RELEASED => std::thread::sleep(GLANCE),
            Err(Errno::WOULDBLOCK) => return Err(KeptError::InUse(path.to_owned())),
            result => return Ok(result.map(|()| opened).map_err(failed)?),
        }
    }
}

/// How long to wait for an unmount, which the kernel may finish shortly after the last process releases the mount.
const UNMOUNTED: Duration = Duration::from_secs(30);

fn of_filestore(path: &Path) -> Result<Changes, KeptError> {
    let file = open_filestore(path, OFlags::RDONLY)?;
    let durability = Durability::Durable;
    let options = Ext4Options { durability, direct_io: true, access: Access::ReadOnly };
    let mount = kernel::mount::ext4(file.as_fd(), &options)?;
    let upper = open_upper(mount.as_fd())?;
    Ok(Changes { upper, _copy: None, _mount: Some(mount), _lock: None })
}

/// Opens a filestore that is not in use.
fn open_filestore(path: &Path, access: OFlags) -> Result<File, KeptError> {
    let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(OperationError::at("open", path))?);
    let since = Instant::now();
    // Two mounts of the same file would corrupt each other. If the file system has no leases, the query fails, and the
    // file counts as unused. If the kernel refuses the query, the file counts as used.
    while matches!(
        kernel::lease::in_use(file.as_fd()),
        Ok(true) | Err(LeaseError::Forbidden { .. } | LeaseError::Descriptor { .. })
    ) {
        if since.elapsed() >= UNMOUNTED {
            return Err(KeptError::Busy);
        }
        std::thread::sleep(GLANCE);
    }
    if !is_clean(&file).map_err(OperationError::at("open", path))? {
        return Err(KeptError::Unclean(path.to_owned()));
    }
    Ok(file)
}

/// Whether an ext4 file system was unmounted cleanly. Source: Linux Documentation/filesystems/ext4/super.rst: the
/// superblock is at offset 1024, with `s_magic` at 0x38, `s_state` at 0x3A and `s_feature_incompat` at 0x60.
fn is_clean(file: &File) -> std::io::Result<bool> {
    const MAGIC: u16 = 0xef53;
    /// Only `EXT4_VALID_FS`, without `EXT4_ERROR_FS` and `EXT4_ORPHAN_FS`.
    const VALID: u16 = 1;
    /// `EXT4_FEATURE_INCOMPAT_RECOVER`: the journal must be replayed.
    const RECOVER: u32 = 4;
    let mut superblock = [0; 0x64];
    file.read_exact_at(&mut superblock, 1024)?;
    let [magic, state] =
        [0x38, 0x3a].map(|at| u16::from_le_bytes([superblock[at], superblock[at + 1]]));
    let incompatible = [0x60, 0x61, 0x62, 0x63].map(|at| superblock[at]);
    let needs_recovery = u32::from_le_bytes(incompatible) & RECOVER != 0;
    Ok(magic == MAGIC && state == VALID && !needs_recovery)
}

/// Stops writes to the filestore of an ended container that is about to be removed. Has no effect if the filestore is
/// no longer mounted.
pub fn give_up(folder: &Path) {
    // Only a file system that belongs to this container may be shut down.
    let Some(WritesPlace::Filestore { .. }) = WritesPlace::load(folder) else { return };
    let Some((upper, _)) = fd_handoff::take(&folder.join(UPPER)) else { return };
    let device = |stat: Result<Stat, Errno>| stat.ok().map(|it| it.st_dev);
    let (inside, outside) = (device(rustix::fs::fstat(&upper)), device(rustix::fs::stat(folder)));
    // Source: `linux/magic.h`, EXT4_SUPER_MAGIC.
    let is_ext4 = rustix::fs::fstatfs(&upper).is_ok_and(|it| it.f_type == 0xef53);
    if is_ext4
        && inside.is_some()
        && inside != outside
        && let Err(error) = kernel::files::shut_down_file_system(upper.as_fd())
    {
        tracing::debug!(%error, "the filestore is written back before its removal");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(WritesPlace::load(folder.path()), None);
        let directory = WritesPlace::Directory {
            path: "/a b".into(),
            device: 1,
            inode: u64::MAX,
            last_use: Some("x".to_owned()),
        };
        let lost = [WritesPlace::Filestore { lost: true }, WritesPlace::Folder { lost: true }];
        for place in [WritesPlace::None, WritesPlace::Memory, directory].into_iter().chain(lost) {
            place.save(folder.path()).unwrap();
            assert_eq!(WritesPlace::load(folder.path()), Some(place));
        }
    }

    #[test]
    fn what_is_not_there_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let check = |place: Option<WritesPlace>, expect: &str| {
            if let Some(place) = place {
                place.save(folder.path()).unwrap();
            }
            let error = Changes::of_ended(folder.path()).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        check(None, "its directory does not record");
        check(Some(WritesPlace::None), "read-only");
        check(Some(WritesPlace::Memory), "--writable dir");
        check(Some(WritesPlace::Filestore { lost: true }), "some of its writes are lost");
        check(Some(WritesPlace::Filestore { lost: false }), "cannot open");
        check(Some(WritesPlace::Folder { lost: true }), "some of its writes are lost");
        check(Some(WritesPlace::Folder { lost: false }), "cannot open");
        let path = folder.path().join("absent");
        check(
            Some(WritesPlace::Directory { path, device: 0, inode: 0, last_use: None }),
            "cannot open",
        );
        std::fs::write(folder.path().join(FILESTORE), [0; 4096]).unwrap();
        check(Some(WritesPlace::Filestore { lost: false }), "e2fsck -f");
    }
}
