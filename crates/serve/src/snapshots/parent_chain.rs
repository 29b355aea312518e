//! Parent chain of a snapshot: an image of layers, and perhaps directories above it that were written to through
//! other roots.

use container::changes::Owners;
use image::digest::Digest;
use image::verity::ImageId;
use store::{LazySnapshot, Seconds, SnapshotContent, SnapshotKind, SnapshotRecord};
use transfer::image_of_layers;

use super::error::SnapshotterError;
use super::layers::from_dir::Base;
use super::roots::Below;
use super::snapshotter::Snapshotter;
use super::state::{Root, SnapshotEntry, State, Work};

/// Largest number of directories above an image. Overlayfs supports 500 layers.
const DIRECTORIES_MAX: usize = 64;

impl Snapshotter {
    /// Returns the layers up to a snapshot, from the lowest. Returns `None` if the chain is incomplete or has
    /// directories, which are no layers.
    pub(super) fn layers_below(&self, parent: Option<u64>) -> Option<Vec<Digest>> {
        let state = self.state();
        state.check_whole(parent).ok()?;
        let layer = |record: &SnapshotRecord| match &record.kind {
            SnapshotKind::Committed(content) => Some(content.layer),
            _ => None,
        };
        let mut layers: Vec<_> =
            state.chain(parent).map(|it| layer(it.1)).collect::<Option<_>>()?;
        layers.reverse();
        Some(layers)
    }

    /// Returns the lower layers of a root on this snapshot. Makes the image if it does not exist.
    pub(super) fn below(&self, parent: Option<u64>) -> Result<Below, SnapshotterError> {
        let base = self.base_of(parent)?;
        let directories = self.state().directories(parent);
        let Some(number) = base else {
            return Ok(Below { image: self.empty_image()?, lazy: None, directories });
        };
        loop {
            self.image_of(number)?;
            let state = self.state();
            let content = state.entries.get(&number).and_then(|it| it.record.content());
            let content = content.ok_or_else(|| SnapshotterError::Absent(number.to_string()))?;
            // Another call may have downloaded the layers in between. Then the next iteration makes the image from
            // these layers.
            if let Some(image) = content.image {
                let lazy = content.lazy.map(|it| it.manifest);
                return Ok(Below { image, lazy, directories });
            }
        }
    }

    /// Returns the highest layer below a root on a snapshot.
    pub(super) fn base_of(&self, parent: Option<u64>) -> Result<Option<u64>, SnapshotterError> {
        let state = self.state();
        state.check_whole(parent)?;
        let above = state.directories(parent).len();
        Ok(state.chain(parent).nth(above).map(|it| it.0))
    }

    /// Returns whether a commit on this snapshot may stay a directory.
    pub(super) fn has_room_above(&self, parent: Option<u64>) -> bool {
        self.state().directories(parent).len() < DIRECTORIES_MAX
    }

    /// Returns the base of a new layer on this snapshot. Directories in the chain are made layers.
    pub(super) fn base(&self, parent: Option<u64>) -> Result<Base, SnapshotterError> {
        let image = parent.map(|it| self.whole_image_of(it)).transpose()?;
        Ok(Base { image, layers: self.known_layers(parent)? })
    }

    /// Returns the layers of a chain that has no directories, because layers never become directories.
    fn known_layers(&self, parent: Option<u64>) -> Result<Vec<Digest>, SnapshotterError> {
        let layers = self.layers_below(parent);
        layers.ok_or_else(|| SnapshotterError::Broken(parent.unwrap_or_default()))
    }

    /// Returns the lazy image of a snapshot, if its layer is not downloaded.
    pub(super) fn lazy_of(&self, number: u64) -> Option<LazySnapshot> {
        self.state().entries.get(&number)?.record.content()?.lazy
    }

    /// Returns the image of a committed snapshot after downloading all of its layers.
    pub(super) fn whole_image_of(&self, number: u64) -> Result<ImageId, SnapshotterError> {
        if self.lazy_of(number).is_some() {
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
            let now = Seconds((self.surroundings.now)().seconds);
            // An image that was pulled into the store need not be made again.
            let (image, bytes) = match image_of_layers(&self.store, &layers) {
                Some(image) => (image, 0),
                None => self.resources.stack(&self.store, &layers, now)?,
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
                let now = Seconds((self.surroundings.now)().seconds);
                let ids = Owners::default();
                let content = self.resources.ingest(&self.store, &base, &upper, &ids, now)?;
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
        let free: Vec<_> = {
            let mut state = self.state();
            let free = state.spare.iter().copied().filter(|it| !state.is_below_a_root(*it));
            let free: Vec<_> = free.collect();
            state.spare.retain(|it| !free.contains(it));
            free
        };
        for number in free {
            let dropped = self.drop_limit(number);
            let dropped = dropped.and_then(|()| Ok(self.instance.drop_changes(number)?));
            if let Err(error) = dropped {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, number, "cannot remove the changes that a layer was made of");
            }
        }
    }
}

const fn is_directory(record: &SnapshotRecord) -> bool {
    matches!(record.kind, SnapshotKind::Directory(_))
}

impl State {
    /// Returns a snapshot and its parents, from the top. Snapshots with children cannot be removed.
    pub(super) fn chain(
        &self,
        top: Option<u64>,
    ) -> impl Iterator<Item = (u64, &SnapshotRecord)> + Clone {
        let entry = |number: Option<u64>| {
            let number = number?;
            self.entries.get(&number).map(|it| (number, &it.record))
        };
        // A damaged record may name a parent with a higher number.
        let below = move |it: &(u64, &SnapshotRecord)| entry(it.1.parent.filter(|up| *up < it.0));
        std::iter::successors(entry(top), below)
    }

    /// Refuses a chain with a missing record, which could not be read when the service began.
    fn check_whole(&self, top: Option<u64>) -> Result<(), SnapshotterError> {
        let lowest = self.chain(top).last();
        match lowest.map_or(top, |it| it.1.parent) {
            None => Ok(()),
            Some(missing) => Err(SnapshotterError::Broken(missing)),
        }
    }

    /// Returns the directories above the highest layer of a chain, uppermost first.
    fn directories(&self, top: Option<u64>) -> Vec<u64> {
        let directories = self.chain(top).take_while(|it| is_directory(it.1));
        directories.map(|it| it.0).collect()
    }

    /// Returns the image below the root of a snapshot, if it was made.
    pub(super) fn image_below(&self, entry: &SnapshotEntry) -> Option<ImageId> {
        let base = self.chain(entry.record.parent).find(|it| !is_directory(it.1));
        base?.1.content()?.image
    }

    /// Returns whether a root with this snapshot below it is mounted, or may soon be.
    fn is_below_a_root(&self, number: u64) -> bool {
        // If the chain is incomplete, assume that the snapshot is in use.
        let has_root =
            self.entries.values().filter(|it| it.root != Root::No || it.work != Work::None);
        has_root.into_iter().any(|it| {
            let parent = it.record.parent;
            self.check_whole(parent).is_err() || self.chain(parent).any(|it| it.0 == number)
        })
    }
}
