//! Brings what is wanted soon, behind what readers wait for.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use super::fill::{Cause, LayerFiller};
use super::plan::{self, Cost};

/// So many requests that nobody waits for are under way at once.
pub(super) const WORKERS: usize = 16;
/// The most parts that wait. Sources that do not answer would have more and more wait.
const WAITING_MAX: usize = 1 << 16;
/// How many of the requests may belong to traces while a reader waits for a request of its own.
const BESIDE_READERS: usize = 2;

/// Units of a device that nobody waits for yet. The device may go meanwhile.
#[derive(Debug)]
struct AheadPart<'a> {
    filler: Weak<LayerFiller<'a>>,
    units: Range<usize>,
    cause: Cause,
}

/// What it takes to bring these units.
fn cost(filler: &LayerFiller<'_>, units: &Range<usize>) -> Cost {
    Cost { bytes: filler.packed_bytes(units), spans: filler.spans_of(units) }
}

/// Adds as many parts as may wait. Those who read the others fetch them.
fn add<T>(waiting: &mut VecDeque<T>, parts: impl IntoIterator<Item = T>) {
    let room = WAITING_MAX.saturating_sub(waiting.len());
    waiting.extend(parts.into_iter().take(room));
}

/// What is to be brought.
#[derive(Debug, Default)]
pub(super) struct Ahead<'a> {
    state: Mutex<State<'a>>,
    /// Told when there is more, or more is allowed, or at the end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State<'a> {
    /// For readers that read on.
    streams: VecDeque<AheadPart<'a>>,
    /// Of traces.
    traces: VecDeque<AheadPart<'a>>,
    /// Requests for `traces` that are under way.
    traced: usize,
    /// Requests for readers that are under way.
    readers: usize,
    is_over: bool,
}

/// A reader's request is under way.
#[derive(Debug)]
pub(super) struct First<'q, 'a>(&'q Ahead<'a>);

impl Drop for First<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().readers -= 1;
        self.0.changed.notify_all();
    }
}

impl<'a> Ahead<'a> {
    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds traces back as long as the result lives.
    pub(super) fn behind_reader(&self) -> First<'_, 'a> {
        self.lock().readers += 1;
        First(self)
    }

    /// What a reader will want soon.
    pub(super) fn soon(&self, filler: &Arc<LayerFiller<'a>>, units: Range<usize>) {
        if units.is_empty() {
            return;
        }
        let made = plan::in_pieces(units, |it| cost(filler, it));
        let piece =
            |units| AheadPart { filler: Arc::downgrade(filler), units, cause: Cause::Stream };
        add(&mut self.lock().streams, made.into_iter().map(piece));
        self.changed.notify_all();
    }

    /// What a trace has: units of devices, in the order in which they are wanted.
    pub(super) fn trace(&self, runs: Vec<(Arc<LayerFiller<'a>>, Range<usize>)>) {
        let mut fillers: Vec<Arc<LayerFiller<'a>>> = Vec::new();
        let mut placed = Vec::new();
        for (filler, units) in runs {
            let place = fillers.iter().position(|it| Arc::ptr_eq(it, &filler));
            let place = place.unwrap_or_else(|| {
                fillers.push(filler);
                fillers.len() - 1
            });
            placed.push((place, units));
        }
        let made = plan::requests(placed, |(place, units)| cost(&fillers[*place], units));
        let piece = |(place, units): plan::UnitRun| AheadPart {
            filler: Arc::downgrade(&fillers[place]),
            units,
            cause: Cause::Trace,
        };
        add(&mut self.lock().traces, made.into_iter().map(piece));
        self.changed.notify_all();
    }

    /// Ends [`work`](Self::work), as soon as what is under way is done.
    pub(super) fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Brings one piece after another, until the end.
    pub(super) fn work(&self) {
        let mut state = self.lock();
        loop {
            if state.is_over {
                return;
            }
            let may_trace = state.readers == 0 || state.traced < BESIDE_READERS;
            let next = match state.streams.pop_front() {
                None if may_trace => state.traces.pop_front(),
                next => next,
            };
            let Some(AheadPart { filler, units, cause }) = next else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let is_traced = cause == Cause::Trace;
            state.traced += usize::from(is_traced);
            drop(state);
            if let Some(filler) = filler.upgrade()
                && let Err(error) = filler.bring_ahead(units, cause)
            {
                // Whoever reads it tries again, and tells.
                let error: &dyn std::error::Error = &error;
                tracing::debug!(error, ?filler, "what nobody waits for does not come");
            }
            state = self.lock();
            state.traced -= usize::from(is_traced);
            self.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_that_waits() {
        let mut waiting = VecDeque::from([0]);
        add(&mut waiting, 1..WAITING_MAX * 2);
        add(&mut waiting, [0]);
        assert_eq!((waiting.len(), waiting.back()), (WAITING_MAX, Some(&(WAITING_MAX - 1))));
    }
}
