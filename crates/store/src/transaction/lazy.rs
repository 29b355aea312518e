//! Lazy devices of an import, and their indexes.

use std::io;
use std::os::unix::fs::FileExt as _;

use image::digest::Digest;
use image::lazy::Head;
use image::verity::{Algorithm, DeviceId};

use super::draft::DraftError;
use super::{State, Transaction, TransactionError};
use crate::disk::DiskError;
use crate::operation::OperationError;
use crate::shelf::lazy_devices::index::{self, Existing, IndexWindows};
use crate::shelf::lazy_devices::publish::NewDevice;
use crate::shelf::lazy_devices::{LAZY, LazyDeviceError, LazyDeviceState};
use crate::store::{Store, mode_of};

/// Maximum length in bytes of a device after the end of its tar: padding, and the last block.
const TAIL_MAX: u64 = 1024;

/// A device of the import with its index. It may be created empty.
#[derive(Debug)]
pub(super) struct LazyDevice {
    head: Head,
    windows: IndexWindows,
    made: IndexOrigin,
    /// Manifest whose image the index came with; `None` if the index was made locally.
    claimed_by: Option<Digest>,
}

/// Origin of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IndexOrigin {
    /// The index came with an image, so existing indexes have priority.
    Elsewhere,
    /// The index was made from all bytes of a device in the store.
    Here,
}

impl Store {
    /// Sets the index of a device, and replaces any existing one, because the caller has made it from all bytes. The
    /// device may be lazy or complete. If there is no such device, the index is garbage. The first call records in
    /// `meta` that the store has such files.
    ///
    /// # Errors
    /// [`LazyDeviceError`] if head and windows do not match, or cannot be written.
    pub fn put_index(&self, head: &Head, windows: &[u8]) -> Result<(), LazyDeviceError> {
        let windows = IndexWindows::Groups(windows.to_vec());
        self.may_fill()?;
        index::encoded(head, &windows)?;
        let _lock = self.lock_shared()?;
        self.make_lazy_device()?;
        self.lazy_devices.put_index(head, &windows, Existing::Replaced)
    }

    /// Adds the windows of an index that came with an image without them. Returns `false`, and changes nothing, if
    /// there is no such index, or if its windows have another digest.
    ///
    /// # Errors
    /// [`LazyDeviceError`] if the windows cannot be written.
    pub fn add_windows(
        &self,
        device: &DeviceId,
        manifest: &Digest,
        groups: &[u8],
    ) -> Result<bool, LazyDeviceError> {
        self.may_fill()?;
        let _lock = self.lock_shared()?;
        self.lazy_devices.add_windows(device, manifest, groups)
    }

    /// Prepares the store for lazy devices, so that the first one causes no sync.
    ///
    /// # Errors
    /// [`LazyDeviceError`] if the store is open read-only, or an error of the disk.
    pub fn prepare_lazy(&self) -> Result<(), LazyDeviceError> {
        self.may_fill()?;
        let _lock = self.lock_shared()?;
        Ok(self.make_lazy_device()?)
    }

    /// Creates the directory `lazy/`. The caller holds the store's lock, so that `gc` of a version that does not know
    /// the directory cannot run at this time.
    pub(super) fn make_lazy_device(&self) -> Result<(), DiskError> {
        self.note_feature(|meta| meta.has_lazy_devices = true)?;
        self.root.make(LAZY, mode_of(LAZY, self.sharing()?))?;
        self.root.sync()
    }
}

impl Transaction<'_> {
    /// Adds a device whose bytes need not be downloaded. The commit creates an empty device with this index, whose
    /// correctness is a claim of this manifest. Images of this import may use the device. An existing device is used
    /// as it is, and existing indexes of other manifests are kept. Returns whether the device is filled on demand:
    /// `false` if the store has all of it.
    ///
    /// # Errors
    /// [`DraftError`] if head and windows do not match, or the device cannot be looked up.
    pub fn lazy_device(
        &self,
        head: Head,
        windows: IndexWindows,
        manifest: Digest,
    ) -> Result<bool, DraftError> {
        let failed = |source| {
            self.fail();
            OperationError::of("add", "a lazy device")(source)
        };
        index::encoded(&head, &windows).map_err(failed)?;
        let algorithm = self.store.algorithm();
        if algorithm != Algorithm::Sha256 {
            return Err(DraftError::NoDevices(algorithm));
        }
        let is_complete = self.reuse_device(&head.device)?;
        let claimed_by = Some(manifest);
        let lazy = LazyDevice { head, windows, made: IndexOrigin::Elsewhere, claimed_by };
        self.state().lazy.insert(lazy.head.device, lazy);
        Ok(!is_complete)
    }

    /// Sets the index of a device that this import has made or found. The index was made from all bytes, so the
    /// commit replaces any existing one.
    ///
    /// # Errors
    /// [`LazyDeviceError`] if head and windows do not match.
    pub fn put_index(&self, head: Head, groups: Vec<u8>) -> Result<(), LazyDeviceError> {
        let windows = IndexWindows::Groups(groups);
        index::encoded(&head, &windows)?;
        let lazy = LazyDevice { head, windows, made: IndexOrigin::Here, claimed_by: None };
        self.state().lazy.insert(lazy.head.device, lazy);
        Ok(())
    }

    /// Returns the layer whose tar is a device of this import or of the store.
    ///
    /// # Errors
    /// [`DiskError`] if the device's index cannot be read.
    pub fn layer_of(&self, device: &DeviceId) -> Result<Option<Digest>, DiskError> {
        match self.made_layer_of(device) {
            Some(layer) => Ok(layer),
            None => self.store.devices.layer_of(device),
        }
    }

    /// Returns the bytes of a device of this import or of the store from an offset to its end: for a tar, the data
    /// after the tar.
    ///
    /// # Errors
    /// [`io::Error`] if the bytes cannot be read, or are more than 1024.
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

    /// Creates the lazy devices that do not exist, durably, after their indexes. The caller holds the store's lock.
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
            if *made == IndexOrigin::Here {
                // This import has already published the device, with its index of objects.
                new.push(device(Existing::Replaced, false));
                continue;
            }
            if let Some(index) = store.devices.index_of(id)? {
                // The holes would be read as zeros.
                if index.header.dropped != 0 {
                    return Err(LazyDeviceError::Trimmed(*id).into());
                }
                // Another import may have published the complete device, but may not have synced its name.
                store.devices.directory.existing()?.sync()?;
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
    /// Whether this import ensures that a device of this length in bytes exists.
    pub(super) fn is_lazy(&self, device: &DeviceId, bytes: u64) -> bool {
        let lazy = self.lazy.get(device).filter(|it| it.made == IndexOrigin::Elsewhere);
        lazy.is_some_and(|it| it.head.device_bytes == bytes)
    }
}
