//! Snapshots of container engines: a folder for each engine, its *instance*, and in that one for each snapshot.
//!
//! Laid out as `docs/format/object-store.md`, "Snapshots", says. What is written in a snapshot's folder besides the record is
//! its service's.

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

/// The directory, which the first instance brings.
pub(crate) const SNAPSHOTS: &str = "snapshots";
/// The record of a snapshot, in its folder.
const RECORD: &str = "snapshot.json";
/// What an active snapshot's root is written to.
const CHANGES: &str = "changes";
/// Or, if that has a limit, a file system in a file, which is mounted there.
const FILESTORE: &str = "filestore";
/// Where its root is mounted.
const ROOT: &str = "root";
/// Where images are mounted that roots have below them, in the folder of the instance.
const SHARED: &str = "shared";

/// A time of day, in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds of the second, less than 1,000,000,000.
    pub nanoseconds: u32,
}

/// What a snapshot is. Source: containerd's `snapshots.proto`, `Kind`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotKind {
    /// It can be read.
    View,
    /// It can be written. A layer that a differ has unpacked for it is in the store already: nothing was written then.
    Active(Option<SnapshotContent>),
    /// It is done, and others may stand on it.
    Committed(SnapshotContent),
    /// It is done, too, and what was written stays as it is: nothing was made of it.
    Directory(SnapshotSize),
}

/// What a snapshot takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotSize {
    /// Bytes on disk.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

/// What a committed snapshot has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotContent {
    /// The layer that was made of its changes.
    pub layer: Digest,
    /// The image of this layer on those below, once it was needed.
    pub image: Option<ImageId>,
    /// Where its bytes come from, if the layer itself is not in the store.
    pub lazy: Option<LazySnapshot>,
    /// Bytes on disk that it has brought.
    pub bytes: u64,
    /// Files that it has brought.
    pub inodes: u64,
}

/// The image that has a layer, and came without its layers: what fills its devices is in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LazySnapshot {
    /// Its manifest, which the store has.
    pub manifest: Digest,
    /// All layers of that manifest in one image.
    pub image: ImageId,
}

/// The record of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRecord {
    /// The engine's name for it.
    pub name: String,
    /// What it is.
    pub kind: SnapshotKind,
    /// The number of the one that it stands on.
    pub parent: Option<u64>,
    /// The engine's own notes. Nothing in them is believed.
    pub labels: BTreeMap<String, String>,
    /// When it was made.
    pub created: Moment,
    /// When it or its labels were last changed.
    pub updated: Moment,
}

/// As written.
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
    fn of(raw: &RawContent) -> Result<Self, RecordError> {
        let RawContent { layer, image, lazy, bytes, inodes } = raw;
        // The checksum is right, so this is our own text or no text of ours.
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

/// Why snapshots cannot be opened or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// No name of an instance.
    #[error(
        "\"{}\" is no name of an instance: use 1 to 64 letters, digits, - _ and ., and do not begin with - or .", .0.escape_debug()
    )]
    Instance(String),
    /// Another service has it.
    #[error(
        "another service has the snapshots of instance {0} open: end that one first, or give this one another --instance"
    )]
    InUse(String),
    /// The store was opened for reading only.
    #[error("the store {} was opened for reading only", .0.display())]
    ReadOnly(PathBuf),
    /// A committed snapshot's layer or image is not in the store.
    #[error("the layer or the image of snapshot {0} is not in the store")]
    Gone(u64),
    /// A record cannot be read.
    #[error(
        "the record of snapshot {number} of instance {instance} is damaged: `quire fsck --repair` removes it, with all that \
         was written in the snapshot"
    )]
    Damaged {
        /// The instance.
        instance: String,
        /// The snapshot.
        number: u64,
        /// How.
        source: RecordError,
    },
    /// An error of the disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// What became of a snapshot whose record was damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MendedSnapshot {
    /// It is removed, with all that was written in it.
    Removed,
    /// It is sound by now, or gone.
    Sound,
    /// A service has its instance open. It is still there.
    InUse,
}

/// A snapshot as `gc` and `fsck` see it.
#[derive(Debug)]
pub(crate) struct SeenSnapshot {
    pub(crate) instance: String,
    pub(crate) number: u64,
    pub(crate) record: Result<SnapshotRecord, RecordError>,
}

/// A snapshot of an engine, whoever has its instance open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSnapshot {
    /// The instance.
    pub instance: String,
    /// Its number there.
    pub number: u64,
    /// Its record.
    pub record: SnapshotRecord,
    /// The directory where its root is mounted.
    pub root: PathBuf,
}

