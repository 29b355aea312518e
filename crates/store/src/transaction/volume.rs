//! Makes, fills and removes volumes.
//!
//! `docs/format/object-store.md`, "Volumes", has the argument for crashes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::disk::DiskError;
use crate::record::RecordError;
use crate::shelf::containers::Liveness;
use crate::shelf::refs::Seconds;
use crate::shelf::snapshots::HiddenSnapshot;
use crate::shelf::volumes::error::{VOLUME_LABELS_MAX, VolumeError};
use crate::shelf::volumes::{
    DATA, RECORD, VOLUMES, VolumeDraft, VolumeLock, VolumeRecord, check_name,
};
use crate::store::{Store, mode_of};

/// Whether the files of a draft are synced before the volume has its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeFiles {
    /// There are files that must survive a crash as a whole.
    Synced,
    /// There are none, or the volume ends with its container.
    Unsynced,
}

/// The containers that use volumes.
enum VolumeUsers {
    /// A container for each volume that is used.
    Known(BTreeMap<String, String>),
    /// The record of this container is damaged.
    Unknown(String),
}

impl Store {
    /// Takes a lock under which volumes are mounted: as long as it is held, no volume is removed. Makes the directory
    /// of all volumes if it does not exist.
    ///
    /// # Errors
    /// [`VolumeError`] if the store is read-only, or an error of the disk.
    pub fn hold_volumes(&self) -> Result<VolumeLock, VolumeError> {
        self.make_volumes()?;
        let gone = || self.root.failed("open directory", VOLUMES, Errno::NOENT);
        Ok(self.volumes.lock_shared()?.ok_or_else(gone)?)
    }

    fn make_volumes(&self) -> Result<(), VolumeError> {
        if !self.is_writable() {
            return Err(VolumeError::ReadOnly(self.path().to_owned()));
        }
        if self.volumes.directory.get()?.is_some() {
            return Ok(());
        }
        self.note_feature(|meta| meta.has_volumes = true)?;
        self.root.make(VOLUMES, mode_of(VOLUMES, self.sharing()?))?;
        Ok(self.root.sync()?)
    }

    /// Publishes a volume: at every moment, and after a crash, the name has either the whole volume or none.
    ///
    /// # Errors
    /// [`VolumeError::Exists`] if the name is taken, or another [`VolumeError`]. No volume is published then.
    pub fn publish_volume(
        &self,
        lock: &VolumeLock,
        draft: VolumeDraft,
        name: &str,
        record: &VolumeRecord,
        files: VolumeFiles,
    ) -> Result<(), VolumeError> {
        check_name(name)?;
        check_labels(&record.labels)?;
        draft.write(record)?;
        if files == VolumeFiles::Synced {
            let _synced = self.root.deferral().switch(false);
            self.root.sync_everything()?;
        }
        match draft.work.publish(&lock.directory, name)? {
            Some(_directory) => Ok(lock.directory.sync()?),
            None => Err(VolumeError::Exists(name.to_owned())),
        }
    }

