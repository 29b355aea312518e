//! Reads damaged layers again from the engine's content store before a container uses them.

use std::io::Read;

use image::digest::Digest;
use store::Seconds;

use crate::snapshots::cancellation::CancelToken;
use crate::snapshots::error::SnapshotterError;
use crate::snapshots::labels::is_unpacked;
use crate::snapshots::layers::from_dir::LayerClaim;
use crate::snapshots::snapshotter::Snapshotter;

/// A layer of which data was lost.
#[derive(Debug, Clone)]
pub(in crate::snapshots) struct LostLayer {
    pub(in crate::snapshots) diff_id: Digest,
    /// The blobs that contain the layer.
    pub(in crate::snapshots) blobs: Vec<LayerClaim>,
}

impl Snapshotter {
    /// Returns the layers below a snapshot that have lost data. This is checked only if a repair has marked their
    /// image, or the image must be made. Snapshots on which layers are unpacked are skipped, because they need no
    /// root.
    pub(in crate::snapshots) fn lost_layers(&self, key: &str, parent: &str) -> Vec<LostLayer> {
        if parent.is_empty() || is_unpacked(key) {
            return Vec::new();
        }
        let number = self.state().committed(parent);
        let Ok(Some(base)) = number.and_then(|it| self.base_of(Some(it))) else {
            return Vec::new();
        };
        let content = self.state().entries.get(&base).and_then(|it| it.record.content().cloned());
        let Some(content) = content.filter(|it| it.lazy.is_none()) else { return Vec::new() };
        if content.image.is_some_and(|it| !self.store.downloads.is_lacking(&it).unwrap_or(false)) {
            return Vec::new();
        }
        let layers = self.layers_below(Some(base)).unwrap_or_default().into_iter();
        let lost = layers.filter(|it| !self.store.has_whole_layer(it).unwrap_or(true));
        lost.map(|diff_id| {
            let opened = self.store.layers.open(&diff_id).ok().flatten();
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

    /// Reads the blob of a layer again. The existing data of the layer is not changed.
    pub(in crate::snapshots) fn read_again(
        &self,
        claim: &LayerClaim,
        blob: impl Read + Send,
        wanted: &CancelToken,
    ) -> Result<(), SnapshotterError> {
        let now = Seconds((self.surroundings.now)().seconds);
        self.resources.layer(&self.keeper()?, claim, blob, wanted, now).map(drop)
    }
}
