//! Checks devices, object by object.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io::Read as _;
use std::sync::Arc;

use image::verity::{DeviceId, Hasher, ObjectId};
use sha2::{Digest as _, Sha256};

use super::harm::Bad;
use super::{
    Contents, Damage, FsckError, FsckOptions, FsckReport, Harm, Users, chain, check_error,
};
use crate::disk::DiskError;
use crate::parallel;
use crate::shelf::data_error::DataError;
use crate::shelf::devices::{self, Entry, Index, ObjectReader, Ranges, Record, StoredObject};
use crate::shelf::item::StoreItem;
use crate::store::Store;

/// Number of objects that a thread takes at once.
const RUN: usize = 64;

/// The objects in devices.
#[derive(Debug, Default)]
pub(super) struct InDevices {
    /// Objects that are sound in at least one device.
    pub(super) sound: BTreeSet<ObjectId>,
    /// All other objects.
    pub(super) damaged: BTreeSet<ObjectId>,
    /// Lazy devices of images, which are checked as a whole.
    pub(super) lazy_devices: BTreeSet<DeviceId>,
}

impl InDevices {
    /// Adds objects in pieces: such an object is sound if each of its pieces is sound in some device, unless the
    /// object is in `bad`.
    fn add_pieces(&mut self, indexes: &BTreeMap<DeviceId, Arc<Index>>, bad: &BTreeSet<ObjectId>) {
        let records = || indexes.values().flat_map(|it| &it.records);
        let wanted: HashSet<[u8; 32]> = records().flat_map(Record::parts).collect();
        let entries = indexes.values().flat_map(|index| {
            let entries = index.entries.iter().filter(|it| wanted.contains(&it.id));
            entries.filter(|it| index.piece(&it.id, it.size) == Some(it))
        });
        let places: HashMap<[u8; 32], bool> =
            entries.map(|it| (it.id, self.sound.contains(&it.object()))).collect();
        let found = records().filter_map(|record| {
            let mut pieces = record.parts().map(|id| places.get(&id).copied());
            // If a piece is in no device, the object is not in the devices either.
            let is_sound = pieces.try_fold(true, |sound, piece| Some(sound & piece?))?;
            Some((record.object(), is_sound && !bad.contains(&record.object())))
        });
        let found: Vec<_> = found.collect();
        for (object, is_sound) in found {
            let into = if is_sound { &mut self.sound } else { &mut self.damaged };
            into.insert(object);
        }
    }
}

/// The part of the store to check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// Everything in the store.
    Everything,
    /// The data that the images need.
    Images,
}

/// Location of an object: a device and an entry of its index.
type ObjectPlace = (DeviceId, Entry);

/// A device in the store, its index, and an entry to check.
type Job<'i> = (DeviceId, &'i Arc<Index>, &'i Entry);

impl Store {
    /// Checks devices, and reports the images that damage affects.
    pub(super) fn check_data(
        &self,
        users: &Users<'_>,
        scope: Scope,
        options: FsckOptions,
        report: &mut FsckReport,
    ) -> Result<InDevices, FsckError> {
        let mut wanted: BTreeSet<DeviceId> =
            users.images.values().flat_map(|it| it.devices.keys().copied()).collect();
        let needed = wanted.clone();
        let there = self.devices.list()?.names.into_iter().filter_map(|file| match file {
            devices::DataFile::Device(id) => Some(id),
            // An index without its device may be left by a crash.
            devices::DataFile::Index(_) => None,
        });
        let there: BTreeSet<DeviceId> = there.collect();
        let lazy_devices = self.check_lazy_devices_of_images(users, scope, report)?;
        wanted.retain(|id| !lazy_devices.contains(id));
        if scope == Scope::Everything {
            wanted.extend(&there);
        }
        let mut indexes = BTreeMap::new();
        for device in &wanted {
            report.checked += 1;
            match self.check_device(device, there.contains(device), users)? {
                Ok(index) => drop(indexes.insert(*device, index)),
                // The device has no index, and images do not need it, so it is garbage.
                Err(Damage::Bad(StoreItem::DeviceIndex(_), _))
                    if !needed.contains(device) && !self.has_index(device)? => {}
                Err(damage @ Damage::Bad(StoreItem::DeviceIndex(_), _)) => report.add(damage),
                Err(damage) => report.damage.push((damage, users.harm_of_device(device))),
            }
        }
        for (image, contents) in &users.images {
            if let Some(damage) = unknown_part(contents, &indexes) {
                let refs = users.names(image);
                report.damage.push((damage, vec![Harm { image: *image, refs, paths: Vec::new() }]));
            }
        }
        let mut jobs: Vec<Job<'_>> = Vec::new();
        for (device, index) in &indexes {
            let all = index.entries.iter();
            jobs.extend(all.map(|entry| (*device, index, entry)));
        }
        let used = (scope == Scope::Images).then(|| Used::from_users(users));
        if let Some(used) = &used {
            jobs.retain(|(device, _, entry)| used.meets(device, entry.offset, entry.until()));
        }
        // The jobs are sorted by their order on disk. Tails of files are sorted by the frames that contain them.
        jobs.sort_by_key(|(device, _, entry)| (*device, entry.offset));
        let mut in_devices = InDevices { lazy_devices, ..InDevices::default() };
        let mut bad = Vec::new();
        for (job, damage) in jobs.iter().zip(self.hash_stored(&jobs, options)?) {
            let (device, _, entry) = job;
            report.checked += 1;
            match damage {
                None => {
                    report.bytes += entry.size;
                    in_devices.sound.insert(entry.object());
                }
                Some(why) => {
                    in_devices.damaged.insert(entry.object());
                    bad.push(Bad {
                        device: *device,
                        object: entry.object(),
                        at: (*device, **entry),
                        why,
                    });
                }
            }
        }
        let mut bad_records = BTreeSet::new();
        for (device, index) in &indexes {
            for record in &index.records {
                let resolved = || self.resolved(device, index, record);
                if used.as_ref().is_some_and(|it| !resolved().is_some_and(|of| it.has_all_of(&of)))
                {
                    continue;
                }
                report.checked += 1;
                // Damage to a piece was already reported.
                if record.parts().any(|it| is_one_of(&in_devices.damaged, &it)) {
                    continue;
                }
                if let Some((at, why)) = self.record_damage(device, index, record)? {
                    bad_records.insert(record.object());
                    bad.push(Bad { device: *device, object: record.object(), at, why });
                }
            }
        }
        in_devices.add_pieces(&indexes, &bad_records);
        self.tell_harm(bad, users, report)?;
        Ok(in_devices)
    }

