//! Creates the files of a tar below a directory.

use std::io::Read;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use image::tar::{Chunk, Content, Entry, Kind, Reader, TarError};
use image::tree::{Metadata, Timestamp};
use kernel::files::{NameOutcome, link, open_resolved, write_all};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, StatxAttributes, Timespec, Timestamps, Uid,
    chownat, fchmod, fchown, ftruncate, futimens, mkdirat, mknodat, openat, symlinkat, unlinkat,
    utimensat,
};
use rustix::io::Errno;

use super::find::{INSIDE, join};
use super::{
    CopyError, DEPTH_MAX, DIRECTORY, HOLD, KERNELS, Skipped, TOO_DEEP, by_number, is_kernels, kind,
    reopen, special, stat,
};
use crate::bundle::userns::IdMap;

/// How often to try to create a file whose name another process takes again and again.
const TRIES: usize = 16;

/// How to treat links in the path of a directory below the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkHandling {
    /// Links lead to other directories inside the root, as for the programs of a container.
    Inside,
    /// A link is an error, because the tar may have made it.
    Refused,
}

/// Owner of the new files.
#[derive(Debug, Clone, Copy)]
pub enum NewOwner<'a> {
    /// The user of this process.
    Caller,
    /// This user and group, as ids of this process's user namespace.
    One(u32, u32),
    /// The owner in the tar, an id of the container. The map leads to the ids of the host; `None` if they are the same.
    OfTar(Option<&'a IdMap>),
}

/// Where the files of a tar are created.
#[derive(Debug, Clone)]
pub struct Destination<'a> {
    /// Directory that no path leaves.
    pub root: BorrowedFd<'a>,
    /// Path of the directory for the files, inside the root; empty for the root itself.
    pub directory: Vec<u8>,
    pub links: LinkHandling,
    pub owner: NewOwner<'a>,
    /// Whether files keep their set-user-id and set-group-id bits.
    pub keeps_set_ids: bool,
    /// Whether the file to replace is the source of a container's mount, so it is overwritten as a mounted file.
    pub is_mounted_file: bool,
}

impl Destination<'_> {
    /// Opens a path below the directory for the files.
    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let whole = join(&self.directory, path);
        let whole = if whole.is_empty() { &b"."[..] } else { whole.as_slice() };
        match self.links {
            LinkHandling::Inside => open_resolved(self.root, whole, flags, INSIDE),
            LinkHandling::Refused => {
                let resolve =
                    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
                open_resolved(self.root, whole, flags, resolve)
            }
        }
    }
}

/// Creates the files of the tar `source`. A file replaces another one of its name, but not a directory. `look` is called
/// often, for work that must not wait for the end.
///
/// # Errors
/// [`CopyError`]; some of the files exist then.
pub fn unpack(
    source: impl Read,
    to: &Destination<'_>,
    look: &dyn Fn(),
) -> Result<Skipped, CopyError> {
    let opened = CopyError::io("open", &to.directory);
    let directory = to.open(b"", DIRECTORY).map_err(&opened)?;
    if is_kernels(&directory).map_err(opened)? {
        return Err(CopyError::refused(&to.directory, KERNELS));
    }
    let first = Level { path: Vec::new(), directory, fate: None };
    let mut unpacker =
        Unpacker { to, look, first, levels: Vec::new(), skipped: Skipped::default() };
    let made = unpacker.all(&mut Reader::new(source));
    // Also after an error, directories get their modes.
    let left = unpacker.leave(0);
    made.and(left)?;
    Ok(unpacker.skipped)
}

/// A directory to which files are added.
struct Level {
    /// Path in the tar; empty for the destination.
    path: Vec<u8>,
    directory: OwnedFd,
    /// Mode and time that a new directory gets after its files. `None` for a directory that existed.
    fate: Option<Fate>,
}

struct Fate {
    permissions: u16,
    /// `None` for a directory that the tar does not describe.
    mtime: Option<Timestamp>,
}

struct Unpacker<'a> {
    to: &'a Destination<'a>,
    look: &'a dyn Fn(),
    /// The destination.
    first: Level,
    /// The directories between the destination and the last entry, uppermost first.
    levels: Vec<Level>,
    skipped: Skipped,
}

