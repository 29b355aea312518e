//! Applies finished trees, or parts of them, to the tree of a builder, as layers are applied to lower layers.

use super::{Builder, Link, TreeError};
use crate::tree::{Children, Entry, Inode, InodeId, Tree, XattrsId};

/// The reason why a tree cannot be laid, with the path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot add \"{}\"", path.escape_ascii())]
pub struct LayError {
    /// The path, with a leading slash.
    pub path: Vec<u8>,
    /// The error of the builder at that path.
    pub source: TreeError,
}

/// Whether a name and the names below it are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The name is kept, and with it every name below it that is not left out.
    Keep,
    /// The name is kept only if a name below it, or a directory above it, is kept.
    Above,
    /// The name and everything below it are left out.
    Leave,
}

/// A directory whose children are being laid.
struct Open<'a> {
    children: Children<'a>,
    /// Length of its path in bytes.
    length: usize,
    inode: Inode<'a>,
    /// The id of the directory in the builder. It is set when the directory, or a name below it, is applied.
    here: Option<InodeId>,
    /// Whether the names below it are kept by default.
    is_kept: bool,
}

impl Builder {
    /// Applies a tree to this one: every path in `tree` gets the type and the metadata that it has there. Directories
    /// are merged; another file replaces a whole subtree, and a directory replaces another file. Hard links connect
    /// only names of `tree`. Link counts are computed, and files belong to their first names; the values that `tree`
    /// states are ignored.
    ///
    /// # Errors
    /// [`LayError`] if the two trees together are too large for one tree.
    pub fn lay(&mut self, tree: &Tree) -> Result<(), LayError> {
        self.lay_some(tree, |_, _| Choice::Keep)
    }

    /// Like [`Builder::lay`], but applies only the names that `choose` keeps. `choose` gets whole paths with a leading
    /// slash, a directory before the names below it. The root is always kept, with its metadata.
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
    /// The builder's ids for the tree's inodes and sets of xattrs.
    inodes: Vec<Option<InodeId>>,
    xattrs: Vec<Option<XattrsId>>,
}

impl Laying<'_> {
    /// Lays a name of the last open directory, after those open directories that are not laid yet.
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
