//! Volumes: directories that containers mount, and that outlive them.
//!
//! `docs/format/object-store.md`, "Volumes", describes the layout and the locks.

pub(crate) mod error;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use self::error::VolumeError;
use super::LateDirectory;
use super::containers::check_id;
use super::refs::Seconds;
use super::snapshots::HiddenSnapshot;
use crate::disk::{Directory, DiskError};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::{Tmp, Workspace, hide};

/// The directory, which is created with the first volume.
pub(crate) const VOLUMES: &str = "volumes";
/// The record of a volume, in its directory.
pub(crate) const RECORD: &str = "volume.json";
/// Directory that containers mount.
pub(crate) const DATA: &str = "data";

/// A volume in a list: its name, and its record or the damage of the record.
pub type ListedVolume = (String, Result<VolumeRecord, RecordError>);

/// The record of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Time of creation.
    pub created: Seconds,
    /// Whether the volume was made for one container, without a name that a user chose.
    #[serde(default)]
    pub anonymous: bool,
    /// Whether the volume is removed when no container has it any more.
    #[serde(default)]
    pub ends_with_container: bool,
    /// Whether no container has mounted the volume yet. The first one copies the files of its image into it.
    #[serde(default)]
    pub fresh: bool,
}

impl VolumeRecord {
    /// Returns the record of a named volume without labels.
    #[must_use]
    pub const fn new(created: Seconds) -> Self {
        let labels = BTreeMap::new();
        Self { labels, created, anonymous: false, ends_with_container: false, fresh: false }
    }
}

/// A directory for a volume before it is published. It is removed on drop.
#[derive(Debug)]
pub struct VolumeDraft {
    pub(crate) work: Workspace,
}

impl VolumeDraft {
    /// Opens the directory that containers will mount, and makes it if it does not exist.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn data(&self) -> Result<OwnedFd, VolumeError> {
        self.work.directory.make_private(DATA)?;
        Ok(self.work.directory.open(DATA)?.into_fd())
    }

    /// Writes the record, and syncs it with the names in the directory.
    pub(crate) fn write(&self, record: &VolumeRecord) -> Result<(), DiskError> {
        let directory = &self.work.directory;
        directory.make_private(DATA)?;
        let mut file = directory.create(RECORD)?;
        file.write_all(&record::encode(record))?;
        file.publish_mode()?;
        drop(file);
        directory.sync_file(RECORD)?;
        directory.open(DATA)?.sync()?;
        directory.sync()
    }
}

/// A lock on the shelf. While it is shared, no volume is removed, and no fresh one is filled.
#[derive(Debug)]
pub struct VolumeLock {
    pub(crate) directory: Directory,
}

impl VolumeLock {
    /// Opens the directory of a volume that containers mount, and returns its path.
    ///
    /// # Errors
    /// [`VolumeError`] if there is no such volume.
    pub fn data(&self, name: &str) -> Result<(OwnedFd, PathBuf), VolumeError> {
        let absent = || VolumeError::Absent(name.to_owned());
        check_name(name)?;
        let volume = self.directory.open_if_there(name)?.ok_or_else(absent)?;
        let data = volume.open_if_there(DATA)?.ok_or_else(absent)?;
        let path = data.path().to_owned();
        Ok((data.into_fd(), path))
    }
}

/// The directory `volumes/`, with one directory per volume.
#[derive(Debug)]
pub struct VolumeShelf {
    pub(crate) directory: LateDirectory,
    root: Arc<Directory>,
    tmp: Arc<Tmp>,
}

/// Checks the name of a volume. The rules are those of containers' names.
pub(crate) fn check_name(name: &str) -> Result<(), VolumeError> {
    check_id(name).map_err(|_refused| VolumeError::Name(name.to_owned()))
}

impl VolumeShelf {
    pub(crate) fn new(root: &Arc<Directory>, tmp: &Arc<Tmp>) -> Self {
        let directory = LateDirectory::new(Arc::clone(root), VOLUMES);
        Self { directory, root: Arc::clone(root), tmp: Arc::clone(tmp) }
    }