impl Unpacker<'_> {
    fn all<R: Read>(&mut self, reader: &mut Reader<R>) -> Result<(), CopyError> {
        loop {
            match reader.next_entry() {
                Ok(Some(entry)) => self.entry(entry)?,
                Ok(None) => return Ok(()),
                Err(TarError::Unsupported { entry, .. }) => {
                    self.skipped.add(&entry, "its type is unknown");
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn entry<R: Read>(&mut self, mut entry: Entry<'_, R>) -> Result<(), CopyError> {
        (self.look)();
        let (path, metadata) = (entry.path, entry.metadata);
        let (parent, name) = match path.iter().rposition(|it| *it == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b""[..], path),
        };
        if name.is_empty() {
            // The root of the tar is the destination, which keeps its mode and owner.
            return Ok(());
        }
        self.go_to(parent)?;
        match entry.kind {
            Kind::Directory => self.descend(name, Some(metadata)),
            Kind::Regular => self.regular(path, name, metadata, &mut entry.content),
            Kind::Symlink(target) => self.symlink(path, name, metadata, target),
            Kind::Hardlink(target) => self.hard_link(path, name, target),
            Kind::Fifo => self.fifo(path, name, metadata),
            Kind::CharDevice(_) | Kind::BlockDevice(_) => {
                self.skipped.add(path, special(FileType::CharacterDevice));
                Ok(())
            }
        }
    }

    fn here(&self) -> &Level {
        self.levels.last().unwrap_or(&self.first)
    }

    /// Makes the directory with this path in the tar the current one.
    fn go_to(&mut self, path: &[u8]) -> Result<(), CopyError> {
        let is_above = |level: &Level| {
            let rest = path.strip_prefix(level.path.as_slice());
            rest.is_some_and(|it| it.is_empty() || it.starts_with(b"/"))
        };
        let kept = self.levels.iter().rposition(is_above).map_or(0, |at| at + 1);
        self.leave(kept)?;
        let done = self.here().path.len();
        let rest = path.get(done..).unwrap_or_default();
        for name in rest.split(|it| *it == b'/').filter(|it| !it.is_empty()) {
            self.descend(name, None)?;
        }
        Ok(())
    }

    /// Leaves all but the first `kept` directories.
    fn leave(&mut self, kept: usize) -> Result<(), CopyError> {
        while self.levels.len() > kept {
            let Some(Level { path, directory, fate }) = self.levels.pop() else { break };
            let Some(Fate { permissions, mtime }) = fate else { continue };
            fchmod(&directory, Mode::from_raw_mode(permissions.into()))
                .map_err(CopyError::io("set the mode of", &path))?;
            if let Some(mtime) = mtime {
                futimens(&directory, &times(mtime))
                    .map_err(CopyError::io("set the time of", &path))?;
            }
        }
        Ok(())
    }

    /// Enters a directory of the current one, and makes it if necessary.
    fn descend(&mut self, name: &[u8], metadata: Option<Metadata>) -> Result<(), CopyError> {
        let here = self.here();
        let path = join(&here.path, name);
        if self.levels.len() >= DEPTH_MAX {
            return Err(CopyError::refused(&path, TOO_DEEP));
        }
        let is_new = match mkdirat(&here.directory, name, Mode::RWXU) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return Err(CopyError::io("make the directory", &path)(errno)),
        };
        let opened = openat(&here.directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
        let opened = match opened {
            Err(Errno::NOTDIR | Errno::LOOP)
                if !is_new && self.to.links == LinkHandling::Inside =>
            {
                self.to.open(&path, DIRECTORY)
            }
            opened => opened,
        };
        let directory = match opened {
            Ok(directory) => directory,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let why = "the destination has another file in place of this directory";
                return Err(CopyError::refused(&path, why));
            }
            Err(errno) => return Err(CopyError::io("open", &path)(errno)),
        };
        let fate = if is_new {
            self.give(&directory, &path, metadata.unwrap_or(Metadata::IMPLICIT))?;
            let permissions = metadata.unwrap_or(Metadata::IMPLICIT).permissions;
            let permissions = self.permissions(permissions);
            Some(Fate { permissions, mtime: metadata.map(|it| it.mtime) })
        } else {
            if is_kernels(&directory).map_err(CopyError::io("examine", &path))? {
                return Err(CopyError::refused(&path, KERNELS));
            }
            None
        };
        self.levels.push(Level { path, directory, fate });
        Ok(())
    }

    fn regular<R: Read>(
        &self,
        path: &[u8],
        name: &[u8],
        metadata: Metadata,
        content: &mut Content<'_, R>,
    ) -> Result<(), CopyError> {
        let (file, is_new) = self.file(path, name)?;
        let mut length = 0_u64;
        while let Some(chunk) = content.chunk()? {
            (self.look)();
            match chunk {
                // A new file has zeros already, and a hole takes no space.
                Chunk::Data(bytes) if is_new && bytes.iter().all(|it| *it == 0) => {
                    length = length.saturating_add(bytes.len() as u64);
                }
                Chunk::Data(bytes) => {
                    write_all(file.as_fd(), bytes, length).map_err(CopyError::io("write", path))?;
                    length = length.saturating_add(bytes.len() as u64);
                }
                Chunk::Zeros(count) => length = length.saturating_add(count),
            }
        }
        ftruncate(&file, length).map_err(CopyError::io("set the size of", path))?;
        if !is_new {
            // A mounted file keeps its owner and its mode.
            return Ok(());
        }
        self.give(&file, path, metadata)?;
        // The mode follows the owner, because a new owner takes away the set-id bits.
        let mode = Mode::from_raw_mode(self.permissions(metadata.permissions).into());
        fchmod(&file, mode).map_err(CopyError::io("set the mode of", path))?;
        futimens(&file, &times(metadata.mtime)).map_err(CopyError::io("set the time of", path))
    }

    /// Opens an empty file for writing, and returns whether it is new. A new file replaces another one of the same name.
    /// A file that is mounted in a container, such as `/etc/hosts`, cannot be replaced, so it is overwritten.
    fn file(&self, path: &[u8], name: &[u8]) -> Result<(OwnedFd, bool), CopyError> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for _ in 0..TRIES {
            if let Some(mounted) = self.clear(path, name)? {
                let failed = CopyError::io("overwrite", path);
                let file = reopen(mounted.as_fd(), OFlags::WRONLY).map_err(&failed)?;
                ftruncate(&file, 0).map_err(failed)?;
                return Ok((file, false));
            }
            match openat(&self.here().directory, name, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => return Ok((file, true)),
                // A program has made the file just now.
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(CopyError::io("create", path)(errno)),
            }
        }
        Err(CopyError::io("create", path)(Errno::EXIST))
    }

    /// Removes the file with this name, if there is one. Returns a regular file that is mounted here instead of removing
    /// it.
    fn clear(&self, path: &[u8], name: &[u8]) -> Result<Option<OwnedFd>, CopyError> {
        let directory = &self.here().directory;
        let examined = CopyError::io("examine", path);
        let held = match openat(directory, name, HOLD, Mode::empty()) {
            Ok(held) => held,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(examined(errno)),
        };
        let found = stat(&held).map_err(&examined)?;
        let kind = kind(&found);
        if kind == FileType::Directory {
            return Err(CopyError::refused(path, "the destination has a directory of this name"));
        }
        let is_mounted = found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT);
        if is_mounted || self.to.is_mounted_file {
            if is_kernels(&held).map_err(examined)? {
                return Err(CopyError::refused(path, KERNELS));
            }
            return match kind {
                FileType::RegularFile => Ok(Some(held)),
                _ => Err(CopyError::refused(path, "the container has a device of this name")),
            };
        }
        match unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(CopyError::io("replace", path)(errno)),
        }
    }

    /// As [`clear`](Self::clear), for a file that cannot be written into a mounted one.
    fn make_room(&self, path: &[u8], name: &[u8]) -> Result<(), CopyError> {
        match self.clear(path, name)? {
            Some(_mounted) => Err(CopyError::refused(path, "a file is mounted here")),
            None => Ok(()),
        }
    }

    fn symlink(
        &self,
        path: &[u8],
        name: &[u8],
        metadata: Metadata,
        target: &[u8],
    ) -> Result<(), CopyError> {
        self.make_room(path, name)?;
        let directory = &self.here().directory;
        symlinkat(target, directory, name).map_err(CopyError::io("create", path))?;
        self.give_held(path, name, FileType::Symlink, metadata)?;
        utimensat(directory, name, &times(metadata.mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(CopyError::io("set the time of", path))
    }

    fn fifo(&self, path: &[u8], name: &[u8], metadata: Metadata) -> Result<(), CopyError> {
        self.make_room(path, name)?;
        let mode = Mode::RUSR | Mode::WUSR;
        mknodat(&self.here().directory, name, FileType::Fifo, mode, 0)
            .map_err(CopyError::io("create", path))?;
        let held = self.give_held(path, name, FileType::Fifo, metadata)?;
        let mode = Mode::from_raw_mode(self.permissions(metadata.permissions).into());
        rustix::fs::chmod(&*by_number(held.as_fd()), mode)
            .map_err(CopyError::io("set the mode of", path))
    }

    fn hard_link(&self, path: &[u8], name: &[u8], target: &[u8]) -> Result<(), CopyError> {
        let failed = CopyError::io("link", path);
        let held = self.to.open(target, HOLD).map_err(&failed)?;
        if kind(&stat(&held).map_err(&failed)?) != FileType::RegularFile {
            let why = "it is a hard link to a file that is not a regular one";
            return Err(CopyError::refused(path, why));
        }
        self.make_room(path, name)?;
        match link(held.as_fd(), self.here().directory.as_fd(), name).map_err(&failed)? {
            NameOutcome::Now => Ok(()),
            NameOutcome::Taken => Err(failed(Errno::EXIST)),
        }
    }

    fn permissions(&self, of_tar: u16) -> u16 {
        if self.to.keeps_set_ids { of_tar } else { of_tar & 0o1777 }
    }

    /// Returns the owner of a new file, if it is not this process's user.
    fn owner(&self, metadata: Metadata) -> Option<(Uid, Gid)> {
        let (user, group) = match self.to.owner {
            NewOwner::Caller => return None,
            NewOwner::One(user, group) => (user, group),
            NewOwner::OfTar(None) => (metadata.uid, metadata.gid),
            NewOwner::OfTar(Some(map)) => {
                let root = map.root().ok()?;
                // An id without a counterpart becomes root's.
                (
                    map.user(metadata.uid).unwrap_or(root.0),
                    map.group(metadata.gid).unwrap_or(root.1),
                )
            }
        };
        Some((Uid::from_raw(user), Gid::from_raw(group)))
    }

    /// Gives a new file its owner.
    fn give(&self, file: &OwnedFd, path: &[u8], metadata: Metadata) -> Result<(), CopyError> {
        let Some((user, group)) = self.owner(metadata) else { return Ok(()) };
        self.owned(path, fchown(file, Some(user), Some(group)))
    }

    /// Gives a new file its owner, if it is still of this type. Returns the file.
    fn give_held(
        &self,
        path: &[u8],
        name: &[u8],
        expected: FileType,
        metadata: Metadata,
    ) -> Result<OwnedFd, CopyError> {
        let failed = CopyError::io("examine", path);
        let held = openat(&self.here().directory, name, HOLD, Mode::empty()).map_err(&failed)?;
        if kind(&stat(&held).map_err(&failed)?) != expected {
            return Err(CopyError::refused(path, "a program has replaced it just now"));
        }
        if let Some((user, group)) = self.owner(metadata) {
            let given = chownat(&held, c"", Some(user), Some(group), AtFlags::EMPTY_PATH);
            self.owned(path, given)?;
        }
        Ok(held)
    }

    /// Handles the result of a change of an owner. A user cannot give a file to an id that its namespace lacks, or to
    /// another user of the host.
    fn owned(&self, path: &[u8], given: Result<(), Errno>) -> Result<(), CopyError> {
        match (given, self.to.owner) {
            (Ok(()), _) | (Err(Errno::INVAL | Errno::PERM), NewOwner::OfTar(_)) => Ok(()),
            (Err(errno), _) => Err(CopyError::io("set the owner of", path)(errno)),
        }
    }
}

fn times(mtime: Timestamp) -> Timestamps {
    let time = Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanoseconds.into() };
    Timestamps { last_access: time, last_modification: time }
}
