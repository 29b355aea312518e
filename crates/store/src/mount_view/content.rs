//! Reads the bytes of objects, in files or devices, and the trees of images.

use std::fs::File;

use image::erofs::read::{
    Cached, Device, Image, ImageTree, Located, Objects, Owners, RunPlace, View, native_tree,
    to_tree,
};
use image::verity::{DeviceId, ObjectId};
use rustix::fs::Stat;

use crate::disk::length;
use crate::mount_view::open::{NamedImage, OpenImage};
use crate::shelf::devices::{Index, Look, ObjectReader, OpenMade, PieceKey, StoredObject};
use crate::shelf::images::{ContentsError, INLINE_MAX, ImageFile, is_native};
use crate::shelf::is_file_of;
use crate::shelf::objects::ObjectLookupError;
use crate::store::Store;

impl Store {
    /// Whether the store has this object with `size` bytes, as a file or in a device.
    /// [`find_object`](crate::DeviceShelf::find_object) looks only in devices.
    ///
    /// The result is a snapshot: `gc` may remove the object at any time afterwards. Imports use
    /// [`Transaction::reuse`](crate::Transaction::reuse), which also protects the object.
    ///
    /// # Errors
    /// [`ObjectLookupError`] if the lookup fails.
    pub fn has(&self, object: &ObjectId, size: u64) -> Result<bool, ObjectLookupError> {
        self.objects.check_algorithm(object)?;
        if self.objects.stat(object)?.is_some_and(|stat| is_file_of(&stat, size)) {
            return Ok(true);
        }
        Ok(self.devices.find_object(object)?.is_some_and(|it| it.size == size))
    }

    fn object_file(&self, object: &ObjectId) -> Result<Option<(File, Stat)>, ObjectLookupError> {
        self.objects.check_algorithm(object)?;
        Ok(self.objects.open(object)?)
    }

    /// Opens an object in a file or a device for reading. Its bytes are not verified: hash them, or trust the import.
    ///
    /// # Errors
    /// [`ObjectLookupError`] if the object is absent, not a regular file or not readable.
    pub fn object(&self, object: &ObjectId) -> Result<ObjectReader, ObjectLookupError> {
        if let Some((file, stat)) = self.object_file(object)? {
            return Ok(ObjectReader::whole(file, length(&stat)));
        }
        // `gc` checks under its lock whether a device is open before it frees parts of it.
        let _lock = self.lock_shared()?;
        self.object_locked(object)
    }

    /// As [`object`](Self::object), for callers that hold the store's lock.
    pub(crate) fn object_locked(
        &self,
        object: &ObjectId,
    ) -> Result<ObjectReader, ObjectLookupError> {
        if let Some((file, stat)) = self.object_file(object)? {
            return Ok(ObjectReader::whole(file, length(&stat)));
        }
        for look in [Look::Quick, Look::Thorough] {
            let Some(found) = self.devices.look_for(object, look)? else { continue };
            match self.devices.open_stored(&found) {
                // The object was removed after the lookup.
                Err(ObjectLookupError::NoObject(_)) if look == Look::Quick => {}
                other => return other,
            }
        }
        // The object may have been published since the first lookup.
        let file = self.object_file(object)?.ok_or(ObjectLookupError::NoObject(*object))?;
        Ok(ObjectReader::whole(file.0, length(&file.1)))
    }

    /// Opens an object that is in a device.
    ///
    /// # Errors
    /// [`ObjectLookupError`] if the object has been removed or cannot be read.
    pub fn stored_object(&self, stored: &StoredObject) -> Result<ObjectReader, ObjectLookupError> {
        let _lock = self.lock_shared()?;
        self.devices.open_stored(stored)
    }

    /// Opens an object in pieces. Some of its pieces may be in the devices of `made`.
    pub(crate) fn stored_pieces(
        &self,
        stored: &StoredObject,
        made: &OpenMade<'_>,
    ) -> Result<ObjectReader, ObjectLookupError> {
        let _lock = self.lock_shared()?;
        self.devices.open_pieces(stored, made)
    }

