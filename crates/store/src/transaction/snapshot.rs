//! Snapshots of container engines: what their records need is in the store.

use crate::disk::DiskError;
use crate::shelf::snapshots::{SNAPSHOTS, SnapshotError, SnapshotInstance, SnapshotRecord};
use crate::store::{Lock, Store, mode_of};

impl Store {
    /// Opens and locks the snapshots of an engine. The first one records in `meta` that the store has such things.
    ///
    /// # Errors
    /// [`SnapshotError`] when the name is invalid, or another service has them open.
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

    /// Keeps `gc` out, as long as the answer is there: what is imported meanwhile, or opened, is not swept before a record
    /// names it. A `gc` that has begun is waited for.
    ///
    /// # Errors
    /// [`SnapshotError::Disk`].
    pub fn hold(&self) -> Result<Hold, SnapshotError> {
        Ok(Hold { _lock: self.lock_shared()? })
    }

    /// Puts a record in the place of the one that a snapshot has, if the store has what it needs. From here on `gc` leaves
    /// that alone.
    ///
    /// # Errors
    /// [`SnapshotError::Gone`] if it has not; the old record is there then.
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

/// No `gc` decides or sweeps as long as it is there.
#[derive(Debug)]
#[must_use = "gc is kept out as long as it is there"]
pub struct Hold {
    _lock: Option<Lock>,
}
