//! The devices that a service serves, and their readers.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use image::digest::Digest;
use image::verity::DeviceId;
use rustix::event::{EventfdFlags, eventfd};
use store::OperationError;

use super::broken::BrokenDevice;
use super::connections::{Connections, FuseDeviceError};
use super::devices::{DeviceBytes, Fillers, InodePlace, ServedDevice, ServedState};
use crate::lazy::fill::{Completing, LayerFiller, SourceKey};
use crate::lazy::prefetch::Ahead;
use crate::lazy::prefetch::plans::TraceUnits;
use crate::lazy::prefetch::start_recorder::Starts;
use crate::lazy::wire::KeptState;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceServerError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A file on FUSE cannot be created or served.
    #[error(transparent)]
    Fuse(#[from] FuseDeviceError),
    /// The server does not serve the device.
    #[error("this service does not serve device {0}")]
    Unknown(DeviceId),
}

/// Makes readers of devices wait until their bytes are filled.
///
/// While a device is mounted, [`serve`](Self::serve) must run. If all descriptors of a connection are closed, its readers get
/// I/O errors.
#[derive(Debug)]
pub struct DeviceServer<'a> {
    /// Readable when the server should end.
    wake: OwnedFd,
    pub(super) connections: Connections,
    devices: RwLock<HashMap<InodePlace, ServedDevice<'a>>>,
    pub(super) ahead: Ahead<'a>,
    pub(super) starts: Arc<Starts>,
    /// When a reader last got its bytes, for each source.
    pub(super) gave: Mutex<HashMap<SourceKey, Instant>>,
    /// Set to make all fetches fail at once. Readers whose fetch fails are then left to the next server.
    pub(super) cancel: Option<&'a AtomicBool>,
}

/// How to treat a device that should become complete but is not open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unread {
    /// Continue to fill the device.
    Stay,
    /// Leave it incomplete.
    Go,
}

