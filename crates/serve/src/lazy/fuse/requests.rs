//! The threads that take requests of files on FUSE, and reply to those whose bytes are present.
//!
//! All threads wait for all connections. The kernel wakes one of them for a request, and that one takes the requests of
//! the connection until none is left. A thread that replies may read the disk as long as another one is free.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use kernel::fuse::{
    Caching, FileHandle, FuseError, FuseOperation, FuseRequest, READ_MAX, ReplyBody, RequestBuffer,
    Served, TakenRequest, Unique,
};
use rustix::io::{Errno, ReadWriteFlags};

use super::connections::{Connection, ConnectionId, FuseDeviceError, LOOK, said};
use super::devices::{Compared, UNIT_BYTES};
use super::fetch_pool::FetchPool;
use super::server::{DeviceServer, DeviceServerError};
use super::waiting::{ReadRequest, WaitingReader};
use crate::lazy::prefetch::{Ahead, COMPLETERS, WORKERS};
use crate::unpoisoned::lock;

/// How long a server that ends waits for running fetches. The next server handles the remaining readers.
const LAST: Duration = Duration::from_secs(1);
/// Number of threads that take requests.
const THREADS: usize = 4;
/// Number of requests of a connection that a thread takes before it gives way to other connections.
const TURN: usize = 64;

impl<'a> DeviceServer<'a> {
    /// Serves readers until `stop` is set. Then it takes no more requests, so further requests wait for the next process
    /// that serves the connections. Requests that were already taken get replies, or, if another server follows, the
    /// kernel sends them again.
    ///
    /// # Errors
    /// On an error, readers keep waiting until the connections are served again or closed.
    pub fn serve(&self, stop: &AtomicBool) -> Result<(), DeviceServerError> {
        let pool = FetchPool::default();
        thread::scope(|scope| {
            pool.start(scope, |reader| self.bring_or_deny(reader));
            for _ in 0..WORKERS {
                scope.spawn(|| self.ahead.work());
            }
            for _ in 0..COMPLETERS {
                scope.spawn(|| self.ahead.complete_devices());
            }
            let end = End { ahead: &self.ahead, pool: &pool };
            let mut waiting = self.take_requests(&pool, &|| stop.load(Ordering::Relaxed))?;
            // Dropping `end` makes the threads exit after their current work.
            drop(end);
            let ending = Instant::now();
            while !self.see_to(&mut waiting) {
                if let Some(cancel) = self.cancel
                    && ending.elapsed() > LAST
                {
                    cancel.store(true, Ordering::Relaxed);
                }
                thread::sleep(LOOK / 100);
            }
            Ok(())
        })
    }

