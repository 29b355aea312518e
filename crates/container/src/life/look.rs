//! Reads a container's changes against its image: while it runs, paused if the caller wants, or after its end.

use std::io::{self, PipeReader, Write};
use std::sync::atomic::AtomicBool;

use image::erofs::read;
use image::tree::Tree;
use image::verity::ImageId;
use store::{ContainerDir, ContainerError, ContentsError, OpenImage, OpenImageError, Store};

use crate::bundle::spec::{RuntimeSpec, SpecError};
use crate::changes::{self, ChangesError, Owners, Report, Upper};
use crate::life::detached;
use crate::life::kept::{Changes, KeptError};
use crate::life::known::{KnownContainer, KnownError, find};
use crate::life::pause::{PauseError, Paused, pause};
use crate::pace::GLANCE;

/// A container that is looked at, with all that this needs.
#[derive(Debug)]
pub struct LookedContainer {
    /// Which.
    pub found: KnownContainer,
    /// Its image, which `gc` leaves meanwhile.
    pub image: OpenImage,
    /// The tree of its image.
    pub tree: Tree,
    /// Set until its changes are read, if it stands still for that.
    pub paused: Option<Paused>,
    ids: Owners,
    changes: Changes,
    /// Keeps others from removing a container that has ended.
    _lock: Option<ContainerDir>,
}

/// Whether a running container keeps running while its changes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meanwhile {
    /// It is paused.
    Stands,
    /// It keeps running. A file that it changes meanwhile is an error.
    GoesOn,
}

/// A container's changes could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookError {
    /// There is none, or it cannot be looked up.
    #[error(transparent)]
    Known(#[from] KnownError),
    /// Its folder cannot be locked.
    #[error(transparent)]
    Folder(#[from] ContainerError),
    /// Its image is unknown.
    #[error("container {0} is damaged")]
    Damaged(String),
    /// Its image cannot be opened.
    #[error(transparent)]
    Image(Box<OpenImageError>),
    /// Its image cannot be read.
    #[error("cannot read image {image}")]
    Tree {
        /// The image.
        image: ImageId,
        /// Why.
        source: ContentsError,
    },
    /// Its bundle cannot be read.
    #[error("cannot read the configuration of container {id}")]
    Spec {
        /// The container.
        id: String,
        /// Why.
        source: SpecError,
    },
    /// Its writable layer is gone.
    #[error("cannot read the changes of container {id}")]
    Changes {
        /// The container.
        id: String,
        /// Why.
        source: KeptError,
    },
    /// Its end cannot be noted.
    #[error("cannot read the changes of container {id}")]
    Bury {
        /// The container.
        id: String,
        /// The disk's answer.
        source: io::Error,
    },
    /// It does not stand still.
    #[error(
        "cannot pause container {id}: --no-pause lets it run, and a file that changes meanwhile is then an error"
    )]
    Pause {
        /// The container.
        id: String,
        /// Why.
        source: PauseError,
    },
    /// The changes cannot be read.
    #[error(transparent)]
    Read(#[from] ChangesError),
}

/// Opens the changes of the container with this name, or with an id that begins so. The store `images` has its image. `now`
/// is the time, in seconds since 1970. This process must have no other thread, because it forks a child that resumes a paused
/// container.
///
/// # Errors
/// [`LookError`].
pub fn look(
    store: &Store,
    images: &Store,
    name: &str,
    meanwhile: Meanwhile,
    now: &dyn Fn() -> i64,
) -> Result<LookedContainer, LookError> {
    let found = find(store, name)?;
    let id = || found.id.clone();
    let record = found.record.as_ref().ok_or_else(|| LookError::Damaged(id()))?;
    let image =
        images.open_image(&record.image).map_err(|error| LookError::Image(Box::new(error)))?;
    let tree = images
        .tree(&image, read::Owners::AsWritten)
        .map_err(|source| LookError::Tree { image: image.id, source })?
        .tree;
    let spec = RuntimeSpec::load(&found.folder);
    let ids =
        Owners::of_bundle(&spec.map_err(|source| LookError::Spec { id: id(), source })?.linux);
    let failed = |source| LookError::Changes { id: id(), source };
    let (changes, paused, lock) = if found.is_watched() {
        let changes = Changes::of_running(&found.folder).map_err(failed)?;
        let paused = match meanwhile {
            Meanwhile::GoesOn => None,
            Meanwhile::Stands => stand(store, &found)?,
        };
        (changes, paused, None)
    } else {
        let lock = lock(store, &found.id)?;
        // Its monitor may have been killed, and the container with it or not.
        detached::bury(&lock, now()).map_err(|source| LookError::Bury { id: id(), source })?;
        (Changes::of_ended(lock.path()).map_err(failed)?, None, Some(lock))
    };
    Ok(LookedContainer { tree, ids, changes, paused, _lock: lock, image, found })
}

/// Pauses a container; none if it has ended.
fn stand(store: &Store, found: &KnownContainer) -> Result<Option<Paused>, LookError> {
    match pause(&found.folder, &found.id) {
        Ok(paused) => Ok(Some(paused)),
        // What it wrote is held already, and changes no more.
        Err(PauseError::Refused | PauseError::Unasked(_))
            if !find(store, &found.id).is_ok_and(|it| it.is_watched()) =>
        {
            Ok(None)
        }
        Err(source) => Err(LookError::Pause { id: found.id.clone(), source }),
    }
}

/// The folder of a container that has ended; waits until what it wrote is on the disk.
fn lock(store: &Store, id: &str) -> Result<ContainerDir, ContainerError> {
    loop {
        match store.containers.lock(id)? {
            Some(folder) => return Ok(folder),
            None => std::thread::sleep(GLANCE),
        }
    }
}

impl LookedContainer {
    /// Writes the changes as the tar of a layer, and lets the container go on.
    ///
    /// # Errors
    /// [`ChangesError`].
    pub fn write(
        &self,
        store: &Store,
        paused: Option<Paused>,
        out: &mut dyn Write,
        cancel: &AtomicBool,
    ) -> Result<Report, ChangesError> {
        let upper = Upper {
            directory: self.changes.directory(),
            image: &self.tree,
            store,
            ids: &self.ids,
            latest: None,
            cancel,
        };
        let report = changes::write(&upper, out);
        drop(paused);
        report
    }

    /// Does as [`write`](Self::write), and gives the tar to `take` meanwhile, which reads it to its end.
    ///
    /// # Errors
    /// [`ChangesError`], and the errors of `take`.
    pub fn through<T, E: From<ChangesError>>(
        &self,
        store: &Store,
        paused: Option<Paused>,
        cancel: &AtomicBool,
        take: impl FnOnce(PipeReader) -> Result<T, E>,
    ) -> Result<(Report, T), E> {
        let write = |out: &mut dyn Write| self.write(store, paused, out, cancel);
        changes::through(write, take)
    }
}
