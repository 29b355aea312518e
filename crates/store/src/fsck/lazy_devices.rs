//! Lazy devices that images need.

use std::collections::BTreeSet;

use image::verity::{DeviceId, ImageId};

use super::{Damage, FsckError, FsckReport, Scope, Users};
use crate::check_error;
use crate::shelf::devices::DataFile;
use crate::shelf::images;
use crate::shelf::item::StoreItem;
use crate::shelf::lazy_device_file::LazyDeviceFile;
use crate::store::Store;

impl Store {
    /// Whether an image may have come without its layers: a device of it has an index.
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

    /// Checks the devices that images need and that are in `lazy/` alone, and says whom damage hurts. Returns which
    /// these are.
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
                // Who wants an image verified is told that some of it cannot be.
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
