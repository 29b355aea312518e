//! Lazy devices: devices whose bytes are not all downloaded or verified.
//!
//! `lazy/ID` is a device, and `lazy/ID.state` its state. The files of its index are in the same directory.
//! `docs/format/object-store.md`, "Lazy devices", describes the layout.

pub(crate) mod index;
pub(crate) mod publish;
pub(crate) mod readers;

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::{Algorithm, DeviceId, Hasher};
use rustix::fs::{Mode, Stat};
use serde::{Deserialize, Serialize};

use index::LazyIndexDamage;

use super::item::StoreItem;
use super::lazy_device_file::LazyDeviceFile;
use super::{Checked, LateDirectory, Listing, is_in_use};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::{Directory, DiskError, PlacedFile, Renamed, length, on_disk};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::{Tmp, Workspace};

/// The directory, which is created with the first lazy device.
pub(crate) const LAZY: &str = "lazy";

/// Mode of a device that is being filled.
const FILLED: Mode = Mode::RUSR.union(Mode::WUSR);

/// Maximum time for which a forked child of another thread holds an inherited lock, from its fork to its exec.
const FORK: Duration = Duration::from_millis(100);

/// Locks a device's file, unless another process holds the lock.
fn lock_soon(file: &PlacedFile) -> Result<bool, DiskError> {
    let begun = Instant::now();
    while !file.try_lock()? {
        if begun.elapsed() >= FORK {
            return Ok(false);
        }
        thread::sleep(FORK / 50);
    }
    Ok(true)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LazyDeviceState {
    /// The bytes are not verified: each may be present or not, right or wrong.
    Partial,
    /// All bytes are present and synced, and match the id.
    Sealed,
    /// All bytes were present but had another digest, or the disk has lost some. The device is no longer filled or
    /// used.
    Condemned,
}

/// State and size of a lazy device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LazyDeviceInfo {
    pub state: LazyDeviceState,
    /// Length in bytes.
    pub bytes: u64,
    /// Bytes on disk.
    pub on_disk: u64,
}

/// The state as written.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    /// Id of the device, to detect renamed files.
    device: String,
    bytes: u64,
    state: LazyDeviceState,
}

/// An error while a lazy device is made, read, filled or sealed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyDeviceError {
    /// The id is not a SHA-256 digest.
    #[error("{0} is not a device id: device ids are sha256")]
    Algorithm(DeviceId),
    #[error("lazy device {0} already exists")]
    Exists(DeviceId),
    /// The device is sealed or condemned, so it cannot be filled.
    #[error("cannot fill lazy device {device}: its state is {state:?}")]
    Ended { device: DeviceId, state: LazyDeviceState },
    /// Another file has the device's name, or no file has it.
    #[error("lazy device {0} was removed or replaced while it was filled")]
    Replaced(DeviceId),
    /// The caller cancelled the operation.
    #[error("interrupted")]
    Cancelled,
    /// A write beyond the end of the device.
    #[error("cannot write up to byte {end} of lazy device {device}: it has {bytes} bytes")]
    Outside {
        device: DeviceId,
        /// Length of the device in bytes.
        bytes: u64,
        /// End of the write, as an offset in bytes.
        end: u64,
    },
    /// The bytes do not match the device's id, so the device is condemned.
    #[error("lazy device {expected} is condemned: its digest is {actual}")]
    Mismatch {
        expected: Box<DeviceId>,
        /// Digest of the bytes.
        actual: Box<DeviceId>,
    },
    /// The disk has lost or changed bytes of the device, so the device is condemned.
    #[error("lazy device {0} is condemned: the disk lost data that was written to it")]
    Lost(DeviceId),
    /// The file has another length than its state records.
    #[error("lazy device {device} is damaged: it has {actual} bytes, not {expected}")]
    Length {
        device: DeviceId,
        /// Length in bytes in the state.
        expected: u64,
        /// Length of the file in bytes.
        actual: u64,
    },
    /// The state cannot be read.
    #[error("the state of lazy device {device} is damaged")]
    State { device: DeviceId, source: RecordError },
    /// The state names another device.
    #[error("the state of lazy device {device} is damaged: it names device {}", says.escape_debug())]
    Wrong {
        device: DeviceId,
        /// Device id in the state.
        says: String,
    },
    #[error("lazy device {0} has no state file")]
    NoState(DeviceId),
    /// The device's index cannot be used.
    #[error(
        "the index of device {device} is damaged: `quire index NAME`, or for a lazy image `quire \
        pull --lazy NAME`, replaces it"
    )]
    Index { device: DeviceId, source: LazyIndexDamage },
    /// Two indexes have different digests for the same device.
    #[error(
        "the store has an index of device {0} with other digests, and one of the two indexes is \
        wrong: pull the image without --lazy"
    )]
    OtherIndex(DeviceId),
    /// `gc` freed parts of the device that no image needed.
    #[error(
        "the store has device {0} without the parts that gc freed: pull the image without --lazy"
    )]
    Trimmed(DeviceId),
    /// The bytes of the device did not match its id.
    #[error("lazy device {0} is condemned: `quire fsck --repair` removes it")]
    Condemned(DeviceId),
    /// The device has another length than its index records.
    #[error("lazy device {device} has {actual} bytes, but its index states {expected}")]
    Indexed {
        device: DeviceId,
        /// Length in bytes in the index.
        expected: u64,
        /// Length of the file in bytes.
        actual: u64,
    },
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(std::path::PathBuf),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// The directory `lazy/`, with devices that are filled on demand.
#[derive(Debug)]
pub struct LazyDeviceShelf {
    pub(crate) directory: LateDirectory,
    tmp: Arc<Tmp>,
}

