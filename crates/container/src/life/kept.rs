//! Containers that have ended, or were only created, and are started again in their own folder.
//!
//! Each step leaves a folder that counts as that of a container at rest, until the runtime is called:
//!
//! 1. The folder is locked, and remains of the last run are removed ([`KeptContainer::open`]).
//! 2. The root is made. The writable layer is the kept one.
//! 3. Files of the last run are removed. The last state gets another name ([`StateBefore`]), so that the container
//!    counts as being started.
//! 4. The note that nothing is left outside of the folder (`over`) is removed.
//! 5. The monitor calls the runtime, and writes the new state.
//!
//! If the process is killed before the last step, the next command finds the old state, and removes what the runtime
//! has left.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use store::{ContainerDir, ContainerError, ContainerRecord, OperationError, Store};

use crate::backoff::GLANCE;
use crate::bundle::security::DeviceError;
use crate::bundle::userns::IdMap;
use crate::folder::{
    self, CODE, CONFIG, FILESTORE, LAYER, LOCK, LOG, LOG_NEXT, LOG_OLDER, LOG_TURNING, NETWORKS,
    OVER, PORTS, RECORD, REQUEST, RUNTIME_PATH, RUNTIME_STATE, STATE, STATE_BEFORE, USERNS,
    WRITABLE,
};
use crate::life::background;
use crate::life::id_allocation::Claim;
use crate::life::state::StateBefore;
use crate::life::writable_layer::{KeptError, reopen};
use crate::plan::{ContainerRequest, IdsChoice};
use crate::request::{RequestError, StoredRequest};
use crate::root::WritablePlace;
use crate::runtime::Runtime;
use crate::runtime::call::DELETION;

/// A container at rest, whose folder is locked.
#[derive(Debug)]
pub struct KeptContainer {
    folder: ContainerDir,
    /// The locked lock file, for the runtime. `None` if `folder` has it.
    lock: Option<OwnedFd>,
    record: ContainerRecord,
    request: ContainerRequest,
    runtime: Runtime,
    map: Option<IdMap>,
    /// Whether the container has run before.
    has_run: bool,
}

/// Reason why a container cannot be started again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeptContainerError {
    /// The record cannot be read.
    #[error("container {0} is damaged: `quire rm --force {0}` removes it")]
    Damaged(String),
    /// The container is removed at its end.
    #[error("container {0} is removed when it ends, so it cannot be started again")]
    NotKept(String),
    /// Processes or cgroups of the last run cannot be removed.
    #[error(
        "some processes of container {0} did not end, so it cannot be started again: `quire stop \
        {0}` tries again"
    )]
    Remains(String),
    /// The settings are unknown.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The host lacks a device of the container.
    #[error("container {id} cannot have a device that was requested with --device")]
    Device { id: String, source: DeviceError },
    /// The map of the container's users is unknown.
    #[error(
        "the map of the user ids of container {0} is missing, so its files would have other \
        owners: `quire rm {0}` removes it"
    )]
    NoMap(String),
    /// Another process tests the lock for too long.
    #[error("container {0} is in use")]
    InUse(String),
    #[error(transparent)]
    Failed(#[from] OperationError),
}

/// How long to wait for the lock file, which other commands lock for a moment to see whether the container lives.
const TESTED: Duration = Duration::from_secs(3);

/// Files of a folder that stay when its container is started again. Some of them are replaced later.
const STAYING: [&str; 20] = [
    RECORD,
    LOCK,
    CONFIG,
    RUNTIME_PATH,
    RUNTIME_STATE,
    STATE,
    STATE_BEFORE,
    CODE,
    LOG,
    LOG_OLDER,
    LOG_NEXT,
    LOG_TURNING,
    OVER,
    REQUEST,
    WRITABLE,
    USERNS,
    LAYER,
    FILESTORE,
    PORTS,
    NETWORKS,
];

impl KeptContainer {
    /// Opens a container at rest, whose folder the caller has locked. `now` is in seconds since 1970.
    pub fn open(folder: ContainerDir, now: i64) -> Result<Self, KeptContainerError> {
        let id = folder.id().to_owned();
        let record = folder.record().cloned();
        let record = record.ok_or_else(|| KeptContainerError::Damaged(id.clone()))?;
        if !record.keep {
            return Err(KeptContainerError::NotKept(id));
        }
        // The monitor may have been killed, with or without the container.
        let ended = OperationError::of("record the end of container", &id);
        if !background::bury_within(&folder, now, DELETION).map_err(ended)? {
            return Err(KeptContainerError::Remains(id));
        }
        let StoredRequest { runtime, mut request } = StoredRequest::load(folder.path(), &id)?;
        request.id.clone_from(&id);
        request.snapshot.clone_from(&record.snapshot);
        let renewed = request.bundle.security.renew();
        renewed.map_err(|source| KeptContainerError::Device { id: id.clone(), source })?;
        let map = match request.ids {
            IdsChoice::Host => None,
            IdsChoice::Auto(_) | IdsChoice::Map(_) => {
                let noted = IdMap::noted(folder.path());
                Some(noted.ok_or_else(|| KeptContainerError::NoMap(id.clone()))?)
            }
        };
        let before = StateBefore::load(folder.path());
        let before = before.map_err(OperationError::of("read the state of container", &id))?;
        let has_run = before != StateBefore::Created;
        let lock = match hold(&folder).map_err(OperationError::of("lock container", &id))? {
            Some(lock) => Some(lock),
            None => return Err(KeptContainerError::InUse(id)),
        };
        let runtime = Runtime::at(runtime);
        Ok(Self { folder, lock, record, request, runtime, map, has_run })
    }

