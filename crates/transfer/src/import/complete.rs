//! Images that came without their layers, once all bytes of their devices are here: they are imported from these.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use image::lazy::Head;
use image::verity::{DeviceId, ImageId};
use oci::blobs::BlobSource;
use oci::manifest::Descriptor;
use store::{
    DraftError, Form, LazyDeviceError, LazyDeviceState, OpenImageError, RefName, Reference, Store,
    UnprovenError,
};

use super::layers::{Found, LayerBlob, LayerSource, Title};
use super::{ImportContext, ImportError, ImportOptions, Job, LayerFailure, Origins};
use crate::chunked::Tar;
use crate::stored::{StoredError, StoredImage};
use image::digest::Digest;

/// What became of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completed {
    /// Bytes of a device are missing.
    NotYet,
    /// All of it is here, and it is the image that a pull of its layers makes.
    Same,
    /// Its layers make another image: its index was wrong, or made with other options. The names of this manifest stand for
    /// that one now.
    Other(ImageId),
}

/// Why an image cannot be made complete. It is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompleteError {
    /// The image cannot be opened.
    #[error("cannot open the image")]
    Image(#[source] Box<OpenImageError>),
    /// A device cannot be read.
    #[error(transparent)]
    Device(#[from] LazyDeviceError),
    /// Its manifest or config.
    #[error(transparent)]
    Documents(#[from] StoredError),
    /// Its names cannot be read.
    #[error("cannot look up the names of image {image}")]
    Names {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It cannot be told which layers it is to be compared with.
    #[error("cannot tell which layers image {image} is to be compared with: pull its name again")]
    Mark {
        /// The image.
        image: Box<ImageId>,
        /// The cause, if the mark cannot be read.
        source: Option<UnprovenError>,
    },
    /// The import.
    #[error("cannot import image {image} from its devices")]
    Import {
        /// The image.
        image: Box<ImageId>,
        /// The cause.
        source: ImportError,
    },
}

/// What becomes of the files of sealed devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Files {
    /// They become the layers' devices.
    Moved,
    /// They are copied.
    Copied,
}

/// Makes an image complete whose lazy devices are sealed: imports its layers from them, as a pull of its layers does, and
/// compares the images. Each diff id is compared. Where a device does not have its layer, and where a layer has no device,
/// the layer's blob is read from `blobs`.
///
/// # Errors
/// [`CompleteError`].
pub fn complete(
    store: &Store,
    image: &ImageId,
    manifest: &Digest,
    blobs: &dyn BlobSource,
    surroundings: &ImportContext<'_>,
) -> Result<Completed, CompleteError> {
    let opened = |source| CompleteError::Image(Box::new(source));
    for device in store.lazy_devices(image).map_err(opened)? {
        // One that is gone has become complete this moment.
        let info = store.lazy_devices.stat(&device)?;
        if info.is_some_and(|it| it.state != LazyDeviceState::Sealed) {
            return Ok(Completed::NotYet);
        }
    }
    let documents = StoredImage::load(store, manifest)?;
    let devices = store.open_names(image).map_err(opened)?.devices;
    let tars: Vec<_> = devices.iter().flat_map(|it| LayerTar::of(store, &it.0, manifest)).collect();
    let layers = DeviceLayers { store, documents: &documents, tars: &tars, blobs };
    let work = Work { image, layers };
    let names = work.names()?;
    let done = match work.import(surroundings, &names, Files::Moved) {
        // The device of an index whose maker lied, or had another version: it has the layer's tar, and something else.
        Err(ImportError::Object(DraftError::OtherDevice { expected, .. })) => {
            tracing::warn!(device = %expected, "the layer makes another device");
            work.import(surroundings, &names, Files::Copied)
        }
        done => done,
    };
    let made = done.map_err(|source| CompleteError::Import { image: Box::new(*image), source })?;
    Ok(if made == *image { Completed::Same } else { Completed::Other(made) })
}

/// Compares an image that came with an index with the layers of the manifest that it is to be used for, as [`complete`] does.
/// What other manifests claim does not count: each is compared when it is used. Without a manifest, those of its mark are
/// tried in turn until the layers of one make the image. An image that was compared already is [`Completed::Same`].
///
/// # Errors
/// [`CompleteError`].
pub fn prove(
    store: &Store,
    image: &ImageId,
    manifest: Option<&Digest>,
    blobs: &dyn BlobSource,
    surroundings: &ImportContext<'_>,
) -> Result<Completed, CompleteError> {
    let is_unproven = store.downloads.is_unproven_for(image, manifest);
    if !is_unproven.map_err(|error| CompleteError::Device(error.into()))? {
        return Ok(Completed::Same);
    }
    if let Some(manifest) = manifest {
        return complete(store, image, manifest, blobs, surroundings);
    }
    let (marked, source) = match store.downloads.unproven(image) {
        Ok(marked) => (marked.unwrap_or_default(), None),
        // An import makes it again, of what names say.
        Err(error) => (BTreeSet::new(), Some(error)),
    };
    let mut last = Err(CompleteError::Mark { image: Box::new(*image), source });
    for manifest in &marked {
        match complete(store, image, manifest, blobs, surroundings) {
            done @ Ok(Completed::Same | Completed::NotYet) => return done,
            // Another one may tell the truth.
            done @ (Ok(Completed::Other(_)) | Err(_)) => last = done,
        }
    }
    last
}

/// Imports an image that the store does not have, as [`complete`] does: all bytes of the devices are here that these heads
/// describe. Nothing of the heads is believed.
///
/// # Errors
/// [`ImportError`].
#[cfg(feature = "registry")]
pub(crate) fn import_here<'h>(
    store: &Store,
    documents: &StoredImage,
    heads: impl IntoIterator<Item = &'h Head>,
    blobs: &dyn BlobSource,
    surroundings: &ImportContext<'_>,
    (wishes, origins): (&ImportOptions<'_>, Origins),
) -> Result<ImageId, ImportError> {
    let tars: Vec<_> = heads.into_iter().map(|head| LayerTar::named(head, false)).collect();
    let layers = DeviceLayers { store, documents, tars: &tars, blobs };
    let found = layers.found(Files::Copied);
    Ok(super::import_found(store, &found, origins, surroundings, wishes)?.image)
}

/// Where the tar of a layer is.
#[derive(Debug, Clone, Copy)]
struct LayerTar {
    device: DeviceId,
    diff_id: Digest,
    /// Bytes of the tar, where the device has others behind it.
    bytes: u64,
    is_sealed: bool,
}

impl LayerTar {
    /// As the device's indexes say, that of the manifest first. Nothing is believed of that: the tar has to have its diff id.
    fn of(store: &Store, device: &DeviceId, manifest: &Digest) -> Vec<Self> {
        let own = store.lazy_devices.index_head_for(device, Some(manifest)).ok().flatten();
        let others = store.lazy_devices.heads(device).unwrap_or_default();
        let info = store.lazy_devices.stat(device);
        // One that is filled still has holes, though another import may have brought all of the device.
        let is_sealed = matches!(info, Ok(Some(it)) if it.state == LazyDeviceState::Sealed);
        own.iter().chain(&others).map(|head| Self::named(head, is_sealed)).collect()
    }

    const fn named(head: &Head, is_sealed: bool) -> Self {
        Self { device: head.device, diff_id: head.diff_id, bytes: head.tar_bytes, is_sealed }
    }

    fn open(&self, store: &Store) -> Option<File> {
        if self.is_sealed
            && let Ok(Some((file, _))) = store.lazy_devices.open(&self.device)
        {
            return Some(file);
        }
        store.devices.bytes_of(&self.device)
    }
}

struct Work<'a> {
    image: &'a ImageId,
    layers: DeviceLayers<'a>,
}

/// The layers of an image, of which some are in devices.
struct DeviceLayers<'a> {
    store: &'a Store,
    documents: &'a StoredImage,
    tars: &'a [LayerTar],
    blobs: &'a dyn BlobSource,
}

