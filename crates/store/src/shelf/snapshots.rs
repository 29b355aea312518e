//! Snapshots of container engines: one directory per engine, called *instance*, with one directory per snapshot.
//!
//! `docs/format/object-store.md`, "Snapshots", describes the layout. All files in a snapshot's directory except the
//! record belong to the snapshot service.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use image::digest::Digest;
use image::verity::ImageId;
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::LateDirectory;
use super::containers::check_id;
use crate::disk::{Directory, DiskError};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::{Tmp, Workspace, hide};

/// The directory, which is created with the first instance.
pub(crate) const SNAPSHOTS: &str = "snapshots";
/// The record of a snapshot, in its directory.
const RECORD: &str = "snapshot.json";
/// Directory for the writes to an active snapshot's root.
const CHANGES: &str = "changes";
/// File with the file system for these writes, mounted at `changes`, if their size is limited.
const FILESTORE: &str = "filestore";
/// Mount point of the snapshot's root.
const ROOT: &str = "root";
/// Directory in an instance, with mount points of images that are lower layers of several roots.
const SHARED: &str = "shared";

/// A time in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds of the second, less than 1,000,000,000.
    pub nanoseconds: u32,
}

/// Kind of a snapshot. Source: containerd's `snapshots.proto`, `Kind`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotKind {
    /// The snapshot is read-only.
    View,
    /// The snapshot is writable. If a differ has imported a layer for it, the store already has that layer, and
    /// nothing was written to the snapshot.
    Active(Option<SnapshotContent>),
    /// The snapshot is committed as a layer, and may be a parent of others.
    Committed(SnapshotContent),
    /// The snapshot is committed, and its writes are kept as a directory, without a layer.
    Directory(SnapshotSize),
}

/// Disk use of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotSize {
    /// Bytes on disk.
    pub bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
}

/// Content of a committed snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotContent {
    /// The layer made from the snapshot's changes.
    pub layer: Digest,
    /// The image of this layer and all lower layers, if it was needed before.
    pub image: Option<ImageId>,
    /// Source of the layer's bytes, if the layer itself is not in the store.
    pub lazy: Option<LazySnapshot>,
    /// Bytes on disk that the snapshot added.
    pub bytes: u64,
    /// Number of files that the snapshot added.
    pub inodes: u64,
}

/// An image that contains a layer, and came without its layers. The store has the data that is needed to fill its
/// devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LazySnapshot {
    /// Manifest of the image. The store has this manifest.
    pub manifest: Digest,
    /// Image of all layers of that manifest.
    pub image: ImageId,
}

/// The record of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRecord {
    /// Name that the engine chose.
    pub name: String,
    pub kind: SnapshotKind,
    /// Number of the parent snapshot.
    pub parent: Option<u64>,
    /// Labels of the engine. They are not trusted.
    pub labels: BTreeMap<String, String>,
    /// Time of creation.
    pub created: Moment,
    /// Time of the last change of the snapshot or its labels.
    pub updated: Moment,
}

/// The record as written.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    name: String,
    kind: RawKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<u64>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    created: Moment,
    updated: Moment,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RawKind {
    View,
    Active,
    Applied(RawContent),
    Committed(RawContent),
    Directory { bytes: u64, inodes: u64 },
}

#[derive(Debug, Serialize, Deserialize)]
struct RawContent {
    layer: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lazy: Option<RawLazy>,
    bytes: u64,
    inodes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct RawLazy {
    manifest: String,
    image: String,
}

impl SnapshotContent {
    fn from_raw(raw: &RawContent) -> Result<Self, RecordError> {
        let RawContent { layer, image, lazy, bytes, inodes } = raw;
        // The checksum is right, so a record that does not parse was not written by Quire.
        let layer = layer.parse().ok().ok_or(RecordError::Checksum)?;
        let image = image.as_deref().map(str::parse).transpose();
        let image = image.ok().ok_or(RecordError::Checksum)?;
        let lazy = lazy.as_ref().map(|it| {
            let (manifest, image) = it.manifest.parse().ok().zip(it.image.parse().ok())?;
            Some(LazySnapshot { manifest, image })
        });
        let lazy = match lazy {
            Some(None) => return Err(RecordError::Checksum),
            lazy => lazy.flatten(),
        };
        Ok(Self { layer, image, lazy, bytes: *bytes, inodes: *inodes })
    }

