//! Creates the directory of a new container.

use crate::shelf::containers::{ContainerDir, ContainerError, ContainerRecord, check_id};
use crate::store::Store;

impl Store {
    /// Creates and locks `containers/ID/`. The id is 1 to 64 of `a-z A-Z 0-9 - _ .`, not beginning with a dot or a
    /// hyphen.
    ///
    /// An image of another user's shared store must stay open as long as the container exists.
    ///
    /// The record is synced only if the container will be kept, because other containers do not survive a crash.
    ///
    /// # Errors
    /// [`ContainerError`] if the id is invalid or taken, or the image or the snapshot is not in the
    /// store.
    pub fn create_container(
        &self,
        id: &str,
        record: &ContainerRecord,
    ) -> Result<ContainerDir, ContainerError> {
        check_id(id)?;
        if !self.is_writable() {
            return Err(ContainerError::ReadOnly(self.path().to_owned()));
        }
        let draft = self.containers.draft(record)?;
        // `gc` waits from the lookup of the image until the container is published.
        let lock = self.lock_shared()?;
        if record.shared.is_none() && !self.images.has(&record.image)? {
            return Err(ContainerError::NoImage { id: id.to_owned(), image: record.image });
        }
        let failed = |source| ContainerError::Snapshot { id: id.to_owned(), source };
        let held = record.snapshot.as_deref().map(|it| self.hold_container_snapshot(it));
        let held = held.transpose().map_err(failed)?;
        if record.keep {
            // The container is found after a crash, so its image must be.
            self.settle()?;
        }
        let container = self.containers.publish(id, draft)?;
        drop((lock, held));
        if record.keep {
            self.containers.directory.sync()?;
        }
        Ok(container)
    }
}
