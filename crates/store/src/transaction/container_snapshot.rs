//! Publishes, syncs and removes snapshots of containers.
//!
//! `docs/format/object-store.md`, "Container snapshots", has the argument for crashes.

use std::collections::{BTreeMap, BTreeSet};

use rustix::io::Errno;

use crate::disk::DiskError;
use crate::record::RecordError;
use crate::shelf::container_snapshot_error::ContainerSnapshotError;
use crate::shelf::container_snapshots::{
    CONTAINER_SNAPSHOTS, ContainerSnapshot, ContainerSnapshotDraft, ContainerSnapshotRecord,
    SeenContainerSnapshot, ShelfLock, check_name, take_unneeded,
};
use crate::shelf::containers::Liveness;
use crate::shelf::snapshots::HiddenSnapshot;
use crate::store::{Store, mode_of};

/// Result of removing the container snapshots that nothing needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClearedSnapshots {
    /// Number of snapshots that were removed.
    pub removed: u64,
    /// Number of snapshots that stay because a process has them open, without those below them.
    pub open: u64,
}

/// Source of the name of a snapshot that is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Naming {
    /// The record has the name, or the snapshot has none.
    AsRecorded,
    /// The container's name and a number.
    Numbered,
}

/// Bytes of a container's name at the beginning of a snapshot's, which has at most 64.
const BEGINNING: usize = 56;

/// Largest number in such a name.
const NUMBER_MAX: u32 = 9_999_999;

/// Returns a free name for a snapshot of a container: the container's name, and a number that is one more than the
/// largest one.
fn numbered(container: &str, taken: &BTreeSet<String>) -> String {
    let beginning = container.get(..BEGINNING).unwrap_or(container);
    let name = |number: u32| format!("{beginning}-{number}");
    let number = |it: &String| -> Option<u32> {
        let number = it.strip_prefix(beginning)?.strip_prefix('-')?.parse().ok()?;
        // A user may have chosen a name such as `web-01`.
        (name(number) == *it).then_some(number)
    };
    let last = taken.iter().filter_map(number).max().unwrap_or(0);
    if last < NUMBER_MAX {
        return name(last + 1);
    }
    // A user has chosen a name with a large number.
    let free = (1..=NUMBER_MAX).map(name).find(|it| !taken.contains(it));
    free.unwrap_or_else(|| name(NUMBER_MAX))
}

impl Store {
    /// Publishes a container snapshot, and returns it open. Its id is random.
    ///
    /// If the record has the id of this boot, nothing is synced: call
    /// [`settle_container_snapshot`](Self::settle_container_snapshot) later. Otherwise, everything is synced first.
    ///
    /// # Errors
    /// [`ContainerSnapshotError`] if the name is invalid or taken, or the image or the snapshot below is not in the
    /// store. No snapshot is published then.
    pub fn publish_container_snapshot(
        &self,
        draft: ContainerSnapshotDraft,
        record: &ContainerSnapshotRecord,
    ) -> Result<ContainerSnapshot, ContainerSnapshotError> {
        record.name.as_deref().map_or(Ok(()), check_name)?;
        self.publish_named(draft, record, Naming::AsRecorded)
    }

    /// As [`publish_container_snapshot`](Self::publish_container_snapshot), with the first name `CONTAINER-N` after those
    /// of other snapshots.
    ///
    /// # Errors
    /// As for `publish_container_snapshot`.
    pub fn publish_numbered_container_snapshot(
        &self,
        draft: ContainerSnapshotDraft,
        record: &ContainerSnapshotRecord,
    ) -> Result<ContainerSnapshot, ContainerSnapshotError> {
        self.publish_named(draft, record, Naming::Numbered)
    }

