//! Finding a directory by a path whose components may be symlinks, as a runtime that unpacks layers would, with the
//! root of the tree as the root of all of them.

use std::collections::VecDeque;

use super::LayerError;
use crate::tree::{Builder, InodeId, TreeError, components};

/// The most symlinks on one path. Source: Linux `MAXSYMLINKS`.
const SYMLINKS_MAX: usize = 40;

/// What to do where a component is not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Missing {
    /// Make it, as a directory that no source described.
    Make,
    /// Answer [`Place::Missing`].
    Stop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Directory(InodeId),
    Missing,
}

/// Why there is no directory.
#[derive(Debug)]
pub(super) enum Blocked {
    NotDirectory,
    Loop,
    Tree(TreeError),
}

impl Blocked {
    pub(super) fn of(self, path: &[u8]) -> LayerError {
        let path = path.to_vec();
        match self {
            Self::NotDirectory => LayerError::ParentNotDirectory(path),
            Self::Loop => LayerError::SymlinkLoop(path),
            Self::Tree(source) => LayerError::Entry { path, source },
        }
    }
}

/// The directory at `path`, below the root.
pub(super) fn directory(
    tree: &mut Builder,
    path: &[u8],
    missing: Missing,
) -> Result<Place, Blocked> {
    let mut here = InodeId::ROOT;
    for name in components(path).filter(|name| *name != b".") {
        match tree.lookup(here, name) {
            Some(found) if tree.is_directory(found) => here = found,
            Some(found) if tree.symlink_target(found).is_some() => {
                return through_symlinks(tree, path, missing);
            }
            Some(_) => return Err(Blocked::NotDirectory),
            None if missing == Missing::Stop => return Ok(Place::Missing),
            None => here = tree.subdirectory(here, name).map_err(Blocked::Tree)?,
        }
    }
    Ok(Place::Directory(here))
}

fn through_symlinks(tree: &mut Builder, path: &[u8], missing: Missing) -> Result<Place, Blocked> {
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
            (None, Missing::Stop) => return Ok(Place::Missing),
            (None, Missing::Make) => tree.subdirectory(here, &name).map_err(Blocked::Tree)?,
        };
        if let Some(target) = tree.symlink_target(found) {
            symlinks += 1;
            if symlinks > SYMLINKS_MAX {
                return Err(Blocked::Loop);
            }
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
    Ok(Place::Directory(here))
}
