//! Finds damaged layers. They are read again from the engine's content store before a container uses them.

use image::digest::Digest;
use store::Store;

use crate::snapshots::layers::from_dir::LayerClaim;

/// A layer of which data was lost.
#[derive(Debug, Clone)]
pub(in crate::snapshots) struct LostLayer {
    pub(in crate::snapshots) diff_id: Digest,
    /// The blobs that contain the layer.
    pub(in crate::snapshots) blobs: Vec<LayerClaim>,
}

/// Returns which of these layers have lost data, with the blobs that contain them.
pub(in crate::snapshots) fn lost(store: &Store, layers: Vec<Digest>) -> Vec<LostLayer> {
    let lost = layers.into_iter().filter(|it| !store.has_whole_layer(it).unwrap_or(true));
    lost.map(|diff_id| {
        let opened = store.layers.open(&diff_id).ok().flatten();
        let blobs = opened.map(|it| it.info().blobs.clone()).unwrap_or_default();
        let hashed = blobs.into_iter().filter(|it| it.is_hashed);
        let claims = hashed.map(|it| LayerClaim {
            digest: it.digest,
            size: Some(it.size),
            media_type: it.media_type,
        });
        LostLayer { diff_id, blobs: claims.collect() }
    })
    .collect()
}
