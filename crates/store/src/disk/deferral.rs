//! Files that are published before they are synced. See `docs/format/object-store.md`, "Files that are not synced".

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{Directory, DiskError, Listed, PUBLISHED};

/// Mode of a published file that is not synced. The sticky bit has no other meaning for regular files on Linux
/// (chmod(2)). Other users cannot open the file, because they do not know whether a crash has damaged it.
pub(super) const UNSYNCED: Mode = Mode::RUSR.union(Mode::SVTX);

/// Number of files that are open at a time while they are synced.
const OPEN_MAX: usize = 64;

/// A file that was published without a sync.
#[derive(Debug, Clone)]
pub(crate) struct MarkedFile {
    pub(crate) name: Vec<u8>,
    /// Number of the inode, because another file may get the name.
    inode: u64,
}

/// Whether the changes that are made through a store are synced later.
#[derive(Debug, Clone, Default)]
pub(crate) struct Deferral(Arc<AtomicBool>);

impl Deferral {
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Turns the deferral on or off until the guard is dropped.
    pub(crate) fn switch(&self, is_on: bool) -> DeferralSwitch {
        DeferralSwitch { before: self.0.swap(is_on, Ordering::Relaxed), deferral: self.clone() }
    }

    /// Returns the mode of files that are published now.
    pub(super) fn published(&self) -> Mode {
        if self.is_on() { UNSYNCED } else { PUBLISHED }
    }

    /// Returns the bits that are added to the mode of files that other modes than [`PUBLISHED`] protect.
    pub(super) fn mark(&self) -> Mode {
        if self.is_on() { Mode::SVTX } else { Mode::empty() }
    }
}

/// Restores the earlier state of a [`Deferral`] when it is dropped.
#[derive(Debug)]
pub(crate) struct DeferralSwitch {
    before: bool,
    deferral: Deferral,
}

impl Drop for DeferralSwitch {
    fn drop(&mut self) {
        self.deferral.0.store(self.before, Ordering::Relaxed);
    }
}

/// Whether a file was published without a sync, and was not synced since then.
pub(crate) fn is_unsynced(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && Mode::from_raw_mode(stat.st_mode).contains(Mode::SVTX)
}

impl Directory {
    pub(crate) const fn deferral(&self) -> &Deferral {
        &self.deferral
    }

    /// Returns the files that were published without a sync.
    pub(crate) fn unsynced(&self) -> Result<Vec<MarkedFile>, DiskError> {
        let mut found = Vec::new();
        for Listed { name, kind } in self.list()? {
            if !matches!(kind, FileType::RegularFile | FileType::Unknown) {
                continue;
            }
            if let Some(stat) = self.stat(&name)?.filter(is_unsynced) {
                found.push(MarkedFile { name, inode: stat.st_ino });
            }
        }
        Ok(found)
    }

    /// Fails if changes are not synced now, and the name belongs to a file that a crash must not remove.
    pub(crate) fn check_removable(&self, name: &[u8]) -> Result<(), DiskError> {
        let is_synced = |stat: Stat| !is_unsynced(&stat);
        match self.deferral.is_on() && self.stat(name)?.is_some_and(is_synced) {
            true => Err(self.failed("replace", name, Errno::EXIST)),
            false => Ok(()),
        }
    }

    /// Syncs files that were published without a sync, then removes their mark, durably. A file that another process
    /// has removed or replaced is left out.
    pub(crate) fn sync_published(&self, marked: &[MarkedFile]) -> Result<(), DiskError> {
        for some in marked.chunks(OPEN_MAX) {
            self.sync_some(some)?;
        }
        Ok(())
    }

    fn sync_some(&self, marked: &[MarkedFile]) -> Result<(), DiskError> {
        let mut files = Vec::new();
        for MarkedFile { name, inode } in marked {
            let Some((file, stat)) = self.read(name)? else { continue };
            // Another file of this name may need files that were not listed.
            if is_unsynced(&stat) && stat.st_ino == *inode {
                self.sync_open(&file, name)?;
                files.push((file, name));
            }
        }
        if files.is_empty() {
            return Ok(());
        }
        // The names are durable before the marks are gone.
        self.sync()?;
        for (file, name) in &files {
            // A lazy device may have been sealed during the sync.
            let stat = rustix::fs::fstat(file).map_err(|errno| self.failed("stat", name, errno))?;
            let synced = match Mode::from_raw_mode(stat.st_mode) {
                UNSYNCED => PUBLISHED,
                other => other.difference(Mode::SVTX),
            };
            self.remove_mark(file, name, synced)?;
        }
        // An import may rely on these files as soon as this returns.
        files.iter().try_for_each(|(file, name)| self.sync_open(file, name))
    }
}

/// A small file of this user that processes lock, and whose content does not outlive a crash for sure. Its changes are
/// not traced, so crash tests ignore it.
#[derive(Debug)]
pub(crate) struct ControlFile {
    file: File,
    path: PathBuf,
}

impl ControlFile {
    /// Maximum length in bytes.
    pub(crate) const MAX: u64 = 64;

    /// Opens a file, and creates it if it does not exist.
    pub(crate) fn open(directory: &Directory, name: &str) -> Result<Self, DiskError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR | Mode::SVTX;
        let opened = rustix::fs::openat(directory, name, flags, mode);
        let file = opened.map_err(|errno| directory.failed("open", name, errno))?;
        let opened = Self { file: file.into(), path: directory.path_of(name) };
        // The umask may have removed bits.
        if Mode::from_raw_mode(opened.stat()?.st_mode) != mode {
            let changed = rustix::fs::fchmod(&opened.file, mode);
            changed.map_err(|errno| opened.failed("change the mode of", errno))?;
        }
        Ok(opened)
    }

    /// Whether the file system keeps the mark of files that are not synced.
    pub(crate) fn can_be_marked(&self) -> Result<bool, DiskError> {
        Ok(is_unsynced(&self.stat()?))
    }

    fn stat(&self) -> Result<Stat, DiskError> {
        rustix::fs::fstat(&self.file).map_err(|errno| self.failed("stat", errno))
    }

    /// Waits for a shared lock, which replaces an exclusive one.
    pub(crate) fn lock_shared(&self) -> Result<(), DiskError> {
        self.flock(FlockOperation::LockShared).map(drop)
    }

    /// Takes the exclusive lock. Returns `false` if another process holds a lock.
    pub(crate) fn try_lock(&self) -> Result<bool, DiskError> {
        self.flock(FlockOperation::NonBlockingLockExclusive)
    }

    fn flock(&self, how: FlockOperation) -> Result<bool, DiskError> {
        loop {
            match rustix::fs::flock(&self.file, how) {
                Ok(()) => return Ok(true),
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("lock", errno)),
            }
        }
    }

    pub(crate) fn read(&self) -> Result<Vec<u8>, DiskError> {
        let mut found = vec![0; 64];
        let read = self.file.read_at(&mut found, 0).map_err(|error| self.failed("read", error))?;
        found.truncate(read);
        Ok(found)
    }

    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), DiskError> {
        // The file is not empty in between, also if the disk is full.
        let written = self.file.write_all_at(bytes, 0);
        let written = written.and_then(|()| self.file.set_len(bytes.len() as u64));
        written.map_err(|error| self.failed("write", error))
    }

    fn failed(&self, action: &'static str, source: impl Into<io::Error>) -> DiskError {
        DiskError { action, path: self.path.clone(), source: source.into() }
    }
}
