//! Directories as descriptors: the only place that changes anything on the disk.
//!
//! Everything is named by a directory and one name in it, symlinks are never followed, and every
//! change passes through [`Trace`], so that a test can record an import and replay it to any point.

mod list;
mod lock;
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
pub(crate) use list::ListFile;
pub(crate) use placed::PlacedFile;
pub(crate) use room::Room;

/// A failed operation on a file or directory of the store.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", .path.display())]
pub struct DiskError {
    /// The operation, such as "read".
    pub action: &'static str,
    /// The file, below the store's directory as the caller gave it.
    pub path: PathBuf,
    /// The error of the kernel.
    #[source]
    pub source: io::Error,
}

impl DiskError {
    /// Whether the disk, a quota or a limit on file sizes left no room.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let errno = Errno::from_io_error(&self.source);
        matches!(errno, Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG))
            || self.source.kind() == io::ErrorKind::StorageFull
    }

    /// Whether the file system is read-only, or this user may not write there.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        let errno = Errno::from_io_error(&self.source);
        matches!(errno, Some(Errno::ROFS | Errno::ACCESS | Errno::PERM))
    }

    /// Whether something else than a regular file of a good size has the name.
    pub(crate) fn is_not_a_file(&self) -> bool {
        // A symlink, which is not followed, and a socket or a device that nobody serves.
        self.is(Errno::LOOP)
            || self.is(Errno::NXIO)
            || self.source.kind() == io::ErrorKind::InvalidData
    }

    pub(crate) fn is(&self, errno: Errno) -> bool {
        Errno::from_io_error(&self.source) == Some(errno)
    }
}

/// What became of a name that was to be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renamed {
    /// The file has it now.
    Now,
    /// Another file had it before, and was left alone.
    Taken,
}

/// A name in a directory, as listed.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) name: Vec<u8>,
    /// `Unknown` where the file system does not say.
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
    /// For what is written in it, if anybody looks at that.
    room: Option<Room>,
}

