//! Images whose devices are filled later: indexes, and lazy devices of an import.

use std::io;
use std::os::unix::fs::FileExt as _;

use image::digest::Digest;
use image::lazy::Head;
use image::verity::{Algorithm, DeviceId};

use super::draft::DraftError;
use super::{State, Transaction, TransactionError};
use crate::disk::DiskError;
use crate::shelf::lazy_devices::index::{self, Existing};
use crate::shelf::lazy_devices::publish::NewDevice;
use crate::shelf::lazy_devices::{LAZY, LazyDeviceError, LazyDeviceState};
use crate::store::{Store, mode_of};

/// What stands behind a tar is less.
const TAIL_MAX: u64 = 1024;

/// A device that is to be there, empty if need be, and how it is filled.
#[derive(Debug)]
pub(super) struct LazyDevice {
    head: Head,
    windows: Vec<u8>,
    made: Made,
    /// Of an index that came from elsewhere: the manifest whose image it came with.
    claimed_by: Option<Digest>,
}

/// Where an index comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    /// From elsewhere: what is here comes first.
    Elsewhere,
    /// From all bytes of a device that is here.
    Here,
}

impl Store {
    /// Gives a device its index, in the place of any that it has: the caller has made it from all bytes. The device may be
    /// lazy or complete; the index of one that is neither is garbage. The first one records in `meta` that the store
    /// has such files.
    ///
    /// # Errors
    /// [`LazyDeviceError`] when head and windows do not belong together, or cannot be written.
    pub fn put_index(&self, head: &Head, windows: &[u8]) -> Result<(), LazyDeviceError> {
        self.may_fill()?;
        index::encoded(head, windows)?;
        let _lock = self.lock_shared()?;
        self.make_lazy_device()?;
        self.lazy_devices.put_index(head, windows, Existing::Replaced)
    }

    /// Makes the directory, which the lock keeps from programs that do not know it.
    pub(super) fn make_lazy_device(&self) -> Result<(), DiskError> {
        self.note_feature(|meta| meta.has_lazy_devices = true)?;
        self.root.make(LAZY, mode_of(LAZY, self.sharing()?))?;
        self.root.sync()
    }
}

impl Transaction<'_> {
    /// Gives the import a device that need not be here: the commit makes it, empty, with this index, which the image of this
    /// manifest claims to be right. Images of this import may have it as a device. A device that the store has is taken as it
    /// is, and so are the indexes that others claim. Returns whether it is filled on demand: `false` if the store has all of it.
    ///
    /// # Errors
    /// [`DraftError`] when head and windows do not belong together, or the device cannot be looked up.
    pub fn lazy_device(
        &self,
        head: Head,
        windows: Vec<u8>,
        manifest: Digest,
    ) -> Result<bool, DraftError> {
        let failed = |source| {
            self.fail();
            DraftError::LazyDevice { source: Box::new(source) }
        };
        index::encoded(&head, &windows).map_err(failed)?;
        let algorithm = self.store.algorithm();
        if algorithm != Algorithm::Sha256 {
            return Err(DraftError::NoDevices(algorithm));
        }
        let is_complete = self.reuse_device(&head.device)?;
        let claimed_by = Some(manifest);
        let lazy = LazyDevice { head, windows, made: Made::Elsewhere, claimed_by };
        self.state().lazy.insert(lazy.head.device, lazy);
        Ok(!is_complete)
    }

    /// Gives a device of this import, or one that it has found, an index that was made from all bytes: the commit puts it in
    /// the place of any that the device has.
    ///
    /// # Errors
    /// [`LazyDeviceError`] when head and windows do not belong together.
    pub fn put_index(&self, head: Head, windows: Vec<u8>) -> Result<(), LazyDeviceError> {
        index::encoded(&head, &windows)?;
        let lazy = LazyDevice { head, windows, made: Made::Here, claimed_by: None };
        self.state().lazy.insert(lazy.head.device, lazy);
        Ok(())
    }

    /// The layer whose tar a device of this import or of the store is.
    ///
    /// # Errors
    /// [`DiskError`] when the device's index cannot be read.
    pub fn layer_of(&self, device: &DeviceId) -> Result<Option<Digest>, DiskError> {
        match self.made_layer_of(device) {
            Some(layer) => Ok(layer),
            None => self.store.devices.layer_of(device),
        }
    }

    /// The bytes of a device of this import or of the store, from one on to its end: of a tar, what stands behind it.
    ///
    /// # Errors
    /// [`io::Error`] when they cannot be read, or are more than 1024.
    pub fn device_tail(&self, device: &DeviceId, from: u64) -> io::Result<Vec<u8>> {
        let file = match self.made_device(device).map_err(io::Error::other)? {
            Some(file) => file,
            None => self.store.devices.file(device).ok_or(io::ErrorKind::NotFound)?.0,
        };
        let length = file.metadata()?.len().checked_sub(from).filter(|it| *it <= TAIL_MAX);
        let length = length.and_then(|it| usize::try_from(it).ok());
        let mut tail = vec![0; length.ok_or(io::ErrorKind::InvalidData)?];
        file.read_exact_at(&mut tail, from)?;
        Ok(tail)
    }

    /// Makes the lazy devices that are not there, durably, after their indexes. The store's lock is held.
    pub(super) fn publish_lazy(&self, state: &State) -> Result<(), TransactionError> {
        let store = self.store;
        if state.lazy.is_empty() {
            return Ok(());
        }
        store.make_lazy_device()?;
        let mut new = Vec::new();
        for (id, LazyDevice { head, windows, made, claimed_by }) in &state.lazy {
            let claimed_by = *claimed_by;
            let device =
                |existing, is_made| NewDevice { head, windows, claimed_by, existing, is_made };
            if *made == Made::Here {
                // The device came before, with its index of objects.
                new.push(device(Existing::Replaced, false));
                continue;
            }
            if store.devices.index_of(id)?.is_some() {
                // Another import may have brought all of it, and not synced its name.
                store.devices.directory.there()?.sync()?;
                new.push(device(Existing::Any, false));
                continue;
            }
            if let Some(info) = store.lazy_devices.stat(id)? {
                let (expected, actual) = (head.device_bytes, info.bytes);
                if actual != expected {
                    return Err(LazyDeviceError::Indexed { device: *id, expected, actual }.into());
                }
                if info.state == LazyDeviceState::Condemned {
                    return Err(LazyDeviceError::Condemned(*id).into());
                }
            }
            new.push(device(Existing::Agreeing, true));
        }
        Ok(store.lazy_devices.publish_all(&new)?)
    }
}

impl State {
    /// Whether this import sees to it that there is a device of this length in bytes.
    pub(super) fn is_lazy(&self, device: &DeviceId, bytes: u64) -> bool {
        let lazy = self.lazy.get(device).filter(|it| it.made == Made::Elsewhere);
        lazy.is_some_and(|it| it.head.device_bytes == bytes)
    }
}
