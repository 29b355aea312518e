//! Disk use of a store, with every byte counted once, and the share of each image.

use std::collections::{BTreeMap, BTreeSet};

use image::verity::{DeviceId, ImageId, ObjectId};

use crate::check::check_error::chain;
use crate::disk::{Directory, DiskError, on_disk};
use crate::inventory::Inventory;
use crate::shelf::images::{self, DevicePart, Use};
use crate::shelf::objects::split;
use crate::shelf::refs::RefName;
use crate::shelf::volumes::VolumeShelf;
use crate::shelf::volumes::error::VolumeError;
use crate::store::Store;

/// Allocation unit of file systems, in bytes.
const PAGE: u64 = 4096;

/// An error while disk use is counted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DuError {
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Bytes that an image shares with another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedWith {
    /// The other image.
    pub image: ImageId,
    /// Bytes on disk of everything that both use.
    pub bytes: u64,
}

/// Disk use of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageUse {
    pub image: ImageId,
    pub refs: Vec<RefName>,
    /// Bytes on disk of the image file, and of objects and parts of devices that no other image uses.
    pub own: u64,
    /// Bytes on disk of objects and parts of devices that other images use as well.
    pub shared: u64,
    /// The images that share bytes with this one, largest share first.
    pub shared_with: Vec<SharedWith>,
}

/// Disk use of a store. Every byte is in exactly one field, except that `unused_objects` is a part of `objects`,
/// `unfinished` of `blobs`, `unused_data` and `lazy_devices` of `data`, and `shared` of `objects` and `data`. `images`
/// divides `objects`, `data` and `image_files` among the images.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskUse {
    /// Bytes on disk of objects.
    pub objects: u64,
    /// Bytes on disk of devices, their indexes and lazy devices.
    pub data: u64,
    /// Part of `data`: bytes on disk of lazy devices, their states and indexes.
    pub lazy_devices: u64,
    /// Bytes on disk of image files.
    pub image_files: u64,
    /// Bytes on disk of layers.
    pub layers: u64,
    /// Bytes on disk of manifests.
    pub manifests: u64,
    /// Bytes on disk of whole and partial blobs, and of records about blobs and images.
    pub blobs: u64,
    /// Part of `blobs`: bytes on disk of data that unfinished pulls have downloaded.
    pub unfinished: u64,
    /// Bytes on disk of containers' directories.
    pub containers: u64,
    /// Bytes on disk of snapshots of containers.
    pub container_snapshots: u64,
    /// Bytes on disk of volumes.
    pub volumes: u64,
    /// Bytes on disk of container engines' snapshots: data written in their roots, and records.
    pub snapshots: u64,
    /// Bytes on disk of work directories of running or dead imports.
    pub tmp: u64,
    /// Part of `objects`: bytes on disk that no image uses; layers may use them.
    pub unused_objects: u64,
    /// Part of `data`: bytes on disk that no image uses; layers may use them. Indexes are not included.
    pub unused_data: u64,
    /// Part of `objects` and `data`: bytes on disk that several images use, counted once.
    pub shared: u64,
    /// Each image, sorted by id.
    pub images: Vec<ImageUse>,
    /// Messages about files that cannot be read. Damaged names belong to no image; damaged images share nothing.
    pub unreadable: Vec<String>,
}

impl Store {
    /// Counts the store's disk use. `gc` waits until it ends.
    ///
    /// # Errors
    /// [`DuError`] if a file or directory cannot be read.
    pub fn du(&self) -> Result<DiskUse, DuError> {
        let _lock = self.lock_shared()?;
        let (refs, bad) = self.refs.readable()?;
        let mut unreadable: Vec<_> = bad.iter().map(|it| chain(&it.error)).collect();
        let found = Inventory::from_store(self)?;
        let mut sizes = BTreeMap::new();
        let mut open: Option<(String, Directory)> = None;
        for id in &found.objects {
            let (shard, rest) = split(id);
            let directory = match open.take() {
                Some((name, directory)) if name == shard => directory,
                _ => self.objects.directory.open(&shard)?,
            };
            sizes.insert(*id, size(&directory, &rest)?);
            open = Some((shard, directory));
        }
        let mut users: BTreeMap<ObjectId, Vec<usize>> = BTreeMap::new();
        let mut parts = Parts::default();
        let mut files = Vec::new();
        for (at, image) in found.images.iter().enumerate() {
            files.push(size(&self.images.directory, &image.to_string())?);
            let file = match self.images.open(image) {
                Err(error) if error.is_not_a_file() => {
                    unreadable.push(chain(&error));
                    continue;
                }
                other => other?,
            };
            let Some(file) = file else { continue };
            let mut visit = |_: &[u8], it: Use| {
                let object = match it {
                    Use::Object { object, .. } => object,
                    Use::Range(range) => return parts.add(&range, at),
                };
                let users = users.entry(object).or_default();
                if users.last() != Some(&at) {
                    users.push(at);
                }
            };
            if let Err(error) = images::uses(&file, &mut visit) {
                unreadable.push(format!("image {image} is damaged: {}", chain(&error)));
            }
        }
        let sum = |directory: &Directory| -> Result<u64, DiskError> {
            let listed = directory.list()?;
            Ok(listed.iter().map(|it| directory.tree_bytes(&it.name)).sum())
        };
        let images = found.images.iter().map(|image| {
            let named = refs.iter().filter(|it| it.1.image == *image && !it.0.is_unnamed());
            (*image, named.map(|it| it.0.clone()).collect())
        });
        // Objects are grouped by the images that use them, because many objects have the same users: images with a
        // common base share all objects of that base.
        let mut groups: BTreeMap<Vec<usize>, u64> = BTreeMap::new();
        for (object, bytes) in &sizes {
            let users = users.get(object).map_or(&[][..], Vec::as_slice);
            *groups.entry(users.to_vec()).or_default() += bytes;
        }
        let unused_objects = groups.get(&[][..]).copied().unwrap_or_default();
        let mut devices = 0;
        for (device, bytes) in self.devices.sizes()?.into_iter().chain(self.lazy_devices.sizes()?) {
            devices += bytes;
            parts.divide(&device, bytes, &mut groups);
        }
        let late = |directory: Option<&Directory>| directory.map_or(Ok(0), sum);
        let lazy_devices = late(self.lazy_devices.directory.get()?)?;
        let data = lazy_devices + late(self.devices.directory.get()?)?;
        let used: u64 = groups.iter().filter(|it| !it.0.is_empty()).map(|it| it.1).sum();
        let objects: u64 = sizes.values().sum();
        let shared = groups.iter().filter(|it| it.0.len() > 1).map(|it| it.1).sum();
        let unused_data = (objects + devices).saturating_sub(used).saturating_sub(unused_objects);
        let images = share(images.collect(), &files, &groups);
        Ok(DiskUse {
            objects,
            data,
            lazy_devices,
            unused_data,
            shared,
            image_files: files.iter().sum(),
            layers: sum(&self.layers.directory)?,
            manifests: sum(&self.manifests.directory)?,
            blobs: sum(&self.downloads.directory)?,
            unfinished: self.downloads.unfinished()?,
            containers: sum(&self.containers.directory)?,
            container_snapshots: late(self.container_snapshots.directory.get()?)?,
            volumes: late(self.volumes.directory.get()?)?,
            snapshots: late(self.snapshots.directory.get()?)?,
            tmp: sum(&self.tmp)?,
            unused_objects,
            images,
            unreadable,
        })
    }
}

