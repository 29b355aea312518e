//! The devices of an import.

use std::fs::File;
use std::sync::Arc;

use image::digest::Digest;
use image::verity::{DeviceId, Id, ObjectId};
use rustix::io::Errno;

use super::device::{self, DeviceDraft};
use super::draft::{DraftError, Scrap};
use super::{ItemLocation, State, Transaction};
use crate::disk::{DiskError, Renamed};
use crate::operation::OperationError;
use crate::shelf::devices::{
    self, DeviceKind, Index, IndexError, ObjectReader, StoredDevice, StoredObject, Where,
};
use crate::shelf::item::StoreItem;
use crate::shelf::lazy_device_file::LazyDeviceFile;
use crate::shelf::lazy_devices::LazyDeviceState;
use crate::shelf::objects::ObjectLookupError;
use crate::store::mode_of;

/// A device that an import has made or relies on.
#[derive(Debug)]
pub(super) enum DeviceLocation {
    /// In the import's work directory.
    Here(MadeDevice),
    Store,
}

/// A device that the import has made, and its index.
#[derive(Debug)]
pub(super) struct MadeDevice {
    pub(super) device: MadeFile,
    pub(super) index_file: u64,
    index: Arc<Index>,
}

/// Location of a device's file until the commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MadeFile {
    /// A file with this number in the import's work directory.
    Own(u64),
    /// A sealed lazy device in `lazy/`.
    LazyDevice,
}

impl State {
    /// Returns the location in finished devices of an object that can be a piece of another one.
    fn made_piece(&self, id: &[u8; 32], len: u64) -> Option<StoredObject> {
        self.data.iter().find_map(|(device, data)| match data {
            DeviceLocation::Here(made) => devices::piece_of(&made.index, device, id, len),
            DeviceLocation::Store => None,
        })
    }
}

