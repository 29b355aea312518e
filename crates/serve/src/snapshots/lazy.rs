//! Images that an engine starts before their layers are downloaded: their devices are filled on demand.
//!
//! The diff id of a missing layer cannot be verified. So the chain id, which is containerd's name for it, is only as
//! trustworthy as the index of the image. Until all layers are downloaded, the source of that index also determines
//! the content of layers of the same name in other images of this engine: see `docs/threat-model.md`.

pub(super) mod pull;
pub(super) mod states;

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use image::digest::Digest;
use image::verity::ImageId;
use oci::reference::Reference;
use store::{
    LazySnapshot, OperationError, RefName, SnapshotContent, SnapshotKind, SnapshotRecord, Store,
};
use transfer::StoredImage;

use super::error::SnapshotterError;
use super::labels::{Labels, layer_blob, target};
use super::layers::{chain_id, shared};
use super::settings::SkipLayers;
use super::snapshotter::Snapshotter;
use states::LazyLookup;

/// Label with the name of an image, as its user gave it. Source: containerd's `pkg/snapshotters/annotations.go`,
/// `TargetRefLabel`.
const IMAGE: &str = "containerd.io/snapshot/cri.image-ref";
/// Label with the digest of its manifest. Source: the same, `TargetManifestDigestLabel`.
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
/// Label on content with the repositories that the engine has it from, separated by commas. The label's name ends
/// with the registry's host. Source: containerd's `core/remotes/docker/handler.go`, `AppendDistributionSourceLabel`.
const SOURCE: &str = "containerd.io/distribution.source";

/// The image of a layer that an engine unpacks, according to labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LazyLabels {
    /// The reference, with the digest of the manifest.
    reference: Reference,
    pub(super) manifest: Digest,
}

impl LazyLabels {
    pub(super) fn from_labels(labels: &HashMap<String, String>) -> Option<Self> {
        let manifest = labels.get(MANIFEST)?.parse().ok()?;
        let reference: Reference = labels.get(IMAGE)?.parse().ok()?;
        Some(Self { reference: reference.with_digest(manifest), manifest })
    }

    /// Returns whether the engine has pulled the manifest from this repository of this host. If so, the engine's own
    /// credentials were sufficient for the image. The labels of a snapshot are not enough, because another image's
    /// manifest may contain them. The engine does not record the registry's port.
    pub(super) fn is_from(&self, labels: &HashMap<String, String>) -> bool {
        // The host without the port.
        let registry = self.reference.registry();
        let host = registry.rsplit_once(':').map_or(registry, |it| it.0);
        let source = format!("{SOURCE}.{host}");
        let repositories = labels.get(&source).map(String::as_str).unwrap_or_default();
        repositories.split(',').any(|it| it == self.reference.repository())
    }
}

/// A temporary name for an image until a record names it. It contains the name of the instance, so that the next
/// service can remove the temporary names of a killed service.
#[derive(Debug)]
struct TemporaryName<'s> {
    store: &'s Store,
    name: RefName,
}

impl Drop for TemporaryName<'_> {
    fn drop(&mut self) {
        forget_name(self.store, &self.name);
    }
}

fn forget_name(store: &Store, name: &RefName) {
    if matches!(store.refs.get(name), Ok(None)) {
        return;
    }
    if let Err(error) = store.remove_ref(name) {
        let error: &dyn std::error::Error = &error;
        tracing::warn!(%name, error, "cannot remove a name: it stays until the service restarts");
    }
}

impl Snapshotter {
    /// Returns whether an engine may use images without their layers.
    pub(super) fn starts_lazily(&self) -> bool {
        self.environment.lazy.as_ref().is_some_and(|it| it.starts)
    }