    fn has_index(&self, device: &DeviceId) -> Result<bool, DiskError> {
        let Some(data) = self.devices.directory.get()? else { return Ok(false) };
        Ok(data.stat(devices::index_name(device))?.is_some())
    }

    /// Checks a device's file and its index, but not the objects in it.
    fn check_device(
        &self,
        device: &DeviceId,
        is_there: bool,
        users: &Users<'_>,
    ) -> Result<Result<Arc<Index>, Damage>, FsckError> {
        if !is_there {
            return Ok(Err(Damage::Bad(StoreItem::Device(*device), "it is missing".to_owned())));
        }
        let damage = match self.devices.index_damage(device) {
            Ok(None) => None,
            Ok(Some(DataError::Index { reason, .. })) => {
                Some(Damage::Bad(StoreItem::DeviceIndex(*device), reason.to_string()))
            }
            Ok(Some(DataError::Length { expected, actual, .. })) => Some(Damage::Bad(
                StoreItem::Device(*device),
                format!("it has {actual} bytes, not {expected}"),
            )),
            Ok(Some(error)) => Some(Damage::Bad(StoreItem::Device(*device), chain(&error))),
            Err(error) => {
                Some(Damage::Bad(StoreItem::DeviceIndex(*device), check_error::damage(&error)?))
            }
        };
        if let Some(damage) = damage {
            return Ok(Err(damage));
        }
        let index = self.devices.index_of(device)?;
        let Some(index) = index else {
            return Ok(Err(Damage::Bad(
                StoreItem::DeviceIndex(*device),
                "it is missing".to_owned(),
            )));
        };
        let stated = users.images.values().filter_map(|it| it.devices.get(device));
        let actual = index.header.bytes;
        if let Some(expected) = stated.copied().find(|it| *it != actual) {
            let why = format!("it has {actual} bytes, not {expected} as an image states");
            return Ok(Err(Damage::Bad(StoreItem::Device(*device), why)));
        }
        Ok(Ok(index))
    }