    fn raw(&self) -> RawContent {
        let lazy = |it: LazySnapshot| RawLazy {
            manifest: it.manifest.to_string(),
            image: it.image.to_string(),
        };
        RawContent {
            layer: self.layer.to_string(),
            image: self.image.map(|it| it.to_string()),
            lazy: self.lazy.map(lazy),
            bytes: self.bytes,
            inodes: self.inodes,
        }
    }
}

/// An error while snapshots are opened or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The name is not valid for an instance.
    #[error(
        "\"{}\" is not a name of an instance: use 1 to 64 letters, digits, - _ and ., beginning \
        with a letter, a digit or _", .0.escape_debug()
    )]
    Instance(String),
    /// Another service has the instance open.
    #[error(
        "another service uses the snapshots of instance {0}: stop that service, or give this one \
        another --instance"
    )]
    InUse(String),
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(PathBuf),
    /// A committed snapshot's layer or image is not in the store.
    #[error("the layer or the image of snapshot {0} is not in the store")]
    Gone(u64),
    /// The record of a snapshot cannot be read.
    #[error(
        "the record of snapshot {number} of instance {instance} is damaged: `quire fsck --repair` \
        removes it, with all data written to the snapshot"
    )]
    Damaged {
        /// Name of the instance.
        instance: String,
        /// Number of the snapshot.
        number: u64,
        source: RecordError,
    },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Result of repairing a snapshot with a damaged record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MendedSnapshot {
    /// The snapshot was removed, with all of its writes.
    Removed,
    /// The record is sound now, or the snapshot is gone.
    Sound,
    /// A service has the instance open, so the snapshot was kept.
    InUse,
}

/// State of a snapshot for `gc` and `fsck`.
#[derive(Debug)]
pub(crate) struct SeenSnapshot {
    pub(crate) instance: String,
    pub(crate) number: u64,
    pub(crate) record: Result<SnapshotRecord, RecordError>,
}

/// A snapshot of an engine. A service may have its instance open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSnapshot {
    /// Name of the instance.
    pub instance: String,
    /// Number of the snapshot in the instance.
    pub number: u64,
    pub record: SnapshotRecord,
    /// Mount point of the snapshot's root.
    pub root: PathBuf,
}

/// The directory `snapshots/`, with one directory per instance.
#[derive(Debug)]
pub struct SnapshotShelf {
    pub(crate) directory: LateDirectory,
    tmp: Arc<Tmp>,
}

/// The snapshots of one engine, locked for one service.
#[derive(Debug)]
pub struct SnapshotInstance {
    /// The lock is held as long as the directory is open.
    directory: Directory,
    tmp: Arc<Tmp>,
    name: String,
}

impl SnapshotShelf {
    pub(crate) fn new(root: &Arc<Directory>, tmp: &Arc<Tmp>) -> Self {
        let directory = LateDirectory::new(Arc::clone(root), SNAPSHOTS);
        Self { directory, tmp: Arc::clone(tmp) }
    }

    /// Returns the names of all instances, in byte order.
    pub fn instances(&self) -> Result<Vec<String>, DiskError> {
        let Some(directory) = self.directory.get()? else { return Ok(Vec::new()) };
        let listed = directory.list()?;
        let names = listed.iter().filter_map(|it| it.text()).filter(|it| check_id(it).is_ok());
        Ok(names.map(str::to_owned).collect())
    }

    /// Locks the instance, and creates it if it does not exist. The shelf's directory must exist.
    pub(crate) fn open(&self, name: &str) -> Result<SnapshotInstance, SnapshotError> {
        check_id(name).map_err(|_refused| SnapshotError::Instance(name.to_owned()))?;
        let shelf = self.directory.existing()?;
        if shelf.make_private(name)? {
            shelf.sync()?;
        }
        let directory = shelf.open(name)?;
        if !directory.try_lock()? {
            return Err(SnapshotError::InUse(name.to_owned()));
        }
        Ok(SnapshotInstance { directory, tmp: Arc::clone(&self.tmp), name: name.to_owned() })
    }

