//! One folder per container. The `container` crate owns everything in it besides the record.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use image::verity::ImageId;
use serde::{Deserialize, Serialize};

use super::refs::Seconds;
use crate::disk::{Directory, DiskError};
use crate::record::{self, RECORD_MAX, RecordError};
use crate::staging::{LOCK, Owner, Tmp, Workspace, hide, is_alive, is_hidden, names, owner};
use image::digest::Digest;

/// A container's record, in its folder.
pub(crate) const RECORD: &str = "container.json";

/// The record of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerRecord {
    /// Its image: `gc` keeps it as long as the folder is there.
    pub image: ImageId,
    /// The manifest of its image, if it has one: `gc` keeps that and its layers, too. None in folders of older versions.
    pub manifest: Option<Digest>,
    /// The image name that it was started with, as given.
    pub name: Option<String>,
    /// When it was made.
    pub created: Seconds,
    /// Whether its folder stays after its end. If not, the next command removes the folder.
    pub keep: bool,
    /// The directory of the store that has the image, if it is one that others share. Then nothing of the image is here to be
    /// kept.
    pub shared: Option<String>,
    /// The boot of the machine in which it was made: in another one none of its processes runs. None in folders of older
    /// versions.
    pub boot: Option<String>,
}

/// As written.
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
}

/// Whether a process holds the container's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// A process holds the lock of the folder, or of the file in it.
    Alive,
    /// No process holds a lock.
    Dead,
}

/// Why a container's folder cannot be made, opened or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerError {
    /// The name is not 1 to 64 of `a-z A-Z 0-9 - _ .`, or begins with a dot or a hyphen.
    #[error("\"{}\" is not a container name: use 1 to 64 letters, digits, - _ and ., and do not begin with - or .", .0.escape_debug())]
    Id(String),
    /// A container of this name exists.
    #[error("container {0} already exists")]
    Exists(String),
    /// No container of this name exists.
    #[error("there is no container {0}")]
    Absent(String),
    /// Its image is not in the store.
    #[error("container {id} needs image {image}, which is not in the store")]
    NoImage {
        /// The container.
        id: String,
        /// Its image.
        image: ImageId,
    },
    /// Its record cannot be read.
    #[error(
        "the record of container {id} is damaged: `quire rm --container --force {id}` removes it"
    )]
    Damaged {
        /// The container.
        id: String,
        /// The cause.
        source: RecordError,
    },
    /// The store was opened for reading only.
    #[error("the store {} was opened for reading only", .0.display())]
    ReadOnly(std::path::PathBuf),
    /// An error of the disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// A container's folder, `containers/ID/`, open and locked (`flock` on the descriptor). It stays
/// locked as long as any process has a copy of the descriptor, or of that of the lock.
#[derive(Debug)]
pub struct ContainerDir {
    parent: Directory,
    tmp: Directory,
    directory: Directory,
    lock: Option<OwnedFd>,
    id: String,
    /// What the folder is called in its parent.
    name: String,
    record: Option<ContainerRecord>,
}

impl ContainerDir {
    /// The container's name.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// An empty file in the folder, locked: the container counts as alive as long as any process has a copy of this
    /// descriptor. The runtime gets it instead of the folder, because a directory of the host leads to all others.
    /// `None` for a folder that was found dead.
    #[must_use]
    pub fn lock(&self) -> Option<BorrowedFd<'_>> {
        self.lock.as_ref().map(|fd| fd.as_fd())
    }

    /// The folder, for the files of the `container` crate. Copies of the descriptor keep the lock, so no other program
    /// may have one. It is close-on-exec.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// The path of the folder, for runtimes, which take only paths.
    #[must_use]
    pub fn path(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// Its record; `None` if it is damaged.
    #[must_use]
    pub const fn record(&self) -> Option<&ContainerRecord> {
        self.record.as_ref()
    }

    /// Moves the folder out of `containers/`. It then has another path, and is still locked. If this process dies, the
    /// next command removes it.
    ///
    /// # Errors
    /// [`ContainerError`] when it cannot be moved.
    pub fn hide(self) -> Result<Self, ContainerError> {
        if self.name != self.id {
            return Ok(self);
        }
        // It can fail for want of descriptors, so it comes before the folder has another name.
        let parent = self.tmp.try_clone()?;
        let (directory, name) = hide(&self.parent, &self.name, &self.directory, &self.tmp)?;
        Ok(Self { parent, directory, name, ..self })
    }

    /// Hides the folder and removes everything in it, then the lock. Fails if something is mounted in it: unmount that
    /// first.
    ///
    /// # Errors
    /// [`ContainerError`] when something cannot be removed.
    pub fn remove(self) -> Result<(), ContainerError> {
        let hidden = self.hide()?;
        Ok(hidden.parent.remove_tree(&hidden.name)?)
    }
}

/// Directory for the writes of a container whose folder is not made yet. It is removed unless it is kept.
#[derive(Debug)]
pub struct WritableDraft(Workspace);