    /// Makes a directory for a volume.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn draft(&self) -> Result<VolumeDraft, VolumeError> {
        Ok(VolumeDraft { work: Workspace::make_copy(&self.tmp)? })
    }

    /// Returns the record of a volume; `None` if there is no such volume.
    ///
    /// # Errors
    /// [`VolumeError::Damaged`], or an error of the disk.
    pub fn get(&self, name: &str) -> Result<Option<VolumeRecord>, VolumeError> {
        let Some(read) = self.see(name)? else { return Ok(None) };
        read.map(Some).map_err(|source| VolumeError::Damaged { name: name.to_owned(), source })
    }

    /// Returns the volumes, sorted by name, with their records or the damage of these.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn all(&self) -> Result<Vec<ListedVolume>, VolumeError> {
        let mut found = Vec::new();
        for name in self.names()? {
            // The volume may have been removed since it was listed.
            found.extend(self.see(&name)?.map(|record| (name, record)));
        }
        Ok(found)
    }

    /// Path of the directory of a volume that containers mount.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(VOLUMES).join(name).join(DATA)
    }

    pub(crate) fn names(&self) -> Result<Vec<String>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let listed = shelf.list()?.into_iter();
        let is_folder = |kind| matches!(kind, FileType::Directory | FileType::Unknown);
        let mut names: Vec<_> = listed
            .filter(|it| is_folder(it.kind))
            .filter_map(|it| it.text().filter(|name| check_name(name).is_ok()).map(str::to_owned))
            .collect();
        names.sort_unstable();
        Ok(names)
    }

    fn see(&self, name: &str) -> Result<Option<Result<VolumeRecord, RecordError>>, DiskError> {
        if check_name(name).is_err() {
            return Ok(None);
        }
        let Some(shelf) = self.directory.get()? else { return Ok(None) };
        let Some(volume) = shelf.open_if_there(name)? else { return Ok(None) };
        let read = match volume.read_all(RECORD, RECORD_MAX) {
            Ok(bytes) => record::decode::<VolumeRecord>(&bytes.unwrap_or_default()),
            Err(error) if error.is_not_a_file() => Err(RecordError::Checksum),
            Err(error) => return Err(error),
        };
        // Another process may have moved the directory away and removed it since it was opened.
        let is_gone = read.is_err() && shelf.stat(name)?.is_none();
        Ok(Some(read).filter(|_| !is_gone))
    }

    /// Whether a volume has the directory that containers mount.
    pub(crate) fn has_data(&self, name: &str) -> Result<bool, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(false) };
        let Some(volume) = shelf.open_if_there(name)? else { return Ok(false) };
        let data = volume.stat(DATA)?;
        Ok(data.is_some_and(|it| FileType::from_raw_mode(it.st_mode) == FileType::Directory))
    }

    /// Returns the paths of files that do not belong to the shelf.
    pub(crate) fn strays(&self) -> Result<Vec<PathBuf>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let is_ours = |name: Option<&str>, kind| {
            name.is_some_and(|it| check_name(it).is_ok())
                && matches!(kind, FileType::Directory | FileType::Unknown)
        };
        let listed = shelf.list()?.into_iter().filter(|it| !is_ours(it.text(), it.kind));
        Ok(listed.map(|it| shelf.path_of(&it.name)).collect())
    }

    /// Keeps volumes from being removed. Returns `None` if the shelf does not exist.
    pub(crate) fn lock_shared(&self) -> Result<Option<VolumeLock>, DiskError> {
        self.lock_with(Directory::lock_shared)
    }

    /// Takes the lock that is needed to remove or fill a volume. Returns `None` if the shelf does not exist.
    pub(crate) fn lock(&self) -> Result<Option<VolumeLock>, DiskError> {
        self.lock_with(Directory::lock)
    }

    fn lock_with(
        &self,
        lock: impl Fn(&Directory) -> Result<(), DiskError>,
    ) -> Result<Option<VolumeLock>, DiskError> {
        if self.directory.get()?.is_none() {
            return Ok(None);
        }
        // Each holder needs a separate descriptor, because flock belongs to the open file description.
        let directory = self.root.open(VOLUMES)?;
        lock(&directory)?;
        Ok(Some(VolumeLock { directory }))
    }

    /// Replaces the record of a volume, durably. `shelf` is the directory of all volumes.
    pub(crate) fn change(
        &self,
        shelf: &Directory,
        name: &str,
        record: &VolumeRecord,
    ) -> Result<(), DiskError> {
        self.tmp.replace(&shelf.open(name)?, RECORD, &record::encode(record))
    }

    /// Moves the directory of a volume away. The result removes its contents.
    pub(crate) fn hide(
        &self,
        lock: &VolumeLock,
        name: &str,
    ) -> Result<Option<HiddenSnapshot>, DiskError> {
        let Some(folder) = lock.directory.open_if_there(name)? else { return Ok(None) };
        // A hidden directory without a lock counts as that of a dead process.
        folder.lock()?;
        let tmp = self.tmp.try_clone()?;
        let (_, name) = hide(&lock.directory, name, &folder, &self.tmp)?;
        Ok(Some(HiddenSnapshot::new(tmp, folder, name)))
    }
}
