//! A device whose readers get I/O errors until its last mount ends.

use std::fs::File;
use std::time::Instant;

use image::digest::Digest;
use image::verity::DeviceId;

use super::devices::{ServedDevice, ServedState};
use super::server::{DeviceServer, DeviceServerError, unexamined};
use crate::lazy::fill::LayerFiller;
use crate::lazy::metrics::{LastFailure, LazyCounts};

/// What is known about the device. Its filler is gone.
#[derive(Debug, Clone)]
pub(in crate::lazy) struct BrokenDevice {
    pub(in crate::lazy) device: DeviceId,
    /// Digest of the blob that the device was filled from.
    pub(in crate::lazy) blob: Digest,
    /// Length of the device, in bytes.
    pub(in crate::lazy) bytes: u64,
    /// Number of units that were filled.
    pub(in crate::lazy) filled: u64,
    /// Number of all units.
    pub(in crate::lazy) units: u64,
    pub(in crate::lazy) counts: LazyCounts,
    /// Why its readers get I/O errors.
    pub(in crate::lazy) cause: String,
    last_failure: Option<LastFailure>,
    since: Instant,
}

impl BrokenDevice {
    fn new(filler: &LayerFiller<'_>, cause: String) -> Self {
        let head = &filler.index().head;
        Self {
            device: head.device,
            blob: head.blob,
            bytes: head.device_bytes,
            filled: filler.filled() as u64,
            units: head.units.len() as u64,
            counts: filler.counts().now(),
            cause,
            last_failure: filler.last_failure(),
            since: Instant::now(),
        }
    }

    /// Returns the last failure of a reader before the device was given up.
    pub(in crate::lazy) fn last_failure(&self) -> Option<LastFailure> {
        let LastFailure { age, cause } = self.last_failure.clone()?;
        let more = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        Some(LastFailure { age: age.saturating_add(more), cause })
    }
}

impl DeviceServer<'_> {
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
