//! A connection to the kernel through a descriptor of `/dev/fuse`.
#![expect(unsafe_code, reason = "rustix has no ioctl of FUSE")]

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, opcode};
use zerocopy::IntoBytes as _;

use super::layout::{NOTIFY_RESEND, OutHeader};
use super::reply::ReplyBody;
use super::request::{FuseRequest, FuseRequestError, Unique};
use crate::version::KernelVersion;

/// `FUSE_DEV_IOC_CLONE`. The kernel defines it as a read (`_IOR`) although it takes its argument from the caller.
const CLONE: Opcode = opcode::read::<u32>(229, 0);
/// Major and minor number of `/dev/fuse`. Source: Linux `Documentation/admin-guide/devices.txt`.
const DEVICE: (u32, u32) = (10, 229);
/// The first version with `FUSE_NOTIFY_RESEND`.
const RESENDS: KernelVersion = KernelVersion { major: 6, minor: 9 };
/// Size of the buffer in bytes. The kernel requires 8192 bytes, and room for the largest write with its header.
const BUFFER: usize = 16 << 10;

/// An error of a FUSE connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseError {
    /// `/dev/fuse` is missing, or this process may not open it.
    #[error("cannot open /dev/fuse")]
    Open(#[source] Errno),
    /// A system call failed.
    #[error("cannot {step} a FUSE connection")]
    Call { step: &'static str, source: Errno },
    /// The kernel sent an invalid request.
    #[error(transparent)]
    Request(#[from] FuseRequestError),
}

/// The server's side of a FUSE connection. When its last descriptor is closed, all pending and later requests fail.
#[derive(Debug)]
pub struct FuseConnection(OwnedFd);

/// Outcome of [`FuseConnection::take`].
#[derive(Debug)]
pub enum TakenRequest<'a> {
    Request(FuseRequest<'a>),
    /// The queue has no request.
    Nothing,
    /// The file system is unmounted, and no more requests will come.
    Over,
}

/// Outcome of [`FuseConnection::resend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resent {
    /// The kernel sends the requests again, to the process that now takes requests.
    Yes,
    /// The kernel is older than Linux 6.9 and cannot.
    Unsupported,
}

impl AsFd for FuseConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl FuseConnection {
    /// Opens a nonblocking connection, for one file system: [`mount::fuse`](crate::mount::fuse).
    pub fn open() -> Result<Self, FuseError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::open("/dev/fuse", flags, Mode::empty());
        let opened = opened.map_err(FuseError::Open)?;
        let found = rustix::fs::fstat(&opened).map_err(FuseError::Open)?;
        // A container may have another device or a regular file at this path.
        match found.st_rdev == rustix::fs::makedev(DEVICE.0, DEVICE.1) {
            true => Ok(Self(opened)),
            false => Err(FuseError::Open(Errno::NODEV)),
        }
    }

    /// Takes a descriptor of a connection that another process made.
    #[must_use]
    pub const fn adopt(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Opens another descriptor of the same connection, through which requests can also be taken. Requests that were
    /// taken from it fail when it is closed; the connection continues. The connection must be mounted already.
    pub fn sibling(&self) -> Result<Self, FuseError> {
        let sibling = Self::open()?;
        // The number of a descriptor that is open as long as `self` exists.
        let number = self.0.as_raw_fd().cast_unsigned();
        // SAFETY: according to the kernel's header, this ioctl reads one 32-bit number.
        let clone = unsafe { Setter::<CLONE, u32>::new(number) };
        // SAFETY: as above; the descriptor belongs to `/dev/fuse`.
        let cloned = unsafe { rustix::ioctl::ioctl(&sibling.0, clone) };
        match cloned {
            Ok(()) => Ok(sibling),
            Err(source) => Err(FuseError::Call { step: "duplicate", source }),
        }
    }

    /// Makes the descriptor nonblocking, so that [`take`](Self::take) never waits. Affects all processes with this
    /// open file. Connections from [`open`](Self::open) are nonblocking from the start.
    pub fn never_wait_in_take(&self) -> Result<(), FuseError> {
        let failed = |source| FuseError::Call { step: "set up", source };
        let flags = rustix::fs::fcntl_getfl(&self.0).map_err(failed)?;
        rustix::fs::fcntl_setfl(&self.0, flags | OFlags::NONBLOCK).map_err(failed)
    }

    /// Waits until a request may be queued or the file system is unmounted, and returns `false` after the timeout.
    /// Without a timeout, waits as long as necessary.
    pub fn has_request(&self, most: Option<Duration>) -> Result<bool, FuseError> {
        let mut connection = [PollFd::new(&self.0, PollFlags::IN)];
        let most = most.and_then(|it| Timespec::try_from(it).ok());
        match poll(&mut connection, most.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(source) => Err(FuseError::Call { step: "wait for", source }),
        }
    }

    /// Whether the file system is still mounted.
    pub fn is_mounted(&self) -> Result<bool, FuseError> {
        let mut connection = [PollFd::new(&self.0, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut connection, Some(&now)) {
                Ok(_) => return Ok(!connection[0].revents().contains(PollFlags::ERR)),
                Err(Errno::INTR) => {}
                Err(source) => return Err(FuseError::Call { step: "examine", source }),
            }
        }
    }

    /// Takes one request.
    ///
    /// # Errors
    /// [`FuseError`]. An invalid request can be refused by its [`Unique`] number.
    pub fn take<'b>(&self, buffer: &'b mut RequestBuffer) -> Result<TakenRequest<'b>, FuseError> {
        loop {
            let length = match rustix::io::read(&self.0, &mut buffer.0[..]) {
                Ok(length) => length,
                // ENOENT: the request was cancelled in the meantime. There may be others.
                Err(Errno::INTR | Errno::NOENT) => continue,
                Err(Errno::AGAIN) => return Ok(TakenRequest::Nothing),
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(TakenRequest::Over),
                Err(source) => return Err(FuseError::Call { step: "read from", source }),
            };
            return Ok(TakenRequest::Request(FuseRequest::decode(&buffer.0[..length])?));
        }
    }

    /// Replies to a request with raw bytes, such as those of a file.
    ///
    /// # Errors
    /// [`FuseError::Call`] with `ENOENT` if the request was cancelled.
    pub fn reply_bytes(&self, request: Unique, bytes: &[u8]) -> Result<(), FuseError> {
        self.write(request, 0, bytes)
    }

    /// Replies to a request.
    ///
    /// # Errors
    /// Those of [`reply_bytes`](Self::reply_bytes).
    pub fn reply(&self, request: Unique, body: &ReplyBody) -> Result<(), FuseError> {
        self.write(request, 0, body.as_bytes())
    }

    /// Fails a request with an error.
    ///
    /// # Errors
    /// Those of [`reply_bytes`](Self::reply_bytes).
    pub fn refuse(&self, request: Unique, errno: Errno) -> Result<(), FuseError> {
        self.write(request, -errno.raw_os_error(), &[])
    }

    /// Makes the kernel resend requests that another process took without replying. That process must have exited.
    pub fn resend(&self) -> Result<Resent, FuseError> {
        match self.write(Unique(0), NOTIFY_RESEND, &[]) {
            // ENODEV: the file system is unmounted, and its requests are gone.
            Ok(()) | Err(FuseError::Call { source: Errno::NODEV, .. }) => Ok(Resent::Yes),
            // Linux 7.2 also returns EINVAL if the file system has had no request yet or is unmounted.
            Err(FuseError::Call { source: Errno::INVAL, .. }) => match KernelVersion::running() {
                Some(running) if running >= RESENDS => Ok(Resent::Yes),
                _ => Ok(Resent::Unsupported),
            },
            Err(error) => Err(error),
        }
    }

    fn write(&self, request: Unique, error: i32, body: &[u8]) -> Result<(), FuseError> {
        let step = "reply on";
        let length = u32::try_from(size_of::<OutHeader>() + body.len());
        let len = length.or(Err(FuseError::Call { step, source: Errno::INVAL }))?;
        let header = OutHeader { len, error, unique: request.0 };
        loop {
            let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(body)];
            match rustix::io::writev(&self.0, &parts) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(source) => return Err(FuseError::Call { step, source }),
            }
        }
    }
}

/// A buffer for [`FuseConnection::take`].
pub struct RequestBuffer(Box<[u8]>);

impl std::fmt::Debug for RequestBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RequestBuffer")
    }
}

impl Default for RequestBuffer {
    fn default() -> Self {
        Self(vec![0; BUFFER].into_boxed_slice())
    }
}
