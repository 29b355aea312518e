//! Takes a snapshot of a container's root, and publishes it in the store.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use store::{
    ContainerDir, ContainerError, ContainerRecord, ContainerSnapshot, ContainerSnapshotDraft,
    ContainerSnapshotError, ContainerSnapshotRecord, OperationError, Seconds, Store,
};

use kernel::mount::XattrNamespace;

use super::{CopyError, CopyReport, FirstCopy, MergeError, Share, first_copy, merge};
use crate::folder::USERNS;
use crate::life::background;
use crate::life::cgroup::cgroups;
use crate::life::cgroup::pause::{PauseError, freeze};
use crate::life::lookup::{KnownContainer, KnownError, find_at_rest, find_container};
use crate::life::writable_layer::{Changes, KeptError};

/// Maximum number of snapshots below a writable layer. Each is a layer of the overlay, and a lookup of a name that does
/// not exist asks every layer. A snapshot above so many is merged with all that are below it.
pub const CHAIN_MAX: usize = 16;

/// Name of a new snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotName {
    /// This name.
    Given(String),
    /// The container's name, and the next number: `web-1`.
    Numbered,
    /// None: the snapshot exists as long as a container or another snapshot needs it.
    None,
}

/// The caller's way to run long copies.
#[expect(missing_debug_implementations, reason = "functions have no debug output")]
pub struct LongWork<'a> {
    /// Set when the caller wants the copies to end.
    pub cancel: &'a AtomicBool,
    /// Calls its argument once, perhaps in another thread, and returns when that thread has ended.
    pub run: &'a dyn Fn(&mut (dyn FnMut() + Send)) -> std::io::Result<()>,
}

impl LongWork<'_> {
    fn call<T: Send>(&self, mut work: impl FnMut() -> T + Send) -> Result<T, OperationError> {
        let mut done = None;
        let failed = OperationError::of("run", "a copy of files");
        (self.run)(&mut || done = Some(work())).map_err(failed)?;
        done.ok_or_else(|| failed(std::io::Error::from(std::io::ErrorKind::Interrupted)))
    }
}

/// A snapshot that was taken.
#[derive(Debug)]
pub struct Taken {
    pub snapshot: ContainerSnapshot,
    pub copied: CopyReport,
    /// How long the container was frozen; `None` for a container at rest.
    pub pause: Option<Duration>,
}

