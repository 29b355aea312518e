//! What a mount of an image shows, an inode at a time: for servers of files, which hold no tree.

use std::borrow::Cow;

use hashbrown::HashSet;

use super::directory::DirPosition;
use super::error::{Corrupt, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::source::ReadAt;
use super::to_tree::{INLINE_CONTENT_MAX, is_real_whiteout, object, sort_xattrs};
use super::walk::{Budget, work_bound};
use super::xattr::Xattrs;
use super::{ByteOffset, Image};
use crate::verity::ObjectId;

/// An image as a mount of it shows it. Of a composefs image that is what overlayfs shows of it: as
/// [`View::Composefs`](super::View::Composefs), without what is meant for overlayfs alone.
#[derive(Debug)]
pub struct ShownImage<S> {
    image: Image<S>,
    is_composefs: bool,
    /// The xattr with a file's fingerprint, which is not shown.
    hidden: Vec<u8>,
}

/// A file that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShownFile {
    /// Its inode.
    pub inode: Inode,
    /// Its type: not that of its inode where that stands for a whiteout.
    pub kind: FileType,
}

/// Where the bytes of a regular file are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownContent {
    /// In the image, or on its devices: [`Image::read`] finds them.
    Inside,
    /// In an object, which is as long as the file.
    Object(ObjectId),
    /// Outside, in a file that the image gives no digest of.
    Unnamed,
}

/// An entry of a directory that is shown.
#[derive(Debug, Clone, Copy)]
pub struct ShownEntry<'a> {
    /// Its name; `.` and `..` are among them.
    pub name: &'a [u8],
    /// What it names.
    pub file: ShownFile,
    /// The place behind it.
    pub next: DirPosition,
}

/// A name of a file that is shown.
#[derive(Debug, Clone, Copy)]
pub struct ShownName<'a> {
    /// The whole path with a leading slash; `/` for the root.
    pub path: &'a [u8],
    /// What it names.
    pub file: ShownFile,
    /// Whether it is the first name of its file.
    pub is_first: bool,
}

impl<S: ReadAt> ShownImage<S> {
    /// Looks at the headers of an image. One with devices or without a header of composefs has its files' bytes itself.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn new(image: Image<S>) -> Result<Self, ReadError> {
        let header = image.superblock().composefs.filter(|_| image.devices().is_empty());
        if let Some(header) = header {
            header.check()?;
        }
        let hidden = image.fingerprint_name()?.unwrap_or_default();
        Ok(Self { image, is_composefs: header.is_some(), hidden })
    }

    /// The image.
    #[must_use]
    pub const fn image(&self) -> &Image<S> {
        &self.image
    }

    /// The number of the root directory.
    #[must_use]
    pub const fn root(&self) -> Nid {
        self.image.superblock().root
    }

    /// The file of a number; `None` if it is not shown.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn file(&self, nid: Nid) -> Result<Option<ShownFile>, ReadError> {
        let inode = self.image.inode(nid)?;
        let kind = inode.file_type();
        if !self.is_composefs {
            return Ok(Some(ShownFile { inode, kind }));
        }
        if is_real_whiteout(&inode) {
            return Ok(None);
        }
        // Only an empty file stands for a whiteout, so most need no look at xattrs.
        let may_stand = kind == FileType::Regular && inode.size() == 0 && inode.xattrs_size != 0;
        if may_stand {
            let xattrs = self.image.xattrs(&inode)?;
            if sort_xattrs(&inode, &xattrs, |_, _| ()).is_whiteout {
                return Ok(Some(ShownFile { inode, kind: FileType::CharDevice }));
            }
        }
        Ok(Some(ShownFile { inode, kind }))
    }

    /// The file of a name in a directory; `None` if there is none, or it is no directory.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn lookup(&self, directory: Nid, name: &[u8]) -> Result<Option<ShownFile>, ReadError> {
        let directory = self.image.inode(directory)?;
        match self.image.lookup(&directory, name)? {
            Some(nid) => self.file(nid),
            None => Ok(None),
        }
    }

    /// Gives `take` the entries of a directory from a place on, until it answers that it takes no more.
    ///
    /// # Errors
    /// [`ReadError`]. Entries may have been given before.
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

    /// Where a regular file's bytes are.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn content(&self, inode: &Inode) -> Result<ShownContent, ReadError> {
        if !self.is_composefs || !inode.is_chunk_based() {
            let (nid, size) = (inode.nid(), inode.size());
            if self.is_composefs && size > INLINE_CONTENT_MAX {
                return Err(Corrupt::InlineContent { nid, size }.into());
            }
            return Ok(ShownContent::Inside);
        }
        let xattrs = self.image.xattrs(inode)?;
        Ok(match sort_xattrs(inode, &xattrs, |_, _| ()).metacopy {
            None | Some([]) => ShownContent::Unnamed,
            Some(metacopy) => ShownContent::Object(object(inode.nid(), metacopy)?),
        })
    }

    /// Gives `take` the names and values of an inode's xattrs. `xattrs` is memory to use again.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn xattrs(
        &self,
        inode: &Inode,
        xattrs: &mut Xattrs,
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

    /// Whether any file has an xattr whose name `counts`: looks at all files, until one has.
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn has_xattrs(&self, counts: impl Fn(&[u8]) -> bool) -> Result<bool, ReadError> {
        let mut found = false;
        self.names_with_xattrs(counts, |_| {
            found = true;
            false
        })?;
        Ok(found)
    }

    /// Gives `take` the names of all files that have an xattr whose name `counts`, until it answers that it takes no more.
    ///
    /// # Errors
    /// [`ReadError`]. Names may have been given before.
    pub fn names_with_xattrs(
        &self,
        counts: impl Fn(&[u8]) -> bool,
        mut take: impl FnMut(ShownName<'_>) -> bool,
    ) -> Result<(), ReadError> {
        let (mut walk, mut xattrs) = (self.image.walk(), Xattrs::new());
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

    /// Reads a file's bytes that are [inside](ShownContent::Inside), as [`Image::read`] does.
    ///
    /// # Errors
    /// [`ReadError`].
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
