//! Fetches the bytes of layers, from blobs in the store and from the registries that their images came from.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Cursor, Read};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::ImageId;
use oci::blobs::{AskedPeers, BlobSource, FailingReader, PeerPart, Whole};
use oci::reference::Reference;
use oci::registry::{Registry, RegistryError, Settings};
use store::Store;
use transfer::StoredImage;
use transfer::lazy::KeptBlobs;

use crate::any_error::AnyError;
use crate::unpoisoned::lock;

/// How long layers of one repository share its connections and tokens after the first use. Later mounts see changed
/// logins, mirrors and certificates.
const SHARED: Duration = Duration::from_secs(60);

/// A source of blobs that is neither the store nor a registry.
pub struct OtherBlobs {
    /// Name of its host. Its readers cannot use up the threads of other hosts.
    pub host: String,
    /// Returns the blobs for the image of a manifest.
    pub of_image: Box<BlobsOfImage>,
}

/// Returns the blobs for the image of a manifest.
pub type BlobsOfImage = dyn Fn(Option<&Digest>) -> Arc<dyn BlobSource> + Send + Sync;

/// The blobs of all layers, in the store or at registries.
pub struct StoreBlobs<'a> {
    kept: KeptBlobs<'a>,
    /// Blobs in the store whose bytes seem wrong. The index may be wrong instead, so only that image
    /// stops using the blob.
    damaged: Mutex<BTreeSet<BlobKey>>,
    settings: Settings,
    /// The registries of each blob, in the order in which they are asked.
    registries: Mutex<BTreeMap<BlobKey, Vec<Arc<Registry>>>>,
    /// Recently created clients, by registry and repository.
    recent: Mutex<BTreeMap<(String, String), RecentRegistry>>,
    /// Asked after the registries; `None` except in tests.
    other: Option<OtherBlobs>,
}

impl std::fmt::Debug for OtherBlobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OtherBlobs").field("host", &self.host).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for StoreBlobs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreBlobs").finish_non_exhaustive()
    }
}

/// A blob as a layer of an image with this manifest, because each image has separate registries.
pub(super) type BlobKey = (Option<Digest>, Digest);

/// The blobs of one image.
#[derive(Debug)]
pub struct ImageBlobs<'b, 'a> {
    all: &'b StoreBlobs<'a>,
    manifest: Option<Digest>,
}

/// The time when a repository was first used, and its client.
type RecentRegistry = (Instant, Arc<Registry>);

impl<'a> StoreBlobs<'a> {
    /// Creates a source for a store, with the settings of registries.
    #[must_use]
    pub fn new(store: &'a Store, settings: Settings) -> Self {
        Self {
            kept: KeptBlobs(store),
            damaged: Mutex::default(),
            settings,
            registries: Mutex::default(),
            recent: Mutex::default(),
            other: None,
        }
    }

    /// Adds a source that is asked after the store and the registries.
    #[must_use]
    pub fn with_other(self, other: OtherBlobs) -> Self {
        Self { other: Some(other), ..self }
    }

    /// Finds the registries of all layers of an image, including layers without a device.
    ///
    /// # Errors
    /// If the store's records of the image cannot be read.
    pub fn know_layers(&self, image: &ImageId, manifest: &Digest) -> Result<(), AnyError> {
        let store = self.kept.0;
        let mut sources = transfer::lazy::sources(store, image)?;
        sources.sort_by_key(|it| it.digest() != Some(manifest));
        for layer in StoredImage::load(store, manifest)?.manifest.layers {
            let blob = (Some(*manifest), layer.digest);
            if self.registries(blob).is_empty() {
                self.know(blob, &sources);
            }
        }
        Ok(())
    }

    /// Returns the blobs for the image of a manifest.
    #[must_use]
    pub const fn for_manifest(&self, manifest: Option<Digest>) -> ImageBlobs<'_, 'a> {
        ImageBlobs { all: self, manifest }
    }

    /// Sets the registries of a blob. A registry with an invalid configuration is left out.
    pub(super) fn know(&self, blob: BlobKey, sources: &[Reference]) {
        let mut asked = BTreeSet::new();
        let new = sources.iter().filter(|it| asked.insert((it.registry(), it.repository())));
        let made = new.filter_map(|it| {
            let registry = self.registry(it);
            let failed = |error: &RegistryError| {
                let error: &dyn std::error::Error = error;
                tracing::error!(registry = it.registry(), error, "cannot use a registry");
            };
            registry.inspect_err(failed).ok()
        });
        let made = made.collect();
        lock(&self.registries).insert(blob, made);
    }