impl Transaction<'_> {
    /// Begins a device. Its bytes and objects are added in order.
    ///
    /// # Errors
    /// [`DraftError`] if its file cannot be created, or the store uses SHA-512.
    pub fn device(&self, kind: DeviceKind) -> Result<DeviceDraft<'_>, DraftError> {
        DeviceDraft::new(self, kind)
    }

    /// Begins a device from a sealed device in `lazy/`. Bytes and objects are added in order, as for a new device, and
    /// must match the sealed device. The commit moves the device to `data/`. Returns `None` if there is no such
    /// device, or it is not sealed.
    ///
    /// # Errors
    /// [`DraftError`] if the device cannot be read, or the store uses SHA-512.
    pub fn sealed_device(&self, id: &DeviceId) -> Result<Option<DeviceDraft<'_>>, DraftError> {
        let found = self.store.lazy_devices.open(id).map_err(|source| {
            self.fail();
            OperationError::of("add", "a lazy device")(source)
        })?;
        match found {
            Some((file, info)) if info.state == LazyDeviceState::Sealed => {
                DeviceDraft::sealed(self, *id, file).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Whether the store, or this import, has this device with its index. If so, the device and its objects are
    /// protected from `gc` until the import ends.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse_device(&self, id: &DeviceId) -> Result<bool, DraftError> {
        if self.state().data.contains_key(id) {
            return Ok(true);
        }
        self.look_into_devices().map_err(|source| self.lookup_failed(id, source))?;
        let there =
            self.store.devices.index_of(id).map_err(|source| self.lookup_failed(id, source))?;
        if there.is_some() {
            self.state().data.entry(*id).or_insert(DeviceLocation::Store);
        }
        Ok(there.is_some())
    }

    /// Returns the location of an object in a device that this import has finished or that the store has. The device
    /// is protected from `gc` until the import ends, and the object is counted as reused. An object of another size
    /// is ignored.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse_stored(
        &self,
        id: &ObjectId,
        size: u64,
    ) -> Result<Option<StoredObject>, DraftError> {
        self.look_into_devices().map_err(|source| self.lookup_failed(id, source))?;
        let found = match self.made(id) {
            Some(found) => Some(found),
            None => self
                .store
                .devices
                .find_object(id)
                .map_err(|source| self.lookup_failed(id, source))?,
        };
        let found = found.filter(|it| it.size == size);
        if let Some(found) = &found {
            self.rely_on(found);
            self.state().counts.reuse(size);
        }
        Ok(found)
    }

    /// Returns the location of an object that can be a piece of another one, in a packed device that this import has
    /// finished or that the store has. The device is protected from `gc` until the import ends.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse_piece(&self, id: &ObjectId, len: u64) -> Result<Option<StoredObject>, DraftError> {
        let Some(key) = devices::key(id) else { return Ok(None) };
        self.look_into_devices().map_err(|source| self.lookup_failed(id, source))?;
        let found = match self.state().made_piece(&key, len) {
            Some(found) => Some(found),
            None => {
                let found = self.store.devices.find_piece(&key, len);
                found.map_err(|source| self.lookup_failed(id, source))?
            }
        };
        if let Some(found) = &found {
            self.rely_on(found);
        }
        Ok(found)
    }

    /// Protects the devices with an object's bytes from `gc`, until the import ends.
    pub(super) fn rely_on(&self, stored: &StoredObject) {
        let mut state = self.state();
        for device in stored.devices() {
            state.data.entry(device.id).or_insert(DeviceLocation::Store);
        }
    }

    /// Returns the location of an object of this size in the store or this import: a file, if there is one. The
    /// object is protected from `gc` as by [`reuse`](Self::reuse). This is for layers, which need only the bytes; a
    /// composefs image needs a file.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse_anywhere(&self, id: &ObjectId, size: u64) -> Result<Option<Where>, DraftError> {
        if self.reuse(id, size)? {
            return Ok(Some(Where::File));
        }
        Ok(self.reuse_stored(id, size)?.map(Box::new).map(Where::Device))
    }

    /// Opens an object in a device, even in one that this import has made and not committed.
    ///
    /// # Errors
    /// [`ObjectLookupError`] if the object cannot be read.
    pub fn stored_object(&self, stored: &StoredObject) -> Result<ObjectReader, ObjectLookupError> {
        if stored.pieces.is_some() {
            let made = |device: &DeviceId| {
                let made = match self.state().data.get(device) {
                    Some(DeviceLocation::Here(made)) => (made.device, Arc::clone(&made.index)),
                    _ => return Ok(None),
                };
                Ok(Some((self.made_file(device, made.0)?, made.1)))
            };
            return self.store.stored_pieces(stored, &made);
        }
        let made = match self.state().data.get(&stored.device) {
            Some(DeviceLocation::Here(made)) => Some((made.device, Arc::clone(&made.index))),
            _ => None,
        };
        let Some((device, index)) = made else { return self.store.stored_object(stored) };
        let file = self.made_file(&stored.device, device)?;
        let reader = devices::open_made(&index, stored, file);
        reader.ok_or(ObjectLookupError::NoObject(stored.object))
    }

    /// Returns the location of an object in devices.
    pub(super) fn data_of(&self, id: &ObjectId) -> Result<Option<StoredObject>, DiskError> {
        self.look_into_devices()?;
        match self.made(id) {
            Some(found) => Ok(Some(found)),
            None => self.store.devices.find_object(id),
        }
    }

    /// Returns the location of an object, or of its pieces, in finished devices of this import.
    pub(super) fn made(&self, id: &ObjectId) -> Option<StoredObject> {
        let state = self.state();
        let find = |id: &[u8; 32], len| {
            let made = state.made_piece(id, len);
            // A lookup error is reported when the object is opened.
            made.or_else(|| self.store.devices.find_piece(id, len).ok().flatten())
        };
        state.data.iter().find_map(|(device, data)| match data {
            DeviceLocation::Here(made) => devices::first_of(&made.index, device, id, &find),
            DeviceLocation::Store => None,
        })
    }

    /// Returns the length in bytes of a device that this import has made.
    #[cfg(test)]
    pub(crate) fn made_bytes(&self, device: &DeviceId) -> Option<u64> {
        match self.state().data.get(device)? {
            DeviceLocation::Here(made) => Some(made.index.header.bytes),
            DeviceLocation::Store => None,
        }
    }

    /// Returns the layer whose tar is this device, if this import has made the device.
    pub(super) fn made_layer_of(&self, device: &DeviceId) -> Option<Option<Digest>> {
        match self.state().data.get(device)? {
            DeviceLocation::Here(made) => Some(made.index.header.layer),
            DeviceLocation::Store => None,
        }
    }

    /// Opens a device that this import has made.
    pub(super) fn made_device(&self, device: &DeviceId) -> Result<Option<File>, DiskError> {
        let made = match self.state().data.get(device) {
            Some(DeviceLocation::Here(made)) => made.device,
            _ => return Ok(None),
        };
        self.made_file(device, made).map(Some)
    }

    fn made_file(&self, device: &DeviceId, made: MadeFile) -> Result<File, DiskError> {
        match made {
            MadeFile::Own(number) => self.read_back(number),
            MadeFile::LazyDevice => {
                let lazy = self.store.lazy_devices.directory.existing()?;
                let (name, found) =
                    (devices::device_name(device), self.store.lazy_devices.file(device));
                found.map(|it| it.0).ok_or_else(|| lazy.failed("open", &name, Errno::NOENT))
            }
        }
    }

    /// Opens a file of the work directory for reading.
    pub(crate) fn read_back(&self, number: u64) -> Result<File, DiskError> {
        let (directory, name) = (&self.work.directory, number.to_string());
        let opened = directory.read(&name)?;
        opened.map(|it| it.0).ok_or_else(|| directory.failed("open", &name, Errno::NOENT))
    }

    pub(super) fn lookup_failed<K>(
        &self,
        id: &Id<K>,
        source: impl Into<ObjectLookupError>,
    ) -> DraftError {
        self.fail();
        let object = format_args!("{} in the store", id.digest());
        OperationError::of("look for", object)(source.into()).into()
    }

    /// Registers a finished device and writes its index. Without `scrap`, the device is a sealed one in `lazy/`.
    pub(crate) fn finish_device(
        &self,
        scrap: Option<Scrap<'_>>,
        device: StoredDevice,
        encoded: &[u8],
    ) -> Result<(), DraftError> {
        let disk = |source| self.write_failed(device::WHAT, source);
        let (index_scrap, mut file) = Scrap::new(self).map_err(disk)?;
        file.write_all(encoded).map_err(disk)?;
        drop(file);
        let read = self.read_back(index_scrap.number()).map_err(disk)?;
        let index = Index::read(&read, encoded.len() as u64).map_err(|error| {
            self.fail();
            let source = match error {
                IndexError::Read(error) => error,
                IndexError::Damaged(damage) => std::io::Error::other(damage),
            };
            OperationError::of("make the index of device", device.id)(source)
        })?;
        let made = match self.state().data.get(&device.id) {
            Some(DeviceLocation::Here(made)) => Some(Arc::clone(&made.index)),
            _ => None,
        };
        if let Some(made) = made {
            // The id also depends on the ids of the objects (the imprint), so devices with the same id have the same
            // objects.
            return self.check_digests(&device.id, &made, &index);
        }
        self.look_into_devices().map_err(disk)?;
        let there = self.store.devices.index_of(&device.id);
        let there = there.map_err(|source| self.lookup_failed(&device.id, source))?;
        if let Some(there) = &there {
            self.check_digests(&device.id, there, &index)?;
        }
        let data = match there {
            Some(there) if there.has_all_of(&index) => DeviceLocation::Store,
            _ => {
                let file = match scrap {
                    Some(scrap) => {
                        self.seal(scrap.number(), device::WHAT)?;
                        MadeFile::Own(scrap.keep())
                    }
                    None => {
                        let lazy = self.store.lazy_devices.directory.existing().map_err(disk)?;
                        self.seal_in(lazy, &devices::device_name(&device.id), device::WHAT)?;
                        MadeFile::LazyDevice
                    }
                };
                let index_file = index_scrap.keep();
                DeviceLocation::Here(MadeDevice {
                    device: file,
                    index_file,
                    index: Arc::new(index),
                })
            }
        };
        self.state().data.insert(device.id, data);
        Ok(())
    }

    /// Refuses two indexes of a device that have different SHA-256 digests for an object. It is unknown which of them
    /// is right, and an image that names the other digest could not find the object.
    fn check_digests(
        &self,
        device: &DeviceId,
        there: &Index,
        new: &Index,
    ) -> Result<(), DraftError> {
        let Some(object) = there.contradiction(new) else { return Ok(()) };
        self.fail();
        let (device, object) = (Box::new(*device), Box::new(object));
        Err(DraftError::OtherDigest { device, object })
    }

    /// Publishes devices, durably, and then their indexes, because an index promises data in its device.
    pub(super) fn publish_data(&self, state: &State) -> Result<(), DiskError> {
        let mut made = Vec::new();
        for (id, data) in &state.data {
            let DeviceLocation::Here(data) = data else { continue };
            // Another import may have published the same device.
            let there = self.store.devices.index_of(id)?;
            if !there.is_some_and(|it| it.has_all_of(&data.index)) {
                made.push((id, data));
            }
        }
        if state.data.is_empty() {
            return Ok(());
        }
        if !made.is_empty() {
            self.store.root.make(devices::DATA, mode_of(devices::DATA, self.store.sharing()?))?;
            // Another import may have just created the directory without having synced it yet.
            self.store.root.sync()?;
        }
        let directory = self.store.devices.directory.existing()?;
        let mut sealer = super::sealer::Sealer::new(self);
        for (id, made) in &made {
            let name = devices::device_name(id);
            let there = directory.stat(&name)?;
            match made.device {
                // The file itself is renamed, because mounts may have it open. It was just compared with its id, so it
                // replaces an existing device. `gc` may have freed parts of the existing device, but the new index
                // lists the objects in these parts.
                MadeFile::LazyDevice => {
                    let lazy = self.store.lazy_devices.directory.existing()?;
                    if there.is_none() {
                        let (Renamed::Now | Renamed::Taken) =
                            lazy.rename_new(&name, directory, &name)?;
                    } else {
                        self.replace_from(lazy, &name, directory, &name)?;
                    }
                }
                MadeFile::Own(number) if there.is_none() => {
                    self.place(number, ItemLocation::Here(number), directory, &name)?;
                }
                MadeFile::Own(number) if self.lacks_objects(id)? => {
                    tracing::debug!(name, "replacing a device that lacks objects");
                    self.replace(number, directory, &name)?;
                }
                MadeFile::Own(number) => {
                    self.place(number, ItemLocation::Better(number), directory, &name)?;
                }
            }
            sealer.seal(directory, &name);
        }
        // Devices that another import has published, but perhaps not synced yet, are synced as well.
        directory.sync()?;
        for (id, made) in &made {
            let number = made.index_file.to_string();
            self.work.directory.rename_over(number, directory, devices::index_name(id))?;
        }
        if !made.is_empty() {
            directory.sync()?;
        }
        let moved = made.iter().filter(|(_, made)| made.device == MadeFile::LazyDevice);
        // A lazy device that could not be moved keeps its state, and `gc` removes both.
        let moved = moved.filter(|(id, _)| self.store.lazy_devices.file(id).is_none());
        let states: Vec<_> = moved.map(|(id, _)| LazyDeviceFile::State(**id)).collect();
        if !states.is_empty() {
            self.store.lazy_devices.remove(&states)?;
        }
        self.store.devices.forget_indexes();
        Ok(())
    }

    /// Whether a device in the store is intact, but its index has fewer objects than the import's: `gc` made holes,
    /// or a crash or a repair left no index.
    fn lacks_objects(&self, device: &DeviceId) -> Result<bool, DiskError> {
        let has_none =
            self.store.devices.directory.existing()?.stat(devices::index_name(device))?.is_none();
        let index = self.store.devices.index_of(device)?;
        Ok(has_none || index.is_some())
    }

    /// Checks that every device of a new image was made or found by this import, or that the import has an index of
    /// it.
    pub(super) fn check_devices(&self, state: &State) -> Result<(), super::TransactionError> {
        for (item, found) in &state.users {
            let (StoreItem::Image(image), Some(number)) = (item, found.number()) else { continue };
            let file = self.read_back(number)?;
            let size = file.metadata().map(|it| it.len());
            let size = size
                .map_err(|source| self.work.directory.failed("stat", number.to_string(), source))?;
            let file = crate::shelf::images::ImageFile::new(file, size);
            // A file that is not an image is reported when it is opened.
            let Ok(devices) = crate::shelf::images::devices(&file) else { continue };
            for device in devices.uses {
                let device = match device.device {
                    Some(id) if state.data.contains_key(&id) => continue,
                    Some(id) if state.is_lazy(&id, device.bytes) => continue,
                    Some(device) => device.to_string(),
                    None => "without an id".to_owned(),
                };
                return Err(super::TransactionError::NoDevice { image: Box::new(*image), device });
            }
        }
        Ok(())
    }
}
