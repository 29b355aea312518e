//! Blocked readers, and how each is answered.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use kernel::fanotify::PrecontentAnswer;
use kernel::fuse::{READ_MAX, Unique};
use rustix::io::Errno;

use super::fuse::Connection;
use super::{Compared, DeviceBytes, Door, UNIT_BYTES, are_kept};
use crate::any_error::text;
use crate::lazy::fill::{FillError, LayerFiller, SourceKey};
use crate::lazy::journal::TakenEvent;
use crate::lazy::metrics::FailureCause;

/// How often a reader's bytes are read if they are replaced during each read.
const READS: usize = 4;
/// Largest number of sources whose last success is remembered.
const SOURCES_MAX: usize = 1024;

/// A waiting reader. It is answered once, when its bytes were fetched or its timeout is over, or it is left to the
/// next door.
pub(super) struct WaitingReader<'a> {
    asked: Mutex<Option<Asked>>,
    range: Range<u64>,
    /// The fillers of all devices to which the event may belong, because the reader waits for all of these devices.
    /// Empty if the device is complete.
    fillers: Vec<Arc<LayerFiller<'a>>>,
    since: Instant,
    /// When a thread began to fetch the reader's bytes. Before that, no source was asked for them.
    begun: OnceLock<Instant>,
    /// Whether its bytes are downloaded and must only be read from the disk.
    waits_for_disk: bool,
}

/// The kernel's request of a reader.
pub(super) enum Asked {
    /// A fanotify event: the reader reads the file itself when it is allowed to.
    Event(TakenEvent),
    /// A FUSE request: the reply contains the bytes.
    Read(ReadRequest),
}

/// A read of a file on FUSE.
pub(super) struct ReadRequest {
    pub(super) connection: Arc<Connection>,
    pub(super) unique: Unique,
    /// The device's file if the device is complete; otherwise the filler has it.
    pub(super) complete: Option<Arc<File>>,
}

impl<'a> WaitingReader<'a> {
    /// Creates a reader that waits for bytes of these devices from now on.
    pub(super) fn new(asked: Asked, range: Range<u64>, fillers: Vec<Arc<LayerFiller<'a>>>) -> Self {
        fillers.iter().for_each(|it| it.counts().waits());
        let (asked, since) = (Mutex::new(Some(asked)), Instant::now());
        Self { asked, range, fillers, since, begun: OnceLock::new(), waits_for_disk: false }
    }

    /// Creates a reader whose bytes are downloaded and must only be read from the disk.
    pub(super) fn of_disk(
        asked: Asked,
        range: Range<u64>,
        fillers: Vec<Arc<LayerFiller<'a>>>,
    ) -> Self {
        let (asked, since) = (Mutex::new(Some(asked)), Instant::now());
        Self { asked, range, fillers, since, begun: OnceLock::new(), waits_for_disk: true }
    }

    /// Returns the request, or `None` if it was answered.
    fn asked(&self) -> MutexGuard<'_, Option<Asked>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the source that must be asked, or `None` if the bytes are downloaded.
    pub(super) fn source(&self) -> Option<SourceKey> {
        let filler = self.fillers.first().filter(|_| !self.waits_for_disk)?;
        Some(filler.key().clone())
    }

    /// Whether a thread is sending the answer, which may wait for the disk.
    fn is_being_answered(&self) -> bool {
        matches!(self.asked.try_lock(), Err(TryLockError::WouldBlock))
    }

    pub(super) fn is_answered(&self) -> bool {
        self.asked().is_none()
    }

    /// Returns how long no source has sent bytes for the reader, if the reader's timeout is over. A reader for which
    /// no thread has begun to fetch does not time out as long as other readers of the same source get bytes, because
    /// its turn will come. `gave` is the last time when one of those readers got bytes.
    fn overdue(&self, gave: Option<Instant>) -> Option<Duration> {
        let since = match self.begun.get() {
            Some(begun) => *begun,
            None => gave.map_or(self.since, |it| it.max(self.since)),
        };
        self.fillers.iter().find_map(|it| it.overdue(since))
    }
}