impl WritableDraft {
    /// The locked directory. Copies of the descriptor keep the lock.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.directory.as_fd()
    }

    /// Moves it into a container's folder, and returns the directory with its lock.
    ///
    /// # Errors
    /// [`ContainerError::Exists`] if the folder has an entry of this name, or an error of the disk.
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
/// would take a hyphen for an option.
///
/// # Errors
/// [`ContainerError::Id`] if not.
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
        // The checksum is right, so this is our own text or no text of ours.
        let image = raw.image.parse().ok().ok_or(RecordError::Checksum)?;
        let manifest = raw.manifest.as_deref().map(str::parse).transpose();
        let manifest = manifest.ok().ok_or(RecordError::Checksum)?;
        let Raw { name, created, keep, shared, boot, .. } = raw;
        Ok(ContainerRecord { image, manifest, name, created, keep, shared, boot })
    }))
}

/// The state of a container at the time it was read.
#[derive(Debug)]
pub struct FoundContainer {
    /// Its name.
    pub id: String,
    /// Its record, or how it is damaged.
    pub record: Result<ContainerRecord, ContainerError>,
    /// Whether a process holds its lock.
    pub liveness: Liveness,
}

/// A container as `gc` sees it.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) id: String,
    pub(crate) liveness: Liveness,
    pub(crate) record: Result<ContainerRecord, RecordError>,
}

/// `containers/`: a folder for each container.
#[derive(Debug)]
pub struct ContainerShelf {
    pub(crate) directory: Directory,
    pub(crate) tmp: Arc<Tmp>,
}

/// A folder in the making, with its record and its lock.
#[derive(Debug)]
pub(crate) struct ContainerDraft {
    work: Workspace,
    lock: OwnedFd,
    record: ContainerRecord,
}

