//! Items of a store, of any kind.

use std::fmt;

use image::verity::{DeviceId, ImageId, ObjectId};

use super::blob_file::BlobFile;
use super::devices::{device_name, index_name};
use super::lazy_device_file::LazyDeviceFile;
use super::objects::split;
use image::digest::Digest;

/// An item of a store: its kind and its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum StoreItem {
    /// An object stored as a file.
    Object(ObjectId),
    Image(ImageId),
    Layer(Digest),
    /// A manifest, config or index.
    Manifest(Digest),
    /// A file of a pull.
    Blob(BlobFile),
    Device(DeviceId),
    DeviceIndex(DeviceId),
    /// A file of a lazy device.
    LazyDevice(LazyDeviceFile),
    Ref(String),
    /// Directory of a container.
    Container(String),
    /// Id of a container's snapshot.
    ContainerSnapshot(String),
    /// Instance name and number of a container engine's snapshot.
    Snapshot(String, u64),
    Volume(String),
    Network(String),
    /// A directory that a dead command left in `tmp/`.
    Leftover(String),
}

impl StoreItem {
    /// Kind of the item, in one to four words.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Object(_) => "object",
            Self::Image(_) => "image",
            Self::Layer(_) => "layer",
            Self::Manifest(_) => "manifest",
            Self::Blob(file) => file.kind(),
            Self::Device(_) => "device",
            Self::DeviceIndex(_) => "device index",
            Self::LazyDevice(file) => file.kind(),
            Self::Ref(_) => "name",
            Self::Container(_) => "container",
            Self::ContainerSnapshot(_) => "container snapshot",
            Self::Snapshot(..) => "snapshot",
            Self::Volume(_) => "volume",
            Self::Network(_) => "network",
            Self::Leftover(_) => "leftover",
        }
    }

    /// Id, digest or name of the item.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Object(id) => id.to_string(),
            Self::Image(id) => id.to_string(),
            Self::Layer(digest) | Self::Manifest(digest) => digest.to_string(),
            Self::Blob(file) => file.name(),
            Self::Device(id) | Self::DeviceIndex(id) => id.to_string(),
            Self::LazyDevice(file) => file.device().to_string(),
            Self::Snapshot(instance, number) => format!("{instance}/{number}"),
            Self::Ref(name)
            | Self::Container(name)
            | Self::ContainerSnapshot(name)
            | Self::Volume(name)
            | Self::Network(name)
            | Self::Leftover(name) => name.clone(),
        }
    }

    /// Name of the item's file in its directory.
    pub(crate) fn file_name(&self) -> String {
        match self {
            Self::Object(id) => split(id).1,
            Self::Layer(digest) | Self::Manifest(digest) => digest.file_name(),
            Self::Blob(file) => file.file_name(),
            Self::Device(id) => device_name(id),
            Self::DeviceIndex(id) => index_name(id),
            Self::LazyDevice(file) => file.file_name(),
            Self::Image(_)
            | Self::Ref(_)
            | Self::Container(_)
            | Self::ContainerSnapshot(_)
            | Self::Snapshot(..)
            | Self::Volume(_)
            | Self::Network(_)
            | Self::Leftover(_) => self.name(),
        }
    }
}

impl fmt::Display for StoreItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.name())
    }
}