    /// Returns the snapshots of all instances.
    pub(crate) fn see_all(&self) -> Result<Vec<SeenSnapshot>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let mut seen = Vec::new();
        for instance in self.instances()? {
            let Some(directory) = shelf.open_if_there(&instance)? else { continue };
            for number in numbers(&directory)? {
                // If the record does not exist, the engine has removed the snapshot since it was listed.
                if let Some(record) = read_record(&directory, number)? {
                    seen.push(SeenSnapshot { instance: instance.clone(), number, record });
                }
            }
        }
        Ok(seen)
    }

    /// Returns the snapshots of all instances, sorted by instance and number, and the errors of those that cannot be
    /// read.
    ///
    /// # Errors
    /// [`DiskError`] if the snapshots cannot be listed.
    pub fn all(&self) -> Result<(Vec<StoredSnapshot>, Vec<SnapshotError>), DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok((Vec::new(), Vec::new())) };
        let (mut all, mut damaged) = (Vec::new(), Vec::new());
        for SeenSnapshot { instance, number, record } in self.see_all()? {
            match record {
                Ok(record) => {
                    let root = shelf.path().join(&instance).join(number.to_string()).join(ROOT);
                    all.push(StoredSnapshot { instance, number, record, root });
                }
                Err(source) => damaged.push(SnapshotError::Damaged { instance, number, source }),
            }
        }
        Ok((all, damaged))
    }

    /// Removes the directory of a snapshot with a damaged record, unless a service has the instance open, because that
    /// service may have mounts in the directory.
    pub(crate) fn remove_damaged(
        &self,
        instance: &str,
        number: u64,
    ) -> Result<MendedSnapshot, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(MendedSnapshot::Sound) };
        let Some(directory) = shelf.open_if_there(instance)? else {
            return Ok(MendedSnapshot::Sound);
        };
        if !matches!(read_record(&directory, number)?, Some(Err(_))) {
            return Ok(MendedSnapshot::Sound);
        }
        if !directory.try_lock()? {
            return Ok(MendedSnapshot::InUse);
        }
        directory.remove_tree(number.to_string())?;
        Ok(MendedSnapshot::Removed)
    }
}

