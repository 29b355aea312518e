//! The objects and devices that images and layers of a store need.

use std::collections::{BTreeMap, BTreeSet};

use image::verity::{DeviceId, ImageId, ObjectId};

use super::data::InDevices;
use super::{FsckReport, Harm};
use crate::shelf::images::DevicePart;
use crate::shelf::refs::{RefName, Reference};
use image::digest::Digest;

/// The objects and devices that one image needs.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// Objects with the sizes that the image states, in order, each pair once.
    pub(super) needs: BTreeSet<(ObjectId, u64)>,
    /// Devices of a native image, with the lengths that the image states, in bytes.
    pub(super) devices: BTreeMap<DeviceId, u64>,
    /// Parts of these devices that the image uses.
    pub(super) ranges: Vec<DevicePart>,
}

/// The items of a store that need objects and devices.
#[derive(Debug)]
pub(super) struct Users<'a> {
    pub(super) refs: &'a BTreeMap<RefName, Reference>,
    pub(super) images: BTreeMap<ImageId, Contents>,
    pub(super) layers: BTreeMap<Digest, BTreeSet<ObjectId>>,
}

impl Users<'_> {
    /// Returns the objects that must be files: those that images need, and those that layers need and no device has.
    pub(super) fn needed(&self, in_devices: &InDevices) -> BTreeSet<ObjectId> {
        let images = self.images.values().flat_map(|it| it.needs.iter().map(|it| it.0));
        let in_device =
            |id: &&ObjectId| in_devices.sound.contains(id) || in_devices.damaged.contains(id);
        let layers = self.layers.values().flatten().filter(|it| !in_device(it));
        images.chain(layers.copied()).collect()
    }

    /// Reports layers with an object that is damaged in a device, and sound nowhere.
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

    /// Returns harm to all images that use a device.
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
