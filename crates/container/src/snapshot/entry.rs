//! Copies single files and the metadata of directories.
//!
//! The source may belong to a running container, which can replace any name at any time. So a name is opened once,
//! with `O_PATH`, which follows no symbolic link and has no effect on FIFOs and devices. Everything else uses that
//! descriptor.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RawDir, ResolveFlags, Statx, StatxTimestamp, Timespec,
    Timestamps, Uid, XattrFlags, chmodat, chownat, fchmod, fchown, futimens, makedev, mkdirat,
    mknodat, openat, openat2, symlinkat, utimensat,
};
use rustix::io::Errno;

use super::content::{ByteCopier, CopyStop};
use super::stamp::kind;

/// Flags of all directories that are opened.
pub(super) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A name never leads to another directory or file system. (`BENEATH` would not allow more, but fails if a program
/// renames the file during the call.)
const INSIDE: ResolveFlags = ResolveFlags::NO_SYMLINKS.union(ResolveFlags::NO_XDEV);

/// Maximum length of a list of xattr names, and of a value, in bytes. Source: Linux `XATTR_LIST_MAX`,
/// `XATTR_SIZE_MAX`.
const XATTR_MAX: usize = 65536;

/// Overlayfs's identification of the file systems of its layers, which are others for a copy.
const UUIDS: [&[u8]; 2] = [b"trusted.overlay.uuid", b"user.overlay.uuid"];

/// The xattr that makes new files of a directory inherit an ACL.
const DEFAULT_ACL: &CStr = c"system.posix_acl_default";

/// A name that no file can have as an xattr, because it is in no namespace.
const NO_XATTR: &CStr = c"quire.none";

/// Opens a name of a directory, without any effect on the file.
pub(super) fn hold(directory: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(directory, name, flags, Mode::empty(), INSIDE)
}

/// Opens the directory behind an `O_PATH` descriptor.
pub(super) fn open_directory(held: impl AsFd) -> Result<OwnedFd, Errno> {
    openat(held, c".", DIRECTORY, Mode::empty())
}

/// Opens a subdirectory.
pub(super) fn open_below(directory: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    openat2(directory, name, DIRECTORY, Mode::empty(), INSIDE)
}

/// Opens the parent of a directory.
pub(super) fn parent(directory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    openat(directory, c"..", DIRECTORY, Mode::empty())
}

/// Opens the regular file behind an `O_PATH` descriptor, if possible without a change of its access time.
pub(super) fn open_data(held: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
    let path = by_number(held.as_fd());
    match rustix::fs::open(&*path, flags | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => rustix::fs::open(&*path, flags, Mode::empty()),
        opened => opened,
    }
}

fn by_number(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Calls `each` with each name in a directory, except `.` and `..`.
pub(super) fn list<E>(
    directory: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    failed: impl Fn(Errno) -> E,
    mut each: impl FnMut(&CStr) -> Result<(), E>,
) -> Result<(), E> {
    /// Size of the buffer, in bytes.
    const LISTING: usize = 64 << 10;
    buffer.clear();
    buffer.reserve(LISTING);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = match entry {
            // The directory was removed.
            Err(Errno::NOENT) => break,
            entry => entry.map_err(&failed)?,
        };
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            each(entry.file_name())?;
        }
    }
    Ok(())
}

/// Removes a directory's default ACL, so that files that are created in it inherit nothing.
pub(super) fn inherit_nothing(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    match rustix::fs::fremovexattr(directory, DEFAULT_ACL) {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// A name in a directory of the copy.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) directory: BorrowedFd<'a>,
    pub(super) name: &'a CStr,
}

/// Whether other processes may write to a file while it is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writers {
    /// The first copy, of a running container.
    Run,
    /// The second copy, of a frozen container, or the copy of a layer that nothing writes to.
    Rest,
}

/// State of those xattrs of the copy that the source does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stale {
    /// The copy is new, so it has none.
    None,
    /// They are removed.
    Removed,
}

/// Names and values of xattrs.
pub(super) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// File of which xattrs are read.
#[derive(Debug, Clone, Copy)]
pub(super) enum Bearer<'a> {
    Open(BorrowedFd<'a>),
    /// An `O_PATH` descriptor, for which the kernel has no calls with descriptors.
    Held(BorrowedFd<'a>),
}

/// The xattrs that copies get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum XattrChoice {
    /// All that mean the same for a copy.
    All,
    /// Those of an image's files that mean something outside of its layers. Others are labels, for which the host's
    /// policy decides, and notes of file systems and administrators (`trusted.`), which a hostile image must not write.
    /// Source: buildah, `copier/xattrs.go`, `xattrsToListxattr`.
    OfImage,
}

