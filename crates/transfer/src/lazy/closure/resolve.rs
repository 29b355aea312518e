//! Finds and reads files of an image as a process whose root it is would.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom};

use image::erofs::read::{ByteOffset, FileType, Image, Inode, ReadAt, ReadError};

/// Maximum number of symlinks in a path. Source: Linux `include/linux/namei.h`, `MAXSYMLINKS`.
const SYMLINKS_MAX: u32 = 40;
/// Maximum number of names that are looked up for a closure. A program with a hundred libraries needs a few thousand.
pub(super) const LOOKUPS_MAX: u32 = 200_000;
/// Maximum number of names that are read in a directory.
const NAMES_MAX: usize = 1 << 16;

/// A file, and the directory that it is in, without symlinks.
#[derive(Debug, Clone)]
pub(super) struct Found {
    /// Path of the directory, without a final slash; empty for the root.
    pub(super) directory: Vec<u8>,
    pub(super) inode: Inode,
}

/// The files of an image.
#[derive(Clone, Copy)]
pub(super) struct Root<'a, S> {
    pub(super) image: &'a Image<S>,
    /// The devices of the image, in the order of its device table.
    pub(super) devices: &'a [&'a dyn ReadAt],
    /// Number of names that may still be looked up. Without any left, no file is found.
    pub(super) lookups: &'a Cell<u32>,
}

impl<S: ReadAt> Root<'_, S> {
    /// Returns the file at an absolute path, through symlinks.
    pub(super) fn find(&self, path: &[u8]) -> Result<Option<Found>, ReadError> {
        let mut parents: Vec<(Vec<u8>, Inode)> = vec![(Vec::new(), self.image.root()?)];
        let mut rest: Vec<Vec<u8>> = components(path).collect();
        let mut symlinks = 0;
        while let Some(name) = rest.pop() {
            let Some(left) = self.lookups.get().checked_sub(1) else { return Ok(None) };
            self.lookups.set(left);
            if name == b".." {
                if parents.len() > 1 {
                    parents.pop();
                }
                continue;
            }
            let Some((_, directory)) = parents.last() else { return Ok(None) };
            if directory.file_type() != FileType::Directory {
                return Ok(None);
            }
            let Some(nid) = self.image.lookup(directory, &name)? else { return Ok(None) };
            let inode = self.image.inode(nid)?;
            if inode.file_type() != FileType::Symlink {
                parents.push((name, inode));
                continue;
            }
            symlinks += 1;
            if symlinks > SYMLINKS_MAX {
                return Ok(None);
            }
            let target = self.image.read_link(&inode)?;
            if target.starts_with(b"/") {
                parents.truncate(1);
            }
            rest.extend(components(&target));
        }
        let Some((_, inode)) = parents.pop() else { return Ok(None) };
        let mut directory = Vec::new();
        for (name, _) in parents.iter().skip(1) {
            directory.push(b'/');
            directory.extend(name);
        }
        Ok(Some(Found { directory, inode }))
    }

    /// Returns a regular file at an absolute path, through symlinks.
    pub(super) fn find_regular(&self, path: &[u8]) -> Result<Option<Found>, ReadError> {
        Ok(self.find(path)?.filter(|it| it.inode.file_type() == FileType::Regular))
    }

    /// Returns the names in a directory, in the image's order; empty if there is no such directory.
    pub(super) fn names(&self, directory: &[u8]) -> Result<Vec<Vec<u8>>, ReadError> {
        let Some(found) = self.find(directory)? else { return Ok(Vec::new()) };
        if found.inode.file_type() != FileType::Directory {
            return Ok(Vec::new());
        }
        let mut names = Vec::new();
        let mut entries = self.image.read_dir(&found.inode);
        while let Some(entry) = entries.next()?
            && names.len() < NAMES_MAX
        {
            if !entry.is_dots() {
                names.push(entry.name.to_vec());
            }
        }
        Ok(names)
    }

    /// Returns the beginning of a file, with at most `most` bytes.
    pub(super) fn beginning(&self, inode: &Inode, most: u64) -> Result<Vec<u8>, ReadError> {
        let length = usize::try_from(inode.size().min(most)).unwrap_or_default();
        let mut bytes = vec![0; length];
        let read = self.image.read(inode, ByteOffset(0), &mut bytes, self.devices)?;
        bytes.truncate(read);
        Ok(bytes)
    }

    pub(super) const fn reader(&self, inode: Inode) -> InodeReader<'_, S> {
        InodeReader { root: self, inode, at: 0 }
    }
}

/// Returns the components of a path without empty ones and ".", the last one first.
fn components(path: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let all = path.split(|it| *it == b'/').rev();
    all.filter(|it| !it.is_empty() && *it != b".").map(<[u8]>::to_vec)
}

/// The bytes of a file.
pub(super) struct InodeReader<'a, S> {
    root: &'a Root<'a, S>,
    inode: Inode,
    at: u64,
}

impl<S: ReadAt> Read for InodeReader<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Root { image, devices, .. } = self.root;
        let read = image.read(&self.inode, ByteOffset(self.at), buffer, devices);
        let read = read.map_err(io::Error::other)?;
        self.at = self.at.saturating_add(read as u64);
        Ok(read)
    }
}

impl<S: ReadAt> Seek for InodeReader<'_, S> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(offset) => self.inode.size().checked_add_signed(offset),
            SeekFrom::Current(offset) => self.at.checked_add_signed(offset),
        };
        self.at = at.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
