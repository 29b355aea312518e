//! The records of all snapshots of an engine, in memory.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use image::digest::Digest;
use image::verity::ImageId;
use store::{LazySnapshot, SnapshotContent, SnapshotKind, SnapshotRecord};

use super::error::SnapshotterError;
use super::labels::is_unpacked;

/// Largest number of directories above an image. Overlayfs supports 500 layers.
const DIRECTORIES_MAX: usize = 64;

/// The description of a snapshot for an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotInfo {
    pub record: SnapshotRecord,
    /// Name of the parent; empty for none.
    pub parent: String,
}

impl SnapshotInfo {
    /// Returns the value of a field of a filter.
    pub(super) fn field(&self, field: &[String]) -> Option<&str> {
        match field {
            [name] if name == "name" => Some(&self.record.name),
            [name] if name == "parent" => Some(&*self.parent).filter(|it| !it.is_empty()),
            [name] if name == "kind" => Some(kind_name(&self.record.kind)),
            [labels, rest @ ..] if labels == "labels" => {
                self.record.labels.get(&rest.join(".")).map(String::as_str)
            }
            _ => None,
        }
    }
}

/// Returns containerd's name of a kind.
pub(super) const fn kind_name(kind: &SnapshotKind) -> &'static str {
    match kind {
        SnapshotKind::View => "view",
        SnapshotKind::Active(_) => "active",
        SnapshotKind::Committed(_) | SnapshotKind::Directory(_) => "committed",
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) entries: BTreeMap<u64, SnapshotEntry>,
    /// Numbers by name. Includes names that running commits have reserved, with the number of the active snapshot.
    pub(super) names: HashMap<String, u64>,
    pub(super) next: u64,
    /// Snapshots that have become layers, but whose directories still exist.
    pub(super) spare: BTreeSet<u64>,
}

#[derive(Debug)]
pub(super) struct SnapshotEntry {
    pub(super) record: SnapshotRecord,
    pub(super) root: Root,
    pub(super) work: Work,
}

/// The running work on a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    None,
    Some,
    /// The snapshot is being removed and cannot get children.
    Removal,
}

/// Whether a root is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Root {
    No,
    /// Mounted by this service, from this image.
    Ours(ImageId),
    /// Mounted by an earlier service.
    Adopted,
}

impl State {
    pub(super) fn number(&self, key: &str) -> Result<u64, SnapshotterError> {
        let absent = || SnapshotterError::Absent(key.to_owned());
        let number = *self.names.get(key).ok_or_else(absent)?;
        // A name that is only reserved has no record yet.
        let is_its = self.entries.get(&number).is_some_and(|it| it.record.name == key);
        is_its.then_some(number).ok_or_else(absent)
    }

    /// Reserves a name.
    pub(super) fn reserve(&mut self, name: &str, number: u64) -> Result<(), SnapshotterError> {
        match self.names.entry(name.to_owned()) {
            Entry::Occupied(_) => Err(SnapshotterError::Exists(name.to_owned())),
            Entry::Vacant(free) => {
                free.insert(number);
                Ok(())
            }
        }
    }

    pub(super) fn committed(&self, name: &str) -> Result<u64, SnapshotterError> {
        let number = self.number(name)?;
        let entry = &self.entries[&number];
        match entry.record.kind {
            _ if entry.work == Work::Removal => Err(SnapshotterError::Absent(name.to_owned())),
            ref kind if kind.is_committed() => Ok(number),
            _ => Err(SnapshotterError::NotCommitted(name.to_owned())),
        }
    }

    pub(super) fn begin_removal(&mut self, number: u64) -> Result<(), SnapshotterError> {
        let child = self.entries.values().find(|it| it.record.parent == Some(number));
        let child = child.map(|it| it.record.name.clone());
        let Some(own) = self.entries.get_mut(&number) else { return Ok(()) };
        if let Some(child) = child {
            return Err(SnapshotterError::HasChild(own.record.name.clone(), child));
        }
        own.work = Work::Removal;
        Ok(())
    }

    pub(super) fn forget(&mut self, number: u64) {
        self.entries.remove(&number);
        self.spare.remove(&number);
        self.names.retain(|_, it| *it != number);
    }

    pub(super) fn info(&self, record: &SnapshotRecord) -> SnapshotInfo {
        let parent = record.parent.and_then(|it| self.entries.get(&it));
        let parent = parent.map(|it| it.record.name.clone()).unwrap_or_default();
        SnapshotInfo { record: record.clone(), parent }
    }

    /// Returns a snapshot and those below it, from the top. Snapshots with children cannot be removed.
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

    /// Returns the content of a snapshot whose changes are a layer.
    pub(super) fn content(&self, number: u64) -> Option<&SnapshotContent> {
        self.entries.get(&number)?.record.content()
    }