impl<'a> DeviceServer<'a> {
    /// Creates a server without devices.
    pub fn new() -> Result<Self, DeviceServerError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags).map_err(OperationError::of("wait", "for readers"))?;
        let connections = Connections::new(wake.as_fd())?;
        Ok(Self {
            wake,
            connections,
            devices: RwLock::default(),
            ahead: Ahead::default(),
            starts: Arc::default(),
            gave: Mutex::default(),
            cancel: None,
        })
    }

    /// Makes this server leave its readers to the next server when it ends. `cancel` makes all sources fail.
    pub(in crate::lazy) fn with_cancel(self, cancel: &'a AtomicBool) -> Self {
        Self { cancel: Some(cancel), ..self }
    }

    pub(super) fn devices(&self) -> RwLockReadGuard<'_, HashMap<InodePlace, ServedDevice<'a>>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn devices_mut(
        &self,
    ) -> RwLockWriteGuard<'_, HashMap<InodePlace, ServedDevice<'a>>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a filler and its device. Its readers come by [`connect`](Self::connect).
    pub fn fill(&self, filler: LayerFiller<'a>) -> Result<(), DeviceServerError> {
        let place = place(filler.device().file())?;
        let device = *filler.device().id();
        let last = filler.manifest().copied();
        let fillers = Fillers { first: Arc::new(filler), others: Vec::new(), last };
        let state = ServedState::Filling(fillers);
        self.devices_mut().insert(place, ServedDevice { device, used: None, state });
        Ok(())
    }

    /// Records that a device is now mounted for an image. Returns whether it has a filler for that image.
    pub(in crate::lazy) fn is_for(&self, device: &DeviceId, manifest: &Digest) -> bool {
        let mut devices = self.devices_mut();
        let served = devices.values_mut().find(|it| it.device == *device);
        let Some(ServedState::Filling(fillers)) = served.map(|it| &mut it.state) else {
            return true;
        };
        let is_there = fillers.filler(manifest).is_some();
        if is_there {
            fillers.last = Some(*manifest);
        }
        is_there
    }

    /// Adds another filler of a device, for another image.
    pub(in crate::lazy) fn fill_beside(&self, filler: LayerFiller<'a>) {
        let mut devices = self.devices_mut();
        let served = devices.values_mut().find(|it| it.device == *filler.device().id());
        if let Some(ServedState::Filling(fillers)) = served.map(|it| &mut it.state) {
            fillers.last = filler.manifest().copied();
            fillers.others.push(Arc::new(filler));
        }
    }

    /// Removes the devices that are not in use. Returns the number of devices that must still be served. Calls `gone`
    /// with the ids of the removed ones.
    pub fn remove_unused(&self, mut gone: impl FnMut(&DeviceId), unread: Unread) -> usize {
        let mut devices = self.devices_mut();
        let is_served = |place: InodePlace| self.connections.has(place);
        let is_free = |(place, served): &(&InodePlace, &ServedDevice<'a>)| {
            let may_go = match &served.state {
                // A thread may still be filling the device for a reader that was killed.
                ServedState::Filling(fillers) => {
                    fillers.is_idle()
                        && (unread == Unread::Go
                            || !fillers.all().any(|it| it.is_completing(Completing::Asked)))
                }
                // A mount may ask for the device before it is sealed. If only this table has the filler, sealing has
                // ended without a result.
                ServedState::Sealing(filler) => {
                    unread == Unread::Go || Arc::strong_count(filler) == 1
                }
                ServedState::Complete(_) | ServedState::Broken(..) => true,
            };
            may_go && !is_served(**place)
        };
        let free: Vec<_> = devices.iter().filter(is_free).map(|(place, _)| *place).collect();
        let mut released = Vec::new();
        for place in free {
            released.extend(devices.remove(&place).map(|it| it.device));
        }
        let is_left = |(place, served): &(&InodePlace, &ServedDevice<'a>)| {
            !matches!(served.state, ServedState::Complete(_)) || is_served(**place)
        };
        let left = devices.iter().filter(is_left).count();
        // The callback may be slow, and readers need the lock.
        drop(devices);
        released.iter().for_each(&mut gone);
        left
    }

    /// Returns the number of incomplete devices that are not open: they are being completed or sealed, or a fetch of a
    /// source that does not respond still runs for a reader that has exited.
    pub(in crate::lazy) fn unread(&self) -> usize {
        let is_unread = |(place, served): &(&InodePlace, &ServedDevice<'a>)| {
            matches!(served.state, ServedState::Filling(_) | ServedState::Sealing(_))
                && !self.connections.has(**place)
        };
        self.devices().iter().filter(is_unread).count()
    }

    /// Returns the source of a device's bytes for an image, or `None` if its readers get errors.
    pub(super) fn bytes_of_device(
        &self,
        place: InodePlace,
        manifest: Option<&Digest>,
    ) -> Option<DeviceBytes<'a>> {
        match &self.devices().get(&place)?.state {
            ServedState::Filling(fillers) => {
                Some(DeviceBytes::Filling(Arc::clone(fillers.filler_or_first(manifest))))
            }
            ServedState::Sealing(filler) => Some(DeviceBytes::Filling(Arc::clone(filler))),
            ServedState::Complete(file) => Some(DeviceBytes::Complete(Arc::clone(file))),
            ServedState::Broken(..) => None,
        }
    }

    /// Returns one filler of each incomplete device.
    #[must_use]
    pub fn fillers(&self) -> Vec<Arc<LayerFiller<'a>>> {
        self.fillers_for(None)
    }

    /// Like [`fillers`](Self::fillers), but prefers the fillers for an image.
    pub(in crate::lazy) fn fillers_for(
        &self,
        manifest: Option<&Digest>,
    ) -> Vec<Arc<LayerFiller<'a>>> {
        let filling = |served: &ServedDevice<'a>| match &served.state {
            ServedState::Filling(fillers) => Some(Arc::clone(fillers.filler_or_first(manifest))),
            ServedState::Sealing(_) | ServedState::Complete(_) | ServedState::Broken(..) => None,
        };
        self.devices().values().filter_map(filling).collect()
    }

    /// Calls `give` with the file and the state of each device that the keeper must hold for the next service.
    pub(in crate::lazy) fn files<E>(
        &self,
        mut give: impl FnMut(&DeviceId, &File, KeptState) -> Result<(), E>,
    ) -> Result<(), E> {
        let to_keep = |(place, it): (&InodePlace, &ServedDevice<'a>)| {
            let state = match &it.state {
                ServedState::Filling(fillers) => {
                    let completing = fillers.all().find(|it| it.is_completing(Completing::Asked));
                    let manifest = completing.unwrap_or(&fillers.first).manifest().copied();
                    let is_completing = completing.is_some();
                    KeptState { is_completing, manifest, ..KeptState::default() }
                }
                ServedState::Complete(_) if self.connections.has(*place) => {
                    KeptState { is_complete: true, ..KeptState::default() }
                }
                ServedState::Complete(_) => return None,
                ServedState::Sealing(_) | ServedState::Broken(..) => KeptState::default(),
            };
            // If the descriptor cannot be duplicated, the keeper continues to hold the descriptor that it may already
            // have.
            Some((it.device, it.state.file().try_clone().ok()?, state))
        };
        // The callback may be slow, and readers need the lock.
        let files: Vec<_> = self.devices().iter().filter_map(to_keep).collect();
        files.iter().try_for_each(|(device, file, state)| give(device, file, *state))
    }

    /// Returns a device that is full, for sealing. From then on, its readers do not wait.
    pub fn take_full(&self) -> Option<Arc<LayerFiller<'a>>> {
        let mut devices = self.devices_mut();
        // A device of chunks is never sealed, because its id is not a digest of its bytes.
        let is_full = |served: &&mut ServedDevice<'a>| matches!(&served.state, ServedState::Filling(it) if it.first.is_sealable() && it.first.is_full() && it.is_idle());
        let served = devices.values_mut().find(is_full)?;
        let ServedState::Filling(fillers) = &served.state else { return None };
        let filler = Arc::clone(&fillers.first);
        served.state = ServedState::Sealing(Arc::clone(&filler));
        Some(filler)
    }

    /// Checks whether the disk has kept the filled bytes. Readers of a device with lost bytes get I/O errors.
    pub(in crate::lazy) fn check_written(&self) {
        for filler in self.fillers().into_iter().filter(|it| !it.is_kept()) {
            let mut devices = self.devices_mut();
            let served = devices.values_mut().find(|it| it.device == *filler.device().id());
            // If the descriptor cannot be duplicated, the next check tries again.
            let _unchanged =
                served.map(|it| give_up(it, &filler, "the disk lost data of it".to_owned()));
        }
    }

    /// Records that sealing a device from [`take_full`](Self::take_full) failed. Its readers get I/O errors from then
    /// on.
    pub fn refuse(&self, filler: &LayerFiller<'_>, cause: String) -> Result<(), DeviceServerError> {
        let mut devices = self.devices_mut();
        match devices.values_mut().find(|it| it.device == *filler.device().id()) {
            Some(served) if !matches!(served.state, ServedState::Filling(_)) => {
                give_up(served, filler, cause)
            }
            _ => Ok(()),
        }
    }

    /// Returns the devices whose readers get I/O errors.
    pub(in crate::lazy) fn broken(&self) -> Vec<BrokenDevice> {
        let broken = |served: &ServedDevice<'_>| match &served.state {
            ServedState::Broken(_, about) => Some(BrokenDevice::clone(about)),
            ServedState::Filling(_) | ServedState::Sealing(_) | ServedState::Complete(_) => None,
        };
        self.devices().values().filter_map(broken).collect()
    }

    /// Returns whether all bytes of the device with this file are verified and on the disk.
    pub fn is_complete(&self, file: &File) -> Result<bool, DeviceServerError> {
        let place = place(file)?;
        let devices = self.devices();
        Ok(devices.get(&place).is_some_and(|it| matches!(it.state, ServedState::Complete(_))))
    }

    /// Returns whether the device was returned by [`take_full`](Self::take_full), and is not complete yet.
    pub(in crate::lazy) fn is_sealing(&self, device: &DeviceId) -> bool {
        let devices = self.devices();
        let served = devices.values().find(|it| it.device == *device);
        served.is_some_and(|it| matches!(it.state, ServedState::Sealing(_)))
    }

    /// Records that a device is sealed. `file` is its file, open for reading.
    pub fn pass(&self, device: DeviceId, file: File) -> Result<(), DeviceServerError> {
        let place = place(&file)?;
        let state = ServedState::Complete(Arc::new(file));
        self.devices_mut().insert(place, ServedDevice { device, used: None, state });
        Ok(())
    }

    /// Loads frames of a hot pack.
    pub(in crate::lazy) fn load(&self, frames: Vec<(Arc<LayerFiller<'a>>, usize)>) {
        self.ahead.load(frames);
    }

    /// Prefetches byte ranges of devices in the order of a trace, with less priority than waiting readers.
    pub fn bring_ahead(&self, runs: Vec<(Arc<LayerFiller<'a>>, Range<usize>)>) {
        self.ahead.trace(runs);
    }

    /// Prefetches the units that `find` returns. Another thread calls it.
    pub(in crate::lazy) fn bring_ahead_later(
        &self,
        find: impl FnOnce() -> TraceUnits<'a> + Send + 'a,
    ) {
        self.ahead.trace_later(find);
    }

    /// Returns the starts of images that are recorded or were prefetched.
    pub(in crate::lazy) const fn starts(&self) -> &Arc<Starts> {
        &self.starts
    }

    /// Wakes [`serve`](Self::serve) so that it notices the end at once. Without this, `serve` notices it within 200 ms.
    pub(in crate::lazy) fn wake(&self) {
        // This write fails only if the counter of the eventfd is full, and then the descriptor is readable anyway.
        let _written = rustix::io::write(&self.wake, &[1; 8]);
    }
}

fn give_up(
    served: &mut ServedDevice<'_>,
    filler: &LayerFiller<'_>,
    cause: String,
) -> Result<(), DeviceServerError> {
    let file: File = served.state.file().try_clone().map_err(unexamined)?;
    served.state = ServedState::Broken(file, Box::new(BrokenDevice::new(filler, cause)));
    Ok(())
}

/// Returns the device number and the inode number of a file.
pub(in crate::lazy) fn place(file: &File) -> Result<InodePlace, DeviceServerError> {
    let found = file.metadata().map_err(unexamined)?;
    Ok((found.dev(), found.ino()))
}

fn unexamined(error: io::Error) -> OperationError {
    OperationError::of("examine", "a lazy device")(error)
}
