//! Reads a container's changes against its image: while it runs, from a copy that is made like a snapshot's, or after
//! its end.

use std::io::{self, ErrorKind, PipeReader, Write};
use std::os::fd::AsFd as _;
use std::sync::atomic::AtomicBool;

use image::erofs::read;
use image::tree::Tree;
use store::{
    ContainerDir, ContainerError, ContainerSnapshotError, OpenImage, OpenImageError,
    OperationError, Store,
};

use crate::bundle::spec::RuntimeSpec;
use crate::changes::{self, ChangesError, Owners, Report, Upper};
use crate::life::background;
use crate::life::cgroup::pause::{PauseError, Paused, freeze};
use crate::life::lookup::{KnownContainer, KnownError, find_at_rest, find_container};
use crate::life::writable_layer::Changes;
use crate::snapshot::Share;
use crate::snapshot::take::{self, LongWork, TakeError};

/// A container whose changes are read, with the necessary resources.
#[derive(Debug)]
pub struct LookedContainer {
    pub found: KnownContainer,
    /// Image of the container, which is protected from `gc`.
    pub image: OpenImage,
    pub tree: Tree,
    /// The pause, until the changes are read; `None` if the container is not paused, because it has ended, or its
    /// changes were copied.
    pub paused: Option<Paused>,
    ids: Owners,
    changes: Changes,
    /// Keeps other commands from removing an ended container.
    _lock: Option<ContainerDir>,
}

/// Whether a running container is paused while its changes are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meanwhile {
    /// The changes are copied, and the container is frozen for the second copy. If there is no space for a copy, the
    /// container is frozen until its changes are read.
    Stands,
    /// The container keeps running. A file that changes during the read is an error.
    GoesOn,
}

/// Reason why a container's changes cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LookError {
    /// The container does not exist, or cannot be looked up.
    #[error(transparent)]
    Known(#[from] KnownError),
    /// The container's folder cannot be locked.
    #[error(transparent)]
    Folder(#[from] ContainerError),
    /// The container's image is unknown.
    #[error("container {0} is damaged")]
    Damaged(String),
    /// The image cannot be opened.
    #[error(transparent)]
    Image(Box<OpenImageError>),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The changes cannot be copied.
    #[error(transparent)]
    Copy(Box<TakeError>),
    /// The snapshots below the container's changes cannot be opened.
    #[error(transparent)]
    Snapshot(#[from] ContainerSnapshotError),
    /// The container keeps running, and its changes cannot be merged with the snapshots below.
    #[error(
        "container {0} was made from a snapshot, so its changes cannot be read while it keeps \
        running: leave --no-pause out, or stop it"
    )]
    Moving(String),
    /// The container cannot be paused.
    #[error(
        "cannot pause container {id}: with --no-pause it keeps running, and a file that changes \
        during the read is an error"
    )]
    Pause { id: String, source: PauseError },
    /// The changes cannot be read.
    #[error(transparent)]
    Read(#[from] ChangesError),
}

/// Opens the changes of the container with this name, or with an id that starts with `name`. The store `images`
/// contains its image. `now` returns the time, in seconds since 1970. This process must have only one thread while
/// `work` runs nothing, because it forks a child that resumes a paused container.
///
/// The changes of a running container are copied into the store `store`, in a directory without a name that ends with
/// the result.
pub fn look(
    store: &Store,
    images: &Store,
    name: &str,
    meanwhile: Meanwhile,
    work: &LongWork<'_>,
    now: &dyn Fn() -> i64,
) -> Result<LookedContainer, LookError> {
    let (found, lock) = find_at_rest(store, name, &|| false)?;
    let record = found.record.as_ref().ok_or_else(|| LookError::Damaged(found.id.clone()))?;
    let image =
        images.open_image(&record.image).map_err(|error| LookError::Image(Box::new(error)))?;
    let tree = images
        .tree(&image, read::Owners::AsWritten)
        .map_err(OperationError::of("read image", image.id))?
        .tree;
    let spec = RuntimeSpec::load(&found.folder);
    let spec =
        spec.map_err(OperationError::of("read the configuration of container", &found.id))?;
    let ids = Owners::of_bundle(&spec.linux);
    let failed = OperationError::of("read the changes of container", &found.id);
    let chain = match &record.snapshot {
        Some(below) => store.container_snapshots.chain(below)?,
        None => Vec::new(),
    };
    let (changes, paused) = match &lock {
        None if meanwhile == Meanwhile::GoesOn && !chain.is_empty() => {
            return Err(LookError::Moving(found.id.clone()));
        }
        None if meanwhile == Meanwhile::GoesOn => {
            (Changes::of_running(&found.folder).map_err(failed)?, None)
        }
        None => match copy(store, &found, work) {
            // A merge with the snapshots below needs space for the names, so it would fail as well.
            Err(error) if chain.is_empty() && cannot_hold_copy(&error) => {
                let id = &found.id;
                tracing::debug!(
                    id,
                    "no space for a copy of the changes: frozen while they are read"
                );
                let changes = Changes::of_running(&found.folder).map_err(failed)?;
                (changes, stand(store, &found)?)
            }
            copied => (copied?, None),
        },
        Some(lock) => {
            // The monitor may have been killed, with or without the container.
            background::bury(lock, now())
                .map_err(OperationError::of("read the changes of container", &found.id))?;
            (Changes::of_ended(lock.path()).map_err(failed)?, None)
        }
    };
    let changes = match &*chain {
        [] => changes,
        chain => {
            let upper = changes.directory();
            let merged = take::merged(store, &found.id, upper, chain, Share::Link, work);
            let (merged, _) = merged.map_err(|error| LookError::Copy(Box::new(error)))?;
            Changes::of_copy(merged)?
        }
    };
    Ok(LookedContainer { tree, ids, changes, paused, _lock: lock, image, found })
}

/// Whether the reason of an error is that the store's disk has no space for a copy, or is read-only.
fn cannot_hold_copy(error: &LookError) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(it) = cause {
        if let Some(io) = it.downcast_ref::<io::Error>() {
            return matches!(
                io.kind(),
                ErrorKind::StorageFull
                    | ErrorKind::QuotaExceeded
                    | ErrorKind::FileTooLarge
                    | ErrorKind::ReadOnlyFilesystem
            );
        }
        cause = it.source();
    }
    false
}

/// Copies the changes of a running container.
fn copy(store: &Store, found: &KnownContainer, work: &LongWork<'_>) -> Result<Changes, LookError> {
    let draft = store.container_snapshots.draft()?;
    let to = draft.upper()?;
    match take::of_running(store, found, to.as_fd(), work) {
        Ok(_copied) => Ok(Changes::of_copy(draft)?),
        Err(TakeError::Freeze { id, source }) => Err(LookError::Pause { id, source }),
        Err(error) => Err(LookError::Copy(Box::new(error))),
    }
}

/// Freezes a container. Returns `None` if it has ended.
fn stand(store: &Store, found: &KnownContainer) -> Result<Option<Paused>, LookError> {
    match freeze(&found.folder, &found.id) {
        Ok(paused) => Ok(Some(paused)),
        // The upper directory is already open, and does not change any more.
        Err(_) if !find_container(store, &found.id).is_ok_and(|it| it.is_watched()) => Ok(None),
        Err(source) => Err(LookError::Pause { id: found.id.clone(), source }),
    }
}

impl LookedContainer {
    /// Writes the changes as the tar of a layer, and resumes the container.
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

    /// Writes the layer as [`write`](Self::write) does, while `take` reads the tar to its end through a pipe.
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
