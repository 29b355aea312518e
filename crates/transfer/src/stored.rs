//! The documents of an image that the store has.

use image::digest::Digest;
use oci::manifest::{Config, Document, Manifest, ManifestError};
use serde_json::Value;
use store::Store;

/// An image's manifest and config, as bytes and as they are read: they name as many layers.
#[derive(Debug, Clone)]
pub struct StoredImage {
    /// The manifest's digest.
    pub digest: Digest,
    /// The manifest's bytes.
    pub manifest_bytes: Vec<u8>,
    /// What they say.
    pub manifest: Manifest,
    /// The config's bytes.
    pub config_bytes: Vec<u8>,
    /// What they say.
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
        /// Why, and which.
        source: Box<store::ManifestError>,
    },
    /// A document makes no sense.
    #[error("cannot use {digest}")]
    Document {
        /// Its digest.
        digest: Digest,
        /// What is wrong with it.
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

    /// All that the manifest says.
    ///
    /// # Errors
    /// [`StoredError::Document`] when a part that was not looked at makes no sense.
    pub fn manifest_json(&self) -> Result<Value, StoredError> {
        json("manifest", &self.digest, &self.manifest_bytes)
    }

    /// All that the config says.
    ///
    /// # Errors
    /// As [`Self::manifest_json`].
    pub fn config_json(&self) -> Result<Value, StoredError> {
        json("config", &self.manifest.config.digest, &self.config_bytes)
    }
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