    /// Checks that a snapshot can get this name.
    ///
    /// # Errors
    /// [`ContainerSnapshotError`] if it is invalid or taken.
    pub fn check_container_snapshot_name(&self, name: &str) -> Result<(), ContainerSnapshotError> {
        check_name(name)?;
        match self.container_snapshot_names()?.contains(name) {
            true => Err(ContainerSnapshotError::NameTaken(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Returns the names of all snapshots that can be used. The name of one whose record is damaged is unknown.
    fn container_snapshot_names(&self) -> Result<BTreeSet<String>, DiskError> {
        let seen = self.container_snapshots.see_all()?.into_iter();
        Ok(seen.filter_map(|it| it.usable().ok()?.name).collect())
    }

    fn publish_named(
        &self,
        draft: ContainerSnapshotDraft,
        record: &ContainerSnapshotRecord,
        naming: Naming,
    ) -> Result<ContainerSnapshot, ContainerSnapshotError> {
        self.check_writable()?;
        draft.write(record)?;
        let is_durable = record.boot.is_none();
        if is_durable {
            // This also syncs the draft.
            self.sync_container_snapshots()?;
        }
        // `gc` waits from the lookup of the image until the snapshot is published.
        let _lock = self.lock_shared()?;
        if record.shared.is_none() && !self.images.has(&record.image)? {
            return Err(ContainerSnapshotError::NoImage(record.image));
        }
        if is_durable {
            // The snapshot is found after a crash, so its image must be.
            self.settle()?;
        }
        self.make_container_snapshots()?;
        let gone = || self.root.failed("open directory", CONTAINER_SNAPSHOTS, Errno::NOENT);
        let lock = self.container_snapshots.lock()?.ok_or_else(gone)?;
        let mut record = record.clone();
        // Names do not change while the lock is held.
        if naming == Naming::Numbered {
            let taken = self.container_snapshot_names()?;
            record.name = Some(numbered(&record.container, &taken));
            draft.rewrite(&record)?;
        } else if let Some(name) = &record.name {
            self.check_container_snapshot_name(name)?;
        }
        if let Some(below) = &record.below {
            let found = self.container_snapshots.get(below)?;
            let found = found.ok_or_else(|| ContainerSnapshotError::Absent(below.clone()))?;
            let found = found.usable()?;
            if is_durable && found.boot.is_some() {
                return Err(ContainerSnapshotError::Unwritten(below.clone()));
            }
        }
        let published = self.container_snapshots.publish(&lock, draft, &record)?;
        if is_durable {
            lock.sync()?;
        }
        Ok(published)
    }

    fn check_writable(&self) -> Result<(), ContainerSnapshotError> {
        match self.is_writable() {
            true => Ok(()),
            false => Err(ContainerSnapshotError::ReadOnly(self.path().to_owned())),
        }
    }

    fn make_container_snapshots(&self) -> Result<(), DiskError> {
        if self.container_snapshots.directory.get()?.is_some() {
            return Ok(());
        }
        self.note_feature(|meta| meta.has_container_snapshots = true)?;
        self.root.make(CONTAINER_SNAPSHOTS, mode_of(CONTAINER_SNAPSHOTS, self.sharing()?))?;
        self.root.sync()
    }

    /// Makes a snapshot durable, with all others that were published before. This takes as long as the disk needs for
    /// everything that was written to its file system.
    ///
    /// # Errors
    /// [`ContainerSnapshotError`], also if the disk could not write the data now or earlier. Then the snapshot can be
    /// used until the machine restarts.
    pub fn settle_container_snapshot(&self, id: &str) -> Result<(), ContainerSnapshotError> {
        self.check_writable()?;
        let absent = || ContainerSnapshotError::Absent(id.to_owned());
        let lock = self.container_snapshots.lock_shared()?.ok_or_else(absent)?;
        let snapshot = self.container_snapshots.open(&lock, id)?;
        drop(lock);
        if snapshot.record.boot.is_none() {
            return Ok(());
        }
        if snapshot.record.has_failed() {
            return Err(ContainerSnapshotError::Unwritten(id.to_owned()));
        }
        drop(snapshot);
        self.sync_container_snapshots()?;
        // Another process may have got the error of the disk.
        match self.container_snapshots.get(id)?.map(|it| it.usable()).transpose()? {
            Some(record) if record.boot.is_some() => {
                Err(ContainerSnapshotError::Unwritten(id.to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Makes all snapshots durable, for example those of a command that was killed while it waited for the disk. Returns
    /// whether any was not.
    ///
    /// # Errors
    /// [`ContainerSnapshotError`] if a record cannot be read or replaced, or the disk could not write the data.
    pub fn settle_container_snapshots(&self) -> Result<bool, ContainerSnapshotError> {
        self.check_writable()?;
        let waits = |it: &SeenContainerSnapshot| {
            let record = it.record.as_ref();
            !it.is_lost && record.is_ok_and(|it| it.boot.is_some() && !it.has_failed())
        };
        let has_waiting = self.container_snapshots.see_all()?.iter().any(waits);
        if has_waiting {
            self.sync_container_snapshots()?;
        }
        Ok(has_waiting)
    }

    /// Syncs the file system, and then notes that the snapshots which were there before are durable.
    fn sync_container_snapshots(&self) -> Result<(), ContainerSnapshotError> {
        let _synced = self.root.deferral().switch(false);
        let mut waiting = BTreeMap::new();
        let Some(listing) = self.container_snapshots.lock_shared()? else {
            return Ok(self.root.sync_everything()?);
        };
        for SeenContainerSnapshot { id, record, is_lost, .. } in
            self.container_snapshots.see_all()?
        {
            if let Ok(record) = record
                && let Some(boot) = record.boot.clone()
                && !is_lost
                && !record.has_failed()
            {
                waiting.insert(id, (boot, record.below));
            }
        }
        drop(listing);
        // A snapshot is found after a crash, so its image must be.
        self.settle()?;
        let synced = self.root.sync_everything();
        let Some(lock) = self.container_snapshots.lock()? else { return Ok(synced?) };
        while !waiting.is_empty() {
            // A crash must not leave a snapshot without those below it.
            let is_lowest = |below: &Option<String>| {
                below.as_ref().is_none_or(|below| !waiting.contains_key(below))
            };
            let lowest = waiting.iter().filter(|(_, (_, below))| is_lowest(below));
            let lowest: BTreeSet<_> = lowest.map(|it| it.0.clone()).collect();
            if lowest.is_empty() {
                // These records are damaged, because each one has another below it.
                break;
            }
            for id in lowest {
                let Some((boot, _)) = waiting.remove(&id) else { continue };
                let noted = self.note_synced(&lock, &id, &boot, synced.is_ok());
                match (&synced, noted) {
                    (Ok(()), noted) => noted?,
                    (Err(_), Ok(())) => {}
                    (Err(_), Err(error)) => {
                        tracing::warn!(id, %error, "cannot note that the disk failed to write a snapshot");
                    }
                }
            }
        }
        Ok(synced?)
    }

    /// Notes whether the data of a snapshot is on the disk.
    fn note_synced(
        &self,
        lock: &ShelfLock,
        id: &str,
        boot: &str,
        is_synced: bool,
    ) -> Result<(), DiskError> {
        let Some(seen) = self.container_snapshots.get(id)? else { return Ok(()) };
        let Ok(mut record) = seen.usable() else { return Ok(()) };
        // The kernel reports lost bytes only once, so another process may have got the error.
        if record.has_failed() {
            return Ok(());
        }
        let below = match &record.below {
            Some(below) => {
                self.container_snapshots.get(below)?.and_then(|it| it.usable().ok()).map(Some)
            }
            None => Some(None),
        };
        match below {
            // It is lost with the one below it.
            None => record.fail(boot),
            Some(Some(below)) if below.has_failed() => record.fail(boot),
            // It was not synced by this process.
            Some(Some(below)) if below.boot.is_some() => return Ok(()),
            Some(_) if is_synced => record.boot = None,
            Some(_) => record.fail(boot),
        }
        self.container_snapshots.change(lock, id, &record)
    }

    /// Takes the name of a snapshot away, durably. Then removes this snapshot and all others that have no name and that
    /// nothing needs. Returns whether this one was removed.
    ///
    /// # Errors
    /// [`ContainerSnapshotError`] if there is no snapshot with this id, or its record cannot be read or replaced.
    pub fn remove_container_snapshot(&self, id: &str) -> Result<bool, ContainerSnapshotError> {
        self.check_writable()?;
        let absent = || ContainerSnapshotError::Absent(id.to_owned());
        let lock = self.container_snapshots.lock()?.ok_or_else(absent)?;
        let seen = self.container_snapshots.get(id)?.ok_or_else(absent)?;
        if !seen.is_lost {
            let mut record = seen.usable()?;
            if record.name.take().is_some() {
                self.container_snapshots.change(&lock, id, &record)?;
            }
        }
        let (hidden, _open) = self.hide_container_snapshots(&lock)?;
        drop(lock);
        let is_removed = hidden.iter().any(|it| it.0 == id);
        remove_all(hidden)?;
        Ok(is_removed)
    }

    /// Removes all snapshots that have no name and that nothing needs, and those that the machine lost when it stopped.
    ///
    /// # Errors
    /// [`DiskError`] if a directory cannot be read or removed.
    pub fn clear_container_snapshots(&self) -> Result<ClearedSnapshots, DiskError> {
        let none = ClearedSnapshots::default();
        let Some(lock) = self.container_snapshots.lock()? else { return Ok(none) };
        let (hidden, open) = self.hide_container_snapshots(&lock)?;
        drop(lock);
        let removed = hidden.len() as u64;
        remove_all(hidden)?;
        Ok(ClearedSnapshots { removed, open })
    }

    /// Moves unneeded snapshots away, and returns them with their ids. Also returns the number of those that processes
    /// have open.
    fn hide_container_snapshots(
        &self,
        lock: &ShelfLock,
    ) -> Result<(Vec<(String, HiddenSnapshot)>, u64), DiskError> {
        let (mut hidden, mut open) = (Vec::new(), 0);
        let Some(needed) = self.snapshots_of_containers()? else { return Ok((hidden, open)) };
        let seen = self.container_snapshots.see_all()?;
        take_unneeded(&seen, &needed, |id| {
            let moved = self.container_snapshots.hide(lock, id)?;
            let is_hidden = moved.is_some();
            open += u64::from(!is_hidden);
            hidden.extend(moved.map(|it| (id.to_owned(), it)));
            Ok::<_, DiskError>(is_hidden)
        })?;
        Ok((hidden, open))
    }

    /// Returns the ids of snapshots that containers need. `None` if a container's record cannot be read.
    pub(crate) fn snapshots_of_containers(&self) -> Result<Option<BTreeSet<String>>, DiskError> {
        let mut needed = BTreeSet::new();
        for seen in self.containers.see_all()? {
            match seen.record {
                Ok(record) => needed.extend(record.snapshot),
                Err(RecordError::Unwritten) if seen.liveness == Liveness::Dead => {}
                Err(_) => return Ok(None),
            }
        }
        Ok(Some(needed))
    }

    /// Whether [`clear_container_snapshots`](Self::clear_container_snapshots) would remove a snapshot.
    ///
    /// # Errors
    /// [`DiskError`] if a directory cannot be read.
    pub fn has_unneeded_container_snapshots(&self) -> Result<bool, DiskError> {
        let Some(needed) = self.snapshots_of_containers()? else { return Ok(false) };
        let seen = self.container_snapshots.see_all()?;
        Ok(!self.unneeded_container_snapshots(&seen, &needed)?.is_empty())
    }

    /// Returns the ids of snapshots that `gc` would remove, if containers need only `needed`.
    pub(crate) fn unneeded_container_snapshots(
        &self,
        seen: &[SeenContainerSnapshot],
        needed: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, DiskError> {
        let Some(lock) = self.container_snapshots.lock()? else { return Ok(BTreeSet::new()) };
        let take = |id: &str| self.container_snapshots.is_in_use(&lock, id).map(|it| !it);
        Ok(take_unneeded(seen, needed, take)?.into_iter().collect())
    }

    /// Checks that a snapshot can be used. As long as the lock is held, it is not removed.
    pub(crate) fn hold_container_snapshot(
        &self,
        id: &str,
    ) -> Result<ShelfLock, ContainerSnapshotError> {
        let absent = || ContainerSnapshotError::Absent(id.to_owned());
        let lock = self.container_snapshots.lock_shared()?.ok_or_else(absent)?;
        self.container_snapshots.get(id)?.ok_or_else(absent)?.usable()?;
        Ok(lock)
    }
}

fn remove_all(hidden: Vec<(String, HiddenSnapshot)>) -> Result<(), DiskError> {
    for (id, hidden) in hidden {
        match hidden.remove() {
            // Only root of the container's user namespace may remove files of other users, so they stay until a
            // command runs in that namespace.
            Err(error) if error.is(Errno::ACCESS) || error.is(Errno::PERM) => {
                tracing::debug!(id, %error, "cannot remove the files of a snapshot");
            }
            removed => removed?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_the_largest_one() {
        let check = |container: &str, taken: &[&str], expect: &str| {
            let taken = taken.iter().map(|it| (*it).to_owned()).collect();
            assert_eq!(numbered(container, &taken), expect);
        };
        check("web", &[], "web-1");
        check("web", &["web-1", "web-3", "web-old", "web-", "webs-7", "web-1-9"], "web-4");
        check("web", &["web-007", "web-+9"], "web-1");
        check("web", &["web-1", "web-9999999"], "web-2");
        check("web", &["web-4294967295", "web-99999999999"], "web-1");
        let long = "x".repeat(64);
        check(&long, &[], &format!("{}-1", &long[..56]));
    }
}
