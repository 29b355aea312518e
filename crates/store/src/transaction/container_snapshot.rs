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
        if let Some(name) = &record.name {
            for other in self.container_snapshots.see_all()? {
                // The name of a snapshot whose record is damaged is unknown.
                if other.usable().is_ok_and(|it| it.name.as_ref() == Some(name)) {
                    return Err(ContainerSnapshotError::NameTaken(name.clone()));
                }
            }
        }
        if let Some(below) = &record.below {
            let found = self.container_snapshots.get(below)?;
            let found = found.ok_or_else(|| ContainerSnapshotError::Absent(below.clone()))?;
            let found = found.usable()?;
            if is_durable && found.boot.is_some() {
                return Err(ContainerSnapshotError::Unwritten(below.clone()));
            }
        }
        let published = self.container_snapshots.publish(&lock, draft, record)?;
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
        let hidden = self.hide_container_snapshots(&lock)?;
        drop(lock);
        let is_removed = hidden.iter().any(|it| it.0 == id);
        remove_all(hidden)?;
        Ok(is_removed)
    }

    /// Removes all snapshots that have no name and that nothing needs, and those that the machine lost when it stopped.
    /// Returns their number.
    ///
    /// # Errors
    /// [`DiskError`] if a directory cannot be read or removed.
    pub fn clear_container_snapshots(&self) -> Result<u64, DiskError> {
        let Some(lock) = self.container_snapshots.lock()? else { return Ok(0) };
        let hidden = self.hide_container_snapshots(&lock)?;
        drop(lock);
        let removed = hidden.len() as u64;
        remove_all(hidden)?;
        Ok(removed)
    }

    fn hide_container_snapshots(
        &self,
        lock: &ShelfLock,
    ) -> Result<Vec<(String, HiddenSnapshot)>, DiskError> {
        let Some(needed) = self.snapshots_of_containers()? else { return Ok(Vec::new()) };
        let mut hidden = Vec::new();
        let seen = self.container_snapshots.see_all()?;
        take_unneeded(&seen, &needed, |id| {
            let moved = self.container_snapshots.hide(lock, id)?;
            let is_hidden = moved.is_some();
            hidden.extend(moved.map(|it| (id.to_owned(), it)));
            Ok::<_, DiskError>(is_hidden)
        })?;
        Ok(hidden)
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
