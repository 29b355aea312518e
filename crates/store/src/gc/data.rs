//! Finds the needed parts of devices, and frees the rest.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::fd::AsFd as _;
use std::sync::Arc;

use image::verity::{DeviceId, ObjectId};
use kernel::verity::measure;

use super::GcError;
use crate::disk::{DiskError, ToPunch};
use crate::inventory::Inventory;
use crate::shelf::devices::{self, DATA_BLOCK, Entry, Index, Ranges, Record};
use crate::shelf::images::{self, DevicePart, ImageFile};
use crate::staging::Replacement;
use crate::store::Store;

/// Unit in which file systems free space, in bytes: a page.
const PAGE: u64 = 4096;

/// Unneeded bytes of a device that is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dead {
    pub device: DeviceId,
    /// Number of unneeded bytes on disk.
    pub bytes: u64,
    /// Whether `gc` can free the unneeded bytes.
    pub freeing: Freeing,
}

/// Whether and when `gc` can free bytes of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Freeing {
    Now,
    /// When the device is no longer mounted or open.
    InUse,
    /// When the running imports, which may rely on the bytes, have ended.
    Imports,
    /// When the other hard links of the device, such as those of a bundle for virtual machines, are removed.
    Linked,
    /// When the disk has space for a smaller index of the device.
    NoSpace,
    /// Only together with the device, because fs-verity seals it.
    Sealed,
    /// Only together with the device, because the file system cannot punch holes.
    Unsupported,
}

/// The needed parts of all devices.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NeededData {
    /// Every device that is kept.
    pub(super) devices: BTreeMap<DeviceId, NeededParts>,
}

/// The needed parts of one device.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NeededParts {
    /// Ranges that images use, as begin and end in bytes, in any order.
    pub(super) ranges: Vec<(u64, u64)>,
    /// Objects that layers and other forms of images use.
    pub(super) objects: HashSet<[u8; 32]>,
}

/// The indexes of devices.
#[derive(Debug, Default)]
pub(super) struct Indexes {
    /// Sorted by device id.
    devices: Vec<(DeviceId, Arc<Index>)>,
    /// For each object, whole or in pieces, the first bytes of its id and the number of a device that may have it,
    /// sorted. Lookups then read only a few of many devices.
    holders: Vec<(u64, u32)>,
}

impl FromIterator<(DeviceId, Arc<Index>)> for Indexes {
    fn from_iter<I: IntoIterator<Item = (DeviceId, Arc<Index>)>>(indexes: I) -> Self {
        let mut devices: Vec<_> = indexes.into_iter().collect();
        devices.sort_unstable_by_key(|(device, _)| *device);
        let mut holders = Vec::new();
        for ((_, index), number) in devices.iter().zip(0..) {
            let ids = index.entries.iter().map(|it| &it.id);
            let ids = ids.chain(index.records.iter().map(|it| &it.id));
            holders.extend(ids.map(|id| (first_bytes(id), number)));
        }
        holders.sort_unstable();
        holders.dedup();
        Self { devices, holders }
    }
}

fn first_bytes(id: &[u8; 32]) -> u64 {
    u64::from_be_bytes(*id.first_chunk().expect("32 bytes are more than 8"))
}

impl Indexes {
    fn get(&self, device: &DeviceId) -> Option<&Arc<Index>> {
        let at = self.devices.binary_search_by_key(&device, |(device, _)| device).ok()?;
        Some(&self.devices[at].1)
    }

    /// Whether a device is in the store and has a readable index.
    pub(super) fn has(&self, device: &DeviceId) -> bool {
        self.get(device).is_some()
    }

    /// Returns the devices that may have an object, in order of their ids.
    fn holding(&self, id: &[u8; 32]) -> impl Iterator<Item = (&DeviceId, &Arc<Index>)> + use<'_> {
        let wanted = first_bytes(id);
        let first = self.holders.partition_point(|(id, _)| *id < wanted);
        let holders = self.holders[first..].iter().take_while(move |(id, _)| *id == wanted);
        holders.map(|(_, number)| {
            let (device, index) = &self.devices[*number as usize];
            (device, index)
        })
    }
}

