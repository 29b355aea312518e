//! Files on FUSE that stand for devices: each read of them is a request.
//!
//! Each file is a separate, detached file system with a separate connection. Only the mount of an image keeps the
//! file open, so the kernel ends the connection when the image is unmounted, and this process needs no reference
//! count.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use image::digest::Digest;
use image::verity::DeviceId;
use kernel::fuse::{FuseConnection, FuseError, NodeAttributes, NodeNumber, Resent, Unique};
use kernel::mount::{FuseAccess, FuseOptions, MountError};
use rustix::event::{Timespec, epoll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use store::OperationError;

use super::{ArmedState, Door, DoorError, InodePlace, LOOK};

/// Source of the mount in lists of mounts.
const NAME: &str = "quire";
/// The files belong to the host's root, and only root has access.
const ROOT: (u32, u32) = (0, 0);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseDoorError {
    /// The FUSE connection failed.
    #[error(transparent)]
    Connection(#[from] FuseError),
    /// The file system cannot be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The file's length differs from the device's.
    #[error("the device's file on FUSE has {actual} bytes, not {expected}")]
    Length {
        /// Length of the device, in bytes.
        expected: u64,
        /// Length of the file, in bytes.
        actual: u64,
    },
    /// The door no longer serves requests.
    #[error("the FUSE server has stopped")]
    Ended,
}

fn wait_failed(error: Errno) -> OperationError {
    OperationError::of("wait", "for readers of files on FUSE")(error)
}

fn open_failed(error: io::Error) -> OperationError {
    OperationError::of("open", "the device's file on FUSE")(error)
}

/// A number for a connection, which this process and its keeper share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct ConnectionId(u64);

/// The connection of a file that stands for a device.
#[derive(Debug)]
pub(super) struct Connection {
    /// Inode of the device.
    pub(super) place: InodePlace,
    device: DeviceId,
    /// Manifest of the image that the device was mounted for, if known.
    pub(super) manifest: Option<Digest>,
    /// Length of the device, in bytes.
    pub(super) bytes: u64,
    /// The connection of which the keeper has a duplicate.
    shared: FuseConnection,
    /// A second descriptor of the connection, through which requests are taken if the kernel cannot resend requests.
    /// When this process exits and closes it, the kernel fails these requests.
    own: Option<FuseConnection>,
    /// Whether the keeper has a duplicate.
    is_kept: AtomicBool,
}

impl Connection {
    pub(super) fn taking(&self) -> &FuseConnection {
        self.own.as_ref().unwrap_or(&self.shared)
    }

    pub(super) fn attributes(&self) -> NodeAttributes {
        NodeAttributes::file(NodeNumber::ROOT.0, self.bytes, Mode::RUSR, ROOT)
    }

    pub(super) fn give(&self, request: Unique, bytes: &[u8]) {
        said(self.taking().reply_bytes(request, bytes));
    }

    pub(super) fn refuse(&self, request: Unique, errno: Errno) {
        said(self.taking().refuse(request, errno));
    }
}

pub(super) fn said(replied: Result<(), FuseError>) {
    if let Err(error) = replied {
        tracing::debug!(%error, "the reader has exited");
    }
}

/// Number of the wake-up descriptor. Connections are counted from 0, so none has it.
const WAKE: ConnectionId = ConnectionId(u64::MAX);

/// Edge-triggered, so that the kernel wakes one thread for a request.
const REQUESTS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// The connections of all files that stand for devices.
#[derive(Debug)]
pub(super) struct Connections {
    epoll: rustix::fd::OwnedFd,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    all: BTreeMap<ConnectionId, Arc<Connection>>,
    /// Connections that the kernel has ended and that the keeper does not know about yet.
    ended: Vec<ConnectionId>,
    next: ConnectionId,
    /// Whether the door no longer takes requests.
    is_closed: bool,
}

impl Connections {
    /// Creates an empty table. `wake` also ends a wait for requests when it is readable.
    pub(super) fn new(wake: rustix::fd::BorrowedFd<'_>) -> Result<Self, FuseDoorError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(wait_failed)?;
        epoll::add(&epoll, wake, epoll::EventData::new_u64(WAKE.0), epoll::EventFlags::IN)
            .map_err(wait_failed)?;
        Ok(Self { epoll, table: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a file that stands for this device is mounted or open.
    pub(super) fn has(&self, place: InodePlace) -> bool {
        let of_it = |it: &&Arc<Connection>| it.place == place;
        self.lock().all.values().filter(of_it).any(|it| it.shared.is_mounted().unwrap_or(true))
    }

    fn lookup(&self, id: ConnectionId) -> Option<Arc<Connection>> {
        self.lock().all.get(&id).cloned()
    }

    /// Adds a connection. A new one is an error after [`close`](Self::close), because its first open would wait for
    /// ever.
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
        epoll::add(&self.epoll, connection.taking(), data, REQUESTS).map_err(wait_failed)?;
        table.next = table.next.max(ConnectionId(id.0 + 1));
        table.all.insert(id, Arc::new(connection));
        Ok(id)
    }

    /// Removes a connection from the table. Other processes may still have it open.
    fn remove(&self, id: ConnectionId) {
        let removed = self.lock().all.remove(&id);
        removed.inspect(|it| self.unwatch(it));
    }

    fn unwatch(&self, connection: &Connection) {
        if let Err(error) = epoll::delete(&self.epoll, connection.taking()) {
            tracing::debug!(%error, "cannot stop watching a connection");
        }
    }

    /// Removes a connection that the kernel has ended. Several threads may notice the end.
    pub(super) fn ended(&self, id: ConnectionId) {
        let mut table = self.lock();
        let removed = table.all.remove(&id);
        table.ended.extend(removed.as_ref().map(|_| id));
        drop(table);
        removed.inspect(|it| self.unwatch(it));
    }

    /// Stops taking requests. Connections that the keeper does not have are closed, so that their readers get errors.
    pub(super) fn close(&self) {
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

    /// Makes [`ready`](Self::ready) return a connection again if it has requests, after the other ones.
    pub(super) fn report_again(
        &self,
        id: ConnectionId,
        connection: &Connection,
    ) -> Result<(), FuseDoorError> {
        let data = epoll::EventData::new_u64(id.0);
        match epoll::modify(&self.epoll, connection.taking(), data, REQUESTS) {
            // Another thread has noticed the end of the connection.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(wait_failed(error).into()),
        }
    }

    /// Waits for a connection that has requests or has ended, and returns `None` after a while. Each is returned to one
    /// thread, until further requests come.
    pub(super) fn ready(&self) -> Result<Option<(ConnectionId, Arc<Connection>)>, FuseDoorError> {
        let patience = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        let mut event = [MaybeUninit::uninit()];
        let id = match epoll::wait(&self.epoll, &mut event, Some(&patience)) {
            Ok((events, _)) => events.first().map(|it| ConnectionId(it.data.u64())),
            Err(Errno::INTR) => None,
            Err(error) => return Err(wait_failed(error).into()),
        };
        Ok(id.and_then(|id| Some((id, self.lookup(id)?))))
    }
}

impl<'a> Door<'a> {
    /// Creates a file that stands for a device, while the door is served. The device is in use as long as the file is
    /// open or mounted. The keeper must have the connection before the file is passed to a process that may outlive
    /// this process.
    pub fn connect(&self, device: &DeviceId) -> Result<(ConnectionId, File), DoorError> {
        self.connect_for(device, None)
    }

    /// Like [`connect`](Self::connect), for readers of an image.
    pub(in crate::lazy) fn connect_for(
        &self,
        device: &DeviceId,
        manifest: Option<Digest>,
    ) -> Result<(ConnectionId, File), DoorError> {
        let found = self.devices().iter().find(|it| it.1.device == *device).map(|it| *it.0);
        let place = found.ok_or(DoorError::Unknown(*device))?;
        self.connects(place, manifest.as_ref());
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
        // This open blocks until the thread that takes requests has replied.
        let path = format!("/proc/self/fd/{}", mount.as_fd().as_raw_fd());
        let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        match opened {
            Ok(file) => Ok((id, file.into())),
            Err(errno) => {
                self.connections.remove(id);
                Err(open_failed(errno.into()).into())
            }
        }
    }

    /// Records that readers of an image come.
    fn connects(&self, place: InodePlace, manifest: Option<&Digest>) {
        if let Some(ArmedState::Filling(ways)) = self.devices().get(&place).map(|it| &it.state) {
            ways.connects(manifest);
        }
    }

    fn length(&self, place: InodePlace) -> u64 {
        let devices = self.devices();
        let file = devices.get(&place).map(|it| it.state.file().metadata());
        file.and_then(Result::ok).map_or(0, |it| it.len())
    }

    /// Checks the file's length, so that the kernel requests and caches the length. A file of length 0 would read as
    /// empty without an error.
    fn check(&self, file: &File, place: InodePlace) -> Result<(), DoorError> {
        let metadata = file.metadata().map_err(open_failed).map_err(FuseDoorError::from)?;
        let actual = metadata.len();
        let expected = self.length(place);
        if actual == expected {
            return Ok(());
        }
        Err(FuseDoorError::Length { expected, actual }.into())
    }

    /// Records that the keeper has a connection.
    pub(in crate::lazy) fn is_kept(&self, id: ConnectionId) {
        if let Some(it) = self.connections.lookup(id) {
            it.is_kept.store(true, Ordering::Relaxed);
        }
    }

    /// Calls `give` with each connection that the keeper must hold.
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

    /// Returns the connections that have ended since the last call.
    pub(in crate::lazy) fn ended_connections(&self) -> Vec<ConnectionId> {
        std::mem::take(&mut self.connections.lock().ended)
    }

    /// Returns whether a file that stands for a device is mounted or open.
    pub(in crate::lazy) fn is_connected(&self, device: &DeviceId) -> bool {
        let devices = self.devices();
        let found = devices.iter().find(|it| it.1.device == *device);
        found.is_some_and(|it| self.connections.has(*it.0))
    }

    /// Takes over a connection from a service that has died. The kernel resends or fails the requests that the dead
    /// service had taken. Add the device before this call; otherwise its readers get I/O errors.
    pub(in crate::lazy) fn adopt_connection(
        &self,
        id: ConnectionId,
        device: (DeviceId, Option<Digest>),
        shared: FuseConnection,
    ) -> Result<(), FuseDoorError> {
        let found = self.devices().iter().find(|it| it.1.device == device.0).map(|it| *it.0);
        let place = found.unwrap_or_default();
        self.connects(place, device.1.as_ref());
        let connection = Connection::new(shared, (device, place, self.length(place)))?;
        connection.is_kept.store(true, Ordering::Relaxed);
        self.connections.add(Some(id), connection)?;
        Ok(())
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
