//! Readers that wait, and who lets them go.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use kernel::precontent::PrecontentAnswer;

use super::Door;
use crate::lazy::fill::{FillError, LayerFiller};
use crate::lazy::journal::TakenEvent;

/// A reader that waits. It is answered once: by who has brought its bytes, or when it has waited long enough. Or it is left
/// to the next door.
pub(super) struct WaitingReader<'a> {
    pub(super) event: Mutex<Option<TakenEvent>>,
    pub(super) range: Range<u64>,
    /// As many as may have its bytes: all of them are waited for.
    pub(super) fillers: Vec<Arc<LayerFiller<'a>>>,
    pub(super) since: Instant,
}

impl WaitingReader<'_> {
    /// `None` if it was answered.
    fn event(&self) -> MutexGuard<'_, Option<TakenEvent>> {
        self.event.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_answered(&self) -> bool {
        self.event().is_none()
    }

    fn overdue(&self) -> Option<Duration> {
        self.fillers.iter().find_map(|it| it.overdue(self.since))
    }
}

impl<'a> Door<'a> {
    /// Lets those go that have waited long enough, whoever still brings their bytes. Returns whether no reader waits.
    pub(super) fn see_to(&self, waiting: &mut Vec<Weak<WaitingReader<'a>>>) -> bool {
        waiting.retain(|reader| {
            let Some(reader) = reader.upgrade().filter(|it| !it.is_answered()) else {
                return false;
            };
            if self.is_cancelled() {
                self.leave(&reader);
                return false;
            }
            let Some(silence) = reader.overdue() else { return true };
            let (fillers, silence) = (&reader.fillers, silence.as_secs());
            tracing::error!(
                ?fillers,
                silence,
                "a reader gets an I/O error: no source gives anything"
            );
            self.answer(&reader, PrecontentAnswer::Deny);
            false
        });
        waiting.is_empty()
    }

    /// Whether sources fail because all ends, and another door is to come.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|it| it.load(Ordering::Relaxed))
    }

    /// Brings what a reader waits for.
    pub(super) fn bring(&self, reader: &WaitingReader<'a>) {
        for filler in &reader.fillers {
            if reader.is_answered() {
                return;
            }
            if !self.has_brought(reader, filler) {
                match self.is_cancelled() {
                    true => self.leave(reader),
                    false => self.answer(reader, PrecontentAnswer::Deny),
                }
                return;
            }
        }
        self.answer(reader, PrecontentAnswer::Allow);
    }

    /// Brings what a reader waits for, of one device. Returns whether it is there.
    fn has_brought(&self, reader: &WaitingReader<'a>, filler: &Arc<LayerFiller<'a>>) -> bool {
        let begin = |soon| {
            self.ahead.soon(filler, soon);
            self.ahead.behind_reader()
        };
        let done = filler.ensure(reader.range.clone(), begin);
        match &done {
            Ok(()) => {}
            Err(FillError::Silent(_)) if reader.is_answered() => {}
            Err(_) if self.is_cancelled() => {}
            // Why was said when it failed.
            Err(error @ FillError::Denied { .. }) => {
                tracing::debug!(%error, ?filler, "a reader gets an I/O error");
            }
            Err(error) => {
                let error: &dyn std::error::Error = error;
                tracing::error!(error, ?filler, "a reader gets an I/O error");
            }
        }
        done.is_ok()
    }

    pub(super) fn answer(&self, reader: &WaitingReader<'a>, answer: PrecontentAnswer) {
        // Whoever sees that it is answered may rely on it.
        let mut waiting = reader.event();
        let Some(event) = waiting.take() else { return };
        for filler in &reader.fillers {
            let is_there = answer == PrecontentAnswer::Allow;
            filler.counts().waited(reader.since.elapsed(), is_there);
        }
        self.journal.answer(&self.group, event, answer);
    }

    /// Leaves a reader to the next door, which finds it in the journal.
    fn leave(&self, reader: &WaitingReader<'a>) {
        let left = reader.event().take();
        self.left.lock().unwrap_or_else(PoisonError::into_inner).extend(left);
    }
}