    /// Takes requests until `is_over` returns true, and queues readers that must wait. Returns those that still wait.
    fn take_requests(
        &self,
        pool: &FetchPool<'a>,
        is_over: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Weak<WaitingReader<'a>>>, DeviceServerError> {
        let server = RequestServer {
            devices: self,
            pool,
            waiting: Mutex::default(),
            looked: Mutex::new(Instant::now()),
            reading: AtomicUsize::new(0),
        };
        let failed = AtomicBool::new(false);
        let is_over = || is_over() || failed.load(Ordering::Relaxed);
        let ended: Vec<_> = thread::scope(|scope| {
            let threads = [(); THREADS].map(|()| {
                scope.spawn(|| {
                    let serve = || RequestThread::new(&server).serve(&is_over);
                    let served = catch_unwind(AssertUnwindSafe(serve));
                    // After a panic the service ends, and its successor gets the requests that have no reply.
                    failed.fetch_or(!matches!(served, Ok(Ok(()))), Ordering::Relaxed);
                    served.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            });
            threads.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        self.connections.close();
        if let Some(cancel) = self.cancel.filter(|_| failed.load(Ordering::Relaxed)) {
            // Otherwise the successor would wait until the sources of running fetches respond.
            cancel.store(true, Ordering::Relaxed);
        }
        for it in ended {
            it.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(std::mem::take(&mut *lock(&server.waiting)))
    }
}

/// Ends the fetching threads when it is dropped.
struct End<'q, 'a> {
    ahead: &'q Ahead<'a>,
    pool: &'q FetchPool<'a>,
}

impl Drop for End<'_, '_> {
    fn drop(&mut self) {
        self.ahead.end();
        self.pool.end();
    }
}

/// The state that the threads share.
struct RequestServer<'d, 'a> {
    devices: &'d DeviceServer<'a>,
    pool: &'d FetchPool<'a>,
    waiting: Mutex<Vec<Weak<WaitingReader<'a>>>>,
    /// When the waiting readers were last checked.
    looked: Mutex<Instant>,
    /// Number of threads that read the disk.
    reading: AtomicUsize,
}

impl RequestServer<'_, '_> {
    /// Checks the waiting readers, if another thread has not done so.
    fn look(&self) {
        let mut looked = match self.looked.try_lock() {
            Ok(looked) => looked,
            Err(TryLockError::Poisoned(looked)) => looked.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if looked.elapsed() < LOOK {
            return;
        }
        *looked = Instant::now();
        // New readers do not wait for the lock.
        let mut waiting = std::mem::take(&mut *lock(&self.waiting));
        self.devices.see_to(&mut waiting);
        lock(&self.waiting).append(&mut waiting);
    }

    /// Calls `read`, which may wait for the disk, unless no other thread would be free.
    fn unless_last(&self, read: impl FnOnce() -> bool) -> bool {
        let others = self.reading.fetch_add(1, Ordering::Relaxed);
        let is_read = others + 1 < THREADS && read();
        self.reading.fetch_sub(1, Ordering::Relaxed);
        is_read
    }
}

/// A thread that takes requests.
struct RequestThread<'s, 'd, 'a> {
    server: &'s RequestServer<'d, 'a>,
    buffer: RequestBuffer,
    /// Buffer for reads that are answered immediately.
    bytes: Box<[u8]>,
}

/// The result of taking a request.
enum Greeted<'a> {
    Done,
    Waits(Arc<WaitingReader<'a>>),
    /// There is no request.
    Nothing,
    /// The file system was unmounted.
    Over,
}

impl<'s, 'd, 'a> RequestThread<'s, 'd, 'a> {
    fn new(server: &'s RequestServer<'d, 'a>) -> Self {
        // A read is extended to whole units at both ends.
        let bytes = vec![0; READ_MAX + UNIT_BYTES * 2].into_boxed_slice();
        Self { server, buffer: RequestBuffer::default(), bytes }
    }

    fn serve(&mut self, is_over: &dyn Fn() -> bool) -> Result<(), DeviceServerError> {
        let server = self.server;
        while !is_over() {
            server.look();
            let Some((id, connection)) = server.devices.connections.ready()? else { continue };
            // The kernel reports a connection once, so all of its requests are taken.
            for taken in 0.. {
                if is_over() {
                    break;
                }
                if taken == TURN {
                    server.devices.connections.report_again(id, &connection)?;
                    break;
                }
                match self.one(id, &connection)? {
                    Greeted::Done => {}
                    Greeted::Nothing => break,
                    Greeted::Over => {
                        server.devices.connections.ended(id);
                        break;
                    }
                    Greeted::Waits(reader) => {
                        lock(&server.waiting).push(Arc::downgrade(&reader));
                        server.pool.push(reader);
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes a request, and replies to it unless it has to wait.
    fn one(
        &mut self,
        id: ConnectionId,
        connection: &Arc<Connection>,
    ) -> Result<Greeted<'a>, FuseDeviceError> {
        let request = match connection.taking().take(&mut self.buffer) {
            Ok(TakenRequest::Request(request)) => request,
            Ok(TakenRequest::Nothing) => return Ok(Greeted::Nothing),
            Ok(TakenRequest::Over) => return Ok(Greeted::Over),
            Err(FuseError::Request(error)) => {
                tracing::error!(%error, "the kernel sent an unknown request");
                error.unique().inspect(|it| connection.refuse(*it, Errno::IO));
                return Ok(Greeted::Done);
            }
            Err(error) => return Err(error.into()),
        };
        if let FuseOperation::Read { offset, size, .. } = request.operation {
            let unique = request.unique;
            let read = || self.read(id, connection, unique, offset, size);
            // A panic fails only this reader.
            return Ok(catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
                tracing::error!("a reader gets an I/O error: the service panicked");
                connection.refuse(unique, Errno::IO);
                Greeted::Done
            }));
        }
        let FuseRequest { unique, operation, .. } = request;
        let body = match &operation {
            FuseOperation::Init(offer) => ReplyBody::init(offer, Served::File),
            FuseOperation::GetAttributes(_) => ReplyBody::attributes(&connection.attributes()),
            FuseOperation::Open(_) => ReplyBody::opened(FileHandle(0), Caching::None),
            FuseOperation::Statistics => ReplyBody::statistics(connection.bytes, 1),
            FuseOperation::Flush(_)
            | FuseOperation::Release(_)
            | FuseOperation::Access(_)
            | FuseOperation::Destroy => ReplyBody::done(),
            it if !it.has_reply() => return Ok(Greeted::Done),
            _ => {
                connection.refuse(unique, Errno::NOSYS);
                return Ok(Greeted::Done);
            }
        };
        said(connection.taking().reply(unique, &body));
        Ok(Greeted::Done)
    }

    fn read(
        &mut self,
        id: ConnectionId,
        connection: &Arc<Connection>,
        unique: Unique,
        offset: u64,
        size: u32,
    ) -> Greeted<'a> {
        let end = offset.saturating_add(u64::from(size)).min(connection.bytes);
        let range = offset.min(end)..end;
        let refused = || {
            connection.refuse(unique, Errno::IO);
            Greeted::Done
        };
        let manifest = connection.manifest.as_ref();
        let server = self.server;
        let devices = server.devices;
        let Some(source) = devices.bytes_of_device(connection.place, manifest) else {
            return refused();
        };
        // The device's length is unknown, and an empty reply would read as the end of the file.
        if connection.bytes == 0 {
            return refused();
        }
        source.asked();
        if let Some(start) = &connection.start {
            start.note(connection.device, &range);
        }
        let is_there = source.has(&range);
        if !is_there && !devices.is_cancelled() && source.denies(&range) {
            return refused();
        }
        if is_there {
            source.touch(&range);
            let whole = source.to_compare(&range);
            let length = usize::try_from(whole.end.saturating_sub(whole.start));
            let Some(bytes) = length.ok().and_then(|it| self.bytes.get_mut(..it)) else {
                return refused();
            };
            let here = read_at_once(source.file(), bytes, whole.start);
            let rest = bytes.get_mut(here..).unwrap_or_default();
            let place = whole.start + here as u64;
            let is_whole = rest.is_empty();
            let read_disk = || {
                // Another thread takes the other requests of this connection while the disk is read.
                let is_shared = devices.connections.report_again(id, connection).is_ok();
                is_shared && source.file().read_exact_at(rest, place).is_ok()
            };
            let is_read = is_whole || server.unless_last(read_disk);
            if is_read {
                match source.compared(&range, &whole, bytes) {
                    Compared::Right(bytes) => {
                        connection.give(unique, bytes);
                        return Greeted::Done;
                    }
                    // Another thread reads the bytes again.
                    Compared::Changed => {}
                    Compared::Wrong => return refused(),
                }
            }
        }
        let request = ReadRequest { connection: Arc::clone(connection), unique };
        let waits = if is_there { WaitingReader::of_disk } else { WaitingReader::new };
        Greeted::Waits(Arc::new(waits(request, range, source)))
    }
}

/// Fills `bytes` from a file as far as they are in the page cache, and returns their number.
fn read_at_once(file: &File, bytes: &mut [u8], start: u64) -> usize {
    let now = ReadWriteFlags::NOWAIT;
    // An error may mean that the file system does not support `RWF_NOWAIT`.
    rustix::io::preadv2(file, &mut [IoSliceMut::new(bytes)], start, now).unwrap_or(0)
}
