//! Data blobs of an import.

use std::fs::File;
use std::sync::Arc;

use image::verity::{DeviceId, Id, ObjectId};
use rustix::io::Errno;

use super::device::{self, DataBlobDraft};
use super::draft::{DraftError, Scrap};
use super::{Found, State, Transaction};
use crate::disk::DiskError;
use crate::shelf::devices::{self, BlobKind, DataBlob, Index, ObjectReader, StoredObject, Where};
use crate::shelf::item::StoreItem;
use crate::shelf::objects::LookupError;
use crate::store::mode_of;

/// A data blob that an import has made or relies on.
#[derive(Debug)]
pub(super) enum Data {
    /// In the import's own directory: the numbers of its files.
    Here(Made),
    /// In the store.
    Store,
}

/// A blob that was made, and its index.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) blob: u64,
    pub(super) index_file: u64,
    index: Arc<Index>,
}

impl State {
    /// Where in finished blobs an object is that can be a piece of another.
    fn made_piece(&self, id: &[u8; 32], len: u64) -> Option<StoredObject> {
        self.data.iter().find_map(|(blob, data)| match data {
            Data::Here(made) => devices::piece_of(&made.index, blob, id, len),
            Data::Store => None,
        })
    }
}

impl Transaction<'_> {
    /// A new data blob: its bytes come in order, and what objects are in them.
    ///
    /// # Errors
    /// [`DraftError`] when its file cannot be made, or the store is one of SHA-512.
    pub fn data_blob(&self, kind: BlobKind) -> Result<DataBlobDraft<'_>, DraftError> {
        DataBlobDraft::new(self, kind)
    }

    /// Whether the store, or this import, has this data blob with its index; if so it is protected from `gc` until the
    /// import ends, with all that is in it now.
    ///
    /// # Errors
    /// [`DraftError`] when it cannot be looked up.
    pub fn reuse_data_blob(&self, id: &DeviceId) -> Result<bool, DraftError> {
        if self.state().data.contains_key(id) {
            return Ok(true);
        }
        let there =
            self.store.devices.index_of(id).map_err(|source| self.lookup_failed(id, source))?;
        if there.is_some() {
            self.state().data.entry(*id).or_insert(Data::Store);
        }
        Ok(there.is_some())
    }

    /// Where in a data blob an object is, of those that this import has finished or that the store has. The blob is
    /// protected from `gc` until the import ends; the object is counted as reused. An object with another size is none.
    ///
    /// # Errors
    /// [`DraftError`] when it cannot be looked up.
    pub fn reuse_stored(
        &self,
        id: &ObjectId,
        size: u64,
    ) -> Result<Option<StoredObject>, DraftError> {
        let found = match self.made(id) {
            Some(found) => Some(found),
            None => self.store.devices.find(id).map_err(|source| self.lookup_failed(id, source))?,
        };
        let found = found.filter(|it| it.size == size);
        if let Some(found) = &found {
            self.rely_on(found);
            self.state().counts.reuse(size);
        }
        Ok(found)
    }

    /// Where in a packed blob an object is that can be a piece of another, of those that this import has finished or that
    /// the store has; the blob is protected from `gc` until the import ends.
    ///
    /// # Errors
    /// [`DraftError`] when it cannot be looked up.
    pub fn reuse_piece(&self, id: &ObjectId, len: u64) -> Result<Option<StoredObject>, DraftError> {
        let Some(key) = devices::key(id) else { return Ok(None) };
        let found = match self.state().made_piece(&key, len) {
            Some(found) => Some(found),
            None => {
                let found = self.store.devices.find_piece(&key, len);
                found.map_err(|source| self.lookup_failed(id, source))?
            }
        };
        if let Some(found) = &found {
            self.rely_on(found);
        }
        Ok(found)
    }

    /// Protects from `gc` what has an object's bytes, until the import ends.
    pub(super) fn rely_on(&self, stored: &StoredObject) {
        let mut state = self.state();
        for blob in stored.blobs() {
            state.data.entry(blob.id).or_insert(Data::Store);
        }
    }

    /// Whether the store or this import has an object of this size, and where: a file, if there is one. It is protected
    /// from `gc` as by [`reuse`](Self::reuse). What needs its bytes only, as a layer does, asks this; a composefs image
    /// needs a file.
    ///
    /// # Errors
    /// [`DraftError`] when it cannot be looked up.
    pub fn reuse_anywhere(&self, id: &ObjectId, size: u64) -> Result<Option<Where>, DraftError> {
        if self.reuse(id, size)? {
            return Ok(Some(Where::File));
        }
        Ok(self.reuse_stored(id, size)?.map(Box::new).map(Where::Blob))
    }

    /// Opens an object in a data blob, also in one that this import has made and not committed.
    ///
    /// # Errors
    /// [`LookupError`] when it cannot be read.
    pub fn stored_object(&self, stored: &StoredObject) -> Result<ObjectReader, LookupError> {
        if stored.pieces.is_some() {
            let made = |blob: &DeviceId| {
                let made = match self.state().data.get(blob) {
                    Some(Data::Here(made)) => (made.blob, Arc::clone(&made.index)),
                    _ => return Ok(None),
                };
                Ok(Some((self.read_back(made.0)?, made.1)))
            };
            return self.store.stored_pieces(stored, &made);
        }
        let made = match self.state().data.get(&stored.blob) {
            Some(Data::Here(made)) => Some((made.blob, Arc::clone(&made.index))),
            _ => None,
        };
        let Some((blob, index)) = made else { return self.store.stored_object(stored) };
        let reader = devices::open_made(&index, stored, self.read_back(blob)?);
        reader.ok_or(LookupError::NoObject(stored.object))
    }

    /// Where in data blobs an object is.
    pub(super) fn data_of(&self, id: &ObjectId) -> Result<Option<StoredObject>, DiskError> {
        match self.made(id) {
            Some(found) => Ok(Some(found)),
            None => self.store.devices.find(id),
        }
    }

    /// Where in finished blobs of this import an object is, or its pieces.
    pub(super) fn made(&self, id: &ObjectId) -> Option<StoredObject> {
        let state = self.state();
        let find = |id: &[u8; 32], len| {
            let made = state.made_piece(id, len);
            // What cannot be read is found out when it is opened.
            made.or_else(|| self.store.devices.find_piece(id, len).ok().flatten())
        };
        state.data.iter().find_map(|(blob, data)| match data {
            Data::Here(made) => devices::first_of(&made.index, blob, id, &find),
            Data::Store => None,
        })
    }

    /// Length of a blob that this import has made.
    #[cfg(test)]
    pub(crate) fn made_bytes(&self, blob: &DeviceId) -> Option<u64> {
        match self.state().data.get(blob)? {
            Data::Here(made) => Some(made.index.header.bytes),
            Data::Store => None,
        }
    }

    /// A file of the import's own directory, for reading.
    pub(crate) fn read_back(&self, number: u64) -> Result<File, DiskError> {
        let (directory, name) = (&self.work.directory, number.to_string());
        let opened = directory.read(&name)?;
        opened.map(|it| it.0).ok_or_else(|| directory.failed("open", &name, Errno::NOENT))
    }

    pub(super) fn lookup_failed<K>(
        &self,
        id: &Id<K>,
        source: impl Into<LookupError>,
    ) -> DraftError {
        self.fail();
        DraftError::Lookup { id: *id.digest(), source: Box::new(source.into()) }
    }

    /// Takes a blob whose file is written; its index is written here.
    pub(crate) fn finish_data_blob(
        &self,
        scrap: Scrap<'_>,
        blob: DataBlob,
        encoded: &[u8],
    ) -> Result<(), DraftError> {
        let disk = |source| self.write_failed(device::WHAT, source);
        if matches!(self.state().data.get(&blob.id), Some(Data::Here(_))) {
            // The same bytes have the same objects in them; what one of two did not say is found in neither.
            return Ok(());
        }
        let (index_scrap, mut file) = Scrap::new(self).map_err(disk)?;
        file.write_all(encoded).map_err(disk)?;
        drop(file);
        let read = self.read_back(index_scrap.number()).map_err(disk)?;
        let index = Index::read(&read, encoded.len() as u64)
            .and_then(|index| index.map_err(std::io::Error::other))
            .map_err(|source| {
                self.fail();
                DraftError::Index { source }
            })?;
        let there = self.store.devices.index_of(&blob.id);
        let there = there.map_err(|source| self.lookup_failed(&blob.id, source))?;
        let data = match there {
            Some(there) if there.has_all_of(&index) => Data::Store,
            _ => {
                self.seal(scrap.number(), device::WHAT)?;
                let (blob_file, index_file) = (scrap.keep(), index_scrap.keep());
                Data::Here(Made { blob: blob_file, index_file, index: Arc::new(index) })
            }
        };
        self.state().data.insert(blob.id, data);
        Ok(())
    }

    /// Publishes data blobs, durably, and then their indexes: an index promises what is in its blob.
    pub(super) fn publish_data(&self, state: &State) -> Result<(), DiskError> {
        let mut made = Vec::new();
        for (id, data) in &state.data {
            let Data::Here(data) = data else { continue };
            // Another import may have published the same.
            let there = self.store.devices.index_of(id)?;
            if !there.is_some_and(|it| it.has_all_of(&data.index)) {
                made.push((id, data));
            }
        }
        if state.data.is_empty() {
            return Ok(());
        }
        if !made.is_empty() {
            self.store.root.make(devices::DATA, mode_of(devices::DATA))?;
            // Also where another import has just made it, which may not have synced it yet.
            self.store.root.sync()?;
        }
        let directory = self.store.devices.directory.there()?;
        let mut sealer = super::commit::Sealer::new(self);
        for (id, made) in &made {
            let name = devices::blob_name(id);
            let there = directory.stat(&name)?;
            if there.is_none() {
                self.place(made.blob, Found::Here(made.blob), directory, &name)?;
            } else if self.lacks_objects(id)? {
                tracing::debug!(name, "replacing a data blob that lacks objects");
                self.replace(made.blob, directory, &name)?;
            } else {
                self.place(made.blob, Found::Better(made.blob), directory, &name)?;
            }
            sealer.seal(directory, &name);
        }
        // Also what another import has published, and perhaps not synced yet.
        directory.sync()?;
        for (id, made) in &made {
            let number = made.index_file.to_string();
            self.work.directory.rename_over(number, directory, devices::index_name(id))?;
        }
        if !made.is_empty() {
            directory.sync()?;
        }
        self.store.devices.forget_indexes();
        Ok(())
    }

    /// Whether a blob that is there is as its index says, which knows fewer objects than an import has: `gc` made holes,
    /// or a crash or a repair left no index.
    fn lacks_objects(&self, blob: &DeviceId) -> Result<bool, DiskError> {
        let has_none =
            self.store.devices.directory.there()?.stat(devices::index_name(blob))?.is_none();
        let index = self.store.devices.index_of(blob)?;
        Ok(has_none || index.is_some())
    }

    /// Every data blob that a new image has as a device is one that this import made or has found.
    pub(super) fn check_devices(&self, state: &State) -> Result<(), super::TransactionError> {
        for (item, found) in &state.users {
            let (StoreItem::Image(image), Some(number)) = (item, found.number()) else { continue };
            let file = self.read_back(number)?;
            let size = file.metadata().map(|it| it.len());
            let size = size
                .map_err(|source| self.work.directory.failed("stat", number.to_string(), source))?;
            let file = crate::shelf::images::ImageFile::new(file, size);
            // What is no image is found when it is opened.
            let Ok(devices) = crate::shelf::images::devices(&file) else { continue };
            for device in devices.uses {
                let blob = match device.blob {
                    Some(blob) if state.data.contains_key(&blob) => continue,
                    Some(blob) => blob.to_string(),
                    None => "that is none of a store's".to_owned(),
                };
                return Err(super::TransactionError::NoDevice { image: Box::new(*image), blob });
            }
        }
        Ok(())
    }
}
