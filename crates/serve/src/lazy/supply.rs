//! Supplies the service from its store: with indexes, with traces, and by completing images.

pub(super) mod starts;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use store::{Form, IndexWindows, Presence, Seconds, Store, Trace};
use transfer::import::{self, BUDGET, Completed, ImportContext};
use transfer::lazy::LayerIndex;

use super::blob_sources::StoreBlobs;
use super::fill::LayerSource;
use crate::any_error::AnyError;

/// The name with which a mount requests no trace.
pub const NO_TRACE: &str = "none";

/// The resources of imports that a service runs. They show no progress.
#[derive(Debug)]
pub struct ImportResources {
    /// The clock.
    pub now: fn() -> Seconds,
    /// Number of threads of an import.
    pub threads: NonZeroUsize,
    /// Directory for unfinished files.
    pub scratch: PathBuf,
}

impl ImportResources {
    /// Returns the parameters of an import that ends when `cancel` is set.
    #[must_use]
    pub fn until<'a>(&'a self, cancel: &'a AtomicBool) -> ImportContext<'a> {
        ImportContext {
            now: (self.now)(),
            threads: self.threads,
            budget: BUDGET,
            scratch: &self.scratch,
            progress: &|_| {},
            cancel,
        }
    }
}

/// Supplies indexes and blobs from the store, and from the registries that its images came from.
pub struct Supply<'a> {
    store: &'a Store,
    blobs: StoreBlobs<'a>,
    /// Returns the name of the trace for mounts that name none. Called for each mount.
    usual_trace: &'a (dyn Fn() -> String + Sync),
    resources: &'a ImportResources,
    /// Called before the images of a sealed device are completed; `None` except in tests.
    sealed: Option<Box<SealedHook>>,
}

/// Called with a sealed device. An error delays the completion of its images.
type SealedHook = dyn Fn(&DeviceId) -> Result<(), AnyError> + Send + Sync;

impl std::fmt::Debug for Supply<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Supply").field("resources", &self.resources).finish_non_exhaustive()
    }
}

impl<'a> Supply<'a> {
    /// Creates a supply for a store, whose blobs come from `blobs`.
    #[must_use]
    pub fn new(
        store: &'a Store,
        blobs: StoreBlobs<'a>,
        usual_trace: &'a (dyn Fn() -> String + Sync),
        resources: &'a ImportResources,
    ) -> Self {
        Self { store, blobs, usual_trace, resources, sealed: None }
    }

    /// Sets a function that is called before the images of a sealed device are completed. An error delays that.
    #[must_use]
    pub fn with_sealed(
        self,
        sealed: impl Fn(&DeviceId) -> Result<(), AnyError> + Send + Sync + 'static,
    ) -> Self {
        Self { sealed: Some(Box::new(sealed)), ..self }
    }

    /// Returns the index of a device for the image of a manifest, or any index of the device without a manifest.
    /// `None` if there is none.
    ///
    /// # Errors
    /// If an index exists, but cannot be used.
    pub(super) fn index(
        &self,
        device: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<LayerIndex>, AnyError> {
        let Some(index) = LayerIndex::load(self.store, device, manifest)? else { return Ok(None) };
        let mut sources = Vec::new();
        // A damaged record must not prevent other images from getting their bytes, and downloaded bytes need no
        // source. Only registries of images with this device are asked for its layers. An image may be in use although
        // it has lost its name.
        for image in self.images_with(device)? {
            match transfer::lazy::sources(self.store, &image) {
                Ok(found) => sources.extend(found),
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::warn!(%image, error, "cannot determine the origin of an image");
                }
            }
        }
        // Another image with this device may come from a registry that does not respond, so the registries of this
        // image are tried first.
        sources.sort_by_key(|it| it.digest() != manifest);
        self.blobs.know((manifest.copied(), index.head.blob), &sources);
        if let IndexWindows::Blob(windows) = &index.windows {
            self.blobs.know((manifest.copied(), *windows), &sources);
        }
        Ok(Some(index))
    }