impl LazyDeviceShelf {
    pub(crate) fn new(root: &Arc<Directory>, tmp: &Arc<Tmp>) -> Self {
        let directory = LateDirectory::new(Arc::clone(root), LAZY);
        Self { directory, tmp: Arc::clone(tmp) }
    }

    pub(crate) fn list(&self) -> Result<Listing<LazyDeviceFile>, DiskError> {
        match self.directory.get()? {
            Some(shelf) => Listing::read(shelf, |it| LazyDeviceFile::parse(it.text()?)),
            None => Ok(Listing { names: Vec::new(), strays: Vec::new() }),
        }
    }

    /// Returns the state and size of a device, if it exists.
    ///
    /// # Errors
    /// [`LazyDeviceError`] if the state or the length is wrong.
    pub fn stat(&self, id: &DeviceId) -> Result<Option<LazyDeviceInfo>, LazyDeviceError> {
        Ok(self.look(id)?.map(|it| it.1))
    }

    /// Returns the sealed devices. Devices that cannot be inspected are skipped.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be listed.
    pub fn sealed(&self) -> Result<Vec<DeviceId>, DiskError> {
        let mut sealed = Vec::new();
        for file in self.list()?.names {
            let LazyDeviceFile::Device(id) = file else { continue };
            if matches!(self.stat(&id), Ok(Some(it)) if it.state == LazyDeviceState::Sealed) {
                sealed.push(id);
            }
        }
        Ok(sealed)
    }

    /// Opens a device for reading. Only the bytes of a sealed device are verified.
    ///
    /// # Errors
    /// As [`stat`](Self::stat).
    pub fn open(&self, id: &DeviceId) -> Result<Option<(File, LazyDeviceInfo)>, LazyDeviceError> {
        self.look(id)
    }

    fn look(&self, id: &DeviceId) -> Result<Option<(File, LazyDeviceInfo)>, LazyDeviceError> {
        let Some(shelf) = self.directory.get()? else { return Ok(None) };
        let Some((file, stat)) = shelf.read(LazyDeviceFile::Device(*id).file_name())? else {
            return Ok(None);
        };
        let info = Self::info(shelf, id, &stat)?;
        Ok(Some((file, info)))
    }

    /// Reads the state of the device with this metadata.
    fn info(
        shelf: &Directory,
        id: &DeviceId,
        stat: &Stat,
    ) -> Result<LazyDeviceInfo, LazyDeviceError> {
        let bytes = shelf.read_all(LazyDeviceFile::State(*id).file_name(), RECORD_MAX)?;
        let bytes = bytes.ok_or(LazyDeviceError::NoState(*id))?;
        let raw: Raw = record::decode(&bytes)
            .map_err(|source| LazyDeviceError::State { device: *id, source })?;
        if raw.device != id.to_string() {
            return Err(LazyDeviceError::Wrong { device: *id, says: raw.device });
        }
        if length(stat) != raw.bytes {
            let (expected, actual) = (raw.bytes, length(stat));
            return Err(LazyDeviceError::Length { device: *id, expected, actual });
        }
        Ok(LazyDeviceInfo { state: raw.state, bytes: raw.bytes, on_disk: on_disk(stat) })
    }