    /// Returns the layers up to a snapshot, from the lowest. Returns `None` if the chain is incomplete or has
    /// directories, which are no layers.
    pub(super) fn layers_below(&self, parent: Option<u64>) -> Option<Vec<Digest>> {
        self.check_whole(parent).ok()?;
        let layer = |record: &SnapshotRecord| match &record.kind {
            SnapshotKind::Committed(content) => Some(content.layer),
            _ => None,
        };
        let mut layers: Vec<_> = self.chain(parent).map(|it| layer(it.1)).collect::<Option<_>>()?;
        layers.reverse();
        Some(layers)
    }

    /// Returns the highest layer below a root on a snapshot.
    pub(super) fn base_of(&self, parent: Option<u64>) -> Result<Option<u64>, SnapshotterError> {
        self.check_whole(parent)?;
        let above = self.directories(parent).len();
        Ok(self.chain(parent).nth(above).map(|it| it.0))
    }

    /// Returns whether a commit on this snapshot may stay a directory.
    pub(super) fn has_room_above(&self, parent: Option<u64>) -> bool {
        self.directories(parent).len() < DIRECTORIES_MAX
    }

    /// Returns the snapshots of a chain whose layers are not downloaded, with their names.
    pub(super) fn lazy_chain(&self, top: u64) -> Vec<(u64, String, LazySnapshot)> {
        let lazy = |(number, record): (u64, &SnapshotRecord)| {
            Some((number, record.name.clone(), record.content()?.lazy?))
        };
        self.chain(Some(top)).filter_map(lazy).collect()
    }

    /// Returns the image of a manifest that a snapshot uses without its layers.
    pub(super) fn lazy_image(&self, manifest: &Digest) -> Option<ImageId> {
        let mut lazy = self.entries.values().filter_map(|it| it.record.content()?.lazy);
        lazy.find(|it| it.manifest == *manifest).map(|it| it.image)
    }

    /// Returns whether only the differ will use this snapshot. Then it needs no root, and without a root, no image is
    /// built for each intermediate layer. If the engine's own differ is used, the layers below already have images.
    pub(super) fn is_for_the_differ(&self, record: &SnapshotRecord) -> bool {
        let below = record.parent.and_then(|it| self.content(it));
        is_unpacked(&record.name) && below.is_some_and(|it| it.image.is_none() || it.lazy.is_some())
    }

    /// Returns the name of a snapshot to which a layer can be applied.
    pub(super) fn unpacked(&self, number: u64) -> Option<String> {
        let record = &self.entries.get(&number)?.record;
        let is_open = record.kind == SnapshotKind::Active(None) && is_unpacked(&record.name);
        is_open.then(|| record.name.clone())
    }

    /// Takes the snapshots whose directories can be removed: they have become layers, and no root may use them.
    pub(super) fn take_spare(&mut self) -> Vec<u64> {
        let free = self.spare.iter().copied().filter(|it| !self.is_below_a_root(*it));
        let free: Vec<_> = free.collect();
        self.spare.retain(|it| !free.contains(it));
        free
    }

    /// Adds a locked snapshot, and returns its number.
    pub(super) fn add(
        &mut self,
        key: &str,
        parent: &str,
        new: impl FnOnce(Option<u64>) -> SnapshotRecord,
    ) -> Result<(u64, SnapshotRecord), SnapshotterError> {
        let parent = match parent {
            "" => None,
            parent => Some(self.committed(parent)?),
        };
        let number = self.next;
        self.reserve(key, number)?;
        self.next += 1;
        let record = new(parent);
        let entry = SnapshotEntry { record: record.clone(), root: Root::No, work: Work::Some };
        self.entries.insert(number, entry);
        Ok((number, record))
    }

    /// Locks a snapshot. Returns `None` if another call has locked it.
    pub(super) fn lock(
        &mut self,
        key: &str,
        check: impl FnOnce(&SnapshotRecord) -> Result<(), SnapshotterError>,
    ) -> Result<Option<(u64, SnapshotRecord)>, SnapshotterError> {
        let number = self.number(key)?;
        let entry = self.entries.get_mut(&number);
        let entry = entry.ok_or_else(|| SnapshotterError::Absent(key.to_owned()))?;
        if entry.work != Work::None {
            return Ok(None);
        }
        check(&entry.record)?;
        entry.work = Work::Some;
        Ok(Some((number, entry.record.clone())))
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
    pub(super) fn directories(&self, top: Option<u64>) -> Vec<u64> {
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

pub(super) const fn is_directory(record: &SnapshotRecord) -> bool {
    matches!(record.kind, SnapshotKind::Directory(_))
}