/// Returns the numbers of the snapshots in an instance, sorted.
fn numbers(instance: &Directory) -> Result<Vec<u64>, DiskError> {
    let listed = instance.list()?;
    let folders = listed.iter().filter(|it| it.kind == FileType::Directory);
    let mut numbers: Vec<_> = folders.filter_map(|it| parse(it.text()?)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn parse(name: &str) -> Option<u64> {
    // The next number must also be valid.
    name.parse().ok().filter(|number: &u64| number.to_string() == name && *number < u64::MAX)
}

/// Returns `None` if the snapshot's directory does not exist.
fn read_record(
    instance: &Directory,
    number: u64,
) -> Result<Option<Result<SnapshotRecord, RecordError>>, DiskError> {
    let name = number.to_string();
    let Some(folder) = instance.open_if_there(&name)? else { return Ok(None) };
    let bytes = match folder.read_all(RECORD, RECORD_MAX)? {
        Some(bytes) => bytes,
        // The snapshot may have been moved away and removed since its directory was opened.
        None if instance.open_if_there(&name)?.is_none() => return Ok(None),
        None => Vec::new(),
    };
    Ok(Some(record::decode::<Raw>(&bytes).and_then(SnapshotRecord::from_raw)))
}

impl SnapshotKind {
    /// Whether other snapshots may have this one as their parent.
    #[must_use]
    pub const fn is_committed(&self) -> bool {
        matches!(self, Self::Committed(_) | Self::Directory(_))
    }
}

impl SnapshotRecord {
    /// Returns the content that the store must have for this snapshot.
    #[must_use]
    pub const fn content(&self) -> Option<&SnapshotContent> {
        match &self.kind {
            SnapshotKind::View | SnapshotKind::Active(None) | SnapshotKind::Directory(_) => None,
            SnapshotKind::Active(Some(content)) | SnapshotKind::Committed(content) => Some(content),
        }
    }

    fn from_raw(raw: Raw) -> Result<Self, RecordError> {
        let kind = match raw.kind {
            RawKind::View => SnapshotKind::View,
            RawKind::Active => SnapshotKind::Active(None),
            RawKind::Applied(content) => {
                SnapshotKind::Active(Some(SnapshotContent::from_raw(&content)?))
            }
            RawKind::Committed(content) => {
                SnapshotKind::Committed(SnapshotContent::from_raw(&content)?)
            }
            RawKind::Directory { bytes, inodes } => {
                SnapshotKind::Directory(SnapshotSize { bytes, inodes })
            }
        };
        let Raw { name, parent, labels, created, updated, .. } = raw;
        Ok(Self { name, kind, parent, labels, created, updated })
    }

    fn encode(&self) -> Vec<u8> {
        let kind = match &self.kind {
            SnapshotKind::View => RawKind::View,
            SnapshotKind::Active(None) => RawKind::Active,
            SnapshotKind::Active(Some(content)) => RawKind::Applied(content.raw()),
            SnapshotKind::Committed(content) => RawKind::Committed(content.raw()),
            SnapshotKind::Directory(SnapshotSize { bytes, inodes }) => {
                RawKind::Directory { bytes: *bytes, inodes: *inodes }
            }
        };
        record::encode(&Raw {
            name: self.name.clone(),
            kind,
            parent: self.parent,
            labels: self.labels.clone(),
            created: self.created,
            updated: self.updated,
        })
    }
}

impl SnapshotInstance {
    /// Name of the instance.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of the instance's directory.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// Returns a number that is greater than that of any snapshot in the instance.
    pub fn free_number(&self) -> Result<u64, DiskError> {
        Ok(numbers(&self.directory)?.last().map_or(1, |it| it + 1))
    }

    /// Returns all records by number, and the errors of those that cannot be read.
    pub fn read(&self) -> Result<(BTreeMap<u64, SnapshotRecord>, Vec<SnapshotError>), DiskError> {
        let (mut records, mut damaged) = (BTreeMap::new(), Vec::new());
        for number in numbers(&self.directory)? {
            match read_record(&self.directory, number)? {
                Some(Ok(record)) => drop(records.insert(number, record)),
                Some(Err(source)) => {
                    let instance = self.name.clone();
                    damaged.push(SnapshotError::Damaged { instance, number, source });
                }
                None => {}
            }
        }
        Ok((records, damaged))
    }

    /// Creates the directory of a snapshot, durably. The number must not be in use.
    ///
    /// # Errors
    /// [`DiskError`]. The snapshot does not exist then.
    pub fn make(&self, number: u64, record: &SnapshotRecord) -> Result<(), DiskError> {
        let work = Workspace::make(&self.tmp)?;
        let mut file = work.directory.create(RECORD)?;
        file.write_all(&record.encode())?;
        file.publish_mode()?;
        drop(file);
        work.directory.sync_file(RECORD)?;
        work.directory.make_private(CHANGES)?;
        work.directory.sync()?;
        let name = number.to_string();
        if work.publish(&self.directory, &name)?.is_none() {
            return Err(self.directory.failed("publish", name, rustix::io::Errno::EXIST));
        }
        self.directory.sync()
    }

    /// Creates the mount point of a snapshot's root.
    pub fn make_root(&self, number: u64) -> Result<(), DiskError> {
        self.directory.open(number.to_string())?.make_private(ROOT).map(drop)
    }

    /// Whether files were written to a snapshot's root. If they cannot be listed, `true`.
    #[must_use]
    pub fn is_changed(&self, number: u64) -> bool {
        match self.changes(number).join("upper").read_dir() {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        }
    }

    /// Replaces the record of a snapshot, durably.
    ///
    /// # Errors
    /// [`DiskError`]. The old record remains then.
    pub fn change(&self, number: u64, record: &SnapshotRecord) -> Result<(), DiskError> {
        let folder = self.directory.open(number.to_string())?;
        self.tmp.replace(&folder, RECORD, &record.encode())
    }

    /// Moves a snapshot's directory away. The result removes its contents. The directory must not contain mounts. If
    /// this process dies before the removal, the next command removes the contents.
    ///
    /// # Errors
    /// [`DiskError`], also if another process has locked the directory. The snapshot remains then.
    pub fn hide(&self, number: u64) -> Result<HiddenSnapshot, DiskError> {
        let name = number.to_string();
        let folder = self.directory.open(&name)?;
        // Without the lock, the next command would assume that the hidden directory belongs to a dead process.
        if !folder.try_lock()? {
            return Err(folder.failed("lock", "", rustix::io::Errno::WOULDBLOCK));
        }
        let (_, name) = hide(&self.directory, &name, &folder, &self.tmp)?;
        self.directory.sync()?;
        Ok(HiddenSnapshot::new(self.tmp.try_clone()?, folder, name))
    }

    /// Removes the writes to a snapshot's root, if there are any, after its layer contains all of them. The files must
    /// not be in use or mounted.
    pub fn drop_changes(&self, number: u64) -> Result<(), DiskError> {
        let folder = self.directory.open(number.to_string())?;
        folder.remove_any(CHANGES)?;
        folder.remove_any(FILESTORE).map(drop)
    }

    /// Returns the directory for the writes to an active snapshot's root.
    #[must_use]
    pub fn changes(&self, number: u64) -> PathBuf {
        self.directory.path().join(number.to_string()).join(CHANGES)
    }

    /// Returns the file with the writes to a root whose size is limited. It is mounted at
    /// [`SnapshotInstance::changes`].
    #[must_use]
    pub fn filestore(&self, number: u64) -> PathBuf {
        self.directory.path().join(number.to_string()).join(FILESTORE)
    }

    /// Creates a mount point for an image that is a lower layer of several roots. `name` is one path component.
    pub fn make_shared(&self, name: &str) -> Result<(), DiskError> {
        self.directory.make_private(SHARED)?;
        self.directory.open(SHARED)?.make_private(name).map(drop)
    }

    /// Returns the names of these mount points.
    pub fn shared_names(&self) -> Result<Vec<String>, DiskError> {
        let Some(shared) = self.directory.open_if_there(SHARED)? else { return Ok(Vec::new()) };
        Ok(shared.list()?.iter().filter_map(|it| it.text()).map(str::to_owned).collect())
    }

    /// Removes a mount point that [`make_shared`](Self::make_shared) made, unless a file system is mounted on it.
    pub fn drop_shared(&self, name: &str) -> Result<(), DiskError> {
        let Some(shared) = self.directory.open_if_there(SHARED)? else { return Ok(()) };
        shared.remove_any(name)?;
        if shared.list()?.is_empty() {
            self.directory.remove_any(SHARED)?;
        }
        Ok(())
    }

    /// Returns the directory that contains these mount points.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        self.directory.path().join(SHARED)
    }

    /// Returns the mount point of a snapshot's root.
    #[must_use]
    pub fn root(&self, number: u64) -> PathBuf {
        self.directory.path().join(number.to_string()).join(ROOT)
    }
}

/// Directory of a removed snapshot, with its contents.
#[derive(Debug)]
pub struct HiddenSnapshot {
    tmp: Directory,
    _lock: Directory,
    name: String,
}

impl HiddenSnapshot {
    /// `folder` is the locked directory, and `name` its name in `tmp`.
    pub(super) const fn new(tmp: Directory, folder: Directory, name: String) -> Self {
        Self { tmp, _lock: folder, name }
    }

    /// Removes the contents.
    ///
    /// # Errors
    /// [`DiskError`]. The next command removes the remaining files.
    pub fn remove(self) -> Result<(), DiskError> {
        self.tmp.remove_tree(&self.name)
    }
}
