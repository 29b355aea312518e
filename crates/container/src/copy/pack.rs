//! Writes a file, or a directory with everything in it, as a tar.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use image::tar::Kind;
use image::tar::write::{Member, TarWriteError, Writer};
use image::tree::{Metadata, Timestamp};
use rustix::fs::{FileType, Mode, OFlags, RawDir, Statx, openat};
use rustix::io::Errno;

use super::find::join;
use super::{
    CopyError, DEPTH_MAX, DIRECTORY, HOLD, KERNELS, Skipped, TOO_DEEP, is_kernels, reopen, special,
    stat,
};
use crate::changes::Owners;

/// Size of a read of a file, in bytes.
const PIECE: usize = 256 << 10;

/// Size of the buffer for a directory's names, in bytes.
const LISTING: usize = 32 << 10;

/// Maximum size of the names of all open directories in memory, in bytes, with [`NAME_COST`] for each name.
const NAMES_MAX: usize = 256 << 20;

/// Approximate memory for each name in addition to its bytes.
const NAME_COST: usize = 48;

/// Maximum size of the remembered paths of files with several names, in bytes, with [`NAME_COST`] for each. Further
/// such files become separate ones.
const LINKED_MAX: usize = 256 << 20;

/// The owner of files whose owner is not in the container's map, as the kernel shows it. Source: Linux
/// `include/linux/highuid.h`, `DEFAULT_OVERFLOWUID`.
const NOBODY: u32 = 65_534;

/// Writes the tar of `file`, which was opened with `O_PATH`, as the member `name`. With an empty name, only the
/// contents of a directory are written. `owners` maps the owners to those of the container.
///
/// # Errors
/// [`CopyError`]; the tar in `out` is incomplete then.
pub fn pack(
    file: &OwnedFd,
    name: &[u8],
    owners: &Owners,
    out: &mut dyn Write,
) -> Result<Skipped, CopyError> {
    let mut packer = Packer {
        out: Writer::new(out),
        owners,
        linked: HashMap::new(),
        linked_size: 0,
        names_size: 0,
        skipped: Skipped::default(),
        buffer: vec![0; PIECE],
    };
    let found = stat(file).map_err(CopyError::io("examine", name))?;
    if is_kernels(file).map_err(CopyError::io("examine", name))? {
        return Err(CopyError::refused(name, KERNELS));
    }
    let kind = super::kind(&found);
    if !matches!(
        kind,
        FileType::Directory | FileType::RegularFile | FileType::Symlink | FileType::Fifo
    ) {
        return Err(CopyError::refused(name, special(kind)));
    }
    packer.entry(file, &found, name, 0)?;
    let Packer { out, skipped, .. } = packer;
    out.finish()?;
    Ok(skipped)
}

struct Packer<'a, 'w> {
    out: Writer<&'w mut dyn Write>,
    owners: &'a Owners,
    /// Paths of the first names of files with several names, by device and inode.
    linked: HashMap<(u32, u32, u64), Vec<u8>>,
    /// Size of these paths.
    linked_size: usize,
    /// Size of the names of all open directories.
    names_size: usize,
    skipped: Skipped,
    buffer: Vec<u8>,
}

