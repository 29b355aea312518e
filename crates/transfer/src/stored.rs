//! Manifest and config of an image in the store.

use std::collections::HashSet;

use image::digest::Digest;
use image::verity::ImageId;
use oci::manifest::{Config, Document, Manifest, ManifestError};
use serde_json::Value;
use store::{Form, OpenImageError, Presence, Store};

/// An image's manifest and config, as bytes and parsed. Both list the same number of layers.
#[derive(Debug, Clone)]
pub struct StoredImage {
    pub digest: Digest,
    pub manifest_bytes: Vec<u8>,
    pub manifest: Manifest,
    pub config_bytes: Vec<u8>,
    pub config: Config,
}

/// Why the manifest or config of an image cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoredError {
    /// A document is not in the store.
    #[error("the store has no {kind} {digest}")]
    Absent {
        /// `manifest` or `config`.
        kind: &'static str,
        digest: Digest,
    },
    /// A document cannot be read.
    #[error("cannot read the {kind}")]
    Read {
        /// `manifest` or `config`.
        kind: &'static str,
        /// The cause, which names the document.
        source: Box<store::StoredManifestError>,
    },
    /// A document is not valid.
    #[error("cannot use {digest}")]
    Document { digest: Digest, source: Box<ManifestError> },
    /// The digest is that of an index, although the caller needs the manifest of one image.
    #[error("{0} is an index of images, not an image")]
    Index(Digest),
}

impl StoredError {
    /// Returns a function that adds a document's digest to an error.
    pub(crate) fn wrong(digest: &Digest) -> impl Fn(ManifestError) -> Self + use<> {
        let digest = *digest;
        move |source| Self::Document { digest, source: Box::new(source) }
    }

    /// Whether a document in the store does not match its digest.
    pub(crate) fn is_damage(&self) -> bool {
        let Self::Read { source, .. } = self else { return false };
        matches!(**source, store::StoredManifestError::Mismatch { .. })
    }
}

impl StoredImage {
    /// Loads the manifest with this digest, and the config that the manifest names.
    pub fn load(store: &Store, digest: &Digest) -> Result<Self, StoredError> {
        let manifest_bytes = document(store, "manifest", digest)?;
        let manifest = image_of(digest, &manifest_bytes)?;
        let of_config = &manifest.config.digest;
        let config_bytes = document(store, "config", of_config)?;
        let config = Config::parse(&config_bytes).map_err(StoredError::wrong(of_config))?;
        config.diff_ids_of(manifest.layers.len()).map_err(StoredError::wrong(of_config))?;
        Ok(Self { digest: *digest, manifest_bytes, manifest, config_bytes, config })
    }

    /// Returns all fields of the manifest.
    ///
    /// # Errors
    /// [`StoredError::Document`] if a field that [`Manifest`] ignores is not valid JSON.
    pub fn manifest_json(&self) -> Result<Value, StoredError> {
        json("manifest", &self.digest, &self.manifest_bytes)
    }

    /// Returns all fields of the config.
    pub fn config_json(&self) -> Result<Value, StoredError> {
        json("config", &self.manifest.config.digest, &self.config_bytes)
    }
}

/// Finds a named image of the form [`Form::Objects`] whose layers, from the lowest to the uppermost, have these diff
/// ids. The image is complete, and was compared with its layers. Images that cannot be read are skipped.
#[must_use]
pub fn image_of_layers(store: &Store, layers: &[Digest]) -> Option<ImageId> {
    let (refs, _) = store.refs.readable().ok()?;
    let mut named: Vec<_> = refs.into_values().filter(|it| it.form == Form::Objects).collect();
    // Newest first, because engines mostly use an image that was pulled shortly before.
    named.sort_by_key(|it| std::cmp::Reverse(it.created));
    let is_of = |manifest: &Digest| {
        StoredImage::load(store, manifest).is_ok_and(|it| it.config.diff_ids() == layers)
    };
    let mut looked_at = HashSet::new();
    named.into_iter().find_map(|it| {
        let manifest = it.manifest.filter(|manifest| looked_at.insert(*manifest))?;
        let is_whole = || matches!(store.presence(&it.image), Ok(Presence::Complete));
        (is_of(&manifest) && is_whole()).then_some(it.image)
    })
}

/// Whether the store has everything that belongs to a named image: the image, the data of all its files, its manifest
/// and config, and its layers. No data is hashed. Data that cannot be looked up counts as lost. For an image that is
/// fetched on demand, no layers are required.
#[must_use]
pub fn is_whole(store: &Store, image: &ImageId, manifest: Option<&Digest>) -> bool {
    let has_layers = |manifest: &Digest| {
        let loaded = StoredImage::load(store, manifest);
        loaded.is_ok_and(|it| store.has_whole_layers(image, it.config.diff_ids()).unwrap_or(false))
    };
    let is_here = match store.open_image(image) {
        Ok(_) => manifest.is_none_or(has_layers),
        Err(OpenImageError::Partial(_) | OpenImageError::Unproven(_)) => true,
        Err(_) => false,
    };
    is_here && store.lacking(image).is_ok_and(|lacking| lacking.is_empty())
}

/// Parses the manifest of one image.
pub(crate) fn image_of(digest: &Digest, bytes: &[u8]) -> Result<Manifest, StoredError> {
    match Document::parse(bytes).map_err(StoredError::wrong(digest))? {
        Document::Image(image) => Ok(image),
        Document::Index(_) => Err(StoredError::Index(*digest)),
    }
}

fn json(kind: &'static str, digest: &Digest, bytes: &[u8]) -> Result<Value, StoredError> {
    let read = serde_json::from_slice(bytes);
    read.map_err(|source| StoredError::wrong(digest)(ManifestError::Json { kind, source }))
}

fn document(store: &Store, kind: &'static str, digest: &Digest) -> Result<Vec<u8>, StoredError> {
    let read = store.manifests.read(digest);
    let read = read.map_err(|source| StoredError::Read { kind, source: Box::new(source) })?;
    read.ok_or(StoredError::Absent { kind, digest: *digest })
}
