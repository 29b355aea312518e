//! Readers that wait, and who lets them go.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use kernel::precontent::ReadEvent;

use super::Door;
use crate::lazy::fill::{FillError, LayerFiller};

/// A reader that waits. It is answered once: by who has brought its bytes, or when it has waited long enough.
pub(super) struct WaitingReader<'a> {
    pub(super) event: Mutex<Option<ReadEvent>>,
    pub(super) range: Range<u64>,
    pub(super) filler: Arc<LayerFiller<'a>>,
    pub(super) since: Instant,
}

impl WaitingReader<'_> {
    /// `None` if it was answered.
    fn take(&self) -> Option<ReadEvent> {
        self.event.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn is_answered(&self) -> bool {
        self.event.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

impl<'a> Door<'a> {
    /// Lets those go that have waited long enough, whoever still brings their bytes. Returns whether no reader waits.
    pub(super) fn see_to(&self, waiting: &mut Vec<Weak<WaitingReader<'a>>>) -> bool {
        waiting.retain(|reader| {
            let Some(reader) = reader.upgrade().filter(|it| !it.is_answered()) else {
                return false;
            };
            let Some(silence) = reader.filler.overdue(reader.since) else { return true };
            let (filler, silence) = (&reader.filler, silence.as_secs());
            tracing::error!(
                ?filler,
                silence,
                "a reader gets an I/O error: no source gives anything"
            );
            self.answer(&reader, false);
            false
        });
        waiting.is_empty()
    }

    /// Brings what a reader waits for.
    pub(super) fn bring(&self, reader: &WaitingReader<'a>) {
        if reader.is_answered() {
            return;
        }
        let filler = &reader.filler;
        let begin = |soon| {
            self.ahead.soon(filler, soon);
            self.ahead.behind_reader()
        };
        let done = filler.ensure(reader.range.clone(), begin);
        match &done {
            Ok(()) => {}
            Err(FillError::Silent(_)) if reader.is_answered() => {}
            // Why was said when it failed.
            Err(error @ FillError::Denied { .. }) => {
                tracing::debug!(%error, ?filler, "a reader gets an I/O error");
            }
            Err(error) => {
                let error: &dyn std::error::Error = error;
                tracing::error!(error, ?filler, "a reader gets an I/O error");
            }
        }
        self.answer(reader, done.is_ok());
    }

    pub(super) fn answer(&self, reader: &WaitingReader<'a>, is_there: bool) {
        let Some(event) = reader.take() else { return };
        reader.filler.counts().waited(reader.since.elapsed(), is_there);
        if is_there {
            self.allow(event);
        } else {
            self.deny(event);
        }
    }
}
