//! Imports lazily pulled images from their devices once all bytes of these are downloaded, and compares the images.

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
    DraftError, Form, LazyDeviceError, LazyDeviceState, OperationError, RefName, Reference, Store,
    UnprovenError,
};

use crate::chunked::Tar;
use crate::import::layers::{LayerBlob, LayerProof, LayerSource, SourceImage};
use crate::import::{ImportContext, ImportError, ImportOptions, ImportRun, LayerFailure, Origins};
use crate::stored::{StoredError, StoredImage};
use image::digest::Digest;

/// The result of completing an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completed {
    /// Bytes of a device are missing.
    NotYet,
    /// The image is complete, and equals the image that a pull of its layers makes.
    Same,
    /// The layers make another image, because the index was wrong or made with other options. The names of this
    /// manifest now refer to that image.
    Other(ImageId),
}

/// Why an image cannot be completed. The image is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompleteError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    #[error(transparent)]
    Device(#[from] LazyDeviceError),
    /// The manifest or config cannot be loaded.
    #[error(transparent)]
    Documents(#[from] StoredError),
    /// There is no readable record of the manifests whose layers the image must match.
    #[error("cannot determine the layers of image {image}: pull its name again")]
    Mark {
        image: Box<ImageId>,
        /// The cause, if the record cannot be read.
        source: Option<UnprovenError>,
    },
}

/// Use of the files of sealed devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileUse {
    /// The files become the layers' devices.
    Moved,
    Copied,
}

/// Completes an image whose lazy devices are sealed: imports its layers from them, as a pull of its layers does, and
/// compares the images. Each diff id is compared. A layer that has no device, or whose device does not contain its
/// tar, is read from its blob in `blobs`.
pub fn complete(
    store: &Store,
    image: &ImageId,
    manifest: &Digest,
    blobs: &dyn BlobSource,
    environment: &ImportContext<'_>,
) -> Result<Completed, CompleteError> {
    let opened = OperationError::of("open", "the image");
    for device in store.lazy_devices(image).map_err(opened)? {
        // If the device does not exist any more, another process has just completed it.
        let info = store.lazy_devices.stat(&device)?;
        if info.is_some_and(|it| it.state != LazyDeviceState::Sealed) {
            return Ok(Completed::NotYet);
        }
    }
    let documents = StoredImage::load(store, manifest)?;
    let devices = store.open_names(image).map_err(opened)?.devices;
    let tars: Vec<_> =
        devices.iter().flat_map(|it| LayerTar::list(store, &it.0, manifest)).collect();
    let layers = DeviceLayers { store, documents: &documents, tars: &tars, blobs };
    let work = Work { image, layers };
    let names = work.names()?;
    let done = match work.import(environment, &names, FileUse::Moved) {
        // The index was forged or made by another version: the device contains the layer's tar and other data.
        Err(ImportError::Object(DraftError::OtherDevice { expected, .. })) => {
            tracing::warn!(device = %expected, "the layer makes a device with another id");
            work.import(environment, &names, FileUse::Copied)
        }
        done => done,
    };
    let object = format_args!("image {image} from its devices");
    let made = done.map_err(OperationError::of("import", object))?;
    Ok(if made == *image { Completed::Same } else { Completed::Other(made) })
}

/// Compares an image that was made from an index with the layers of the manifest that it is used for, as [`complete`]
/// does. Claims of other manifests do not count: each manifest is compared when it is used. Without a manifest, the
/// manifests in the image's mark are tried in turn until the layers of one of them make the image. Returns
/// [`Completed::Same`] for an image that was already compared.
pub fn prove(
    store: &Store,
    image: &ImageId,
    manifest: Option<&Digest>,
    blobs: &dyn BlobSource,
    environment: &ImportContext<'_>,
) -> Result<Completed, CompleteError> {
    let is_unproven = store.downloads.is_unproven_for(image, manifest);
    if !is_unproven.map_err(|error| CompleteError::Device(error.into()))? {
        return Ok(Completed::Same);
    }
    if let Some(manifest) = manifest {
        return complete(store, image, manifest, blobs, environment);
    }
    let (marked, source) = match store.downloads.unproven(image) {
        Ok(marked) => (marked.unwrap_or_default(), None),
        // If the image is imported again by its name, it gets a new mark.
        Err(error) => (BTreeSet::new(), Some(error)),
    };
    let mut last = Err(CompleteError::Mark { image: Box::new(*image), source });
    for manifest in &marked {
        match complete(store, image, manifest, blobs, environment) {
            done @ Ok(Completed::Same | Completed::NotYet) => return done,
            // Another manifest may match.
            done @ (Ok(Completed::Other(_)) | Err(_)) => last = done,
        }
    }
    last
}

