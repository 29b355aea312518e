//! Whether the devices of an image are here.

use image::verity::{DeviceId, ImageId};

use super::{OpenImageError, Presence};
use crate::shelf::images;
use crate::store::Store;

impl Store {
    /// Whether the store has all bytes of an image's devices, or only such as are filled on demand. A missing device is
    /// damage, which [`open_image`](Self::open_image) tells.
    ///
    /// # Errors
    /// As [`sparse_devices`](Self::sparse_devices).
    pub fn presence(&self, image: &ImageId) -> Result<Presence, OpenImageError> {
        Ok(match self.sparse_devices(image)?.is_empty() {
            true => Presence::Complete,
            false => Presence::Partial,
        })
    }

    /// The devices of an image that the store has only as sparse ones, in the order of the image's devices.
    ///
    /// # Errors
    /// [`OpenImageError`] when the image is absent, or its device table cannot be read.
    pub fn sparse_devices(&self, image: &ImageId) -> Result<Vec<DeviceId>, OpenImageError> {
        let _lock = self.lock_shared()?;
        let file = self.images.open(image)?.ok_or(OpenImageError::Absent(*image))?;
        let table = images::devices(&file);
        let table = table.map_err(|source| OpenImageError::Devices { image: *image, source })?;
        let used = table.uses.iter().filter_map(|it| it.device);
        let is_sparse =
            |id: &DeviceId| self.devices.file(id).is_none() && self.sparse.file(id).is_some();
        Ok(used.filter(is_sparse).collect())
    }
}
