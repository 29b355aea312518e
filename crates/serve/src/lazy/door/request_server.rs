//! The thread that takes requests of files on FUSE, and replies to those whose bytes are in memory.

use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

use kernel::fuse::{
    Caching, FileHandle, FuseError, FuseOperation, FuseRequest, READ_MAX, ReplyBody, RequestBuffer,
    Served, TakenRequest, Unique,
};
use rustix::io::{Errno, ReadWriteFlags};

use super::fetch_pool::FetchPool;
use super::fuse::{Connection, said};
use super::waiting::{Asked, ReadRequest, WaitingReader};
use super::{
    Compared, ConnectionId, DeviceBytes, Door, DoorError, FuseDoorError, LOOK, UNIT_BYTES,
};

/// Largest number of ready connections in one `epoll_wait`.
const READY: usize = 64;

impl<'a> Door<'a> {
    /// Takes requests until `is_over` returns true, and queues readers that must wait. Returns those that still wait.
    pub(super) fn take_requests(
        &self,
        pool: &FetchPool<'a>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Weak<WaitingReader<'a>>>, DoorError> {
        let mut waiting = Vec::new();
        let mut server = Server {
            door: self,
            pool,
            buffer: RequestBuffer::default(),
            // A read is extended to whole units at both ends.
            bytes: vec![0; READ_MAX + UNIT_BYTES * 2].into_boxed_slice(),
        };
        let served = server.serve(&mut waiting, is_over);
        self.connections.close();
        served.map(|()| waiting)
    }
}

/// The state of the thread that takes requests.
struct Server<'d, 'a> {
    door: &'d Door<'a>,
    pool: &'d FetchPool<'a>,
    buffer: RequestBuffer,
    /// Buffer for reads that are answered immediately.
    bytes: Box<[u8]>,
}

/// The result of taking a request.
enum Greeted<'a> {
    Done,
    Waits(Arc<WaitingReader<'a>>),
    /// The file system was unmounted.
    Over,
}

impl<'a> Server<'_, 'a> {
    fn serve(
        &mut self,
        waiting: &mut Vec<Weak<WaitingReader<'a>>>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<(), DoorError> {
        let mut events = Vec::with_capacity(READY);
        let mut looked = Instant::now();
        while !is_over() {
            if looked.elapsed() > LOOK {
                self.door.see_to(waiting);
                looked = Instant::now();
            }
            self.door.connections.ready(&mut events)?;
            for event in &events {
                let id = ConnectionId(event.data.u64());
                let Some(connection) = self.door.connections.lookup(id) else { continue };
                match self.one(&connection)? {
                    Greeted::Done => {}
                    Greeted::Over => self.door.connections.ended(id),
                    Greeted::Waits(reader) => self.door.admit(reader, self.pool, waiting),
                }
            }
        }
        Ok(())
    }

    /// Takes a request, and replies to it unless it has to wait.
    fn one(&mut self, connection: &Arc<Connection>) -> Result<Greeted<'a>, FuseDoorError> {
        let request = match connection.taking().take(&mut self.buffer) {
            Ok(TakenRequest::Request(request)) => request,
            Ok(TakenRequest::Nothing) => return Ok(Greeted::Done),
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
            return Ok(self.read(connection, unique, offset, size));
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
        let Some(source) = self.door.bytes_of_device(connection.place, manifest) else {
            return refused();
        };
        // The device's length is unknown, and an empty reply would read as the end of the file.
        if connection.bytes == 0 {
            return refused();
        }
        source.asked();
        let is_there = source.has(&range);
        if !is_there && !self.door.is_cancelled() && source.denies(&range) {
            return refused();
        }
        if is_there {
            source.touch(&range);
            let whole = source.to_compare(&range);
            match at_once(source.file(), &whole, &mut self.bytes) {
                Some(bytes) => {
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
                // Reading would block on the disk, so another thread does it.
                None if range.end - range.start > READ_MAX as u64 => return refused(),
                None => {}
            }
        }
        let (fillers, complete) = match source {
            DeviceBytes::Filling(filler) => (vec![filler], None),
            DeviceBytes::Complete(file) => (Vec::new(), Some(file)),
        };
        let request = ReadRequest { connection: Arc::clone(connection), unique, complete };
        let asked = Asked::Read(request);
        let waits = if is_there { WaitingReader::of_disk } else { WaitingReader::new };
        Greeted::Waits(Arc::new(waits(asked, range, fillers)))
    }
}

/// Reads a range of a file if all of it is in the page cache.
fn at_once<'b>(file: &File, range: &Range<u64>, bytes: &'b mut [u8]) -> Option<&'b [u8]> {
    let bytes = bytes.get_mut(..usize::try_from(range.end - range.start).ok()?)?;
    if bytes.is_empty() {
        return Some(bytes);
    }
    let now = ReadWriteFlags::NOWAIT;
    match rustix::io::preadv2(file, &mut [IoSliceMut::new(bytes)], range.start, now) {
        Ok(length) if length == bytes.len() => Some(bytes),
        // Part of the range is not cached, or the file system does not support `RWF_NOWAIT`.
        Ok(_) | Err(_) => None,
    }
}
