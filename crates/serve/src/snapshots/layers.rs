//! Layers that come as blobs, or are already in the store. They are never unpacked.

pub(super) mod compare;
pub(super) mod from_dir;
pub(super) mod heal;
pub(super) mod known_blobs;

use std::io::Read;
use std::path::Path;

use image::digest::Digest;
use store::{Seconds, SnapshotContent, SnapshotKind, SnapshotRecord, Transaction};
use transfer::import::ImportError;

use super::cancellation::CancelToken;
use super::error::SnapshotterError;
use super::labels::{Labels, is_unpacked, layer_blob, target};
use super::settings::SkipLayers;
use super::snapshotter::Snapshotter;
use from_dir::LayerClaim;

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

impl Snapshotter {
    /// Returns the name of the snapshot with this root, if a layer can be applied to it.
    pub(super) fn unpacked_at(&self, root: &Path) -> Option<String> {
        let state = self.state();
        let found = state.entries.iter().find(|it| self.instance.root(*it.0) == root);
        let record = &found?.1.record;
        let is_open = record.kind == SnapshotKind::Active(None) && is_unpacked(&record.name);
        is_open.then(|| record.name.clone())
    }

    /// Returns the layer of a blob, if the store has it.
    pub(super) fn known_layer(&self, blob: &Digest) -> Option<Digest> {
        match self.surroundings.skip {
            SkipLayers::Never => None,
            SkipLayers::Download | SkipLayers::Unpack => {
                self.known_blobs().find_diff_id(&self.store, blob)
            }
        }
    }

    /// Reads a blob into the store as the layer of an unchanged snapshot.
    pub(super) fn apply(
        &self,
        key: &str,
        claim: &LayerClaim,
        blob: impl Read + Send,
        wanted: &CancelToken,
    ) -> Result<AppliedLayer, SnapshotterError> {
        // The keeper protects the layer from `gc` until a record names it.
        let keeper = self.keeper()?;
        let applied = self.apply_with(key, |now| {
            let content = self.resources.layer(&keeper, claim, blob, wanted, now)?;
            self.known_blobs().note(claim.digest, content.layer);
            Ok(content)
        })?;
        self.applied(&applied).inspect(|it| self.counts.read(it.bytes))
    }

    /// Starts a transaction that keeps imported data from `gc` until it is dropped.
    pub(super) fn keeper(&self) -> Result<Transaction<'_>, SnapshotterError> {
        Ok(self.store.begin().map_err(ImportError::transaction)?)
    }

    /// Applies a layer that the store already has.
    pub(super) fn apply_known(
        &self,
        key: &str,
        layer: &Digest,
    ) -> Result<AppliedLayer, SnapshotterError> {
        self.apply_with(key, |_| Ok(shared(layer)))?;
        self.applied(layer).inspect(|_| self.counts.known())
    }

    fn applied(&self, layer: &Digest) -> Result<AppliedLayer, SnapshotterError> {
        let opened = self.store.layers.open(layer).map_err(SnapshotterError::Layer)?;
        let bytes = opened.map_or(0, |it| it.info().size);
        Ok(AppliedLayer { diff_id: *layer, bytes })
    }

    fn apply_with(
        &self,
        key: &str,
        content: impl FnOnce(Seconds) -> Result<SnapshotContent, SnapshotterError>,
    ) -> Result<Digest, SnapshotterError> {
        let taken = self.take(key, |record| match record.kind {
            SnapshotKind::Active(None) => Ok(()),
            _ => Err(SnapshotterError::NotActive(key.to_owned())),
        })?;
        self.unmount_root(taken.number)?;
        if self.instance.is_changed(taken.number) {
            return Err(SnapshotterError::Written(key.to_owned()));
        }
        let content = content(Seconds((self.surroundings.now)().seconds))?;
        let layer = content.layer;
        let kind = SnapshotKind::Active(Some(content));
        let new = SnapshotRecord { kind, ..taken.record.clone() };
        self.store.settle_snapshot(&self.instance, taken.number, &new)?;
        taken.change(|entry| entry.record = new);
        Ok(layer)
    }

    /// Makes a snapshot of a layer that the store has, if the engine may use it. `labels` come in part from the
    /// image's manifest, so the chain of layers must have the requested chain id, and the layer must have been read
    /// from the blob in the labels.
    ///
    /// # Errors
    /// [`SnapshotterError::Skipped`] if the store has the layer. Then a committed snapshot with these labels exists.
    pub fn skip(&self, parent: &str, labels: &Labels) -> Result<(), SnapshotterError> {
        if self.surroundings.skip != SkipLayers::Download {
            return Ok(());
        }
        tracing::debug!(parent, ?labels, "looking for a layer in the store");
        let (Some(target), Some(blob)) = (target(labels), layer_blob(labels)) else {
            return Ok(());
        };
        // `gc` waits until the record names the layer, so every record has its layer, even after a crash.
        let _hold = self.store.hold()?;
        let Some(layer) = self.known_layer(&blob) else { return Ok(()) };
        let below = match parent {
            "" => None,
            parent => {
                let number = self.state().committed(parent)?;
                // A snapshot on a directory has no chain id.
                let Some(layers) = self.layers_below(Some(number)) else { return Ok(()) };
                layers.iter().fold(None, |below, it| Some(chain_id(below.as_ref(), it)))
            }
        };
        if chain_id(below.as_ref(), &layer) != target {
            return Ok(());
        }
        self.give(parent, labels, &target, shared(&layer))
    }

    /// Makes a committed snapshot whose layer the engine did not download, and returns the error that informs the
    /// engine. The caller must hold off `gc`.
    pub(super) fn give(
        &self,
        parent: &str,
        labels: &Labels,
        target: &Digest,
        content: SnapshotContent,
    ) -> Result<(), SnapshotterError> {
        let name = format!("{SKIPPED}{target}");
        match self.make(&name, parent, labels, SnapshotKind::Committed(content)) {
            Ok(new) => {
                new.keep(|_| {});
                self.counts.skipped();
            }
            Err(SnapshotterError::Exists(_)) => {}
            Err(error) => return Err(error),
        }
        Err(SnapshotterError::Skipped(name))
    }
}

/// Prefix of the names of such snapshots. Engines use no names with this prefix.
const SKIPPED: &str = "quire/";

/// Returns the content of a snapshot whose layer was already in the store, so the snapshot uses no additional space.
fn shared(layer: &Digest) -> SnapshotContent {
    SnapshotContent { layer: *layer, image: None, lazy: None, bytes: 0, inodes: 0 }
}
