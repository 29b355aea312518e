//! New sparse devices.

use image::verity::{Algorithm, DeviceId};

use crate::disk::DiskError;
use crate::meta::{META, Meta};
use crate::record::RECORD_MAX;
use crate::shelf::sparse::{SPARSE, SparseError, SparseFill};
use crate::store::{Store, mode_of};

impl Store {
    /// Makes an empty sparse device of so many bytes, and opens it to be filled. The first one notes in `meta` that the
    /// store has such devices.
    ///
    /// # Errors
    /// [`SparseError`] when there is one already, or it cannot be made.
    pub fn create_sparse(&self, id: &DeviceId, bytes: u64) -> Result<SparseFill<'_>, SparseError> {
        if !self.is_writable() {
            return Err(SparseError::ReadOnly(self.path().to_owned()));
        }
        if id.algorithm() != Algorithm::Sha256 {
            return Err(SparseError::Algorithm(*id));
        }
        // gc decides nothing until the device is open.
        let _lock = self.lock_shared()?;
        self.note_sparse()?;
        self.root.make(SPARSE, mode_of(SPARSE))?;
        self.root.sync()?;
        self.sparse.publish(id, bytes)?;
        self.sparse.fill(id)?.ok_or(SparseError::Exists(*id))
    }

    /// Before there is one: a program that does not know them must not change the store.
    fn note_sparse(&self) -> Result<(), DiskError> {
        let odd = |error| self.root.failed("read", META, std::io::Error::other(error));
        let bytes = self.root.read_all(META, RECORD_MAX)?.unwrap_or_default();
        let meta = Meta::decode(&bytes).map_err(odd)?;
        if meta.has_sparse {
            return Ok(());
        }
        self.tmp.replace(&self.root, META, &Meta { has_sparse: true, ..meta }.encode())
    }
}
