//! One directory per container. The `container` crate owns all files in it except the record.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use super::container_snapshot_error::ContainerSnapshotError;
use super::refs::Seconds;
use super::volumes::error::VolumeError;
use crate::disk::{Directory, DiskError};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::{
    LOCK, Owner, Tmp, Workspace, hide, is_alive, is_hidden, may_be_import, names, owner,
};
use image::digest::Digest;

/// File with a container's record, in its directory.
pub(crate) const RECORD: &str = "container.json";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRecord {
    /// Image of the container, which `gc` keeps as long as the directory exists.
    pub image: ImageId,
    /// Manifest of the image, if it has one. `gc` also keeps the manifest and its layers.
    pub manifest: Option<Digest>,
    /// Image name with which the container was started, as given.
    pub name: Option<String>,
    /// Time of creation.
    pub created: Seconds,
    /// Whether the directory is kept after the container's end. If not, the next command removes the directory.
    pub keep: bool,
    /// Directory of the shared store that has the image, if it is not in this store. `gc` of this store then has
    /// nothing to keep.
    pub shared: Option<String>,
    /// Boot id of the machine at the container's creation. After a reboot, none of its processes is running. `None`
    /// if it is unknown.
    pub boot: Option<String>,
    /// Id of the uppermost snapshot between the image and the container's writable layer. It is kept as long as the
    /// directory exists.
    pub snapshot: Option<String>,
    /// Names of the volumes that the container mounts. They are kept as long as the directory exists.
    pub volumes: Vec<String>,
}

/// The record as written.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    image: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    manifest: Option<String>,
    name: Option<String>,
    created: Seconds,
    keep: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shared: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    volumes: Vec<String>,
}

impl ContainerRecord {
    fn encode(&self) -> Vec<u8> {
        let Self { name, shared, boot, snapshot, volumes, .. } = self.clone();
        record::encode(&Raw {
            image: self.image.to_string(),
            manifest: self.manifest.map(|it| it.to_string()),
            name,
            created: self.created,
            keep: self.keep,
            shared,
            boot,
            snapshot,
            volumes,
        })
    }
}

/// Whether a process holds the container's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// A process holds the lock of the directory, or of the lock file in it.
    Alive,
    /// Both locks are free.
    Dead,
}

/// An error while a container's directory is made, opened or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The name is not 1 to 64 of `a-z A-Z 0-9 - _ .`, or begins with a dot or a hyphen.
    #[error("\"{}\" is not a container name: use 1 to 64 letters, digits, - _ and ., beginning \
        with a letter, a digit or _", .0.escape_debug())]
    Id(String),
    #[error("container {0} already exists")]
    Exists(String),
    #[error("container {0} does not exist")]
    Absent(String),
    /// The container's image is not in the store.
    #[error("container {id} needs image {image}, which is not in the store")]
    NoImage { id: String, image: ImageId },
    /// The snapshot below the container's writable layer cannot be used.
    #[error("cannot use the snapshot of container {id}")]
    Snapshot { id: String, source: ContainerSnapshotError },
    /// A volume of the container does not exist.
    #[error("cannot use a volume of container {id}")]
    Volume { id: String, source: VolumeError },
    /// The container's record cannot be read.
    #[error("the record of container {id} is damaged: `quire rm --force {id}` removes it")]
    Damaged { id: String, source: RecordError },
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(std::path::PathBuf),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A container's directory, `containers/ID/`, open and locked (`flock` on the descriptor). It stays locked as long as
/// a process has a duplicate of this descriptor, or of the lock file's descriptor.
#[derive(Debug)]
pub struct ContainerDir {
    parent: Directory,
    tmp: Directory,
    directory: Directory,
    lock: Option<OwnedFd>,
    id: String,
    /// Name of the directory in its parent.
    name: String,
    record: Option<ContainerRecord>,
}

