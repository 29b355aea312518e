//! Watchers: processes that hold the group besides the service and its keeper, such as a container's monitor.
//!
//! If service and keeper die at the same moment, the group would be closed, and readers would see zeros. A watcher
//! prevents this by holding the group. While service or keeper lives, it answers no event. After that, it gives I/O
//! errors to all readers.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use container::life::monitor::Watch;
use kernel::fanotify::{EventBuffer, Group, PrecontentError};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use super::journal::NUMBERS;

/// Name of the file with the instance of a keeper, which keeps it locked while it lives.
pub(super) const LIFE: &str = "life";
/// How often a watcher checks whether service or keeper lives.
const LOOK: Duration = Duration::from_secs(1);
/// Interval at which the watcher gives I/O errors to readers after that.
const DENY: Duration = Duration::from_millis(100);
/// Longest time for which a watcher holds one of the locks of a service or a keeper.
const MOMENT: Duration = Duration::from_millis(100);
/// Largest length of an instance, in bytes.
const INSTANCE_MAX: u64 = 256;

/// Locks the file of a keeper with this instance. The lock is held as long as the result is open.
pub(super) fn live(folder: &Path, instance: &str) -> io::Result<File> {
    let mut options = File::options();
    let mut life = options.write(true).create(true).truncate(false).open(folder.join(LIFE))?;
    lock(&life, &|| false)?;
    life.set_len(0)?;
    life.write_all(instance.as_bytes())?;
    Ok(life)
}

/// The group of a service, held for the readers of one mount.
#[derive(Debug)]
pub struct LazyWatch {
    group: Group,
    instance: String,
    folder: PathBuf,
    is_over: Cell<bool>,
}

impl LazyWatch {
    pub(super) const fn new(group: Group, instance: String, folder: PathBuf) -> Self {
        Self { group, instance, folder, is_over: Cell::new(false) }
    }

    /// Returns whether the service or its keeper is running. Returns `false` after an orderly exit.
    fn is_served(&self) -> io::Result<bool> {
        let mut life = match File::open(self.folder.join(LIFE)) {
            Ok(life) => life,
            // The service removes this file when all devices are unused or complete, and then the group has no marks.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let mut instance = String::new();
        Read::by_ref(&mut life).take(INSTANCE_MAX).read_to_string(&mut instance)?;
        if instance != self.instance && !instance.is_empty() {
            // The file is of another service with another group.
            return Ok(false);
        }
        Ok(is_locked(&life)? || super::runtime_dir::is_held(&self.folder)?)
    }

    /// Returns whether the watch is of another instance.
    pub(super) fn is_of_another(&self, instance: &str) -> bool {
        self.instance != instance
    }

    /// Returns whether two watches hold the same group.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        self.instance == other.instance && self.folder == other.folder
    }

    /// Returns whether the watch is no longer needed: service and keeper have exited, and no device has a mark.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.is_served(), Ok(false)) && matches!(self.group.has_marks(), Ok(false))
    }

    /// Unmarks a device that is not open, if service and keeper have exited. If the mark stayed, another service that
    /// fills the device would wait for this group.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn let_go(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        if self.is_served()? || kernel::lease::in_use(file).map_err(io::Error::other)? {
            return Ok(());
        }
        self.release(file).map_err(io::Error::other)
    }

    /// Unmarks a file that is not open.
    pub(super) fn release(&self, file: BorrowedFd<'_>) -> Result<(), PrecontentError> {
        match self.group.unmark(file) {
            Ok(()) | Err(PrecontentError::Call { source: Errno::NOENT, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Gives an I/O error to all readers of a group whose events are still in the kernel's queue.
pub(super) fn deny_all(group: &Group) -> Result<(), PrecontentError> {
    let mut buffer = EventBuffer::default();
    loop {
        let events = match group.read(&mut buffer) {
            // The kernel has denied the event whose file it could not open.
            Err(PrecontentError::Call { source, .. })
                if !matches!(source, Errno::BADF | Errno::FAULT | Errno::INVAL) =>
            {
                continue;
            }
            events => events?,
        };
        if events.is_empty() {
            return Ok(());
        }
        for event in events {
            if let Err(error) = group.deny(event) {
                tracing::debug!(%error, "the reader has exited");
            }
        }
    }
}

/// Gives I/O errors to readers when service and keeper are gone.
impl Watch for LazyWatch {
    fn look(&self) -> Duration {
        if !self.is_over.get() {
            match self.is_served() {
                Ok(true) => return LOOK,
                // If the group has no marks, it has no readers, because all of its devices are complete.
                Ok(false) if matches!(self.group.has_marks(), Ok(false)) => return LOOK,
                Ok(false) => {}
                Err(error) => {
                    tracing::debug!(%error, "cannot determine whether the service for lazy devices is running");
                    return LOOK;
                }
            }
            self.is_over.set(true);
            tracing::error!(
                "the service for lazy devices and its keeper died: reads of missing data get I/O \
                errors; restart the container, or mount the image again"
            );
            let numbers = RawFd::try_from(NUMBERS).unwrap_or(RawFd::MAX);
            if let Err(error) = self.group.deny_taken(0..numbers) {
                tracing::error!(%error, "readers of a lazy device may wait forever");
            }
        }
        if let Err(error) = deny_all(&self.group) {
            tracing::error!(%error, "readers of a lazy device may wait forever");
        }
        DENY
    }
}

/// Locks a file. A watcher may hold the lock for a moment, so a failure is retried for [`MOMENT`], unless `is_over`
/// returns true.
pub(super) fn lock(file: &File, is_over: &dyn Fn() -> bool) -> Result<(), Errno> {
    let begun = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < MOMENT && !is_over() => {
                thread::sleep(MOMENT / 20);
            }
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

/// Returns whether another process has locked a file.
pub(super) fn is_locked(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}
