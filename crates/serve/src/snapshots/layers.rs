//! Layers that come as blobs, or are already in the store. They are never unpacked.

pub(super) mod compare;
pub(super) mod from_dir;
pub(super) mod heal;
pub(super) mod known_blobs;

use std::io::Read;
use std::sync::{Mutex, OnceLock};

use image::digest::Digest;
use image::verity::ImageId;
use store::{Seconds, SnapshotContent, Store, Transaction};

use super::cancellation::CancelToken;
use super::error::SnapshotterError;
use crate::unpoisoned::lock;
use from_dir::{LayerClaim, Resources};
use known_blobs::KnownBlobs;

/// Makes layers and images of an engine's snapshots.
#[derive(Debug)]
pub(super) struct Layers {
    pub(super) maker: Resources,
    blobs: Mutex<KnownBlobs>,
    /// The empty image.
    empty: OnceLock<ImageId>,
}

impl Layers {
    pub(super) fn new(maker: Resources) -> Self {
        Self { maker, blobs: Mutex::default(), empty: OnceLock::new() }
    }

    /// Returns the layer of a blob, if the store has it.
    pub(super) fn known(&self, store: &Store, blob: &Digest) -> Option<Digest> {
        lock(&self.blobs).find_diff_id(store, blob)
    }

    /// Reads a blob into the store. The layer is kept from `gc` until the keeper is dropped.
    pub(super) fn read(
        &self,
        keeper: &Transaction<'_>,
        claim: &LayerClaim,
        blob: impl Read + Send,
        wanted: &CancelToken,
        now: Seconds,
    ) -> Result<SnapshotContent, SnapshotterError> {
        let content = self.maker.layer(keeper, claim, blob, wanted, now)?;
        lock(&self.blobs).note(claim.digest, content.layer);
        Ok(content)
    }

    /// Returns the empty image, and makes it if the store lacks it.
    pub(super) fn empty_image(
        &self,
        store: &Store,
        now: Seconds,
    ) -> Result<ImageId, SnapshotterError> {
        // `gc` may have removed the image.
        if let Some(image) = self.empty.get()
            && store.open_image(image).is_ok()
        {
            return Ok(*image);
        }
        let image = self.maker.nothing(store, now)?;
        Ok(*self.empty.get_or_init(|| image))
    }
}

/// A layer that was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AppliedLayer {
    pub(super) diff_id: Digest,
    /// Size of its tar, in bytes.
    pub(super) bytes: u64,
}

/// Returns the chain id of layers, from that of all but the last one. Source: OCI image-spec, "Layer ChainID".
pub(super) fn chain_id(below: Option<&Digest>, diff_id: &Digest) -> Digest {
    match below {
        None => *diff_id,
        Some(below) => Digest::sha256(format!("{below} {diff_id}").as_bytes()),
    }
}

/// Returns the content of a snapshot whose layer was in the store before, so it uses no additional space.
pub(super) fn shared(layer: &Digest) -> SnapshotContent {
    SnapshotContent { layer: *layer, image: None, lazy: None, bytes: 0, inodes: 0 }
}
