//! Who needs what of a store.

use std::collections::{BTreeMap, BTreeSet};

use image::verity::{DeviceId, ImageId, ObjectId};

use super::data::InDevices;
use super::{FsckReport, Harm};
use crate::shelf::images::DevicePart;
use crate::shelf::refs::{RefName, Reference};
use image::digest::Digest;

/// One image's view of its objects.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// With the sizes that the image says, in order, each pair once.
    pub(super) needs: BTreeSet<(ObjectId, u64)>,
    /// Of a native image, its devices with the length that it says.
    pub(super) devices: BTreeMap<DeviceId, u64>,
    /// What it has of them.
    pub(super) ranges: Vec<DevicePart>,
}

/// Who needs what.
#[derive(Debug)]
pub(super) struct Users<'a> {
    pub(super) refs: &'a BTreeMap<RefName, Reference>,
    pub(super) images: BTreeMap<ImageId, Contents>,
    pub(super) layers: BTreeMap<Digest, BTreeSet<ObjectId>>,
}

impl Users<'_> {
    /// What has to be a file: all that images need, and what layers need that no device has.
    pub(super) fn needed(&self, in_devices: &InDevices) -> BTreeSet<ObjectId> {
        let images = self.images.values().flat_map(|it| it.needs.iter().map(|it| it.0));
        let in_device =
            |id: &&ObjectId| in_devices.sound.contains(id) || in_devices.damaged.contains(id);
        let layers = self.layers.values().flatten().filter(|it| !in_device(it));
        images.chain(layers.copied()).collect()
    }

    /// Layers that have an object in a damaged state in a device, and nowhere else.
    pub(super) fn add_hurt_layers(
        &self,
        files: &[ObjectId],
        in_devices: &InDevices,
        report: &mut FsckReport,
    ) {
        let is_hurt = |id: &&ObjectId| {
            in_devices.damaged.contains(id)
                && !in_devices.sound.contains(id)
                && files.binary_search(id).is_err()
        };
        for (layer, objects) in &self.layers {
            let hurt: BTreeSet<_> = objects.iter().filter(is_hurt).copied().collect();
            if !hurt.is_empty() {
                report.hurt_layers.entry(*layer).or_default().extend(hurt);
            }
        }
    }

    /// All of the images that have a device as a device.
    pub(super) fn harm_of_device(&self, device: &DeviceId) -> Vec<Harm> {
        let images = self.images.iter().filter(|it| it.1.devices.contains_key(device));
        images
            .map(|(image, _)| Harm { image: *image, refs: self.names(image), paths: Vec::new() })
            .collect()
    }

    pub(super) fn names(&self, image: &ImageId) -> Vec<RefName> {
        let named = self.refs.iter().filter(|it| it.1.image == *image);
        named.map(|it| it.0.clone()).collect()
    }
}
