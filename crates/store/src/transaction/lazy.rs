//! Images whose devices are filled later: indexes, and sparse devices of an import.

use image::lazy::Head;
use image::verity::{Algorithm, DeviceId};

use super::draft::DraftError;
use super::{State, Transaction, TransactionError};
use crate::disk::DiskError;
use crate::shelf::sparse::index::{self, Existing};
use crate::shelf::sparse::{SPARSE, SparseError, SparseState};
use crate::store::{Store, mode_of};

/// A device that is to be there, empty if need be, and how it is filled.
#[derive(Debug)]
pub(super) struct LazyDevice {
    head: Head,
    windows: Vec<u8>,
}

impl Store {
    /// Gives a device its index, in the place of any that it has: the caller has made it from all bytes. The device may be
    /// sparse or complete; the index of one that is neither is garbage. The first one records in `meta` that the store
    /// has such files.
    ///
    /// # Errors
    /// [`SparseError`] when head and windows do not belong together, or cannot be written.
    pub fn put_index(&self, head: &Head, windows: &[u8]) -> Result<(), SparseError> {
        self.may_fill()?;
        index::encoded(head, windows)?;
        let _lock = self.lock_shared()?;
        self.make_sparse()?;
        self.sparse.put_index(head, windows, Existing::Replaced)
    }

    /// Makes the directory, which the lock keeps from programs that do not know it.
    pub(super) fn make_sparse(&self) -> Result<(), DiskError> {
        self.note_sparse()?;
        self.root.make(SPARSE, mode_of(SPARSE))?;
        self.root.sync()
    }
}

impl Transaction<'_> {
    /// Gives the import a device that need not be here: the commit makes it, empty, with this index. Images of this import
    /// may have it as a device. A device that the store has is taken as it is. Returns whether it is filled on demand:
    /// `false` if the store has all of it.
    ///
    /// # Errors
    /// [`DraftError`] when head and windows do not belong together, or the device cannot be looked up.
    pub fn lazy_device(&self, head: Head, windows: Vec<u8>) -> Result<bool, DraftError> {
        let failed = |source| {
            self.fail();
            DraftError::Sparse { source: Box::new(source) }
        };
        index::encoded(&head, &windows).map_err(failed)?;
        let algorithm = self.store.algorithm();
        if algorithm != Algorithm::Sha256 {
            return Err(DraftError::NoDevices(algorithm));
        }
        let is_complete = self.reuse_device(&head.device)?;
        self.state().lazy.insert(head.device, LazyDevice { head, windows });
        Ok(!is_complete)
    }

    /// Makes the sparse devices that are not there, durably, each after its index. The store's lock is held.
    pub(super) fn publish_lazy(&self, state: &State) -> Result<(), TransactionError> {
        let store = self.store;
        if state.lazy.is_empty() {
            return Ok(());
        }
        store.make_sparse()?;
        for (id, LazyDevice { head, windows }) in &state.lazy {
            if store.devices.index_of(id)?.is_some() {
                // Another import may have brought all of it, and not synced its name.
                store.devices.directory.there()?.sync()?;
                if !store.sparse.has_index(id)? {
                    store.sparse.put_index(head, windows, Existing::Kept)?;
                }
                continue;
            }
            let there = store.sparse.stat(id)?;
            if let Some(info) = there {
                let (expected, actual) = (head.device_bytes, info.bytes);
                if actual != expected {
                    return Err(SparseError::Indexed { device: *id, expected, actual }.into());
                }
                if info.state == SparseState::Condemned {
                    return Err(SparseError::Condemned(*id).into());
                }
            }
            store.sparse.put_index(head, windows, Existing::Kept)?;
            if there.is_none() {
                match store.sparse.publish(id, head.device_bytes) {
                    Ok(()) | Err(SparseError::Exists(_)) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }
}

impl State {
    /// Whether this import sees to it that there is a device of this length in bytes.
    pub(super) fn is_lazy(&self, device: &DeviceId, bytes: u64) -> bool {
        self.lazy.get(device).is_some_and(|it| it.head.device_bytes == bytes)
    }
}
