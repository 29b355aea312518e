//! Manifest and config of an image in the store.

use std::collections::HashSet;

use image::digest::Digest;
use image::verity::ImageId;
use oci::manifest::{Config, Document, Manifest, ManifestError};
use serde_json::Value;
use store::{Form, OpenImageError, Presence, Store};

/// An image's manifest and config, as bytes and parsed. They have the same number of layers.
#[derive(Debug, Clone)]
pub struct StoredImage {
    /// The manifest's digest.
    pub digest: Digest,
    /// The manifest's bytes.
    pub manifest_bytes: Vec<u8>,
    /// The manifest, parsed.
    pub manifest: Manifest,
    /// The config's bytes.
    pub config_bytes: Vec<u8>,
    /// The config, parsed.
    pub config: Config,
}

/// Why the documents of an image cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoredError {
    /// A document is not in the store.
    #[error("the store has no {kind} {digest}")]
    Absent {
        /// `manifest` or `config`.
        kind: &'static str,
        /// Its digest.
        digest: Digest,
    },
    /// A document cannot be read.
    #[error("cannot read the {kind}")]
    Read {
        /// `manifest` or `config`.
        kind: &'static str,
        /// The cause, which names the document.
        source: Box<store::ManifestError>,
    },
    /// A document is not valid.
    #[error("cannot use {digest}")]
    Document {
        /// Its digest.
        digest: Digest,
        /// The cause.
        source: Box<ManifestError>,
    },
    /// An index, where one image's manifest is needed.
    #[error("{0} is an index of images, not an image")]
    Index(Digest),
}

impl StoredError {
    /// Says of which document something is wrong.
    pub(crate) fn wrong(digest: &Digest) -> impl Fn(ManifestError) -> Self + use<> {
        let digest = *digest;
        move |source| Self::Document { digest, source: Box::new(source) }
    }

    /// Whether the store has other bytes than it should have.
    pub(crate) fn is_damage(&self) -> bool {
        let Self::Read { source, .. } = self else { return false };
        matches!(**source, store::ManifestError::Mismatch { .. })
    }
}

impl StoredImage {
    /// Loads the manifest of this digest, and the config that it names.
    ///
    /// # Errors
    /// [`StoredError`].
    pub fn load(store: &Store, digest: &Digest) -> Result<Self, StoredError> {
        let manifest_bytes = document(store, "manifest", digest)?;
        let manifest = image_of(digest, &manifest_bytes)?;
        let of_config = &manifest.config.digest;
        let config_bytes = document(store, "config", of_config)?;
        let config = Config::parse(&config_bytes).map_err(StoredError::wrong(of_config))?;
        config.diff_ids_of(manifest.layers.len()).map_err(StoredError::wrong(of_config))?;
        Ok(Self { digest: *digest, manifest_bytes, manifest, config_bytes, config })
    }

    /// All fields of the manifest.
    ///
    /// # Errors
    /// [`StoredError::Document`] if a part that was not parsed before is not valid.
    pub fn manifest_json(&self) -> Result<Value, StoredError> {
        json("manifest", &self.digest, &self.manifest_bytes)
    }

    /// All fields of the config.
    ///
    /// # Errors
    /// As [`Self::manifest_json`].
    pub fn config_json(&self) -> Result<Value, StoredError> {
        json("config", &self.manifest.config.digest, &self.config_bytes)
    }
}

/// An image in whole files that was made of these layers, the lowest first, and has a name in the store. All of it is here
/// and was compared with its layers. What cannot be read counts as not there.
#[must_use]
pub fn image_of_layers(store: &Store, layers: &[Digest]) -> Option<ImageId> {
    let (refs, _) = store.refs.readable().ok()?;
    let mut named: Vec<_> = refs.into_values().filter(|it| it.form == Form::Objects).collect();
    // What an engine wants was often pulled just now.
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

/// Whether all that a name promises is in the store: the image, the data of all of its files, its documents, and its
/// layers. Nothing is hashed. What cannot be looked up counts as lost. An image that is fetched on demand promises none of
/// its layers.
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

/// The manifest of one image.
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
