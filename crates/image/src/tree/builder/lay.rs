//! Lays finished trees, or parts of them, over the tree of a builder.

use super::{Builder, Link, TreeError};
use crate::tree::{Children, Entry, Inode, InodeId, Tree, XattrsId};

/// Why a tree cannot be laid: a path, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot add \"{}\"", path.escape_ascii())]
pub struct LayError {
    /// The path, with a leading slash.
    pub path: Vec<u8>,
    /// The reason.
    pub source: TreeError,
}

/// Whether a name, and everything below it, is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The name is kept, and everything below it that is not left out.
    Keep,
    /// The name is kept only if something below it is kept.
    Above,
    /// The name and everything below it are left out.
    Leave,
}

/// A directory whose children are being laid.
struct Open<'a> {
    children: Children<'a>,
    /// Bytes of its path.
    length: usize,
    inode: Inode<'a>,
    /// What it is here, as soon as something needs it.
    here: Option<InodeId>,
    /// It is kept, and so is what is below.
    is_kept: bool,
}

impl Builder {
    /// Lays a tree over this one. A path of the tree decides type and metadata. Directories are merged; other files
    /// replace a whole subtree, and a directory replaces another file. Hard links stay among the names of one tree.
    /// Links are counted, and files belong to their first names; values that the tree states are ignored.
    ///
    /// # Errors
    /// [`LayError`] when the two together are too large for one tree.
    pub fn lay(&mut self, tree: &Tree) -> Result<(), LayError> {
        self.lay_some(tree, |_, _| Choice::Keep)
    }

    /// As [`Builder::lay`], but only the names that `choose` keeps. It gets whole paths with a leading slash, a
    /// directory before those below it. The root is always kept, with its metadata.
    ///
    /// # Errors
    /// As [`Builder::lay`].
    pub fn lay_some(
        &mut self,
        tree: &Tree,
        mut choose: impl FnMut(&[u8], &Entry<'_>) -> Choice,
    ) -> Result<(), LayError> {
        let mut laying = Laying {
            builder: self,
            tree,
            inodes: vec![None; tree.inode_bound()],
            xattrs: vec![None; tree.xattrs_bound()],
        };
        let root = tree.root();
        let described = laying.describe(InodeId::ROOT, root);
        described.map_err(|source| LayError { path: b"/".to_vec(), source })?;
        let mut path = Vec::new();
        let here = Some(InodeId::ROOT);
        let mut open =
            vec![Open { children: root.children(), length: 0, inode: root, here, is_kept: false }];
        while let Some(directory) = open.last_mut() {
            path.truncate(directory.length);
            let Some(entry) = directory.children.next() else {
                open.pop();
                continue;
            };
            path.push(b'/');
            path.extend_from_slice(entry.name);
            let is_kept = match choose(&path, &entry) {
                Choice::Leave => continue,
                Choice::Keep => true,
                Choice::Above => directory.is_kept,
            };
            let mut here = None;
            if is_kept {
                let laid = laying.name(&mut open, &path, &entry);
                here = Some(laid.map_err(|source| LayError { path: path.clone(), source })?);
            }
            let Entry { inode, .. } = entry;
            if inode.is_directory() {
                let (children, length) = (inode.children(), path.len());
                open.push(Open { children, length, inode, here, is_kept });
            }
        }
        Ok(())
    }
}

struct Laying<'a> {
    builder: &'a mut Builder,
    tree: &'a Tree,
    /// What inodes and sets of xattrs are in the builder.
    inodes: Vec<Option<InodeId>>,
    xattrs: Vec<Option<XattrsId>>,
}

impl Laying<'_> {
    /// Lays a name of the last of the open directories; these too, where they are not there yet.
    fn name(
        &mut self,
        open: &mut [Open<'_>],
        path: &[u8],
        entry: &Entry<'_>,
    ) -> Result<InodeId, TreeError> {
        let mut above = InodeId::ROOT;
        let mut start = 0;
        for directory in open {
            above = match directory.here {
                Some(here) => here,
                None => {
                    let name = path.get(start + 1..directory.length).unwrap_or_default();
                    let here = self.put(above, name, directory.inode)?;
                    directory.here = Some(here);
                    here
                }
            };
            start = directory.length;
        }
        self.put(above, entry.name, entry.inode)
    }

    fn put(&mut self, above: InodeId, name: &[u8], inode: Inode<'_>) -> Result<InodeId, TreeError> {
        if let Some(there) = self.builder.lookup(above, name) {
            if inode.is_directory() && self.builder.is_directory(there) {
                self.describe(there, inode)?;
                return Ok(there);
            }
            self.builder.remove(above, name);
        }
        let here = match self.inodes[inode.id().index()] {
            Some(known) => known,
            None => {
                let xattrs = self.xattrs(inode)?;
                let new = self.builder.inode(&inode.metadata(), xattrs, inode.node())?;
                self.inodes[inode.id().index()] = Some(new);
                new
            }
        };
        self.builder.insert(above, name, here, Link::Equal)?;
        Ok(here)
    }

    fn describe(&mut self, here: InodeId, inode: Inode<'_>) -> Result<(), TreeError> {
        let xattrs = self.xattrs(inode)?;
        self.builder.describe(here, &inode.metadata(), xattrs)
    }

    fn xattrs(&mut self, inode: Inode<'_>) -> Result<XattrsId, TreeError> {
        let id = inode.xattrs_id();
        if let Some(known) = self.xattrs[id.index()] {
            return Ok(known);
        }
        let new = self.builder.xattrs(self.tree.xattrs(id))?;
        self.xattrs[id.index()] = Some(new);
        Ok(new)
    }
}

#[cfg(test)]
mod tests;
