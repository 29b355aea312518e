//! The units of a device that are being fetched.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::MutexGuard;

use super::{Cause, LayerFiller};
use crate::unpoisoned::lock;

/// The threads that fetch a unit. A unit that lies in the spans of two requests is fetched by both.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct UnitFetches {
    /// Number of threads.
    all: usize,
    /// Number of those whose priority is not reduced. Readers wait only for these.
    pub(super) prompt: usize,
}

/// Units that are being fetched.
pub(super) type Coming = BTreeMap<usize, UnitFetches>;

/// Returns whether a unit is being fetched, so that a request for `cause` leaves it out. Only completions leave out units
/// that threads of low priority fetch.
pub(super) fn is_coming(coming: &Coming, unit: usize, cause: Cause) -> bool {
    let fetches = coming.get(&unit).copied().unwrap_or_default();
    if cause == Cause::Completion { fetches.all > 0 } else { fetches.prompt > 0 }
}

/// Units that one thread is fetching. Dropping it wakes all threads that wait for them.
pub(super) struct UnitClaim<'f, 'a> {
    filler: &'f LayerFiller<'a>,
    units: Range<usize>,
    cause: Cause,
}

impl<'f, 'a> UnitClaim<'f, 'a> {
    pub(super) fn new(
        filler: &'f LayerFiller<'a>,
        units: Range<usize>,
        mut coming: MutexGuard<'_, Coming>,
        cause: Cause,
    ) -> Self {
        for unit in units.clone() {
            let fetches = coming.entry(unit).or_default();
            fetches.all += 1;
            fetches.prompt += usize::from(cause != Cause::Completion);
        }
        Self { filler, units, cause }
    }
}

impl Drop for UnitClaim<'_, '_> {
    fn drop(&mut self) {
        let mut coming = lock(&self.filler.coming);
        for unit in self.units.clone() {
            if let Some(fetches) = coming.get_mut(&unit) {
                fetches.all -= 1;
                fetches.prompt -= usize::from(self.cause != Cause::Completion);
                if fetches.all == 0 {
                    coming.remove(&unit);
                }
            }
        }
        self.filler.came.notify_all();
    }
}
