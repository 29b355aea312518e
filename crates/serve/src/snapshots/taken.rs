//! Snapshots on which one call works at a time, however it ends.

use store::SnapshotRecord;

use super::snapshotter::Snapshotter;
use super::state::{SnapshotEntry, Work};
use super::trash::Thrown;

/// A snapshot on which nobody else works meanwhile.
#[derive(Debug)]
pub(super) struct Taken<'s> {
    pub(super) snapshotter: &'s Snapshotter,
    pub(super) number: u64,
    pub(super) record: SnapshotRecord,
}

impl Taken<'_> {
    /// Changes what is in memory of it.
    pub(super) fn change(&self, change: impl FnOnce(&mut SnapshotEntry)) {
        if let Some(entry) = self.snapshotter.state().entries.get_mut(&self.number) {
            change(entry);
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.change(|entry| entry.work = Work::None);
        self.snapshotter.turned.notify_all();
    }
}

/// A snapshot in the making. It goes again unless it is kept.
#[derive(Debug)]
pub(super) struct NewSnapshot<'s> {
    pub(super) snapshotter: &'s Snapshotter,
    pub(super) number: u64,
    pub(super) record: SnapshotRecord,
    /// Whether there is a folder of it to remove.
    pub(super) is_made: bool,
    pub(super) is_kept: bool,
}

impl NewSnapshot<'_> {
    /// It is there from now on.
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
            // What is still mounted in there goes with the next start.
            let _gone = self.snapshotter.drop_limit(self.number);
            if self.is_made
                && let Ok(folder) = self.snapshotter.instance.hide(self.number)
            {
                self.snapshotter.trash.throw(Thrown::Folder(folder));
            }
        }
        self.snapshotter.turned.notify_all();
    }
}
