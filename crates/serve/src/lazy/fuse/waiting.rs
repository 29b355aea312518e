//! Blocked readers, and how each gets its reply.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use kernel::fuse::{READ_MAX, Unique};
use rustix::io::Errno;

use super::connections::Connection;
use super::devices::{Compared, DeviceBytes, UNIT_BYTES};
use super::server::DeviceServer;
use crate::any_error::text;
use crate::lazy::fill::{FillError, LayerFiller, SourceKey};
use crate::lazy::metrics::FailureCause;

/// How often a reader's bytes are read if they are replaced during each read.
const READS: usize = 4;
/// Largest number of sources whose last success is remembered.
const SOURCES_MAX: usize = 1024;

/// A waiting reader. It gets one reply, when its bytes were fetched or its timeout is over, or it is left to the next
/// server.
pub(super) struct WaitingReader<'a> {
    /// `None` after the reply.
    request: Mutex<Option<ReadRequest>>,
    range: Range<u64>,
    bytes: DeviceBytes<'a>,
    since: Instant,
    /// When a thread began to fetch the reader's bytes. Before that, no source was asked for them.
    begun: OnceLock<Instant>,
    /// Whether its bytes are downloaded and must only be read from the disk.
    waits_for_disk: bool,
}

/// A read of a file on FUSE. The reply contains the bytes.
pub(super) struct ReadRequest {
    pub(super) connection: Arc<Connection>,
    pub(super) unique: Unique,
}

impl<'a> WaitingReader<'a> {
    /// Creates a reader that waits for missing bytes from now on.
    pub(super) fn new(request: ReadRequest, range: Range<u64>, bytes: DeviceBytes<'a>) -> Self {
        bytes.filler().inspect(|it| it.counts().waits());
        Self { waits_for_disk: false, ..Self::of_disk(request, range, bytes) }
    }

    /// Creates a reader whose bytes are downloaded and must only be read from the disk.
    pub(super) fn of_disk(request: ReadRequest, range: Range<u64>, bytes: DeviceBytes<'a>) -> Self {
        let (request, since) = (Mutex::new(Some(request)), Instant::now());
        Self { request, range, bytes, since, begun: OnceLock::new(), waits_for_disk: true }
    }

    /// Returns the request, or `None` if it has its reply.
    fn request(&self) -> MutexGuard<'_, Option<ReadRequest>> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the source that must be asked, or `None` if the bytes are downloaded.
    pub(super) fn source(&self) -> Option<SourceKey> {
        let filler = self.bytes.filler().filter(|_| !self.waits_for_disk)?;
        Some(filler.key().clone())
    }

    /// Whether a thread is sending the reply, which may wait for the disk.
    fn is_being_answered(&self) -> bool {
        matches!(self.request.try_lock(), Err(TryLockError::WouldBlock))
    }

    pub(super) fn is_answered(&self) -> bool {
        self.request().is_none()
    }

    /// Returns how long no source has sent bytes for the reader, if the reader's timeout is over. A reader for which
    /// no thread has begun to fetch does not time out as long as other readers of the same source get bytes, because
    /// its turn will come. `gave` is the last time when one of those readers got bytes.
    fn overdue(&self, gave: Option<Instant>) -> Option<Duration> {
        let since = match self.begun.get() {
            Some(begun) => *begun,
            None => gave.map_or(self.since, |it| it.max(self.since)),
        };
        self.bytes.filler()?.overdue(since)
    }

    /// Sends the reply, unless the reader has one.
    fn answer(&self, reply: impl FnOnce(&ReadRequest)) {
        // The lock is held until the reply is sent, so that a caller of `is_answered` can rely on it.
        let mut waiting = self.request();
        let Some(request) = waiting.take() else { return };
        if let Some(filler) = self.bytes.filler().filter(|_| !self.waits_for_disk) {
            filler.counts().waited(self.since.elapsed());
        }
        reply(&request);
    }

    /// Replies with the bytes, all of which are downloaded.
    fn give(&self) {
        self.answer(|request| give(self, request));
    }

