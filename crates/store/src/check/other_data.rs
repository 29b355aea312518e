//! Finds devices that also hold data of other images. A mounted image shows only its own files, but a reader of whole
//! devices, such as a virtual machine, sees all data in them.

use std::collections::{BTreeMap, HashSet};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};

use crate::mount_view::open::{OpenImageError, table_failed};
use crate::shelf::devices::{DeviceKind, Entry, Index, key};
use crate::shelf::images::{self, Use};
use crate::store::Store;

impl Store {
    /// Returns the devices of an image that also hold data of other images. The image's own data is that of its files,
    /// and all data of these layers, of which layers above may hide a part. A device without an index counts as one
    /// with other data.
    ///
    /// # Errors
    /// [`OpenImageError`] if the image is absent, or if it or an index cannot be read.
    pub fn devices_with_other_data(
        &self,
        image: &ImageId,
        layers: &[Digest],
    ) -> Result<Vec<DeviceId>, OpenImageError> {
        let _lock = self.lock_shared()?;
        let file = self.images.open(image)?.ok_or(OpenImageError::Absent(*image))?;
        let indexes = self.devices.indexes()?;
        let mut objects = HashSet::new();
        for layer in layers {
            // The data of a layer that cannot be read does not count as the image's own.
            if let Ok(Some(layer)) = self.layers.open(layer) {
                objects.extend(layer.info().objects.iter().filter_map(key));
            }
        }
        for record in indexes.values().flat_map(|it| &it.records) {
            if objects.contains(&record.id) {
                objects.extend(record.pieces.iter().filter_map(|it| it.id));
            }
        }
        let mut parts: BTreeMap<DeviceId, Vec<(u64, u64)>> = BTreeMap::new();
        let mut add = |_: &[u8], used| {
            if let Use::Range(part) = used {
                let end = part.offset.saturating_add(part.len);
                parts.entry(part.device).or_default().push((part.offset, end));
            }
        };
        images::uses(&file, &mut add).map_err(table_failed(image))?;
        for parts in parts.values_mut() {
            merge(parts);
        }
        let table = images::devices(&file).map_err(table_failed(image))?;
        let devices = table.uses.into_iter().filter_map(|it| it.device);
        let has_other = |device: &DeviceId| {
            let Some(index) = indexes.get(device) else { return true };
            let parts = parts.get(device).map_or(&[][..], Vec::as_slice);
            has_other_data(index, layers, &objects, parts)
        };
        Ok(devices.filter(has_other).collect())
    }
}

/// Whether a device has data outside of these layers, objects and parts.
fn has_other_data(
    index: &Index,
    layers: &[Digest],
    objects: &HashSet<[u8; 32]>,
    parts: &[(u64, u64)],
) -> bool {
    match index.header.kind {
        // The tar also has the names of all files.
        DeviceKind::Tar => !index.header.layer.is_some_and(|it| layers.contains(&it)),
        DeviceKind::Packed => index.entries.iter().any(|entry| {
            entry.size > 0 && !objects.contains(&entry.id) && !is_within(entry, parts)
        }),
    }
}

/// Sorts ranges, and joins those that overlap or touch.
fn merge(parts: &mut Vec<(u64, u64)>) {
    parts.sort_unstable();
    parts.dedup_by(|next, before| {
        let joins = next.0 <= before.1;
        if joins {
            before.1 = before.1.max(next.1);
        }
        joins
    });
}

fn is_within(entry: &Entry, parts: &[(u64, u64)]) -> bool {
    let after = parts.partition_point(|it| it.0 <= entry.offset);
    parts[..after].last().is_some_and(|it| entry.until() <= it.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined() {
        let mut parts = vec![(8, 12), (0, 4), (4, 6), (1, 2), (20, 30), (25, 26)];
        merge(&mut parts);
        assert_eq!(parts, [(0, 6), (8, 12), (20, 30)]);
        let within = |offset, size| {
            let entry = Entry { id: [0; 32], offset, size, sha256: [0; 32] };
            is_within(&entry, &parts)
        };
        for (offset, size) in [(0, 6), (2, 4), (8, 1), (20, 10), (29, 1)] {
            assert!(within(offset, size), "{offset} {size}");
        }
        for (offset, size) in [(0, 7), (6, 1), (5, 4), (12, 1), (19, 2), (30, 1), (0, u64::MAX)] {
            assert!(!within(offset, size), "{offset} {size}");
        }
    }
}
