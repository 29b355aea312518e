//! Snapshots of containers' roots: one directory per snapshot, with a copy of a container's upper directory.
//!
//! `docs/format/object-store.md`, "Container snapshots", describes the layout and the locks.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use image::digest::Digest;
use image::verity::ImageId;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::LateDirectory;
use super::container_snapshot_error::{CHAIN_MAX, ContainerSnapshotError};
use super::containers::check_id;
use super::refs::Seconds;
use super::snapshots::HiddenSnapshot;
use crate::disk::{Directory, DiskError, is_unsynced};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::{Tmp, Workspace, hide};

/// The directory, which is created with the first snapshot.
pub(crate) const CONTAINER_SNAPSHOTS: &str = "container-snapshots";
/// The record of a snapshot, in its directory.
pub(crate) const RECORD: &str = "snapshot.json";
/// Directory with the copy of the container's upper directory.
const UPPER: &str = "upper";
/// Length of an id in hexadecimal digits.
const ID_LENGTH: usize = 12;
/// Minimum length of the first digits of an id that stand for the id.
const PREFIX_MIN: usize = 3;
/// End of the field `boot` if the disk has failed to write the snapshot's data.
const FAILED: &str = " failed";

/// The record of a container snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSnapshotRecord {
    /// Name that the user chose. `None` if the user has removed the snapshot, or a command made it for itself: then it
    /// exists as long as it is needed.
    pub name: Option<String>,
    /// The container of which the snapshot was made.
    pub container: String,
    /// Image below the snapshot, which `gc` keeps as long as the snapshot is needed.
    pub image: ImageId,
    /// Manifest of the image, if it has one. `gc` also keeps the manifest and its layers.
    pub manifest: Option<Digest>,
    /// Image name with which the container was started, as given.
    pub image_name: Option<String>,
    /// Directory of the shared store that has the image, if it is not in this store.
    pub shared: Option<String>,
    /// Id of the next lower snapshot.
    pub below: Option<String>,
    /// Map of the container's user ids, as its file `userns` has it. `None` for the ids of the host.
    pub map: Option<String>,
    /// Time of creation.
    pub created: Seconds,
    /// Bytes on disk.
    pub bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// Boot id of the machine, until the snapshot's data is on the disk: if the machine stops before, the snapshot is
    /// lost.
    pub boot: Option<String>,
}

/// A record, or the reason why the snapshot cannot be used.
type ReadRecord = Result<ContainerSnapshotRecord, ContainerSnapshotError>;

/// The record as written.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    container: String,
    image: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    manifest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    below: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    map: Option<String>,
    created: Seconds,
    bytes: u64,
    inodes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
}

/// A directory for the copy of a container's upper directory, before the snapshot is published. It is removed on drop.
#[derive(Debug)]
pub struct ContainerSnapshotDraft {
    pub(crate) work: Workspace,
}

impl ContainerSnapshotDraft {
    /// Returns the locked directory. Duplicates of the descriptor keep the lock.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.work.directory.as_fd()
    }

    /// Opens the directory for the copy, and makes it if it does not exist.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn upper(&self) -> Result<OwnedFd, ContainerSnapshotError> {
        self.work.directory.make_private(UPPER)?;
        Ok(self.work.directory.open(UPPER)?.into_fd())
    }

    /// Writes the record. If it is not synced, it gets the mark of such files, because a crash may damage it.
    pub(crate) fn write(&self, record: &ContainerSnapshotRecord) -> Result<(), DiskError> {
        let directory = &self.work.directory;
        // The snapshot is useless without this directory.
        directory.open(UPPER)?;
        let mut file = match record.boot {
            Some(_) => directory.create_unsynced(RECORD)?,
            None => directory.create(RECORD)?,
        };
        file.write_all(&record.encode())?;
        file.publish_mode()?;
        Ok(())
    }

    /// Replaces the record that [`write`](Self::write) has written.
    pub(crate) fn rewrite(&self, record: &ContainerSnapshotRecord) -> Result<(), DiskError> {
        let directory = &self.work.directory;
        directory.unlink(RECORD)?;
        self.write(record)?;
        if record.boot.is_none() {
            // The rest of the draft was synced before.
            directory.sync_file(RECORD)?;
            directory.sync()?;
        }
        Ok(())
    }
}

