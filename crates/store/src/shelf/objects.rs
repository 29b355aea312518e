//! Objects stored as separate files: `objects/ab/cd…`.

use std::fs::File;
use std::sync::OnceLock;

use image::verity::{Algorithm, Id, ObjectId, VerityDigest};
use rustix::fs::{FileType, Mode, Stat};

use super::data_error::DataError;
use super::images::id_of;
use super::{Listing, is_file_of};
use crate::disk::{Directory, DiskError, Listed, length};

/// An error while an object is looked up or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectLookupError {
    /// The id uses another hash than the store.
    #[error("{0} is not a {1} id, the only kind in this store")]
    Algorithm(VerityDigest, Algorithm),
    #[error("object {0} is not in the store")]
    NoObject(ObjectId),
    /// A device is absent or damaged.
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// The directory `objects/`.
#[derive(Debug)]
pub(crate) struct ObjectShelf {
    pub(crate) directory: Directory,
    pub(crate) algorithm: Algorithm,
    /// The 256 directories for the first bytes of ids. Each is opened when it is first needed, and never removed.
    shards: Box<[OnceLock<Directory>; 256]>,
}

impl ObjectShelf {
    pub(crate) fn new(directory: Directory, algorithm: Algorithm) -> Self {
        Self { directory, algorithm, shards: Box::new([const { OnceLock::new() }; 256]) }
    }

    pub(crate) fn check_algorithm<K>(&self, id: &Id<K>) -> Result<(), ObjectLookupError> {
        if id.algorithm() == self.algorithm {
            return Ok(());
        }
        Err(ObjectLookupError::Algorithm(*id.digest(), self.algorithm))
    }

    /// Returns the directory of an object; `None` if it does not exist.
    pub(crate) fn shard(&self, id: &ObjectId) -> Result<Option<&Directory>, DiskError> {
        let first = id.as_bytes().first().copied().unwrap_or_default();
        let slot = &self.shards[usize::from(first)];
        if slot.get().is_none() {
            match self.directory.open_if_there(format!("{first:02x}"))? {
                None => return Ok(None),
                Some(shard) => drop(slot.set(shard)),
            }
        }
        Ok(slot.get())
    }

    /// As [`shard`](Self::shard), but creates the directory if it does not exist.
    pub(crate) fn make_shard(&self, id: &ObjectId, mode: Mode) -> Result<&Directory, DiskError> {
        if let Some(shard) = self.shard(id)? {
            return Ok(shard);
        }
        self.directory.make(split(id).0, mode)?;
        let gone = || self.directory.failed("open", "", rustix::io::Errno::NOENT);
        self.shard(id)?.ok_or_else(gone)
    }

    pub(crate) fn list(&self) -> Result<Listing<ObjectId>, DiskError> {
        let is_shard = |it: &Listed| {
            let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            let is_name = it.name.len() == 2 && it.name.iter().all(is_hex);
            (is_name && it.kind == FileType::Directory).then(|| it.name.clone())
        };
        let shards = Listing::read(&self.directory, is_shard)?;
        let mut found = Listing { names: Vec::new(), strays: shards.strays };
        let is_ours = |id: &ObjectId| id.algorithm() == self.algorithm;
        for name in shards.names {
            let shard = self.directory.open(&name)?;
            let id = |it: &Listed| id_of(&[&name[..], &it.name].concat()).filter(is_ours);
            let listed = Listing::read(&shard, id)?;
            found.names.extend(listed.names);
            found.strays.extend(listed.strays);
        }
        Ok(found)
    }

    /// Returns the metadata of the file with an object's name.
    pub(crate) fn stat(&self, id: &ObjectId) -> Result<Option<Stat>, DiskError> {
        let (shard, rest) = split(id);
        match self.directory.open_if_there(shard)? {
            Some(shard) => shard.stat(rest),
            None => Ok(None),
        }
    }

    /// Whether an object has a regular file, of any size.
    pub(crate) fn has(&self, id: &ObjectId) -> Result<bool, DiskError> {
        Ok(self.stat(id)?.is_some_and(|stat| is_file_of(&stat, length(&stat))))
    }

    pub(crate) fn open(&self, id: &ObjectId) -> Result<Option<(File, Stat)>, DiskError> {
        let (shard, rest) = split(id);
        match self.directory.open_if_there(shard)? {
            Some(shard) => shard.read(rest),
            None => Ok(None),
        }
    }
}

/// Splits an object's path into the shard's name and the file's name in the shard.
pub(crate) fn split(object: &ObjectId) -> (String, String) {
    let mut shard = object.to_string();
    let rest = shard.split_off(2);
    (shard, rest)
}