    #[must_use]
    pub fn id(&self) -> &str {
        self.folder.id()
    }

    #[must_use]
    pub const fn record(&self) -> &ContainerRecord {
        &self.record
    }

    #[must_use]
    pub const fn request(&self) -> &ContainerRequest {
        &self.request
    }

    /// Returns the settings, which the caller may adapt to the host's present state.
    pub const fn request_mut(&mut self) -> &mut ContainerRequest {
        &mut self.request
    }

    #[must_use]
    pub const fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn claim(&self) -> Option<Claim> {
        self.map.clone().map(Claim::of_kept)
    }

    /// Opens the kept writable layer.
    pub(crate) fn place(&self, remark: &dyn Fn(&str)) -> Result<WritablePlace, KeptError> {
        let place = reopen(self.folder.path(), &self.request.writable)?;
        if self.has_run && matches!(place, WritablePlace::Memory(_)) {
            remark(&format!(
                "the changes of container {} were in memory, and are lost: it starts with its \
                image again",
                self.id()
            ));
        }
        Ok(place)
    }

    pub(crate) fn folder(&self) -> &ContainerDir {
        &self.folder
    }

    /// Returns the locked folder and lock file of a container that is not started.
    pub(crate) fn into_folder(self) -> (ContainerDir, Option<OwnedFd>) {
        (self.folder, self.lock)
    }

    /// Makes the folder that of a container that is being started (step 3).
    pub(crate) fn enter(self, store: &Store) -> Result<EnteredFolder, EnterError> {
        let path = self.folder.path();
        clean(path)?;
        let boot = kernel::process::boot_id();
        // A container of `create --rm` is removed at its end from its first start on.
        let keep = self.request.keep;
        if self.record.boot != boot || self.record.keep != keep {
            // After a crash, the runtime's records must count as those of this boot.
            store.update_container(&self.folder, &ContainerRecord { boot, keep, ..self.record })?;
        }
        StateBefore::put_aside(path).map_err(OperationError::at("write in", path))?;
        Ok(EnteredFolder { folder: self.folder, lock: self.lock })
    }

    /// Returns the same container in another locked folder, which `replace` puts in the place of this one.
    pub(crate) fn moved<E>(
        mut self,
        record: ContainerRecord,
        replace: impl FnOnce(ContainerDir) -> Result<ContainerDir, E>,
    ) -> Result<Self, E> {
        let folder = replace(self.folder)?;
        self.request.snapshot.clone_from(&record.snapshot);
        Ok(Self { folder, record, lock: None, has_run: false, ..self })
    }
}

/// The folder of a container that is being started again.
#[derive(Debug)]
pub(crate) struct EnteredFolder {
    pub(crate) folder: ContainerDir,
    /// The locked lock file. `None` if `folder` has it.
    pub(crate) lock: Option<OwnedFd>,
}

/// Reason why a folder cannot be prepared for another start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnterError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The record cannot be replaced.
    #[error(transparent)]
    Record(#[from] ContainerError),
}

impl EnteredFolder {
    /// Removes the note that nothing of the container is outside of its folder (step 4). The caller calls this last.
    pub(crate) fn begin(&self) -> Result<(), OperationError> {
        let path = self.folder.path().join(OVER);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(OperationError::at("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Locks the lock file of a dead container; `None` if another process holds the lock for too long.
fn hold(folder: &ContainerDir) -> Result<Option<OwnedFd>, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let lock = rustix::fs::openat(folder.fd(), LOCK, flags, Mode::empty())?;
    let since = Instant::now();
    loop {
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(lock)),
            Err(Errno::WOULDBLOCK) if since.elapsed() >= TESTED => return Ok(None),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(GLANCE),
            Err(errno) => return Err(errno),
        }
    }
}

/// Removes the files of the last run from the folder of a container at rest. Directories are mount points, which are
/// empty because the mounts were in the monitor's namespace.
fn clean(path: &Path) -> Result<(), OperationError> {
    let failed = OperationError::at("read", path);
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (place, name) = (entry.path(), entry.file_name());
        let name = name.to_str().filter(|it| folder::is_known(it) && !STAYING.contains(it));
        let Some(name) = name else { continue };
        let is_directory = entry.file_type().map_err(failed)?.is_dir();
        let removed = match is_directory {
            // Directories of cgroups, below a folder that covered the cgroup file system.
            true if name.starts_with("quire-") => std::fs::remove_dir_all(&place),
            true => std::fs::remove_dir(&place),
            false => std::fs::remove_file(&place),
        };
        removed.map_err(OperationError::at("remove", &place))?;
    }
    Ok(())
}