    /// Opens a partial device for reading and writing, and locks it for its filler. Returns `None` if the device does
    /// not exist, or another process fills it. The caller holds the store's lock.
    pub(crate) fn open_to_fill(
        &self,
        id: &DeviceId,
    ) -> Result<Option<(PlacedFile, u64)>, LazyDeviceError> {
        let Some(shelf) = self.directory.get()? else { return Ok(None) };
        let name = LazyDeviceFile::Device(*id).file_name();
        loop {
            let Some(locked) = shelf.placed(&name)? else { return Ok(None) };
            if !lock_soon(&locked)? {
                return Ok(None);
            }
            // The file was removed or replaced between opening and locking it.
            if !shelf.is_placed(&name, &locked)? {
                continue;
            }
            let stat = locked.stat()?;
            let info = Self::info(shelf, id, &stat)?;
            if info.state != LazyDeviceState::Partial {
                return Err(LazyDeviceError::Ended { device: *id, state: info.state });
            }
            // A crash during sealing leaves another mode.
            if !Mode::from_raw_mode(stat.st_mode).contains(FILLED) {
                locked.set_mode(FILLED)?;
            }
            let Some(file) = shelf.placed_to_write(&name)? else { continue };
            if !file.is(&locked)? {
                continue;
            }
            // The file that stays open needs the lock. If another process takes the lock in between, that process
            // fills the device.
            drop(locked);
            return Ok(lock_soon(&file)?.then_some((file, info.bytes)));
        }
    }

    /// Takes over the open file of a filler that has ended. The caller holds the store's lock.
    pub(crate) fn adopt(
        &self,
        id: &DeviceId,
        file: File,
    ) -> Result<Option<(PlacedFile, u64)>, LazyDeviceError> {
        let Some(shelf) = self.directory.get()? else { return Ok(None) };
        let name = LazyDeviceFile::Device(*id).file_name();
        let file = shelf.adopted(&name, file);
        if !shelf.is_placed(&name, &file)? || !file.try_lock()? {
            return Ok(None);
        }
        let info = Self::info(shelf, id, &file.stat()?)?;
        match info.state {
            LazyDeviceState::Partial => Ok(Some((file, info.bytes))),
            state => Err(LazyDeviceError::Ended { device: *id, state }),
        }
    }

    /// Records the state of a device, if the file still has its name. The caller holds the store's lock.
    pub(crate) fn note(
        &self,
        id: &DeviceId,
        file: &PlacedFile,
        bytes: u64,
        state: LazyDeviceState,
    ) -> Result<(), LazyDeviceError> {
        let shelf = self.directory.existing()?;
        if !shelf.is_placed(&LazyDeviceFile::Device(*id).file_name(), file)? {
            return Err(LazyDeviceError::Replaced(*id));
        }
        let name = LazyDeviceFile::State(*id).file_name();
        Ok(self.tmp.replace(shelf, name, &encode(id, bytes, state))?)
    }

    /// Creates an empty, sparse device. The directory exists, and the caller holds the store's lock.
    pub(crate) fn publish(&self, id: &DeviceId, bytes: u64) -> Result<(), LazyDeviceError> {
        let shelf = self.directory.existing()?;
        let work = Workspace::make(&self.tmp)?;
        let (device, state) = (LazyDeviceFile::Device(*id), LazyDeviceFile::State(*id));
        // The lock needs a separate descriptor, because flock belongs to the open file description.
        let alone = shelf.open(".")?;
        alone.lock()?;
        if shelf.stat(device.file_name())?.is_some() {
            return Err(LazyDeviceError::Exists(*id));
        }
        work.directory.create_lazy_device("device", bytes)?;
        work.directory.sync_file("device")?;
        // Replaces a state file that may be left from an attempt that crashed.
        self.tmp.replace(shelf, state.file_name(), &encode(id, bytes, LazyDeviceState::Partial))?;
        match work.directory.rename_new("device", shelf, device.file_name())? {
            Renamed::Now => {}
            Renamed::Taken => return Err(LazyDeviceError::Exists(*id)),
        }
        shelf.sync()?;
        Ok(work.remove()?)
    }

