//! The volumes that were made only for a container, when it is removed.

use std::path::Path;

use store::{ContainerRecord, Store, VolumeError, VolumeLock};

use crate::request::StoredRequest;

/// Fate of the volumes that were made only for a removed container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnVolumes {
    /// They stay as volumes that no container uses, except those of a container that is not kept.
    Stay,
    /// The next [`Store::clear_volumes`] removes them.
    Removed,
}

impl OwnVolumes {
    /// Marks the volumes of a container that is about to be removed. They were made to end with it, so without this
    /// they would be removed as soon as no record names them. `held` is the lock of volumes, if the caller has it.
    pub(crate) fn mark(
        self,
        store: &Store,
        id: &str,
        folder: &Path,
        record: Option<&ContainerRecord>,
        held: Option<&VolumeLock>,
    ) -> Result<(), VolumeError> {
        let names = match record {
            Some(record) if !record.keep => return Ok(()),
            Some(record) => record.volumes.clone(),
            // The record is damaged, and the settings have the names as well.
            None => match StoredRequest::load(folder, id) {
                Ok(stored) => stored.request.own_volumes().map(str::to_owned).collect(),
                Err(error) => {
                    tracing::warn!(id, %error, "the volumes of a damaged container are unknown");
                    return Ok(());
                }
            },
        };
        let ends = self == Self::Removed;
        match held {
            Some(lock) => store.end_held_volumes_with_container(lock, &names, ends),
            None => store.end_volumes_with_container(&names, ends),
        }
    }
}