impl<'a> Door<'a> {
    /// Fails readers whose timeout is over, even if a fetch still runs. Returns whether no reader waits any more.
    pub(super) fn see_to(&self, waiting: &mut Vec<Weak<WaitingReader<'a>>>) -> bool {
        waiting.retain(|reader| {
            let Some(reader) = reader.upgrade() else { return false };
            // Other readers must not wait for the answer of this one.
            if reader.is_being_answered() {
                return true;
            }
            if reader.is_answered() {
                return false;
            }
            if self.is_cancelled() {
                self.leave(&reader);
                return false;
            }
            let source = reader.source();
            let gave = source.as_ref().and_then(|it| self.gave().get(it).copied());
            let Some(silence) = reader.overdue(gave) else { return true };
            let (fillers, silence) = (&reader.fillers, silence.as_secs());
            if let Some(unlogged) = fillers.first().and_then(|it| it.may_log()) {
                let devices: Vec<_> =
                    fillers.iter().map(|it| it.device().id().to_string()).collect();
                tracing::error!(
                    devices = devices.join(" "),
                    seconds = silence,
                    unlogged,
                    "a reader gets an I/O error: no source sends data"
                );
            }
            for filler in fillers {
                filler.counts().failed(FailureCause::Silent);
                filler.record_failure(format!("no source has sent data for {silence} seconds"));
                // The kernel splits the read and sends further requests for its parts. If the fetch has not begun, no
                // source was asked for the units, so they have not failed.
                if reader.begun.get().is_some() {
                    filler.deny(&reader.range);
                }
            }
            self.answer(&reader, PrecontentAnswer::Deny);
            false
        });
        waiting.is_empty()
    }

    /// Returns whether sources fail because this door ends and another one follows.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|it| it.load(Ordering::Relaxed))
    }

    /// Fetches a reader's bytes. A panic fails only this reader.
    pub(super) fn bring_or_deny(&self, reader: &WaitingReader<'a>) {
        let brought = catch_unwind(AssertUnwindSafe(|| self.bring(reader)));
        if brought.is_err() {
            tracing::error!("a reader gets an I/O error: the service panicked");
            self.answer(reader, PrecontentAnswer::Deny);
        }
    }

    fn gave(&self) -> MutexGuard<'_, HashMap<SourceKey, Instant>> {
        self.gave.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches a reader's bytes and sends the reply.
    fn bring(&self, reader: &WaitingReader<'a>) {
        reader.begun.get_or_init(Instant::now);
        for filler in &reader.fillers {
            if reader.is_answered() {
                return;
            }
            if !self.has_brought(reader, filler) {
                if self.is_cancelled() {
                    self.leave(reader);
                } else {
                    self.answer(reader, PrecontentAnswer::Deny);
                }
                return;
            }
        }
        let is_event = matches!(*reader.asked(), Some(Asked::Event(_)));
        // Bytes for FUSE requests are verified after they were read.
        let is_right = !is_event || are_kept(&reader.fillers);
        let answer = if is_right { PrecontentAnswer::Allow } else { PrecontentAnswer::Deny };
        self.answer(reader, answer);
    }

    /// Fetches a reader's bytes of one device. Returns whether that succeeded.
    fn has_brought(&self, reader: &WaitingReader<'a>, filler: &Arc<LayerFiller<'a>>) -> bool {
        let begin = |soon| {
            self.ahead.soon(filler, soon);
            self.ahead.behind_reader()
        };
        let done = filler.ensure(reader.range.clone(), begin);
        let device = filler.device().id();
        match &done {
            Ok(()) => {}
            Err(FillError::Silent(_)) if reader.is_answered() => {}
            Err(_) if self.is_cancelled() => {}
            // The reason was logged when the fetch failed.
            Err(error @ (FillError::Denied { .. } | FillError::DiskPause(_))) => {
                tracing::debug!(%error, %device, "a reader gets an I/O error");
            }
            Err(error) => {
                let error: &dyn std::error::Error = error;
                if let Some(unlogged) = filler.may_log() {
                    tracing::error!(error, %device, unlogged, "a reader gets an I/O error");
                }
            }
        }
        if done.is_ok() {
            let mut gave = self.gave();
            if gave.len() >= SOURCES_MAX {
                gave.clear();
            }
            gave.insert(filler.key().clone(), Instant::now());
        }
        if let Err(error) = &done
            && !reader.is_answered()
            && !self.is_cancelled()
        {
            filler.counts().failed(error.into());
            // The cause of a unit that is not tried again is that of the failure before.
            if !matches!(error, FillError::Denied { .. }) {
                filler.record_failure(text(error));
            }
        }
        done.is_ok()
    }

    pub(super) fn answer(&self, reader: &WaitingReader<'a>, answer: PrecontentAnswer) {
        // The lock is held until the answer is sent, so that a caller of `is_answered` can rely on it.
        let mut waiting = reader.asked();
        let Some(asked) = waiting.take() else { return };
        let is_there = answer == PrecontentAnswer::Allow;
        for filler in reader.fillers.iter().filter(|_| !reader.waits_for_disk) {
            filler.counts().waited(reader.since.elapsed());
        }
        match asked {
            Asked::Event(event) => self.journal.answer(&self.group, event, answer),
            Asked::Read(request) if is_there => give(reader, &request),
            Asked::Read(request) => request.connection.refuse(request.unique, Errno::IO),
        }
    }

    /// Leaves a reader to the next door, which finds its event in the journal, or gets its FUSE request again. Before
    /// Linux 6.9, reads of files on FUSE fail when this process exits.
    fn leave(&self, reader: &WaitingReader<'a>) {
        let left = reader.asked().take();
        if left.is_some() && !reader.waits_for_disk {
            reader.fillers.iter().for_each(|it| it.counts().left());
        }
        if let Some(Asked::Event(left)) = left {
            self.left.lock().unwrap_or_else(PoisonError::into_inner).push(left);
        }
    }
}

