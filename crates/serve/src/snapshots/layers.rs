//! Layers that come as blobs, or are already in the store. They are never unpacked.

pub(super) mod compare;
pub(super) mod from_dir;
pub(super) mod heal;
pub(super) mod known_blobs;

use image::digest::Digest;
use store::SnapshotContent;

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
