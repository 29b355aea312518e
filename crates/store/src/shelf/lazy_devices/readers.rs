//! Reads of a device by a process that does not fill it, and compares each unit with its digest.
//!
//! A filler refuses a device that another process has open, because that process may have seen zeros instead of missing
//! bytes (decision 18). A lease does not distinguish such a process from a reader that compares digests. So a reader has the
//! device open only while it holds a shared lock of the device's state file. It takes this lock while it holds a shared
//! lock of the directory, which it releases at once. A filler needs the state file's lock exclusively. If readers have
//! it, the filler takes the directory's lock first, so no new reader can start.
//!
//! A process that publishes files has the directory's lock while it syncs them, and a program that mounts an image may
//! wait for the filler. So the filler never waits for the directory's lock. If another process has it exclusively, no new
//! reader can start either, and those that have started end soon.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::Duration;

use image::verity::DeviceId;
use rustix::fs::SeekFrom;

use super::{LazyDeviceError, LazyDeviceFile, LazyDeviceShelf, LazyDeviceState};
use crate::disk::PlacedFile;

/// Pause of a filler while readers have a device open, and another process has the lock of the directory.
const MOMENT: Duration = Duration::from_millis(1);

/// Keeps readers from opening a device until it is dropped.
#[derive(Debug)]
pub struct ReadersHeldOff {
    /// The locked state file; `None` if the device has none, and so no readers.
    _state: Option<PlacedFile>,
}

impl LazyDeviceShelf {
    /// Reads a part of a device whose bytes may be missing or wrong. Returns `false` if the device does not exist, is
    /// condemned, or ends before the part. The part should be short, because a filler may wait.
    pub(crate) fn read_unverified(
        &self,
        id: &DeviceId,
        into: &mut [u8],
        offset: u64,
    ) -> Result<bool, LazyDeviceError> {
        let length = into.len() as u64;
        self.with_part(id, offset, length, |file| file.read_exact_at(into, offset).map(|()| true))
    }

    /// Whether a part of a device was written. Its bytes may be wrong, but they need not be read to learn that some are
    /// missing.
    pub(crate) fn has_no_hole(
        &self,
        id: &DeviceId,
        offset: u64,
        length: u64,
    ) -> Result<bool, LazyDeviceError> {
        self.with_part(id, offset, length, |file| {
            match rustix::fs::seek(file, SeekFrom::Hole(offset)) {
                Ok(hole) => Ok(hole - offset >= length),
                Err(errno) => Err(errno.into()),
            }
        })
    }

    /// Runs `work` with the device open. Returns `false` if the device does not exist, is condemned, or ends before the
    /// part.
    fn with_part(
        &self,
        id: &DeviceId,
        offset: u64,
        length: u64,
        work: impl FnOnce(&File) -> io::Result<bool>,
    ) -> Result<bool, LazyDeviceError> {
        let Some(shelf) = self.directory.get()? else { return Ok(false) };
        let alone = shelf.open(".")?;
        alone.lock_shared()?;
        let Some(state) = shelf.placed(&LazyDeviceFile::State(*id).file_name())? else {
            return Ok(false);
        };
        state.lock_shared()?;
        drop(alone);
        let (file, info) = match self.open(id) {
            Ok(Some(found)) => found,
            // `gc` or an import has just removed the device.
            Ok(None) | Err(LazyDeviceError::NoState(_)) => return Ok(false),
            Err(error) => return Err(error),
        };
        let is_outside = offset.checked_add(length).is_none_or(|it| it > info.bytes);
        if is_outside || info.state == LazyDeviceState::Condemned {
            return Ok(false);
        }
        let done = work(&file).map_err(|error| {
            shelf.failed("read", LazyDeviceFile::Device(*id).file_name(), error)
        })?;
        // The device is closed before the lock is released.
        drop(file);
        drop(state);
        Ok(done)
    }

    /// Waits until no reader has the device open.
    pub(crate) fn hold_readers_off(
        &self,
        id: &DeviceId,
    ) -> Result<ReadersHeldOff, LazyDeviceError> {
        let shelf = self.directory.existing()?;
        let Some(state) = shelf.placed(&LazyDeviceFile::State(*id).file_name())? else {
            return Ok(ReadersHeldOff { _state: None });
        };
        let alone = shelf.open(".")?;
        while !state.try_lock()? {
            if alone.try_lock()? {
                // Readers never wait for another lock while they hold this one.
                state.lock()?;
                break;
            }
            thread::sleep(MOMENT);
        }
        Ok(ReadersHeldOff { _state: Some(state) })
    }
}