impl ContainerShelf {
    /// Makes a directory for the writes of a container, on the same disk as its folder.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn layer(&self) -> Result<WritableDraft, ContainerError> {
        Ok(WritableDraft(Workspace::make(&self.tmp)?))
    }

    /// Writes what a container's folder begins with. The record of one that is kept is synced.
    pub(crate) fn draft(&self, record: &ContainerRecord) -> Result<ContainerDraft, DiskError> {
        let work = Workspace::make(&self.tmp)?;
        let mut file = work.directory.create(RECORD)?;
        file.write_all(&record::encode(&Raw {
            image: record.image.to_string(),
            manifest: record.manifest.map(|it| it.to_string()),
            name: record.name.clone(),
            created: record.created,
            keep: record.keep,
            shared: record.shared.clone(),
            boot: record.boot.clone(),
        }))?;
        file.publish_mode()?;
        drop(file);
        let lock = work.directory.create_locked(LOCK)?;
        if record.keep {
            work.directory.sync_file(RECORD)?;
            work.directory.sync()?;
        }
        Ok(ContainerDraft { work, lock, record: record.clone() })
    }

    /// Makes the folder a container's. The store's lock is held.
    pub(crate) fn publish(
        &self,
        id: &str,
        draft: ContainerDraft,
    ) -> Result<ContainerDir, ContainerError> {
        let ContainerDraft { work, lock, record } = draft;
        // All that can fail for want of descriptors comes before there is a container.
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

    /// `containers/`, for what the `container` crate keeps beside the containers, under names that begin with a dot.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Whether a process holds the lock of a container's folder. `false` if there is no folder.
    ///
    /// # Errors
    /// [`ContainerError`] when the lock cannot be tested.
    pub fn is_alive(&self, id: &str) -> Result<bool, ContainerError> {
        check_id(id)?;
        match self.directory.open_if_there(id)? {
            Some(directory) => Ok(is_alive(&directory)?),
            None => Ok(false),
        }
    }

    /// Opens and locks the folder of a dead container; `None` when it is alive, or another process tests its lock.
    ///
    /// # Errors
    /// [`ContainerError`] when there is none.
    pub fn lock(&self, id: &str) -> Result<Option<ContainerDir>, ContainerError> {
        check_id(id)?;
        match owner(&self.directory, id)? {
            Owner::Alive => Ok(None),
            Owner::Gone => Err(ContainerError::Absent(id.to_owned())),
            Owner::Dead(directory) => {
                let record = read_record(&directory)?.ok();
                let (parent, tmp) = (self.directory.try_clone()?, self.tmp.try_clone()?);
                let (id, name, lock) = (id.to_owned(), id.to_owned(), None);
                Ok(Some(ContainerDir { parent, tmp, directory, lock, name, id, record }))
            }
        }
    }

    /// All containers whose record can be read, in byte order of their ids; the others are
    /// [`damaged`](Self::damaged).
    ///
    /// # Errors
    /// An error of the disk.
    pub fn all(&self) -> Result<Vec<(String, ContainerRecord, Liveness)>, ContainerError> {
        let seen = self.see_all()?.into_iter();
        Ok(seen.filter_map(|it| Some((it.id, it.record.ok()?, it.liveness))).collect())
    }

    /// Containers with a damaged record, and the damage. Their image is unknown.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn damaged(&self) -> Result<Vec<(String, Liveness, ContainerError)>, ContainerError> {
        let found = self.see_all()?.into_iter().filter_map(Seen::found);
        let damaged = found.filter_map(|it| Some((it.id, it.liveness, it.record.err()?)));
        Ok(damaged.collect())
    }

    /// The names of living containers, and the dead ones. Does not read the records of the living, so it costs a
    /// fraction of a microsecond for each; every start calls it.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn living_and_dead(&self) -> Result<(Vec<String>, Vec<FoundContainer>), ContainerError> {
        let (mut living, mut dead) = (Vec::new(), Vec::new());
        for id in self.ids()? {
            match self.open(&id)? {
                Some((_, Liveness::Alive)) => living.push(id),
                Some((directory, Liveness::Dead)) => {
                    dead.extend(self.see(id, &directory, Liveness::Dead)?.and_then(Seen::found));
                }
                None => {}
            }
        }
        Ok((living, dead))
    }

    /// The container of this name, if there is one.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn get(&self, id: &str) -> Result<Option<FoundContainer>, ContainerError> {
        if check_id(id).is_err() {
            return Ok(None);
        }
        let Some((directory, liveness)) = self.open(id)? else { return Ok(None) };
        Ok(self.see(id.to_owned(), &directory, liveness)?.and_then(Seen::found))
    }

    /// The image of a container; `None` if its record cannot be read, or the container is gone.
    #[must_use]
    pub fn image_of(&self, id: &str) -> Option<ImageId> {
        check_id(id).ok()?;
        let directory = self.directory.open_if_there(id).ok()??;
        Some(read_record(&directory).ok()?.ok()?.image)
    }

    /// The names of all containers, in byte order, from the directory alone.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn ids(&self) -> Result<Vec<String>, DiskError> {
        let listed = self.directory.list()?;
        let folders = listed.iter().filter(|it| it.kind == rustix::fs::FileType::Directory);
        let ids = folders.filter_map(|it| it.text().filter(|id| check_id(id).is_ok()));
        Ok(ids.map(str::to_owned).collect())
    }

    /// None if it has been removed since it was listed.
    fn open(&self, id: &str) -> Result<Option<(Directory, Liveness)>, DiskError> {
        let Some(directory) = self.directory.open_if_there(id)? else { return Ok(None) };
        let liveness = match is_alive(&directory)? {
            true => Liveness::Alive,
            false if directory.is_linked()? => Liveness::Dead,
            false => return Ok(None),
        };
        Ok(Some((directory, liveness)))
    }

    /// None if somebody removes it just now.
    fn see(
        &self,
        id: String,
        directory: &Directory,
        liveness: Liveness,
    ) -> Result<Option<Seen>, DiskError> {
        let record = read_record(directory)?;
        let is_empty = matches!(record, Err(RecordError::Unwritten));
        if is_empty && self.directory.open_if_there(&id)?.is_none() {
            return Ok(None);
        }
        Ok(Some(Seen { id, liveness, record }))
    }

    pub(crate) fn see_all(&self) -> Result<Vec<Seen>, DiskError> {
        let mut seen = Vec::new();
        for id in self.ids()? {
            if let Some((directory, liveness)) = self.open(&id)? {
                seen.extend(self.see(id, &directory, liveness)?);
            }
        }
        Ok(seen)
    }

    /// Whether the folder of a dead container that is not kept has an entry of this name, or a removal was not finished.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn is_left(&self, name: &str) -> Result<bool, ContainerError> {
        let has = |parent: &Directory, folder: &str| -> Result<bool, DiskError> {
            let folder = parent.open_if_there(folder)?;
            folder.map_or(Ok(false), |it| Ok(it.open_if_there(name)?.is_some()))
        };
        for seen in self.see_all()?.into_iter().filter(Seen::is_garbage) {
            if has(&self.directory, &seen.id)? {
                return Ok(true);
            }
        }
        // Part of such a folder may be gone, so the lack of an entry proves nothing.
        for hidden in names(&self.tmp)?.into_iter().filter(|it| is_hidden(it)) {
            let folder = self.tmp.open_if_there(&hidden)?;
            if folder.map_or(Ok(false), |it| is_alive(&it).map(|is_alive| !is_alive))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the folder of a dead container. `false` if it is alive, or gone.
    pub(crate) fn remove_dead(&self, id: &str) -> Result<bool, DiskError> {
        let Owner::Dead(_lock) = owner(&self.directory, id)? else { return Ok(false) };
        self.directory.remove_tree(id).map(|()| true)
    }

    /// Whether another process is removing a container's folder at this moment.
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

impl Seen {
    /// None if it was begun and never written, and nobody is writing it.
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
