//! Finds devices that also hold data of other images. A mounted image shows only its own files, but a reader of whole
//! devices, such as a virtual machine, sees all data in them.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};

use crate::mount_view::open::{OpenImageError, table_failed};
use crate::operation::OperationError;
use crate::shelf::devices::{DATA_BLOCK, DeviceKind, Entry, Index, key};
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
        // The same objects may also be in other devices.
        for (device, parts) in &parts {
            let entries = indexes.get(device).into_iter().flat_map(|it| &it.entries);
            objects.extend(entries.filter(|it| is_within(it, parts)).map(|it| it.id));
        }
        let table = images::devices(&file).map_err(table_failed(image))?;
        let mut found = Vec::new();
        for device in table.uses.into_iter().filter_map(|it| it.device) {
            let has_other = match (indexes.get(&device), self.devices.bytes_of(&device)) {
                (Some(index), Some(file)) => {
                    let object = format!("device {device}");
                    let failed = OperationError::of("read", &object);
                    let parts = parts.get(&device).map_or(&[][..], Vec::as_slice);
                    has_other_data(index, layers, &objects)
                        || has_rest(&file, index, parts).map_err(failed)?
                }
                _ => true,
            };
            if has_other {
                found.push(device);
            }
        }
        Ok(found)
    }
}

/// Whether a device has data outside of these layers and objects.
fn has_other_data(index: &Index, layers: &[Digest], objects: &HashSet<[u8; 32]>) -> bool {
    match index.header.kind {
        // The tar also has the names of all files.
        DeviceKind::Tar => !index.header.layer.is_some_and(|it| layers.contains(&it)),
        DeviceKind::Packed => {
            index.entries.iter().any(|entry| entry.size > 0 && !objects.contains(&entry.id))
        }
    }
}

/// Whether bytes of dropped objects are left in a packed device. `gc` frees only whole pages of them, and an interrupted
/// `gc` or a repair frees none. Otherwise, bytes that belong to no object are zeros.
fn has_rest(file: &File, index: &Index, parts: &[(u64, u64)]) -> io::Result<bool> {
    if index.header.kind == DeviceKind::Tar || index.header.dropped == 0 {
        return Ok(false);
    }
    let entries = index.entries.iter().filter(|it| it.size > 0);
    let mut used: Vec<_> = entries.map(|it| (it.offset, it.until())).collect();
    used.extend_from_slice(parts);
    merge(&mut used);
    // The last block identifies the device.
    let end = index.header.bytes.saturating_sub(DATA_BLOCK);
    let (mut at, mut buffer) = (0_u64, vec![0; 1 << 16]);
    for (from, until) in used.into_iter().chain([(end, end)]) {
        while at < from.min(end) {
            let gap = usize::try_from(from.min(end) - at).unwrap_or(usize::MAX);
            let read = &mut buffer[..gap.min(1 << 16)];
            file.read_exact_at(read, at)?;
            if read.iter().any(|it| *it != 0) {
                return Ok(true);
            }
            at += read.len() as u64;
        }
        at = at.max(until);
    }
    Ok(false)
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
