//! The directories on the path to the one that is being copied.
//!
//! A container can make trees that are deeper than any path, and deeper than this process may have descriptors. So
//! only the innermost directories are open. The others are reached by `..` on the way back.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::entry::{inherit_nothing, parent};
use super::index::{CopyIndex, DirectoryId};
use super::stamp::{FileKey, Stamp, stat};

/// Number of directories that are open, each in the source and in the copy.
const OPEN: usize = 64;

/// A directory that is being copied.
#[derive(Debug)]
pub(super) struct Level<N> {
    /// Directory of the source; `None` for outer directories.
    from: Option<OwnedFd>,
    key: FileKey,
    /// Directory of the copy, once it is needed.
    to: Option<OwnedFd>,
    pub(super) id: DirectoryId,
    /// Entries that are left, the last one first.
    pub(super) left: Vec<N>,
    /// Whether the metadata of the copy must be set.
    pub(super) is_due: bool,
}

impl<N> Level<N> {
    pub(super) fn new(from: OwnedFd, key: FileKey, id: DirectoryId) -> Self {
        Self { from: Some(from), key, to: None, id, left: Vec::new(), is_due: false }
    }

    /// Returns the directory of the source. Only for the innermost level.
    pub(super) fn from(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.from.as_ref().map(|it| it.as_fd()).ok_or(Errno::BADF)
    }

    /// Returns the directories of the source and of the copy, if both are open.
    pub(super) fn both(&self) -> Result<(BorrowedFd<'_>, BorrowedFd<'_>), Errno> {
        let to = self.to.as_ref().map(|it| it.as_fd()).ok_or(Errno::BADF)?;
        Ok((self.from()?, to))
    }

    /// Returns the directory of the copy, to change it. So its times must be set afterwards.
    pub(super) fn to(
        &mut self,
        index: &CopyIndex,
        root: BorrowedFd<'_>,
    ) -> Result<BorrowedFd<'_>, Errno> {
        if !self.is_due || self.to.is_none() {
            self.is_due = true;
            inherit_nothing(self.copy(index, root)?)?;
        }
        self.copy(index, root)
    }

    /// Returns the directory of the copy, to read it.
    pub(super) fn copy(
        &mut self,
        index: &CopyIndex,
        root: BorrowedFd<'_>,
    ) -> Result<BorrowedFd<'_>, Errno> {
        let to = match self.to.take() {
            Some(to) => to,
            None => index.open(root, self.id)?,
        };
        Ok((*self.to.insert(to)).as_fd())
    }
}

/// Result of a step back to the parent directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Back {
    Parent,
    /// The source's directory was moved, so the way to its former parent is lost.
    Lost,
}

/// Levels from the root to the innermost directory.
#[derive(Debug)]
pub(super) struct Way<N>(Vec<Level<N>>);

impl<N> Way<N> {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn push(&mut self, level: Level<N>) {
        if let Some(outer) = self.0.len().checked_sub(OPEN).and_then(|at| self.0.get_mut(at)) {
            outer.from = None;
            outer.to = None;
        }
        self.0.push(level);
    }

    pub(super) fn last(&mut self) -> Option<&mut Level<N>> {
        self.0.last_mut()
    }

    pub(super) fn pop(&mut self) -> Option<Level<N>> {
        self.0.pop()
    }

    /// Opens the directory above one that was popped.
    pub(super) fn back(&mut self, below: &Level<N>) -> Result<Back, Errno> {
        let Some(above) = self.0.last_mut() else { return Ok(Back::Parent) };
        if above.from.is_some() {
            return Ok(Back::Parent);
        }
        let from = parent(below.from()?)?;
        if Stamp::of(&stat(&from)?).key != above.key {
            return Ok(Back::Lost);
        }
        above.from = Some(from);
        // Directories of the copy are not moved.
        above.to = below.to.as_ref().map(|to| parent(to.as_fd())).transpose()?;
        Ok(Back::Parent)
    }
}
