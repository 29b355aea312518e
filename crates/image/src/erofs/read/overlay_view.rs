//! Reads an image as a mount shows it, one inode at a time, for file servers that keep no tree.

use std::borrow::Cow;

use hashbrown::HashSet;

use super::directory::DirPosition;
use super::error::{ErofsCorruption, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::source::ReadAt;
use super::to_tree::{INLINE_CONTENT_MAX, is_real_whiteout, object, sort_xattrs};
use super::walk::{Budget, work_bound};
use super::xattr::InodeXattrs;
use super::{ByteOffset, Image};
use crate::verity::ObjectId;

/// An image in the form in which a mount shows it. A composefs image is read as overlayfs shows it. This is
/// [`View::Composefs`](super::View::Composefs) without the data that is meant only for overlayfs.
#[derive(Debug)]
pub struct ShownImage<S> {
    image: Image<S>,
    is_composefs: bool,
    /// Name of the xattr with a file's fingerprint, which is not shown; empty if there is none.
    hidden: Vec<u8>,
}

/// A file that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShownFile {
    /// Inode of the file.
    pub inode: Inode,
    /// Type of the file. It differs from the type of the inode if the inode represents a whiteout.
    pub kind: FileType,
}

/// The location of a regular file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownContent {
    /// The bytes are in the image or on its devices, so [`Image::read`] reads them.
    Inside,
    /// In this object, which has the length of the file.
    Object(ObjectId),
    /// The bytes are in a separate file, whose digest the image does not state.
    Unnamed,
}

/// An entry of a directory that is shown.
#[derive(Debug, Clone, Copy)]
pub struct ShownEntry<'a> {
    /// Name of the entry. The entries include `.` and `..`.
    pub name: &'a [u8],
    /// The file that the name refers to.
    pub file: ShownFile,
    /// Position after the entry.
    pub next: DirPosition,
}

/// A name of a file that is shown.
#[derive(Debug, Clone, Copy)]
pub struct ShownName<'a> {
    /// The whole path with a leading slash; `/` for the root.
    pub path: &'a [u8],
    /// The file that the name refers to.
    pub file: ShownFile,
    /// Whether this is the first name of the file.
    pub is_first: bool,
}

impl<S: ReadAt> ShownImage<S> {
    /// Checks the headers of an image. An image with devices or without a composefs header contains its files' bytes.
    ///
    /// # Errors
    /// [`ReadError`] if a header is unsupported, or the name of fingerprints is invalid.
    pub fn new(image: Image<S>) -> Result<Self, ReadError> {
        let header = image.superblock().composefs.filter(|_| image.devices().is_empty());
        if let Some(header) = header {
            header.check()?;
        }
        let hidden = image.fingerprint_name()?.unwrap_or_default();
        Ok(Self { image, is_composefs: header.is_some(), hidden })
    }

    /// Returns the image.
    #[must_use]
    pub const fn image(&self) -> &Image<S> {
        &self.image
    }

    /// Returns the nid of the root directory.
    #[must_use]
    pub const fn root(&self) -> Nid {
        self.image.superblock().root
    }

    /// Returns the file with this nid; `None` if it is not shown.
    ///
    /// # Errors
    /// [`ReadError`] if the inode or its xattrs are invalid or cannot be read.
    pub fn file(&self, nid: Nid) -> Result<Option<ShownFile>, ReadError> {
        let inode = self.image.inode(nid)?;
        let kind = inode.file_type();
        if !self.is_composefs {
            return Ok(Some(ShownFile { inode, kind }));
        }
        if is_real_whiteout(&inode) {
            return Ok(None);
        }
        // Only an empty file can represent a whiteout, so the xattrs of most inodes need not be read.
        let may_stand = kind == FileType::Regular && inode.size() == 0 && inode.xattrs_size != 0;
        if may_stand {
            let xattrs = self.image.xattrs(&inode)?;
            if sort_xattrs(&inode, &xattrs, |_, _| ()).is_whiteout {
                return Ok(Some(ShownFile { inode, kind: FileType::CharDevice }));
            }
        }
        Ok(Some(ShownFile { inode, kind }))
    }

    /// Returns the file with this name in a directory; `None` if the name does not exist, or `directory` is not a
    /// directory.
    ///
    /// # Errors
    /// [`ReadError`] if the directory or the inode is invalid or cannot be read.
    pub fn lookup(&self, directory: Nid, name: &[u8]) -> Result<Option<ShownFile>, ReadError> {
        let directory = self.image.inode(directory)?;
        match self.image.lookup(&directory, name)? {
            Some(nid) => self.file(nid),
            None => Ok(None),
        }
    }