    /// Gives a volume that no container has mounted yet the files of a draft. If a container has mounted it by now, or
    /// it has files, it keeps those.
    ///
    /// # Errors
    /// [`VolumeError`] if there is no such volume, its record is damaged, or an error of the disk.
    pub fn fill_volume(
        &self,
        draft: &VolumeDraft,
        name: &str,
        files: VolumeFiles,
    ) -> Result<(), VolumeError> {
        if files == VolumeFiles::Synced {
            let _synced = self.root.deferral().switch(false);
            self.root.sync_everything()?;
        }
        let absent = || VolumeError::Absent(name.to_owned());
        let lock = self.volumes.lock()?.ok_or_else(absent)?;
        let record = self.volumes.get(name)?.ok_or_else(absent)?;
        if !record.fresh {
            return Ok(());
        }
        let volume = lock.directory.open(name)?;
        // The kernel replaces a directory only if it is empty.
        match draft.work.directory.rename_over(DATA, &volume, DATA) {
            Ok(()) => volume.sync()?,
            Err(error) if error.is(Errno::NOTEMPTY) || error.is(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(self.volumes.change(&lock.directory, name, &VolumeRecord { fresh: false, ..record })?)
    }

    /// Opens the directory of a volume to which a caller adds files. From then on, no container copies the files of its
    /// image into the volume.
    ///
    /// # Errors
    /// [`VolumeError`] if there is no such volume, its record is damaged, or an error of the disk.
    pub fn open_volume_to_write(&self, name: &str) -> Result<OwnedFd, VolumeError> {
        let absent = || VolumeError::Absent(name.to_owned());
        let lock = self.volumes.lock()?.ok_or_else(absent)?;
        let record = self.volumes.get(name)?.ok_or_else(absent)?;
        if record.fresh {
            let record = VolumeRecord { fresh: false, ..record };
            self.volumes.change(&lock.directory, name, &record)?;
        }
        Ok(lock.data(name)?.0)
    }

    /// Returns a container for each volume that is used.
    fn users_of_volumes(&self) -> Result<VolumeUsers, DiskError> {
        let mut users = BTreeMap::new();
        for seen in self.containers.see_all()? {
            match seen.record {
                Ok(record) => {
                    users.extend(record.volumes.into_iter().map(|it| (it, seen.id.clone())));
                }
                Err(RecordError::Unwritten) if seen.liveness == Liveness::Dead => {}
                Err(_) => return Ok(VolumeUsers::Unknown(seen.id)),
            }
        }
        Ok(VolumeUsers::Known(users))
    }

    /// Returns the names of the volumes that containers use, running or kept, each with one of these containers.
    ///
    /// # Errors
    /// [`VolumeError::UnknownUser`] if a container's record is damaged, or an error of the disk.
    pub fn used_volumes(&self) -> Result<BTreeMap<String, String>, VolumeError> {
        match self.users_of_volumes()? {
            VolumeUsers::Known(users) => Ok(users),
            VolumeUsers::Unknown(container) => Err(VolumeError::UnknownUser(container)),
        }
    }

    /// Removes a volume that no container uses, with its files.
    ///
    /// # Errors
    /// [`VolumeError::InUse`] or another [`VolumeError`]. The volume stays then.
    pub fn remove_volume(&self, name: &str) -> Result<(), VolumeError> {
        if !self.is_writable() {
            return Err(VolumeError::ReadOnly(self.path().to_owned()));
        }
        let absent = || VolumeError::Absent(name.to_owned());
        check_name(name)?;
        // Containers are made under the shared lock, so no other one begins to use the volume.
        let lock = self.volumes.lock()?.ok_or_else(absent)?;
        if let Some(container) = self.used_volumes()?.remove(name) {
            return Err(VolumeError::InUse { name: name.to_owned(), container });
        }
        let hidden = self.volumes.hide(&lock, name)?.ok_or_else(absent)?;
        lock.directory.sync()?;
        drop(lock);
        Ok(remove(name, hidden)?)
    }

    /// Removes the volumes that end with their containers, and whose containers are gone. Returns their number.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn clear_volumes(&self) -> Result<u64, DiskError> {
        if self.volumes.names()?.is_empty() {
            return Ok(0);
        }
        let Some(lock) = self.volumes.lock()? else { return Ok(0) };
        let mut hidden = Vec::new();
        for name in self.unneeded_volumes()? {
            hidden.extend(self.volumes.hide(&lock, &name)?.map(|it| (name, it)));
        }
        drop(lock);
        let removed = hidden.len() as u64;
        for (name, hidden) in hidden {
            remove(&name, hidden)?;
        }
        Ok(removed)
    }

    /// Sets whether those of these volumes that were made for one container are removed when no container has them any
    /// more.
    ///
    /// # Errors
    /// An error of the disk. Damaged records stay as they are.
    pub fn end_volumes_with_container(
        &self,
        names: &[String],
        ends: bool,
    ) -> Result<(), VolumeError> {
        if names.is_empty() {
            return Ok(());
        }
        let Some(lock) = self.volumes.lock()? else { return Ok(()) };
        self.end_held_volumes_with_container(&lock, names, ends)
    }

    /// As [`end_volumes_with_container`](Self::end_volumes_with_container), for the holder of a lock, which may be
    /// shared: other changes of existing records need the exclusive one.
    ///
    /// # Errors
    /// An error of the disk. Damaged records stay as they are.
    pub fn end_held_volumes_with_container(
        &self,
        lock: &VolumeLock,
        names: &[String],
        ends: bool,
    ) -> Result<(), VolumeError> {
        for name in names {
            let record = match self.volumes.get(name) {
                // A volume with a damaged record is never removed by itself.
                Err(VolumeError::Damaged { name, source }) => {
                    tracing::warn!(volume = name, error = %source, "the record of a volume is damaged");
                    continue;
                }
                read => read?,
            };
            let Some(record) = record else { continue };
            if record.anonymous && record.ends_with_container != ends {
                let record = VolumeRecord { ends_with_container: ends, ..record };
                self.volumes.change(&lock.directory, name, &record)?;
            }
        }
        Ok(())
    }

    /// Returns the names of the volumes that [`clear_volumes`](Self::clear_volumes) would remove.
    ///
    /// # Errors
    /// An error of the disk.
    pub fn unneeded_volumes(&self) -> Result<Vec<String>, DiskError> {
        let names = self.volumes.names()?;
        if names.is_empty() {
            return Ok(Vec::new());
        }
        // It is unknown which volumes a damaged container uses.
        let VolumeUsers::Known(used) = self.users_of_volumes()? else { return Ok(Vec::new()) };
        let mut unneeded = Vec::new();
        for name in names {
            let record = match self.volumes.get(&name) {
                Ok(record) => record,
                Err(VolumeError::Disk(error)) => return Err(error),
                // `fsck` reports it.
                Err(_) => None,
            };
            if record.is_some_and(|it| it.ends_with_container) && !used.contains_key(&name) {
                unneeded.push(name);
            }
        }
        Ok(unneeded)
    }

    /// Gives a volume whose record is damaged a new one. Its files stay. Returns whether there was such a volume.
    ///
    /// The caller holds the store's lock. The lock on the volumes is not taken, because commands that have that one
    /// wait for the store's.
    pub(crate) fn mend_volume(&self, name: &str) -> Result<bool, DiskError> {
        let Some(shelf) = self.volumes.directory.get()? else { return Ok(false) };
        let Some(volume) = shelf.open_if_there(name)? else { return Ok(false) };
        volume.make_private(DATA)?;
        match self.volumes.get(name) {
            Ok(_) => {}
            Err(VolumeError::Disk(error)) => return Err(error),
            Err(_) => {
                volume.remove_any(RECORD)?;
                self.volumes.change(shelf, name, &VolumeRecord::new(Seconds(0)))?;
            }
        }
        Ok(true)
    }

    /// Checks that the volumes of a container exist. As long as the lock is held, they are not removed.
    pub(crate) fn hold_volumes_of(
        &self,
        names: &[String],
    ) -> Result<Option<VolumeLock>, VolumeError> {
        let Some(first) = names.first() else { return Ok(None) };
        let absent = || VolumeError::Absent(first.clone());
        let lock = self.volumes.lock_shared()?.ok_or_else(absent)?;
        for name in names {
            if lock.directory.open_if_there(name)?.is_none() {
                return Err(VolumeError::Absent(name.clone()));
            }
        }
        Ok(Some(lock))
    }
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), VolumeError> {
    // JSON has six bytes for some characters.
    let bytes = serde_json::to_vec(labels).map_or(usize::MAX, |it| it.len());
    if bytes > VOLUME_LABELS_MAX { Err(VolumeError::Labels { bytes }) } else { Ok(()) }
}

fn remove(name: &str, hidden: HiddenSnapshot) -> Result<(), DiskError> {
    match hidden.remove() {
        // Only root of the container's user namespace may remove files of other users, so they stay until a command
        // runs in that namespace.
        Err(error) if error.is(Errno::ACCESS) || error.is(Errno::PERM) => {
            tracing::debug!(name, %error, "cannot remove the files of a volume");
            Ok(())
        }
        removed => removed,
    }
}
