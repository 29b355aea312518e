//! Files on FUSE that stand for devices: each read of them is a request.
//!
//! Each file is a separate, detached file system with a separate connection. Only the mount of an image keeps the
//! file open, so the kernel ends the connection when the image is unmounted, and this process needs no reference
//! count.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use image::digest::Digest;
use image::verity::DeviceId;
use kernel::fuse::{FuseConnection, FuseError, NodeAttributes, NodeNumber, Resent, Unique};
use kernel::mount::MountError;
use rustix::event::{Timespec, epoll};
use rustix::fs::Mode;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use store::OperationError;

use super::devices::InodePlace;
use crate::lazy::prefetch::start_recorder::StartRecording;

/// Timeout of a wait for requests: the longest time until a server notices its end.
pub(super) const LOOK: Duration = Duration::from_millis(200);
/// The files belong to the host's root, and only root has access.
pub(super) const ROOT: (u32, u32) = (0, 0);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseDeviceError {
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
    /// The server no longer serves requests.
    #[error("the FUSE server has stopped")]
    Ended,
}

fn wait_failed(error: Errno) -> OperationError {
    OperationError::of("wait", "for readers of files on FUSE")(error)
}

pub(super) fn open_failed(error: io::Error) -> OperationError {
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
    pub(super) device: DeviceId,
    /// Manifest of the image that the device was mounted for, if known.
    pub(super) manifest: Option<Digest>,
    /// Length of the device, in bytes.
    pub(super) bytes: u64,
    /// The connection of which the keeper has a duplicate.
    pub(super) shared: FuseConnection,
    /// A second descriptor of the connection, through which requests are taken if the kernel cannot resend requests.
    /// When this process exits and closes it, the kernel fails these requests.
    own: Option<FuseConnection>,
    /// Whether the keeper has a duplicate.
    pub(super) is_kept: AtomicBool,
    /// The recording of the reads at the start of the image. `None` if they are not recorded, for example because an
    /// earlier service has seen some of them.
    pub(super) start: Option<Arc<StartRecording>>,
}

impl Connection {
    pub(super) fn new(
        shared: FuseConnection,
        ((device, manifest), place, bytes): ((DeviceId, Option<Digest>), InodePlace, u64),
    ) -> Result<Self, FuseError> {
        let own = match shared.resend()? {
            Resent::Yes => None,
            Resent::Unsupported => Some(shared.sibling()?),
        };
        let is_kept = AtomicBool::new(false);
        Ok(Self { place, device, manifest, bytes, shared, own, is_kept, start: None })
    }

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
    /// Whether the server no longer takes requests.
    is_closed: bool,
}

impl Connections {
    /// Creates an empty table. `wake` also ends a wait for requests when it is readable.
    pub(super) fn new(wake: rustix::fd::BorrowedFd<'_>) -> Result<Self, FuseDeviceError> {
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

    pub(super) fn lookup(&self, id: ConnectionId) -> Option<Arc<Connection>> {
        self.lock().all.get(&id).cloned()
    }

    /// Adds a connection. A new one is an error after [`close`](Self::close), because its first open would wait for
    /// ever.
    pub(super) fn add(
        &self,
        id: Option<ConnectionId>,
        connection: Connection,
    ) -> Result<ConnectionId, FuseDeviceError> {
        let mut table = self.lock();
        if id.is_none() && table.is_closed {
            return Err(FuseDeviceError::Ended);
        }
        let id = id.unwrap_or(table.next);
        let data = epoll::EventData::new_u64(id.0);
        epoll::add(&self.epoll, connection.taking(), data, REQUESTS).map_err(wait_failed)?;
        table.next = table.next.max(ConnectionId(id.0 + 1));
        table.all.insert(id, Arc::new(connection));
        Ok(id)
    }

    /// Returns all connections.
    pub(super) fn all(&self) -> Vec<(ConnectionId, Arc<Connection>)> {
        self.lock().all.iter().map(|(id, it)| (*id, Arc::clone(it))).collect()
    }

    /// Returns the connections that the kernel has ended since the last call.
    pub(super) fn take_ended(&self) -> Vec<ConnectionId> {
        std::mem::take(&mut self.lock().ended)
    }

    /// Removes a connection from the table. Other processes may still have it open.
    pub(super) fn remove(&self, id: ConnectionId) {
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
    ) -> Result<(), FuseDeviceError> {
        let data = epoll::EventData::new_u64(id.0);
        match epoll::modify(&self.epoll, connection.taking(), data, REQUESTS) {
            // Another thread has noticed the end of the connection.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(wait_failed(error).into()),
        }
    }

    /// Waits for a connection that has requests or has ended, and returns `None` after a while. Each is returned to one
    /// thread, until further requests come.
    pub(super) fn ready(&self) -> Result<Option<(ConnectionId, Arc<Connection>)>, FuseDeviceError> {
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
