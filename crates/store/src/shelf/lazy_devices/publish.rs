//! Publishes the empty devices of one import, with their indexes.

use std::collections::BTreeMap;

use image::digest::Digest;
use image::lazy::Head;
use image::verity::DeviceId;

use super::index::{Existing, IndexWindows, encoded, read_digest, same_bytes};
use super::{LazyDeviceError, LazyDeviceFile, LazyDeviceShelf, LazyDeviceState, encode};
use crate::disk::Renamed;
use crate::staging::Workspace;

/// Up to this number, files are synced one by one; for more files, the whole file system is synced. It is the number
/// that commits use (decision 2).
const FSYNC_MAX: usize = 8;

/// A device that gets an index.
#[derive(Debug)]
pub(crate) struct NewDevice<'a> {
    pub(crate) head: &'a Head,
    pub(crate) windows: &'a IndexWindows,
    /// Manifest whose image the index came with; `None` if the index was made locally.
    pub(crate) claimed_by: Option<Digest>,
    /// How to treat an existing index of the device.
    pub(crate) existing: Existing,
    /// Whether to create the device, empty, if it does not exist.
    pub(crate) is_made: bool,
}

/// The files to write for a device.
#[derive(Debug, Default)]
struct Missing {
    index: bool,
    device: bool,
}

impl NewDevice<'_> {
    fn head_file(&self) -> LazyDeviceFile {
        LazyDeviceFile::index(self.head.device, self.claimed_by)
    }

    /// Returns the file that the index's windows get.
    fn windows_file(&self) -> LazyDeviceFile {
        match (self.windows, self.claimed_by) {
            (IndexWindows::Blob(_), Some(manifest)) => {
                LazyDeviceFile::WindowsDigest(self.head.device, manifest)
            }
            (_, claimed_by) => LazyDeviceFile::windows(self.head.device, claimed_by),
        }
    }

    /// Returns all files that an index of this origin can have for its windows.
    fn windows_files(&self) -> impl Iterator<Item = LazyDeviceFile> {
        let device = self.head.device;
        let windows = LazyDeviceFile::windows(device, self.claimed_by);
        let digest = self.claimed_by.map(|it| LazyDeviceFile::WindowsDigest(device, it));
        std::iter::once(windows).chain(digest)
    }
}

impl LazyDeviceShelf {
    /// Adds the windows of an index that came without them. They are not synced, because they can be fetched again, and
    /// a reader compares them with their digest. The caller holds the store's lock. Returns whether the index was
    /// there and has these windows.
    pub(crate) fn add_windows(
        &self,
        device: &DeviceId,
        manifest: &Digest,
        groups: &[u8],
    ) -> Result<bool, LazyDeviceError> {
        let Some(shelf) = self.directory.get()? else { return Ok(false) };
        // Another process may replace the index at the same time: see `publish_all`.
        let alone = shelf.open(".")?;
        alone.lock()?;
        let digest = LazyDeviceFile::WindowsDigest(*device, *manifest).file_name();
        if !read_digest(shelf, &digest)?.flatten().is_some_and(|it| it.matches(groups)) {
            return Ok(false);
        }
        let windows = LazyDeviceFile::ClaimedWindows(*device, *manifest).file_name();
        self.tmp.replace_unsynced(shelf, windows, groups)?;
        Ok(true)
    }

    /// Publishes an index, durably, with the head last. The directory exists, and the caller holds the store's lock.
    pub(crate) fn put_index(
        &self,
        head: &Head,
        windows: &IndexWindows,
        existing: Existing,
    ) -> Result<(), LazyDeviceError> {
        let _checked = encoded(head, windows)?;
        let index = NewDevice { head, windows, claimed_by: None, existing, is_made: false };
        self.publish_all(&[index])
    }

