//! Locks of snapshots, which are released even after a panic.

use store::SnapshotRecord;

use super::snapshotter::Snapshotter;
use super::space::deferred_delete::Thrown;
use super::state::{SnapshotEntry, Work};

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

/// A snapshot that is being made. Dropping it removes it, unless it is kept.
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
            let _gone = self.snapshotter.quota.drop(&self.snapshotter.instance, self.number);
            if self.is_made
                && let Ok(folder) = self.snapshotter.instance.hide(self.number)
            {
                self.snapshotter.trash.throw(Thrown::Folder(folder));
            }
        }
        self.snapshotter.released.notify_all();
    }
}
