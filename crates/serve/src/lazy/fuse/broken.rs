//! A device whose readers get I/O errors until its last mount ends.

use std::time::Instant;

use image::digest::Digest;
use image::verity::DeviceId;

use crate::lazy::fill::LayerFiller;
use crate::lazy::metrics::{LastFailure, LazyCounts};

/// The last status of the device. Its filler is gone.
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
    pub(super) fn new(filler: &LayerFiller<'_>, cause: String) -> Self {
        let head = &filler.index().head;
        Self {
            device: head.device,
            blob: head.blob,
            bytes: head.device_bytes,
            filled: filler.filled() as u64,
            units: head.unit_count() as u64,
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
