//! Reads of marked files, as fanotify's pre-content events.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
use std::time::Instant;

use kernel::precontent::{EventBuffer, PrecontentError, ReadEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::waiting::WaitingReader;
use super::{Armed, Door, DoorError, LOOK};
use crate::lazy::fill::LayerFiller;

/// How long it may take until the end is seen, in milliseconds.
const PATIENCE: i64 = 50;

impl<'a> Door<'a> {
    /// Takes events until `stop` is set, and gives readers that have to wait to `fetchers`.
    pub(super) fn take_in(
        &self,
        fetchers: &mpsc::Sender<Arc<WaitingReader<'a>>>,
        waiting: &mut Vec<Weak<WaitingReader<'a>>>,
        stop: &AtomicBool,
    ) -> Result<(), DoorError> {
        let mut buffer = EventBuffer::default();
        let mut looked = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if looked.elapsed() > LOOK {
                self.see_to(waiting);
                looked = Instant::now();
            }
            let patience = Timespec { tv_sec: 0, tv_nsec: PATIENCE * 1_000_000 };
            match poll(&mut [PollFd::new(&self.group, PollFlags::IN)], Some(&patience)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(DoorError::Wait(error)),
            }
            for event in self.events(&mut buffer)? {
                let Some(reader) = self.greet(event) else { continue };
                waiting.push(Arc::downgrade(&reader));
                if let Err(mpsc::SendError(reader)) = fetchers.send(reader) {
                    self.answer(&reader, false);
                }
            }
        }
        Ok(())
    }

    /// Answers a reader that need not wait, or returns it.
    fn greet(&self, event: ReadEvent) -> Option<Arc<WaitingReader<'a>>> {
        let filler = match self.find(&event) {
            Found::Filler(filler) => filler,
            Found::Complete => {
                self.allow(event);
                return None;
            }
            Found::Nothing => {
                self.deny(event);
                return None;
            }
        };
        if filler.has(&event.range) {
            filler.touch(&event.range);
            self.allow(event);
            return None;
        }
        let (range, since) = (event.range.clone(), Instant::now());
        let is_denied = filler.is_denied(&range);
        let reader = WaitingReader { event: Mutex::new(Some(event)), range, filler, since };
        if is_denied {
            // Also while no thread is free.
            self.answer(&reader, false);
            return None;
        }
        Some(Arc::new(reader))
    }

    /// The events that are there. If there is no descriptor or no memory left for one, the kernel denies it and takes it from
    /// the queue: the next call gives those behind it.
    fn events(&self, buffer: &mut EventBuffer) -> Result<Vec<ReadEvent>, DoorError> {
        loop {
            match self.group.read(buffer) {
                Err(PrecontentError::Call {
                    source: source @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM),
                    ..
                }) => tracing::error!(%source, "a reader gets an I/O error"),
                events => return Ok(events?),
            }
        }
    }

    fn find(&self, event: &ReadEvent) -> Found<'a> {
        let Ok(stat) = rustix::fs::fstat(&event.file) else { return Found::Nothing };
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        match devices.get(&(stat.st_dev, stat.st_ino)) {
            Some(Armed::Filling(filler)) => Found::Filler(Arc::clone(filler)),
            Some(Armed::Complete(_)) => Found::Complete,
            Some(Armed::Broken(..)) | None => Found::Nothing,
        }
    }

    pub(super) fn allow(&self, event: ReadEvent) {
        if let Err(error) = self.group.allow(event) {
            tracing::debug!(%error, "its reader is gone");
        }
    }

    pub(super) fn deny(&self, event: ReadEvent) {
        if let Err(error) = self.group.deny(event) {
            tracing::debug!(%error, "its reader is gone");
        }
    }
}

/// What has the bytes of an event.
enum Found<'a> {
    Filler(Arc<LayerFiller<'a>>),
    Complete,
    Nothing,
}
