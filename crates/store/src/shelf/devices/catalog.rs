//! The indexes of all devices of a store, cached in memory.

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::sync::{Arc, MutexGuard, PoisonError};

use image::verity::{Algorithm, DeviceId, ObjectId};
use rustix::fs::Stat;

use super::{
    Builder, DataError, DataFile, DeviceKind, DeviceShelf, Entry, Header, Index, IndexDamage,
    IndexError, ObjectReader, Record, StoredDevice, StoredObject, first_of, piece_of, reader,
};
use super::{device_name, index_name};
use crate::disk::{Directory, DiskError, length};
use crate::shelf::is_file_of;
use crate::shelf::objects::ObjectLookupError;
use crate::staging::{Replacement, Workspace};
use image::digest::Digest;

/// Identity of a file or directory. Changed contents have another stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: i64,
    changed: (i64, i64),
}

impl Stamp {
    #[expect(clippy::useless_conversion, reason = "the types differ between architectures")]
    fn from_stat(stat: &Stat) -> Self {
        let nanoseconds = i64::try_from(stat.st_ctime_nsec).unwrap_or_default();
        let changed = (i64::from(stat.st_ctime), nanoseconds);
        Self { inode: stat.st_ino, size: stat.st_size, changed }
    }
}

/// A device with a readable index.
#[derive(Debug, Clone)]
struct Loaded {
    stamp: Stamp,
    index: Arc<Index>,
}

/// Opens a device that is not published yet, and returns its file and index.
pub(crate) type OpenMade<'f> =
    dyn Fn(&DeviceId) -> Result<Option<(File, Arc<Index>)>, ObjectLookupError> + 'f;

/// The indexes that are known so far.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    /// Stamp of the directory when it was listed.
    listed: Option<Stamp>,
    devices: BTreeMap<DeviceId, Loaded>,
    /// For each whole object, a device that contains it.
    objects: HashMap<[u8; 32], DeviceId>,
    /// Objects in pieces.
    in_pieces: HashSet<[u8; 32]>,
}

impl Catalog {
    /// Returns the location of a whole object in a device with a good index.
    fn whole(&self, key: &[u8; 32], is_good: impl Fn(&Index) -> bool) -> Option<StoredObject> {
        let device = self.objects.get(key)?;
        let one = self.devices.get_key_value(device);
        let mut devices = one.into_iter().chain(&self.devices);
        devices.find_map(|(device, loaded)| {
            is_good(&loaded.index).then(|| first(&loaded.index, device, key)).flatten()
        })
    }

    /// Returns the location of an object that can be a piece of other objects.
    fn piece(&self, id: &[u8; 32], len: u64) -> Option<StoredObject> {
        let one = self.devices.get_key_value(self.objects.get(id)?);
        let mut devices = one.into_iter().chain(&self.devices);
        devices.find_map(|(device, loaded)| piece_of(&loaded.index, device, id, len))
    }

    /// Returns the locations of an object's pieces, if every piece is in a device.
    fn in_pieces(&self, object: &ObjectId) -> Option<StoredObject> {
        let key = key(object).filter(|key| self.in_pieces.contains(key))?;
        let mut devices = self.devices.iter().filter(|(_, it)| it.index.record(&key).is_some());
        devices.find_map(|(device, loaded)| {
            first_of(&loaded.index, device, object, &|id, len| self.piece(id, len))
        })
    }

    /// Lists the indexes again, and reads those that are new or have changed.
    fn list(&mut self, data: &Directory) -> Result<(), DiskError> {
        let listed = Stamp::from_stat(&data.stat_self()?);
        let mut before = std::mem::take(&mut self.devices);
        let mut is_less = false;
        let mut new = Vec::new();
        for file in data.list()? {
            let Some(DataFile::Index(id)) = DataFile::parse(&file.name) else { continue };
            let Some(stat) = data.stat(index_name(&id))? else { continue };
            let stamp = Stamp::from_stat(&stat);
            match before.remove(&id) {
                Some(known)
                    if known.stamp == stamp
                        && device_is_there(data, &id, &known.index)?.is_ok() =>
                {
                    self.devices.insert(id, known);
                }
                known => {
                    is_less |= known.is_some();
                    match load(data, &id)? {
                        Ok(Some(loaded)) => {
                            new.push(id);
                            self.devices.insert(id, loaded);
                        }
                        Ok(None) => {}
                        Err(error) => tracing::warn!(%error, "skipping the index of a device"),
                    }
                }
            }
        }
        if is_less || !before.is_empty() {
            self.objects.clear();
            self.in_pieces.clear();
            new = self.devices.keys().copied().collect();
        }
        for id in new {
            let Some(loaded) = self.devices.get(&id) else { continue };
            for entry in &loaded.index.entries {
                self.objects.entry(entry.id).or_insert(id);
            }
            self.in_pieces.extend(loaded.index.records.iter().map(|it| it.id));
        }
        self.listed = Some(listed);
        Ok(())
    }
}

