//! Commands on snapshots of containers' roots.

pub(crate) mod fork;
pub(crate) mod rollback;
pub(crate) mod snapshot;

use container::folder::USERNS;
use container::life::lookup::KnownContainer;
use store::ContainerSnapshotRecord;

/// Whether a snapshot can be below the changes of a container: it is of the same image, and its files belong to the
/// same ids. A container may have the name of an earlier one.
fn fits(snapshot: &ContainerSnapshotRecord, container: &KnownContainer) -> bool {
    let map = std::fs::read_to_string(container.folder.join(USERNS)).ok();
    let image = container.record.as_ref().map(|it| it.image);
    image == Some(snapshot.image) && map == snapshot.map
}