    /// Makes a snapshot of a layer that the store has, if the engine may use it. `labels` come in part from the
    /// image's manifest, so the chain of layers must have the requested chain id, and the layer must have been read
    /// from this very blob.
    ///
    /// # Errors
    /// [`SnapshotterError::Skipped`] if the store has the layer. Then a committed snapshot with these labels exists.
    pub fn skip(&self, parent: &str, labels: &Labels) -> Result<(), SnapshotterError> {
        if self.environment.skip != SkipLayers::Download {
            return Ok(());
        }
        tracing::debug!(parent, ?labels, "looking for a layer in the store");
        let (Some(target), Some(blob)) = (target(labels), layer_blob(labels)) else {
            return Ok(());
        };
        // `gc` is held off until the record names the layer, and a record never lacks its layer even after a crash.
        let _hold = self.store.hold()?;
        let Some(layer) = self.known_layer(&blob) else { return Ok(()) };
        let below = match parent {
            "" => None,
            parent => {
                let number = self.state().committed(parent)?;
                // A snapshot on a directory has no chain id.
                let layers = self.state().layers_below(Some(number));
                let Some(layers) = layers else { return Ok(()) };
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

    /// Makes a snapshot without downloading its layer, if its image can be used without its layers.
    ///
    /// # Errors
    /// [`SnapshotterError::Skipped`] on success. Then a committed snapshot with these labels exists.
    pub(super) fn skip_lazily(
        &self,
        parent: &str,
        labels: &Labels,
        wanted: &LazyLabels,
    ) -> Result<(), SnapshotterError> {
        let (Some(target), Some(blob)) = (target(labels), layer_blob(labels)) else {
            return Ok(());
        };
        let below = match parent {
            "" => Vec::new(),
            parent => {
                let number = self.state().committed(parent)?;
                // A snapshot on a directory has no chain id.
                let layers = self.state().layers_below(Some(number));
                let Some(layers) = layers else { return Ok(()) };
                layers
            }
        };
        // `gc` may have removed the image since it was found, so there are two attempts.
        for _ in 0..2 {
            let named = self.new_name(&wanted.manifest);
            let Some(image) = self.lazy_image(wanted, &named.name) else { return Ok(()) };
            let _hold = self.store.hold()?;
            let stored = StoredImage::load(&self.store, &wanted.manifest);
            let Ok(stored) = stored
                .map_err(drop)
                .and_then(|it| self.store.open_names(&image).map(|_| it).map_err(drop))
            else {
                self.lazy.forget(&wanted.manifest);
                continue;
            };
            let (layers, place) = (stored.config.diff_ids(), below.len());
            let chain = layers.get(..=place).unwrap_or_default();
            let id = chain.iter().fold(None, |below, it| Some(chain_id(below.as_ref(), it)));
            let is_it = stored.manifest.layers.get(place).is_some_and(|it| it.digest == blob)
                && chain.split_last().is_some_and(|(_, lower)| lower == below)
                && id == Some(target);
            if !is_it {
                return Ok(());
            }
            let content = SnapshotContent {
                layer: layers[place],
                image: (place + 1 == layers.len()).then_some(image),
                lazy: Some(LazySnapshot { manifest: wanted.manifest, image }),
                bytes: 0,
                inodes: 0,
            };
            return self.give(parent, labels, &target, content);
        }
        Ok(())
    }

    /// Returns the image of a manifest without its layers, if it is in the store or can be pulled. A new one gets
    /// this name.
    fn lazy_image(&self, wanted: &LazyLabels, name: &RefName) -> Option<ImageId> {
        let LazyLabels { reference, manifest } = wanted;
        let mut asking = match self.lazy.ask(manifest) {
            LazyLookup::Known(known) => return known,
            LazyLookup::Ask(asking) => asking,
        };
        let of_records = self.state().lazy_image(manifest);
        let here = of_records.filter(|it| self.store.open_names(it).is_ok());
        asking.found = here.or_else(|| self.pull_lazily(reference, name));
        asking.found
    }

    fn pull_lazily(&self, reference: &Reference, name: &RefName) -> Option<ImageId> {
        let images = &self.environment.lazy.as_ref()?.images;
        let begun = Instant::now();
        let pulled = images.pull(&self.store, name, reference);
        let took = begun.elapsed();
        match &pulled {
            Ok(Some(image)) => {
                tracing::info!(%reference, %image, ?took, "the image can start before its layers are downloaded");
            }
            Ok(None) => tracing::info!(%reference, ?took, "the image has no trusted index"),
            Err(error) => {
                let error: &dyn std::error::Error = &**error;
                tracing::warn!(%reference, error, "the image cannot start before its layers are downloaded");
            }
        }
        pulled.ok().flatten()
    }

    /// Downloads the missing layers of a snapshot and of its parents, which then become normal snapshots.
    pub(super) fn bring_layers(&self, top: u64) -> Result<(), SnapshotterError> {
        let without = self.state().lazy_chain(top);
        for (number, name, lazy) in without {
            let named = self.new_name(&lazy.manifest);
            self.bring_layer(number, &name, &lazy, &named.name)?;
        }
        Ok(())
    }

    /// Downloads the layer of a snapshot. The snapshot is not locked during the download, so it can be removed.
    fn bring_layer(
        &self,
        number: u64,
        name: &str,
        lazy: &LazySnapshot,
        manifest: &RefName,
    ) -> Result<(), SnapshotterError> {
        let layer_of = |content: &SnapshotContent| {
            (content.lazy.as_ref() == Some(lazy)).then_some(content.layer)
        };
        let has_layer = |layer| matches!(self.store.layers.open(&layer), Ok(Some(_)));
        let wanted = self.state().content(number).and_then(layer_of);
        if let Some(layer) = wanted.filter(|it| !has_layer(*it)) {
            let _bringing = self.lazy.bring(&lazy.manifest);
            // Another call may have downloaded the layer while this one waited.
            if !has_layer(layer) {
                let object = format!("{}, which a new image or layer needs", lazy.image);
                let failed = OperationError::of("download the layers of image", &object);
                let images = self.environment.lazy.as_ref().map(|it| &it.images);
                let images =
                    images.ok_or_else(|| failed("this service does not download layers".into()))?;
                tracing::info!(image = %lazy.image, "downloading all layers for a new image or layer");
                images.bring(&self.store, manifest, lazy).map_err(failed)?;
            }
        }
        let taken = self.take(name, |_| Ok(()))?;
        let content = taken.record.content().filter(|_| taken.number == number);
        let Some(content) = content.filter(|it| it.lazy.as_ref() == Some(lazy)) else {
            // Another call has updated the record in the meantime.
            return Ok(());
        };
        let content = SnapshotContent { lazy: None, image: None, ..content.clone() };
        let kind = SnapshotKind::Committed(content);
        let record = SnapshotRecord { kind, ..taken.record.clone() };
        let (record, ()) = self.settle_made(number, || Ok((record, ())))?;
        taken.change(|entry| entry.record = record);
        Ok(())
    }

    /// Returns a name that no other call uses.
    fn new_name(&self, manifest: &Digest) -> TemporaryName<'_> {
        let number = self.lazy.names.fetch_add(1, Ordering::Relaxed);
        let manifest = manifest.to_string().replace(':', "-");
        let name = format!("{}:{manifest}-{number}", self.names());
        TemporaryName {
            store: &self.store,
            name: name.parse().expect("the name is made of hex digits"),
        }
    }

    /// Returns the common prefix of all of these names.
    fn names(&self) -> String {
        // The instance's name is hashed, because it may contain characters that names of images cannot contain.
        let instance = Digest::sha256(self.instance.name().as_bytes()).to_string();
        format!("quire-engine/{}", instance.trim_start_matches("sha256:"))
    }

    /// Removes the names that an earlier service has left.
    pub(super) fn forget_names(&self) {
        let Ok((names, _)) = self.store.refs.readable() else { return };
        let ours = self.names() + ":";
        for name in names.keys().filter(|it| it.as_str().starts_with(&ours)) {
            forget_name(&self.store, name);
        }
    }
}

/// Prefix of such snapshots. Names of engines never begin with it.
const SKIPPED: &str = "quire/";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_image_that_the_engine_has_from_there_is_asked_for() {
        let manifest = Digest::sha256(b"manifest");
        let labels = |all: &[(&str, &str)]| -> HashMap<String, String> {
            all.iter().map(|it| (it.0.to_owned(), it.1.to_owned())).collect()
        };
        let name = "r.example:5000/team/app:1";
        let wanted = labels(&[(IMAGE, name), (MANIFEST, &manifest.to_string())]);
        let wanted = LazyLabels::from_labels(&wanted).unwrap();
        assert_eq!(wanted.reference.to_string(), format!("{name}@{manifest}"));
        let source = "containerd.io/distribution.source.r.example";
        for (label, value, expect) in [
            (source, "team/app", true),
            (source, "other,team/app", true),
            (source, "team/app/more", false),
            (source, "", false),
            ("containerd.io/distribution.source.example", "team/app", false),
            ("containerd.io/distribution.source", "team/app", false),
        ] {
            assert_eq!(wanted.is_from(&labels(&[(label, value)])), expect, "{label} {value}");
        }
        for wrong in [
            &[(IMAGE, name)][..],
            &[(MANIFEST, "sha256:00")],
            &[(IMAGE, "/"), (MANIFEST, &manifest.to_string())],
        ] {
            assert_eq!(LazyLabels::from_labels(&labels(wrong)), None, "{wrong:?}");
        }
    }
}
