//! Locks on directories, and on files whose descriptors other programs may inherit.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FlockOperation, OFlags};
use rustix::io::Errno;

use super::{Change, Directory, DiskError, NEW, READ};

impl Directory {
    /// Locks the directory itself for as long as this descriptor or a duplicate of it is open. Returns `false` if
    /// another process holds the lock.
    pub(crate) fn try_lock(&self) -> Result<bool, DiskError> {
        match rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(errno) => Err(self.failed("lock", "", errno)),
        }
    }

    /// As [`try_lock`](Self::try_lock), but waits, for locks that are held only briefly.
    pub(crate) fn lock(&self) -> Result<(), DiskError> {
        wait(&self.fd, FlockOperation::LockExclusive)
            .map_err(|errno| self.failed("lock", "", errno))
    }

    /// As [`lock`](Self::lock), but several processes can hold the lock.
    pub(crate) fn lock_shared(&self) -> Result<(), DiskError> {
        wait(&self.fd, FlockOperation::LockShared).map_err(|errno| self.failed("lock", "", errno))
    }

    /// Whether a process holds the directory's lock exclusively. The probe takes a shared lock, so other probes do not
    /// notice it. However, [`try_lock`](Self::try_lock) of another descriptor fails until this descriptor is closed.
    pub(crate) fn is_locked(&self) -> Result<bool, DiskError> {
        match rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(Errno::WOULDBLOCK) => Ok(true),
            Err(errno) => Err(self.failed("lock", "", errno)),
        }
    }

    /// Creates an empty file that only this user can read, and locks it for as long as the descriptor or a duplicate
    /// of it is open. Unlike a directory's descriptor, it gives no access to other files.
    pub(crate) fn create_locked(&self, name: &str) -> Result<OwnedFd, DiskError> {
        let failed = |action| move |errno| self.failed(action, name, errno);
        self.trace.allow().map_err(failed("create"))?;
        let flags = NEW.difference(OFlags::WRONLY);
        let mode = rustix::fs::Mode::RUSR;
        let fd = rustix::fs::openat(&self.fd, name, flags, mode).map_err(failed("create"))?;
        self.trace.record(|| Change::Create(self.path_of(name)));
        let lock = FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(&fd, lock).map_err(failed("lock"))?;
        Ok(fd)
    }

    /// Whether a file is locked. Returns `false` if it does not exist.
    pub(crate) fn is_file_locked(&self, name: &str) -> Result<bool, DiskError> {
        let fd = match rustix::fs::openat(&self.fd, name, READ, rustix::fs::Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(false),
            Err(errno) => return Err(self.failed("open", name, errno)),
        };
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(false),
            Err(Errno::WOULDBLOCK) => Ok(true),
            Err(errno) => Err(self.failed("lock", name, errno)),
        }
    }
}

/// Takes a lock, and waits for processes that hold it.
pub(super) fn wait(file: &impl AsFd, how: FlockOperation) -> Result<(), Errno> {
    loop {
        match rustix::fs::flock(file, how) {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}