impl XattrChoice {
    fn has(self, name: &[u8]) -> bool {
        match self {
            Self::All => !UUIDS.contains(&name),
            Self::OfImage => {
                name == b"security.capability"
                    || (name.starts_with(b"user.") && !name.starts_with(b"user.overlay."))
            }
        }
    }
}

/// Copies files.
#[derive(Debug)]
pub(super) struct Copier<'a> {
    pub(super) content: ByteCopier<'a>,
    pub(super) choice: XattrChoice,
    names: Vec<u8>,
    value: Vec<u8>,
}

impl<'a> Copier<'a> {
    pub(super) fn new(content: ByteCopier<'a>) -> Self {
        Self { content, choice: XattrChoice::All, names: Vec::new(), value: Vec::new() }
    }

    /// Copies a file that is not a directory. `stat` was read before.
    pub(super) fn file(
        &mut self,
        held: &OwnedFd,
        stat: &Statx,
        to: Place<'_>,
        writers: Writers,
    ) -> Result<(), CopyStop> {
        self.content.take_room(0)?;
        match kind(stat) {
            FileType::RegularFile => self.regular(held, stat, to, writers),
            kind => self.special(held, stat, kind, to),
        }
    }

    fn regular(
        &mut self,
        held: &OwnedFd,
        stat: &Statx,
        to: Place<'_>,
        writers: Writers,
    ) -> Result<(), CopyStop> {
        let from = open_data(held).map_err(CopyStop::at("open"))?;
        if writers == Writers::Run {
            settle(from.as_fd()).map_err(CopyStop::at("write back"))?;
        }
        let copy = create(to).map_err(CopyStop::at("create the copy of"))?;
        let is_whole = self.data(from.as_fd(), copy.as_fd(), stat)?;
        if !is_whole && writers == Writers::Rest {
            return Err(CopyStop::Changed);
        }
        self.metadata(from.as_fd(), copy.as_fd(), stat, Stale::None)
    }

    /// Makes a directory of the copy, whose metadata is set later.
    pub(super) fn directory(&self, to: Place<'_>) -> Result<(), CopyStop> {
        self.content.take_room(0)?;
        mkdirat(to.directory, to.name, Mode::RWXU).map_err(CopyStop::at("create the copy of"))
    }

    /// Copies the bytes of a file into an empty file.
    pub(super) fn data(
        &mut self,
        from: BorrowedFd<'_>,
        copy: BorrowedFd<'_>,
        stat: &Statx,
    ) -> Result<bool, CopyStop> {
        /// Unit of `stx_blocks`, in bytes. Source: statx(2).
        const BLOCK: u64 = 512;
        let is_dense = stat.stx_blocks.saturating_mul(BLOCK) >= stat.stx_size;
        self.content.copy(from, copy, stat.stx_size, is_dense)
    }

