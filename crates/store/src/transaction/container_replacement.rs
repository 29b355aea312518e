//! Changes existing containers: replaces their record, or their whole directory.

use crate::shelf::container_snapshots::ShelfLock;
use crate::shelf::containers::{
    ContainerDir, ContainerError, ContainerRecord, ContainerReplacement,
};
use crate::shelf::volumes::VolumeLock;
use crate::store::{Lock, Store};

/// Locks under which everything that a container's record names stays in the store.
pub(super) struct HeldForContainer {
    _store: Option<Lock>,
    _snapshot: Option<ShelfLock>,
    _volumes: Option<VolumeLock>,
}

impl Store {
    /// Replaces the record of a container at rest, durably.
    ///
    /// # Errors
    /// [`ContainerError`] if the image or the snapshot is not in the store, or the record cannot be written. The old
    /// record remains then.
    pub fn update_container(
        &self,
        container: &ContainerDir,
        record: &ContainerRecord,
    ) -> Result<(), ContainerError> {
        let _held = self.hold_for_container(container.id(), record)?;
        container.set_record(&self.tmp, record)
    }

    /// Makes another directory for the container `id`. It has the record and the lock, and no container counts it
    /// before [`replace_container`](Self::replace_container). Dropping it removes it.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn replacement_of_container(
        &self,
        id: &str,
        record: &ContainerRecord,
    ) -> Result<ContainerReplacement, ContainerError> {
        self.containers.replacement(id, record)
    }

    /// Replaces the directory of a container at rest by another one, in one step: at every moment, and after a crash,
    /// the container has either directory as a whole. The caller has synced the files that it added to the new one.
    ///
    /// Returns the new directory and the old one. The latter is hidden, so dropping it leaves it to the next command;
    /// both are locked.
    ///
    /// # Errors
    /// [`ContainerError`] if the image or the snapshot is not in the store, or the disk cannot exchange directories.
    /// The container keeps its directory then, except if only the last sync fails: then it has the new one, which a crash
    /// may undo.
    pub fn replace_container(
        &self,
        container: ContainerDir,
        replacement: ContainerReplacement,
    ) -> Result<(ContainerDir, ContainerDir), ContainerError> {
        let record = replacement.record().clone();
        let held = self.hold_for_container(container.id(), &record)?;
        let replaced = self.containers.exchange(container, replacement)?;
        drop(held);
        if record.keep {
            self.containers.directory.sync()?;
        }
        Ok(replaced)
    }

    /// Checks that everything that a container's record names is in the store. It stays there as long as the locks are
    /// held.
    pub(super) fn hold_for_container(
        &self,
        id: &str,
        record: &ContainerRecord,
    ) -> Result<HeldForContainer, ContainerError> {
        // `gc` waits from the lookup of the image until the record is published.
        let lock = self.lock_shared()?;
        if record.shared.is_none() && !self.images.has(&record.image)? {
            return Err(ContainerError::NoImage { id: id.to_owned(), image: record.image });
        }
        let failed = |source| ContainerError::Snapshot { id: id.to_owned(), source };
        let held = record.snapshot.as_deref().map(|it| self.hold_container_snapshot(it));
        let held = held.transpose().map_err(failed)?;
        let failed = |source| ContainerError::Volume { id: id.to_owned(), source };
        let volumes = self.hold_volumes_of(&record.volumes).map_err(failed)?;
        if record.keep {
            // The container is found after a crash, so its image must be.
            self.settle()?;
        }
        Ok(HeldForContainer { _store: lock, _snapshot: held, _volumes: volumes })
    }
}