/// A container snapshot, open and locked, so that no process removes it.
#[derive(Debug)]
pub struct ContainerSnapshot {
    pub id: String,
    pub record: ContainerSnapshotRecord,
    /// The shared lock is held as long as the directory is open.
    directory: Directory,
}

impl ContainerSnapshot {
    /// Opens the copy of the container's upper directory.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn upper(&self) -> Result<OwnedFd, ContainerSnapshotError> {
        Ok(self.directory.open(UPPER)?.into_fd())
    }

    /// Path of the snapshot's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// State of a container snapshot for `gc` and `fsck`.
#[derive(Debug)]
pub(crate) struct SeenContainerSnapshot {
    pub(crate) id: String,
    pub(crate) record: Result<ContainerSnapshotRecord, RecordError>,
    /// Whether the machine stopped before the snapshot's data was on the disk.
    pub(crate) is_lost: bool,
    /// Whether the directory with the data exists.
    pub(crate) has_upper: bool,
}

/// The directory `container-snapshots/`, with one directory per snapshot.
#[derive(Debug)]
pub struct ContainerSnapshotShelf {
    pub(crate) directory: LateDirectory,
    root: Arc<Directory>,
    tmp: Arc<Tmp>,
    /// Id of this boot, `None` if it is unknown.
    boot: OnceLock<Option<String>>,
}

/// A lock on the shelf: records and the set of snapshots do not change while it is held.
#[derive(Debug)]
pub(crate) struct ShelfLock {
    directory: Directory,
}

/// Whether this can be the id of a snapshot.
fn is_id(text: &str) -> bool {
    text.len() == ID_LENGTH && is_hex(text)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
}

/// Checks the name of a snapshot.
pub(crate) fn check_name(name: &str) -> Result<(), ContainerSnapshotError> {
    check_id(name).map_err(|_refused| ContainerSnapshotError::Name(name.to_owned()))
}

impl ContainerSnapshotRecord {
    fn from_raw(raw: Raw) -> Result<Self, RecordError> {
        // The checksum is right, so a record that does not parse was not written by Quire.
        let image = raw.image.parse().ok().ok_or(RecordError::Checksum)?;
        let manifest = raw.manifest.as_deref().map(str::parse).transpose();
        let manifest = manifest.ok().ok_or(RecordError::Checksum)?;
        let is_good = raw.name.as_deref().is_none_or(|it| check_id(it).is_ok())
            && check_id(&raw.container).is_ok()
            && raw.below.as_deref().is_none_or(is_id);
        if !is_good {
            return Err(RecordError::Checksum);
        }
        let Raw { name, container, image_name, shared, below, map, created, .. } = raw;
        let Raw { bytes, inodes, boot, .. } = raw;
        Ok(Self {
            name,
            container,
            image,
            manifest,
            image_name,
            shared,
            below,
            map,
            created,
            bytes,
            inodes,
            boot,
        })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self { name, container, image_name, shared, below, map, boot, .. } = self.clone();
        record::encode(&Raw {
            name,
            container,
            image: self.image.to_string(),
            manifest: self.manifest.map(|it| it.to_string()),
            image_name,
            shared,
            below,
            map,
            created: self.created,
            bytes: self.bytes,
            inodes: self.inodes,
            boot,
        })
    }

    /// Notes that the disk has failed to write the snapshot's data in this boot.
    pub(crate) fn fail(&mut self, boot: &str) {
        self.boot = Some(format!("{boot}{FAILED}"));
    }

    /// Whether the disk has failed to write the snapshot's data.
    pub(crate) fn has_failed(&self) -> bool {
        self.boot.as_ref().is_some_and(|it| it.ends_with(FAILED))
    }
}

impl ContainerSnapshotShelf {
    pub(crate) fn new(root: &Arc<Directory>, tmp: &Arc<Tmp>) -> Self {
        let directory = LateDirectory::new(Arc::clone(root), CONTAINER_SNAPSHOTS);
        Self { directory, root: Arc::clone(root), tmp: Arc::clone(tmp), boot: OnceLock::new() }
    }

