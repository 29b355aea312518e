//! Creates and fills lazy devices.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};

use image::verity::{Algorithm, DeviceId};

use crate::disk::{DiskError, PUBLISHED, PlacedFile};
use crate::meta::{META, Meta};
use crate::record::RECORD_MAX;
use crate::shelf::lazy_devices::readers::ReadersHeldOff;
use crate::shelf::lazy_devices::{self, LazyDeviceError, LazyDeviceState};
use crate::store::Store;

impl Store {
    /// Creates an empty lazy device of this length in bytes, and opens it for its filler. The first call records in
    /// `meta` that the store has such devices.
    ///
    /// # Errors
    /// [`LazyDeviceError`] if the device exists, or cannot be created.
    pub fn create_lazy_device(
        &self,
        id: &DeviceId,
        bytes: u64,
    ) -> Result<LazyDeviceFill<'_>, LazyDeviceError> {
        self.may_fill()?;
        if id.algorithm() != Algorithm::Sha256 {
            return Err(LazyDeviceError::Algorithm(*id));
        }
        // `gc` makes no decision until the device is open.
        let _lock = self.lock_shared()?;
        self.make_lazy_device()?;
        self.lazy_devices.publish(id, bytes)?;
        self.open_to_fill(id)?.ok_or(LazyDeviceError::Exists(*id))
    }

    /// Opens a partial device for its filler. Returns `None` if the device does not exist, or another process fills
    /// it.
    ///
    /// # Errors
    /// [`LazyDeviceError::Ended`], or the errors of [`stat`](crate::LazyDeviceShelf::stat).
    pub fn fill_lazy_device(
        &self,
        id: &DeviceId,
    ) -> Result<Option<LazyDeviceFill<'_>>, LazyDeviceError> {
        self.may_fill()?;
        // `gc` removes no files between opening and locking.
        let _lock = self.lock_shared()?;
        self.open_to_fill(id)
    }

    fn open_to_fill(&self, id: &DeviceId) -> Result<Option<LazyDeviceFill<'_>>, LazyDeviceError> {
        let opened = self.lazy_devices.open_to_fill(id)?;
        Ok(opened.map(|(file, bytes)| LazyDeviceFill::new(self, id, file, bytes)))
    }

    /// Takes over a partial device from a filler that has passed on its file: a [`LazyDeviceFill::file`] or a
    /// duplicate of it. Returns `None` if the device does not exist any more, or if the file belongs to another
    /// device.
    ///
    /// # Errors
    /// As [`fill_lazy_device`](Self::fill_lazy_device).
    pub fn adopt_lazy_device(
        &self,
        id: &DeviceId,
        file: File,
    ) -> Result<Option<LazyDeviceFill<'_>>, LazyDeviceError> {
        self.may_fill()?;
        let _lock = self.lock_shared()?;
        let adopted = self.lazy_devices.adopt(id, file)?;
        Ok(adopted.map(|(file, bytes)| LazyDeviceFill::new(self, id, file, bytes)))
    }

    pub(super) fn may_fill(&self) -> Result<(), LazyDeviceError> {
        match self.is_writable() {
            true => Ok(()),
            false => Err(LazyDeviceError::ReadOnly(self.path().to_owned())),
        }
    }

    /// Records a feature in `meta`. This must precede the first file that needs the feature, because a program that
    /// does not know the feature must not change the store. The caller does not hold the lock of the records.
    pub(super) fn note_feature(&self, note: impl Fn(&mut Meta)) -> Result<(), DiskError> {
        if self.with_feature(&note)?.is_none() {
            return Ok(());
        }
        // Without this lock, the features that two processes record at once could replace each other.
        let _alone = self.lock_records()?;
        let Some(meta) = self.with_feature(&note)? else { return Ok(()) };
        // Without this file there is no store, so it is synced even if other files are not.
        let _synced = self.root.deferral().switch(false);
        self.tmp.replace(&self.root, META, &meta.encode())
    }

    /// Returns the content that `meta` needs for a feature, or `None` if it has the feature.
    fn with_feature(&self, note: impl Fn(&mut Meta)) -> Result<Option<Meta>, DiskError> {
        let odd = |error| self.root.failed("read", META, std::io::Error::other(error));
        let bytes = self.root.read_all(META, RECORD_MAX)?.unwrap_or_default();
        let meta = Meta::decode(&bytes).map_err(odd)?;
        let mut noted = meta.clone();
        note(&mut noted);
        Ok((noted != meta).then_some(noted))
    }
}

/// A partial device, which is open for the only process that fills it. As long as it is open, `gc` keeps the device.
#[derive(Debug)]
pub struct LazyDeviceFill<'s> {
    store: &'s Store,
    id: DeviceId,
    bytes: u64,
    /// The locked file, open for reading and writing. It must be the filler's only open file of the device, so that a
    /// lease shows whether others have the device open.
    file: PlacedFile,
    /// Whether the disk has lost bytes. The kernel reports this once per open file.
    is_lost: Mutex<bool>,
}

impl<'s> LazyDeviceFill<'s> {
    fn new(store: &'s Store, id: &DeviceId, file: PlacedFile, bytes: u64) -> Self {
        LazyDeviceFill { store, id: *id, bytes, file, is_lost: Mutex::new(false) }
    }

    #[must_use]
    pub const fn id(&self) -> &DeviceId {
        &self.id
    }

    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the file, to mark it or to keep it for a successor. The lock is released when the last duplicate is
    /// closed.
    #[must_use]
    pub const fn file(&self) -> &File {
        self.file.file()
    }