impl ContainerDir {
    /// The container's name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the locked lock file in the directory. The container counts as alive as long as a process has a
    /// duplicate of this descriptor. The runtime gets this file instead of the directory, because it could reach all
    /// other directories of the host from a directory. `None` for the directory of a dead container.
    #[must_use]
    pub fn lock(&self) -> Option<BorrowedFd<'_>> {
        self.lock.as_ref().map(|fd| fd.as_fd())
    }

    /// Returns the directory, for the files of the `container` crate. Duplicates of the descriptor keep the lock, so
    /// other programs must not get one. The descriptor is close-on-exec.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Path of the directory, for runtimes, which accept only paths.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// The container's record; `None` if it is damaged.
    #[must_use]
    pub const fn record(&self) -> Option<&ContainerRecord> {
        self.record.as_ref()
    }

    /// Replaces the record, durably.
    pub(crate) fn set_record(
        &self,
        tmp: &Tmp,
        record: &ContainerRecord,
    ) -> Result<(), ContainerError> {
        Ok(tmp.replace(&self.directory, RECORD, &record.encode())?)
    }

    /// Moves the directory out of `containers/`. Its path changes, and it stays locked. If this process dies, the next
    /// command removes the directory.
    ///
    /// # Errors
    /// [`ContainerError`] if the directory cannot be moved.
    pub fn hide(self) -> Result<Self, ContainerError> {
        if self.name != self.id {
            return Ok(self);
        }
        // Duplicating may fail if descriptors run out, so it comes before the rename.
        let parent = self.tmp.try_clone()?;
        let (directory, name) = hide(&self.parent, &self.name, &self.directory, &self.tmp)?;
        Ok(Self { parent, directory, name, ..self })
    }

    /// Hides the directory, removes everything in it, and releases the lock. Fails if a file system is mounted in the
    /// directory, so unmount it first.
    ///
    /// # Errors
    /// [`ContainerError`] if a file cannot be removed.
    pub fn remove(self) -> Result<(), ContainerError> {
        let hidden = self.hide()?;
        Ok(hidden.parent.remove_tree(&hidden.name)?)
    }
}

/// A directory that is to replace that of a container. It is removed on drop.
#[derive(Debug)]
pub struct ContainerReplacement {
    work: Workspace,
    folder: ContainerDir,
}

impl ContainerReplacement {
    /// Returns the locked directory, for the files of the `container` crate.
    #[must_use]
    pub const fn folder(&self) -> &ContainerDir {
        &self.folder
    }

    pub(crate) fn record(&self) -> &ContainerRecord {
        let record = self.folder.record.as_ref();
        record.expect("a replacement is made with its record")
    }
}

/// Directory for the writes of a container whose own directory does not exist yet. It is removed on drop, unless
/// [`keep`](Self::keep) is called.
#[derive(Debug)]
pub struct WritableDraft(Workspace);

impl WritableDraft {
    /// Returns the locked directory. Duplicates of the descriptor keep the lock.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.directory.as_fd()
    }

    /// Moves the directory into a container's directory, and returns its locked descriptor.
    ///
    /// # Errors
    /// [`ContainerError::Exists`] if `folder` has an entry of this name, or an error of the disk.
    pub fn keep(self, folder: &ContainerDir, name: &str) -> Result<OwnedFd, ContainerError> {
        let locked = self.fd().try_clone_to_owned();
        let locked = locked.map_err(|error| folder.directory.failed("keep", name, error))?;
        match self.0.publish(&folder.directory, name)? {
            Some(_directory) => Ok(locked),
            None => Err(ContainerError::Exists(format!("{}/{name}", folder.id))),
        }
    }
}

/// Checks the name of a container: 1 to 64 of `a-z A-Z 0-9 - _ .`, not beginning with a dot or a hyphen. Runtimes
/// would parse a leading hyphen as an option.
///
/// # Errors
/// [`ContainerError::Id`] if the name is not valid.
pub fn check_id(id: &str) -> Result<(), ContainerError> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if (1..=64).contains(&id.len()) && id.bytes().all(good) && !id.starts_with(['.', '-']) {
        return Ok(());
    }
    Err(ContainerError::Id(id.to_owned()))
}

fn read_record(directory: &Directory) -> Result<Result<ContainerRecord, RecordError>, DiskError> {
    let bytes = directory.read_all(RECORD, RECORD_MAX)?.unwrap_or_default();
    Ok(record::decode::<Raw>(&bytes).and_then(|raw| {
        // The checksum is right, so a record that does not parse was not written by Quire.
        let image = raw.image.parse().ok().ok_or(RecordError::Checksum)?;
        let manifest = raw.manifest.as_deref().map(str::parse).transpose();
        let manifest = manifest.ok().ok_or(RecordError::Checksum)?;
        let Raw { name, created, keep, shared, boot, snapshot, volumes, .. } = raw;
        Ok(ContainerRecord {
            image,
            manifest,
            name,
            created,
            keep,
            shared,
            boot,
            snapshot,
            volumes,
        })
    }))
}

