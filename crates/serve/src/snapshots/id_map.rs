//! Roots whose owners are mapped to ids of the host, for containers with user namespaces.

use std::fs;
use std::io;

use container::bundle::userns::IdMap;
use container::folder::USERNS;
use store::{OperationError, SnapshotInstance, SnapshotRecord};

use super::error::SnapshotterError;
use super::labels::asked_map;

/// Returns the id map of a snapshot's root. Once it was written to, the map is fixed, even if the labels change.
pub(super) fn map_of(
    instance: &SnapshotInstance,
    number: u64,
    record: &SnapshotRecord,
) -> Result<Option<IdMap>, SnapshotterError> {
    match instance.changes(number).join("upper").exists() {
        true => noted_map(instance, number),
        false => asked_map(&record.name, &record.labels),
    }
}

/// Returns the id map of a snapshot's changes. A map that cannot be read is an error.
pub(super) fn noted_map(
    instance: &SnapshotInstance,
    number: u64,
) -> Result<Option<IdMap>, SnapshotterError> {
    let object = format!(
        "the map of owners of snapshot number {number}, so the owners of its files are unknown"
    );
    let failed = OperationError::of("read", &object);
    match fs::read_to_string(instance.changes(number).join(USERNS)) {
        Ok(text) => {
            let wrong = |error| failed(io::Error::new(io::ErrorKind::InvalidData, error));
            Ok(text.parse().map(Some).map_err(wrong)?)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error).into()),
    }
}
