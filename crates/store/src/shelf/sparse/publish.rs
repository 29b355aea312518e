//! The empty devices of one import, with their indexes.

use image::lazy::Head;
use image::verity::DeviceId;

use super::index::{Existing, encoded, same_bytes};
use super::{SparseError, SparseFile, SparseShelf, SparseState, encode};
use crate::disk::Renamed;
use crate::work::Workspace;

/// Up to this many files are synced each; more of them with all else of the file system. It is the number of a commit
/// (decision 2).
const FSYNC_MAX: usize = 8;

/// A device that is to have an index.
#[derive(Debug)]
pub(crate) struct NewDevice<'a> {
    pub(crate) head: &'a Head,
    pub(crate) windows: &'a [u8],
    /// What becomes of an index that it has.
    pub(crate) existing: Existing,
    /// Whether it is made, empty, if it is not there.
    pub(crate) is_made: bool,
}

/// What has to be written for a device.
#[derive(Debug, Default)]
struct Missing {
    index: bool,
    device: bool,
}

impl SparseShelf {
    /// Publishes devices and indexes, durably. Windows get their names before heads do, and both before the device does, also
    /// if the system stops in between. The directory is there, and the store's lock is held.
    pub(crate) fn publish_all(&self, devices: &[NewDevice<'_>]) -> Result<(), SparseError> {
        let sparse = self.directory.there()?;
        // A descriptor of its own, since flock belongs to the open file.
        let alone = sparse.open(".")?;
        alone.lock()?;
        let missing: Result<Vec<_>, _> = devices.iter().map(|it| self.missing(it)).collect();
        let missing = missing?;
        if missing.iter().all(|it| !it.index && !it.device) {
            // Another may not have synced it yet.
            return Ok(sparse.sync()?);
        }
        let work = Workspace::make(&self.tmp)?;
        let mut files = Vec::new();
        for (number, (device, missing)) in devices.iter().zip(&missing).enumerate() {
            let NewDevice { head, windows, .. } = device;
            if missing.index {
                files.push(self.write(&work, format!("windows-{number}"), windows)?);
                files.push(self.write(
                    &work,
                    format!("head-{number}"),
                    &encoded(head, windows)?,
                )?);
            }
            if missing.device {
                let state = encode(&head.device, head.device_bytes, SparseState::Partial);
                files.push(self.write(&work, format!("state-{number}"), &state)?);
                let name = format!("device-{number}");
                work.directory.create_sparse(&name, head.device_bytes)?;
                files.push(name);
            }
        }
        if files.len() > FSYNC_MAX {
            self.tmp.sync_everything()?;
        } else {
            files.iter().try_for_each(|it| work.directory.sync_file(it))?;
        }
        let numbered = || devices.iter().zip(&missing).enumerate();
        let indexes = || numbered().filter(|it| it.1.1.index).map(|it| (it.0, it.1.0.head.device));
        // No head has the windows of another, even after a crash.
        let mut is_gone = false;
        for (_, device) in indexes() {
            is_gone |= sparse.unlink_sealed(SparseFile::Index(device).file_name())?;
        }
        if is_gone {
            sparse.sync()?;
        }
        for (number, device) in indexes() {
            let windows = SparseFile::Windows(device).file_name();
            work.directory.rename_over(format!("windows-{number}"), sparse, windows)?;
        }
        if indexes().next().is_some() {
            sparse.sync()?;
        }
        for (number, device) in indexes() {
            let head = SparseFile::Index(device).file_name();
            work.directory.rename_over(format!("head-{number}"), sparse, head)?;
        }
        let made = || numbered().filter(|it| it.1.1.device).map(|it| (it.0, it.1.0.head.device));
        for (number, device) in made() {
            // Over what a crash may have left of another attempt.
            let state = SparseFile::State(device).file_name();
            work.directory.rename_over(format!("state-{number}"), sparse, state)?;
        }
        sparse.sync()?;
        for (number, device) in made() {
            let name = SparseFile::Device(device).file_name();
            match work.directory.rename_new(format!("device-{number}"), sparse, name)? {
                Renamed::Now => {}
                Renamed::Taken => return Err(SparseError::Exists(device)),
            }
        }
        if made().next().is_some() {
            sparse.sync()?;
        }
        Ok(work.remove()?)
    }

    fn write(&self, work: &Workspace, name: String, bytes: &[u8]) -> Result<String, SparseError> {
        let mut file = work.directory.create(&name)?;
        file.write_all(bytes)?;
        file.publish_mode()?;
        Ok(name)
    }

    fn missing(&self, device: &NewDevice<'_>) -> Result<Missing, SparseError> {
        let NewDevice { head, windows, existing, is_made } = device;
        Ok(Missing {
            index: self.lacks_index(head, windows, *existing)?,
            device: *is_made && self.lacks(&head.device)?,
        })
    }

    fn lacks(&self, device: &DeviceId) -> Result<bool, SparseError> {
        let sparse = self.directory.there()?;
        Ok(sparse.stat(SparseFile::Device(*device).file_name())?.is_none())
    }

    /// Whether a device has no index that can stay.
    fn lacks_index(
        &self,
        head: &Head,
        windows: &[u8],
        existing: Existing,
    ) -> Result<bool, SparseError> {
        let device = head.device;
        match self.index(&device) {
            Ok(Some((there, its_windows))) => {
                let is_kept = existing == Existing::Kept;
                if is_kept && !same_bytes(&there, head) {
                    return Err(SparseError::OtherIndex(device));
                }
                Ok(!is_kept && (there != *head || its_windows != windows))
            }
            Ok(None) => Ok(true),
            Err(error @ SparseError::Index { .. }) => {
                tracing::warn!(%device, %error, "replacing a damaged index");
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }
}
