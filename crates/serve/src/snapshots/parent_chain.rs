//! Images and layers of the snapshots in a parent chain. The chain is an image of layers, and perhaps directories
//! above it that were written to through other roots.

use std::io::Read;
use std::path::Path;

use container::changes::Owners;
use image::digest::Digest;
use image::tree::Builder;
use image::verity::ImageId;
use store::{Seconds, SnapshotContent, SnapshotKind, SnapshotRecord};
use transfer::export::PackedLayer;
use transfer::image_of_layers;

use super::cancellation::CancelToken;
use super::content::ContentWriter;
use super::error::SnapshotterError;
use super::labels::is_unpacked;
use super::layers::compare::{Compared, LayerRequest, LayerWriter};
use super::layers::from_dir::{Base, LayerClaim, tree_of};
use super::layers::heal::{LostLayer, lost};
use super::roots::Below;
use super::snapshotter::Snapshotter;
use super::state::is_directory;

impl Snapshotter {
    /// Returns the lower layers of a root on this snapshot. Makes the image if it does not exist.
    pub(super) fn below(&self, parent: Option<u64>) -> Result<Below, SnapshotterError> {
        let (base, directories) = {
            let state = self.state();
            (state.base_of(parent)?, state.directories(parent))
        };
        let Some(number) = base else {
            return Ok(Below { image: self.empty_image()?, lazy: None, directories });
        };
        loop {
            self.image_of(number)?;
            let state = self.state();
            let content = state.content(number);
            let content = content.ok_or_else(|| SnapshotterError::Absent(number.to_string()))?;
            // Another call may have downloaded the layers in between. Then the next iteration makes the image from
            // these layers.
            if let Some(image) = content.image {
                let lazy = content.lazy.map(|it| it.manifest);
                return Ok(Below { image, lazy, directories });
            }
        }
    }

    /// Returns the base of a new layer on this snapshot. Directories in the chain are made layers.
    pub(super) fn base(&self, parent: Option<u64>) -> Result<Base, SnapshotterError> {
        let image = parent.map(|it| self.whole_image_of(it)).transpose()?;
        Ok(Base { image, layers: self.known_layers(parent)? })
    }

    /// Returns the layers of a chain that has no directories, because layers never become directories.
    fn known_layers(&self, parent: Option<u64>) -> Result<Vec<Digest>, SnapshotterError> {
        let layers = self.state().layers_below(parent);
        layers.ok_or_else(|| SnapshotterError::Broken(parent.unwrap_or_default()))
    }

    /// Returns the image of a committed snapshot after downloading all of its layers.
    pub(super) fn whole_image_of(&self, number: u64) -> Result<ImageId, SnapshotterError> {
        let is_lazy = self.state().content(number).is_some_and(|it| it.lazy.is_some());
        if is_lazy {
            self.bring_layers(number)?;
        }
        self.image_of(number)
    }

    /// Returns the image of a committed snapshot. Makes the image at the first call.
    pub(super) fn image_of(&self, number: u64) -> Result<ImageId, SnapshotterError> {
        let (name, directories) = {
            let state = self.state();
            let entry = state.entries.get(&number);
            let entry = entry.ok_or_else(|| SnapshotterError::Absent(number.to_string()))?;
            if let Some(image) = entry.record.content().and_then(|it| it.image) {
                return Ok(image);
            }
            let of_directories = state.chain(Some(number)).filter(|it| is_directory(it.1));
            let directories: Vec<_> = of_directories.map(|it| it.0).collect();
            (entry.record.name.clone(), directories)
        };
        // An image consists of layers only.
        for directory in directories.into_iter().rev() {
            self.make_layer(directory)?;
        }
        // The image is made of its layers.
        self.bring_layers(number)?;
        let taken = self.take(&name, |_| Ok(()))?;
        let (record, image) = self.make_image(number, taken.record.clone())?;
        taken.change(|entry| entry.record = record);
        Ok(image)
    }

    /// Makes the image of a committed snapshot before it is needed.
    pub(super) fn make_ready(&self, name: &str) {
        let number = self.state().committed(name);
        let made = number.and_then(|it| self.image_of(it));
        if let Err(error) = made {
            let error: &dyn std::error::Error = &error;
            // The error is repeated when the image is needed.
            tracing::debug!(error, name = %name.escape_debug(), "cannot make an image ahead of its use");
        }
    }

    fn make_image(
        &self,
        number: u64,
        record: SnapshotRecord,
    ) -> Result<(SnapshotRecord, ImageId), SnapshotterError> {
        let SnapshotKind::Committed(content) = &record.kind else {
            return Err(SnapshotterError::NotCommitted(record.name));
        };
        // Another call has made the image in the meantime.
        if let Some(image) = content.image {
            return Ok((record, image));
        }
        let layers = self.known_layers(Some(number))?;
        let content = content.clone();
        self.settle_made(number, || {
            let now = Seconds((self.environment.now)().seconds);
            // An image that was pulled into the store need not be made again.
            let (image, bytes) = match image_of_layers(&self.store, &layers) {
                Some(image) => (image, 0),
                None => self.layers.maker.stack(&self.store, &layers, now)?,
            };
            let bytes = content.bytes + bytes;
            let content = SnapshotContent { image: Some(image), bytes, ..content };
            Ok((SnapshotRecord { kind: SnapshotKind::Committed(content), ..record.clone() }, image))
        })
    }

