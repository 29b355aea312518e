//! What is in a store, by name.

use std::path::PathBuf;

use image::verity::{DeviceId, ImageId, ObjectId};
use rustix::fs::FileType;

use crate::disk::DiskError;
use crate::shelf::devices::DataFile;
use crate::shelf::downloads::BlobFile;
use crate::shelf::images::id_of;
use crate::store::Store;
use image::digest::Digest;

/// Names, in order, and what has no place in a store.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    pub(crate) objects: Vec<ObjectId>,
    pub(crate) images: Vec<ImageId>,
    pub(crate) layers: Vec<Digest>,
    pub(crate) manifests: Vec<Digest>,
    pub(crate) blobs: Vec<BlobFile>,
    pub(crate) data_blobs: Vec<DeviceId>,
    /// Of data blobs, by the blob's name.
    pub(crate) data_indexes: Vec<DeviceId>,
    /// Paths of what no store puts there.
    pub(crate) strays: Vec<PathBuf>,
}

impl Inventory {
    /// Images first: what one of them needs is then listed with the objects.
    pub(crate) fn of(store: &Store) -> Result<Self, DiskError> {
        let mut found = Self::default();
        let algorithm = store.algorithm();
        for listed in store.images.directory.list()? {
            match id_of(&listed.name) {
                Some(id) if id.algorithm() == algorithm => found.images.push(id),
                _ => found.strays.push(store.images.directory.path_of(&listed.name)),
            }
        }
        for (directory, digests) in [
            (&store.layers.directory, &mut found.layers),
            (&store.manifests.directory, &mut found.manifests),
        ] {
            for listed in directory.list()? {
                match listed.text().and_then(Digest::from_file_name) {
                    Some(digest) => digests.push(digest),
                    None => found.strays.push(directory.path_of(&listed.name)),
                }
            }
            digests.sort_unstable();
        }
        for listed in store.downloads.directory.list()? {
            match listed.text().and_then(BlobFile::parse) {
                Some(file) => found.blobs.push(file),
                None => found.strays.push(store.downloads.directory.path_of(&listed.name)),
            }
        }
        found.blobs.sort_unstable();
        if let Some(data) = store.devices.directory.get()? {
            for listed in data.list()? {
                match DataFile::parse(&listed.name) {
                    Some(DataFile::Blob(id)) => found.data_blobs.push(id),
                    Some(DataFile::Index(id)) => found.data_indexes.push(id),
                    None => found.strays.push(data.path_of(&listed.name)),
                }
            }
        }
        for listed in store.objects.directory.list()? {
            let is_shard = listed.name.len() == 2
                && listed.name.iter().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
                && listed.kind == FileType::Directory;
            if !is_shard {
                found.strays.push(store.objects.directory.path_of(&listed.name));
                continue;
            }
            let shard = store.objects.directory.open(&listed.name)?;
            for file in shard.list()? {
                match id_of(&[&listed.name[..], &file.name].concat()) {
                    Some(id) if id.algorithm() == algorithm => found.objects.push(id),
                    _ => found.strays.push(shard.path_of(&file.name)),
                }
            }
        }
        Ok(found)
    }
}
