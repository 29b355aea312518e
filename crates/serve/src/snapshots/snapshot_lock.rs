//! Locks of snapshots, which are released even after a panic.

use std::sync::PoisonError;

use store::{SnapshotKind, SnapshotRecord};

use super::error::SnapshotterError;
use super::labels::{Labels, asked_map, asked_size, check_labels, check_name};
use super::snapshotter::Snapshotter;
use super::space::deferred_delete::Thrown;
use super::state::{Root, SnapshotEntry, Work};

/// A locked snapshot.
#[derive(Debug)]
pub(super) struct Taken<'s> {
    pub(super) snapshotter: &'s Snapshotter,
    pub(super) number: u64,
    pub(super) record: SnapshotRecord,
}

impl Taken<'_> {
    /// Changes the entry in memory.
    pub(super) fn change(&self, change: impl FnOnce(&mut SnapshotEntry)) {
        if let Some(entry) = self.snapshotter.state().entries.get_mut(&self.number) {
            change(entry);
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.change(|entry| entry.work = Work::None);
        self.snapshotter.released.notify_all();
    }
}

/// A snapshot that is being made. Dropping this value removes the snapshot, unless it was kept.
#[derive(Debug)]
pub(super) struct NewSnapshot<'s> {
    pub(super) snapshotter: &'s Snapshotter,
    pub(super) number: u64,
    pub(super) record: SnapshotRecord,
    /// Whether its folder exists.
    pub(super) is_made: bool,
    pub(super) is_kept: bool,
}

impl NewSnapshot<'_> {
    /// Completes the snapshot.
    pub(super) fn keep(mut self, change: impl FnOnce(&mut SnapshotEntry)) {
        self.is_kept = true;
        if let Some(entry) = self.snapshotter.state().entries.get_mut(&self.number) {
            change(entry);
            entry.work = Work::None;
        }
    }
}

impl Drop for NewSnapshot<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.snapshotter.state().forget(self.number);
            // If an unmount fails, the next start of the service repeats it.
            let _gone = self.snapshotter.drop_limit(self.number);
            if self.is_made
                && let Ok(folder) = self.snapshotter.instance.hide(self.number)
            {
                self.snapshotter.trash.throw(Thrown::Folder(folder));
            }
        }
        self.snapshotter.released.notify_all();
    }
}

impl Snapshotter {
    /// Reserves a name for a new snapshot, which is locked from then on, and creates its folder.
    pub(super) fn make(
        &self,
        key: &str,
        parent: &str,
        labels: &Labels,
        kind: SnapshotKind,
    ) -> Result<NewSnapshot<'_>, SnapshotterError> {
        check_name(key)?;
        check_labels(labels)?;
        asked_map(key, labels)?;
        asked_size(key, labels)?;
        let now = (self.surroundings.now)();
        let mut state = self.state();
        let parent = match parent {
            "" => None,
            parent => Some(state.committed(parent)?),
        };
        let number = state.next;
        state.reserve(key, number)?;
        state.next += 1;
        let (name, labels) = (key.to_owned(), labels.clone());
        let record = SnapshotRecord { name, kind, parent, labels, created: now, updated: now };
        let entry = SnapshotEntry { record: record.clone(), root: Root::No, work: Work::Some };
        state.entries.insert(number, entry);
        drop(state);
        let mut new =
            NewSnapshot { snapshotter: self, number, record, is_made: false, is_kept: false };
        self.instance.make(number, &new.record)?;
        new.is_made = true;
        Ok(new)
    }

    /// Waits until a snapshot is free, and locks it.
    pub(super) fn take(
        &self,
        key: &str,
        check: impl Fn(&SnapshotRecord) -> Result<(), SnapshotterError>,
    ) -> Result<Taken<'_>, SnapshotterError> {
        let mut state = self.state();
        loop {
            let number = state.number(key)?;
            let entry = state.entries.get_mut(&number);
            let entry = entry.ok_or_else(|| SnapshotterError::Absent(key.to_owned()))?;
            if entry.work == Work::None {
                check(&entry.record)?;
                entry.work = Work::Some;
                return Ok(Taken { snapshotter: self, number, record: entry.record.clone() });
            }
            state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