    /// Publishes devices and indexes, durably. Windows get their names before heads, and both get their names before
    /// the device, even if the system crashes in between. The directory must exist, and the caller must hold the
    /// store's lock.
    pub(crate) fn publish_all(&self, devices: &[NewDevice<'_>]) -> Result<(), LazyDeviceError> {
        let shelf = self.directory.existing()?;
        // The lock needs a separate descriptor, because flock belongs to the open file description.
        let alone = shelf.open(".")?;
        alone.lock()?;
        let mut claims = BTreeMap::<_, Vec<_>>::new();
        for file in self.list()?.names {
            if let LazyDeviceFile::ClaimedIndex(device, manifest) = file {
                claims.entry(device).or_default().push(manifest);
            }
        }
        let of = |it: &NewDevice<'_>| claims.get(&it.head.device).map_or(&[][..], Vec::as_slice);
        let missing: Result<Vec<_>, _> =
            devices.iter().map(|it| self.missing(it, of(it))).collect();
        let missing = missing?;
        if missing.iter().all(|it| !it.index && !it.device) {
            // Another process may have published the files, but may not have synced the directory yet.
            return Ok(shelf.sync()?);
        }
        let work = Workspace::make(&self.tmp)?;
        let mut files = Vec::new();
        for (number, (device, missing)) in devices.iter().zip(&missing).enumerate() {
            let NewDevice { head, windows, .. } = device;
            if missing.index {
                let windows_file = format!("windows-{number}");
                files.push(match windows {
                    IndexWindows::Groups(groups) => self.write(&work, windows_file, groups)?,
                    IndexWindows::Blob(digest) => {
                        self.write(&work, windows_file, digest.to_string().as_bytes())?
                    }
                });
                files.push(self.write(
                    &work,
                    format!("head-{number}"),
                    &encoded(head, windows)?,
                )?);
            }
            if missing.device {
                let state = encode(&head.device, head.device_bytes, LazyDeviceState::Partial);
                files.push(self.write(&work, format!("state-{number}"), &state)?);
                let name = format!("device-{number}");
                work.directory.create_lazy_device(&name, head.device_bytes)?;
                files.push(name);
            }
        }
        if files.len() > FSYNC_MAX {
            self.tmp.sync_everything()?;
        } else {
            files.iter().try_for_each(|it| work.directory.sync_file(it))?;
        }
        let numbered = || devices.iter().zip(&missing).enumerate();
        let indexes = || {
            let missing = numbered().filter(|it| it.1.1.index);
            missing.map(|it| (it.0, it.1.0))
        };
        // Old heads are removed first, so that a head never belongs to the windows of another index, even after a
        // crash.
        let mut is_gone = false;
        for (_, index) in indexes() {
            shelf.check_removable(index.head_file().file_name().as_bytes())?;
            is_gone |= shelf.unlink_sealed(index.head_file().file_name())?;
        }
        if is_gone {
            shelf.sync()?;
        }
        for (number, index) in indexes() {
            let windows = index.windows_file();
            for other in index.windows_files().filter(|it| *it != windows) {
                shelf.unlink_sealed(other.file_name())?;
            }
            work.directory.rename_over(format!("windows-{number}"), shelf, windows.file_name())?;
        }
        if indexes().next().is_some() {
            shelf.sync()?;
        }
        for (number, index) in indexes() {
            let head = index.head_file().file_name();
            work.directory.rename_over(format!("head-{number}"), shelf, head)?;
        }
        let made = || numbered().filter(|it| it.1.1.device).map(|it| (it.0, it.1.0.head.device));
        for (number, device) in made() {
            // Replaces a state file that may be left from an attempt that crashed.
            let state = LazyDeviceFile::State(device).file_name();
            work.directory.rename_over(format!("state-{number}"), shelf, state)?;
        }
        shelf.sync()?;
        for (number, device) in made() {
            let name = LazyDeviceFile::Device(device).file_name();
            match work.directory.rename_new(format!("device-{number}"), shelf, name)? {
                Renamed::Now => {}
                Renamed::Taken => return Err(LazyDeviceError::Exists(device)),
            }
        }
        if made().next().is_some() {
            shelf.sync()?;
        }
        Ok(work.remove()?)
    }

    fn write(
        &self,
        work: &Workspace,
        name: String,
        bytes: &[u8],
    ) -> Result<String, LazyDeviceError> {
        let mut file = work.directory.create(&name)?;
        file.write_all(bytes)?;
        file.publish_mode()?;
        Ok(name)
    }

    fn missing(
        &self,
        device: &NewDevice<'_>,
        claims: &[Digest],
    ) -> Result<Missing, LazyDeviceError> {
        if device.existing == Existing::Agreeing {
            self.check_agreement(device, claims)?;
        }
        Ok(Missing {
            index: self.lacks_index(device)?,
            device: device.is_made && self.lacks(&device.head.device)?,
        })
    }

    /// Refuses an index that states other bytes of a device than an existing index. Damaged indexes are ignored.
    fn check_agreement(
        &self,
        device: &NewDevice<'_>,
        claims: &[Digest],
    ) -> Result<(), LazyDeviceError> {
        let id = device.head.device;
        let others = claims.iter().filter(|it| device.claimed_by != Some(**it)).map(Some);
        for other in others.chain([None]) {
            match self.head(&id, other) {
                Ok(Some(there)) if !same_bytes(&there, device.head) => {
                    return Err(LazyDeviceError::OtherIndex(id));
                }
                Ok(_) | Err(LazyDeviceError::Index { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn lacks(&self, device: &DeviceId) -> Result<bool, LazyDeviceError> {
        let shelf = self.directory.existing()?;
        Ok(shelf.stat(LazyDeviceFile::Device(*device).file_name())?.is_none())
    }

    /// Whether the device lacks this index.
    fn lacks_index(&self, index: &NewDevice<'_>) -> Result<bool, LazyDeviceError> {
        let NewDevice { head, windows, claimed_by, .. } = index;
        let device = head.device;
        let there = match claimed_by {
            Some(manifest) => self.claimed_index(&device, manifest),
            None => self.index(&device),
        };
        match there {
            Ok(Some((there, its_windows))) => {
                // Windows that were fetched since then are the windows of this blob.
                let is_same = match (&its_windows, *windows) {
                    (IndexWindows::Groups(there), IndexWindows::Blob(digest)) => {
                        digest.matches(there)
                    }
                    (there, new) => there == new,
                };
                Ok(there != **head || !is_same)
            }
            Ok(None) => Ok(true),
            Err(error @ LazyDeviceError::Index { .. }) => {
                tracing::warn!(%device, %error, "replacing a damaged index");
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }
}
