//! Files on FUSE, each of which stands for a device: reads of them are requests.
//!
//! Each file is a file system of its own, which is attached nowhere, and has a connection of its own. Who mounts an image has
//! the file, and nothing else has. So the kernel ends the connection when the mount is gone, and no count has to be kept.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use image::digest::Digest;
use image::verity::DeviceId;
use kernel::fuse::{
    Caching, FileHandle, FuseConnection, FuseError, FuseOperation, FuseRequest, NodeAttributes,
    NodeNumber, READ_MAX, ReplyBody, RequestBuffer, Resent, Served, TakenRequest, Unique,
};
use kernel::mount::{FuseAccess, FuseOptions, MountError};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use serde::{Deserialize, Serialize};

use super::fetchers::Fetchers;
use super::waiting::{Asked, ReadRequest, WaitingReader};
use super::{DeviceBytes, Door, DoorError, InodePlace, LOOK, PATIENCE, UNIT_BYTES};

/// What lists of mounts show.
const NAME: &str = "quire";
/// Files belong to the host's root, which alone gets in.
const ROOT: (u32, u32) = (0, 0);
/// Connections with requests that are looked at in one go.
const READY: usize = 64;

/// An error of files on FUSE.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseDoorError {
    /// The connection.
    #[error(transparent)]
    Connection(#[from] FuseError),
    /// The mount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The file, whose server is this process.
    #[error("cannot open the file on FUSE that stands for a device")]
    Open(#[source] io::Error),
    /// The file is not as long as the device.
    #[error("the file on FUSE that stands for a device has {actual} bytes, not {expected}")]
    Length {
        /// The device's length in bytes.
        expected: u64,
        /// The file's.
        actual: u64,
    },
    /// Connections cannot be waited for.
    #[error("cannot wait for readers of files on FUSE")]
    Wait(#[source] Errno),
    /// Requests are not taken.
    #[error("files on FUSE are served no longer")]
    Ended,
}

/// By which this process and its keeper know a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct ConnectionId(u64);

/// A file that stands for a device.
#[derive(Debug)]
pub(super) struct Connection {
    /// Of the device.
    place: InodePlace,
    device: DeviceId,
    /// Of the image that it was lent for, if that is known.
    manifest: Option<Digest>,
    /// The device's length.
    bytes: u64,
    /// The one that the keeper has, too.
    shared: FuseConnection,
    /// Where requests are taken if the kernel would not ask again what was taken: they fail with this process.
    own: Option<FuseConnection>,
    /// Whether the keeper has it.
    is_kept: AtomicBool,
}

impl Connection {
    fn taking(&self) -> &FuseConnection {
        self.own.as_ref().unwrap_or(&self.shared)
    }

    fn attributes(&self) -> NodeAttributes {
        NodeAttributes::file(NodeNumber::ROOT.0, self.bytes, Mode::RUSR, ROOT)
    }

    pub(super) fn give(&self, request: Unique, bytes: &[u8]) {
        said(self.taking().reply_bytes(request, bytes));
    }

    pub(super) fn refuse(&self, request: Unique, errno: Errno) {
        said(self.taking().refuse(request, errno));
    }
}

fn said(replied: Result<(), FuseError>) {
    if let Err(error) = replied {
        tracing::debug!(%error, "its reader is gone");
    }
}

/// No connection has this number: they are counted from 0.
const WAKE: ConnectionId = ConnectionId(u64::MAX);

/// All files that stand for devices.
#[derive(Debug)]
pub(super) struct Connections {
    epoll: rustix::fd::OwnedFd,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    all: BTreeMap<ConnectionId, Arc<Connection>>,
    /// Those that the kernel has ended, until the keeper is told.
    ended: Vec<ConnectionId>,
    next: ConnectionId,
    /// Whether requests are taken no longer.
    is_closed: bool,
}

impl Connections {
    /// What waits for requests is woken when `wake` is readable, too.
    pub(super) fn new(wake: rustix::fd::BorrowedFd<'_>) -> Result<Self, FuseDoorError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(FuseDoorError::Wait)?;
        epoll::add(&epoll, wake, epoll::EventData::new_u64(WAKE.0), epoll::EventFlags::IN)
            .map_err(FuseDoorError::Wait)?;
        Ok(Self { epoll, table: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a file that stands for this device is mounted or open.
    pub(super) fn has(&self, place: InodePlace) -> bool {
        let of_it = |it: &&Arc<Connection>| it.place == place;
        self.lock().all.values().filter(of_it).any(|it| it.shared.is_mounted().unwrap_or(true))
    }

    fn find(&self, id: ConnectionId) -> Option<Arc<Connection>> {
        self.lock().all.get(&id).cloned()
    }

    /// A new one is refused when requests are taken no longer: its maker would wait for ever.
    fn add(
        &self,
        id: Option<ConnectionId>,
        connection: Connection,
    ) -> Result<ConnectionId, FuseDoorError> {
        let mut table = self.lock();
        if id.is_none() && table.is_closed {
            return Err(FuseDoorError::Ended);
        }
        let id = id.unwrap_or(table.next);
        let data = epoll::EventData::new_u64(id.0);
        epoll::add(&self.epoll, connection.taking(), data, epoll::EventFlags::IN)
            .map_err(FuseDoorError::Wait)?;
        table.next = table.next.max(ConnectionId(id.0 + 1));
        table.all.insert(id, Arc::new(connection));
        Ok(id)
    }

    /// Lets a connection go. Others may have it open still.
    fn remove(&self, id: ConnectionId) {
        let removed = self.lock().all.remove(&id);
        if let Some(it) = removed
            && let Err(error) = epoll::delete(&self.epoll, it.taking())
        {
            tracing::debug!(%error, "a connection was not waited for");
        }
    }

    fn ended(&self, id: ConnectionId) {
        self.remove(id);
        self.lock().ended.push(id);
    }

    /// From now on nothing is taken. What only this process has is closed, so that nobody waits for it.
    fn close(&self) {
        let mut unkept = Vec::new();
        let mut table = self.lock();
        table.is_closed = true;
        table.all.retain(|_, it| {
            let is_kept = it.is_kept.load(Ordering::Relaxed);
            if !is_kept {
                unkept.push(Arc::clone(it));
            }
            is_kept
        });
    }

    fn ready(&self, events: &mut Vec<epoll::Event>) -> Result<(), FuseDoorError> {
        events.clear();
        let patience = Timespec { tv_sec: 0, tv_nsec: PATIENCE * 1_000_000 };
        match epoll::wait(&self.epoll, spare_capacity(events), Some(&patience)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(FuseDoorError::Wait(error)),
        }
    }
}

impl<'a> Door<'a> {
    /// A new file that stands for a device, while this is served. As long as it is open or mounted, the device is in use.
    /// A keeper has to get the connection before the file is given to anybody who may outlive this.
    ///
    /// # Errors
    /// [`DoorError`].
    pub fn connect(&self, device: &DeviceId) -> Result<(ConnectionId, File), DoorError> {
        self.connect_for(device, None)
    }

    /// The same, for readers of the image of a manifest.
    pub(in crate::lazy) fn connect_for(
        &self,
        device: &DeviceId,
        manifest: Option<Digest>,
    ) -> Result<(ConnectionId, File), DoorError> {
        let found = self.devices().iter().find(|it| it.1.device == *device).map(|it| *it.0);
        let place = found.ok_or(DoorError::Unknown(*device))?;
        let (id, file) = self.connection((*device, manifest), place)?;
        match self.check(&file, place) {
            Ok(()) => Ok((id, file)),
            Err(error) => {
                self.connections.remove(id);
                Err(error)
            }
        }
    }

    fn connection(
        &self,
        device: (DeviceId, Option<Digest>),
        place: InodePlace,
    ) -> Result<(ConnectionId, File), FuseDoorError> {
        let shared = FuseConnection::open()?;
        let options = FuseOptions {
            root: FileType::RegularFile,
            owner: ROOT,
            access: FuseAccess::Owner,
            name: NAME,
        };
        let mount = kernel::mount::fuse(shared.as_fd(), &options)?;
        let bytes = self.length(place);
        let connection = Connection::new(shared, (device, place, bytes))?;
        let id = self.connections.add(None, connection)?;
        // The thread that takes requests opens it.
        let path = format!("/proc/self/fd/{}", mount.as_fd().as_raw_fd());
        let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        match opened {
            Ok(file) => Ok((id, file.into())),
            Err(errno) => {
                self.connections.remove(id);
                Err(FuseDoorError::Open(errno.into()))
            }
        }
    }

    fn length(&self, place: InodePlace) -> u64 {
        let devices = self.devices();
        let file = devices.get(&place).map(|it| it.state.file().metadata());
        file.and_then(Result::ok).map_or(0, |it| it.len())
    }

    /// From here on the kernel knows how long it is. A file without a length would read as nothing, without an error.
    fn check(&self, file: &File, place: InodePlace) -> Result<(), DoorError> {
        let actual = file.metadata().map_err(FuseDoorError::Open)?.len();
        let expected = self.length(place);
        if actual == expected {
            return Ok(());
        }
        Err(FuseDoorError::Length { expected, actual }.into())
    }

    /// Says that the keeper has a connection.
    pub(in crate::lazy) fn is_kept(&self, id: ConnectionId) {
        if let Some(it) = self.connections.find(id) {
            it.is_kept.store(true, Ordering::Relaxed);
        }
    }

    /// All connections, for the keeper.
    pub(in crate::lazy) fn connections<E>(
        &self,
        mut give: impl FnMut(
            ConnectionId,
            (&DeviceId, Option<Digest>),
            rustix::fd::BorrowedFd<'_>,
        ) -> Result<(), E>,
    ) -> Result<(), E> {
        let all: Vec<_> =
            self.connections.lock().all.iter().map(|(id, it)| (*id, Arc::clone(it))).collect();
        let mut give = |id, it: &Connection| give(id, (&it.device, it.manifest), it.shared.as_fd());
        all.iter().try_for_each(|(id, it)| give(*id, it))
    }

    /// Those that have ended since the last call.
    pub(in crate::lazy) fn ended_connections(&self) -> Vec<ConnectionId> {
        std::mem::take(&mut self.connections.lock().ended)
    }

    /// Whether a file that stands for a device is mounted or open.
    pub(in crate::lazy) fn is_connected(&self, device: &DeviceId) -> bool {
        let devices = self.devices();
        let found = devices.iter().find(|it| it.1.device == *device);
        found.is_some_and(|it| self.connections.has(*it.0))
    }

    /// Goes on with a connection of an earlier service, which is gone. What that had taken is asked again, or fails. Its device
    /// is there already; otherwise its readers get I/O errors.
    ///
    /// # Errors
    /// [`FuseDoorError`].
    pub(in crate::lazy) fn adopt_connection(
        &self,
        id: ConnectionId,
        device: (DeviceId, Option<Digest>),
        shared: FuseConnection,
    ) -> Result<(), FuseDoorError> {
        let found = self.devices().iter().find(|it| it.1.device == device.0).map(|it| *it.0);
        let place = found.unwrap_or_default();
        let connection = Connection::new(shared, (device, place, self.length(place)))?;
        connection.is_kept.store(true, Ordering::Relaxed);
        self.connections.add(Some(id), connection)?;
        Ok(())
    }

    /// Takes requests until all is over, and gives readers that have to wait to `fetchers`. Returns those that wait still.
    pub(super) fn take_requests(
        &self,
        fetchers: &Fetchers<'a>,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Weak<WaitingReader<'a>>>, DoorError> {
        let mut waiting = Vec::new();
        let mut server = Server {
            door: self,
            fetchers,
            buffer: RequestBuffer::default(),
            // And the rest of the first unit and the last one.
            bytes: vec![0; READ_MAX + UNIT_BYTES * 2].into_boxed_slice(),
        };
        let served = server.serve(&mut waiting, is_over);
        self.connections.close();
        served.map(|()| waiting)
    }
}

impl Connection {
    fn new(
        shared: FuseConnection,
        ((device, manifest), place, bytes): ((DeviceId, Option<Digest>), InodePlace, u64),
    ) -> Result<Self, FuseError> {
        let own = match shared.resend()? {
            Resent::Yes => None,
            Resent::Unsupported => Some(shared.sibling()?),
        };
        let is_kept = AtomicBool::new(false);
        Ok(Self { place, device, manifest, bytes, shared, own, is_kept })
    }
}

/// Takes requests.
struct Server<'d, 'a> {
    door: &'d Door<'a>,
    fetchers: &'d Fetchers<'a>,
    buffer: RequestBuffer,
    /// For those that are answered at once.
    bytes: Box<[u8]>,
}

/// A request that has no reply yet.
enum Greeted<'a> {
    Done,
    Waits(Arc<WaitingReader<'a>>),
    /// The file is gone.
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
                let Some(connection) = self.door.connections.find(id) else { continue };
                match self.one(&connection)? {
                    Greeted::Done => {}
                    Greeted::Over => self.door.connections.ended(id),
                    Greeted::Waits(reader) => self.door.admit(reader, self.fetchers, waiting),
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
                tracing::error!(%error, "the kernel asked what is unknown");
                error.unique().inspect(|it| connection.refuse(*it, Errno::IO));
                return Ok(Greeted::Done);
            }
            Err(error) => return Err(error.into()),
        };
        if let FuseOperation::Read { offset, size, .. } = request.operation {
            let unique = request.unique;
            return Ok(self.read(connection, unique, (offset, size)));
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
        (offset, size): (u64, u32),
    ) -> Greeted<'a> {
        let end = offset.saturating_add(u64::from(size)).min(connection.bytes);
        let range = offset.min(end)..end;
        let refused = || {
            connection.refuse(unique, Errno::IO);
            Greeted::Done
        };
        let manifest = connection.manifest.as_ref();
        let Some(source) = self.door.find(connection.place, manifest) else { return refused() };
        // Whose length could not be found out: a reply without bytes would read as zeros.
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
            match at_once(source.file(), &source.to_compare(&range), &mut self.bytes) {
                Some(bytes) => {
                    let Some(bytes) = source.compared(&range, bytes) else { return refused() };
                    connection.give(unique, bytes);
                    return Greeted::Done;
                }
                // The disk has to be waited for, which others do.
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

/// Bytes of a file, if all of them are in memory.
fn at_once<'b>(file: &File, range: &Range<u64>, bytes: &'b mut [u8]) -> Option<&'b [u8]> {
    let bytes = bytes.get_mut(..usize::try_from(range.end - range.start).ok()?)?;
    if bytes.is_empty() {
        return Some(bytes);
    }
    let now = ReadWriteFlags::NOWAIT;
    match rustix::io::preadv2(file, &mut [IoSliceMut::new(bytes)], range.start, now) {
        Ok(length) if length == bytes.len() => Some(bytes),
        // Not in memory, or not all of it, or its file system cannot tell.
        Ok(_) | Err(_) => None,
    }
}
