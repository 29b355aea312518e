//! Records changes to the disk in order, for tests. Other builds record nothing.

use std::path::PathBuf;

use rustix::io::Errno;

/// One change to the disk, with its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    MakeDirectory(PathBuf),
    RemoveDirectory(PathBuf),
    Create(PathBuf),
    /// Creates a file with the mark of files that are not synced.
    CreateUnsynced(PathBuf),
    /// Removes that mark.
    RemoveMark(PathBuf),
    /// Appends.
    Write(PathBuf, Vec<u8>),
    /// Overwrites bytes at an offset.
    WriteAt(PathBuf, u64, Vec<u8>),
    /// Appends a hole, up to this length in bytes.
    Lengthen(PathBuf, u64),
    /// Punches a hole from one offset up to another.
    Punch(PathBuf, u64, u64),
    Rename(PathBuf, PathBuf),
    /// Gives each of two entries the name of the other.
    Exchange(PathBuf, PathBuf),
    Unlink(PathBuf),
    SyncFile(PathBuf),
    SyncDirectory(PathBuf),
    SyncEverything,
}

/// Records changes in tests, and can make them fail.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trace {
    #[cfg(test)]
    recorder: Option<std::sync::Arc<Recorder>>,
}

#[cfg(not(test))]
impl Trace {
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "same signature as in tests")]
    #[inline(always)]
    pub(crate) const fn allow(&self) -> Result<(), Errno> {
        Ok(())
    }

    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "same signature as in tests")]
    #[inline(always)]
    pub(crate) const fn allow_hole(&self, _is_try: bool) -> Result<(), Errno> {
        Ok(())
    }

    #[expect(clippy::unused_self, reason = "same signature as in tests")]
    #[inline(always)]
    pub(crate) const fn is_on(&self) -> bool {
        false
    }

    #[expect(clippy::unused_self, reason = "same signature as in tests")]
    #[inline(always)]
    pub(crate) fn record(&self, _change: impl FnOnce() -> Change) {}
}

/// The recorded changes, and the attempt that fails.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(crate) changes: std::sync::Mutex<Vec<Change>>,
    pub(crate) asked: std::sync::atomic::AtomicUsize,
    /// Number of the attempt that fails with `ENOSPC`, counted from 0. With `for_good`, later attempts fail as well.
    pub(crate) fail_at: Option<usize>,
    pub(crate) for_good: bool,
    pub(crate) holes: Holes,
    /// A lock, and the possibly slow changes that were made while it was held exclusively.
    pub(crate) lock: Option<PathBuf>,
    pub(crate) locked: std::sync::Mutex<Vec<Change>>,
}

/// Whether the file system supports holes.
#[cfg(test)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Holes {
    /// The result is what the file system reports.
    #[default]
    Asked,
    /// The file system cannot punch holes.
    None,
    /// Punching a hole fails, although the check before reported that it works.
    NoneAtLast,
}

#[cfg(test)]
impl Recorder {
    pub(crate) fn attempts(&self) -> usize {
        self.asked.load(std::sync::atomic::Ordering::SeqCst)
    }

    fn is_locked(&self) -> bool {
        let shared = rustix::fs::FlockOperation::NonBlockingLockShared;
        let lock = self.lock.as_ref().map(|it| std::fs::File::open(it).unwrap());
        lock.is_some_and(|it| rustix::fs::flock(it, shared).is_err())
    }
}

#[cfg(test)]
impl Trace {
    pub(crate) fn to(recorder: &std::sync::Arc<Recorder>) -> Self {
        Self { recorder: Some(std::sync::Arc::clone(recorder)) }
    }

    pub(crate) fn allow(&self) -> Result<(), Errno> {
        let Some(recorder) = &self.recorder else { return Ok(()) };
        let number = recorder.asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        match recorder.fail_at {
            Some(at) if number == at || (recorder.for_good && number > at) => Err(Errno::NOSPC),
            _ => Ok(()),
        }
    }

    pub(crate) fn allow_hole(&self, is_try: bool) -> Result<(), Errno> {
        match self.recorder.as_ref().map(|it| it.holes) {
            Some(Holes::None) => Err(Errno::OPNOTSUPP),
            Some(Holes::NoneAtLast) if !is_try => Err(Errno::OPNOTSUPP),
            _ => Ok(()),
        }
    }

    /// Whether changes are recorded, including the bytes that are written.
    pub(crate) const fn is_on(&self) -> bool {
        self.recorder.is_some()
    }

    pub(crate) fn record(&self, change: impl FnOnce() -> Change) {
        let Some(recorder) = &self.recorder else { return };
        let change = change();
        let may_be_slow = matches!(
            change,
            Change::Unlink(_)
                | Change::RemoveDirectory(_)
                | Change::Punch(..)
                | Change::SyncFile(_)
                | Change::SyncDirectory(_)
                | Change::SyncEverything
        );
        if may_be_slow && recorder.is_locked() {
            recorder.locked.lock().unwrap().push(change.clone());
        }
        recorder.changes.lock().unwrap().push(change);
    }
}
