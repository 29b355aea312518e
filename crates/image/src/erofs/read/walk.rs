//! Walks through every name of an image.

use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;

use super::error::{ErofsCorruption, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::source::ReadAt;
use super::{Image, to_u64, to_usize};
use crate::tree::{NAME_MAX, SYMLINK_MAX, check_name};

/// Maximum length in bytes of a path with its leading slash. Source: Linux `PATH_MAX` less the final NUL. System
/// calls do not accept longer paths, and mkfs.erofs does not make them. Without a limit, the paths in a chain of
/// directories take the square of the image's length.
pub const PATH_MAX: usize = 4095;

/// Returns the maximum number of bytes of names, inline xattrs, symlink targets and inline content that one walk takes
/// from an image of `len` bytes: 4 per byte of the image, plus 1 MiB. An image that uses each byte only once needs
/// less than one byte per byte.
#[must_use]
pub const fn kept_bound(len: u64) -> u64 {
    len.saturating_mul(4).saturating_add(1 << 20)
}

/// Returns the maximum number of bytes of xattrs that one conversion to a tree decodes from an image of `len` bytes,
/// counting a shared xattr each time: 256 per byte of the image, plus 64 MiB. A file takes about 50 bytes in the
/// smallest image, so each file may have 12 KiB of shared xattrs.
#[must_use]
pub const fn work_bound(len: u64) -> u64 {
    len.saturating_mul(256).saturating_add(64 << 20)
}

/// Returns the maximum number of bytes of directories and compressed targets that one walk reads from an image with
/// `stored` bytes: 250 per byte, plus 64 MiB. Many inodes may lead to the same bytes, which compression makes cheap for
/// the image, but not for its reader. 250 is also the limit of imports for the contents of files.
#[must_use]
pub const fn unpacked_bound(stored: u64) -> u64 {
    stored.saturating_mul(250).saturating_add(64 << 20)
}

/// A limit, and the part of it that is left.
#[derive(Debug)]
pub(super) struct Budget {
    bound: u64,
    left: u64,
}

impl Budget {
    pub(super) const fn new(bound: u64) -> Self {
        Self { bound, left: bound }
    }

    pub(super) fn spend(&mut self, bytes: u64) -> Result<(), ErofsCorruption> {
        let left = self.left.checked_sub(bytes);
        self.left = left.ok_or(ErofsCorruption::Amplified { bound: self.bound })?;
        Ok(())
    }
}

/// A name of an image.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// The whole path with a leading slash; `/` for the root.
    pub path: &'a [u8],
    /// Last component of the path; empty for the root.
    pub name: &'a [u8],
    /// Number of the directory that contains the name; for the root, its own number.
    pub parent: usize,
    /// The inode of the name.
    pub inode: Inode,
    /// Number of the inode. Inodes are numbered from 0 in the order of the walk.
    pub number: usize,
    /// Whether this is the first name of the inode; otherwise it is a further hard link to it.
    pub is_new: bool,
}

/// Walks every name of an image depth first, siblings in byte order, the root first. The walk ends after an error.
/// `Walk` is not an [`Iterator`], because it returns a path that borrows from it.
///
/// The walk also checks that directories have one name each, that `.` and `..` refer to the right directories, that
/// entries state their inode's type, and that names are valid.
#[derive(Debug)]
pub struct Walk<'i, S> {
    image: &'i Image<S>,
    /// The open directories.
    stack: Vec<Level>,
    path: Vec<u8>,
    numbers: HashMap<Nid, usize>,
    pub(super) kept: Budget,
    pub(super) unpacked: Budget,
    /// Ends the walk early when another thread sets it.
    pub(super) cancel: Option<&'i AtomicBool>,
    started: bool,
}

/// A [`Step`] without its borrowed path.
#[derive(Debug)]
struct Advanced {
    parent: usize,
    inode: Inode,
    number: usize,
    is_new: bool,
    /// Offset of the name in the path.
    name: usize,
}

/// A directory whose entries are being walked.
#[derive(Debug)]
struct Level {
    number: usize,
    nid: Nid,
    /// The entries, each as 8 bytes of nid, type, length of the name, and name.
    entries: Vec<u8>,
    at: usize,
    /// Length of the directory's path in bytes; 0 for the root.
    path_len: usize,
}

impl Level {
    /// Returns the next entry's nid, type and name.
    fn next(&mut self) -> Option<(Nid, u8, &[u8])> {
        let (nid, rest) = self.entries.get(self.at..)?.split_first_chunk::<8>()?;
        let ([file_type, len], rest) = rest.split_first_chunk::<2>()?;
        let name = rest.get(..usize::from(*len))?;
        self.at = self.at.saturating_add(10).saturating_add(name.len());
        Some((Nid(u64::from_le_bytes(*nid)), *file_type, name))
    }
}

