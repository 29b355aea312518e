//! Layers for engines that compare roots: what was written to a container, without a walk of its image.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::Path;

use container::changes::{self, ChangesError, Owners as Ids, Upper};
use image::digest::Digest;
use image::tree::{Builder, Timestamp, Tree};
use store::SnapshotKind;
use transfer::export::{Encoding, Options, PackedLayer, pack};

use super::cancellation::Wanted;
use super::content::ContentWriter;
use super::error::SnapshotterError;
use super::layer_from_dir::{tell_of_skipped, tree_of};
use super::snapshotter::Snapshotter;
use super::state::Work;

/// How often changes are read if the container writes to them meanwhile.
const TRIES: u32 = 3;

/// Two roots of which one stands on the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Compared {
    /// Between them is what was written to an active snapshot so far.
    Written(ActiveSnapshot),
    /// Between them is a layer of the store.
    Layer(Digest),
    /// Between them is the directory of a committed snapshot, of this number.
    Directory(u64),
}

/// An active snapshot, and what it stands on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ActiveSnapshot {
    number: u64,
    name: String,
    parent: Option<u64>,
}

/// How a layer is to be written.
#[derive(Debug, Clone, Copy)]
pub(super) struct LayerWish {
    /// None for a tar.
    pub(super) encoding: Option<Encoding>,
    /// The latest time that a file may have.
    pub(super) latest: Option<Timestamp>,
}

impl Snapshotter {
    /// What is between two roots of this service: of a view, and of a snapshot on the same one. None for other paths.
    pub(super) fn compared(&self, left: &Path, right: &Path) -> Option<Compared> {
        let state = self.state();
        let at = |root: &Path| {
            let found = state.entries.iter().find(|it| self.instance.root(*it.0) == root);
            found.filter(|it| it.1.work != Work::Removal)
        };
        let (_, left) = at(left)?;
        let (number, right) = at(right)?;
        let below = left.record.parent;
        // Others may have been written to.
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
                    // The engine's own differ reads what is not here, through the mounts.
                    Some(content) if content.lazy.is_some() => None,
                    Some(content) => Some(Compared::Layer(content.layer)),
                    None => Some(Compared::Directory(number)),
                }
            }
            _ => None,
        }
    }

    /// Writes what is between two roots.
    pub(super) fn write_compared(
        &self,
        compared: &Compared,
        wish: LayerWish,
        wanted: &Wanted,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        match compared {
            Compared::Written(active) => self.write_changes(active, wish, wanted, out),
            Compared::Layer(layer) => self.write_layer(layer, wish, wanted, out),
            Compared::Directory(number) => {
                // An image has layers only.
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
        wish: LayerWish,
        wanted: &Wanted,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let tar = self.store.layer_tar(layer);
        let tar = tar.map_err(|error| SnapshotterError::Bytes(Box::new(error)))?;
        let (size, options) = (Some(tar.size()), self.packing(wanted));
        Ok(pack(tar, size, wish.encoding, out, &options)?)
    }

    /// The container may go on writing. What it is caught at is read again.
    fn write_changes(
        &self,
        active: &ActiveSnapshot,
        wish: LayerWish,
        wanted: &Wanted,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let image = match active.parent {
            Some(parent) => tree_of(&self.store, &self.whole_image_of(parent)?)?,
            None => Builder::new().finish(),
        };
        let mut tries = 1;
        loop {
            let written = self.try_changes(active, &image, (wish, wanted), out);
            // What somebody takes away looks as if the container had removed it.
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
        (wish, wanted): (LayerWish, &Wanted),
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

    fn packing<'a>(&'a self, wanted: &'a Wanted) -> Options<'a> {
        Options {
            threads: self.resources.threads,
            scratch: &self.resources.scratch,
            progress: &|_| {},
            cancel: wanted.cancel(),
        }
    }
}
