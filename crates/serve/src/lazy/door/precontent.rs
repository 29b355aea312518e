//! Reads of marked files, as fanotify pre-content events.

use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use kernel::fanotify::{PrecontentAnswer, PrecontentError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use store::OperationError;

use super::fetch_pool::FetchPool;
use super::waiting::{Asked, WaitingReader};
use super::{ArmedState, Door, DoorError, LOOK, PATIENCE, are_kept};
use crate::lazy::fill::LayerFiller;
use crate::lazy::journal::TakenEvent;
use crate::lazy::metrics::FailureCause;

/// How long new readers may wait while urgent readers of an earlier door are answered.
const URGENT: Duration = Duration::from_secs(2);

impl<'a> Door<'a> {
    /// Handles the readers of an earlier door, and returns when new events may be taken.
    fn take_over(&self, pool: &FetchPool<'a>, waiting: &mut Vec<Weak<WaitingReader<'a>>>) {
        let inherited =
            std::mem::take(&mut *self.inherited.lock().unwrap_or_else(PoisonError::into_inner));
        let readers = inherited.len();
        let mut urgent = Vec::new();
        for event in inherited {
            let is_urgent = event.is_urgent();
            let Some(reader) = self.greet(event) else { continue };
            if is_urgent {
                urgent.push(Arc::clone(&reader));
            }
            self.admit(reader, pool, waiting);
        }
        if readers > 0 {
            tracing::info!(
                readers,
                urgent = urgent.len(),
                "took over the readers of the previous service"
            );
        }
        // When further events are taken, the kernel may reuse the descriptor numbers of these events, and a late
        // answer would then apply to a new event.
        let begun = Instant::now();
        while begun.elapsed() < URGENT && urgent.iter().any(|it| !it.is_answered()) {
            thread::sleep(Duration::from_millis(1));
        }
        for reader in urgent {
            self.answer(&reader, PrecontentAnswer::Deny);
        }
    }

    pub(super) fn admit(
        &self,
        reader: Arc<WaitingReader<'a>>,
        pool: &FetchPool<'a>,
        waiting: &mut Vec<Weak<WaitingReader<'a>>>,
    ) {
        waiting.push(Arc::downgrade(&reader));
        pool.push(reader);
    }

    /// Takes events until `is_over` returns true, and queues readers that must wait. Returns those that still wait.
    pub(super) fn take_events(
        &self,
        pool: &FetchPool<'a>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Weak<WaitingReader<'a>>>, DoorError> {
        let mut waiting = Vec::new();
        self.take_over(pool, &mut waiting);
        let mut looked = Instant::now();
        while !is_over() {
            if looked.elapsed() > LOOK {
                self.see_to(&mut waiting);
                looked = Instant::now();
            }
            let patience = Timespec { tv_sec: 0, tv_nsec: PATIENCE * 1_000_000 };
            let both = [self.group.as_fd(), self.wake.as_fd()];
            let mut both = both.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN));
            match poll(&mut both, Some(&patience)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(OperationError::of("wait", "for readers")(error).into()),
            }
            for event in self.events()? {
                let Some(reader) = self.greet(event) else { continue };
                self.admit(reader, pool, &mut waiting);
            }
        }
        Ok(waiting)
    }

    /// Replies to a reader that need not wait. Returns a reader that must wait.
    fn greet(&self, event: TakenEvent) -> Option<Arc<WaitingReader<'a>>> {
        let fillers = match self.found(&event) {
            EventDevices::Filling(fillers) => fillers,
            EventDevices::Complete => {
                self.journal.answer(&self.group, event, PrecontentAnswer::Allow);
                return None;
            }
            EventDevices::Nothing => {
                self.journal.answer(&self.group, event, PrecontentAnswer::Deny);
                return None;
            }
        };
        fillers.iter().for_each(|it| it.counts().asked());
        if fillers.iter().all(|it| it.has(&event.range)) {
            fillers.iter().for_each(|it| it.touch(&event.range));
            let answer =
                if are_kept(&fillers) { PrecontentAnswer::Allow } else { PrecontentAnswer::Deny };
            self.journal.answer(&self.group, event, answer);
            return None;
        }
        let range = event.range.clone();
        let denied = fillers.iter().find(|it| !self.is_cancelled() && it.is_denied(&range));
        let denied = denied.cloned();
        let reader = WaitingReader::new(Asked::Event(event), range, fillers);
        if let Some(filler) = denied {
            filler.counts().failed(FailureCause::Denied);
            // The answer is sent here, because all threads may be busy.
            self.answer(&reader, PrecontentAnswer::Deny);
            return None;
        }
        Some(Arc::new(reader))
    }

    /// Returns the pending events. If the kernel cannot open the file of an event, it denies that event and removes it
    /// from the queue, so the next call returns the events that follow.
    fn events(&self) -> Result<Vec<TakenEvent>, DoorError> {
        loop {
            match self.journal.take(&self.group) {
                Err(PrecontentError::Call { source, .. })
                    if !matches!(source, Errno::BADF | Errno::FAULT | Errno::INVAL) =>
                {
                    tracing::error!(%source, "a reader gets an I/O error");
                }
                events => return Ok(events?),
            }
        }
    }

    fn found(&self, event: &TakenEvent) -> EventDevices<'a> {
        let devices = self.devices();
        if let Some(place) = event.place {
            return match devices.get(&place).map(|it| &it.state) {
                Some(ArmedState::Filling(ways)) => {
                    EventDevices::Filling(vec![Arc::clone(ways.usual())])
                }
                Some(ArmedState::Sealing(filler)) => {
                    EventDevices::Filling(vec![Arc::clone(filler)])
                }
                Some(ArmedState::Complete(_)) => EventDevices::Complete,
                Some(ArmedState::Broken(_)) | None => EventDevices::Nothing,
            };
        }
        // The event belongs to one of these devices, so its bytes are present if all of the devices have them.
        let mut fillers = Vec::new();
        for armed in devices.values() {
            let filler = match &armed.state {
                ArmedState::Filling(ways) => ways.usual(),
                ArmedState::Sealing(filler) => filler,
                ArmedState::Complete(_) => continue,
                ArmedState::Broken(_) => return EventDevices::Nothing,
            };
            if armed.is_marked {
                fillers.push(Arc::clone(filler));
            }
        }
        if devices.is_empty() || self.has_unknown.load(Ordering::Relaxed) {
            return EventDevices::Nothing;
        }
        EventDevices::Filling(fillers)
    }
}

/// The devices that an event may be about.
enum EventDevices<'a> {
    /// The device's filler, or those of all marked devices if the device is unknown.
    Filling(Vec<Arc<LayerFiller<'a>>>),
    Complete,
    Nothing,
}