impl Packer<'_, '_> {
    fn entry(
        &mut self,
        held: &OwnedFd,
        found: &Statx,
        path: &[u8],
        depth: usize,
    ) -> Result<(), CopyError> {
        match super::kind(found) {
            FileType::Directory => self.directory(held, found, path, depth),
            FileType::RegularFile => self.regular(held, found, path),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(held, c"", Vec::new());
                let target = target.map_err(CopyError::io("read the link", path))?.into_bytes();
                self.member(found, path, Kind::Symlink(&target), 0)
            }
            FileType::Fifo => self.member(found, path, Kind::Fifo, 0),
            kind => {
                self.skipped.add(path, special(kind));
                Ok(())
            }
        }
    }

    fn directory(
        &mut self,
        held: &OwnedFd,
        found: &Statx,
        path: &[u8],
        depth: usize,
    ) -> Result<(), CopyError> {
        if depth >= DEPTH_MAX {
            return Err(CopyError::refused(path, TOO_DEEP));
        }
        if !path.is_empty() {
            self.member(found, path, Kind::Directory, 0)?;
        }
        let directory = openat(held, c".", DIRECTORY, Mode::empty());
        let directory = directory.map_err(CopyError::io("open", path))?;
        let room = NAMES_MAX.saturating_sub(self.names_size);
        let (names, size) = names(directory.as_fd(), room).map_err(CopyError::io("list", path))?;
        self.names_size += size;
        for name in names {
            let path = join(path, name.as_bytes());
            let child = match openat(&directory, &*name, HOLD, Mode::empty()) {
                Ok(child) => child,
                // A program has removed it.
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(CopyError::io("open", &path)(errno)),
            };
            let examined = CopyError::io("examine", &path);
            let inner = stat(&child).map_err(&examined)?;
            let is_same = (inner.stx_dev_major, inner.stx_dev_minor)
                == (found.stx_dev_major, found.stx_dev_minor);
            // Another device is a mount, which may be one of the kernel.
            if !is_same && is_kernels(&child).map_err(&examined)? {
                self.skipped.add(&path, KERNELS);
                continue;
            }
            self.entry(&child, &inner, &path, depth + 1)?;
        }
        self.names_size -= size;
        Ok(())
    }

    fn regular(&mut self, held: &OwnedFd, found: &Statx, path: &[u8]) -> Result<(), CopyError> {
        if found.stx_nlink > 1 {
            let key = (found.stx_dev_major, found.stx_dev_minor, found.stx_ino);
            if let Some(first) = self.linked.get(&key).cloned() {
                return self.member(found, path, Kind::Hardlink(&first), 0);
            }
            let size = self.linked_size + path.len() + NAME_COST;
            if size <= LINKED_MAX {
                self.linked_size = size;
                self.linked.insert(key, path.to_vec());
            }
        }
        let opened = CopyError::io("open", path);
        let file = match reopen(held.as_fd(), OFlags::RDONLY | OFlags::NOATIME) {
            // Only the owner may read without changing the time of the access.
            Err(Errno::PERM) => reopen(held.as_fd(), OFlags::RDONLY),
            file => file,
        };
        let mut file = File::from(file.map_err(opened)?);
        self.member(found, path, Kind::Regular, found.stx_size)?;
        let mut left = found.stx_size;
        while left > 0 {
            let most = usize::try_from(left).map_or(PIECE, |it| it.min(PIECE));
            let part = self.buffer.get_mut(..most).unwrap_or_default();
            let count = match file.read(part) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                    return Err(CopyError::io("read", path)(errno));
                }
            };
            if count == 0 {
                return Err(CopyError::refused(path, "it became shorter while it was read"));
            }
            self.out.content(part.get(..count).unwrap_or_default())?;
            left = left.saturating_sub(count as u64);
        }
        Ok(())
    }

    fn member(
        &mut self,
        found: &Statx,
        path: &[u8],
        kind: Kind<'_>,
        size: u64,
    ) -> Result<(), CopyError> {
        let permissions = found.stx_mode & 0o7777;
        let metadata = Metadata {
            permissions,
            uid: self.owners.user(found.stx_uid).unwrap_or(NOBODY),
            gid: self.owners.group(found.stx_gid).unwrap_or(NOBODY),
            mtime: Timestamp {
                seconds: found.stx_mtime.tv_sec,
                nanoseconds: found.stx_mtime.tv_nsec,
            },
        };
        let member = Member { path, kind, metadata, size, xattrs: &[] };
        match self.out.member(&member) {
            // A time that a tar cannot store is set by the container.
            Err(TarWriteError::Time { .. }) => {
                let mtime = Timestamp { seconds: 0, nanoseconds: 0 };
                let metadata = Metadata { mtime, ..metadata };
                Ok(self.out.member(&Member { metadata, ..member })?)
            }
            written => Ok(written?),
        }
    }
}

/// Returns the names in a directory, each once and in order, and their size. A container may show a name several times
/// while it renames files. More than `room` bytes of names are an error.
fn names(directory: BorrowedFd<'_>, room: usize) -> Result<(Vec<CString>, usize), Errno> {
    let mut buffer = Vec::with_capacity(LISTING);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    let (mut names, mut size) = (Vec::new(), 0_usize);
    while let Some(entry) = entries.next() {
        let entry = match entry {
            // The directory was removed.
            Err(Errno::NOENT) => break,
            entry => entry?,
        };
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            size = size.saturating_add(entry.file_name().count_bytes() + NAME_COST);
            if size > room {
                return Err(Errno::TOOBIG);
            }
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort_unstable();
    names.dedup();
    Ok((names, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packs a directory after some of the memory for names and paths was used.
    fn pack_after(
        directory: &std::path::Path,
        names_size: usize,
        linked_size: usize,
    ) -> Result<Vec<u8>, CopyError> {
        let mut bytes = Vec::new();
        let held = rustix::fs::open(directory, HOLD, Mode::empty()).unwrap();
        let mut packer = Packer {
            out: Writer::new(&mut bytes),
            owners: &Owners::default(),
            linked: HashMap::new(),
            linked_size,
            names_size,
            skipped: Skipped::default(),
            buffer: vec![0; PIECE],
        };
        let found = stat(&held).unwrap();
        packer.entry(&held, &found, b"", 0)?;
        assert_eq!(packer.names_size, names_size, "the names are no longer in memory");
        packer.out.finish()?;
        Ok(bytes)
    }

    #[test]
    fn names_of_a_hostile_tree_take_limited_memory() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("abcd/efgh")).unwrap();
        // Both directories are open at once.
        let cost = 2 * (4 + NAME_COST);
        pack_after(folder.path(), NAMES_MAX - cost, 0).unwrap();
        let error = pack_after(folder.path(), NAMES_MAX - cost + 1, 0).unwrap_err();
        let CopyError::Io { action: "list", path, source: Errno::TOOBIG } = &error else {
            panic!("{error:?}");
        };
        assert_eq!(path, b"abcd");
    }

    #[test]
    fn remembered_links_take_limited_memory() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), "text").unwrap();
        std::fs::hard_link(folder.path().join("a"), folder.path().join("b")).unwrap();
        let kinds = |bytes: &[u8]| {
            let mut reader = image::tar::Reader::new(bytes);
            let mut links = Vec::new();
            while let Some(entry) = reader.next_entry().unwrap() {
                links.push(matches!(entry.kind, Kind::Hardlink(b"a")));
            }
            links
        };
        let cost = 1 + NAME_COST;
        assert_eq!(kinds(&pack_after(folder.path(), 0, LINKED_MAX - cost).unwrap()), [false, true]);
        let bytes = pack_after(folder.path(), 0, LINKED_MAX - cost + 1).unwrap();
        assert_eq!(kinds(&bytes), [false, false]);
    }
}