    /// Keeps other processes from reading parts of the device by [`Store::lazy_tar_part`] until the result is dropped, so
    /// that a lease shows whether another program has the device open.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn hold_readers_off(&self) -> Result<ReadersHeldOff, LazyDeviceError> {
        self.store.lazy_devices.hold_readers_off(&self.id)
    }

    /// Reads a part of the device at an offset in bytes. Parts that are not filled are zeros.
    ///
    /// # Errors
    /// An error of the disk, also if the part is beyond the end.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> Result<(), LazyDeviceError> {
        let read = self.file().read_exact_at(into, offset);
        Ok(read.map_err(|error| self.file.failed("read", error))?)
    }

    /// Returns the device with this id that an import has stored as a whole, if there is one.
    #[must_use]
    pub fn whole(&self) -> Option<File> {
        let (file, stat) = self.store.devices.file(&self.id)?;
        (u64::try_from(stat.st_size) == Ok(self.bytes)).then_some(file)
    }

    /// Checks that `bytes` bytes can be written, and that the reserve for other programs stays free, as for imports.
    ///
    /// # Errors
    /// An error of the disk, which contains the free space.
    pub fn check_room(&self, bytes: u64) -> Result<(), LazyDeviceError> {
        let taken = self.store.tmp.room()?.take(bytes);
        Ok(taken.map_err(|error| self.file.failed("write", error))?)
    }

    /// Writes a part of the device at an offset in bytes.
    ///
    /// # Errors
    /// [`LazyDeviceError::Outside`], or an error of the disk.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), LazyDeviceError> {
        let end = offset.saturating_add(bytes.len() as u64);
        if end > self.bytes {
            return Err(LazyDeviceError::Outside { device: self.id, bytes: self.bytes, end });
        }
        Ok(self.file.write_at(bytes, offset)?)
    }

    /// Ends the filling: compares all bytes with the id, syncs them and protects them. The device is then sealed, or
    /// condemned if the bytes do not match or the disk could not keep them.
    ///
    /// # Errors
    /// [`LazyDeviceError::Mismatch`], [`LazyDeviceError::Lost`], [`LazyDeviceError::Replaced`], or an error of the
    /// disk.
    pub fn seal(self) -> Result<(), LazyDeviceError> {
        self.seal_unless(&AtomicBool::new(false))
    }

    /// As [`seal`](Self::seal), but if `cancel` is set before the end, the device is unchanged. The device can be
    /// read during the call.
    ///
    /// # Errors
    /// The errors of [`seal`](Self::seal), and [`LazyDeviceError::Cancelled`].
    pub fn seal_unless(&self, cancel: &AtomicBool) -> Result<(), LazyDeviceError> {
        let hashed = lazy_devices::hash(self.file(), cancel);
        let actual = hashed.map_err(|error| self.file.failed("read", error))?;
        let actual = actual.ok_or(LazyDeviceError::Cancelled)?;
        if actual != self.id {
            self.condemn()?;
            let (expected, actual) = (Box::new(self.id), Box::new(actual));
            return Err(LazyDeviceError::Mismatch { expected, actual });
        }
        // The new mode has no mark of files that are not synced, so the state must not have it either.
        self.store.settle()?;
        self.sync()?;
        self.file.set_mode(PUBLISHED)?;
        self.sync()?;
        let is_lost = self.lost();
        if *is_lost {
            return Err(LazyDeviceError::Lost(self.id));
        }
        self.note(LazyDeviceState::Sealed)
    }

    /// Checks that the disk has kept all bytes that were written back so far. If not, the device is condemned, because
    /// the kernel drops data that it could not write, so these bytes may then read as zeros.
    ///
    /// # Errors
    /// An error of the disk the first time, then [`LazyDeviceError::Lost`].
    pub fn check_written(&self) -> Result<(), LazyDeviceError> {
        // The kernel reports a write error once, so it is recorded under the lock before another thread checks.
        let mut is_lost = self.lost();
        if *is_lost {
            return Err(LazyDeviceError::Lost(self.id));
        }
        let written = kernel::files::check_written(self.file().as_fd());
        written.map_err(|errno| {
            *is_lost = true;
            self.condemned(self.file.failed("write back", std::io::Error::from(errno)))
        })
    }

    /// Records that the device has wrong bytes. Returns whether that is new.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn condemn(&self) -> Result<bool, LazyDeviceError> {
        let was_lost = std::mem::replace(&mut *self.lost(), true);
        if !was_lost {
            self.note(LazyDeviceState::Condemned)?;
        }
        Ok(!was_lost)
    }

    fn lost(&self) -> MutexGuard<'_, bool> {
        self.is_lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Syncs the file. The kernel drops data that it could not write and reports the error once, so the error is
    /// recorded.
    fn sync(&self) -> Result<(), LazyDeviceError> {
        let synced = self.file.sync();
        let mut is_lost = self.lost();
        match synced {
            Ok(()) if *is_lost => Err(LazyDeviceError::Lost(self.id)),
            Ok(()) => Ok(()),
            Err(error) => {
                *is_lost = true;
                Err(self.condemned(error))
            }
        }
    }

    fn condemned(&self, error: DiskError) -> LazyDeviceError {
        if let Err(error) = self.note(LazyDeviceState::Condemned) {
            tracing::warn!(device = %self.id, %error, "cannot condemn a lazy device whose data the disk lost");
        }
        error.into()
    }

    fn note(&self, state: LazyDeviceState) -> Result<(), LazyDeviceError> {
        let _lock = self.store.lock_shared()?;
        self.store.lazy_devices.note(&self.id, &self.file, self.bytes, state)
    }
}
