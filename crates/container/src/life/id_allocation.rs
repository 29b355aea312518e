//! Claims the host's ids for a container's users, so that containers that start at the same time get different ids.

use std::fs::File;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use store::{ContainerError, ContainerSnapshotError, Liveness, OperationError, Store};

use crate::bundle::userns::{IdMap, MapError, SubIdFiles, auto};
use crate::folder;
use crate::plan::IdsChoice;

/// A map for a container. Other containers wait until it is noted in the container's folder.
#[derive(Debug)]
pub struct Claim {
    pub map: IdMap,
    /// `None` for a map that is already noted.
    _lock: Option<File>,
}

impl Claim {
    /// Returns the claim of a container that has had this map before.
    pub(crate) const fn of_kept(map: IdMap) -> Self {
        Self { map, _lock: None }
    }
}

/// Reason why a container cannot get a map.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// This process may not assign ids of the host.
    #[error("--userns: only root can map a container's users to other users of the host")]
    NotRoot,
    /// A signal arrived while other containers were choosing.
    #[error("interrupted while waiting for the id allocation of another container")]
    Interrupted,
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// All ranges are in use.
    #[error("--userns auto")]
    Auto(#[source] MapError),
    /// The map is not usable.
    #[error("--userns")]
    Map(#[source] MapError),
    /// The running containers cannot be listed.
    #[error(transparent)]
    Containers(#[from] ContainerError),
    /// The snapshots cannot be listed.
    #[error(transparent)]
    Snapshots(#[from] ContainerSnapshotError),
}

impl IdsChoice {
    /// Chooses a map. A lock keeps other commands from choosing the same one.
    pub fn claim(
        &self,
        store: &Store,
        is_asked_to_end: &dyn Fn() -> bool,
    ) -> Result<Option<Claim>, ClaimError> {
        if *self == Self::Host {
            return Ok(None);
        }
        if !store.who().is_host_root() {
            return Err(ClaimError::NotRoot);
        }
        let lock = lock(store, is_asked_to_end)?;
        let map = match self {
            Self::Host => return Ok(None),
            Self::Map(map) => map.clone(),
            Self::Auto(size) => {
                let (users, groups) = (entries("/etc/subuid")?, entries("/etc/subgid")?);
                let files = SubIdFiles { users: &users, groups: &groups };
                let taken = taken(store)?;
                let all = [&taken.living[..], &taken.kept].concat();
                let chosen = auto(files, *size, &all);
                // A container that has ended keeps its range as long as there are others.
                chosen
                    .or_else(|_full| auto(files, *size, &taken.living))
                    .map_err(ClaimError::Auto)?
            }
        };
        // Runtimes need a root in the map, and their own error messages are unclear.
        map.root().map_err(ClaimError::Map)?;
        Ok(Some(Claim { map, _lock: Some(lock) }))
    }
}

/// Maps of containers.
#[derive(Debug, Default)]
struct TakenMaps {
    /// Maps of running containers.
    living: Vec<IdMap>,
    /// Maps of containers that have ended, and can be started again, and of snapshots.
    kept: Vec<IdMap>,
}

fn taken(store: &Store) -> Result<TakenMaps, ClaimError> {
    let mut taken = TakenMaps::default();
    for (id, record, liveness) in store.containers.all()? {
        let maps = match liveness {
            Liveness::Alive => &mut taken.living,
            Liveness::Dead if record.keep => &mut taken.kept,
            Liveness::Dead => continue,
        };
        maps.extend(IdMap::noted(&folder::path(store, &id)));
    }
    // Files of a snapshot belong to the ids of a container that may be gone.
    let snapshots = store.container_snapshots.all()?.into_iter();
    let maps = snapshots.filter_map(|(_, record)| record.ok()?.map?.parse().ok());
    taken.kept.extend(maps);
    Ok(taken)
}

/// Interval between attempts to lock.
const GLANCE: std::time::Duration = std::time::Duration::from_millis(2);

fn lock(store: &Store, is_asked_to_end: &dyn Fn() -> bool) -> Result<File, ClaimError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o600);
    let failed = OperationError::of("lock", "the id ranges of the store's containers");
    let file =
        rustix::fs::openat(store.containers.fd(), ".userns.lock", flags, mode).map_err(failed)?;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file.into()),
            Err(Errno::WOULDBLOCK) if is_asked_to_end() => return Err(ClaimError::Interrupted),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(GLANCE),
            Err(errno) => return Err(failed(errno).into()),
        }
    }
}

/// Reads a file that may be missing.
fn entries(path: &'static str) -> Result<String, ClaimError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(OperationError::of("read", path)(error).into()),
    }
}