    /// Makes a directory for a copy, on the same file system as the directories of containers.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn draft(&self) -> Result<ContainerSnapshotDraft, ContainerSnapshotError> {
        Ok(ContainerSnapshotDraft { work: Workspace::make_copy(&self.tmp)? })
    }

    /// Returns the records of all snapshots, sorted by id, or the reason why a snapshot cannot be used.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn all(&self) -> Result<Vec<(String, ReadRecord)>, ContainerSnapshotError> {
        let seen = self.see_all()?.into_iter();
        Ok(seen.map(|it| (it.id.clone(), it.usable())).collect())
    }

    /// Opens the snapshot with this name, with this id, or whose id begins with these digits (at least 3).
    ///
    /// # Errors
    /// [`ContainerSnapshotError`] if there is none or more than one, or it cannot be used.
    pub fn find(&self, name_or_id: &str) -> Result<ContainerSnapshot, ContainerSnapshotError> {
        let absent = || ContainerSnapshotError::Absent(name_or_id.to_owned());
        let Some(lock) = self.lock_shared()? else { return Err(absent()) };
        let seen = self.see_all()?;
        let has_name = |it: &&SeenContainerSnapshot| {
            it.record.as_ref().is_ok_and(|record| record.name.as_deref() == Some(name_or_id))
        };
        let named = seen.iter().filter(has_name);
        // A new snapshot may have the name of a lost one.
        if let Some(found) = named.min_by_key(|it| it.is_lost) {
            return self.open(&lock, &found.id);
        }
        if name_or_id.len() < PREFIX_MIN || !is_hex(name_or_id) {
            return Err(absent());
        }
        let mut alike = seen.iter().filter(|it| it.id.starts_with(name_or_id));
        match (alike.next(), alike.next()) {
            (Some(found), None) => self.open(&lock, &found.id),
            (Some(_), Some(_)) => Err(ContainerSnapshotError::Ambiguous(name_or_id.to_owned())),
            (None, _) => Err(absent()),
        }
    }

    /// Opens the snapshot with exactly this id and all snapshots below it, the uppermost first.
    ///
    /// # Errors
    /// [`ContainerSnapshotError`] if one of them is missing or cannot be used.
    pub fn chain(&self, id: &str) -> Result<Vec<ContainerSnapshot>, ContainerSnapshotError> {
        let absent = || ContainerSnapshotError::Absent(id.to_owned());
        let Some(lock) = self.lock_shared()? else { return Err(absent()) };
        let mut chain = vec![self.open(&lock, id)?];
        while let Some(below) = chain.last().and_then(|it| it.record.below.clone()) {
            if chain.len() == CHAIN_MAX {
                return Err(ContainerSnapshotError::Endless(id.to_owned()));
            }
            chain.push(match self.open(&lock, &below) {
                Err(ContainerSnapshotError::Absent(below)) => {
                    return Err(ContainerSnapshotError::NothingBelow { id: id.to_owned(), below });
                }
                opened => opened?,
            });
        }
        Ok(chain)
    }

    /// Opens the snapshot with exactly this id. Another snapshot may have this id as its name.
    ///
    /// # Errors
    /// [`ContainerSnapshotError`] if there is none, or it cannot be used.
    pub fn by_id(&self, id: &str) -> Result<ContainerSnapshot, ContainerSnapshotError> {
        let absent = || ContainerSnapshotError::Absent(id.to_owned());
        self.open(&self.lock_shared()?.ok_or_else(absent)?, id)
    }

    /// Opens and locks the snapshot with exactly this id.
    pub(crate) fn open(
        &self,
        lock: &ShelfLock,
        id: &str,
    ) -> Result<ContainerSnapshot, ContainerSnapshotError> {
        let absent = || ContainerSnapshotError::Absent(id.to_owned());
        if !is_id(id) {
            return Err(absent());
        }
        let directory = lock.directory.open_if_there(id)?.ok_or_else(absent)?;
        // Processes take an exclusive lock only with the shelf locked, and hide the directory then.
        directory.lock_shared()?;
        let seen = self.see(id, &directory)?;
        Ok(ContainerSnapshot { id: id.to_owned(), record: seen.usable()?, directory })
    }

    /// Returns the snapshot with exactly this id, if it exists.
    pub(crate) fn get(&self, id: &str) -> Result<Option<SeenContainerSnapshot>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(None) };
        if !is_id(id) {
            return Ok(None);
        }
        let Some(directory) = shelf.open_if_there(id)? else { return Ok(None) };
        let seen = self.see(id, &directory)?;
        // A process may have moved the directory away and removed it since it was opened.
        let is_gone = seen.record.is_err() && shelf.stat(id)?.is_none();
        Ok(Some(seen).filter(|_| !is_gone))
    }

    fn see(&self, id: &str, directory: &Directory) -> Result<SeenContainerSnapshot, DiskError> {
        // A record that is replaced between the two calls is read again by the next command.
        let found = directory.stat(RECORD)?;
        let is_marked = found.as_ref().is_some_and(is_unsynced);
        let record = match directory.read_all(RECORD, RECORD_MAX) {
            Ok(bytes) => record::decode::<Raw>(&bytes.unwrap_or_default())
                .and_then(ContainerSnapshotRecord::from_raw),
            Err(error) if error.is_not_a_file() => Err(RecordError::Checksum),
            Err(error) => return Err(error),
        };
        let is_lost = match &record {
            Ok(record) => record.boot.as_ref().is_some_and(|it| self.is_earlier(it)),
            // A crash can leave a record that was not synced without its bytes, or without its name.
            Err(_) => is_marked || found.is_none(),
        };
        let upper = directory.stat(UPPER)?;
        let has_upper =
            upper.is_some_and(|it| FileType::from_raw_mode(it.st_mode) == FileType::Directory);
        Ok(SeenContainerSnapshot { id: id.to_owned(), record, is_lost, has_upper })
    }

    /// Whether this is the id of another boot.
    fn is_earlier(&self, boot: &str) -> bool {
        let boot = boot.strip_suffix(FAILED).unwrap_or(boot);
        self.boot.get_or_init(kernel::process::boot_id).as_ref().is_some_and(|it| it != boot)
    }

    /// Replaces the id of this boot, as a restart of the machine does.
    #[cfg(test)]
    pub(crate) fn set_boot(&self, boot: &str) {
        self.boot.set(Some(boot.to_owned())).unwrap();
    }

    /// Returns all snapshots, sorted by id.
    pub(crate) fn see_all(&self) -> Result<Vec<SeenContainerSnapshot>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let mut seen = Vec::new();
        for listed in shelf.list()? {
            let is_folder = matches!(listed.kind, FileType::Directory | FileType::Unknown);
            if let Some(id) = listed.text().filter(|_| is_folder) {
                seen.extend(self.get(id)?);
            }
        }
        Ok(seen)
    }

    /// Returns the paths of files that do not belong to the shelf.
    pub(crate) fn strays(&self) -> Result<Vec<PathBuf>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let is_ours = |name: Option<&str>, kind| {
            name.is_some_and(is_id) && matches!(kind, FileType::Directory | FileType::Unknown)
        };
        let listed = shelf.list()?.into_iter().filter(|it| !is_ours(it.text(), it.kind));
        Ok(listed.map(|it| shelf.path_of(&it.name)).collect())
    }

    /// Keeps the set of snapshots and their records from changing. Returns `None` if the shelf does not exist.
    pub(crate) fn lock_shared(&self) -> Result<Option<ShelfLock>, DiskError> {
        self.lock_with(Directory::lock_shared)
    }

    /// Takes the lock that is needed to add, change or remove a snapshot. Returns `None` if the shelf does not exist.
    pub(crate) fn lock(&self) -> Result<Option<ShelfLock>, DiskError> {
        self.lock_with(Directory::lock)
    }

    fn lock_with(
        &self,
        lock: impl Fn(&Directory) -> Result<(), DiskError>,
    ) -> Result<Option<ShelfLock>, DiskError> {
        if self.directory.get()?.is_none() {
            return Ok(None);
        }
        // Each holder needs a separate descriptor, because flock belongs to the open file description.
        let directory = self.root.open(CONTAINER_SNAPSHOTS)?;
        lock(&directory)?;
        Ok(Some(ShelfLock { directory }))
    }

    /// Returns an id that no snapshot has.
    pub(crate) fn free_id(&self, lock: &ShelfLock) -> Result<String, DiskError> {
        loop {
            // The keys of `RandomState` are random, so the hash is random as well.
            let random = format!("{:016x}", RandomState::new().hash_one(0_u8));
            let id = random.get(..ID_LENGTH).unwrap_or_default();
            if lock.directory.stat(id)?.is_none() {
                return Ok(id.to_owned());
            }
        }
    }

    /// Publishes a draft with its record, without syncing anything.
    pub(crate) fn publish(
        &self,
        lock: &ShelfLock,
        draft: ContainerSnapshotDraft,
        record: &ContainerSnapshotRecord,
    ) -> Result<ContainerSnapshot, ContainerSnapshotError> {
        let id = self.free_id(lock)?;
        let taken = || lock.directory.failed("publish", &id, rustix::io::Errno::EXIST);
        let directory = draft.work.publish(&lock.directory, &id)?.ok_or_else(taken)?;
        // The exclusive lock becomes a shared one. Others try for it only with the shelf locked.
        directory.lock_shared()?;
        Ok(ContainerSnapshot { id, record: record.clone(), directory })
    }

    /// Replaces the record of a snapshot, durably.
    pub(crate) fn change(
        &self,
        lock: &ShelfLock,
        id: &str,
        record: &ContainerSnapshotRecord,
    ) -> Result<(), DiskError> {
        self.tmp.replace(&lock.directory.open(id)?, RECORD, &record.encode())
    }

    /// Moves the directory of a snapshot away, unless a process has it open. The result removes its contents.
    pub(crate) fn hide(
        &self,
        lock: &ShelfLock,
        id: &str,
    ) -> Result<Option<HiddenSnapshot>, DiskError> {
        let Some(folder) = lock.directory.open_if_there(id)? else { return Ok(None) };
        if !folder.try_lock()? {
            return Ok(None);
        }
        let tmp = self.tmp.try_clone()?;
        let (_, name) = hide(&lock.directory, id, &folder, &self.tmp)?;
        Ok(Some(HiddenSnapshot::new(tmp, folder, name)))
    }

    /// Whether a process has the snapshot open, or it is gone.
    pub(crate) fn is_in_use(&self, lock: &ShelfLock, id: &str) -> Result<bool, DiskError> {
        let folder = lock.directory.open_if_there(id)?;
        folder.map_or(Ok(true), |it| it.try_lock().map(|is_free| !is_free))
    }
}

