//! The status of devices, for clients.

use crate::lazy::fill::{Completing, LayerFiller};
use crate::lazy::fuse::{BrokenDevice, DeviceServer};
use crate::lazy::wire::DeviceStatus;

/// Returns the status of all incomplete devices.
pub(super) fn all(devices: &DeviceServer<'_>) -> Vec<DeviceStatus> {
    let mut all: Vec<_> = devices.fillers().iter().map(|it| of_filler(devices, it)).collect();
    all.extend(devices.broken().iter().map(|it| of_broken(devices, it)));
    all
}

fn of_filler(devices: &DeviceServer<'_>, filler: &LayerFiller<'_>) -> DeviceStatus {
    let head = &filler.index().head;
    DeviceStatus {
        device: head.device.to_string(),
        blob: head.blob.to_string(),
        bytes: head.device_bytes,
        filled: filler.filled() as u64,
        units: head.unit_count() as u64,
        is_completing: filler.is_completing(Completing::WhileUsed),
        is_mounted: devices.is_connected(&head.device),
        disk_error: filler.disk_error(),
        last_failure: filler.last_failure(),
        broken: None,
        start_of: filler.manifest().and_then(|it| devices.starts().prefetched(it)),
        counts: filler.counts().now(),
    }
}

fn of_broken(devices: &DeviceServer<'_>, broken: &BrokenDevice) -> DeviceStatus {
    DeviceStatus {
        device: broken.device.to_string(),
        blob: broken.blob.to_string(),
        bytes: broken.bytes,
        filled: broken.filled,
        units: broken.units,
        is_completing: false,
        is_mounted: devices.is_connected(&broken.device),
        disk_error: None,
        last_failure: broken.last_failure(),
        broken: Some(broken.cause.clone()),
        start_of: None,
        counts: broken.counts.clone(),
    }
}
