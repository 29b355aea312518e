//! Files that are changed in place after they were published.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use rustix::fs::{FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::lock::wait;
use super::{Change, Directory, DiskError, READ, Trace};

/// An open file that has its final name.
#[derive(Debug)]
pub(crate) struct PlacedFile {
    file: File,
    path: PathBuf,
    trace: Trace,
}

impl Directory {
    /// Opens a regular file to read, lock and change its mode. Returns `None` if it does not exist.
    pub(crate) fn placed(&self, name: &str) -> Result<Option<PlacedFile>, DiskError> {
        self.placed_with(name, READ)
    }

    /// As [`placed`](Self::placed), but also for writing.
    pub(crate) fn placed_to_write(&self, name: &str) -> Result<Option<PlacedFile>, DiskError> {
        self.placed_with(name, READ.union(OFlags::RDWR))
    }

    fn placed_with(&self, name: &str, flags: OFlags) -> Result<Option<PlacedFile>, DiskError> {
        let found = self.open_regular(name.as_bytes(), flags)?;
        let (path, trace) = (self.path_of(name), self.trace.clone());
        Ok(found.map(|(file, _)| PlacedFile { file, path, trace }))
    }

    /// Wraps a file that the caller opened under this name.
    pub(crate) fn adopted(&self, name: &str, file: File) -> PlacedFile {
        PlacedFile { file, path: self.path_of(name), trace: self.trace.clone() }
    }

    /// Whether `name` refers to `file`.
    pub(crate) fn is_placed(&self, name: &str, file: &PlacedFile) -> Result<bool, DiskError> {
        let own = file.stat()?;
        Ok(self.stat(name)?.is_some_and(|it| is_same(&it, &own)))
    }
}

impl PlacedFile {
    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    /// Whether both are the same file on disk.
    pub(crate) fn is(&self, other: &Self) -> Result<bool, DiskError> {
        Ok(is_same(&self.stat()?, &other.stat()?))
    }

    pub(crate) fn stat(&self) -> Result<Stat, DiskError> {
        rustix::fs::fstat(&self.file).map_err(|errno| self.failed("stat", errno))
    }

    /// Locks the file for as long as it is open. Returns `false` if another process holds the lock.
    pub(crate) fn try_lock(&self) -> Result<bool, DiskError> {
        loop {
            match rustix::fs::flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(true),
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("lock", errno)),
            }
        }
    }

    /// Locks the file for as long as it is open, and waits for processes that hold the lock.
    pub(crate) fn lock(&self) -> Result<(), DiskError> {
        wait(&self.file, FlockOperation::LockExclusive).map_err(|errno| self.failed("lock", errno))
    }

    /// As [`lock`](Self::lock), but several processes can hold the lock.
    pub(crate) fn lock_shared(&self) -> Result<(), DiskError> {
        wait(&self.file, FlockOperation::LockShared).map_err(|errno| self.failed("lock", errno))
    }

    pub(crate) fn write_at(&self, bytes: &[u8], offset: u64) -> Result<(), DiskError> {
        self.trace.allow().map_err(|errno| self.failed("write", errno))?;
        let written = self.file.write_all_at(bytes, offset);
        written.map_err(|error| self.failed("write", error))?;
        self.trace.record(|| Change::WriteAt(self.path.clone(), offset, bytes.to_vec()));
        Ok(())
    }

    pub(crate) fn set_mode(&self, mode: Mode) -> Result<(), DiskError> {
        let failed = |errno| self.failed("change the mode of", errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::fchmod(self.file.as_fd(), mode).map_err(failed)
    }

    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        self.trace.allow().map_err(|errno| self.failed("sync", errno))?;
        self.file.sync_all().map_err(|error| self.failed("sync", error))?;
        self.trace.record(|| Change::SyncFile(self.path.clone()));
        Ok(())
    }

    pub(crate) fn failed(&self, action: &'static str, source: impl Into<io::Error>) -> DiskError {
        DiskError { action, path: self.path.clone(), source: source.into() }
    }
}

const fn is_same(one: &Stat, other: &Stat) -> bool {
    one.st_dev == other.st_dev && one.st_ino == other.st_ino
}
