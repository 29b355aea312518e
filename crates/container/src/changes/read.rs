//! Reads files of an untrusted upper layer.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};

use image::tree::{Metadata, Timestamp};
use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use super::ids::{Owners, Unmapped};
use super::marks::Pairs;

/// Maximum length of a list of xattr names, and of a value, in bytes. Source: Linux `XATTR_LIST_MAX`,
/// `XATTR_SIZE_MAX`.
const XATTR_MAX: usize = 65536;

pub(super) fn stat(file: impl AsFd) -> Result<Statx, Errno> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

pub(super) fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// Whether the file is a whiteout device. Source: Linux `include/linux/fs.h`, `WHITEOUT_DEV`.
pub(super) fn is_whiteout(stat: &Statx) -> bool {
    kind(stat) == FileType::CharacterDevice && (stat.stx_rdev_major, stat.stx_rdev_minor) == (0, 0)
}

pub(super) fn metadata(stat: &Statx, ids: &Owners) -> Result<Metadata, Unmapped> {
    Ok(Metadata {
        permissions: stat.stx_mode & 0o7777,
        uid: ids.user(stat.stx_uid)?,
        gid: ids.group(stat.stx_gid)?,
        mtime: Timestamp { seconds: stat.stx_mtime.tv_sec, nanoseconds: stat.stx_mtime.tv_nsec },
    })
}

/// Returns an `O_PATH` descriptor of a file of any type, so that FIFOs and devices do not notice.
pub(super) fn hold(directory: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

/// Opens the file of an `O_PATH` descriptor, which must be a regular file or a directory.
pub(super) fn open(held: &OwnedFd, kind: FileType) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    match kind {
        FileType::Directory => {
            rustix::fs::openat(held, c".", flags | OFlags::DIRECTORY, Mode::empty())
        }
        // The path through /proc refers to exactly this file, even if its name now belongs to another file.
        _ => rustix::fs::open(by_number(held.as_fd()), flags, Mode::empty()),
    }
}

/// Opens the parent directory.
pub(super) fn above(directory: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(directory, c"..", flags, Mode::empty())
}

/// Returns the names in a directory in byte order, with the file types that the directory reports.
pub(super) fn list(directory: &OwnedFd) -> Result<Vec<(std::ffi::CString, FileType)>, Errno> {
    let mut names = Vec::new();
    let mut listing = Dir::read_from(directory)?;
    while let Some(entry) = listing.read() {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push((entry.file_name().to_owned(), entry.file_type()));
        }
    }
    names.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    Ok(names)
}

/// Returns all xattrs. Reads them by the descriptor's path in `/proc`, because the kernel reads none by an `O_PATH`
/// descriptor.
pub(super) fn xattrs(held: BorrowedFd<'_>) -> io::Result<Pairs> {
    let path = by_number(held);
    let mut list: Vec<u8> = Vec::with_capacity(XATTR_MAX);
    match rustix::fs::listxattr(&*path, spare_capacity(&mut list)) {
        Ok(_) => {}
        // The file system does not support xattrs.
        Err(Errno::NOTSUP) => return Ok(Pairs::new()),
        Err(errno) => return Err(errno.into()),
    }
    let mut pairs = Pairs::new();
    for name in list.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value: Vec<u8> = Vec::with_capacity(XATTR_MAX);
        rustix::fs::getxattr(&*path, name, spare_capacity(&mut value))?;
        value.shrink_to_fit();
        pairs.push((name.to_vec(), value));
    }
    Ok(pairs)
}

fn by_number(held: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", held.as_raw_fd())
}