impl Work<'_> {
    /// Only those of this manifest: another one may say that the same image is made of other layers.
    fn names(&self) -> Result<Vec<(RefName, Reference)>, CompleteError> {
        let all = self.layers.store.refs.all().map_err(|source| CompleteError::Names {
            image: Box::new(*self.image),
            source: Box::new(source),
        })?;
        let manifest = Some(self.layers.documents.digest);
        let is_of = |it: &Reference| it.image == *self.image && it.manifest == manifest;
        Ok(all.into_iter().filter(|it| is_of(&it.1)).collect())
    }

    fn import(
        &self,
        surroundings: &ImportContext<'_>,
        names: &[(RefName, Reference)],
        files: Files,
    ) -> Result<ImageId, ImportError> {
        let start = Instant::now();
        let store = self.layers.store;
        let wishes = ImportOptions { form: Form::Tar, ..ImportOptions::default() };
        // Where the image came from is known already.
        let origins = store.downloads.origins(self.image).map_err(ImportError::Origin)?;
        let job = Job::begin(store, surroundings, &wishes)?.from(Origins::Same(origins));
        let made = job.layers(&self.layers.found(files))?;
        let image = made.written.as_ref().map_or(*self.image, |it| it.image);
        for (name, reference) in names.iter().filter(|_| image != *self.image) {
            job.transaction.expect_ref(name.clone(), *self.image);
            job.transaction.set_ref(name.clone(), Reference { image, ..*reference });
        }
        Ok(job.finish(made, None, start)?.image)
    }
}

impl DeviceLayers<'_> {
    fn found(&self, files: Files) -> Found<'_> {
        let StoredImage { digest, manifest_bytes, manifest, config_bytes, config } = self.documents;
        let layers = manifest.layers.iter().zip(config.diff_ids());
        let layers = layers.map(|(layer, diff_id)| LayerSource {
            name: layer.digest.to_string(),
            source: Mutex::new(Box::new(HereOrThere {
                of: self,
                layer,
                tar: self.tars.iter().find(|it| it.diff_id == *diff_id),
                files,
            })),
            media_type: layer.media_type.clone(),
            digest: Some(layer.digest),
            size: Some(layer.size),
            diff_id: Some(*diff_id),
            title: Title::Blob,
            is_wanted: false,
        });
        Found {
            layers: layers.collect(),
            manifest: Some((*digest, manifest_bytes.clone())),
            config: Some((manifest.config.digest, config_bytes.clone())),
            name: None,
        }
    }
}

/// A layer whose tar is in a device, or else its blob.
struct HereOrThere<'a> {
    of: &'a DeviceLayers<'a>,
    layer: &'a Descriptor,
    tar: Option<&'a LayerTar>,
    files: Files,
}

impl LayerBlob for HereOrThere<'_> {
    fn open(&mut self, failure: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>> {
        let Descriptor { digest, size, .. } = self.layer;
        failure.is_none().then(|| self.of.blobs.blob(digest, *size, 0..*size))
    }

    fn open_tar(&mut self) -> Result<Option<Tar<'_>>, LayerFailure> {
        let Some(tar) = self.tar else { return Ok(None) };
        let Some(file) = tar.open(self.of.store) else { return Ok(None) };
        let is_moved = tar.is_sealed && self.files == Files::Moved;
        Ok(Some(Tar {
            reader: Box::new(file.take(tar.bytes)),
            sealed: is_moved.then_some(tar.device),
            skipped: self.layer.size,
            fetched: Arc::default(),
        }))
    }
}