/// Replies to a reader with its bytes, all of which are downloaded.
fn give(reader: &WaitingReader<'_>, request: &ReadRequest) {
    let ReadRequest { connection, unique, complete } = request;
    let complete = complete.clone().map(DeviceBytes::Complete);
    let filling = || reader.fillers.first().cloned().map(DeviceBytes::Filling);
    let Some(source) = complete.or_else(filling) else {
        return connection.refuse(*unique, Errno::IO);
    };
    for _ in 0..READS {
        let whole = source.to_compare(&reader.range);
        match bytes(source.file(), &whole) {
            Ok(bytes) => match source.compared(&reader.range, &whole, &bytes) {
                Compared::Right(bytes) => return connection.give(*unique, bytes),
                Compared::Changed => {}
                Compared::Wrong => break,
            },
            Err(error) => {
                let unlogged = reader.fillers.first().map_or(Some(0), |it| it.may_log());
                if let Some(unlogged) = unlogged {
                    tracing::error!(%error, unlogged, "a reader gets an I/O error: cannot read the device's data");
                }
                break;
            }
        }
        // Blocks that were replaced no longer count as present, so their units are fetched.
        if let DeviceBytes::Filling(filler) = &source
            && filler.ensure(reader.range.clone(), |_| ()).is_err()
        {
            break;
        }
    }
    connection.refuse(*unique, Errno::IO);
}

/// Reads this range of a file completely, because a short reply would mean the end of the file.
fn bytes(file: &File, range: &Range<u64>) -> io::Result<Vec<u8>> {
    let length = usize::try_from(range.end.saturating_sub(range.start));
    let length = length.ok().filter(|it| *it <= READ_MAX + UNIT_BYTES * 2);
    let mut bytes = vec![0; length.ok_or(io::ErrorKind::InvalidInput)?];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes)
}