/// State of a container at the time when it was read.
#[derive(Debug)]
pub struct FoundContainer {
    pub id: String,
    /// The record, or the error that shows its damage.
    pub record: Result<ContainerRecord, ContainerError>,
    /// Whether a process holds the container's lock.
    pub liveness: Liveness,
}

/// State of a container for `gc`.
#[derive(Debug)]
pub(crate) struct GcContainer {
    pub(crate) id: String,
    pub(crate) liveness: Liveness,
    pub(crate) record: Result<ContainerRecord, RecordError>,
}

/// The directory `containers/`, with one directory per container.
#[derive(Debug)]
pub struct ContainerShelf {
    pub(crate) directory: Directory,
    pub(crate) tmp: Arc<Tmp>,
}

/// A container's directory before its publication, with its record and its lock.
#[derive(Debug)]
pub(crate) struct ContainerDraft {
    work: Workspace,
    lock: OwnedFd,
    record: ContainerRecord,
}

impl ContainerShelf {
    /// Makes a directory for the writes of a container, on the same file system as the container's directory.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn layer(&self) -> Result<WritableDraft, ContainerError> {
        Ok(WritableDraft(Workspace::make(&self.tmp)?))
    }

    /// Writes the initial files of a container's directory. If the container is kept, its record is synced.
    pub(crate) fn draft(&self, record: &ContainerRecord) -> Result<ContainerDraft, DiskError> {
        self.draft_in(Workspace::make(&self.tmp)?, record)
    }

    fn draft_in(
        &self,
        work: Workspace,
        record: &ContainerRecord,
    ) -> Result<ContainerDraft, DiskError> {
        let mut file = work.directory.create(RECORD)?;
        file.write_all(&record.encode())?;
        file.publish_mode()?;
        drop(file);
        let lock = work.directory.create_locked(LOCK)?;
        if record.keep {
            work.directory.sync_file(RECORD)?;
            work.directory.sync()?;
        }
        Ok(ContainerDraft { work, lock, record: record.clone() })
    }

    /// Publishes the directory as a container's. The caller holds the store's lock.
    pub(crate) fn publish(
        &self,
        id: &str,
        draft: ContainerDraft,
    ) -> Result<ContainerDir, ContainerError> {
        let ContainerDraft { work, lock, record } = draft;
        // Duplicating may fail if descriptors run out, so it comes before the publication.
        let (parent, tmp) = (self.directory.try_clone()?, self.tmp.try_clone()?);
        let published = work.publish(&self.directory, id)?;
        let directory = published.ok_or_else(|| ContainerError::Exists(id.to_owned()))?;
        let (id, name) = (id.to_owned(), id.to_owned());
        Ok(ContainerDir {
            parent,
            tmp,
            directory,
            lock: Some(lock),
            name,
            id,
            record: Some(record),
        })
    }

    /// Makes a directory that can replace that of the container `id`.
    pub(crate) fn replacement(
        &self,
        id: &str,
        record: &ContainerRecord,
    ) -> Result<ContainerReplacement, ContainerError> {
        // After the exchange, the old directory has this name. The names of removed containers' directories begin in
        // the same way.
        let ContainerDraft { work, lock, record } =
            self.draft_in(Workspace::make_hidden(&self.tmp)?, record)?;
        let folder = ContainerDir {
            parent: self.tmp.try_clone()?,
            tmp: self.tmp.try_clone()?,
            directory: work.directory.try_clone()?,
            lock: Some(lock),
            id: id.to_owned(),
            name: work.name.clone(),
            record: Some(record),
        };
        Ok(ContainerReplacement { work, folder })
    }

    /// Exchanges the directory of a container and its replacement. Returns the new one and the old one, which then has
    /// a name in `tmp/`. The caller holds the store's lock.
    pub(crate) fn exchange(
        &self,
        old: ContainerDir,
        new: ContainerReplacement,
    ) -> Result<(ContainerDir, ContainerDir), ContainerError> {
        let ContainerReplacement { work, folder: new } = new;
        // The new directory must be on the disk before it has the name.
        work.directory.sync()?;
        // Duplicating may fail if descriptors run out, so it comes before the exchange.
        let parent = self.directory.try_clone()?;
        let hidden = self.tmp.try_clone()?;
        let (_directory, name) = work.into_parts()?;
        // If this fails, the next command removes the new directory.
        self.tmp.exchange(&name, &self.directory, &old.id)?;
        let id = new.id;
        let directory = new.directory.renamed(&self.directory, &id);
        let new = ContainerDir { parent, directory, name: id.clone(), id, ..new };
        let directory = old.directory.renamed(&self.tmp, &name);
        let old = ContainerDir { parent: hidden, directory, name, ..old };
        Ok((new, old))
    }

    /// Returns `containers/`, for the files that the `container` crate keeps there under names that begin with a dot.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Whether a process holds the lock of a container's directory. `false` if there is no directory.
    ///
    /// # Errors
    /// [`ContainerError`] if the lock cannot be tested.
    pub fn is_alive(&self, id: &str) -> Result<bool, ContainerError> {
        check_id(id)?;
        match self.directory.open_if_there(id)? {
            Some(directory) => Ok(is_alive(&directory)?),
            None => Ok(false),
        }
    }

    /// Opens and locks the directory of a dead container. Returns `None` if the container is alive, or if another
    /// process tests its lock at this moment.
    ///
    /// # Errors
    /// [`ContainerError`] if the container does not exist.
    pub fn lock(&self, id: &str) -> Result<Option<ContainerDir>, ContainerError> {
        check_id(id)?;
        let directory = loop {
            match owner(&self.directory, id)? {
                Owner::Alive => return Ok(None),
                // It was replaced by another one.
                Owner::Gone if self.directory.open_if_there(id)?.is_some() => {}
                Owner::Gone => return Err(ContainerError::Absent(id.to_owned())),
                Owner::Dead(directory) => break directory,
            }
        };
        let record = read_record(&directory)?.ok();
        let (parent, tmp) = (self.directory.try_clone()?, self.tmp.try_clone()?);
        let (id, name, lock) = (id.to_owned(), id.to_owned(), None);
        Ok(Some(ContainerDir { parent, tmp, directory, lock, name, id, record }))
    }

    /// Returns all containers, in byte order of their ids, also those with damaged records. Reads one file of each.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn found(&self) -> Result<Vec<FoundContainer>, ContainerError> {
        Ok(self.see_all()?.into_iter().filter_map(GcContainer::found).collect())
    }

    /// Returns all containers whose records can be read, in byte order of their ids.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn all(&self) -> Result<Vec<(String, ContainerRecord, Liveness)>, ContainerError> {
        let seen = self.see_all()?.into_iter();
        Ok(seen.filter_map(|it| Some((it.id, it.record.ok()?, it.liveness))).collect())
    }

    /// Returns the names of living containers, and the states of dead ones. Every start calls this, so it does not
    /// read the records of living containers, and takes a fraction of a microsecond for each of them.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn living_and_dead(&self) -> Result<(Vec<String>, Vec<FoundContainer>), ContainerError> {
        let (mut living, mut dead) = (Vec::new(), Vec::new());
        for id in self.ids()? {
            match self.open(&id)? {
                Some((_, Liveness::Alive)) => living.push(id),
                Some((_, Liveness::Dead)) => match self.see(&id)?.and_then(GcContainer::found) {
                    // It was started in the meantime.
                    Some(FoundContainer { liveness: Liveness::Alive, .. }) => living.push(id),
                    found => dead.extend(found),
                },
                None => {}
            }
        }
        Ok((living, dead))
    }

    /// Returns the container with this name, if it exists.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn get(&self, id: &str) -> Result<Option<FoundContainer>, ContainerError> {
        if check_id(id).is_err() {
            return Ok(None);
        }
        Ok(self.see(id)?.and_then(GcContainer::found))
    }

    /// Returns the image of a container, or `None` if its record cannot be read or the container is gone.
    #[must_use]
    pub fn image_of(&self, id: &str) -> Option<ImageId> {
        check_id(id).ok()?;
        let directory = self.directory.open_if_there(id).ok()??;
        Some(read_record(&directory).ok()?.ok()?.image)
    }

    /// Returns the names of all containers, in byte order, without opening their directories.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn ids(&self) -> Result<Vec<String>, DiskError> {
        let listed = self.directory.list()?;
        let folders = listed.iter().filter(|it| it.kind == rustix::fs::FileType::Directory);
        let ids = folders.filter_map(|it| it.text().filter(|id| check_id(id).is_ok()));
        Ok(ids.map(str::to_owned).collect())
    }

    /// Returns `None` if the container was removed after it was listed.
    fn open(&self, id: &str) -> Result<Option<(Directory, Liveness)>, DiskError> {
        // A directory that was replaced and removed since is opened again.
        while let Some(directory) = self.directory.open_if_there(id)? {
            if is_alive(&directory)? {
                return Ok(Some((directory, Liveness::Alive)));
            }
            if directory.is_linked()? {
                return Ok(Some((directory, Liveness::Dead)));
            }
        }
        Ok(None)
    }

    /// Returns `None` if the container does not exist, or another process is removing it.
    fn see(&self, id: &str) -> Result<Option<GcContainer>, DiskError> {
        loop {
            let Some((directory, liveness)) = self.open(id)? else { return Ok(None) };
            let record = read_record(&directory)?;
            // Another process may have replaced or removed the directory, and be removing its files.
            if matches!(record, Err(RecordError::Unwritten)) {
                let identity = |it: rustix::fs::Stat| (it.st_dev, it.st_ino);
                let own = rustix::fs::fstat(directory.as_fd());
                let own = own.map_err(|errno| directory.failed("stat", "", errno))?;
                match self.directory.stat(id)? {
                    None => return Ok(None),
                    Some(found) if identity(found) != identity(own) => continue,
                    Some(_) => {}
                }
            }
            return Ok(Some(GcContainer { id: id.to_owned(), liveness, record }));
        }
    }

    pub(crate) fn see_all(&self) -> Result<Vec<GcContainer>, DiskError> {
        let mut seen = Vec::new();
        for id in self.ids()? {
            seen.extend(self.see(&id)?);
        }
        Ok(seen)
    }

    /// Whether the directory of a dead container that is not kept has an entry of this name, or a removal was not
    /// finished.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn is_left(&self, name: &str) -> Result<bool, ContainerError> {
        let has = |parent: &Directory, folder: &str| -> Result<bool, DiskError> {
            let folder = parent.open_if_there(folder)?;
            folder.map_or(Ok(false), |it| Ok(it.open_if_there(name)?.is_some()))
        };
        for seen in self.see_all()?.into_iter().filter(GcContainer::is_garbage) {
            if has(&self.directory, &seen.id)? {
                return Ok(true);
            }
        }
        // A part of such a directory may already be removed, so a missing entry proves nothing. An unfinished copy of a
        // container's changes has files of the same users.
        for left in names(&self.tmp)?.into_iter().filter(|it| !may_be_import(it)) {
            let folder = self.tmp.open_if_there(&left)?;
            if folder.map_or(Ok(false), |it| is_alive(&it).map(|is_alive| !is_alive))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the directory of a dead container. Returns `false` if the container is alive or gone.
    pub(crate) fn remove_dead(&self, id: &str) -> Result<bool, DiskError> {
        let Owner::Dead(_lock) = owner(&self.directory, id)? else { return Ok(false) };
        self.directory.remove_tree(id).map(|()| true)
    }

    /// Whether another process is removing a container's directory at this moment.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn is_clearing(&self) -> Result<bool, ContainerError> {
        for name in names(&self.tmp)?.into_iter().filter(|name| is_hidden(name)) {
            if let Some(directory) = self.tmp.open_if_there(&name)?
                && is_alive(&directory)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl GcContainer {
    /// Returns `None` for a container whose record was never written and whose creator has ended.
    fn found(self) -> Option<FoundContainer> {
        let Self { id, liveness, record } = self;
        let record = match record {
            Ok(record) => Ok(record),
            Err(RecordError::Unwritten) if liveness == Liveness::Dead => return None,
            Err(source) => Err(ContainerError::Damaged { id: id.clone(), source }),
        };
        Some(FoundContainer { id, record, liveness })
    }

    pub(crate) fn is_garbage(&self) -> bool {
        let keep = match &self.record {
            Ok(record) => record.keep,
            Err(RecordError::Unwritten) => false,
            Err(_) => true,
        };
        self.liveness == Liveness::Dead && !keep
    }
}