/// Reason why no snapshot is taken. The store and the container are as before then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TakeError {
    /// The container does not exist, or cannot be looked up.
    #[error(transparent)]
    Known(#[from] KnownError),
    #[error("container {0} is damaged")]
    Damaged(String),
    /// The container's changes are not readable.
    #[error("cannot take a snapshot of container {id}")]
    Changes { id: String, source: KeptError },
    /// The changes cannot be copied.
    #[error("cannot take a snapshot of container {id}")]
    Copy { id: String, source: CopyError },
    /// The container cannot be frozen.
    #[error("cannot take a snapshot of container {id} while it runs")]
    Freeze { id: String, source: PauseError },
    /// A long chain of snapshots cannot be merged.
    #[error("cannot merge the snapshots of container {id}")]
    Merge { id: String, source: MergeError },
    /// The container was rolled back or removed, or has ended, during the copy.
    #[error("container {0} has ended, or was removed or rolled back, at the same time: try again")]
    Replaced(String),
    /// The container of a user has no separate cgroup, by which it could be frozen.
    #[error(
        "container {0} cannot be frozen while it runs, because no cgroup was delegated to its user: `quire stop {0}` \
        ends it, then a snapshot can be taken, and `quire start {0}` starts it again; `quire doctor` shows whether \
        cgroups are delegated"
    )]
    NoFreezer(String),
    /// No monitor watches the container.
    #[error(
        "the monitor of container {0} was killed, so no snapshot can be taken while it runs: \
        `quire stop {0}` ends it, and keeps its changes"
    )]
    Unwatched(String),
    /// The container's folder cannot be locked.
    #[error(transparent)]
    Folder(#[from] ContainerError),
    /// The store refuses the snapshot.
    #[error(transparent)]
    Store(#[from] ContainerSnapshotError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// Takes a snapshot of the container with this name, or with an id that begins with it. `now` returns the time, in
/// seconds since 1970. The caller makes the snapshot durable later, by
/// [`settle_container_snapshot`](Store::settle_container_snapshot).
///
/// This process must have only one thread while `work` runs nothing, because it forks a child that thaws a frozen
/// container.
///
/// # Errors
/// [`TakeError`].
pub fn take(
    store: &Store,
    container: &str,
    name: &SnapshotName,
    work: &LongWork<'_>,
    now: &dyn Fn() -> i64,
) -> Result<Taken, TakeError> {
    if let SnapshotName::Given(name) = name {
        // Otherwise, the error would come after a long copy.
        store.check_container_snapshot_name(name)?;
    }
    let is_cancelled = || work.cancel.load(Ordering::Relaxed);
    let (found, lock) = find_at_rest(store, container, &is_cancelled)?;
    let id = found.id.clone();
    if found.is_unwatched {
        return Err(TakeError::Unwatched(id));
    }
    let draft = store.container_snapshots.draft()?;
    let to = draft.upper()?;
    let map = map_of(&found.folder).map_err(OperationError::of("read the user ids of", &id))?;
    let (record, copied, pause) = match lock {
        None => {
            let (record, copied, pause) = of_running(store, &found, to.as_fd(), work)?;
            (record, copied, Some(pause))
        }
        Some(lock) => {
            let (record, copied) = at_rest(&lock, to.as_fd(), work, now)?;
            (record, copied, None)
        }
    };
    drop(to);
    let chain = match &record.snapshot {
        Some(below) => store.container_snapshots.chain(below)?,
        None => Vec::new(),
    };
    let (draft, below, size) = if chain.len() < CHAIN_MAX {
        (draft, record.snapshot.clone(), copied)
    } else {
        // Links would show other numbers of links, and `du` would count files twice.
        let upper = draft.upper()?;
        let (merged, size) = merged(store, &id, upper.as_fd(), &chain, Share::Copy, work)?;
        (merged, None, size)
    };
    let record = ContainerSnapshotRecord {
        name: match name {
            SnapshotName::Given(name) => Some(name.clone()),
            SnapshotName::Numbered | SnapshotName::None => None,
        },
        container: id,
        image: record.image,
        manifest: record.manifest,
        image_name: record.name,
        shared: record.shared,
        below,
        map,
        created: Seconds(now()),
        bytes: size.bytes,
        inodes: size.inodes,
        boot: kernel::process::boot_id(),
    };
    let snapshot = match name {
        SnapshotName::Numbered => store.publish_numbered_container_snapshot(draft, &record)?,
        SnapshotName::Given(_) | SnapshotName::None => {
            store.publish_container_snapshot(draft, &record)?
        }
    };
    Ok(Taken { snapshot, copied, pause })
}

/// Copies the changes of a running container into the empty directory `to`. Returns its record, and how long it was
/// frozen.
pub(crate) fn of_running(
    store: &Store,
    found: &KnownContainer,
    to: BorrowedFd<'_>,
    work: &LongWork<'_>,
) -> Result<(ContainerRecord, CopyReport, Duration), TakeError> {
    let id = &found.id;
    // Otherwise, a long copy would be made before the same error.
    if !store.who().is_host_root() && cgroups::of_user(&found.folder).is_none() {
        return Err(TakeError::NoFreezer(id.clone()));
    }
    let changes = Changes::of_running(&found.folder)
        .map_err(|source| TakeError::Changes { id: id.clone(), source })?;
    let copy_failed = |source| TakeError::Copy { id: id.clone(), source };
    let record = same_record(store, found)?;
    let first = work.call(|| first_copy(changes.directory(), to, work.cancel))?;
    let first = first.map_err(copy_failed)?;
    let frozen = match freeze(&found.folder, id) {
        Ok(frozen) => frozen,
        // Its changes may be removed at any time.
        Err(_) if !find_container(store, id).is_ok_and(|it| it.is_watched()) => {
            return Err(TakeError::Replaced(id.clone()));
        }
        Err(source) => return Err(TakeError::Freeze { id: id.clone(), source }),
    };
    let since = Instant::now();
    let mut first = Some(first);
    // A signal must be able to end this as well.
    let report = work.call(|| first.take().map(FirstCopy::finish));
    // It may have been rolled back, or started again with another layer in memory. The number of an open directory is
    // not used again.
    let frozen_changes = Changes::of_running(&found.folder);
    let is_same = frozen_changes.is_ok_and(|it| {
        let copied = identity(changes.directory());
        copied.is_some() && identity(it.directory()) == copied
    });
    let is_watched = find_container(store, id).is_ok_and(|it| it.is_watched());
    drop(frozen);
    let pause = since.elapsed();
    let report = report?.transpose().map_err(copy_failed)?;
    let report = report.ok_or_else(|| TakeError::Replaced(id.clone()))?;
    match is_same && is_watched {
        true => Ok((record, report, pause)),
        false => Err(TakeError::Replaced(id.clone())),
    }
}

/// Copies the changes of a container at rest, which is locked until the copy is complete.
fn at_rest(
    lock: &ContainerDir,
    to: BorrowedFd<'_>,
    work: &LongWork<'_>,
    now: &dyn Fn() -> i64,
) -> Result<(ContainerRecord, CopyReport), TakeError> {
    let id = lock.id();
    // The monitor may have been killed, with or without the container.
    background::bury(lock, now())
        .map_err(OperationError::of("take a snapshot of container", id))?;
    let record = lock.record().cloned().ok_or_else(|| TakeError::Damaged(id.to_owned()))?;
    let changes = Changes::of_ended(lock.path())
        .map_err(|source| TakeError::Changes { id: id.to_owned(), source })?;
    let copy_failed = |source| TakeError::Copy { id: id.to_owned(), source };
    let first = work.call(|| first_copy(changes.directory(), to, work.cancel))?;
    let first = first.map_err(copy_failed)?;
    Ok((record, first.at_rest().map_err(copy_failed)?))
}

/// Returns the container's record, which must still name the snapshot that it named when the container was found: a
/// rollback replaces the changes and the snapshot below them.
fn same_record(store: &Store, found: &KnownContainer) -> Result<ContainerRecord, TakeError> {
    let damaged = || TakeError::Damaged(found.id.clone());
    let before = found.record.as_ref().ok_or_else(damaged)?;
    let after = find_container(store, &found.id)?.record.ok_or_else(damaged)?;
    match before.snapshot == after.snapshot {
        true => Ok(after),
        false => Err(TakeError::Replaced(found.id.clone())),
    }
}

/// Returns the numbers of the device and the inode of a directory.
fn identity(directory: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let found = rustix::fs::fstat(directory).ok()?;
    Some((found.st_dev, found.st_ino))
}

/// Returns the map of a container's user ids, as its folder has it.
fn map_of(folder: &Path) -> std::io::Result<Option<String>> {
    match std::fs::read_to_string(folder.join(USERNS)) {
        Ok(map) => Ok(Some(map)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Merges an upper directory with all snapshots of the chain below it, in a new draft.
pub(crate) fn merged(
    store: &Store,
    id: &str,
    upper: BorrowedFd<'_>,
    chain: &[ContainerSnapshot],
    share: Share,
    work: &LongWork<'_>,
) -> Result<(ContainerSnapshotDraft, CopyReport), TakeError> {
    let merged = store.container_snapshots.draft()?;
    let to = merged.upper()?;
    let below = chain.iter().map(ContainerSnapshot::upper).collect::<Result<Vec<_>, _>>()?;
    let layers: Vec<_> = [upper].into_iter().chain(below.iter().map(|it| it.as_fd())).collect();
    let namespace = match store.who().is_host_root() {
        true => XattrNamespace::Trusted,
        false => XattrNamespace::User,
    };
    let report = work.call(|| merge(&layers, to.as_fd(), share, namespace, work.cancel))?;
    let report = report.map_err(|source| TakeError::Merge { id: id.to_owned(), source })?;
    Ok((merged, report))
}