impl<S: ReadAt> Image<S> {
    /// Walks every name, depth first.
    #[must_use]
    pub fn walk(&self) -> Walk<'_, S> {
        // The number that the image states, but at most the number that fits: 64 bytes for each inode with its names. A
        // sparse file may have any length, so the table of a very large image grows.
        let inodes = self.superblock.inodes.min(self.source.len() / 64).min(1 << 20);
        Walk {
            image: self,
            stack: Vec::new(),
            path: Vec::new(),
            numbers: HashMap::with_capacity(to_usize(inodes)),
            kept: Budget::new(kept_bound(self.source.len())),
            unpacked: Budget::new(unpacked_bound(self.source.len())),
            cancel: None,
            started: false,
        }
    }
}

impl<S: ReadAt> Walk<'_, S> {
    /// Returns the next name, or `None` at the end.
    ///
    /// # Errors
    /// [`ReadError`] if the image is invalid, unsupported or cannot be read.
    #[expect(
        clippy::should_implement_trait,
        reason = "the path borrows from the walk, which Iterator cannot express"
    )]
    pub fn next(&mut self) -> Result<Option<Step<'_>>, ReadError> {
        let step = self.advance().inspect_err(|_| self.stack.clear())?;
        let Some(Advanced { parent, inode, number, is_new, name }) = step else { return Ok(None) };
        let path = if self.path.is_empty() { b"/" } else { &self.path[..] };
        let name = self.path.get(name..).unwrap_or_default();
        Ok(Some(Step { path, name, parent, inode, number, is_new }))
    }

    fn advance(&mut self) -> Result<Option<Advanced>, ReadError> {
        if !self.started {
            self.started = true;
            let root = self.image.root()?;
            let (number, _) = self.number(root.nid());
            self.enter(&root, number, root.nid())?;
            let parent = number;
            return Ok(Some(Advanced { parent, inode: root, number, is_new: true, name: 0 }));
        }
        let Self { stack, path, .. } = self;
        let (level, nid, file_type) = loop {
            let Some(level) = stack.last_mut() else {
                path.clear();
                return Ok(None);
            };
            path.truncate(level.path_len);
            if let Some((nid, file_type, name)) = level.next() {
                path.push(b'/');
                path.extend_from_slice(name);
                break (level, nid, file_type);
            }
            stack.pop();
        };
        let (parent, parent_nid) = (level.number, level.nid);
        let name = level.path_len.saturating_add(1);
        if path.len() > PATH_MAX {
            return Err(ErofsCorruption::PathLength(path.len()).into());
        }

        self.go_on()?;
        let inode = self.image.inode(nid)?;
        if file_type != 0 && file_type != inode.file_type().in_entry() {
            let (nid, mode) = (parent_nid, inode.mode());
            let name = self.path.get(name..).unwrap_or_default().to_vec();
            return Err(ErofsCorruption::EntryType { nid, name, entry: file_type, mode }.into());
        }
        let (number, is_new) = self.number(nid);
        if inode.file_type() == FileType::Directory {
            if !is_new {
                return Err(ErofsCorruption::DirectoryTwice { nid, path: self.path.clone() }.into());
            }
            self.enter(&inode, number, parent_nid)?;
        }
        if is_new && inode.file_type() == FileType::Symlink && inode.is_compressed() {
            self.unpacked.spend(inode.size().min(to_u64(SYMLINK_MAX)))?;
        }
        Ok(Some(Advanced { parent, inode, number, is_new, name }))
    }

    /// Checks whether the walk was cancelled.
    fn go_on(&self) -> Result<(), ReadError> {
        match self.cancel.is_some_and(|it| it.load(Ordering::Relaxed)) {
            true => Err(ReadError::Cancelled),
            false => Ok(()),
        }
    }

    /// Returns the number of an inode, and whether it is new.
    fn number(&mut self, nid: Nid) -> (usize, bool) {
        let next = self.numbers.len();
        let number = *self.numbers.entry(nid).or_insert(next);
        (number, number == next)
    }

    /// Reads a directory's entries.
    fn enter(&mut self, directory: &Inode, number: usize, parent: Nid) -> Result<(), ReadError> {
        let nid = directory.nid();
        self.unpacked.spend(match directory.is_compressed() {
            true => directory.size(),
            // Names ascend, so no byte of the image is read twice.
            false => directory.size().min(self.image.source.len()),
        })?;
        let mut entries = Vec::new();
        let mut read = self.image.read_dir(directory);
        while let Some(entry) = read.next()? {
            self.go_on()?;
            if entry.is_dots() {
                let expected = if entry.name == b"." { nid } else { parent };
                if entry.nid != expected {
                    let (name, found) = (entry.name.to_vec(), entry.nid);
                    return Err(ErofsCorruption::Dots { nid, name, found, expected }.into());
                }
                continue;
            }
            check_name(entry.name).map_err(|reason| ErofsCorruption::Name { nid, reason })?;
            self.kept.spend(to_u64(entry.name.len()).saturating_add(10))?;
            let len = u8::try_from(entry.name.len()).expect("a name has at most 255 bytes");
            const { assert!(NAME_MAX == 255) };
            entries.extend_from_slice(&entry.nid.0.to_le_bytes());
            entries.extend_from_slice(&[entry.file_type, len]);
            entries.extend_from_slice(entry.name);
        }
        let path_len = self.path.len();
        self.stack.push(Level { number, nid, entries, at: 0, path_len });
        Ok(())
    }
}