impl VolumeShelf {
    /// Returns the bytes on disk of a volume, zero if there is none.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn disk_bytes(&self, name: &str) -> Result<u64, VolumeError> {
        let shelf = self.directory.get()?;
        Ok(shelf.map_or(0, |shelf| shelf.tree_bytes(name.as_bytes())))
    }
}

fn size(directory: &Directory, name: &str) -> Result<u64, DiskError> {
    Ok(directory.stat(name)?.map_or(0, |stat| on_disk(&stat)))
}

/// Ranges of devices that images use: begin, end and number of the image.
#[derive(Debug, Default)]
struct Parts {
    devices: BTreeMap<DeviceId, Vec<(u64, u64, usize)>>,
}

impl Parts {
    fn add(&mut self, range: &DevicePart, image: usize) {
        // File systems allocate whole blocks.
        let (from, until) = (range.offset, range.offset.saturating_add(range.len));
        let ranges = self.devices.entry(range.device).or_default();
        ranges.push((from / PAGE * PAGE, until.next_multiple_of(PAGE), image));
    }

    /// Divides the `bytes` that a device takes on disk among the images that use it.
    fn divide(&mut self, device: &DeviceId, bytes: u64, groups: &mut BTreeMap<Vec<usize>, u64>) {
        let ranges = self.devices.remove(device).unwrap_or_default();
        let mut edges: BTreeMap<u64, Vec<(bool, usize)>> = BTreeMap::new();
        let all: BTreeSet<usize> = ranges.iter().map(|it| it.2).collect();
        for (from, until, image) in ranges {
            edges.entry(from).or_default().push((true, image));
            edges.entry(until).or_default().push((false, image));
        }
        let mut left = bytes;
        let mut users: BTreeMap<usize, usize> = BTreeMap::new();
        let mut at = 0;
        for (edge, changes) in edges {
            // Only the part of a used range that is no hole takes disk space.
            let taken = (edge - at).min(left);
            if !users.is_empty() {
                *groups.entry(users.keys().copied().collect()).or_default() += taken;
                left -= taken;
            }
            at = edge;
            for (begins, image) in changes {
                let count = users.entry(image).or_default();
                *count = if begins { *count + 1 } else { count.saturating_sub(1) };
                if *count == 0 {
                    users.remove(&image);
                }
            }
        }
        // The last block identifies the device, so all of its users share it.
        if !all.is_empty() {
            *groups.entry(all.into_iter().collect()).or_default() += left.min(PAGE);
        }
    }
}

/// Divides bytes among images by their users.
fn share(
    images: Vec<(ImageId, Vec<RefName>)>,
    files: &[u64],
    groups: &BTreeMap<Vec<usize>, u64>,
) -> Vec<ImageUse> {
    let mut shared: Vec<BTreeMap<usize, u64>> = vec![BTreeMap::new(); images.len()];
    let mut total = vec![0_u64; images.len()];
    let mut own = files.to_vec();
    for (users, bytes) in groups {
        match *users.as_slice() {
            [] => {}
            [one] => own[one] += bytes,
            _ => {
                for one in users {
                    total[*one] += bytes;
                    for other in users.iter().filter(|other| *other != one) {
                        *shared[*one].entry(*other).or_default() += bytes;
                    }
                }
            }
        }
    }
    let ids: Vec<ImageId> = images.iter().map(|it| it.0).collect();
    let uses = images.into_iter().enumerate().map(|(at, (image, refs))| {
        let others = shared[at].iter();
        let mut shared_with: Vec<_> =
            others.map(|(other, bytes)| SharedWith { image: ids[*other], bytes: *bytes }).collect();
        shared_with.sort_by_key(|it| std::cmp::Reverse(it.bytes));
        ImageUse { image, refs, own: own[at], shared: total[at], shared_with }
    });
    uses.collect()
}