/// Names of directories: never through a symlink, and not to another file system.
const INSIDE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// `NONBLOCK`, so that a FIFO in the place of a file does not hold us up.
const READ: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);
const NEW: OFlags = OFlags::WRONLY
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Mode of everything published.
pub(crate) const PUBLISHED: Mode = Mode::RUSR.union(Mode::RGRP).union(Mode::ROTH);

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Directory {
    /// Opens the store's own directory, which the user named: symlinks in that path are followed.
    pub(crate) fn open_root(path: &Path, trace: Trace) -> Result<Self, DiskError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, path: path.to_owned(), trace, room: None }),
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

    pub(crate) fn try_clone(&self) -> Result<Self, DiskError> {
        let fd = self.fd.try_clone();
        let fd = fd.map_err(|source| self.failed("duplicate", "", source))?;
        Ok(Self { fd, path: self.path.clone(), trace: self.trace.clone(), room: self.room.clone() })
    }

    /// Files that are made in it from here on leave some of the disk to others.
    pub(crate) fn leave(&mut self, room: Room) {
        self.room = Some(room);
    }

    /// Of the disk that it is on.
    pub(crate) fn new_room(&self) -> Result<Room, DiskError> {
        Room::of(self.fd.as_fd()).map_err(|error| self.failed("look at", "", error))
    }

    /// After a rename: what messages call the directory from now on.
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

    /// A directory in this one.
    fn inner(&self, fd: OwnedFd, name: &[u8]) -> Self {
        let (trace, room) = (self.trace.clone(), self.room.clone());
        Self { fd, path: self.path_of(name), trace, room }
    }

    /// Opens a directory in this one.
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

    /// A directory in this one that this user may not read: only its name is held.
    pub(crate) fn open_place(&self, name: &str) -> Result<Self, DiskError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => Ok(self.inner(fd, name.as_bytes())),
            Err(errno) => Err(self.failed("open directory", name, errno)),
        }
    }

    /// Makes a directory with exactly these permissions. `false` if there was something of that
    /// name before.
    pub(crate) fn make(&self, name: impl AsRef<[u8]>, mode: Mode) -> Result<bool, DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("make directory", name, errno);
        self.trace.allow().map_err(failed)?;
        match rustix::fs::mkdirat(&self.fd, name, mode) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Ok(false),
            Err(errno) => return Err(failed(errno)),
        }
        // Whatever the umask and default ACLs took away.
        rustix::fs::chmodat(&self.fd, name, mode, AtFlags::empty()).map_err(failed)?;
        self.trace.record(|| Change::MakeDirectory(self.path_of(name)));
        Ok(true)
    }

    /// Makes a symlink that leads to itself, unless there is something of its name. No crash test looks at it.
    pub(crate) fn link_to_itself(&self, name: &str) -> Result<(), DiskError> {
        match rustix::fs::symlinkat(name, &self.fd, name) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(errno) => Err(self.failed("make symlink", name, errno)),
        }
    }

    /// Makes a directory for this user alone. `false` if there was something of that name before.
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

    /// Changes the permissions of a file or directory in this one, which is its owner's to do.
    pub(crate) fn set_mode(&self, name: &str, mode: Mode) -> Result<(), DiskError> {
        let failed = |errno| self.failed("change the mode of", name, errno);
        self.trace.allow().map_err(failed)?;
        // By a descriptor, since chmodat follows links.
        let flags = READ.union(OFlags::NOCTTY);
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty()).map_err(failed)?;
        rustix::fs::fchmod(fd, mode).map_err(failed)
    }

    /// Changes the permissions of this directory.
    pub(crate) fn set_mode_self(&self, mode: Mode) -> Result<(), DiskError> {
        let failed = |errno| self.failed("change the mode of", "", errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::fchmod(&self.fd, mode).map_err(failed)
    }

    /// Creates a file for writing, mode 0444 less the umask.
    pub(crate) fn create(&self, name: impl AsRef<[u8]>) -> Result<NewFile, DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("create", name, errno);
        self.trace.allow().map_err(failed)?;
        let fd = rustix::fs::openat(&self.fd, name, NEW, PUBLISHED).map_err(failed)?;
        self.trace.record(|| Change::Create(self.path_of(name)));
        let (trace, room) = (self.trace.clone(), self.room.clone());
        Ok(NewFile { fd, path: self.path_of(name), length: 0, trace, room })
    }

    /// Creates a file that is one hole of so many bytes, for this user alone to fill.
    pub(crate) fn create_lazy_device(&self, name: &str, bytes: u64) -> Result<(), DiskError> {
        let failed = |errno| self.failed("create", name, errno);
        self.trace.allow().map_err(failed)?;
        let mode = Mode::RUSR | Mode::WUSR;
        let fd = rustix::fs::openat(&self.fd, name, NEW, mode).map_err(failed)?;
        rustix::fs::ftruncate(&fd, bytes).map_err(failed)?;
        self.trace.record(|| Change::Create(self.path_of(name)));
        self.trace.record(|| Change::Lengthen(self.path_of(name), bytes));
        Ok(())
    }

    /// Opens a regular file for reading; `None` if there is nothing of that name.
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
            // Someone asks by a lease whether the file is in use: it takes some microseconds. Only
            // regular files have leases, so this does not wait for ever.
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

    /// The whole of a small file; `None` if there is nothing of that name.
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
        let mut bytes = Vec::new();
        match file.take(limit).read_to_end(&mut bytes) {
            Ok(_) => Ok(Some(bytes)),
            Err(source) => Err(self.failed("read", name, source)),
        }
    }

    /// What a name is, symlinks not followed; `None` if there is nothing of that name.
    pub(crate) fn stat(&self, name: impl AsRef<[u8]>) -> Result<Option<Stat>, DiskError> {
        let name = name.as_ref();
        match rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed("look up", name, errno)),
        }
    }

    /// What the directory itself is.
    pub(crate) fn stat_self(&self) -> Result<Stat, DiskError> {
        rustix::fs::fstat(&self.fd).map_err(|errno| self.failed("stat", "", errno))
    }

    /// Renames, never replacing anything.
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

    /// Renames over whatever file has the name.
    pub(crate) fn rename_over(
        &self,
        name: impl AsRef<[u8]>,
        to: &Self,
        new: impl AsRef<[u8]>,
    ) -> Result<(), DiskError> {
        let (name, new) = (name.as_ref(), new.as_ref());
        let failed = |errno| to.failed("replace", new, errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::renameat(&self.fd, name, &to.fd, new).map_err(failed)?;
        self.trace.record(|| Change::Rename(self.path_of(name), to.path_of(new)));
        Ok(())
    }

    /// Removes a file. `false` if there was none.
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

    /// Everything in the directory, in byte order.
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

    /// Makes the names in this directory durable.
    pub(crate) fn sync(&self) -> Result<(), DiskError> {
        let failed = |errno| self.failed("sync", "", errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::fsync(&self.fd).map_err(failed)?;
        self.trace.record(|| Change::SyncDirectory(self.path.clone()));
        Ok(())
    }

    /// Makes a file's bytes durable.
    pub(crate) fn sync_file(&self, name: impl AsRef<[u8]>) -> Result<(), DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("sync", name, errno);
        self.trace.allow().map_err(failed)?;
        let fd = rustix::fs::openat(&self.fd, name, READ, Mode::empty()).map_err(failed)?;
        rustix::fs::fsync(fd).map_err(failed)?;
        self.trace.record(|| Change::SyncFile(self.path_of(name)));
        Ok(())
    }

    /// Makes everything on this file system durable.
    pub(crate) fn sync_everything(&self) -> Result<(), DiskError> {
        let failed = |errno| self.failed("sync the file system of", "", errno);
        self.trace.allow().map_err(failed)?;
        rustix::fs::syncfs(&self.fd).map_err(failed)?;
        self.trace.record(|| Change::SyncEverything);
        Ok(())
    }

    /// Whether the directory still has a name: nobody removed it between opening and locking it.
    pub(crate) fn is_linked(&self) -> Result<bool, DiskError> {
        let stat = rustix::fs::fstat(&self.fd).map_err(|errno| self.failed("stat", "", errno))?;
        Ok(stat.st_nlink > 0)
    }

    /// Bytes on disk of everything in a directory, however deep, mounts not entered. What vanishes or moves meanwhile, or
    /// may not be looked at, counts nothing.
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
            // A file with several names takes its space once.
            if is_directory || stat.st_nlink <= 1 || linked.insert((stat.st_dev, stat.st_ino)) {
                bytes = bytes.saturating_add(on_disk(stat));
            }
            Ok(())
        });
        if !matches!(walked, Ok(Walked::All)) {
            tracing::debug!(?walked, "what moved while it was measured is not counted");
        }
        bytes
    }

    /// Removes a file that may be immutable. `false` if there was none.
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

    /// Removes whatever has the name: a file that may be immutable, or a directory with all that is in
    /// it. `false` if there was nothing.
    pub(crate) fn remove_any(&self, name: impl AsRef<[u8]>) -> Result<bool, DiskError> {
        let name = name.as_ref();
        match self.unlink_sealed(name) {
            Err(error) if error.is(Errno::ISDIR) => self.remove_tree(name).map(|()| true),
            other => other,
        }
    }

    /// Takes the immutable flag off a regular file; answers `why` if it has none or may not be.
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

