//! Functions for layers, which read a builder and copy parts of it into another.

use super::{Builder, IMPLICIT, InodeId, Kind, REMOVED, TreeError, XattrsId, key};

/// Records which parts of one builder were copied into another, so that shared inodes, strings and xattrs stay
/// shared.
#[derive(Debug)]
pub struct Copied {
    /// The target's number for each of the source's, if it was copied. Number 0 is valid: the root, the empty string
    /// or the empty set of xattrs.
    strings: Vec<Option<u32>>,
    xattrs: Vec<Option<XattrsId>>,
    inodes: Vec<Option<InodeId>>,
}

impl Copied {
    /// Creates an empty record for copies from `source`.
    #[must_use]
    pub fn new(source: &Builder) -> Self {
        Self {
            strings: vec![None; source.strings.bound()],
            xattrs: vec![None; source.xattrs.bound()],
            inodes: vec![None; source.inodes.len()],
        }
    }

    /// Maps an inode of the source to an existing inode of the target.
    pub fn is_now(&mut self, source: InodeId, here: InodeId) {
        self.inodes[source.index()] = Some(here);
    }

    /// Returns the target's inode for an inode of the source, if the source's inode was copied.
    #[must_use]
    pub fn get(&self, source: InodeId) -> Option<InodeId> {
        self.inodes[source.index()]
    }
}

impl Builder {
    /// Returns one more than the largest index of an inode, which is the length of a table with an element for each
    /// inode.
    #[must_use]
    pub const fn inode_bound(&self) -> usize {
        self.inodes.len()
    }

    /// Returns every name as directory, name and inode, a directory before the names in it. Removed names are left
    /// out, but names in removed directories are included.
    pub fn names(&self) -> impl Iterator<Item = (InodeId, &[u8], InodeId)> {
        let entries = self.entries.iter().filter(|entry| entry.parent != REMOVED);
        entries.map(|entry| {
            let name = self.names.get(entry.name);
            (InodeId(entry.parent), name, InodeId(entry.inode()))
        })
    }

    /// Returns the target of a symlink, or `None` for other inodes.
    #[must_use]
    pub fn symlink_target(&self, inode: InodeId) -> Option<&[u8]> {
        let raw = &self.inodes[inode.index()];
        (raw.kind == Kind::Symlink).then(|| self.strings.get(raw.first))
    }

    /// Removes all names in `directories`, which themselves stay, with their metadata.
    pub fn clear(&mut self, directories: &[InodeId]) {
        if directories.is_empty() {
            return;
        }
        let mut cleared = vec![false; self.inodes.len()];
        for directory in directories {
            cleared[directory.index()] = true;
        }
        for (at, entry) in (0_u32..).zip(&mut self.entries) {
            if entry.parent == REMOVED || !cleared[entry.parent as usize] {
                continue;
            }
            let hash = key(&self.hasher, entry.parent, entry.name);
            if let Ok(found) = self.index.find_entry(hash, |&other| other == at) {
                found.remove();
            }
            entry.parent = REMOVED;
        }
    }

    /// Makes every name of the first inode of each pair a name of the second inode, which is not a directory.
    pub fn relink(&mut self, links: &[(InodeId, InodeId)]) {
        if links.is_empty() {
            return;
        }
        let mut targets: Vec<u32> = (0..).take(self.inodes.len()).collect();
        for (from, to) in links {
            targets[from.index()] = to.0;
        }
        for entry in &mut self.entries {
            let to = targets[entry.inode() as usize];
            entry.target = entry.target & super::OWNER | to;
        }
    }

    /// Copies an inode from `source` without its names. Copying it again returns the same inode.
    ///
    /// # Errors
    /// [`TreeError::TooLarge`] if this builder cannot hold another inode, string or set of xattrs.
    pub fn copy_inode(
        &mut self,
        source: &Self,
        inode: InodeId,
        copied: &mut Copied,
    ) -> Result<InodeId, TreeError> {
        if let Some(here) = copied.get(inode) {
            return Ok(here);
        }
        let id = self.next_inode()?;
        let mut raw = source.inodes[inode.index()].clone();
        raw.xattrs = self.copy_xattrs(source, raw.xattrs, copied)?;
        match raw.kind {
            Kind::Inline | Kind::ExternalOfObject | Kind::Symlink => {
                raw.first = self.copy_string(source, raw.first, copied)?;
            }
            Kind::External => {
                raw.first = self.copy_string(source, raw.first, copied)?;
                raw.second = self.copy_string(source, raw.second, copied)?;
            }
            Kind::Directory | Kind::CharDevice | Kind::BlockDevice | Kind::Fifo | Kind::Socket => {}
        }
        raw.flags &= !super::ATTACHED;
        self.inodes.push(raw);
        copied.is_now(inode, id);
        Ok(id)
    }

    /// Gives the directory `here` the metadata and xattrs of `inode` of `source`, so that it no longer counts as
    /// implicit.
    ///
    /// # Errors
    /// [`TreeError::TooLarge`] if this builder cannot hold another string or set of xattrs.
    pub fn copy_metadata(
        &mut self,
        source: &Self,
        inode: InodeId,
        here: InodeId,
        copied: &mut Copied,
    ) -> Result<(), TreeError> {
        let from = &source.inodes[inode.index()];
        let xattrs = self.copy_xattrs(source, from.xattrs, copied)?;
        let raw = &mut self.inodes[here.index()];
        raw.flags &= !IMPLICIT;
        raw.permissions = from.permissions;
        (raw.uid, raw.gid) = (from.uid, from.gid);
        (raw.seconds, raw.nanoseconds) = (from.seconds, from.nanoseconds);
        raw.xattrs = xattrs;
        Ok(())
    }

    fn copy_string(
        &mut self,
        source: &Self,
        id: u32,
        copied: &mut Copied,
    ) -> Result<u32, TreeError> {
        if let Some(known) = copied.strings[id as usize] {
            return Ok(known);
        }
        let here = self.string(source.strings.get(id))?;
        copied.strings[id as usize] = Some(here);
        Ok(here)
    }

    fn copy_xattrs(
        &mut self,
        source: &Self,
        id: XattrsId,
        copied: &mut Copied,
    ) -> Result<XattrsId, TreeError> {
        if let Some(known) = copied.xattrs[id.index()] {
            return Ok(known);
        }
        let mut set = Vec::new();
        for string in source.xattrs.get(id.0).chunks_exact(4) {
            let string = u32::from_le_bytes(string.try_into().expect("chunks of 4"));
            set.extend(self.copy_string(source, string, copied)?.to_le_bytes());
        }
        let here = self.xattrs.intern(&set).ok_or(TreeError::TooLarge("4 GiB of xattrs"))?;
        copied.xattrs[id.index()] = Some(XattrsId(here));
        Ok(XattrsId(here))
    }
}
