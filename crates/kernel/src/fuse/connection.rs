//! A connection to the kernel: a descriptor of `/dev/fuse`.
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

/// `FUSE_DEV_IOC_CLONE`, which is said to write, and reads.
const CLONE: Opcode = opcode::read::<u32>(229, 0);
/// The number of `/dev/fuse`. Source: Linux `Documentation/admin-guide/devices.txt`.
const DEVICE: (u32, u32) = (10, 229);
/// The first version that has `FUSE_NOTIFY_RESEND`.
const RESENDS: KernelVersion = KernelVersion { major: 6, minor: 9 };
/// The kernel wants room for 8192 bytes, and for the largest write with its header.
const BUFFER: usize = 16 << 10;

/// An error of a connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuseError {
    /// The kernel has no FUSE, or this process may not use it.
    #[error("cannot open /dev/fuse")]
    Open(#[source] Errno),
    /// A system call failed.
    #[error("cannot {step} a FUSE connection")]
    Call {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        source: Errno,
    },
    /// The kernel sent what is no request.
    #[error(transparent)]
    Request(#[from] FuseRequestError),
}

/// One side of a connection; the kernel has the other one. When its last descriptor is closed, all that is asked fails, now
/// and later.
#[derive(Debug)]
pub struct FuseConnection(OwnedFd);

/// What came of an attempt to take a request.
#[derive(Debug)]
pub enum TakenRequest<'a> {
    /// A request.
    Request(FuseRequest<'a>),
    /// There is none for now.
    Nothing,
    /// The file system is gone, and nothing will be asked any more.
    Over,
}

/// What became of requests that another process had taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resent {
    /// They are asked again, of whoever takes requests now.
    Yes,
    /// The kernel cannot: before Linux 6.9.
    Unsupported,
}

impl AsFd for FuseConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl FuseConnection {
    /// A new one, for one file system: [`mount::fuse`](crate::mount::fuse). Nothing blocks on it.
    ///
    /// # Errors
    /// [`FuseError::Open`].
    pub fn open() -> Result<Self, FuseError> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = rustix::fs::open("/dev/fuse", flags, Mode::empty());
        let opened = opened.map_err(FuseError::Open)?;
        let found = rustix::fs::fstat(&opened).map_err(FuseError::Open)?;
        // Containers may have another device there, or a file.
        match found.st_rdev == rustix::fs::makedev(DEVICE.0, DEVICE.1) {
            true => Ok(Self(opened)),
            false => Err(FuseError::Open(Errno::NODEV)),
        }
    }

    /// A connection that another process made, by a descriptor of it.
    #[must_use]
    pub const fn adopt(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Another descriptor of the same connection, through which requests can be taken, too. Those that were taken through it
    /// fail when it is closed, and the connection goes on. It has to be mounted already.
    ///
    /// # Errors
    /// [`FuseError`].
    pub fn sibling(&self) -> Result<Self, FuseError> {
        let sibling = Self::open()?;
        // The number of a descriptor that is open as long as this is.
        let number = self.0.as_raw_fd().cast_unsigned();
        // SAFETY: the kernel's header says that this ioctl reads one number of 32 bits.
        let clone = unsafe { Setter::<CLONE, u32>::new(number) };
        // SAFETY: as above; the descriptor is one of `/dev/fuse`.
        let cloned = unsafe { rustix::ioctl::ioctl(&sibling.0, clone) };
        match cloned {
            Ok(()) => Ok(sibling),
            Err(source) => Err(FuseError::Call { step: "duplicate", source }),
        }
    }

    /// From now on [`take`](Self::take) never waits. That is so for all who have this descriptor; it is so from the beginning of
    /// those that are [opened](Self::open) here.
    ///
    /// # Errors
    /// [`FuseError::Call`].
    pub fn never_wait_in_take(&self) -> Result<(), FuseError> {
        let failed = |source| FuseError::Call { step: "set up", source };
        let flags = rustix::fs::fcntl_getfl(&self.0).map_err(failed)?;
        rustix::fs::fcntl_setfl(&self.0, flags | OFlags::NONBLOCK).map_err(failed)
    }

    /// Waits until there may be a request, or all is over; returns whether that is so. Without a time it waits as long as that
    /// takes.
    ///
    /// # Errors
    /// [`FuseError::Call`].
    pub fn has_request(&self, most: Option<Duration>) -> Result<bool, FuseError> {
        let mut connection = [PollFd::new(&self.0, PollFlags::IN)];
        let most = most.and_then(|it| Timespec::try_from(it).ok());
        match poll(&mut connection, most.as_ref()) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(source) => Err(FuseError::Call { step: "wait at", source }),
        }
    }

    /// Whether the file system is there still.
    ///
    /// # Errors
    /// [`FuseError::Call`].
    pub fn is_mounted(&self) -> Result<bool, FuseError> {
        let mut connection = [PollFd::new(&self.0, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut connection, Some(&now)) {
                Ok(_) => return Ok(!connection[0].revents().contains(PollFlags::ERR)),
                Err(Errno::INTR) => {}
                Err(source) => return Err(FuseError::Call { step: "look at", source }),
            }
        }
    }

    /// Takes one request.
    ///
    /// # Errors
    /// [`FuseError`]. A request that is none can be refused by its number.
    pub fn take<'b>(&self, buffer: &'b mut RequestBuffer) -> Result<TakenRequest<'b>, FuseError> {
        match rustix::io::read(&self.0, &mut buffer.0[..]) {
            Ok(length) => Ok(TakenRequest::Request(FuseRequest::decode(&buffer.0[..length])?)),
            // ENOENT: who asked has gone away in between.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOENT) => Ok(TakenRequest::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(TakenRequest::Over),
            Err(source) => Err(FuseError::Call { step: "read from", source }),
        }
    }

    /// Replies to a request with bytes of a file, or of something else that has no form of its own.
    ///
    /// # Errors
    /// [`FuseError::Call`]: `ENOENT` where nobody waits any more.
    pub fn reply_bytes(&self, request: Unique, bytes: &[u8]) -> Result<(), FuseError> {
        self.write(request, 0, bytes)
    }

    /// Replies to a request.
    ///
    /// # Errors
    /// As [`reply_bytes`](Self::reply_bytes).
    pub fn reply(&self, request: Unique, body: &ReplyBody) -> Result<(), FuseError> {
        self.write(request, 0, body.as_bytes())
    }

    /// Lets a request fail.
    ///
    /// # Errors
    /// As [`reply_bytes`](Self::reply_bytes).
    pub fn refuse(&self, request: Unique, errno: Errno) -> Result<(), FuseError> {
        self.write(request, -errno.raw_os_error(), &[])
    }

    /// Has the kernel ask again what somebody has taken and not replied to. The process that took it has to be gone.
    ///
    /// # Errors
    /// [`FuseError::Call`].
    pub fn resend(&self) -> Result<Resent, FuseError> {
        match self.write(Unique(0), NOTIFY_RESEND, &[]) {
            // The file system is gone, and so is all that was asked.
            Ok(()) | Err(FuseError::Call { source: Errno::NODEV, .. }) => Ok(Resent::Yes),
            // Linux 7.2 says so, too, of a file system that is not asked for anything yet, or is gone.
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

/// A buffer for a request.
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
