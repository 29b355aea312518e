//! Roots whose owners are mapped to ids of the host, for containers with user namespaces.

use container::bundle::userns::{IdMap, MapError, parse_ranges};
use store::SnapshotRecord;

use super::error::SnapshotterError;
use super::snapshotter::{Labels, Snapshotter, is_unpacked};

/// How an engine asks for a map: `CONTAINER:HOST:SIZE`, several with commas. Source: containerd's
/// `core/snapshots/snapshotter.go`, `LabelSnapshotUIDMapping` and `LabelSnapshotGIDMapping`.
const USERS: &str = "containerd.io/snapshot/uidmapping";
const GROUPS: &str = "containerd.io/snapshot/gidmapping";

/// The map that labels ask for. Of a root on which a layer is unpacked, the image's manifest may have brought the labels.
///
/// # Errors
/// [`SnapshotterError::Map`].
pub(super) fn asked(name: &str, labels: &Labels) -> Result<Option<IdMap>, SnapshotterError> {
    if is_unpacked(name) {
        return Ok(None);
    }
    let failed = |source| SnapshotterError::Map { name: name.to_owned(), source };
    let ranges = |label| labels.get(label).map(|it| parse_ranges(it)).transpose().map_err(failed);
    match (ranges(USERS)?, ranges(GROUPS)?) {
        (None, None) => Ok(None),
        (Some(users), Some(groups)) => {
            let map = IdMap::new(users, groups);
            map.root().map_err(failed)?;
            Ok(Some(map))
        }
        _ => Err(failed(MapError::NoRoot)),
    }
}

impl Snapshotter {
    /// The map of a snapshot's root. What was written has one already, whatever its labels say by now.
    pub(super) fn map_of(
        &self,
        number: u64,
        record: &SnapshotRecord,
    ) -> Result<Option<IdMap>, SnapshotterError> {
        let changes = self.instance.changes(number);
        match changes.join("upper").exists() {
            true => Ok(IdMap::noted(&changes)),
            false => asked(&record.name, &record.labels),
        }
    }
}