    /// Hashes the objects of these jobs. Returns the damage of each, if any.
    fn hash_stored(
        &self,
        jobs: &[Job<'_>],
        options: FsckOptions,
    ) -> Result<Vec<Option<String>>, FsckError> {
        let buffer = || vec![0; 1 << 20];
        let runs = jobs.len().div_ceil(RUN);
        let found = parallel::each_with("fsck", options.threads, runs, buffer, |buffer, run| {
            let jobs = jobs[run * RUN..].iter().take(RUN);
            jobs.map(|job| self.stored_damage(job, buffer)).collect::<Result<Vec<_>, _>>()
        })?;
        Ok(found.into_iter().flatten().collect())
    }

    fn stored_damage(
        &self,
        (device, index, entry): &Job<'_>,
        buffer: &mut [u8],
    ) -> Result<Option<String>, FsckError> {
        match self.devices.open_part(&index.stored(device, entry), index) {
            Ok(reader) => differs(reader, buffer, &entry.object(), &entry.sha256),
            Err(error) => check_error::damage(&error).map(Some),
        }
    }

    /// Returns the locations of an object's pieces, if all are in devices.
    fn resolved(&self, device: &DeviceId, index: &Index, record: &Record) -> Option<StoredObject> {
        let find = |id: &[u8; 32], len| self.devices.find_piece(id, len).ok().flatten();
        devices::resolve(index, device, record, &find)
    }

    /// Checks an object in pieces whose pieces are sound. Returns the damage and the location of the first piece, at
    /// which files with this object begin.
    fn record_damage(
        &self,
        device: &DeviceId,
        index: &Index,
        record: &Record,
    ) -> Result<Option<(ObjectPlace, String)>, FsckError> {
        let Some(stored) = self.resolved(device, index, record) else { return Ok(None) };
        let first = stored.pieces.iter().flat_map(|it| it.iter()).find_map(|it| it.stored.as_ref());
        let (first_device, offset, size) =
            first.map_or((*device, 0, 0), |it| (it.device, it.offset, it.size));
        let (id, sha256) = (record.id, record.sha256);
        let at = (first_device, Entry { id, offset, size, sha256 });
        if record.size > RECORD_BYTES_MAX {
            return Ok(Some((at, format!("{} bytes are more than a file can have", record.size))));
        }
        let why = match self.devices.open_stored(&stored) {
            Ok(reader) => differs(reader, &mut vec![0; 1 << 20], &record.object(), &sha256)?,
            Err(error) => Some(check_error::damage(&error)?),
        };
        Ok(why.map(|why| (at, why)))
    }

    /// Whether an object in a device matches the device's index.
    pub(crate) fn is_sound_stored(
        &self,
        device: &DeviceId,
        object: &ObjectId,
    ) -> Result<bool, FsckError> {
        let Ok(Some(index)) = check_error::found(self.devices.index_of(device))? else {
            return Ok(false);
        };
        let Some(key) = devices::key(object) else { return Ok(true) };
        if let Some(record) = index.record(&key)
            && self.record_damage(device, &index, record)?.is_some()
        {
            return Ok(false);
        }
        let mut buffer = vec![0; 1 << 20];
        for entry in index.places(&key) {
            if self.stored_damage(&(*device, &index, entry), &mut buffer)?.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Ranges of devices that images use.
struct Used(BTreeMap<DeviceId, Ranges>);

impl Used {
    fn from_users(users: &Users<'_>) -> Self {
        let mut used: BTreeMap<DeviceId, Vec<(u64, u64)>> = BTreeMap::new();
        for range in users.images.values().flat_map(|it| &it.ranges) {
            let until = range.offset.saturating_add(range.len);
            used.entry(range.device).or_default().push((range.offset, until));
        }
        Self(used.into_iter().map(|(device, ranges)| (device, Ranges::new(ranges))).collect())
    }

    fn meets(&self, device: &DeviceId, from: u64, until: u64) -> bool {
        self.0.get(device).is_some_and(|it| it.meet(from, until))
    }

    /// Whether an object in pieces may be a file of these images, because these use each of its pieces. For an object
    /// of zeros, returns `false`, because it has no piece that could be damaged.
    fn has_all_of(&self, stored: &StoredObject) -> bool {
        let pieces = stored.pieces.iter().flat_map(|it| it.iter());
        let mut has_any = false;
        let has_all = pieces.filter_map(|it| it.stored.as_ref()).all(|it| {
            has_any = true;
            self.meets(&it.device, it.offset, it.offset.saturating_add(it.size))
        });
        has_all && has_any
    }
}

/// Maximum length of an object in pieces, in bytes. File systems do not support longer files, and hashing the zeros of
/// a longer object would take too long.
const RECORD_BYTES_MAX: u64 = 1 << 50;

fn is_one_of(objects: &BTreeSet<ObjectId>, id: &[u8; 32]) -> bool {
    ObjectId::from_bytes(id).is_ok_and(|it| objects.contains(&it))
}

/// Reads an object and describes how its bytes differ from the expected ones.
fn differs(
    mut reader: ObjectReader,
    buffer: &mut [u8],
    object: &ObjectId,
    expected: &[u8; 32],
) -> Result<Option<String>, FsckError> {
    let (mut hasher, mut sha256) = (Hasher::new(object.algorithm()), Sha256::new());
    loop {
        match reader.read(buffer) {
            Ok(0) => break,
            Ok(length) => {
                hasher.update(&buffer[..length]);
                sha256.update(&buffer[..length]);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => {
                return check_error::damage(&error)
                    .map(|why| Some(format!("cannot read it: {why}")));
            }
        }
    }
    Ok(match hasher.finish() {
        actual if actual != *object.digest() => Some(format!("its digest is {actual}")),
        _ if *sha256.finalize() != *expected => {
            Some("the index has a wrong SHA-256 of it".to_owned())
        }
        _ => None,
    })
}

/// Returns a part of a device that an image needs and no index covers, because such a part cannot be verified.
fn unknown_part(contents: &Contents, indexes: &BTreeMap<DeviceId, Arc<Index>>) -> Option<Damage> {
    contents.ranges.iter().find_map(|range| {
        let at = indexes.get(&range.device)?.first_unknown(range.offset, range.len)?;
        let why = format!("it lacks an object at byte {at} that an image needs");
        Some(Damage::Bad(StoreItem::DeviceIndex(range.device), why))
    })
}
