//! Who needs what of a store.

use std::collections::{BTreeMap, BTreeSet};

use image::verity::{DeviceId, ImageId, ObjectId};

use super::data::InBlobs;
use super::{FsckReport, Harm};
use crate::shelf::images::BlobRange;
use crate::shelf::refs::{RefName, Reference};
use image::digest::Digest;

/// One image's view of its objects.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// With the sizes that the image says, in order, each pair once.
    pub(super) needs: BTreeSet<(ObjectId, u64)>,
    /// Of a native image, its data blobs with the length that it says.
    pub(super) devices: BTreeMap<DeviceId, u64>,
    /// What it has of them.
    pub(super) ranges: Vec<BlobRange>,
}

/// Who needs what.
#[derive(Debug)]
pub(super) struct Users<'a> {
    pub(super) refs: &'a BTreeMap<RefName, Reference>,
    pub(super) images: BTreeMap<ImageId, Contents>,
    pub(super) layers: BTreeMap<Digest, BTreeSet<ObjectId>>,
}

impl Users<'_> {
    /// What has to be a file: all that images need, and what layers need that no data blob has.
    pub(super) fn needed(&self, in_blobs: &InBlobs) -> BTreeSet<ObjectId> {
        let images = self.images.values().flat_map(|it| it.needs.iter().map(|it| it.0));
        let in_blob = |id: &&ObjectId| in_blobs.sound.contains(id) || in_blobs.damaged.contains(id);
        let layers = self.layers.values().flatten().filter(|it| !in_blob(it));
        images.chain(layers.copied()).collect()
    }

    /// Layers that have an object in a damaged state in a data blob, and nowhere else.
    pub(super) fn add_hurt_layers(
        &self,
        files: &[ObjectId],
        in_blobs: &InBlobs,
        report: &mut FsckReport,
    ) {
        let is_hurt = |id: &&ObjectId| {
            in_blobs.damaged.contains(id)
                && !in_blobs.sound.contains(id)
                && files.binary_search(id).is_err()
        };
        for (layer, objects) in &self.layers {
            let hurt: BTreeSet<_> = objects.iter().filter(is_hurt).copied().collect();
            if !hurt.is_empty() {
                report.hurt_layers.entry(*layer).or_default().extend(hurt);
            }
        }
    }

    /// All of the images that have a blob as a device.
    pub(super) fn harm_of_blob(&self, blob: &DeviceId) -> Vec<Harm> {
        let images = self.images.iter().filter(|it| it.1.devices.contains_key(blob));
        images
            .map(|(image, _)| Harm { image: *image, refs: self.names(image), paths: Vec::new() })
            .collect()
    }

    pub(super) fn names(&self, image: &ImageId) -> Vec<RefName> {
        let named = self.refs.iter().filter(|it| it.1.image == *image);
        named.map(|it| it.0.clone()).collect()
    }
}
