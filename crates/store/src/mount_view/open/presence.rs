//! Finds out whether the devices of an image are in the store.

use std::ops::Range;

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};

use super::{OpenImageError, Presence, table_failed};
use crate::disk::DiskError;
use crate::shelf::images::{self, ImageFile, Use};
use crate::store::Store;

impl Store {
    /// Whether the store has all bytes of an image's devices, or has lazy devices that are filled on demand. A
    /// missing device is damage, which [`open_image`](Self::open_image) reports.
    ///
    /// # Errors
    /// As [`lazy_devices`](Self::lazy_devices).
    pub fn presence(&self, image: &ImageId) -> Result<Presence, OpenImageError> {
        self.presence_of(image, None)
    }

    /// As [`presence`](Self::presence), for an image that is used for one of its manifests.
    ///
    /// # Errors
    /// As [`lazy_devices`](Self::lazy_devices).
    pub fn presence_of(
        &self,
        image: &ImageId,
        manifest: Option<&Digest>,
    ) -> Result<Presence, OpenImageError> {
        match self.lazy_devices(image)?.is_empty() {
            true => Ok(self.presence_of_complete(image, manifest)?),
            false => Ok(Presence::Partial),
        }
    }

    /// Presence of an image that has all of its devices.
    pub(super) fn presence_of_complete(
        &self,
        image: &ImageId,
        manifest: Option<&Digest>,
    ) -> Result<Presence, DiskError> {
        Ok(match self.downloads.is_unproven_for(image, manifest)? {
            true => Presence::Unproven,
            false => Presence::Complete,
        })
    }

    /// Returns the devices of an image that the store has only as lazy devices, in the order of the device table.
    ///
    /// # Errors
    /// [`OpenImageError`] if the image is absent, or its device table cannot be read.
    pub fn lazy_devices(&self, image: &ImageId) -> Result<Vec<DeviceId>, OpenImageError> {
        let _lock = self.lock_shared()?;
        let mut devices = self.devices_in_table(image)?;
        devices
            .retain(|id| self.devices.file(id).is_none() && self.lazy_devices.file(id).is_some());
        Ok(devices)
    }

    /// Returns all devices of an image, in the order of the device table.
    ///
    /// # Errors
    /// [`OpenImageError`] if the image is absent, or its device table cannot be read.
    pub fn devices_of(&self, image: &ImageId) -> Result<Vec<DeviceId>, OpenImageError> {
        let _lock = self.lock_shared()?;
        self.devices_in_table(image)
    }

    fn devices_in_table(&self, image: &ImageId) -> Result<Vec<DeviceId>, OpenImageError> {
        let file = self.images.open(image)?.ok_or(OpenImageError::Absent(*image))?;
        let table = images::devices(&file).map_err(table_failed(image))?;
        Ok(table.uses.iter().filter_map(|it| it.device).collect())
    }

    /// Opens the file of an image, to find out where its files are. Its devices are not opened.
    ///
    /// # Errors
    /// [`OpenImageError`] if the image is absent or cannot be opened.
    pub fn image_file(&self, image: &ImageId) -> Result<ImageFile, OpenImageError> {
        let _lock = self.lock_shared()?;
        self.images.open(image)?.ok_or(OpenImageError::Absent(*image))
    }

    /// Returns the byte ranges of one of an image's devices that contain data of its files, in ascending order.
    ///
    /// # Errors
    /// [`OpenImageError`] if the image is absent or cannot be read.
    pub fn file_places(
        &self,
        image: &ImageId,
        device: &DeviceId,
    ) -> Result<Vec<Range<u64>>, OpenImageError> {
        let file = self.image_file(image)?;
        let mut places = Vec::new();
        let read = images::uses(&file, &mut |_, used| {
            if let Use::Range(part) = used
                && part.device == *device
            {
                places.push(part.offset..part.offset.saturating_add(part.len));
            }
        });
        read.map_err(table_failed(image))?;
        places.sort_unstable_by_key(|it| (it.start, it.end));
        places.dedup();
        Ok(places)
    }
}
