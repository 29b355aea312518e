//! Storage forms in which an import finds data: whole files, packed devices, and tars of layers.

use image::verity::{DeviceId, ObjectId};

use super::data::DeviceLocation;
use super::{ItemLocation, Transaction};
use crate::disk::length;
use crate::operation::OperationError;
use crate::shelf::devices::{DeviceKind, ObjectReader, StoredDevice, StoredObject};
use crate::shelf::objects::ObjectLookupError;
use crate::transaction::draft::DraftError;
use image::digest::Digest;

impl Transaction<'_> {
    /// Whether the store, or this import, has all of these objects as files of any size. They are protected from `gc`
    /// as by [`reuse`](Self::reuse).
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn has_files(&self, objects: &[ObjectId]) -> Result<bool, DraftError> {
        let listed = self.lists.add_objects(objects);
        listed.map_err(|source| self.write_failed("an object", source))?;
        for id in objects {
            if self.state().objects.contains_key(id) {
                continue;
            }
            let objects = &self.store.objects;
            let is_there = objects.check_algorithm(id).and_then(|()| Ok(objects.has(id)?));
            match is_there.map_err(|source| self.lookup_failed(id, source))? {
                true => self.state().objects.entry(*id).or_insert(ItemLocation::Store),
                false => return Ok(false),
            };
        }
        Ok(true)
    }

    /// Whether the store, or this import, has all of these objects in packed devices, which are then protected from
    /// `gc`.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn has_packed(&self, objects: &[ObjectId]) -> Result<bool, DraftError> {
        for id in objects {
            if self.reuse_packed(id)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the location of an object in a packed device that this import has finished or that the store has. The
    /// device is protected from `gc` until the import ends.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse_packed(&self, id: &ObjectId) -> Result<Option<StoredObject>, DraftError> {
        self.look_into_devices().map_err(|source| self.lookup_failed(id, source))?;
        let is_packed = |it: &StoredObject| it.kind == DeviceKind::Packed;
        let found = match self.made(id).filter(is_packed) {
            Some(found) => Some(found),
            None => {
                let found = self.store.devices.find_packed(id);
                found.map_err(|source| self.lookup_failed(id, source))?
            }
        };
        if let Some(found) = &found {
            self.rely_on(found);
        }
        Ok(found)
    }

    /// Returns the device that is a layer's tar, if the store has it. The device is protected from `gc` until the
    /// import ends.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn reuse_tar(&self, diff_id: &Digest) -> Result<Option<StoredDevice>, DraftError> {
        let found = self.look_into_devices().and_then(|()| self.store.devices.tar_of(diff_id));
        let found = found.map_err(|source| {
            self.fail();
            let object = format_args!("the tar of layer {diff_id} in the store");
            OperationError::of("look for", object)(ObjectLookupError::from(source))
        })?;
        if let Some(device) = &found {
            self.state().data.entry(device.id).or_insert(DeviceLocation::Store);
        }
        Ok(found)
    }

    /// Whether the store has a layer's tar with all of these objects. Objects that are not contiguous in the tar may
    /// be in packed devices. The devices are protected from `gc`.
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn has_tar(&self, diff_id: &Digest, objects: &[ObjectId]) -> Result<bool, DraftError> {
        let Some(device) = self.reuse_tar(diff_id)? else { return Ok(false) };
        for id in objects {
            let found = self.store.devices.find_in(id, [&device.id]);
            if found.map_err(|source| self.lookup_failed(id, source))?.is_none()
                && self.reuse_packed(id)?.is_none()
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns the first location of an object in a device of the store, which this import has protected from `gc`,
    /// for example with [`reuse_tar`](Self::reuse_tar).
    ///
    /// # Errors
    /// [`DraftError`] if the lookup fails.
    pub fn find_in_device(
        &self,
        id: &ObjectId,
        device: &DeviceId,
    ) -> Result<Option<StoredObject>, DraftError> {
        self.look_into_devices().map_err(|source| self.lookup_failed(id, source))?;
        let found = self.store.devices.find_in(id, [device]);
        found.map_err(|source| self.lookup_failed(id, source))
    }

    /// Opens an object of this import or of the store, in a file or a device. Its bytes are not verified.
    ///
    /// # Errors
    /// [`ObjectLookupError`] if the object is absent or not readable.
    pub fn read_object(&self, id: &ObjectId) -> Result<ObjectReader, ObjectLookupError> {
        match self.read_object_here(id) {
            Err(ObjectLookupError::NoObject(_)) => {
                // A running `gc` sets aside all items that no name needs, including those of this import.
                let lock = self.store.lock_shared()?;
                let back = self.bring_back(&self.state());
                drop(lock);
                self.store.devices.forget_indexes();
                if let Err(error) = back {
                    let error: &dyn std::error::Error = &error;
                    tracing::debug!(object = %id, error, "cannot restore data that a running gc set aside");
                }
                self.read_object_here(id)
            }
            read => read,
        }
    }

    fn read_object_here(&self, id: &ObjectId) -> Result<ObjectReader, ObjectLookupError> {
        let number = self.state().objects.get(id).and_then(|found| found.number());
        if let Some(number) = number {
            let file = self.read_back(number)?;
            let stat = rustix::fs::fstat(&file)
                .map_err(|errno| self.work.directory.failed("stat", number.to_string(), errno))?;
            return Ok(ObjectReader::whole(file, length(&stat)));
        }
        match self.made(id) {
            Some(stored) => self.stored_object(&stored),
            None => self.store.object(id),
        }
    }

    /// Removes the object files that this import has written. The caller must know that the store has the bytes of
    /// these objects elsewhere.
    pub fn forget_objects(&self) {
        let mut numbers = Vec::new();
        let mut state = self.state();
        state.objects.retain(|_, found| {
            numbers.extend(found.number());
            found.number().is_none()
        });
        drop(state);
        for number in numbers {
            self.discard(number);
        }
    }
}
