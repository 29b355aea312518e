//! Directories as descriptors. Only this module changes files and directories of the store.
//!
//! Every file is named by a directory and a single name in it, and symlinks are never followed. Every change passes
//! through [`Trace`], so that a test can record an import and replay it up to any point.

mod deferral;
mod exchange;
mod list;
mod lock;
mod new_file;
mod placed;
mod punch;
mod remove;
mod room;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use kernel::depth::Walked;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::Errno;

pub(crate) use crate::trace::{Change, Trace};
use deferral::UNSYNCED;
pub(crate) use deferral::{ControlFile, Deferral, DeferralSwitch, MarkedFile, is_unsynced};
pub(crate) use list::ListFile;
pub(crate) use new_file::NewFile;
pub(crate) use placed::PlacedFile;
pub(crate) use punch::ToPunch;
pub use room::DiskRoom;

/// A failed operation on a file or directory of the store.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", .path.display())]
pub struct DiskError {
    /// The operation, such as "read".
    pub action: &'static str,
    /// Path of the file or directory, below the store's directory as the caller passed it.
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl DiskError {
    /// Whether the disk or a quota is full, or the file would exceed the size limit.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let errno = Errno::from_io_error(&self.source);
        matches!(errno, Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG))
            || self.source.kind() == io::ErrorKind::StorageFull
    }

    /// Whether the file system is read-only, or this user lacks write permission.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        let errno = Errno::from_io_error(&self.source);
        matches!(errno, Some(Errno::ROFS | Errno::ACCESS | Errno::PERM))
    }

    /// Whether the name belongs to something other than a regular file of an acceptable size.
    pub(crate) fn is_not_a_file(&self) -> bool {
        // A symlink, which is not followed (LOOP), or a socket or a device without a driver (NXIO).
        self.is(Errno::LOOP)
            || self.is(Errno::NXIO)
            || self.source.kind() == io::ErrorKind::InvalidData
    }

    pub(crate) fn is(&self, errno: Errno) -> bool {
        Errno::from_io_error(&self.source) == Some(errno)
    }
}

/// Result of a rename that does not replace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renamed {
    /// The file has the new name.
    Now,
    /// Another file already had the name and was left unchanged.
    Taken,
}

/// An entry of a directory.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) name: Vec<u8>,
    /// `Unknown` if the file system does not report the type.
    pub(crate) kind: FileType,
}

impl Listed {
    pub(crate) fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.name).ok()
    }
}

/// An open directory of the store, with its path for messages.
#[derive(Debug)]
pub(crate) struct Directory {
    fd: OwnedFd,
    path: PathBuf,
    trace: Trace,
    /// Limit on disk space for files that are written in the directory; `None` means no limit.
    room: Option<DiskRoom>,
    /// Shared by all directories of an open store.
    deferral: Deferral,
}