    /// Whether a mount or a process has the device open. If that cannot be determined, `true`.
    pub(crate) fn is_in_use(&self, id: &DeviceId) -> Result<bool, DiskError> {
        let name = LazyDeviceFile::Device(*id).file_name();
        Ok(self.directory.get()?.is_some_and(|shelf| is_in_use(shelf, &name)))
    }

    /// Returns the files of unneeded devices, and of devices that a crash left incomplete. The index of a device that
    /// is complete in `data/` is kept. An index that came with a manifest is removed with the manifest, unless a
    /// process has the device open, possibly for the manifest's image.
    pub(crate) fn garbage(
        &self,
        is_needed: impl Fn(&DeviceId) -> bool,
        is_complete: impl Fn(&DeviceId) -> bool,
        is_manifest: impl Fn(&Digest) -> bool,
    ) -> Result<Vec<StoreItem>, DiskError> {
        let files = self.list()?.names;
        let (mut there, mut unneeded) = (BTreeSet::new(), BTreeSet::new());
        let (mut heads, mut used) = (BTreeSet::new(), BTreeSet::new());
        for file in &files {
            if let LazyDeviceFile::Index(id) | LazyDeviceFile::ClaimedIndex(id, _) = file {
                heads.insert((*id, file.claimed_by().copied()));
            }
            if let LazyDeviceFile::ClaimedIndex(id, manifest) = file
                && !is_manifest(manifest)
                && !used.contains(id)
                && self.is_in_use(id)?
            {
                used.insert(*id);
            }
            let LazyDeviceFile::Device(id) = file else { continue };
            there.insert(*id);
            // The result is used for both files of the device, because a process may close the device at any moment.
            if !is_needed(id) && !self.is_in_use(id)? {
                unneeded.insert(*id);
            }
        }
        let is_kept = |id: &DeviceId| there.contains(id) && !unneeded.contains(id);
        let is_filled = |id: &DeviceId| is_kept(id) || is_complete(id);
        let is_claimed = |id: &DeviceId, it: &Digest| is_manifest(it) || used.contains(id);
        let garbage = files.into_iter().filter(|file| match file {
            LazyDeviceFile::Device(id) | LazyDeviceFile::State(id) => !is_kept(id),
            LazyDeviceFile::Index(id) => !is_filled(id),
            LazyDeviceFile::Windows(id) => !heads.contains(&(*id, None)) || !is_filled(id),
            LazyDeviceFile::ClaimedIndex(id, it) => !is_filled(id) || !is_claimed(id, it),
            LazyDeviceFile::ClaimedWindows(id, it) | LazyDeviceFile::WindowsDigest(id, it) => {
                !heads.contains(&(*id, Some(*it))) || !is_filled(id) || !is_claimed(id, it)
            }
        });
        Ok(garbage.map(StoreItem::LazyDevice).collect())
    }

