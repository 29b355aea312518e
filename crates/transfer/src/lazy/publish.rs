//! Stores indexes, and publishes images whose devices are filled later.

use std::io::Write as _;

use image::digest::Digest;
use image::erofs::read::{DeviceSlot, Image};
use image::verity::{DeviceId, ImageId};
use store::{
    Form, LazyDeviceError, LazyIndexDamage, OperationError, Origin, RefName, Reference, Seconds,
    Store, TransactionError,
};

use super::LayerIndex;

/// An image that is published before the contents of its devices are in the store.
#[derive(Debug, Clone, Copy)]
pub struct LazyImage<'a> {
    /// The EROFS image. A caller that did not make it must have compared it with an image that Quire made.
    pub image: &'a [u8],
    /// The expected id of the image.
    pub id: &'a ImageId,
    /// Digest of the manifest.
    pub manifest: &'a Digest,
    /// Documents that are stored with the image, each with its digest. They include the manifest and its config.
    pub documents: &'a [(&'a Digest, &'a [u8])],
    /// The index of each layer's device. Indexes of devices that the image does not have are ignored.
    pub indexes: &'a [LayerIndex],
    /// The name that the image gets in the store.
    pub name: &'a RefName,
    /// The origin of the image.
    pub origin: &'a Origin,
    /// Time of the publication.
    pub now: Seconds,
}

/// The outcome of publishing an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LazyPublished {
    /// The image was published. These devices are filled on demand, in the order of the indexes. The store has all
    /// bytes of the other devices.
    Lazy(Vec<DeviceId>),
    /// The store already has all bytes of the image's devices, and was not changed. If the image were published, it
    /// would count as complete without ever being compared with its layers. So the caller must import the layers from
    /// the devices.
    AllIsHere,
}

/// An error while a lazy image is published. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyPublishError {
    /// The bytes belong to another image.
    #[error("the image is not the requested one: its id is {actual}, not {expected}")]
    Image {
        /// The expected id.
        expected: Box<ImageId>,
        /// The id of the bytes.
        actual: Box<ImageId>,
    },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The transaction cannot be committed.
    #[error("cannot publish the image {image}")]
    Commit { image: Box<ImageId>, source: TransactionError },
}

impl LazyPublishError {
    /// Returns whether the publication failed because another image's unproven index describes a shared device
    /// differently, or because the store has only a part of the device.
    #[must_use]
    pub const fn is_contradiction(&self) -> bool {
        use LazyDeviceError::{Condemned, Indexed, OtherIndex, Trimmed};
        matches!(
            self,
            Self::Commit {
                source: TransactionError::LazyDevice(
                    OtherIndex(_) | Indexed { .. } | Condemned(_) | Trimmed(_)
                ),
                ..
            }
        )
    }
}

impl LayerIndex {
    /// Saves the index with its device. The index replaces any other index of the device, because it was made from
    /// all bytes.
    ///
    /// # Errors
    /// [`LazyDeviceError`] if the index cannot be written, or its windows were not fetched.
    pub fn save(&self, store: &Store) -> Result<(), LazyDeviceError> {
        let groups = self.windows.groups();
        let groups = groups.ok_or(LazyDeviceError::Index {
            device: self.head.device,
            source: LazyIndexDamage::NoWindows,
        })?;
        store.put_index(&self.head, groups)
    }

    /// Returns the index of a device for the image with this manifest: the index that came with the image, or else
    /// the index that was made in this store. Without a manifest, returns any index of the device.
    ///
    /// # Errors
    /// [`LazyDeviceError::Index`] if the index is damaged, or an error of the disk.
    pub fn load(
        store: &Store,
        device: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<Self>, LazyDeviceError> {
        let found = store.lazy_devices.index_for(device, manifest)?;
        Ok(found.map(|(head, windows)| Self { head, windows }))
    }
}

/// Adds an image of the form `tar` whose devices need not be in the store: empty devices are made, with their indexes.
/// The change is atomic. Existing devices of the store are used as they are. If the store has all of the devices, the
/// image is not published.
pub fn publish(store: &Store, lazy: &LazyImage<'_>) -> Result<LazyPublished, LazyPublishError> {
    let image = || Box::new(*lazy.id);
    let draft_failed = OperationError::of("add the image", lazy.id);
    let commit_failed = |source| LazyPublishError::Commit { image: image(), source };
    let import = store.begin().map_err(commit_failed)?;
    let mut devices = Vec::new();
    let read = Image::open(lazy.image).map_err(OperationError::of("read the image", lazy.id))?;
    let used: Vec<_> = read.devices().iter().filter_map(DeviceSlot::device_id).collect();
    for LayerIndex { head, windows } in lazy.indexes {
        // A layer without files in the image needs no device.
        if !used.contains(&head.device) {
            continue;
        }
        let added = import.lazy_device(head.clone(), windows.clone(), *lazy.manifest);
        if added.map_err(draft_failed)? {
            devices.push(head.device);
        }
    }
    if devices.is_empty() {
        return Ok(LazyPublished::AllIsHere);
    }
    let mut draft = import.image().map_err(draft_failed)?;
    let written = draft.write_all(lazy.image);
    written.map_err(OperationError::of("write the image", lazy.id))?;
    let actual = draft.finish().map_err(draft_failed)?;
    if actual != *lazy.id {
        let (expected, actual) = (image(), Box::new(actual));
        return Err(LazyPublishError::Image { expected, actual });
    }
    for (digest, bytes) in lazy.documents {
        let added = import.manifest(digest, bytes);
        added.map_err(OperationError::of("add a document of image", lazy.id))?;
    }
    let reference = Reference {
        image: *lazy.id,
        manifest: Some(*lazy.manifest),
        form: Form::Tar,
        created: lazy.now,
    };
    // The layers are not in the store, so the image is marked. The devices may also become complete without the
    // service that fills them.
    import.unproven(*lazy.id, *lazy.manifest);
    import.set_ref(lazy.name.clone(), reference);
    import.add_origin(*lazy.id, lazy.origin.clone());
    import.commit().map_err(commit_failed)?;
    Ok(LazyPublished::Lazy(devices))
}
