//! Locks of snapshots, which are released even after a panic.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use store::{SnapshotInstance, SnapshotRecord};

use super::error::SnapshotterError;
use super::space::deferred_delete::{Thrown, Trash};
use super::space::quota::Quota;
use super::state::{SnapshotEntry, State, Work};
use crate::unpoisoned::lock;

/// The records of all snapshots, with a lock for each.
#[derive(Debug)]
pub(super) struct SnapshotLocks {
    state: Mutex<State>,
    /// Signalled when a snapshot is released.
    released: Condvar,
}

impl SnapshotLocks {
    pub(super) fn new(state: State) -> Self {
        Self { state: Mutex::new(state), released: Condvar::new() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits until a snapshot is free, and locks it.
    pub(super) fn take(
        &self,
        key: &str,
        check: impl Fn(&SnapshotRecord) -> Result<(), SnapshotterError>,
    ) -> Result<Taken<'_>, SnapshotterError> {
        let mut state = self.state();
        loop {
            if let Some((number, record)) = state.lock(key, &check)? {
                return Ok(Taken { locks: self, number, record });
            }
            state = self.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A locked snapshot.
#[derive(Debug)]
pub(super) struct Taken<'s> {
    locks: &'s SnapshotLocks,
    pub(super) number: u64,
    pub(super) record: SnapshotRecord,
}

impl Taken<'_> {
    /// Changes the entry in memory.
    pub(super) fn change(&self, change: impl FnOnce(&mut SnapshotEntry)) {
        if let Some(entry) = self.locks.state().entries.get_mut(&self.number) {
            change(entry);
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.change(|entry| entry.work = Work::None);
        self.locks.released.notify_all();
    }
}

/// A snapshot that is being made. Dropping this value removes the snapshot, unless it was kept.
#[derive(Debug)]
pub(super) struct NewSnapshot<'s> {
    pub(super) locks: &'s SnapshotLocks,
    pub(super) instance: &'s SnapshotInstance,
    pub(super) quota: &'s Quota,
    pub(super) trash: &'s Trash,
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
        if let Some(entry) = self.locks.state().entries.get_mut(&self.number) {
            change(entry);
            entry.work = Work::None;
        }
    }
}

impl Drop for NewSnapshot<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            self.locks.state().forget(self.number);
            // If an unmount fails, the next start of the service repeats it.
            let _gone = self.quota.drop(self.instance, self.number);
            if self.is_made
                && let Ok(folder) = self.instance.hide(self.number)
            {
                self.trash.throw(Thrown::Folder(folder));
            }
        }
        self.locks.released.notify_all();
    }
}