    /// Makes layer and image of a directory that has children. All snapshots below it must be layers.
    fn make_layer(&self, number: u64) -> Result<(), SnapshotterError> {
        let Some(name) = self.state().entries.get(&number).map(|it| it.record.name.clone()) else {
            return Ok(());
        };
        let taken = self.take(&name, |_| Ok(()))?;
        // Another call may have made the layer in the meantime.
        if is_directory(&taken.record) {
            let base = self.base(taken.record.parent)?;
            let upper = self.instance.changes(number).join("upper");
            let made = self.settle_made(number, || {
                let now = Seconds((self.environment.now)().seconds);
                let ids = Owners::default();
                let content = self.layers.maker.ingest(&self.store, &base, &upper, &ids, now)?;
                let kind = SnapshotKind::Committed(content);
                Ok((SnapshotRecord { kind, ..taken.record.clone() }, ()))
            })?;
            taken.change(|entry| entry.record = made.0);
        }
        drop(taken);
        self.state().spare.insert(number);
        self.drop_spare();
        Ok(())
    }

    /// Removes the directories of snapshots that have become layers, unless a root may use them.
    pub(super) fn drop_spare(&self) {
        let free = self.state().take_spare();
        for number in free {
            let dropped = self.quota.drop(&self.instance, number);
            let dropped = dropped.and_then(|()| Ok(self.instance.drop_changes(number)?));
            if let Err(error) = dropped {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, number, "cannot remove the changes that a layer was made of");
            }
        }
    }

    /// Returns the layers below a snapshot that have lost data. This is checked only if a repair has marked their
    /// image, or the image must be made. Snapshots for unpacking are skipped, because they need no root.
    pub(super) fn lost_layers(&self, key: &str, parent: &str) -> Vec<LostLayer> {
        if parent.is_empty() || is_unpacked(key) {
            return Vec::new();
        }
        let (content, layers) = {
            let state = self.state();
            let number = state.committed(parent);
            let Ok(Some(base)) = number.and_then(|it| state.base_of(Some(it))) else {
                return Vec::new();
            };
            (state.content(base).cloned(), state.layers_below(Some(base)).unwrap_or_default())
        };
        let Some(content) = content.filter(|it| it.lazy.is_none()) else { return Vec::new() };
        if content.image.is_some_and(|it| !self.store.downloads.is_lacking(&it).unwrap_or(false)) {
            return Vec::new();
        }
        lost(&self.store, layers)
    }

    /// Reads the blob of a layer again. The existing data of the layer is not changed.
    pub(super) fn read_again(
        &self,
        claim: &LayerClaim,
        blob: impl Read + Send,
        wanted: &CancelToken,
    ) -> Result<(), SnapshotterError> {
        let now = Seconds((self.environment.now)().seconds);
        self.layers.maker.layer(&self.keeper()?, claim, blob, wanted, now).map(drop)
    }

    /// Returns the difference between two roots of this service: of a view, and of a snapshot with the same parent.
    /// Returns `None` for other paths.
    pub(super) fn compared(&self, left: &Path, right: &Path) -> Option<Compared> {
        let state = self.state();
        let at = |root: &Path| state.entries.keys().find(|it| self.instance.root(**it) == root);
        Compared::of(&state, *at(left)?, *at(right)?)
    }

    /// Writes the difference between two roots as a layer.
    pub(super) fn write_compared(
        &self,
        compared: &Compared,
        wish: LayerRequest,
        wanted: &CancelToken,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let writer = LayerWriter {
            store: &self.store,
            instance: &self.instance,
            maker: &self.layers.maker,
            request: wish,
            cancel: wanted,
        };
        match compared {
            Compared::Written(active) => {
                let image = match active.parent {
                    Some(parent) => tree_of(&self.store, &self.whole_image_of(parent)?)?,
                    None => Builder::new().finish(),
                };
                writer.write_changes(active, &image, out, || active.is_current(&self.state()))
            }
            Compared::Layer(layer) => writer.write_layer(layer, out),
            Compared::Directory(number) => {
                // An image consists of layers only, so this makes a layer of the directory.
                self.image_of(*number)?;
                let layers = self.state().layers_below(Some(*number)).unwrap_or_default();
                let layer = layers.last();
                let layer = layer.ok_or_else(|| SnapshotterError::Absent(number.to_string()))?;
                writer.write_layer(layer, out)
            }
        }
    }
}
