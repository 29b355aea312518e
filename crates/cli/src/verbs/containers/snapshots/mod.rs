//! Commands on snapshots of containers' roots.

pub(crate) mod fork;
pub(crate) mod origins;
pub(crate) mod rollback;
pub(crate) mod snapshot;

use std::time::{Duration, Instant};

use container::backoff::GLANCE;
use container::folder::USERNS;
use container::life::lookup::KnownContainer;
use store::{ContainerSnapshotRecord, OpenOptions, Store};

use crate::session::context::Context;

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
        match store.clear_container_snapshots() {
            Ok(cleared) if cleared.open == 0 => return,
            Ok(_) if since.elapsed() < RELEASED => std::thread::sleep(GLANCE),
            Ok(cleared) => {
                let count = cleared.open;
                tracing::debug!(count, "unneeded snapshots are open: `quire gc` removes them");
                return;
            }
            Err(error) => {
                let error = format!("{:#}", anyhow::Error::from(error));
                tracing::warn!(error, "cannot remove unneeded snapshots: `quire gc` removes them");
                return;
            }
        }
    }
}

/// Removes snapshots without a name that nothing needs any more, after the end of a container that began with one. The
/// container may have been the last one that needed it.
pub(crate) fn clear_after_end(context: &Context) {
    match context.open(OpenOptions::write()) {
        Ok(store) => clear_unneeded(&store),
        Err(error) => {
            let error = format!("{error:#}");
            tracing::warn!(error, "cannot remove unneeded snapshots: `quire gc` removes them");
        }
    }
}
