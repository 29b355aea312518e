//! The records of all snapshots of an engine, in memory.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use image::verity::ImageId;
use store::{SnapshotKind, SnapshotRecord};

use super::error::SnapshotterError;

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
            [name] if name == "kind" => Some(match self.record.kind {
                SnapshotKind::View => "view",
                SnapshotKind::Active(_) => "active",
                SnapshotKind::Committed(_) | SnapshotKind::Directory(_) => "committed",
            }),
            [labels, rest @ ..] if labels == "labels" => {
                self.record.labels.get(&rest.join(".")).map(String::as_str)
            }
            _ => None,
        }
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
}
