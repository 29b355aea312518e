//! Snapshots of container engines: ensures that the store has the items which their records need.

use crate::disk::DiskError;
use crate::shelf::snapshots::{SNAPSHOTS, SnapshotError, SnapshotInstance, SnapshotRecord};
use crate::store::{Lock, Store, mode_of};

impl Store {
    /// Opens and locks the snapshots of an engine. The first call records in `meta` that the store has snapshots.
    ///
    /// # Errors
    /// [`SnapshotError`] if the name is invalid, or another service has the instance open.
    pub fn open_snapshots(&self, instance: &str) -> Result<SnapshotInstance, SnapshotError> {
        if !self.is_writable() {
            return Err(SnapshotError::ReadOnly(self.path().to_owned()));
        }
        let _lock = self.lock_shared()?;
        self.make_snapshots()?;
        self.snapshots.open(instance)
    }

    fn make_snapshots(&self) -> Result<(), DiskError> {
        self.note_feature(|meta| meta.has_snapshots = true)?;
        self.root.make(SNAPSHOTS, mode_of(SNAPSHOTS, self.sharing()?))?;
        self.root.sync()
    }

    /// Prevents `gc` from deciding or deleting as long as the returned value exists. So items that are imported or
    /// opened during that time are kept until a record names them. Waits for a `gc` that is already running.
    pub fn hold(&self) -> Result<Hold, SnapshotError> {
        Ok(Hold { _lock: self.lock_shared()? })
    }

    /// Replaces the record of a snapshot, if the store has the items that it needs. From then on `gc` keeps these
    /// items.
    ///
    /// # Errors
    /// [`SnapshotError::Gone`] if the store lacks an item. The old record remains then.
    pub fn settle_snapshot(
        &self,
        instance: &SnapshotInstance,
        number: u64,
        record: &SnapshotRecord,
    ) -> Result<(), SnapshotError> {
        let _lock = self.lock_shared()?;
        if let Some(content) = record.content() {
            let has_image = content.image.map_or(Ok(true), |image| self.images.has(&image))?;
            let has_layer = match &content.lazy {
                None => self.layers.has(&content.layer)?,
                Some(lazy) => {
                    self.images.has(&lazy.image)? && self.manifests.has(&lazy.manifest)?
                }
            };
            if !has_image || !has_layer {
                return Err(SnapshotError::Gone(number));
            }
        }
        Ok(instance.change(number, record)?)
    }
}

/// Prevents `gc` from deciding or deleting as long as this value exists.
#[derive(Debug)]
#[must_use = "gc is kept out while the hold exists"]
pub struct Hold {
    _lock: Option<Lock>,
}