impl NeededData {
    /// Keeps a device of an image. [`range`](Self::range) adds the parts of it that the image uses.
    pub(super) fn device(&mut self, device: DeviceId) {
        self.devices.entry(device).or_default();
    }

    pub(super) fn range(&mut self, range: &DevicePart) {
        let parts = self.devices.entry(range.device).or_default();
        parts.ranges.push((range.offset, range.offset.saturating_add(range.len)));
    }

    /// Chooses a device for each object that may be in any device. Returns the objects that are needed as files:
    /// those that are files already, and those in no device.
    pub(super) fn place(
        &mut self,
        wanted: &BTreeSet<ObjectId>,
        files: &[ObjectId],
        needed_files: &BTreeSet<ObjectId>,
        indexes: &Indexes,
    ) -> Vec<ObjectId> {
        let mut elsewhere = Vec::new();
        for object in wanted {
            // A composefs image needs the object as a file.
            if needed_files.contains(object) && files.binary_search(object).is_ok() {
                continue;
            }
            if !self.in_kept(object, indexes) {
                elsewhere.push(*object);
            }
        }
        let mut as_files = Vec::new();
        for object in elsewhere {
            // The device that was chosen for an earlier object may also contain this object.
            let is_file = files.binary_search(&object).is_ok();
            if is_file || !(self.in_kept(&object, indexes) || self.in_any(&object, indexes)) {
                as_files.push(object);
            }
        }
        as_files
    }

    /// Whether a device that is kept anyway contains the object or lists its pieces. If so, the object is kept in that
    /// device.
    fn in_kept(&mut self, object: &ObjectId, indexes: &Indexes) -> bool {
        let Some(key) = key(object) else { return false };
        let mut recorded = Vec::new();
        for (device, index) in indexes.holding(&key) {
            let Some(parts) = self.devices.get_mut(device) else { continue };
            if !index.places(&key).is_empty() {
                parts.objects.insert(key);
                return true;
            }
            recorded.extend(index.record(&key).map(|record| (*device, index, record)));
        }
        recorded
            .into_iter()
            .any(|(device, index, it)| self.place_pieces(device, index, it, indexes))
    }

    /// As [`in_kept`](Self::in_kept), for any device, which is then kept for the object.
    fn in_any(&mut self, object: &ObjectId, indexes: &Indexes) -> bool {
        let Some(key) = key(object) else { return false };
        let has = |it: &(&DeviceId, &Arc<Index>)| !it.1.places(&key).is_empty();
        if let Some((device, _)) = indexes.holding(&key).find(has) {
            self.devices.entry(*device).or_default().objects.insert(key);
            return true;
        }
        indexes.holding(&key).any(|(device, index)| {
            let record = index.record(&key);
            record.is_some_and(|it| self.place_pieces(*device, index, it, indexes))
        })
    }

    /// Chooses a device for every piece of an object, and keeps the pieces in these devices. Returns `false` if a
    /// piece is in no device.
    fn place_pieces(
        &mut self,
        device: DeviceId,
        own: &Index,
        record: &Record,
        indexes: &Indexes,
    ) -> bool {
        let mut places = Vec::with_capacity(record.pieces.len());
        for piece in &record.pieces {
            let Some(id) = piece.id else { continue };
            let has = |index: &Index| index.piece(&id, piece.len).is_some();
            let holding =
                || indexes.holding(&id).filter(|(_, it)| has(it)).map(|(device, _)| device);
            let kept = || holding().find(|it| self.devices.contains_key(it));
            let place = if has(own) { Some(&device) } else { kept().or_else(|| holding().next()) };
            let Some(place) = place else { return false };
            places.push((*place, id));
        }
        self.device(device);
        for (place, id) in places {
            self.devices.entry(place).or_default().objects.insert(id);
        }
        true
    }
}

fn key(object: &ObjectId) -> Option<[u8; 32]> {
    object.as_bytes().try_into().ok()
}

/// The parts of a device to keep and to free.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    /// Entries that are kept, in order.
    kept: Vec<Entry>,
    /// Objects in pieces that are kept.
    records: Vec<Record>,
    /// Unneeded ranges of whole pages, as begin and end in bytes, in order.
    free: Vec<(u64, u64)>,
}