/// Imports an image that the store does not have, as [`complete`] does. All bytes of the devices that `heads`
/// describe must be in the store. The heads are not trusted.
#[cfg(feature = "registry")]
pub(crate) fn import_here<'h>(
    store: &Store,
    documents: &StoredImage,
    heads: impl IntoIterator<Item = &'h Head>,
    blobs: &dyn BlobSource,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
    origins: Origins,
) -> Result<ImageId, ImportError> {
    let tars: Vec<_> = heads.into_iter().map(|head| LayerTar::named(head, false)).collect();
    let layers = DeviceLayers { store, documents, tars: &tars, blobs };
    let found = layers.found(FileUse::Copied);
    Ok(crate::import::import_found(store, &found, origins, environment, options)?.image)
}

/// The location of a layer's tar.
#[derive(Debug, Clone, Copy)]
struct LayerTar {
    device: DeviceId,
    diff_id: Digest,
    /// Length of the tar in bytes. The device may contain other data after the tar.
    bytes: u64,
    is_sealed: bool,
}

impl LayerTar {
    /// Lists the tars that the device's indexes describe. The index of the manifest comes first. The indexes are not
    /// trusted: each tar must have its diff id.
    fn list(store: &Store, device: &DeviceId, manifest: &Digest) -> Vec<Self> {
        let own = store.lazy_devices.index_head_for(device, Some(manifest)).ok().flatten();
        let others = store.lazy_devices.heads(device).unwrap_or_default();
        let info = store.lazy_devices.stat(device);
        // A device that is not sealed may have holes, even if another import has added the whole device.
        let is_sealed = matches!(info, Ok(Some(it)) if it.state == LazyDeviceState::Sealed);
        // Devices of chunks contain no tar.
        let heads = own.iter().chain(&others).filter(|it| !it.kind.is_of_chunks());
        heads.map(|head| Self::named(head, is_sealed)).collect()
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

/// The layers of an image, some of which are in devices.
struct DeviceLayers<'a> {
    store: &'a Store,
    documents: &'a StoredImage,
    tars: &'a [LayerTar],
    blobs: &'a dyn BlobSource,
}

impl Work<'_> {
    /// Returns the names that refer to this manifest. Another manifest may claim that other layers make the same
    /// image.
    fn names(&self) -> Result<Vec<(RefName, Reference)>, CompleteError> {
        let all = self.layers.store.refs.all();
        let all = all.map_err(OperationError::of("look up the names of image", self.image))?;
        let manifest = Some(self.layers.documents.digest);
        let is_of = |it: &Reference| it.image == *self.image && it.manifest == manifest;
        Ok(all.into_iter().filter(|it| is_of(&it.1)).collect())
    }

    fn import(
        &self,
        environment: &ImportContext<'_>,
        names: &[(RefName, Reference)],
        files: FileUse,
    ) -> Result<ImageId, ImportError> {
        let start = Instant::now();
        let store = self.layers.store;
        let options = ImportOptions { form: Form::Tar, ..ImportOptions::default() };
        // The image's origin is already recorded.
        let origins = store.downloads.origins(self.image).map_err(ImportError::origin)?;
        let run = ImportRun::begin(store, environment, &options)?.from(Origins::Same(origins));
        let made = run.layers(&self.layers.found(files))?;
        let image = made.written.as_ref().map_or(*self.image, |it| it.image);
        for (name, reference) in names.iter().filter(|_| image != *self.image) {
            run.transaction.expect_ref(name.clone(), *self.image);
            run.transaction.set_ref(name.clone(), Reference { image, ..*reference });
        }
        Ok(run.finish(made, None, start)?.image)
    }
}

impl DeviceLayers<'_> {
    fn found(&self, files: FileUse) -> SourceImage<'_> {
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
            title: LayerProof::Blob,
            is_wanted: false,
        });
        SourceImage {
            layers: layers.collect(),
            manifest: Some((*digest, manifest_bytes.clone())),
            config: Some((manifest.config.digest, config_bytes.clone())),
            name: None,
        }
    }
}

/// A layer that is read from its tar in a device, or else from its blob.
struct HereOrThere<'a> {
    of: &'a DeviceLayers<'a>,
    layer: &'a Descriptor,
    tar: Option<&'a LayerTar>,
    files: FileUse,
}

impl LayerBlob for HereOrThere<'_> {
    fn open(&mut self, failure: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>> {
        let Descriptor { digest, size, .. } = self.layer;
        failure.is_none().then(|| self.of.blobs.blob(digest, *size, 0..*size))
    }

    fn open_tar(&mut self) -> Result<Option<Tar<'_>>, LayerFailure> {
        let Some(tar) = self.tar else { return Ok(None) };
        let Some(file) = tar.open(self.of.store) else { return Ok(None) };
        let is_moved = tar.is_sealed && self.files == FileUse::Moved;
        Ok(Some(Tar {
            reader: Box::new(file.take(tar.bytes)),
            sealed: is_moved.then_some(tar.device),
            skipped: self.layer.size,
            fetched: Arc::default(),
        }))
    }
}