    /// Whether the copy of a regular file has its data.
    pub(super) fn is_equal(
        &mut self,
        held: &OwnedFd,
        stat: &Statx,
        copy: Place<'_>,
    ) -> Result<bool, CopyStop> {
        let from = open_data(held).map_err(CopyStop::at("open"))?;
        let copy = openat(
            copy.directory,
            copy.name,
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let copy = copy.map_err(CopyStop::at("open the copy of"))?;
        self.content.is_equal(from.as_fd(), copy.as_fd(), stat.stx_size)
    }

    fn special(
        &mut self,
        held: &OwnedFd,
        stat: &Statx,
        kind: FileType,
        to: Place<'_>,
    ) -> Result<(), CopyStop> {
        let Place { directory, name } = to;
        let failed = CopyStop::at("create the copy of");
        if kind == FileType::Symlink {
            let target = rustix::fs::readlinkat(held, c"", Vec::new());
            let target = target.map_err(CopyStop::at("read the symbolic link"))?;
            symlinkat(&*target, directory, name).map_err(failed)?;
        } else {
            let number = makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
            mknodat(directory, name, kind, Mode::RUSR, number).map_err(failed)?;
        }
        let (user, group) = owner(stat);
        chownat(directory, name, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(CopyStop::at("set the owner of the copy of"))?;
        let xattrs = self.xattrs(Bearer::Held(held.as_fd()))?;
        if !xattrs.is_empty() {
            // A path is the only way to set an xattr of a symbolic link.
            let path = [by_number(directory).as_bytes(), b"/", name.to_bytes()].concat();
            for (name, value) in &xattrs {
                rustix::fs::lsetxattr(&*path, &**name, value, XattrFlags::empty())
                    .map_err(CopyStop::at("set an xattr of the copy of"))?;
            }
        }
        if kind != FileType::Symlink {
            chmodat(directory, name, mode(stat), AtFlags::empty())
                .map_err(CopyStop::at("set the mode of the copy of"))?;
        }
        utimensat(directory, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(CopyStop::at("set the times of the copy of"))
    }

    /// Gives a copy the owner, the xattrs, the mode and the times of its source. Both are regular files or both are
    /// directories.
    pub(super) fn metadata(
        &mut self,
        from: BorrowedFd<'_>,
        copy: BorrowedFd<'_>,
        stat: &Statx,
        stale: Stale,
    ) -> Result<(), CopyStop> {
        let xattrs = self.xattrs(Bearer::Open(from))?;
        self.apply(copy, stat, &xattrs, stale)
    }

    /// Gives a regular file or a directory the owner, the mode and the times in `stat`, and these xattrs.
    pub(super) fn apply(
        &mut self,
        copy: BorrowedFd<'_>,
        stat: &Statx,
        xattrs: &Xattrs,
        stale: Stale,
    ) -> Result<(), CopyStop> {
        let (user, group) = owner(stat);
        // The next steps follow in this order because a new owner takes away the bits for setuid and capabilities, and
        // an ACL changes the mode.
        fchown(copy, Some(user), Some(group))
            .map_err(CopyStop::at("set the owner of the copy of"))?;
        if stale == Stale::Removed {
            for (name, _) in self.xattrs(Bearer::Open(copy))? {
                // Security modules set xattrs that no process can remove.
                if !name.starts_with(b"security.") && xattrs.iter().all(|it| it.0 != name) {
                    rustix::fs::fremovexattr(copy, &*name)
                        .map_err(CopyStop::at("remove an xattr of the copy of"))?;
                }
            }
        }
        for (name, value) in xattrs {
            rustix::fs::fsetxattr(copy, &**name, value, XattrFlags::empty())
                .map_err(CopyStop::at("set an xattr of the copy of"))?;
        }
        fchmod(copy, mode(stat)).map_err(CopyStop::at("set the mode of the copy of"))?;
        futimens(copy, &times(stat)).map_err(CopyStop::at("set the times of the copy of"))
    }

    /// Returns the xattrs that a copy has.
    pub(super) fn xattrs(&mut self, file: Bearer<'_>) -> Result<Xattrs, CopyStop> {
        let path = match file {
            Bearer::Open(_) => String::new(),
            Bearer::Held(held) => by_number(held),
        };
        self.names.clear();
        self.names.reserve(XATTR_MAX);
        let names = spare_capacity(&mut self.names);
        let listed = match file {
            Bearer::Open(file) => rustix::fs::flistxattr(file, names),
            Bearer::Held(_) => rustix::fs::listxattr(&*path, names),
        };
        match listed {
            Ok(0) => return Ok(Xattrs::new()),
            Ok(_) => {}
            // The file system does not support xattrs.
            Err(Errno::NOTSUP) => return Ok(Xattrs::new()),
            Err(errno) => return Err(CopyStop::Kernel("list the xattrs of", errno)),
        }
        let mut xattrs = Xattrs::new();
        for name in self.names.split(|byte| *byte == 0) {
            if name.is_empty() || !self.choice.has(name) {
                continue;
            }
            self.value.clear();
            self.value.reserve(XATTR_MAX);
            let value = spare_capacity(&mut self.value);
            let read = match file {
                Bearer::Open(file) => rustix::fs::fgetxattr(file, name, value),
                Bearer::Held(_) => rustix::fs::getxattr(&*path, name, value),
            };
            match read {
                Ok(_) => xattrs.push((name.to_vec(), self.value.clone())),
                // The xattr was removed just now.
                Err(Errno::NODATA) => {}
                Err(errno) => return Err(CopyStop::Kernel("read an xattr of", errno)),
            }
        }
        Ok(xattrs)
    }
}

/// Creates an empty file for a copy.
pub(super) fn create(to: Place<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(to.directory, to.name, flags, Mode::RUSR | Mode::WUSR)
}

/// Makes all changes of a file after this call change its `ctime`, except those of direct I/O that is in progress.
///
/// A write changes the `ctime` at its start, so a write in progress could change bytes after this call without a
/// trace. Writes hold the lock of the inode, and removing an xattr takes it, even if the file cannot have the xattr.
/// A store through a shared mapping changes the `ctime` only if the page is clean.
pub(super) fn settle(file: BorrowedFd<'_>) -> Result<(), Errno> {
    let _no_such_xattr = rustix::fs::fremovexattr(file, NO_XATTR);
    kernel::files::write_back(file)
}

fn owner(stat: &Statx) -> (Uid, Gid) {
    (Uid::from_raw(stat.stx_uid), Gid::from_raw(stat.stx_gid))
}

fn mode(stat: &Statx) -> Mode {
    Mode::from_raw_mode((stat.stx_mode & 0o7777).into())
}

fn times(stat: &Statx) -> Timestamps {
    let time =
        |from: &StatxTimestamp| Timespec { tv_sec: from.tv_sec, tv_nsec: from.tv_nsec.into() };
    Timestamps { last_access: time(&stat.stx_atime), last_modification: time(&stat.stx_mtime) }
}