/// Returns the objects of a device that are needed.
fn live(index: &Index, needed: &NeededParts) -> Vec<Entry> {
    let ranges = Ranges::new(needed.ranges.clone());
    let is_live = |entry: &&Entry| {
        needed.objects.contains(&entry.id)
            || entry.size > 0 && ranges.meet(entry.offset, entry.until())
    };
    index.entries.iter().filter(is_live).copied().collect()
}

impl Cut {
    /// Returns `None` if all objects of the device are needed; the space between objects does not count. Objects in
    /// pieces are kept if all of their pieces are in `pieces`, the needed objects of all devices.
    fn from_index(
        index: &Index,
        needed: &NeededParts,
        kept: Vec<Entry>,
        pieces: &HashSet<[u8; 32]>,
    ) -> Option<Self> {
        if kept.len() == index.entries.len() && index.header.dropped == 0 {
            return None;
        }
        let records = index.records.iter().filter(|it| it.parts().all(|it| pieces.contains(&it)));
        let records = records.cloned().collect();
        let ranges = Ranges::new(needed.ranges.clone());
        let mut live = ranges.into_sorted();
        live.extend(kept.iter().filter(|it| it.size > 0).map(|it| (it.offset, it.until())));
        live.sort_unstable();
        let mut free = Vec::new();
        let mut at: u64 = 0;
        // The last block identifies the device.
        let imprint = index.header.bytes.saturating_sub(DATA_BLOCK);
        for (from, until) in live.into_iter().chain([(imprint, u64::MAX)]) {
            let (start, end) = (at.next_multiple_of(PAGE), from / PAGE * PAGE);
            if start < end {
                free.push((start, end));
            }
            at = at.max(until.min(index.header.bytes));
        }
        Some(Self { kept, records, free })
    }
}

/// A device with parts to free.
#[derive(Debug)]
pub(super) struct Trimming {
    pub(super) dead: Dead,
    index: Arc<Index>,
    cut: Cut,
}

impl Trimming {
    /// Whether the plan was made with this index. Another `gc` may have removed objects from the index since then.
    pub(super) fn is_by(&self, index: &Index) -> bool {
        let shape =
            |it: &Index| (it.header.dropped, it.header.bytes, it.entries.len(), it.records.len());
        shape(index) == shape(&self.index)
    }
}

impl Store {
    /// Returns every index, or the error because of which `gc` cannot decide.
    pub(super) fn readable_indexes(&self, found: &Inventory) -> Result<Indexes, GcError> {
        let there = |id: &&DeviceId| found.devices.binary_search(id).is_ok();
        if found.device_indexes.is_empty() {
            return Ok(Indexes::default());
        }
        let indexes = self.devices.indexes()?;
        for id in found.device_indexes.iter().filter(there) {
            if !indexes.contains_key(id)
                && let Some(source) = self.devices.index_damage(id)?
            {
                return Err(GcError::unreadable(format!("the index of device {id}"))(source));
            }
        }
        Ok(indexes.into_iter().collect())
    }

    /// Adds the devices that an image needs to `needed`, and the objects inside the image to `inside`.
    pub(super) fn needed_of_native(
        file: &ImageFile,
        needed: &mut NeededData,
        inside: &mut BTreeSet<ObjectId>,
    ) -> Result<(), images::ContentsError> {
        for device in images::devices(file)?.uses {
            // A slot without a device id refers to no device in this store.
            if let Some(device) = device.device {
                needed.device(device);
            }
        }
        inside.extend(images::inside(file)?);
        Ok(())
    }

