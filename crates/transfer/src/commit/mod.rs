//! What a container changed becomes a layer, and image and layer a new image.
//!
//! The new manifest is OCI's, whatever the one below was: the same layers by the same digests, and the new one, as a tar
//! that is not compressed. The new config is the one below with one more diff id, one more line of history, and what the
//! caller wants changed in it.

mod change;
mod documents;

use std::io::Read;

use image::tree::Tree;
use store::Store;

pub use change::{Change, ChangeError};

use crate::import::stacked::{self, Below};
use crate::import::{ImportError, ImportSurroundings, ImportWishes, Report};
use crate::stored::{StoredError, StoredImage};
use image::digest::Digest;
use oci::manifest::LAYERS_MAX;

/// What is committed.
#[derive(Debug, Clone, Copy)]
pub struct Commit<'a> {
    /// The manifest of the image below.
    pub manifest: &'a Digest,
    /// Its tree.
    pub tree: &'a Tree,
    /// When, as RFC 3339 has it.
    pub created: &'a str,
    /// Who made it.
    pub author: Option<&'a str>,
    /// Why.
    pub message: Option<&'a str>,
    /// What the container ran.
    pub command: &'a str,
    /// What the config is to say from now on, one after the other.
    pub changes: &'a [Change],
}

/// Why there is no new image. The store is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// Its manifest or its config cannot be used.
    #[error("cannot build on the image below")]
    Below(#[from] StoredError),
    /// There is no room for one more.
    #[error(
        "the image below has {0} layers, and more than {LAYERS_MAX} are refused: `quire export NAME tar:FILE` and `quire import tar:FILE` make one of all of them"
    )]
    Layers(usize),
    /// The layer cannot be added.
    #[error(transparent)]
    Import(Box<ImportError>),
}

/// Reads the config of the image below, so that what is wrong is told before anything is done.
///
/// # Errors
/// [`CommitError`].
pub fn check(store: &Store, manifest: &Digest) -> Result<(), CommitError> {
    Parts::read(store, manifest).map(|_| ())
}

/// Makes the image: `tar` is what the container changed.
///
/// # Errors
/// [`CommitError`].
pub fn commit(
    store: &Store,
    commit: &Commit<'_>,
    tar: impl Read + Send,
    surroundings: &ImportSurroundings<'_>,
    wishes: &ImportWishes<'_>,
) -> Result<Report, CommitError> {
    let Parts { diff_ids, manifest, config } = Parts::read(store, commit.manifest)?;
    let below = Below { tree: commit.tree, diff_ids: &diff_ids };
    let documents = |diff_id: &Digest, blob: &store::Blob| {
        let config = documents::config(config, diff_id, commit);
        let manifest = documents::manifest(&manifest, &config, blob);
        (config, manifest)
    };
    let made = stacked::import(store, below, tar, documents, surroundings, wishes);
    made.map_err(|error| CommitError::Import(Box::new(error)))
}

/// The documents of the image below.
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
