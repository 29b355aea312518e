//! Roots with a size limit: each has a filestore, which is mounted in place of the plain directory.

use std::ffi::OsString;

use container::root::limit::{attach_filestore, headroom_of, make_filestore, shut_down_filestore};
use store::{OperationError, SnapshotInstance, SnapshotRecord, Store};

use crate::snapshots::error::SnapshotterError;
use crate::snapshots::labels::asked_size;
use crate::snapshots::roots::{detach, is_mounted};
use crate::snapshots::space::headrooms::Headrooms;

/// The object of a limit in errors.
const LIMITED: &str = "the changes to a root";

/// The size limits of the roots of an instance.
#[derive(Debug)]
pub(in crate::snapshots) struct Quota {
    headrooms: Headrooms,
    /// Search path for programs that make filestores.
    search: OsString,
}

impl Quota {
    pub(in crate::snapshots) fn new(search: OsString) -> Result<Self, SnapshotterError> {
        let started = Headrooms::new();
        let headrooms = started.map_err(OperationError::of("start a thread for", LIMITED))?;
        Ok(Self { headrooms, search })
    }

    /// Returns whether a snapshot has a size limit.
    pub(in crate::snapshots) fn is_limited(instance: &SnapshotInstance, number: u64) -> bool {
        instance.filestore(number).exists()
    }

    /// Sets up the limit of a root before it is mounted. A root that was written to without a limit stays unlimited.
    pub(in crate::snapshots) fn set(
        &self,
        store: &Store,
        instance: &SnapshotInstance,
        number: u64,
        record: &SnapshotRecord,
    ) -> Result<(), SnapshotterError> {
        let (file, at) = (instance.filestore(number), instance.changes(number));
        if !file.exists() {
            let Some(bytes) = asked_size(&record.name, &record.labels)? else { return Ok(()) };
            if at.join("upper").exists() {
                return Ok(());
            }
            let (folder, name) = (file.parent(), file.file_name().and_then(|it| it.to_str()));
            let (folder, name) = folder.zip(name).ok_or(SnapshotterError::Name)?;
            make_filestore(store.containers.fd(), bytes, folder, name, &self.search)
                .map_err(OperationError::of("limit", LIMITED))?;
        }
        Self::attach(instance, number)
    }

    /// Mounts the filestore of a limited root, if it is not mounted. Does nothing for other roots.
    pub(in crate::snapshots) fn attach(
        instance: &SnapshotInstance,
        number: u64,
    ) -> Result<(), SnapshotterError> {
        let (file, at) = (instance.filestore(number), instance.changes(number));
        match file.exists() && !is_mounted(&at) {
            true => Ok(attach_filestore(&file, &at).map_err(OperationError::of("limit", LIMITED))?),
            false => Ok(()),
        }
    }

    /// Starts to reserve space for a mounted filestore.
    pub(in crate::snapshots) fn make_room(&self, instance: &SnapshotInstance, number: u64) {
        let (file, at) = (instance.filestore(number), instance.changes(number));
        if !is_mounted(&at) {
            return;
        }
        match headroom_of(&file, &at) {
            Ok(headroom) => self.headrooms.add(number, headroom),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, number, "the limit of a root cannot grow any more");
            }
        }
    }

    /// Unmounts the filestore of a root that is no longer mounted. Its data is not needed, so it is not synced.
    pub(in crate::snapshots) fn drop(
        &self,
        instance: &SnapshotInstance,
        number: u64,
    ) -> Result<(), SnapshotterError> {
        let at = instance.changes(number);
        if !is_mounted(&at) {
            return Ok(());
        }
        self.headrooms.drop(number);
        shut_down_filestore(&at);
        Ok(detach(&at)?)
    }
}