    /// Returns the parts of kept devices that can be freed.
    pub(super) fn trimmings(
        &self,
        needed: &NeededData,
        indexes: &Indexes,
        importing: bool,
    ) -> Result<Vec<Trimming>, DiskError> {
        let mut found = Vec::new();
        let mut can_punch = None;
        let mut kept = Vec::new();
        let mut pieces = HashSet::new();
        for (device, parts) in &needed.devices {
            let Some(index) = indexes.get(device) else { continue };
            let live = live(index, parts);
            pieces.extend(live.iter().map(|it| it.id));
            kept.push((device, parts, index, live));
        }
        for (device, parts, index, live) in kept {
            let Some(cut) = Cut::from_index(index, parts, live, &pieces) else { continue };
            let name = devices::device_name(device);
            let data = self.devices.directory.existing()?;
            let Some((file, _)) = data.read(&name)? else { continue };
            let bytes = allocated(&file, &cut.free);
            let bytes = bytes.map_err(|source| data.failed("read", &name, source))?;
            if bytes == 0 {
                continue;
            }
            let sealed = matches!(measure(file.as_fd()), Ok(Some(_)));
            drop(file);
            let freeing = if sealed {
                Freeing::Sealed
            } else if !*can_punch.get_or_insert_with(|| self.tmp.can_punch()) {
                Freeing::Unsupported
            } else if importing {
                Freeing::Imports
            } else {
                self.user_of(device)?.unwrap_or(Freeing::Now)
            };
            let (dead, index) = (Dead { device: *device, bytes, freeing }, Arc::clone(index));
            found.push(Trimming { dead, index, cut });
        }
        Ok(found)
    }

    /// Returns why the bytes of a device must stay, although no image of the store needs them.
    pub(super) fn user_of(&self, device: &DeviceId) -> Result<Option<Freeing>, DiskError> {
        // A process keeps a device open while it links it, so the links are counted after this check.
        if self.devices.is_in_use(device)? {
            return Ok(Some(Freeing::InUse));
        }
        Ok(self.devices.has_other_links(device)?.then_some(Freeing::Linked))
    }

    /// Writes the index that a device gets when it is trimmed, durably. Returns `None` if the index need not change.
    /// No lock is needed.
    pub(super) fn index_after(
        &self,
        trimming: &Trimming,
    ) -> Result<Option<Replacement>, DiskError> {
        let Trimming { dead, index, cut } = trimming;
        if (cut.kept.len(), cut.records.len()) == (index.entries.len(), index.records.len()) {
            return Ok(None);
        }
        self.devices.index_without(&dead.device, index, &cut.kept, &cut.records).map(Some)
    }

    /// Removes objects from the index of a device, and opens the device to free their bytes. The caller holds the
    /// store's lock exclusively, no process has the device open, and no import looks up data in devices. After this
    /// call, the bytes cannot be found any more, so [`free`](Self::free) does not need the lock. It uses the open
    /// file, because an import may replace the device by a complete device with the same name.
    pub(super) fn drop_objects(
        &self,
        trimming: &Trimming,
        new: Option<&Replacement>,
    ) -> Result<ToPunch, DiskError> {
        let device = &trimming.dead.device;
        let opened = self.devices.directory.existing()?.to_punch(devices::device_name(device))?;
        if let Some(new) = new {
            self.devices.publish_index(device, new)?;
        }
        Ok(opened)
    }

    /// Frees the bytes of objects that the index does not have any more. Returns `false` if the file system cannot
    /// punch holes.
    ///
    /// The directory is always synced first. Without this sync, a crash could restore an index with objects whose
    /// bytes are already freed. The sync is also needed if another `gc` has renamed the index, because it may have
    /// been killed before its sync. A crash between the sync and the freeing has no effect, because the next `gc`
    /// finds the bytes again.
    pub(super) fn free(&self, trimming: &Trimming, opened: &ToPunch) -> Result<bool, DiskError> {
        self.devices.directory.existing()?.sync()?;
        opened.punch(&trimming.cut.free)
    }
}

/// Returns how many bytes of these ranges are not holes.
fn allocated(file: &std::fs::File, ranges: &[(u64, u64)]) -> std::io::Result<u64> {
    use rustix::fs::{SeekFrom, seek};
    use rustix::io::Errno;
    let mut bytes = 0;
    for (from, until) in ranges {
        let mut at = *from;
        while at < *until {
            let start = match seek(file, SeekFrom::Data(at)) {
                Ok(start) if start < *until => start,
                Ok(_) | Err(Errno::NXIO) => break,
                Err(errno) => return Err(errno.into()),
            };
            let end = seek(file, SeekFrom::Hole(start))?.min(*until);
            bytes += end - start;
            at = end;
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
