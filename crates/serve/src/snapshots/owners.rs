//! Roots whose owners are mapped to ids of the host, for containers with user namespaces.

use std::fs;
use std::io;

use container::bundle::userns::{IdMap, MapError, parse_ranges};
use container::folder::USERNS;
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
        match self.instance.changes(number).join("upper").exists() {
            true => self.noted_map(number),
            false => asked(&record.name, &record.labels),
        }
    }

    /// The map of what was written to a snapshot. One that cannot be read is not taken for none.
    pub(super) fn noted_map(&self, number: u64) -> Result<Option<IdMap>, SnapshotterError> {
        let failed = |source| SnapshotterError::Owners { number, source };
        match fs::read_to_string(self.instance.changes(number).join(USERNS)) {
            Ok(text) => {
                let wrong = |error| failed(io::Error::new(io::ErrorKind::InvalidData, error));
                text.parse().map(Some).map_err(wrong)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }
}
