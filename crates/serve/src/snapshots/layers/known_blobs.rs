//! Layers of the store by the blobs that they came in.

use std::collections::{BTreeSet, HashMap};

use image::digest::Digest;
use store::Store;

/// The layers of the store by the digest of their blob. Only blobs that were hashed completely are included.
#[derive(Debug, Default)]
pub(in crate::snapshots) struct KnownBlobs {
    layers: HashMap<Digest, Digest>,
    /// The layers that were examined.
    seen: BTreeSet<Digest>,
}

impl KnownBlobs {
    pub(in crate::snapshots) fn find_diff_id(
        &mut self,
        store: &Store,
        blob: &Digest,
    ) -> Option<Digest> {
        // A layer that has lost data is not known, so that it is read again.
        let is_whole = |layer: &Digest| store.has_whole_layer(layer).unwrap_or(false);
        if let Some(layer) = self.layers.get(blob).filter(|it| is_whole(it)) {
            return Some(*layer);
        }
        // A layer that was already examined may have been read from another blob in the meantime. That blob is not
        // found, so it is read again, which only takes time.
        for layer in store.layers.diff_ids().unwrap_or_default() {
            if self.seen.insert(layer)
                && let Ok(Some(opened)) = store.layers.open(&layer)
            {
                let hashed = opened.info().blobs.iter().filter(|it| it.is_hashed);
                self.layers.extend(hashed.map(|it| (it.digest, layer)));
            }
        }
        self.layers.get(blob).copied().filter(is_whole)
    }

    pub(in crate::snapshots) fn note(&mut self, blob: Digest, layer: Digest) {
        self.layers.insert(blob, layer);
    }
}