/// Resolution below a directory: without symlinks, and within one file system.
const INSIDE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// The flags contain `NONBLOCK`, so that opening a FIFO in the place of a file does not block.
const READ: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
const NEW: OFlags = OFlags::WRONLY
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Mode of every published file.
pub(crate) const PUBLISHED: Mode = Mode::RUSR.union(Mode::RGRP).union(Mode::ROTH);

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Directory {
    /// Opens the store's own directory. Symlinks in `path` are followed, because the user named it.
    pub(crate) fn open_root(path: &Path, trace: Trace) -> Result<Self, DiskError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => {
                let (path, deferral) = (path.to_owned(), Deferral::default());
                Ok(Self { fd, path, trace, room: None, deferral })
            }
            Err(errno) => Err(DiskError {
                action: "open directory",
                path: path.to_owned(),
                source: errno.into(),
            }),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn into_fd(self) -> OwnedFd {
        self.fd
    }

    pub(crate) fn try_clone(&self) -> Result<Self, DiskError> {
        let fd = self.fd.try_clone();
        let fd = fd.map_err(|source| self.failed("duplicate", "", source))?;
        let (trace, room) = (self.trace.clone(), self.room.clone());
        Ok(Self { fd, path: self.path.clone(), trace, room, deferral: self.deferral.clone() })
    }

    /// Applies `room` to files that are created in the directory from now on.
    pub(crate) fn leave(&mut self, room: DiskRoom) {
        self.room = Some(room);
    }

    /// Returns a limit for the file system of this directory.
    pub(crate) fn new_room(&self) -> Result<DiskRoom, DiskError> {
        DiskRoom::from_fd(self.fd.as_fd()).map_err(|error| self.failed("examine", "", error))
    }

    /// Changes the path for error messages after a rename.
    pub(crate) fn renamed(self, to: &Self, name: &str) -> Self {
        Self { path: to.path_of(name), ..self }
    }

    pub(crate) fn failed(
        &self,
        action: &'static str,
        name: impl AsRef<[u8]>,
        source: impl Into<io::Error>,
    ) -> DiskError {
        DiskError { action, path: self.path_of(name), source: source.into() }
    }

    pub(crate) fn path_of(&self, name: impl AsRef<[u8]>) -> PathBuf {
        match name.as_ref() {
            b"" => self.path.clone(),
            name => self.path.join(OsStr::from_bytes(name)),
        }
    }

    /// Wraps the descriptor of a directory in this one.
    fn inner(&self, fd: OwnedFd, name: &[u8]) -> Self {
        let (trace, room) = (self.trace.clone(), self.room.clone());
        Self { fd, path: self.path_of(name), trace, room, deferral: self.deferral.clone() }
    }

    pub(crate) fn open(&self, name: impl AsRef<[u8]>) -> Result<Self, DiskError> {
        let name = name.as_ref();
        self.open_if_there(name)?.ok_or_else(|| self.failed("open directory", name, Errno::NOENT))
    }

    pub(crate) fn open_if_there(&self, name: impl AsRef<[u8]>) -> Result<Option<Self>, DiskError> {
        let name = name.as_ref();
        match rustix::fs::openat(&self.fd, name, DIRECTORY, Mode::empty()) {
            Ok(fd) => Ok(Some(self.inner(fd, name))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed("open directory", name, errno)),
        }
    }

    /// Opens a directory that this user may not read as an `O_PATH` descriptor.
    pub(crate) fn open_place(&self, name: &str) -> Result<Self, DiskError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(self.inner(fd, name.as_bytes())),
            Err(errno) => Err(self.failed("open directory", name, errno)),
        }
    }

    /// Creates a directory with exactly this mode. Returns `false` if the name was in use.
    pub(crate) fn make(&self, name: impl AsRef<[u8]>, mode: Mode) -> Result<bool, DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("make directory", name, errno);
        self.trace.allow().map_err(failed)?;
        match rustix::fs::mkdirat(&self.fd, name, mode) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Ok(false),
            Err(errno) => return Err(failed(errno)),
        }
        // The umask and default ACLs may have removed bits.
        rustix::fs::chmodat(&self.fd, name, mode, AtFlags::empty()).map_err(failed)?;
        self.trace.record(|| Change::MakeDirectory(self.path_of(name)));
        Ok(true)
    }

    /// Creates a symlink that points to itself, unless the name is in use. This change is not traced, so crash tests
    /// ignore the symlink.
    pub(crate) fn link_to_itself(&self, name: &str) -> Result<(), DiskError> {
        match rustix::fs::symlinkat(name, &self.fd, name) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(self.failed("make symlink", name, errno)),
        }
    }

    /// Creates a directory that only this user can access. Returns `false` if the name was in use.
    pub(crate) fn make_private(&self, name: impl AsRef<[u8]>) -> Result<bool, DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("make directory", name, errno);
        self.trace.allow().map_err(failed)?;
        match rustix::fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) => {
                self.trace.record(|| Change::MakeDirectory(self.path_of(name)));
                Ok(true)
            }
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Changes the mode of a file or directory in this directory. Only the owner may do this.
    pub(crate) fn set_mode(&self, name: &str, mode: Mode) -> Result<(), DiskError> {
        let failed = |errno| self.failed("change the mode of", name, errno);
        self.trace.allow().map_err(failed)?;
        // This uses a descriptor, because chmodat follows symlinks.
        let flags = READ.union(OFlags::NOCTTY);
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty()).map_err(failed)?;
        rustix::fs::fchmod(fd, mode).map_err(failed)
    }

    /// Changes the mode of this directory.
    pub(crate) fn set_mode_self(&self, mode: Mode) -> Result<(), DiskError> {
        let failed = |errno| self.failed("change the mode of", "", errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::fchmod(&self.fd, mode).map_err(failed)
    }

    /// Creates a file for writing, with the mode of published files minus the umask.
    pub(crate) fn create(&self, name: impl AsRef<[u8]>) -> Result<NewFile, DiskError> {
        self.create_with(name.as_ref(), self.deferral.published())
    }

    /// Creates a file for writing, with the mark of files that are not synced.
    pub(crate) fn create_unsynced(&self, name: impl AsRef<[u8]>) -> Result<NewFile, DiskError> {
        self.create_with(name.as_ref(), UNSYNCED)
    }

    fn create_with(&self, name: &[u8], mode: Mode) -> Result<NewFile, DiskError> {
        let failed = |errno| self.failed("create", name, errno);
        self.trace.allow().map_err(failed)?;
        let fd = rustix::fs::openat(&self.fd, name, NEW, mode).map_err(failed)?;
        self.record_created(name, mode);
        let (trace, room) = (self.trace.clone(), self.room.clone());
        Ok(NewFile { fd, path: self.path_of(name), length: 0, mode, trace, room })
    }

    /// Creates a sparse file of `bytes` bytes that only this user can read and write.
    pub(crate) fn create_lazy_device(&self, name: &str, bytes: u64) -> Result<(), DiskError> {
        let failed = |errno| self.failed("create", name, errno);
        self.trace.allow().map_err(failed)?;
        let mode = Mode::RUSR | Mode::WUSR | self.deferral.mark();
        let fd = rustix::fs::openat(&self.fd, name, NEW, mode).map_err(failed)?;
        rustix::fs::ftruncate(&fd, bytes).map_err(failed)?;
        self.record_created(name.as_bytes(), mode);
        self.trace.record(|| Change::Lengthen(self.path_of(name), bytes));
        Ok(())
    }

    fn record_created(&self, name: &[u8], mode: Mode) {
        self.trace.record(|| match mode.contains(Mode::SVTX) {
            true => Change::CreateUnsynced(self.path_of(name)),
            false => Change::Create(self.path_of(name)),
        });
    }

    /// Opens a regular file for reading. Returns `None` if it does not exist.
    pub(crate) fn read(
        &self,
        name: impl AsRef<[u8]>,
    ) -> Result<Option<(std::fs::File, Stat)>, DiskError> {
        self.open_regular(name.as_ref(), READ)
    }

    fn open_regular(
        &self,
        name: &[u8],
        flags: OFlags,
    ) -> Result<Option<(std::fs::File, Stat)>, DiskError> {
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            // Another process has a lease on the file, to check whether it is in use. That takes some microseconds.
            // Only regular files have leases, so waiting for the lease cannot block forever.
            Err(Errno::AGAIN) => {
                let flags = flags.difference(OFlags::NONBLOCK);
                rustix::fs::openat(&self.fd, name, flags, Mode::empty())
            }
            other => other,
        };
        let fd = match fd {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(self.failed("open", name, errno)),
        };
        let stat = rustix::fs::fstat(&fd).map_err(|errno| self.failed("stat", name, errno))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            let odd = io::Error::new(io::ErrorKind::InvalidData, "it is not a regular file");
            return Err(self.failed("read", name, odd));
        }
        Ok(Some((fd.into(), stat)))
    }

    /// Reads a whole file of at most `limit` bytes. Returns `None` if it does not exist.
    pub(crate) fn read_all(
        &self,
        name: impl AsRef<[u8]>,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, DiskError> {
        use std::io::Read as _;
        let name = name.as_ref();
        let Some((file, stat)) = self.read(name)? else { return Ok(None) };
        let size = length(&stat);
        if size > limit {
            let odd = io::Error::new(io::ErrorKind::InvalidData, format!("it has {size} bytes"));
            return Err(self.failed("read", name, odd));
        }
        // With one byte of room more, the first read returns everything, and the second finds the end.
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0).saturating_add(1));
        match file.take(limit).read_to_end(&mut bytes) {
            Ok(_) => Ok(Some(bytes)),
            Err(source) => Err(self.failed("read", name, source)),
        }
    }

    /// Returns the metadata of an entry, without following symlinks, or `None` if it does not exist.
    pub(crate) fn stat(&self, name: impl AsRef<[u8]>) -> Result<Option<Stat>, DiskError> {
        let name = name.as_ref();
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed("look up", name, errno)),
        }
    }

    /// Returns the metadata of the directory itself.
    pub(crate) fn stat_self(&self) -> Result<Stat, DiskError> {
        rustix::fs::fstat(&self.fd).map_err(|errno| self.failed("stat", "", errno))
    }

    /// Renames a file without replacing another one.
    pub(crate) fn rename_new(
        &self,
        name: impl AsRef<[u8]>,
        to: &Self,
        new: impl AsRef<[u8]>,
    ) -> Result<Renamed, DiskError> {
        let (name, new) = (name.as_ref(), new.as_ref());
        let failed = |errno| to.failed("publish", new, errno);
        self.trace.allow().map_err(failed)?;
        match rustix::fs::renameat_with(&self.fd, name, &to.fd, new, RenameFlags::NOREPLACE) {
            Ok(()) => {
                self.trace.record(|| Change::Rename(self.path_of(name), to.path_of(new)));
                Ok(Renamed::Now)
            }
            Err(Errno::EXIST) => Ok(Renamed::Taken),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Renames a file, replacing any file of the new name. While syncs are deferred, an existing file is an error.
    pub(crate) fn rename_over(
        &self,
        name: impl AsRef<[u8]>,
        to: &Self,
        new: impl AsRef<[u8]>,
    ) -> Result<(), DiskError> {
        let (name, new) = (name.as_ref(), new.as_ref());
        let failed = |errno| to.failed("replace", new, errno);
        self.trace.allow().map_err(failed)?;
        // A file that is not synced must not replace one that is.
        let flags = match self.deferral.is_on() {
            true => RenameFlags::NOREPLACE,
            false => RenameFlags::empty(),
        };
        rustix::fs::renameat_with(&self.fd, name, &to.fd, new, flags).map_err(failed)?;
        self.trace.record(|| Change::Rename(self.path_of(name), to.path_of(new)));
        Ok(())
    }

    /// Removes a file. Returns `false` if it did not exist.
    pub(crate) fn unlink(&self, name: impl AsRef<[u8]>) -> Result<bool, DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("remove", name, errno);
        self.trace.allow().map_err(failed)?;
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) => {
                self.trace.record(|| Change::Unlink(self.path_of(name)));
                Ok(true)
            }
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed(errno)),
        }
    }

    fn remove_directory(&self, name: &[u8]) -> Result<bool, DiskError> {
        let failed = |errno| self.failed("remove directory", name, errno);
        self.trace.allow().map_err(failed)?;
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::REMOVEDIR) {
            Ok(()) => {
                self.trace.record(|| Change::RemoveDirectory(self.path_of(name)));
                Ok(true)
            }
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed(errno)),
        }
    }

    /// Returns all entries of the directory, in byte order of their names.
    pub(crate) fn list(&self) -> Result<Vec<Listed>, DiskError> {
        let failed = |errno| self.failed("list", "", errno);
        let mut found = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                found.push(Listed { name: name.to_vec(), kind: entry.file_type() });
            }
        }
        found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Makes the entries of this directory durable, unless syncs are deferred.
    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        let failed = |errno| self.failed("sync", "", errno);
        self.trace.allow().map_err(failed)?;
        if self.deferral.is_on() {
            return Ok(());
        }
        rustix::fs::fsync(&self.fd).map_err(failed)?;
        self.trace.record(|| Change::SyncDirectory(self.path.clone()));
        Ok(())
    }

    /// Makes a file's bytes durable, unless syncs are deferred.
    pub(crate) fn sync_file(&self, name: impl AsRef<[u8]>) -> Result<(), DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("sync", name, errno);
        if self.deferral.is_on() {
            return self.trace.allow().map_err(failed);
        }
        let fd = rustix::fs::openat(&self.fd, name, READ, Mode::empty()).map_err(failed)?;
        self.sync_open(fd, name)
    }

    fn sync_open(&self, file: impl AsFd, name: &[u8]) -> Result<(), DiskError> {
        let failed = |errno| self.failed("sync", name, errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::fsync(file).map_err(failed)?;
        self.trace.record(|| Change::SyncFile(self.path_of(name)));
        Ok(())
    }

    /// Sets the mode of a file that was marked as not synced.
    fn remove_mark(&self, file: impl AsFd, name: &[u8], mode: Mode) -> Result<(), DiskError> {
        let failed = |errno| self.failed("change the mode of", name, errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::fchmod(file, mode).map_err(failed)?;
        self.trace.record(|| Change::RemoveMark(self.path_of(name)));
        Ok(())
    }

    /// Makes all data of this file system durable, unless syncs are deferred.
    pub(crate) fn sync_everything(&self) -> Result<(), DiskError> {
        let failed = |errno| self.failed("sync the file system of", "", errno);
        self.trace.allow().map_err(failed)?;
        if self.deferral.is_on() {
            return Ok(());
        }
        rustix::fs::syncfs(&self.fd).map_err(failed)?;
        self.trace.record(|| Change::SyncEverything);
        Ok(())
    }

    /// Whether the directory still has a name, that is, was not removed between opening and locking it.
    pub(crate) fn is_linked(&self) -> Result<bool, DiskError> {
        let stat = rustix::fs::fstat(&self.fd).map_err(|errno| self.failed("stat", "", errno))?;
        Ok(stat.st_nlink > 0)
    }

    /// Returns the bytes on disk of everything in a directory tree, without entering mounts. Entries that vanish or
    /// are moved during the walk, and entries that this user may not inspect, are not counted.
    pub(crate) fn tree_bytes(&self, name: impl AsRef<[u8]>) -> u64 {
        let name = name.as_ref();
        let own = self.stat(name).ok().flatten();
        let Some(own) = own else { return 0 };
        if FileType::from_raw_mode(own.st_mode) != FileType::Directory {
            return on_disk(&own);
        }
        let opened = rustix::fs::openat2(&self.fd, name, DIRECTORY, Mode::empty(), INSIDE);
        let Ok(top) = opened else { return on_disk(&own) };
        let (mut bytes, mut linked) = (0_u64, HashSet::new());
        let walked = kernel::depth::walk(top, &mut |_, _, stat| {
            let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            // A file with several hard links is counted once.
            if is_directory || stat.st_nlink <= 1 || linked.insert((stat.st_dev, stat.st_ino)) {
                bytes = bytes.saturating_add(on_disk(stat));
            }
            Ok(())
        });
        if !matches!(walked, Ok(Walked::All)) {
            tracing::debug!(?walked, "files that moved during the measurement are not counted");
        }
        bytes
    }

    /// Removes a file that may be immutable. Returns `false` if it did not exist.
    pub(crate) fn unlink_sealed(&self, name: impl AsRef<[u8]>) -> Result<bool, DiskError> {
        let name = name.as_ref();
        match self.unlink(name) {
            Err(error) if error.is(Errno::PERM) => {
                self.unseal(name, error)?;
                self.unlink(name)
            }
            other => other,
        }
    }

    /// Removes a file that may be immutable, or a directory tree. Returns `false` if the name did not exist.
    pub(crate) fn remove_any(&self, name: impl AsRef<[u8]>) -> Result<bool, DiskError> {
        let name = name.as_ref();
        match self.unlink_sealed(name) {
            Err(error) if error.is(Errno::ISDIR) => self.remove_tree(name).map(|()| true),
            other => other,
        }
    }

    /// Removes the immutable flag from a regular file. Returns the error `why` if the file is not immutable or cannot
    /// be read.
    pub(crate) fn unseal(&self, name: &[u8], why: DiskError) -> Result<(), DiskError> {
        let Ok(Some((file, _))) = self.read(name) else { return Err(why) };
        match kernel::seal::sealed(file.as_fd()) {
            Ok(kernel::seal::Sealed::Immutable) => {}
            _ => return Err(why),
        }
        match kernel::seal::clear_immutable(file.as_fd()) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.failed("unseal", name, io::Error::other(error))),
        }
    }
}

/// Returns the length of a file in bytes.
pub(crate) fn length(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// Returns the bytes that a file occupies on the disk.
pub(crate) fn on_disk(stat: &Stat) -> u64 {
    // POSIX does not define the unit. On Linux it is 512 bytes for every file system.
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}
