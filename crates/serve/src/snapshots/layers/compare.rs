//! Makes layers for engines that compare two roots, from the changes of a container and without reading its image.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;

use container::changes::{self, ChangesError, Owners as Ids, Upper};
use image::digest::Digest;
use image::tree::{Builder, Timestamp, Tree};
use store::SnapshotKind;
use transfer::export::{Encoding, Options, PackedLayer, pack};

use crate::snapshots::cancellation::CancelToken;
use crate::snapshots::content::ContentWriter;
use crate::snapshots::error::SnapshotterError;
use crate::snapshots::layers::from_dir::{tell_of_skipped, tree_of};
use crate::snapshots::snapshotter::Snapshotter;
use crate::snapshots::state::Work;

/// How often changes are read if the container writes to them at the same time.
const TRIES: u32 = 3;

/// The difference between two roots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::snapshots) enum Compared {
    /// The changes of an active snapshot so far.
    Written(ActiveSnapshot),
    /// A layer of the store.
    Layer(Digest),
    /// The directory of the committed snapshot with this number.
    Directory(u64),
}

/// An active snapshot and its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::snapshots) struct ActiveSnapshot {
    number: u64,
    name: String,
    parent: Option<u64>,
}

/// How to write a layer.
#[derive(Debug, Clone, Copy)]
pub(in crate::snapshots) struct LayerRequest {
    /// Compression; `None` for a plain tar.
    pub(in crate::snapshots) encoding: Option<Encoding>,
    /// Upper limit for the times of files.
    pub(in crate::snapshots) latest: Option<Timestamp>,
}

impl Snapshotter {
    /// Returns the difference between two roots of this service: of a view, and of a snapshot with the same parent.
    /// Returns `None` for other paths.
    pub(in crate::snapshots) fn compared(&self, left: &Path, right: &Path) -> Option<Compared> {
        let state = self.state();
        let at = |root: &Path| {
            let found = state.entries.iter().find(|it| self.instance.root(*it.0) == root);
            found.filter(|it| it.1.work != Work::Removal)
        };
        let (_, left) = at(left)?;
        let (number, right) = at(right)?;
        let below = left.record.parent;
        // Roots that are no views may have been written to.
        if left.record.kind != SnapshotKind::View {
            return None;
        }
        match &right.record.kind {
            SnapshotKind::Active(None) if right.record.parent == below => {
                let name = right.record.name.clone();
                Some(Compared::Written(ActiveSnapshot { number: *number, name, parent: below }))
            }
            SnapshotKind::Active(Some(content)) if right.record.parent == below => {
                Some(Compared::Layer(content.layer))
            }
            SnapshotKind::View => {
                let number = right.record.parent?;
                let committed = &state.entries.get(&number)?.record;
                match committed.content() {
                    _ if committed.parent != below => None,
                    // A layer that is not downloaded is left to the engine's differ, which reads it through the
                    // mounts.
                    Some(content) if content.lazy.is_some() => None,
                    Some(content) => Some(Compared::Layer(content.layer)),
                    None => Some(Compared::Directory(number)),
                }
            }
            _ => None,
        }
    }

    /// Writes the difference between two roots as a layer.
    pub(in crate::snapshots) fn write_compared(
        &self,
        compared: &Compared,
        wish: LayerRequest,
        wanted: &CancelToken,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        match compared {
            Compared::Written(active) => self.write_changes(active, wish, wanted, out),
            Compared::Layer(layer) => self.write_layer(layer, wish, wanted, out),
            Compared::Directory(number) => {
                // An image consists only of layers, so this call also makes a layer of the directory.
                self.image_of(*number)?;
                let layers = self.layers_below(Some(*number)).unwrap_or_default();
                let layer = layers.last();
                let layer = layer.ok_or_else(|| SnapshotterError::Absent(number.to_string()))?;
                self.write_layer(layer, wish, wanted, out)
            }
        }
    }

    fn write_layer(
        &self,
        layer: &Digest,
        wish: LayerRequest,
        wanted: &CancelToken,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let tar = self.store.layer_tar(layer);
        let tar = tar.map_err(|error| SnapshotterError::Bytes(Box::new(error)))?;
        let (size, options) = (Some(tar.size()), self.packing(wanted));
        Ok(pack(tar, size, wish.encoding, out, &options)?)
    }

    /// Writes the changes of an active snapshot. The container may still write: if a file changes while it is read,
    /// all changes are read again.
    fn write_changes(
        &self,
        active: &ActiveSnapshot,
        wish: LayerRequest,
        wanted: &CancelToken,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let image = match active.parent {
            Some(parent) => tree_of(&self.store, &self.whole_image_of(parent)?)?,
            None => Builder::new().finish(),
        };
        let mut tries = 1;
        loop {
            let written = self.try_changes(active, &image, wish, wanted, out);
            // While a snapshot is being removed, it looks as if the container had deleted its files.
            self.check_active(active)?;
            match written {
                Err(SnapshotterError::Changes(source @ ChangesError::Changed(_))) => {
                    if tries == TRIES {
                        return Err(SnapshotterError::Busy { tries, source });
                    }
                    tries += 1;
                    out.again()?;
                }
                written => return written,
            }
        }
    }

    fn try_changes(
        &self,
        active: &ActiveSnapshot,
        image: &Tree,
        wish: LayerRequest,
        wanted: &CancelToken,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let upper = self.instance.changes(active.number).join("upper");
        if !upper.exists() {
            return Err(SnapshotterError::NeverMounted(active.name.clone()));
        }
        let directory = File::open(upper).map_err(SnapshotterError::Directory)?;
        let map = self.noted_map(active.number)?;
        let upper = Upper {
            directory: directory.as_fd(),
            image,
            store: &self.store,
            ids: &map.as_ref().map(Ids::of_map).unwrap_or_default(),
            latest: wish.latest,
            cancel: wanted.cancel(),
        };
        let options = self.packing(wanted);
        let (report, packed) = changes::through(
            |tar| changes::write(&upper, tar),
            |tar| Ok::<_, SnapshotterError>(pack(tar, None, wish.encoding, out, &options)?),
        )?;
        tell_of_skipped(&report);
        Ok(packed)
    }

    fn check_active(&self, active: &ActiveSnapshot) -> Result<(), SnapshotterError> {
        let state = self.state();
        let entry = state.entries.get(&active.number).filter(|it| it.work != Work::Removal);
        let is_same = entry.is_some_and(|it| {
            it.record.name == active.name && it.record.kind == SnapshotKind::Active(None)
        });
        if is_same { Ok(()) } else { Err(SnapshotterError::Absent(active.name.clone())) }
    }

    fn packing<'a>(&'a self, wanted: &'a CancelToken) -> Options<'a> {
        Options {
            threads: self.resources.threads,
            scratch: &self.resources.scratch,
            progress: &|_| {},
            cancel: wanted.cancel(),
        }
    }
}
