//! Removes containers.

use std::time::Instant;

use store::{ContainerError, OperationError, Store, VolumeLock};

use super::{DEATH, KnownError, look};
use crate::backoff::GLANCE;
use crate::life::end::own_volumes::OwnVolumes;
use crate::life::end::teardown;
use crate::life::{background, writable_layer};
use crate::store_ownership::check_containers;

/// Action on a running container for which removal is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfRunning {
    /// Return an error and keep the container.
    Refuse,
    /// Kill the container first.
    Kill,
}

/// Removes a container. Returns whether it existed, and was not removed by another command first. `now` returns the
/// time, in seconds since 1970.
///
/// # Errors
/// [`KnownError`]; the container stays.
pub fn remove(
    store: &Store,
    name: &str,
    if_running: IfRunning,
    own_volumes: OwnVolumes,
    now: &dyn Fn() -> i64,
) -> Result<bool, KnownError> {
    remove_holding(store, name, if_running, own_volumes, None, now)
}

/// As [`remove`], for a caller that may hold the lock of volumes.
pub(crate) fn remove_holding(
    store: &Store,
    name: &str,
    if_running: IfRunning,
    own_volumes: OwnVolumes,
    held: Option<&VolumeLock>,
    now: &dyn Fn() -> i64,
) -> Result<bool, KnownError> {
    check_containers(store)?;
    let Some(known) = look(store, name)? else { return Ok(false) };
    let id = &known.id;
    if known.is_running() && if_running == IfRunning::Refuse {
        return Err(KnownError::Runs(id.clone()));
    }
    // The monitor of a running container removes it when it is killed, and then volumes that nothing needs.
    let marked = own_volumes.mark(store, id, &known.folder, known.record.as_ref(), held);
    marked.map_err(|source| KnownError::Volumes { id: id.clone(), source: Box::new(source) })?;
    if known.is_running() {
        if let Err(error) = background::unwant(&known.folder) {
            tracing::debug!(id, %error, "cannot inform the monitor that the container is removed");
        }
        known.kill(store)?;
    }
    // The monitor may still be taking the container down, and other commands may hold the lock briefly to test if the
    // container lives.
    let since = Instant::now();
    let folder = loop {
        match store.containers.lock(id) {
            Ok(Some(folder)) => break folder,
            // Another command has removed the container.
            Err(ContainerError::Absent(_)) => return Ok(false),
            Ok(None) if since.elapsed() < DEATH => {
                if known.is_alive(store)? {
                    // Another command has started the container again.
                    if if_running == IfRunning::Refuse {
                        return Err(KnownError::Runs(id.clone()));
                    }
                    drop(background::unwant(&known.folder));
                    known.kill(store)?;
                } else {
                    // Data that is still on its way to the disk is not needed any more.
                    writable_layer::give_up(&known.folder);
                }
                std::thread::sleep(GLANCE);
            }
            Ok(None) => return Err(KnownError::InUse(id.clone())),
            Err(error) => return Err(error.into()),
        }
    };
    background::bury(&folder, now())
        .map_err(OperationError::of("record the end of container", id))?;
    teardown::remove_behind(folder, store.who())?;
    Ok(true)
}
