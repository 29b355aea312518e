//! Checks the lazy devices that images need.

use std::collections::BTreeSet;

use image::verity::{DeviceId, ImageId};

use super::{Damage, FsckError, FsckReport, Scope, Users};
use crate::check::check_error;
use crate::shelf::devices::DataFile;
use crate::shelf::images;
use crate::shelf::item::StoreItem;
use crate::shelf::lazy_device_file::LazyDeviceFile;
use crate::store::Store;

impl Store {
    /// Whether a device of the image has an index, so that the store may lack the image's layers.
    pub(crate) fn is_indexed(&self, image: &ImageId) -> Result<bool, FsckError> {
        let Ok(Some(file)) = check_error::found(self.images.open(image))? else { return Ok(false) };
        let Ok(devices) = check_error::found(images::devices(&file))? else { return Ok(false) };
        for device in devices.uses.iter().filter_map(|it| it.device) {
            if self.lazy_devices.has_index(&device)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Checks the devices of images that are only in `lazy/`, and reports the images that damage affects. Returns the
    /// ids of these devices.
    pub(super) fn check_lazy_devices_of_images(
        &self,
        users: &Users<'_>,
        scope: Scope,
        report: &mut FsckReport,
    ) -> Result<BTreeSet<DeviceId>, FsckError> {
        let mut checked: BTreeSet<DeviceId> =
            users.images.values().flat_map(|it| it.devices.keys().copied()).collect();
        for file in self.devices.list()?.names {
            if let DataFile::Device(id) = file {
                checked.remove(&id);
            }
        }
        checked.retain(|id| self.lazy_devices.file(id).is_some());
        for id in &checked {
            report.checked += 1;
            let stated = users.images.values().filter_map(|it| it.devices.get(id)).copied();
            let damage = match self.lazy_devices.lack(id, stated)? {
                Some(why) => Damage::Bad(StoreItem::LazyDevice(LazyDeviceFile::Device(*id)), why),
                // A caller that verifies images must know that some data cannot be verified.
                None if scope == Scope::Images && self.lazy_devices.is_partial(id)? => {
                    Damage::Lazy(*id)
                }
                None => continue,
            };
            report.damage.push((damage, users.harm_of_device(id)));
        }
        Ok(checked)
    }
}