    /// Returns the source of the blob of this index, for the image of this manifest.
    pub(super) fn source(&self, index: &LayerIndex, manifest: Option<&Digest>) -> LayerSource<'_> {
        let manifest = manifest.copied();
        let host = self.blobs.first_host((manifest, index.head.blob));
        LayerSource { blobs: Box::new(self.blobs.for_manifest(manifest)), manifest, host }
    }

    /// Connects in the background to the source of the blob of this index, so that its first reader need not wait for
    /// that.
    pub(super) fn connect_ahead(
        &self,
        index: &LayerIndex,
        manifest: Option<&Digest>,
        limit: Duration,
    ) {
        self.blobs.connect_ahead((manifest.copied(), index.head.blob), limit);
    }

    /// Returns a trace of an image, or `None` if it has none with this name. Without a name, returns the default
    /// trace.
    ///
    /// # Errors
    /// If the trace cannot be used.
    pub(super) fn trace(
        &self,
        image: &ImageId,
        name: Option<&str>,
    ) -> Result<Option<Trace>, AnyError> {
        let usual = (self.usual_trace)();
        let name = name.unwrap_or(&usual);
        if name == NO_TRACE {
            return Ok(None);
        }
        Ok(self.store.downloads.traces(image)?.get(name).cloned())
    }

    /// Keeps the windows of an index that came without them. If that fails, they are fetched again after the next
    /// start of the service.
    pub(super) fn keep_windows(&self, device: &DeviceId, manifest: &Digest, groups: &[u8]) {
        if let Err(error) = self.store.add_windows(device, manifest, groups) {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(%device, error, "cannot keep the windows of an index");
        }
    }

    /// Returns the byte ranges of the files in a device, in order of their offsets, to prefetch the rest of a file.
    /// Empty if they are unknown.
    pub(super) fn files(&self, device: &DeviceId) -> Vec<Range<u64>> {
        let images = self.images_with(device).unwrap_or_default();
        let Some(image) = images.first() else { return Vec::new() };
        self.store.file_places(image, device).unwrap_or_else(|error| {
            let error: &dyn std::error::Error = &error;
            tracing::debug!(%device, error, "cannot determine the positions of files on a device");
            Vec::new()
        })
    }

    /// Completes the images that have all of their bytes now. Called when all bytes of a device are downloaded,
    /// synced and verified, and again later if it fails. Returns soon after `cancel` is set.
    ///
    /// # Errors
    /// If an image cannot be completed.
    pub(super) fn sealed(&self, device: &DeviceId, cancel: &AtomicBool) -> Result<(), AnyError> {
        if let Some(sealed) = &self.sealed {
            sealed(device)?;
        }
        let named = self.store.refs.all()?.into_iter();
        let named = named.filter(|it| it.1.form == Form::Tar);
        let named = named.filter_map(|it| Some((it.1.image, it.1.manifest?)));
        // A container keeps using its image even if the name now refers to another image.
        let used = self.store.containers.all()?.into_iter();
        let used = used.filter_map(|it| Some((it.1.image, it.1.manifest?)));
        // A snapshot needs the image of a container that may be gone.
        let snapshots = self.store.container_snapshots.all()?.into_iter();
        let of_snapshots = snapshots.filter_map(|(_, it)| it.ok());
        let of_snapshots = of_snapshots.filter_map(|it| Some((it.image, it.manifest?)));
        // Images of engines have no names.
        let (snapshots, damaged) = self.store.snapshots.all()?;
        for error in damaged {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "cannot determine the image of a snapshot");
        }
        let of_engines = snapshots.iter().filter_map(|it| it.record.content()?.lazy);
        let of_engines = of_engines.map(|it| (it.image, it.manifest));
        let mut images = BTreeSet::new();
        for (image, manifest) in named.chain(used).chain(of_snapshots).chain(of_engines) {
            // The second condition holds if an import has added the device while it was being filled.
            if self.store.lazy_devices(&image)?.contains(device)
                || self.store.presence_of(&image, Some(&manifest))? == Presence::Unproven
            {
                images.insert((image, manifest));
            }
        }
        // If one image cannot be completed, the remaining images are still completed.
        let done = images.iter().map(|it| self.complete(&it.0, &it.1, cancel));
        let done: Vec<_> = done.collect();
        done.into_iter().collect()
    }

    /// Returns all images with this incomplete device. An image that cannot be read is skipped.
    fn images_with(&self, device: &DeviceId) -> Result<Vec<ImageId>, store::DiskError> {
        let has = |image: &ImageId| match self.store.lazy_devices(image) {
            Ok(devices) => devices.contains(device),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(%image, error, "cannot determine the devices of an image");
                false
            }
        };
        Ok(self.store.images.ids()?.into_iter().filter(has).collect())
    }

    /// Completes an image if all bytes of its devices are downloaded.
    fn complete(
        &self,
        image: &ImageId,
        manifest: &Digest,
        cancel: &AtomicBool,
    ) -> Result<(), AnyError> {
        self.blobs.know_layers(image, manifest)?;
        let environment = self.resources.until(cancel);
        let blobs = self.blobs.for_manifest(Some(*manifest));
        match import::complete(self.store, image, manifest, &blobs, &environment)? {
            Completed::NotYet => {}
            Completed::Same => tracing::info!(%image, "an image is complete"),
            Completed::Other(right) => tracing::error!(
                %image,
                %right,
                "the index of the image is wrong, or was made with other options: its layers make \
                another image, which now has its names; stop the containers that run from it"
            ),
        }
        Ok(())
    }
}
