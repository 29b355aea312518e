//! Prefetches and records the starts of images.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use image::digest::Digest;
use image::lazy::UNIT;
use image::lazy::hot::BLOCK;
use image::verity::{DeviceId, ImageId};
use store::TraceRun;

use super::Service;
use crate::lazy::fill::LayerFiller;
use crate::lazy::fuse::DeviceServer;
use crate::lazy::prefetch::plans::TraceUnits;
use crate::lazy::prefetch::readahead;
use crate::lazy::supply::Supply;

/// The fillers of an image's devices.
pub(super) type FillersByDevice<'a> = HashMap<DeviceId, Arc<LayerFiller<'a>>>;

fn by_device<'a>(fillers: impl Iterator<Item = Arc<LayerFiller<'a>>>) -> FillersByDevice<'a> {
    fillers.map(|it| (*it.device().id(), it)).collect()
}

/// Returns the units of the devices of `fillers` that contain these blocks.
pub(super) fn units_of<'a>(runs: &[TraceRun], fillers: &FillersByDevice<'a>) -> TraceUnits<'a> {
    let runs = runs.iter().filter_map(|run| {
        let filler = Arc::clone(fillers.get(&run.device)?);
        let most = filler.index().head.unit_count();
        let start = u64::from(run.block) * BLOCK / UNIT;
        let end = (u64::from(run.block) + u64::from(run.blocks)) * BLOCK;
        let [start, end] =
            [start, end.div_ceil(UNIT)].map(|it| usize::try_from(it).unwrap_or(usize::MAX));
        Some((filler, start..end, most))
    });
    // The blocks may be those of a trace from another host, so their number is bounded.
    readahead::bounded(runs).collect()
}

impl<'a> Service<'_, 'a> {
    /// Returns the fillers of all devices, for an image if they have one for it.
    pub(super) fn fillers_by_device(&self, manifest: Option<&Digest>) -> FillersByDevice<'a> {
        by_device(self.devices.fillers_for(manifest).into_iter())
    }

    /// Begins to find and prefetch the start of an image, without a result for the client. The start only saves time.
    pub(super) fn prefetch_start(&self, image: ImageId, manifest: Digest) {
        let supply = self.environment.supply;
        let starts = Arc::clone(self.devices.starts());
        // A plan that waits does not keep devices from being released.
        let fillers: Vec<_> = self.devices.fillers_for(Some(&manifest));
        let fillers: Vec<_> = fillers.iter().map(Arc::downgrade).collect();
        self.devices.bring_ahead_later(move || {
            let begun = Instant::now();
            let found = supply.start(&image, &manifest).unwrap_or_else(|error| {
                tracing::debug!(%image, error = &*error, "cannot use the start of an image");
                None
            });
            let Some(start) = found else { return Vec::new() };
            let fillers = by_device(fillers.iter().filter_map(Weak::upgrade));
            let units = units_of(&start.blocks, &fillers);
            let (started, took) = (start.started, begun.elapsed());
            tracing::debug!(%manifest, %started, runs = units.len(), ?took, "prefetching a start");
            if !units.is_empty() {
                starts.was_prefetched(manifest, started);
            }
            units
        });
    }
}

/// Keeps the starts whose recording has ended.
pub(super) fn keep_ended(devices: &DeviceServer<'_>, supply: &Supply<'_>) {
    for ended in devices.starts().take_ended(Instant::now()) {
        let begun = Instant::now();
        let kept = supply.keep_start(&ended);
        let (manifest, took) = (ended.manifest, begun.elapsed());
        match kept {
            Ok(()) => tracing::debug!(%manifest, ?took, "the recording of a start has ended"),
            Err(error) => {
                tracing::debug!(%manifest, error = &*error, "cannot record the start of an image");
            }
        }
    }
}
