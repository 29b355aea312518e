//! Finds a directory by a path whose components may be symlinks, like a runtime that unpacks layers, with the root of
//! the tree as the root of all symlinks.

use std::collections::VecDeque;

use super::LayerError;
use crate::tree::{Builder, InodeId, TreeError, components};

/// Maximum number of symlinks on one path. Source: Linux `MAXSYMLINKS`.
const SYMLINKS_MAX: usize = 40;

/// Number of steps through symlinks that any layer may take, in addition to [`STEPS_PER_ENTRY`].
pub(super) const STEPS_AT_LEAST: u64 = 1 << 18;

/// Steps through symlinks per entry of a layer, on average. A path through `/lib -> usr/lib` takes two steps.
pub(super) const STEPS_PER_ENTRY: u64 = 64;

/// The number of steps that all paths of a layer take through symlinks, and its limit. A few symlinks can make each
/// path take 80,000 steps (40 targets of 4095 bytes), so without a limit a small layer could take hours.
#[derive(Debug)]
pub(super) struct Steps {
    taken: u64,
    limit: u64,
}

impl Steps {
    pub(super) const fn new() -> Self {
        Self { taken: 0, limit: STEPS_AT_LEAST }
    }

    /// Raises the limit by the share of one entry.
    pub(super) const fn add_entry(&mut self) {
        self.limit = self.limit.saturating_add(STEPS_PER_ENTRY);
    }

    /// Lowers the limit by [`STEPS_AT_LEAST`].
    #[cfg(test)]
    pub(super) const fn spare_nothing(&mut self) {
        self.limit -= STEPS_AT_LEAST;
    }

    /// Counts one step for each component of `path`.
    pub(super) fn take(&mut self, path: &[u8]) -> Result<(), Blocked> {
        self.taken = self.taken.saturating_add(components(path).map(|_| 1).sum());
        if self.taken > self.limit { Err(Blocked::Steps { limit: self.limit }) } else { Ok(()) }
    }
}

/// The action for a component that does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// Create it as an implicit directory.
    Make,
    /// Return [`FollowedPath::Missing`].
    Stop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FollowedPath {
    Directory(InodeId),
    Missing,
}

/// The reason why a path does not lead to a directory.
#[derive(Debug)]
pub(super) enum Blocked {
    NotDirectory,
    Loop,
    /// The layer has exceeded its limit of [`Steps`].
    Steps {
        limit: u64,
    },
    Tree(TreeError),
}

impl Blocked {
    pub(super) fn into_error(self, path: &[u8]) -> LayerError {
        let path = path.to_vec();
        match self {
            Self::NotDirectory => LayerError::ParentNotDirectory(path),
            Self::Loop => LayerError::SymlinkLoop(path),
            Self::Steps { limit } => LayerError::Steps { path, limit },
            Self::Tree(source) => LayerError::Entry { path, source },
        }
    }
}

/// Finds the directory at `path` below the root. Each component of a symlink's target counts as one of `steps`.
pub(super) fn directory(
    tree: &mut Builder,
    path: &[u8],
    missing: Missing,
    steps: &mut Steps,
) -> Result<FollowedPath, Blocked> {
    let mut here = InodeId::ROOT;
    for name in components(path).filter(|name| *name != b".") {
        match tree.lookup(here, name) {
            Some(found) if tree.is_directory(found) => here = found,
            Some(found) if tree.symlink_target(found).is_some() => {
                return through_symlinks(tree, path, missing, steps);
            }
            Some(_) => return Err(Blocked::NotDirectory),
            None if missing == Missing::Stop => return Ok(FollowedPath::Missing),
            None => here = tree.subdirectory(here, name).map_err(Blocked::Tree)?,
        }
    }
    Ok(FollowedPath::Directory(here))
}

fn through_symlinks(
    tree: &mut Builder,
    path: &[u8],
    missing: Missing,
    steps: &mut Steps,
) -> Result<FollowedPath, Blocked> {
    let mut left: VecDeque<Vec<u8>> = components(path).map(<[u8]>::to_vec).collect();
    let mut above = Vec::new();
    let mut here = InodeId::ROOT;
    let mut symlinks = 0;
    while let Some(name) = left.pop_front() {
        if name == b"." {
            continue;
        }
        if name == b".." {
            here = above.pop().unwrap_or(InodeId::ROOT);
            continue;
        }
        let found = match (tree.lookup(here, &name), missing) {
            (Some(found), _) => found,
            (None, Missing::Stop) => return Ok(FollowedPath::Missing),
            (None, Missing::Make) => tree.subdirectory(here, &name).map_err(Blocked::Tree)?,
        };
        if let Some(target) = tree.symlink_target(found) {
            symlinks += 1;
            if symlinks > SYMLINKS_MAX {
                return Err(Blocked::Loop);
            }
            steps.take(target)?;
            if target.starts_with(b"/") {
                above.clear();
                here = InodeId::ROOT;
            }
            for name in components(target).collect::<Vec<_>>().into_iter().rev() {
                left.push_front(name.to_vec());
            }
        } else if tree.is_directory(found) {
            above.push(here);
            here = found;
        } else {
            return Err(Blocked::NotDirectory);
        }
    }
    Ok(FollowedPath::Directory(here))
}