/// Zeros become a hole by so many bytes at once, which begin at a multiple of that: the largest page or block of most
/// systems. Shorter holes would cost more in the file system's tables than they save.
const HOLE: usize = 64 << 10;

/// Whether these bytes are all zeros. Bytes of files mostly are not from the first on, which costs nothing.
fn is_zeros(bytes: &[u8]) -> bool {
    bytes.chunks(256).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

/// A file that is being written for the first time.
#[derive(Debug)]
pub(crate) struct NewFile {
    fd: OwnedFd,
    path: PathBuf,
    length: u64,
    trace: Trace,
    room: Option<Room>,
}

impl NewFile {
    /// Adds bytes at the end. Runs of zeros take no room on the disk.
    pub(crate) fn write_all(&mut self, bytes: &[u8]) -> Result<(), DiskError> {
        let failed = |errno: Errno| DiskError {
            action: "write",
            path: self.path.clone(),
            source: errno.into(),
        };
        self.trace.allow().map_err(failed)?;
        if let Some(room) = &self.room {
            room.take(bytes.len() as u64).map_err(|source| DiskError {
                action: "write",
                path: self.path.clone(),
                source,
            })?;
        }
        // What is not written yet, and where that gets.
        let (mut data, mut rest, mut at) = (bytes, bytes, self.length);
        let mut start = at;
        let mut ends_with_hole = false;
        while !rest.is_empty() {
            let over = usize::try_from(at % HOLE as u64).unwrap_or(0);
            let (piece, after) = rest.split_at(rest.len().min(HOLE - over));
            ends_with_hole = piece.len() == HOLE && is_zeros(piece);
            if ends_with_hole {
                let before = data.len() - rest.len();
                write_at(&self.fd, &data[..before], start).map_err(failed)?;
                data = after;
                start = at + HOLE as u64;
            }
            (rest, at) = (after, at + piece.len() as u64);
        }
        write_at(&self.fd, data, start).map_err(failed)?;
        if ends_with_hole {
            rustix::fs::ftruncate(&self.fd, at).map_err(failed)?;
        }
        self.length = at;
        self.trace.record(|| Change::Write(self.path.clone(), bytes.to_vec()));
        Ok(())
    }

    /// Adds so many zeros at the end, which take no room on the disk.
    pub(crate) fn add_hole(&mut self, count: u64) -> Result<(), DiskError> {
        let failed = |errno: Errno| DiskError {
            action: "lengthen",
            path: self.path.clone(),
            source: errno.into(),
        };
        self.trace.allow().map_err(failed)?;
        let length = self.length.checked_add(count).ok_or(Errno::FBIG).map_err(failed)?;
        rustix::fs::ftruncate(&self.fd, length).map_err(failed)?;
        self.length = length;
        self.trace.record(|| Change::Lengthen(self.path.clone(), length));
        Ok(())
    }

    /// Makes this empty file share all blocks of another. Returns its length in bytes, or `None` if the file systems
    /// cannot do that. Tests that record changes get `None`.
    pub(crate) fn share_blocks_of(
        &mut self,
        other: &std::fs::File,
    ) -> Result<Option<u64>, DiskError> {
        let failed = |errno: Errno| DiskError {
            action: "copy a file to",
            path: self.path.clone(),
            source: errno.into(),
        };
        if self.trace.is_on() {
            return Ok(None);
        }
        match rustix::fs::ioctl_ficlone(&self.fd, other) {
            Ok(()) => {}
            // Not this file system, not this pair of files, or not with these settings: it has to be copied.
            Err(
                Errno::OPNOTSUPP
                | Errno::NOTTY
                | Errno::XDEV
                | Errno::INVAL
                | Errno::NOSYS
                | Errno::PERM
                | Errno::TXTBSY
                | Errno::BADF,
            ) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        }
        self.length = length(&rustix::fs::fstat(&self.fd).map_err(failed)?);
        Ok(Some(self.length))
    }

    /// Gives the file exactly mode 0444, whatever the umask took away. Answers whether it took
    /// anything.
    pub(crate) fn publish_mode(&self) -> Result<bool, DiskError> {
        let failed = |action, errno: Errno| DiskError {
            action,
            path: self.path.clone(),
            source: errno.into(),
        };
        let stat = rustix::fs::fstat(&self.fd).map_err(|errno| failed("stat", errno))?;
        if Mode::from_raw_mode(stat.st_mode) == PUBLISHED {
            return Ok(false);
        }
        rustix::fs::fchmod(&self.fd, PUBLISHED).map_err(|errno| failed("chmod", errno))?;
        Ok(true)
    }
}

fn write_at(fd: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, at) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                bytes = bytes.get(written..).unwrap_or_default();
                at += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// A file's length in bytes.
pub(crate) fn length(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// Bytes that a file takes on the disk.
pub(crate) fn on_disk(stat: &Stat) -> u64 {
    // POSIX leaves the unit open; on Linux it is 512 bytes whatever the file system.
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}