    /// Passes the entries of a directory from a position on to `take`, until it returns false.
    ///
    /// # Errors
    /// [`ReadError`]. Earlier entries may have been passed to `take`.
    pub fn entries(
        &self,
        directory: Nid,
        from: DirPosition,
        mut take: impl FnMut(ShownEntry<'_>) -> bool,
    ) -> Result<(), ReadError> {
        let directory = self.image.inode(directory)?;
        let mut entries = self.image.read_dir_from(&directory, from);
        loop {
            let Some(entry) = entries.next()? else { return Ok(()) };
            let (nid, length) = (entry.nid, entry.name.len());
            let mut name = [0; crate::tree::NAME_MAX];
            let name = name.get_mut(..length).unwrap_or_default();
            name.copy_from_slice(entry.name);
            let next = entries.position();
            let Some(file) = self.file(nid)? else { continue };
            if !take(ShownEntry { name, file, next }) {
                return Ok(());
            }
        }
    }

    /// Returns the location of a regular file's bytes.
    ///
    /// # Errors
    /// [`ReadError`] if the xattrs are invalid or cannot be read, or the file has too many bytes for a composefs
    /// image.
    pub fn content(&self, inode: &Inode) -> Result<ShownContent, ReadError> {
        if !self.is_composefs || !inode.is_chunk_based() {
            let (nid, size) = (inode.nid(), inode.size());
            if self.is_composefs && size > INLINE_CONTENT_MAX {
                return Err(ErofsCorruption::InlineContent { nid, size }.into());
            }
            return Ok(ShownContent::Inside);
        }
        let xattrs = self.image.xattrs(inode)?;
        Ok(match sort_xattrs(inode, &xattrs, |_, _| ()).metacopy {
            None | Some([]) => ShownContent::Unnamed,
            Some(metacopy) => ShownContent::Object(object(inode.nid(), metacopy)?),
        })
    }

    /// Passes the names and values of an inode's xattrs to `take`. `xattrs` is a buffer that can be reused.
    ///
    /// # Errors
    /// [`ReadError`] if the xattrs are invalid or cannot be read.
    pub fn xattrs(
        &self,
        inode: &Inode,
        xattrs: &mut InodeXattrs,
        mut take: impl FnMut(&[u8], &[u8]),
    ) -> Result<(), ReadError> {
        self.image.read_xattrs(inode, xattrs)?;
        if self.is_composefs {
            sort_xattrs(inode, xattrs, |name: Cow<'_, [u8]>, value| take(&name, value));
        } else {
            let is_shown = |name: &[u8]| self.hidden.is_empty() || name != self.hidden;
            for it in xattrs.iter().filter(|it| it.is_visible && is_shown(it.name)) {
                take(it.name, it.value);
            }
        }
        Ok(())
    }

    /// Whether any file has an xattr whose name satisfies `counts`. Reads files until one has such an xattr.
    ///
    /// # Errors
    /// [`ReadError`] if a file that is read is invalid or cannot be read.
    pub fn has_xattrs(&self, counts: impl Fn(&[u8]) -> bool) -> Result<bool, ReadError> {
        let mut found = false;
        self.names_with_xattrs(counts, |_| {
            found = true;
            false
        })?;
        Ok(found)
    }

    /// Passes the names of all files with an xattr whose name satisfies `counts` to `take`, until it returns false.
    ///
    /// # Errors
    /// [`ReadError`]. Earlier names may have been passed to `take`.
    pub fn names_with_xattrs(
        &self,
        counts: impl Fn(&[u8]) -> bool,
        mut take: impl FnMut(ShownName<'_>) -> bool,
    ) -> Result<(), ReadError> {
        let (mut walk, mut xattrs) = (self.image.walk(), InodeXattrs::new());
        let mut with_xattrs = HashSet::new();
        let mut work = Budget::new(work_bound(self.image.source().len()));
        while let Some(step) = walk.next()? {
            let (nid, is_first) = (step.inode.nid(), step.is_new);
            if self.is_composefs && is_real_whiteout(&step.inode) {
                continue;
            }
            if is_first {
                let mut found = false;
                self.xattrs(&step.inode, &mut xattrs, |name, _| found |= counts(name))?;
                work.spend(xattrs.bytes())?;
                if found {
                    with_xattrs.insert(nid);
                }
            }
            if !with_xattrs.contains(&nid) {
                continue;
            }
            let Some(file) = self.file(nid)? else { continue };
            if !take(ShownName { path: step.path, file, is_first }) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Reads bytes of a file that are [inside](ShownContent::Inside) the image, like [`Image::read`].
    ///
    /// # Errors
    /// As [`Image::read`].
    pub fn read(
        &self,
        inode: &Inode,
        offset: u64,
        buffer: &mut [u8],
        devices: &[&dyn ReadAt],
    ) -> Result<usize, ReadError> {
        self.image.read(inode, ByteOffset(offset), buffer, devices)
    }
}