    /// Removes files. Each device is removed durably before its state, which identifies the device, and each head
    /// before its windows.
    pub(crate) fn remove(&self, files: &[LazyDeviceFile]) -> Result<(), DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(()) };
        let (first, rest): (Vec<&LazyDeviceFile>, Vec<&LazyDeviceFile>) =
            files.iter().partition(|it| it.goes_before_others());
        for file in first {
            shelf.unlink_sealed(file.file_name())?;
        }
        if !files.is_empty() {
            // This includes files that another process removed before it was killed.
            shelf.sync()?;
        }
        for file in rest {
            shelf.unlink_sealed(file.file_name())?;
        }
        Ok(())
    }

    /// Checks a device, and returns the damage. A sealed device is hashed.
    pub(crate) fn damage(&self, id: &DeviceId) -> Result<Option<String>, FsckError> {
        let (file, info) = match check_error::found(self.look(id))? {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(None),
            Err(why) => return Ok(Some(why)),
        };
        match info.state {
            LazyDeviceState::Partial => return Ok(None),
            LazyDeviceState::Condemned => return Ok(Some("it is condemned".to_owned())),
            LazyDeviceState::Sealed => {}
        }
        let hashed = hash(&file, &AtomicBool::new(false));
        Ok(match check_error::found(hashed)? {
            Ok(Some(actual)) if actual == *id => None,
            // `None` means that hashing was cancelled, which does not happen here.
            Ok(None) => None,
            Ok(Some(actual)) => Some(format!("its digest is {actual}")),
            Err(why) => Some(why),
        })
    }

    /// As [`damage`](Self::damage), for a device that images need: the device must have the length that the images
    /// state. If bytes are missing, a filler or an index must be able to provide them.
    pub(crate) fn lack(
        &self,
        id: &DeviceId,
        stated: impl IntoIterator<Item = u64>,
    ) -> Result<Option<String>, FsckError> {
        if let Some(why) = self.damage(id)? {
            return Ok(Some(why));
        }
        let info = match check_error::found(self.stat(id))? {
            Ok(Some(info)) => info,
            Ok(None) => return Ok(None),
            Err(why) => return Ok(Some(why)),
        };
        let actual = info.bytes;
        if let Some(expected) = stated.into_iter().find(|it| *it != actual) {
            return Ok(Some(format!("it has {actual} bytes, not {expected} as an image states")));
        }
        let is_lacking = info.state == LazyDeviceState::Partial
            && !self.is_in_use(id)?
            && !self.has_sound_index(id)?;
        Ok(is_lacking.then(|| "its data may be incomplete".to_owned()))
    }

    /// Whether bytes of a device may be missing.
    pub(crate) fn is_partial(&self, id: &DeviceId) -> Result<bool, FsckError> {
        let info = check_error::found(self.stat(id))?;
        Ok(matches!(info, Ok(Some(LazyDeviceInfo { state: LazyDeviceState::Partial, .. }))))
    }

    /// Checks every index, and every device except those in `but`. Also returns the listing with its strays.
    pub(crate) fn check(
        &self,
        but: &BTreeSet<DeviceId>,
    ) -> Result<(Checked, Listing<LazyDeviceFile>), FsckError> {
        let (mut checked, listed) = (Checked::default(), self.list()?);
        for file in &listed.names {
            match file {
                LazyDeviceFile::Device(id) if !but.contains(id) => {
                    checked.add(StoreItem::LazyDevice(*file), self.damage(id)?);
                }
                LazyDeviceFile::Index(id) | LazyDeviceFile::ClaimedIndex(id, _) => {
                    let damage = self.index_damage(id, file.claimed_by())?;
                    checked.add(StoreItem::LazyDevice(*file), damage);
                }
                _ => {}
            }
        }
        Ok((checked, listed))
    }

    /// Opens a device's file, if that is possible.
    pub(crate) fn file(&self, id: &DeviceId) -> Option<(File, Stat)> {
        self.directory.get().ok()??.read(LazyDeviceFile::Device(*id).file_name()).ok()?
    }

    /// Returns the bytes on disk of each device.
    pub(crate) fn sizes(&self) -> Result<Vec<(DeviceId, u64)>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let mut sizes = Vec::new();
        for file in self.list()?.names {
            if let LazyDeviceFile::Device(id) = file {
                let stat = shelf.stat(file.file_name())?;
                sizes.push((id, stat.map_or(0, |stat| on_disk(&stat))));
            }
        }
        Ok(sizes)
    }
}

fn encode(id: &DeviceId, bytes: u64, state: LazyDeviceState) -> Vec<u8> {
    record::encode(&Raw { device: id.to_string(), bytes, state })
}

/// Hashes a device. Returns `None` if `cancel` is set before the end.
pub(crate) fn hash(file: &File, cancel: &AtomicBool) -> io::Result<Option<DeviceId>> {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    let (mut buffer, mut at) = (vec![0; 1 << 20], 0);
    while !cancel.load(Ordering::Relaxed) {
        match file.read_at(&mut buffer, at) {
            Ok(0) => return Ok(Some(DeviceId::new(hasher.finish()))),
            Ok(read) => {
                hasher.update(&buffer[..read]);
                at += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}
