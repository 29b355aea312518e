//! Indexes in the store, and images whose devices are filled later.

use std::io::{self, Write as _};

use image::digest::Digest;
use image::erofs::read::{DeviceSlot, Image, ReadError};
use image::verity::{DeviceId, ImageId};
use store::{
    DraftError, Form, LazyDeviceError, ManifestError, Origin, RefName, Reference, Seconds, Store,
    TransactionError,
};

use super::LayerIndex;

/// An image that is published before its devices are here.
#[derive(Debug, Clone, Copy)]
pub struct LazyImage<'a> {
    /// The EROFS image. Whoever has not made it has to have compared it with one that Quire made.
    pub image: &'a [u8],
    /// The id that the image is to have.
    pub id: &'a ImageId,
    /// The manifest's digest.
    pub manifest: &'a Digest,
    /// The documents that are kept with it, the manifest and its config among them: each with its digest.
    pub documents: &'a [(&'a Digest, &'a [u8])],
    /// The index of each layer's device. The devices that the image does not have are left out.
    pub indexes: &'a [LayerIndex],
    /// The name that it gets.
    pub name: &'a RefName,
    /// Where it came from.
    pub origin: &'a Origin,
    /// When.
    pub now: Seconds,
}

/// What became of an image that was to be published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LazyPublished {
    /// It is there. These of its devices are filled on demand, in the order of the indexes. The store has all bytes of the
    /// others.
    Lazy(Vec<DeviceId>),
    /// The store is as it was, since it has all bytes of the image's devices. It would take the image for complete, and
    /// nothing would compare it with what its layers make: they are to be imported from the devices.
    AllIsHere,
}

/// An error while a lazy image is published. The store is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LazyPublishError {
    /// The bytes are those of another image.
    #[error("the image is not the one that was asked for: its id is {actual}, not {expected}")]
    Image {
        /// The id that was asked for.
        expected: Box<ImageId>,
        /// The id of the bytes.
        actual: Box<ImageId>,
    },
    /// The bytes are no image.
    #[error("cannot read the image {image}")]
    Read {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: ReadError,
    },
    /// The image or a device cannot be added.
    #[error("cannot add the image {image}")]
    Draft {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: DraftError,
    },
    /// The image cannot be written.
    #[error("cannot write the image {image}")]
    Write {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: io::Error,
    },
    /// A document is not what its digest says, or cannot be written.
    #[error("cannot add a document of image {image}")]
    Document {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: Box<ManifestError>,
    },
    /// It cannot be committed.
    #[error("cannot publish the image {image}")]
    Commit {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: TransactionError,
    },
}

impl LazyPublishError {
    /// Whether the publication failed because another image's unproven index describes a shared device differently.
    #[must_use]
    pub const fn is_contradiction(&self) -> bool {
        use LazyDeviceError::{Condemned, Indexed, OtherIndex};
        matches!(
            self,
            Self::Commit {
                source: TransactionError::LazyDevice(OtherIndex(_) | Indexed { .. } | Condemned(_)),
                ..
            }
        )
    }
}

impl LayerIndex {
    /// Keeps the index with its device, in the place of any that the device has: it was made from all bytes.
    ///
    /// # Errors
    /// [`LazyDeviceError`] when it cannot be written.
    pub fn save(&self, store: &Store) -> Result<(), LazyDeviceError> {
        store.put_index(&self.head, &self.windows)
    }

    /// The index of a device that a store has for the image of a manifest: the one that came with it, or else the one that was
    /// made here. Without a manifest it is any.
    ///
    /// # Errors
    /// [`LazyDeviceError::Index`] when it is damaged, or an error of the disk.
    pub fn load(
        store: &Store,
        device: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<Self>, LazyDeviceError> {
        let found = store.lazy_devices.index_for(device, manifest)?;
        Ok(found.map(|(head, windows)| Self { head, windows }))
    }
}

/// Adds an image of the form `tar` whose devices need not be here: empty ones are made with their indexes. All of it is
/// there at once, or nothing. Devices that the store has are taken as they are; if it has all, nothing is published.
///
/// # Errors
/// [`LazyPublishError`].
pub fn publish(store: &Store, lazy: &LazyImage<'_>) -> Result<LazyPublished, LazyPublishError> {
    let image = || Box::new(*lazy.id);
    let draft_failed = |source| LazyPublishError::Draft { image: image(), source };
    let commit_failed = |source| LazyPublishError::Commit { image: image(), source };
    let import = store.begin().map_err(commit_failed)?;
    let mut devices = Vec::new();
    let read = Image::open(lazy.image);
    let read = read.map_err(|source| LazyPublishError::Read { image: image(), source })?;
    let used: Vec<_> = read.devices().iter().filter_map(DeviceSlot::device_id).collect();
    for LayerIndex { head, windows } in lazy.indexes {
        // Of a layer whose files are none of the image's, nothing is needed.
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
    written.map_err(|source| LazyPublishError::Write { image: image(), source })?;
    let actual = draft.finish().map_err(draft_failed)?;
    if actual != *lazy.id {
        let (expected, actual) = (image(), Box::new(actual));
        return Err(LazyPublishError::Image { expected, actual });
    }
    for (digest, bytes) in lazy.documents {
        let added = import.manifest(digest, bytes);
        added.map_err(|source| LazyPublishError::Document {
            image: image(),
            source: Box::new(source),
        })?;
    }
    let reference = Reference {
        image: *lazy.id,
        manifest: Some(*lazy.manifest),
        form: Form::Tar,
        created: lazy.now,
    };
    // Its layers are elsewhere. The devices may come in other ways than from who fills them.
    import.unproven(*lazy.id, *lazy.manifest);
    import.set_ref(lazy.name.clone(), reference);
    import.add_origin(*lazy.id, lazy.origin.clone());
    import.commit().map_err(commit_failed)?;
    Ok(LazyPublished::Lazy(devices))
}
