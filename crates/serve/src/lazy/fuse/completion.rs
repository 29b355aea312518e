//! Fetches the rest of devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::devices::{ServedState, fillers_of};
use super::server::DeviceServer;
use crate::lazy::fill::{Completing, LayerFiller};

impl<'a> DeviceServer<'a> {
    /// Fetches a whole device with the lowest priority.
    pub fn complete(&self, filler: &Arc<LayerFiller<'a>>) {
        self.ahead.forget_failures();
        if filler.begin_completing(Completing::Asked) {
            self.ahead.complete_rest(filler);
        }
    }

    /// Fetches devices that have been in use for this time, with the lowest priority, and stops fetching devices that
    /// are not in use any more. Without a time, only stops.
    pub(in crate::lazy) fn complete_used(&self, after: Option<Duration>, now: Instant) {
        let mut due = Vec::new();
        for (place, served) in self.devices_mut().iter_mut() {
            let is_used = self.connections.has(*place);
            served.used = is_used.then(|| served.used.unwrap_or(now));
            let ServedState::Filling(fillers) = &served.state else { continue };
            if !is_used || after.is_none() {
                fillers.all().for_each(|it| it.stop_completing());
            } else if served.used.zip(after).is_some_and(|(since, after)| now - since >= after)
                && !fillers.all().any(|it| it.is_completing(Completing::WhileUsed))
                && !fillers.usual().has_given_up()
                && !fillers.first.is_full()
            {
                due.push(Arc::clone(fillers.usual()));
            }
        }
        for filler in due {
            if filler.begin_completing(Completing::WhileUsed) {
                tracing::debug!(device = %filler.device().id(), "fetching the rest of a device");
                self.ahead.complete_rest(&filler);
            }
        }
    }

    /// Returns the fillers whose devices were fetched as a whole by request, but are never sealed. Each is returned once
    /// for each request.
    pub fn take_completed(&self) -> Vec<Arc<LayerFiller<'a>>> {
        let filling: Vec<_> = self.devices().values().flat_map(fillers_of).collect();
        filling.into_iter().filter(|it| it.end_completing()).collect()
    }

    /// Retries the missing parts of devices that should become complete, which another thread may have failed to
    /// fetch.
    pub fn complete_again(&self) {
        let filling: Vec<_> = self.devices().values().flat_map(fillers_of).collect();
        let is_left =
            |it: &&Arc<LayerFiller<'_>>| it.is_completing(Completing::WhileUsed) && !it.is_full();
        let left = filling.iter().filter(is_left);
        left.for_each(|it| self.ahead.complete_rest(it));
    }
}
