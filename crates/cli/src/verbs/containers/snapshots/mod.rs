//! Commands on snapshots of containers' roots.

pub(crate) mod fork;
pub(crate) mod origins;
pub(crate) mod rollback;
pub(crate) mod snapshot;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use container::backoff::GLANCE;
use container::folder::USERNS;
use container::life::lookup::KnownContainer;
use store::{ContainerSnapshotRecord, Store};

/// Whether a snapshot can be below the changes of a container: it is of the same image, and its files belong to the
/// same ids. A container may have the name of an earlier one.
fn fits(snapshot: &ContainerSnapshotRecord, container: &KnownContainer) -> bool {
    let map = std::fs::read_to_string(container.folder.join(USERNS)).ok();
    let image = container.record.as_ref().map(|it| it.image);
    image == Some(snapshot.image) && map == snapshot.map
}

/// How long to wait for processes that have an unneeded snapshot open, such as the monitor of a container that was just
/// removed.
const RELEASED: Duration = Duration::from_millis(500);

/// Removes snapshots without a name that nothing needs any more.
pub(crate) fn clear_unneeded(store: &Store) {
    let since = Instant::now();
    loop {
        let cleared = store.clear_container_snapshots().map_err(anyhow::Error::from);
        match cleared.and_then(|_count| has_unneeded(store)) {
            Ok(false) => return,
            Ok(true) if since.elapsed() < RELEASED => std::thread::sleep(GLANCE),
            Ok(true) => {
                tracing::debug!("a snapshot that nothing needs is open: `quire gc` removes it");
                return;
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::warn!(error, "cannot remove unneeded snapshots: `quire gc` removes them");
                return;
            }
        }
    }
}

/// Whether there is a snapshot without a name that no container and no other snapshot needs. A process may have it open.
fn has_unneeded(store: &Store) -> anyhow::Result<bool> {
    let snapshots = store.container_snapshots.all()?;
    let usable = || snapshots.iter().filter_map(|(id, it)| Some((id, it.as_ref().ok()?)));
    if usable().all(|(_, it)| it.name.is_some()) || usable().count() < snapshots.len() {
        return Ok(false);
    }
    let containers = container::life::lookup::all(store)?;
    // The record of a damaged container may name any snapshot.
    if containers.iter().any(|it| it.record.is_none()) {
        return Ok(false);
    }
    let of_containers = containers.iter().filter_map(origins::snapshot);
    let needed: BTreeSet<_> =
        usable().filter_map(|(_, it)| it.below.as_deref()).chain(of_containers).collect();
    Ok(usable().any(|(id, it)| it.name.is_none() && !needed.contains(id.as_str())))
}