/// Reads the index of a device, if it exists. The device must exist with its full length.
fn load(data: &Directory, id: &DeviceId) -> Result<Result<Option<Loaded>, DataError>, DiskError> {
    let name = index_name(id);
    let (file, stat) = match data.read(&name) {
        Ok(Some(found)) => found,
        Ok(None) => return Ok(Ok(None)),
        Err(error) if error.is_not_a_file() => {
            return Ok(Err(damaged(id, IndexDamage::NotAFile)));
        }
        Err(error) => return Err(error),
    };
    let index = match Index::read(&file, length(&stat)) {
        Ok(index) => index,
        Err(IndexError::Damaged(reason)) => return Ok(Err(damaged(id, reason))),
        Err(IndexError::Read(source)) => return Err(data.failed("read", &name, source)),
    };
    if let Err(error) = device_is_there(data, id, &index)? {
        return Ok(Err(error));
    }
    Ok(Ok(Some(Loaded { stamp: Stamp::from_stat(&stat), index: Arc::new(index) })))
}

fn damaged(device: &DeviceId, reason: IndexDamage) -> DataError {
    DataError::Index { device: *device, reason: Box::new(reason) }
}

/// Checks that the device of an index exists with its full length. It does not after a crash during its removal, or
/// if it is damaged.
fn device_is_there(
    data: &Directory,
    id: &DeviceId,
    index: &Index,
) -> Result<Result<(), DataError>, DiskError> {
    let expected = index.header.bytes;
    Ok(match data.stat(device_name(id))? {
        Some(device) if is_file_of(&device, expected) => Ok(()),
        Some(device) => Err(DataError::Length { device: *id, expected, actual: length(&device) }),
        None => Err(DataError::Absent(*id)),
    })
}

/// How thoroughly to look up indexes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    /// May miss an index that is being published at this moment.
    Quick,
    /// Finds every index.
    Thorough,
}

impl DeviceShelf {
    /// Returns the location of an object in any device.
    ///
    /// The result is a snapshot, as with [`Store::has`](crate::Store::has).
    ///
    /// # Errors
    /// [`DiskError`] if the indexes cannot be read. Damaged indexes are skipped.
    pub fn find_object(&self, object: &ObjectId) -> Result<Option<StoredObject>, DiskError> {
        self.look_for(object, Look::Quick)
    }

    pub(crate) fn look_for(
        &self,
        object: &ObjectId,
        look: Look,
    ) -> Result<Option<StoredObject>, DiskError> {
        let Some(key) = key(object) else { return Ok(None) };
        let Some(catalog) = self.catalog(look)? else { return Ok(None) };
        Ok(catalog.whole(&key, |_| true).or_else(|| catalog.in_pieces(object)))
    }

    /// Returns the location of an object that is a piece of other objects.
    pub(crate) fn find_piece(
        &self,
        id: &[u8; 32],
        len: u64,
    ) -> Result<Option<StoredObject>, DiskError> {
        Ok(self.catalog(Look::Quick)?.and_then(|catalog| catalog.piece(id, len)))
    }

    /// As [`find_object`](Self::find_object), but only in packed devices.
    pub(crate) fn find_packed(&self, object: &ObjectId) -> Result<Option<StoredObject>, DiskError> {
        let Some(key) = key(object) else { return Ok(None) };
        let Some(catalog) = self.catalog(Look::Quick)? else { return Ok(None) };
        let whole = catalog.whole(&key, |index| index.header.kind == DeviceKind::Packed);
        // Tars have no objects in pieces.
        Ok(whole.or_else(|| catalog.in_pieces(object)))
    }

    /// Returns the layer whose tar is the device. `None` if the device is packed, or the store lacks it.
    ///
    /// # Errors
    /// As [`find_object`](Self::find_object).
    pub fn layer_of(&self, device: &DeviceId) -> Result<Option<Digest>, DiskError> {
        Ok(self.index_of(device)?.and_then(|it| it.header.layer))
    }

