//! Makes layers for engines that compare two roots, from the changes of a container and without reading its image.

use std::fs::File;
use std::os::fd::AsFd as _;

use container::changes::{self, ChangesError, Owners as Ids, Upper};
use image::digest::Digest;
use image::tree::{Timestamp, Tree};
use store::{SnapshotInstance, SnapshotKind, Store};
use transfer::export::{Encoding, Options, PackedLayer, pack};

use crate::snapshots::cancellation::CancelToken;
use crate::snapshots::content::ContentWriter;
use crate::snapshots::error::{SnapshotterError, unopened};
use crate::snapshots::id_map::noted_map;
use crate::snapshots::layers::from_dir::{Resources, tell_of_skipped};
use crate::snapshots::state::{State, Work};

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
    pub(in crate::snapshots) parent: Option<u64>,
}

/// How to write a layer.
#[derive(Debug, Clone, Copy)]
pub(in crate::snapshots) struct LayerRequest {
    /// Compression; `None` for a plain tar.
    pub(in crate::snapshots) encoding: Option<Encoding>,
    /// Upper limit for the times of files.
    pub(in crate::snapshots) latest: Option<Timestamp>,
}

impl Compared {
    /// Returns the difference between the roots of two snapshots.
    pub(in crate::snapshots) fn of(state: &State, left: u64, right: u64) -> Option<Self> {
        let at = |number| state.entries.get(&number).filter(|it| it.work != Work::Removal);
        let (number, left, right) = (right, at(left)?, at(right)?);
        let below = left.record.parent;
        // Roots that are no views may have been written to.
        if left.record.kind != SnapshotKind::View {
            return None;
        }
        match &right.record.kind {
            SnapshotKind::Active(None) if right.record.parent == below => {
                let name = right.record.name.clone();
                Some(Self::Written(ActiveSnapshot { number, name, parent: below }))
            }
            SnapshotKind::Active(Some(content)) if right.record.parent == below => {
                Some(Self::Layer(content.layer))
            }
            SnapshotKind::View => {
                let number = right.record.parent?;
                let committed = &state.entries.get(&number)?.record;
                match committed.content() {
                    _ if committed.parent != below => None,
                    // A layer that is not downloaded is left to the engine's differ, which reads it through the
                    // mounts.
                    Some(content) if content.lazy.is_some() => None,
                    Some(content) => Some(Self::Layer(content.layer)),
                    None => Some(Self::Directory(number)),
                }
            }
            _ => None,
        }
    }
}

impl ActiveSnapshot {
    /// Checks that the snapshot still exists and is active.
    pub(in crate::snapshots) fn is_current(&self, state: &State) -> Result<(), SnapshotterError> {
        let entry = state.entries.get(&self.number).filter(|it| it.work != Work::Removal);
        let is_same = entry.is_some_and(|it| {
            it.record.name == self.name && it.record.kind == SnapshotKind::Active(None)
        });
        if is_same { Ok(()) } else { Err(SnapshotterError::Absent(self.name.clone())) }
    }
}

/// Writes layers for an engine.
#[derive(Debug)]
pub(in crate::snapshots) struct LayerWriter<'a> {
    pub(in crate::snapshots) store: &'a Store,
    pub(in crate::snapshots) instance: &'a SnapshotInstance,
    pub(in crate::snapshots) maker: &'a Resources,
    pub(in crate::snapshots) request: LayerRequest,
    pub(in crate::snapshots) cancel: &'a CancelToken,
}

impl LayerWriter<'_> {
    /// Writes a layer of the store.
    pub(in crate::snapshots) fn write_layer(
        &self,
        layer: &Digest,
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let tar = self.store.layer_tar(layer);
        let tar = tar.map_err(|error| SnapshotterError::Bytes(Box::new(error)))?;
        let (size, options) = (Some(tar.size()), self.packing());
        Ok(pack(tar, size, self.request.encoding, out, &options)?)
    }

    /// Writes the changes of an active snapshot on an image. The container may still write: if a file changes while
    /// it is read, all is read again. `check` finds out whether the snapshot is still active.
    pub(in crate::snapshots) fn write_changes(
        &self,
        active: &ActiveSnapshot,
        image: &Tree,
        out: &mut ContentWriter,
        check: impl Fn() -> Result<(), SnapshotterError>,
    ) -> Result<PackedLayer, SnapshotterError> {
        let mut tries = 1;
        loop {
            let written = self.try_changes(active, image, out);
            // A snapshot that is being removed would look as if the container had deleted its files.
            check()?;
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
        out: &mut ContentWriter,
    ) -> Result<PackedLayer, SnapshotterError> {
        let upper = self.instance.changes(active.number).join("upper");
        if !upper.exists() {
            return Err(SnapshotterError::NeverMounted(active.name.clone()));
        }
        let directory = File::open(upper).map_err(unopened)?;
        let map = noted_map(self.instance, active.number)?;
        let upper = Upper {
            directory: directory.as_fd(),
            image,
            store: self.store,
            ids: &map.as_ref().map(Ids::of_map).unwrap_or_default(),
            latest: self.request.latest,
            cancel: self.cancel.cancel(),
        };
        let options = self.packing();
        let (report, packed) = changes::through(
            |tar| changes::write(&upper, tar),
            |tar| Ok::<_, SnapshotterError>(pack(tar, None, self.request.encoding, out, &options)?),
        )?;
        tell_of_skipped(&report);
        Ok(packed)
    }

    fn packing(&self) -> Options<'_> {
        Options {
            threads: self.maker.threads,
            scratch: &self.maker.scratch,
            progress: &|_| {},
            cancel: self.cancel.cancel(),
        }
    }
}