    /// Replies with an I/O error.
    fn refuse(&self) {
        self.answer(|ReadRequest { connection, unique }| connection.refuse(*unique, Errno::IO));
    }

    /// Leaves the reader to the next server, which gets its request again. Before Linux 6.9, the read fails when this
    /// process exits.
    fn leave(&self) {
        let left = self.request().take();
        if left.is_some() && !self.waits_for_disk {
            self.bytes.filler().inspect(|it| it.counts().left());
        }
    }
}

impl<'a> DeviceServer<'a> {
    /// Fails readers whose timeout is over, even if a fetch still runs. Returns whether no reader waits any more.
    pub(super) fn see_to(&self, waiting: &mut Vec<Weak<WaitingReader<'a>>>) -> bool {
        waiting.retain(|reader| {
            let Some(reader) = reader.upgrade() else { return false };
            // Other readers must not wait for the reply to this one.
            if reader.is_being_answered() {
                return true;
            }
            if reader.is_answered() {
                return false;
            }
            if self.is_cancelled() {
                reader.leave();
                return false;
            }
            let source = reader.source();
            let gave = source.as_ref().and_then(|it| self.gave().get(it).copied());
            let Some(silence) = reader.overdue(gave) else { return true };
            let silence = silence.as_secs();
            if let Some(filler) = reader.bytes.filler() {
                if let Some(unlogged) = filler.may_log() {
                    tracing::error!(
                        device = %filler.device().id(),
                        seconds = silence,
                        unlogged,
                        "a reader gets an I/O error: no source sends data"
                    );
                }
                filler.counts().failed(FailureCause::Silent);
                filler.record_failure(format!("no source has sent data for {silence} seconds"));
                // The kernel splits the read and sends further requests for its parts. If the fetch has not begun, no
                // source was asked for the units, so they have not failed.
                if reader.begun.get().is_some() {
                    filler.deny(&reader.range);
                }
            }
            reader.refuse();
            false
        });
        waiting.is_empty()
    }

    /// Returns whether sources fail because this server ends and another one follows.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|it| it.load(Ordering::Relaxed))
    }

    /// Fetches a reader's bytes. A panic fails only this reader.
    pub(super) fn bring_or_deny(&self, reader: &WaitingReader<'a>) {
        let brought = catch_unwind(AssertUnwindSafe(|| self.bring(reader)));
        if brought.is_err() {
            tracing::error!("a reader gets an I/O error: the service panicked");
            reader.refuse();
        }
    }

    fn gave(&self) -> MutexGuard<'_, HashMap<SourceKey, Instant>> {
        self.gave.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fetches a reader's bytes and sends the reply.
    fn bring(&self, reader: &WaitingReader<'a>) {
        reader.begun.get_or_init(Instant::now);
        if reader.is_answered() {
            return;
        }
        match reader.bytes.filler() {
            Some(filler) if !self.has_brought(reader, filler) => match self.is_cancelled() {
                true => reader.leave(),
                false => reader.refuse(),
            },
            _ => reader.give(),
        }
    }

    /// Fetches a reader's bytes. Returns whether that succeeded.
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
}

/// Replies to a reader with its bytes, all of which are downloaded.
fn give(reader: &WaitingReader<'_>, request: &ReadRequest) {
    let ReadRequest { connection, unique } = request;
    let source = &reader.bytes;
    for _ in 0..READS {
        let whole = source.to_compare(&reader.range);
        match bytes(source.file(), &whole) {
            Ok(bytes) => match source.compared(&reader.range, &whole, &bytes) {
                Compared::Right(bytes) => return connection.give(*unique, bytes),
                Compared::Changed => {}
                Compared::Wrong => break,
            },
            Err(error) => {
                let unlogged = source.filler().map_or(Some(0), |it| it.may_log());
                if let Some(unlogged) = unlogged {
                    tracing::error!(%error, unlogged, "a reader gets an I/O error: cannot read the device's data");
                }
                break;
            }
        }
        // Blocks that were replaced no longer count as present, so their units are fetched.
        if let Some(filler) = source.filler()
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
