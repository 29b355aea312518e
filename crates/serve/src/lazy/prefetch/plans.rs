//! Traces whose parts have to be found first.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::lazy::fill::LayerFiller;

/// Maximum number of traces that wait. The data of the others is fetched when it is read.
const WAITING_MAX: usize = 64;

/// Units of devices, in the order of a trace.
pub(in crate::lazy) type TraceUnits<'a> = Vec<(Arc<LayerFiller<'a>>, Range<usize>)>;

/// Finds the units of a trace. This takes some milliseconds, so clients of the service do not wait for it.
pub(super) struct TracePlan<'a>(Box<dyn FnOnce() -> TraceUnits<'a> + Send + 'a>);

impl fmt::Debug for TracePlan<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TracePlan").finish_non_exhaustive()
    }
}

impl<'a> TracePlan<'a> {
    /// Adds a plan to a queue, unless the queue is full.
    pub(super) fn add(
        queue: &mut VecDeque<Self>,
        find: impl FnOnce() -> TraceUnits<'a> + Send + 'a,
    ) {
        if queue.len() < WAITING_MAX {
            queue.push_back(Self(Box::new(find)));
        }
    }

    pub(super) fn find(self) -> TraceUnits<'a> {
        (self.0)()
    }
}