    /// Returns the device that is the complete tar of a layer.
    pub(crate) fn tar_of(&self, diff_id: &Digest) -> Result<Option<StoredDevice>, DiskError> {
        let Some(catalog) = self.catalog(Look::Quick)? else { return Ok(None) };
        let found = catalog.devices.iter().find_map(|(id, loaded)| {
            let header = &loaded.index.header;
            (header.layer == Some(*diff_id) && header.dropped == 0).then_some(StoredDevice {
                id: *id,
                bytes: header.bytes,
                kind: header.kind,
            })
        });
        Ok(found)
    }

    /// As [`find_object`](Self::find_object), in the first of these devices that has the object.
    ///
    /// # Errors
    /// As [`find_object`](Self::find_object).
    pub fn find_in<'b>(
        &self,
        object: &ObjectId,
        devices: impl IntoIterator<Item = &'b DeviceId>,
    ) -> Result<Option<StoredObject>, DiskError> {
        let Some(key) = key(object) else { return Ok(None) };
        let Some(catalog) = self.catalog(Look::Quick)? else { return Ok(None) };
        let found = devices.into_iter().find_map(|device| {
            catalog.devices.get(device).and_then(|loaded| first(&loaded.index, device, &key))
        });
        Ok(found)
    }

    /// Returns the object that begins at an offset of a device. This gives the object ids of a native image's files.
    ///
    /// # Errors
    /// As [`find_object`](Self::find_object).
    pub fn find_at(
        &self,
        device: &DeviceId,
        offset: u64,
    ) -> Result<Option<StoredObject>, DiskError> {
        let index = self.index_of(device)?;
        Ok(index.and_then(|index| Some(index.stored(device, index.at(offset)?))))
    }

    /// Returns the index of a device, if it can be read.
    pub(crate) fn index_of(&self, device: &DeviceId) -> Result<Option<Arc<Index>>, DiskError> {
        let Some(data) = self.directory.get()? else { return Ok(None) };
        let mut catalog = self.lock_catalog();
        if let Some(known) = catalog.devices.get(device)
            && data.stat(index_name(device))?.is_some_and(|it| Stamp::from_stat(&it) == known.stamp)
            && device_is_there(data, device, &known.index)?.is_ok()
        {
            return Ok(Some(Arc::clone(&known.index)));
        }
        catalog.list(data)?;
        Ok(catalog.devices.get(device).map(|it| Arc::clone(&it.index)))
    }

    /// Returns all readable indexes. [`DeviceShelf::index_damage`] describes the damage of the others.
    pub(crate) fn indexes(&self) -> Result<BTreeMap<DeviceId, Arc<Index>>, DiskError> {
        let Some(catalog) = self.catalog(Look::Thorough)? else { return Ok(BTreeMap::new()) };
        Ok(catalog.devices.iter().map(|(id, it)| (*id, Arc::clone(&it.index))).collect())
    }

    /// Checks the index of a device, and returns the damage.
    pub(crate) fn index_damage(&self, device: &DeviceId) -> Result<Option<DataError>, DiskError> {
        Ok(match load(self.directory.existing()?, device)? {
            Ok(Some(_)) => None,
            Ok(None) => Some(damaged(device, IndexDamage::Absent)),
            Err(error) => Some(error),
        })
    }

    /// Makes the next lookup list the indexes again.
    pub(crate) fn forget_indexes(&self) {
        self.lock_catalog().listed = None;
    }

    fn lock_catalog(&self) -> MutexGuard<'_, Catalog> {
        self.catalog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn catalog(&self, look: Look) -> Result<Option<MutexGuard<'_, Catalog>>, DiskError> {
        let Some(data) = self.directory.get()? else { return Ok(None) };
        let mut catalog = self.lock_catalog();
        let is_new = look == Look::Quick
            && catalog.listed.is_some()
            && catalog.listed == Some(Stamp::from_stat(&data.stat_self()?));
        if !is_new {
            catalog.list(data)?;
        }
        Ok(Some(catalog))
    }

    /// Opens an object in a device. The caller holds the store's lock.
    pub(crate) fn open_stored(
        &self,
        stored: &StoredObject,
    ) -> Result<ObjectReader, ObjectLookupError> {
        if stored.pieces.is_some() {
            return self.open_pieces(stored, &|_| Ok(None));
        }
        let index = self.index_of(&stored.device)?;
        self.open_part(stored, &*index.ok_or(ObjectLookupError::NoObject(stored.object))?)
    }

    /// Opens an object in pieces, some of which may be in the devices of `made`. The caller holds the store's lock.
    ///
    /// The reader keeps every device open, so `gc` changes none of these devices.
    pub(crate) fn open_pieces(
        &self,
        stored: &StoredObject,
        made: &OpenMade<'_>,
    ) -> Result<ObjectReader, ObjectLookupError> {
        let absent = || ObjectLookupError::NoObject(stored.object);
        let pieces = stored.pieces.as_deref().unwrap_or_default();
        let mut devices = BTreeMap::new();
        let mut files = Vec::new();
        for piece in pieces.iter().filter_map(|it| it.stored.as_ref()) {
            if let Slot::Vacant(new) = devices.entry(piece.device) {
                let (file, index) = match made(&piece.device)? {
                    Some(made) => made,
                    None => {
                        let index = self.index_of(&piece.device)?.ok_or_else(absent)?;
                        (self.open(&piece.device, index.header.bytes)?.0, index)
                    }
                };
                new.insert((files.len(), index));
                files.push(file);
            }
        }
        let open = |piece: &StoredObject| {
            let (file, index) = devices.get(&piece.device)?;
            let place = index.place(&key(&piece.object)?, piece.offset);
            place.is_some_and(|it| it.size == piece.size).then_some(*file)
        };
        reader::of_pieces(pieces, files, open).ok_or_else(absent)
    }

    /// Opens an object at a place in a recently read index. The caller holds the store's lock.
    pub(crate) fn open_part(
        &self,
        stored: &StoredObject,
        index: &Index,
    ) -> Result<ObjectReader, ObjectLookupError> {
        let (object, device) = (stored.object, stored.device);
        let absent = || ObjectLookupError::NoObject(object);
        let key = key(&object).ok_or_else(absent)?;
        let entry = index.place(&key, stored.offset).ok_or_else(absent)?;
        let (file, _) = self.open(&device, index.header.bytes)?;
        Ok(ObjectReader::part(file, entry.offset, entry.size))
    }

    /// Replaces an index, durably, by an index that has only these entries and objects in pieces. The caller holds the
    /// store's lock exclusively, and no import runs.
    pub(crate) fn drop_entries(
        &self,
        device: &DeviceId,
        index: &Index,
        keep: &[Entry],
        records: &[Record],
    ) -> Result<(), DiskError> {
        let data = self.directory.existing()?;
        if data.stat(index_name(device))?.is_none() {
            return Ok(());
        }
        let new = self.index_without(device, index, keep, records)?;
        self.publish_index(device, &new)?;
        data.sync()
    }

    /// Writes an index with only these entries and objects in pieces to a work directory, durably. The caller needs no
    /// lock.
    pub(crate) fn index_without(
        &self,
        device: &DeviceId,
        index: &Index,
        keep: &[Entry],
        records: &[Record],
    ) -> Result<Replacement, DiskError> {
        let failed = |source| match self.directory.existing() {
            Ok(data) => data.failed("make", index_name(device), source),
            Err(error) => error,
        };
        let mut builder = Builder::default();
        keep.iter().for_each(|it| builder.add(*it));
        records.iter().for_each(|it| builder.add_record(it.clone()));
        let dropped = index.entries.len().saturating_sub(keep.len());
        let dropped = dropped + index.records.len().saturating_sub(records.len());
        let dropped = dropped as u64;
        let dropped = index.header.dropped.saturating_add(dropped);
        let header = Header { dropped, ..index.header.clone() };
        let bytes = builder.encode(&header).map_err(failed)?;
        Replacement::write(Workspace::make_hidden(&self.tmp)?, &bytes)
    }

    /// Replaces an index by this one. The caller holds the store's lock exclusively, and syncs the directory.
    pub(crate) fn publish_index(
        &self,
        device: &DeviceId,
        new: &Replacement,
    ) -> Result<(), DiskError> {
        new.publish(self.directory.existing()?, index_name(device))?;
        self.forget_indexes();
        Ok(())
    }
}

pub(super) fn first(index: &Index, device: &DeviceId, key: &[u8; 32]) -> Option<StoredObject> {
    index.places(key).first().map(|entry| index.stored(device, entry))
}

/// Returns the key of an object in an index. Only SHA-256 ids have one.
pub(crate) fn key(object: &ObjectId) -> Option<[u8; 32]> {
    let bytes = (object.algorithm() == Algorithm::Sha256).then(|| object.as_bytes())?;
    bytes.try_into().ok()
}
