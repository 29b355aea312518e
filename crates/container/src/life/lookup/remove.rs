//! Removes containers.

use std::time::Instant;

use store::{ContainerError, OperationError, Store};

use super::{DEATH, KnownContainer, KnownError, look};
use crate::backoff::GLANCE;
use crate::life::end::teardown;
use crate::life::{background, writable_layer};
use crate::request::StoredRequest;
use crate::store_ownership::check_containers;

/// Action on a running container for which removal is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfRunning {
    /// Return an error and keep the container.
    Refuse,
    /// Kill the container first.
    Kill,
}

/// Fate of the volumes that were made only for a removed container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnVolumes {
    /// They stay as volumes that no container uses, except those of a container that is not kept.
    Stay,
    /// The next [`Store::clear_volumes`] removes them.
    Removed,
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
    check_containers(store)?;
    let Some(known) = look(store, name)? else { return Ok(false) };
    let id = &known.id;
    if known.is_running() {
        if if_running == IfRunning::Refuse {
            return Err(KnownError::Runs(id.clone()));
        }
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
    mark_volumes(&known, store, own_volumes)?;
    teardown::remove_behind(folder, store.who())?;
    Ok(true)
}

/// Marks the volumes of a container that is about to be removed. They were made to end with it, so without this they
/// would be removed as soon as no record names them.
fn mark_volumes(
    known: &KnownContainer,
    store: &Store,
    own_volumes: OwnVolumes,
) -> Result<(), KnownError> {
    let names = match &known.record {
        Some(record) if !record.keep => return Ok(()),
        Some(record) => record.volumes.clone(),
        // The record is damaged, and the settings have the names as well.
        None => match StoredRequest::load(&known.folder, &known.id) {
            Ok(stored) => stored.request.own_volumes().map(str::to_owned).collect(),
            Err(error) => {
                let id = &known.id;
                tracing::warn!(id, %error, "the volumes of a damaged container are unknown");
                return Ok(());
            }
        },
    };
    let marked = store.end_volumes_with_container(&names, own_volumes == OwnVolumes::Removed);
    let failed = |source| KnownError::Volumes { id: known.id.clone(), source: Box::new(source) };
    marked.map_err(failed)
}
