//! Replaces the writable layer of a container at rest by an empty one, above a snapshot or only the image.
//!
//! The container gets another folder, with the new record, the new layer, and links to the files that it keeps. One
//! rename exchanges both folders. So the container has its old changes above the old snapshot, or none above the new
//! snapshot, also after `kill -9` and after a crash of the host.

use std::ffi::OsStr;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use rustix::fs::AtFlags;
use rustix::io::Errno;
use store::{
    ContainerDir, ContainerError, ContainerRecord, ContainerSnapshotError, OperationError, Store,
};

use crate::folder::{
    CODE, CONFIG, FILESTORE, LOG, LOG_OLDER, NETWORKS, OVER, PORTS, REQUEST, RUNTIME_PATH, STATE,
    STATE_BEFORE, STOPPED, USERNS,
};
use crate::life::end::ended::sync_needed;
use crate::life::end::teardown;
use crate::life::kept::KeptContainer;
use crate::life::writable_layer::WritesPlace;
use crate::root::filestore::{self, Backing};
use crate::root::{PlaceError, WritableChoice, WritablePlace};

/// Files that the new folder shares with the old one.
const SHARED: [&str; 12] = [
    REQUEST,
    USERNS,
    PORTS,
    NETWORKS,
    LOG,
    LOG_OLDER,
    CONFIG,
    RUNTIME_PATH,
    STATE,
    STATE_BEFORE,
    STOPPED,
    CODE,
];

/// Reason why a container keeps its changes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RollBackError {
    /// The changes are in a directory of the user's.
    #[error(
        "the changes of container {id} are in {}, which Quire does not replace: remove the \
        container, empty the directory, and start another container with it", path.display()
    )]
    Directory { id: String, path: PathBuf },
    /// The snapshot is not on the disk.
    #[error(transparent)]
    Snapshot(#[from] ContainerSnapshotError),
    /// An empty layer cannot be made.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The folder cannot be made or exchanged.
    #[error(transparent)]
    Folder(#[from] ContainerError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Replaces the writable layer of a container by an empty one above `snapshot`, or above only the image. The files of
/// the old layer are removed in the background. Programs are searched in `search`, which has the syntax of `PATH`.
///
/// # Errors
/// [`RollBackError`]; the container is unchanged then, but no longer locked.
pub fn roll_back(
    store: &Store,
    kept: KeptContainer,
    snapshot: Option<&str>,
    search: &OsStr,
) -> Result<KeptContainer, RollBackError> {
    let id = kept.id().to_owned();
    let choice = kept.request().writable.clone();
    if let WritableChoice::Directory(path, _) = choice {
        return Err(RollBackError::Directory { id, path });
    }
    // The changes are removed, so the snapshot must survive a crash.
    snapshot.map_or(Ok(()), |it| store.settle_container_snapshot(it))?;
    let snapshot = snapshot.map(str::to_owned);
    let record = ContainerRecord { snapshot, ..kept.record().clone() };
    let place = choice.make(store, Backing::Ahead, search)?;
    let replacement = store.replacement_of_container(&id, &record)?;
    fill(replacement.folder(), kept.folder(), place)?;
    sync_needed(replacement.folder().path(), &id);
    kept.moved(record, |folder| {
        let (new, old) = store.replace_container(folder, replacement)?;
        if let Err(error) = teardown::remove_behind(old, store.who()) {
            tracing::warn!(id, %error, "cannot remove the container's old changes: `quire gc` removes them");
        }
        Ok(new)
    })
}

/// Fills the new folder of a container with an empty layer, and with files of the old folder.
fn fill(new: &ContainerDir, old: &ContainerDir, place: WritablePlace) -> Result<(), RollBackError> {
    let path = new.path();
    let writes = match &place {
        WritablePlace::Memory(_) => WritesPlace::Memory,
        WritablePlace::Filestore(file, _) => {
            let named = filestore::name(file.as_fd(), new.fd(), FILESTORE);
            named.map_err(OperationError::at("keep a filestore in", path))?;
            WritesPlace::Filestore { lost: false }
        }
        WritablePlace::Draft(..) => WritesPlace::Folder { lost: false },
        WritablePlace::None
        | WritablePlace::Directory(..)
        | WritablePlace::Kept(..)
        | WritablePlace::Continued(..) => WritesPlace::None,
    };
    drop(place.settle(new)?);
    let failed = OperationError::at("write in", path);
    writes.save(path).map_err(failed)?;
    for name in SHARED {
        match rustix::fs::linkat(old.fd(), name, new.fd(), name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(OperationError::at("write in", path)(errno).into()),
        }
    }
    Ok(std::fs::write(path.join(OVER), "").map_err(failed)?)
}