    /// Returns the tree of an image of any form, with the ids of its objects. A file of a native image that is in no
    /// index has no object id.
    ///
    /// # Errors
    /// [`ContentsError`] if the image cannot be read.
    pub fn tree(&self, image: &OpenImage, owners: Owners) -> Result<ImageTree, ContentsError> {
        self.tree_of(&image.image, image.devices.iter().map(|it| it.id), owners)
    }

    /// As [`tree`](Self::tree). Files whose device is not complete have no object id.
    ///
    /// # Errors
    /// [`ContentsError`] if the image cannot be read.
    pub fn named_tree(
        &self,
        image: &NamedImage,
        owners: Owners,
    ) -> Result<ImageTree, ContentsError> {
        self.tree_of(&image.image, image.devices.iter().map(|it| it.0), owners)
    }

    fn tree_of(
        &self,
        image: &ImageFile,
        devices: impl Iterator<Item = DeviceId>,
        owners: Owners,
    ) -> Result<ImageTree, ContentsError> {
        let read = Image::open(Cached::new(image))?;
        if !is_native(&read) {
            return Ok(to_tree(&read, View::Composefs(owners))?);
        }
        let indexes: Vec<_> = devices
            .map(|device| {
                self.devices.index_of(&device).unwrap_or_else(|error| {
                    tracing::warn!(%error, "cannot read the index of a device: its objects have no ids");
                    None
                })
            })
            .collect();
        let index_of = |device: Device| indexes.get(device.slot()?)?.as_deref();
        let find = |located: &Located<'_>| {
            whole(located, &index_of).or_else(|| {
                let pieces = pieces(located, &index_of)?;
                let mut records = indexes.iter().flatten().filter_map(|it| it.record_of(&pieces));
                let record = records.find(|it| is_same(located, it.size, &it.sha256))?;
                Some(record.object())
            })
        };
        let objects = Objects { algorithm: self.algorithm(), inline_max: INLINE_MAX, find: &find };
        Ok(native_tree(&read, objects)?)
    }
}

fn is_same(located: &Located<'_>, size: u64, sha256: &[u8; 32]) -> bool {
    located.size == size && located.fingerprint.is_none_or(|it| it == *sha256)
}

/// Returns the object that is a file's contents, if the file is exactly one object in one run.
fn whole<'i>(
    located: &Located<'_>,
    index_of: &dyn Fn(Device) -> Option<&'i Index>,
) -> Option<ObjectId> {
    let [run] = located.runs else { return None };
    let RunPlace::Data(device, offset) = run.place else { return None };
    let entry = index_of(device)?.at(offset.0)?;
    let is_it = run.len == entry.size && is_same(located, entry.size, &entry.sha256);
    is_it.then(|| entry.object())
}

/// Returns the objects that make up a file, from the indexes of the devices with the file's runs.
fn pieces<'i>(
    located: &Located<'_>,
    index_of: &dyn Fn(Device) -> Option<&'i Index>,
) -> Option<Vec<PieceKey>> {
    let mut pieces = Vec::new();
    let mut left = located.size;
    for run in located.runs {
        let (device, offset) = match run.place {
            RunPlace::Hole => {
                pieces.push(PieceKey { id: None, len: run.len });
                left = left.checked_sub(run.len)?;
                continue;
            }
            RunPlace::Data(device, offset) if device != Device::IMAGE => (device, offset.0),
            RunPlace::Data(..) | RunPlace::Inline(_) | RunPlace::Packed => return None,
        };
        let index = index_of(device)?;
        let until = offset.checked_add(run.len)?;
        let mut at = offset;
        while at < until {
            let entry = index.at(at).filter(|it| it.until() <= until)?;
            pieces.push(PieceKey { id: Some(entry.id), len: entry.size });
            left = left.checked_sub(entry.size)?;
            at = entry.until();
        }
    }
    (left == 0).then_some(pieces)
}
