//! Lists the contents of a store by name.

use std::path::PathBuf;

use image::verity::{DeviceId, ImageId, ObjectId};

use crate::disk::DiskError;
use crate::shelf::Listing;
use crate::shelf::blob_file::BlobFile;
use crate::shelf::devices::DataFile;
use crate::store::Store;
use image::digest::Digest;

/// The items of a store, sorted by name, and the files that do not belong in a store.
#[derive(Debug, Default)]
pub(crate) struct Inventory {
    pub(crate) objects: Vec<ObjectId>,
    pub(crate) images: Vec<ImageId>,
    pub(crate) layers: Vec<Digest>,
    pub(crate) manifests: Vec<Digest>,
    pub(crate) blobs: Vec<BlobFile>,
    pub(crate) devices: Vec<DeviceId>,
    /// Ids of devices that have an index file.
    pub(crate) device_indexes: Vec<DeviceId>,
    /// Paths of files that do not belong in a store.
    pub(crate) strays: Vec<PathBuf>,
}

impl Inventory {
    /// Lists images first, so that the list of objects, which is made later, contains all objects that these images
    /// need.
    pub(crate) fn from_store(store: &Store) -> Result<Self, DiskError> {
        let mut strays = Vec::new();
        let images = taken(store.images.list()?, &mut strays);
        let layers = taken(store.layers.list()?, &mut strays);
        let manifests = taken(store.manifests.list()?, &mut strays);
        let blobs = taken(store.downloads.list()?, &mut strays);
        let (mut devices, mut device_indexes) = (Vec::new(), Vec::new());
        for file in taken(store.devices.list()?, &mut strays) {
            match file {
                DataFile::Device(id) => devices.push(id),
                DataFile::Index(id) => device_indexes.push(id),
            }
        }
        let objects = taken(store.objects.list()?, &mut strays);
        Ok(Self { objects, images, layers, manifests, blobs, devices, device_indexes, strays })
    }
}

fn taken<T>(listing: Listing<T>, strays: &mut Vec<PathBuf>) -> Vec<T> {
    strays.extend(listing.strays);
    listing.names
}