/// `snapshots/`: a folder for each instance.
#[derive(Debug)]
pub struct SnapshotShelf {
    pub(crate) directory: LateDirectory,
    tmp: Arc<Tmp>,
}

/// The snapshots of one engine, locked for one service.
#[derive(Debug)]
pub struct SnapshotInstance {
    /// Locked as long as it is open.
    directory: Directory,
    tmp: Arc<Tmp>,
    name: String,
}

impl SnapshotShelf {
    pub(crate) fn new(root: &Arc<Directory>, tmp: &Arc<Tmp>) -> Self {
        let directory = LateDirectory::new(Arc::clone(root), SNAPSHOTS);
        Self { directory, tmp: Arc::clone(tmp) }
    }

    /// The names of all instances, in byte order.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn instances(&self) -> Result<Vec<String>, DiskError> {
        let Some(directory) = self.directory.get()? else { return Ok(Vec::new()) };
        let listed = directory.list()?;
        let names = listed.iter().filter_map(|it| it.text()).filter(|it| check_id(it).is_ok());
        Ok(names.map(str::to_owned).collect())
    }

    /// Makes the instance if there is none, and locks it. The directory is there.
    pub(crate) fn open(&self, name: &str) -> Result<SnapshotInstance, SnapshotError> {
        check_id(name).map_err(|_refused| SnapshotError::Instance(name.to_owned()))?;
        let shelf = self.directory.there()?;
        if shelf.make_private(name)? {
            shelf.sync()?;
        }
        let directory = shelf.open(name)?;
        if !directory.try_lock()? {
            return Err(SnapshotError::InUse(name.to_owned()));
        }
        Ok(SnapshotInstance { directory, tmp: Arc::clone(&self.tmp), name: name.to_owned() })
    }

    /// The snapshots of all instances.
    pub(crate) fn see_all(&self) -> Result<Vec<SeenSnapshot>, DiskError> {
        let Some(shelf) = self.directory.get()? else { return Ok(Vec::new()) };
        let mut seen = Vec::new();
        for instance in self.instances()? {
            let Some(directory) = shelf.open_if_there(&instance)? else { continue };
            for number in numbers(&directory)? {
                // One that is gone meanwhile was removed by its engine.
                if let Some(record) = read_record(&directory, number)? {
                    seen.push(SeenSnapshot { instance: instance.clone(), number, record });
                }
            }
        }
        Ok(seen)
    }

    /// The snapshots of all instances, by instance and number, and those that cannot be read.
    ///
    /// # Errors
    /// [`DiskError`] when they cannot be listed.
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

    /// Removes the folder of a snapshot with a damaged record, which no service has open: it may have mounts in there.
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

