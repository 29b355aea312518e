//! Commits the changes of a container as one more layer of its image.
//!
//! The new manifest is in OCI's format, even if the manifest of the base image is not. It has the same layers with the
//! same digests, and the new layer as an uncompressed tar. The new config is the config of the base image with one
//! more diff id, one more entry in the history, and the caller's changes.

mod documents;

use std::io::Read;

use image::tree::Tree;
use store::Store;

pub use crate::config_change::{Change, ChangeError};

use crate::import::from_store::stacked;
use crate::import::from_store::stacked::Below;
use crate::import::{ImportContext, ImportError, ImportOptions, Report};
use crate::stored::{StoredError, StoredImage};
use image::digest::Digest;
use oci::manifest::LAYERS_MAX;

/// Parameters of a commit.
#[derive(Debug, Clone, Copy)]
pub struct Commit<'a> {
    /// Digest of the base image's manifest.
    pub manifest: &'a Digest,
    /// File tree of the base image.
    pub tree: &'a Tree,
    /// Time of the commit, in the format of RFC 3339.
    pub created: &'a str,
    /// Author of the new image.
    pub author: Option<&'a str>,
    /// Comment for the history.
    pub message: Option<&'a str>,
    /// Command of the container, for the history.
    pub command: &'a str,
    /// Changes to the config, in order.
    pub changes: &'a [Change],
}

/// Why a commit failed. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The base image's manifest or config cannot be used.
    #[error("cannot use the base image")]
    Below(#[from] StoredError),
    /// The base image has the maximum number of layers already.
    #[error(
        "the base image has {0} layers, and an image may have up to {LAYERS_MAX}: `quire export NAME tar:FILE` and \
         `quire import tar:FILE` make one layer of them"
    )]
    Layers(usize),
    /// The layer cannot be added to the store.
    #[error(transparent)]
    Import(Box<ImportError>),
}

/// Reads the config of the base image, so that its errors show before any other work.
pub fn check(store: &Store, manifest: &Digest) -> Result<(), CommitError> {
    Parts::read(store, manifest).map(|_| ())
}

/// Commits an image. `tar` is the new layer, with the container's changes.
pub fn commit(
    store: &Store,
    commit: &Commit<'_>,
    tar: impl Read + Send,
    environment: &ImportContext<'_>,
    options: &ImportOptions<'_>,
) -> Result<Report, CommitError> {
    let Parts { diff_ids, manifest, config } = Parts::read(store, commit.manifest)?;
    let below = Below { tree: commit.tree, diff_ids: &diff_ids };
    let documents = |diff_id: &Digest, blob: &store::Blob| {
        let config = documents::config(config, diff_id, commit);
        let manifest = documents::manifest(&manifest, &config, blob);
        (config, manifest)
    };
    let made = stacked::import(store, below, tar, documents, environment, options);
    made.map_err(|error| CommitError::Import(Box::new(error)))
}

/// The manifest and config of the base image.
struct Parts {
    diff_ids: Vec<Digest>,
    manifest: serde_json::Value,
    config: serde_json::Value,
}

impl Parts {
    fn read(store: &Store, digest: &Digest) -> Result<Self, CommitError> {
        let stored = StoredImage::load(store, digest)?;
        let layers = &stored.manifest.layers;
        if layers.len() >= LAYERS_MAX {
            return Err(CommitError::Layers(layers.len()));
        }
        Ok(Self {
            diff_ids: stored.config.diff_ids().to_vec(),
            manifest: stored.manifest_json()?,
            config: stored.config_json()?,
        })
    }
}