    /// Returns a client for the repository of `reference`. Layers that are mounted shortly after each other share it.
    fn registry(&self, reference: &Reference) -> Result<Arc<Registry>, RegistryError> {
        let mut recent = lock(&self.recent);
        recent.retain(|_, (made, _)| made.elapsed() < SHARED);
        let name = (reference.registry().to_owned(), reference.repository().to_owned());
        if let Some((_, registry)) = recent.get(&name) {
            return Ok(Arc::clone(registry));
        }
        let registry = Arc::new(Registry::new(reference, &self.settings)?);
        recent.insert(name, (Instant::now(), Arc::clone(&registry)));
        Ok(registry)
    }

    /// Connects in the background to the registry that is asked first for a blob, unless the store has the blob.
    pub(super) fn connect_ahead(&self, blob: BlobKey, limit: Duration) {
        let (manifest, digest) = blob;
        if let Some(registry) = self.for_manifest(manifest).registry_without_blob(&digest) {
            registry.connect_ahead(&digest, limit);
        }
    }

    /// Returns the host that is asked first for a blob that the store lacks.
    pub(super) fn first_host(&self, blob: BlobKey) -> Option<String> {
        let first = self.registries(blob).first().map(|it| it.registry().into());
        first.or_else(|| self.other.as_ref().map(|it| it.host.clone()))
    }

    fn registries(&self, blob: BlobKey) -> Vec<Arc<Registry>> {
        let all = lock(&self.registries);
        let (manifest, digest) = blob;
        let any = || all.iter().find(|it| manifest.is_none() && it.0.1 == digest).map(|it| it.1);
        all.get(&blob).or_else(any).cloned().unwrap_or_default()
    }
}

impl ImageBlobs<'_, '_> {
    /// Returns the first registry of a blob, unless the blob is in the store.
    fn registry_without_blob(&self, blob: &Digest) -> Option<Arc<Registry>> {
        let all = self.all;
        let is_damaged = lock(&all.damaged).contains(&(self.manifest, *blob));
        if !is_damaged && matches!(all.kept.0.downloads.blob(blob), Ok(Some(_))) {
            return None;
        }
        all.registries((self.manifest, *blob)).into_iter().next()
    }

    /// Calls `fetch` with each source of a blob, until it succeeds.
    fn fetch<T>(
        &self,
        digest: &Digest,
        fetch: impl Fn(&dyn BlobSource) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut failed = io::Error::other("neither the store nor a known registry has the blob");
        let all = self.all;
        if !lock(&all.damaged).contains(&(self.manifest, *digest)) {
            match fetch(&all.kept) {
                Ok(parts) => return Ok(parts),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => failed = error,
            }
        }
        for registry in all.registries((self.manifest, *digest)) {
            match fetch(&*registry) {
                Ok(parts) => return Ok(parts),
                Err(error) => failed = error,
            }
        }
        match &all.other {
            Some(other) => fetch(&*(other.of_image)(self.manifest.as_ref())),
            None => Err(failed),
        }
    }
}

impl BlobSource for ImageBlobs<'_, '_> {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        match self.ranges(digest, size, &[range], Whole::Read) {
            Ok(parts) => Box::new(Cursor::new(parts.concat())),
            Err(error) => Box::new(FailingReader::new(error)),
        }
    }

    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        self.fetch(digest, |source| source.ranges(digest, size, ranges, whole))
    }

    fn ranges_in_background(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        self.fetch(digest, |source| source.ranges_in_background(digest, size, ranges, whole))
    }

    fn tar_part(
        &self,
        blob: &Digest,
        diff_id: &Digest,
        range: Range<u64>,
        asked: AskedPeers,
    ) -> Option<PeerPart> {
        self.registry_without_blob(blob)?.peer_part(blob, diff_id, range, asked)
    }

    fn distrust_peer(&self, blob: &Digest, host: &str) {
        let registries = self.all.registries((self.manifest, *blob));
        registries.iter().for_each(|it| it.distrust_peer(blob, host));
    }

    fn may_have_peers(&self, blob: &Digest) -> bool {
        self.registry_without_blob(blob).is_some_and(|it| it.may_have_peers(blob))
    }

    fn distrust(&self, digest: &Digest) -> bool {
        let registries = self.all.registries((self.manifest, *digest));
        let is_kept = lock(&self.all.damaged).insert((self.manifest, *digest));
        let others = registries.iter().filter(|it| it.distrust(digest)).count();
        others > 0 || (is_kept && !registries.is_empty())
    }
}