impl ShelfLock {
    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        self.directory.sync()
    }
}

impl SeenContainerSnapshot {
    /// Returns the record, if the snapshot can be used.
    pub(crate) fn usable(self) -> Result<ContainerSnapshotRecord, ContainerSnapshotError> {
        let Self { id, record, is_lost, .. } = self;
        match record {
            _ if is_lost => Err(ContainerSnapshotError::Lost(id)),
            Ok(record) => Ok(record),
            Err(source) => Err(ContainerSnapshotError::Damaged { id, source }),
        }
    }

    /// Whether the record cannot be read although it was synced. Then it is unknown what the snapshot needs.
    pub(crate) const fn is_damaged(&self) -> bool {
        self.record.is_err() && !self.is_lost
    }

    /// Whether the snapshot exists only as long as it is needed.
    fn is_nameless(&self) -> bool {
        self.is_lost || self.record.as_ref().is_ok_and(|it| it.name.is_none())
    }
}

/// Calls `take` for each snapshot that nothing needs, those above others first. If `take` returns `false`, the snapshot
/// stays, and so do all snapshots below it. Returns the ids of the others.
///
/// `needed` has the ids that containers need.
pub(crate) fn take_unneeded<E>(
    seen: &[SeenContainerSnapshot],
    needed: &BTreeSet<String>,
    mut take: impl FnMut(&str) -> Result<bool, E>,
) -> Result<Vec<String>, E> {
    // A damaged record may name any snapshot.
    if seen.iter().any(SeenContainerSnapshot::is_damaged) {
        return Ok(Vec::new());
    }
    let below = |it: &SeenContainerSnapshot| it.record.as_ref().ok()?.below.clone();
    let mut above: BTreeMap<String, usize> = BTreeMap::new();
    for below in seen.iter().filter_map(below) {
        *above.entry(below).or_default() += 1;
    }
    let mut taken = Vec::new();
    let mut left: Vec<_> = seen.iter().filter(|it| it.is_nameless()).collect();
    left.retain(|it| !needed.contains(&it.id));
    loop {
        let is_free = |it: &&SeenContainerSnapshot| above.get(&it.id).is_none_or(|it| *it == 0);
        let (free, rest): (Vec<_>, Vec<_>) = left.into_iter().partition(is_free);
        if free.is_empty() {
            return Ok(taken);
        }
        for it in free {
            if !take(&it.id)? {
                continue;
            }
            taken.push(it.id.clone());
            if let Some(below) = below(it) {
                above.entry(below).and_modify(|it| *it -= 1);
            }
        }
        left = rest;
    }
}
