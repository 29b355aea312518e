//! The directories on the path to the one that is being copied.
//!
//! A container can make trees that are deeper than any path, and deeper than this process may have descriptors. So
//! only the innermost directories are open. The others are reached by `..` on the way back.
//!
//! A directory of the copy is opened when it is needed, from the next one above that is open. A path from the root
//! would take a time that grows with the square of the depth.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::rc::Rc;

use rustix::io::Errno;

use super::entry::{inherit_nothing, parent};
use super::index::{CopyIndex, DirectoryId};
use super::stamp::{FileKey, Stamp, stat};

/// Number of directories that are open, each in the source and in the copy.
const OPEN: usize = 64;

/// An open directory of the copy, from which those below it are opened.
#[derive(Debug, Clone)]
pub(super) struct Base {
    directory: Rc<OwnedFd>,
    id: DirectoryId,
}

/// A directory that is being copied.
#[derive(Debug)]
pub(super) struct Level<N> {
    /// Directory of the source; `None` for outer directories.
    from: Option<OwnedFd>,
    key: FileKey,
    /// Directory of the copy, once it is needed; `None` for outer directories.
    to: Option<Rc<OwnedFd>>,
    /// Directory from which `to` is opened. `None` for the root, and once it is open.
    base: Option<Base>,
    pub(super) id: DirectoryId,
    /// Entries that are left, the last one first.
    pub(super) left: Vec<N>,
    /// Whether the metadata of the copy must be set.
    pub(super) is_due: bool,
    /// Whether new files in the copy inherit nothing.
    is_bare: bool,
}

impl<N> Level<N> {
    /// Returns the level of the root, whose copy is `to`.
    pub(super) fn root(from: OwnedFd, key: FileKey, to: OwnedFd) -> Self {
        let to = Some(Rc::new(to));
        Self { to, ..Self::with(from, key, DirectoryId::ROOT, None) }
    }

    /// Returns the level of a subdirectory. `base` is that of its parent directory.
    pub(super) fn below(from: OwnedFd, key: FileKey, id: DirectoryId, base: Base) -> Self {
        Self::with(from, key, id, Some(base))
    }

    fn with(from: OwnedFd, key: FileKey, id: DirectoryId, base: Option<Base>) -> Self {
        let (from, left) = (Some(from), Vec::new());
        Self { from, key, to: None, base, id, left, is_due: false, is_bare: false }
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

    /// Returns the directory of the copy, to change it. So its metadata must be set afterwards.
    pub(super) fn to(&mut self, index: &CopyIndex) -> Result<BorrowedFd<'_>, Errno> {
        self.is_due = true;
        if !self.is_bare {
            inherit_nothing(self.copy(index)?)?;
            self.is_bare = true;
        }
        self.copy(index)
    }

    /// Returns the directory of the copy, to read it.
    pub(super) fn copy(&mut self, index: &CopyIndex) -> Result<BorrowedFd<'_>, Errno> {
        let to = match self.to.take() {
            Some(to) => to,
            None => {
                let base = self.base.take().ok_or(Errno::BADF)?;
                Rc::new(index.open_below(base.directory.as_fd(), base.id, self.id)?)
            }
        };
        let to: &OwnedFd = self.to.insert(to);
        Ok(to.as_fd())
    }

    /// Returns the directory of the copy, if it is open.
    fn base(&self) -> Option<Base> {
        let to = self.to.as_ref()?;
        Some(Base { directory: Rc::clone(to), id: self.id })
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

    /// Returns the innermost directory of the copy that is open. At most [`OPEN`] levels are below it.
    pub(super) fn base(&self) -> Result<Base, Errno> {
        self.0.iter().rev().find_map(Level::base).ok_or(Errno::BADF)
    }

    /// Adds a level, and closes the directories of an outer one.
    pub(super) fn push(&mut self, level: Level<N>, index: &CopyIndex) -> Result<(), Errno> {
        let outer = self.0.len().checked_sub(OPEN);
        // On the way back, outer levels are closed already.
        if let Some([outer, inner, ..]) = outer.and_then(|at| self.0.get_mut(at..))
            && outer.from.is_some()
        {
            if inner.to.is_none() {
                // From here on, inner directories are opened from this one, and the way back leads through it.
                inner.base = outer.base();
                inner.copy(index)?;
            }
            (outer.from, outer.to, outer.base) = (None, None, None);
        }
        self.0.push(level);
        Ok(())
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
        if above.from.is_none() {
            let from = parent(below.from()?)?;
            if Stamp::of(&stat(&from)?).key != above.key {
                return Ok(Back::Lost);
            }
            above.from = Some(from);
        }
        if above.to.is_none()
            && let Some(to) = &below.to
        {
            // Directories of the copy are not moved.
            above.to = Some(Rc::new(parent(to.as_fd())?));
        }
        Ok(Back::Parent)
    }
}
