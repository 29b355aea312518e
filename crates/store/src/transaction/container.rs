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
        let held = self.hold_for_container(id, record)?;
        let container = self.containers.publish(id, draft)?;
        drop(held);
        if record.keep {
            self.containers.directory.sync()?;
        }
        Ok(container)
    }
}