/// The numbers of the snapshots in an instance, in their order.
fn numbers(instance: &Directory) -> Result<Vec<u64>, DiskError> {
    let listed = instance.list()?;
    let folders = listed.iter().filter(|it| it.kind == FileType::Directory);
    let mut numbers: Vec<_> = folders.filter_map(|it| parse(it.text()?)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn parse(name: &str) -> Option<u64> {
    // One more must have a number, too.
    name.parse().ok().filter(|number: &u64| number.to_string() == name && *number < u64::MAX)
}

/// `None` if the folder is gone.
fn read_record(
    instance: &Directory,
    number: u64,
) -> Result<Option<Result<SnapshotRecord, RecordError>>, DiskError> {
    let Some(folder) = instance.open_if_there(number.to_string())? else { return Ok(None) };
    let bytes = folder.read_all(RECORD, RECORD_MAX)?.unwrap_or_default();
    Ok(Some(record::decode::<Raw>(&bytes).and_then(SnapshotRecord::of)))
}

impl SnapshotKind {
    /// Whether others may stand on it.
    #[must_use]
    pub const fn is_committed(&self) -> bool {
        matches!(self, Self::Committed(_) | Self::Directory(_))
    }
}

impl SnapshotRecord {
    /// What the store has to have for it.
    #[must_use]
    pub const fn content(&self) -> Option<&SnapshotContent> {
        match &self.kind {
            SnapshotKind::View | SnapshotKind::Active(None) | SnapshotKind::Directory(_) => None,
            SnapshotKind::Active(Some(content)) | SnapshotKind::Committed(content) => Some(content),
        }
    }

    fn of(raw: Raw) -> Result<Self, RecordError> {
        let kind = match raw.kind {
            RawKind::View => SnapshotKind::View,
            RawKind::Active => SnapshotKind::Active(None),
            RawKind::Applied(content) => SnapshotKind::Active(Some(SnapshotContent::of(&content)?)),
            RawKind::Committed(content) => SnapshotKind::Committed(SnapshotContent::of(&content)?),
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
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The path of its folder.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// A number that is greater than that of any folder, whatever is in there.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn free_number(&self) -> Result<u64, DiskError> {
        Ok(numbers(&self.directory)?.last().map_or(1, |it| it + 1))
    }

    /// All records, by number; and those that cannot be read.
    ///
    /// # Errors
    /// [`DiskError`].
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

    /// Makes the folder of a snapshot, durably. The number is not in use.
    ///
    /// # Errors
    /// [`DiskError`]; then there is no such snapshot.
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

    /// Makes the directory where a snapshot's root is mounted.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn make_root(&self, number: u64) -> Result<(), DiskError> {
        self.directory.open(number.to_string())?.make_private(ROOT).map(drop)
    }

    /// Whether something was written to a snapshot's root, or may have been: what cannot be listed counts as written.
    #[must_use]
    pub fn is_changed(&self, number: u64) -> bool {
        match self.changes(number).join("upper").read_dir() {
            Ok(mut entries) => entries.next().is_some(),
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        }
    }

    /// Puts a record in the place of the one that a snapshot has, durably.
    ///
    /// # Errors
    /// [`DiskError`]; then the old one is there.
    pub fn change(&self, number: u64, record: &SnapshotRecord) -> Result<(), DiskError> {
        let folder = self.directory.open(number.to_string())?;
        self.tmp.replace(&folder, RECORD, &record.encode())
    }

    /// Takes a snapshot's folder away, and answers what removes all that is in it. Nothing is mounted in it any more. If
    /// this process dies before that, the next command removes it.
    ///
    /// # Errors
    /// [`DiskError`]; then it is still there.
    pub fn hide(&self, number: u64) -> Result<HiddenSnapshot, DiskError> {
        let name = number.to_string();
        let folder = self.directory.open(&name)?;
        folder.try_lock()?;
        let (_, name) = hide(&self.directory, &name, &folder, &self.tmp)?;
        self.directory.sync()?;
        Ok(HiddenSnapshot { tmp: self.tmp.try_clone()?, _lock: folder, name })
    }

    /// Removes what a snapshot's root was written to, if it is there: its layer has all of it. Nobody reads it any more, and
    /// nothing is mounted there.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn drop_changes(&self, number: u64) -> Result<(), DiskError> {
        let folder = self.directory.open(number.to_string())?;
        folder.remove_any(CHANGES)?;
        folder.remove_any(FILESTORE).map(drop)
    }

    /// The directory that an active snapshot's root is written to.
    #[must_use]
    pub fn changes(&self, number: u64) -> PathBuf {
        self.directory.path().join(number.to_string()).join(CHANGES)
    }

    /// The file with what was written to a root that has a limit. It is mounted at [`SnapshotInstance::changes`].
    #[must_use]
    pub fn filestore(&self, number: u64) -> PathBuf {
        self.directory.path().join(number.to_string()).join(FILESTORE)
    }

    /// Makes a directory where an image is mounted that roots have below them. The name is one path component.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn make_shared(&self, name: &str) -> Result<(), DiskError> {
        self.directory.make_private(SHARED)?;
        self.directory.open(SHARED)?.make_private(name).map(drop)
    }

    /// The names of those directories.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn shared_names(&self) -> Result<Vec<String>, DiskError> {
        let Some(shared) = self.directory.open_if_there(SHARED)? else { return Ok(Vec::new()) };
        Ok(shared.list()?.iter().filter_map(|it| it.text()).map(str::to_owned).collect())
    }

    /// Removes that directory again, if nothing is mounted there.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn drop_shared(&self, name: &str) -> Result<(), DiskError> {
        let Some(shared) = self.directory.open_if_there(SHARED)? else { return Ok(()) };
        shared.remove_any(name)?;
        if shared.list()?.is_empty() {
            self.directory.remove_any(SHARED)?;
        }
        Ok(())
    }

    /// The directory that has those.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        self.directory.path().join(SHARED)
    }

    /// The directory where a snapshot's root is mounted.
    #[must_use]
    pub fn root(&self, number: u64) -> PathBuf {
        self.directory.path().join(number.to_string()).join(ROOT)
    }
}

/// The folder of a snapshot that is gone.
#[derive(Debug)]
pub struct HiddenSnapshot {
    tmp: Directory,
    _lock: Directory,
    name: String,
}

impl HiddenSnapshot {
    /// Removes everything in it.
    ///
    /// # Errors
    /// [`DiskError`]; the next command removes the rest.
    pub fn remove(self) -> Result<(), DiskError> {
        self.tmp.remove_tree(&self.name)
    }
}
