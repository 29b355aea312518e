//! Merges layers into one tree.
//!
//! A [`Layer`] collects the entries of one tar by the rules that apply within a layer. [`Layer::onto`] then applies
//! the layer to the tree of the lower layers. Layers can be collected concurrently and in any order, and applying them
//! needs no file contents. `docs/format/tree.md` defines the rules.
//!
//! The *last* entry for a path is used, so the result does not depend on the order of whiteouts. Hard links refer to
//! the lower layers as they were before this layer hid anything.

mod apply;
mod follow;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use follow::{Blocked, FollowedPath, Missing, Steps};

use crate::tar::{Whiteout, whiteout};
use crate::tree::{
    Builder, InodeId, Link, Metadata, Node, TreeError, XattrsId, check_name, components,
};
use crate::verity::ObjectId;

/// The reason why an entry cannot be in a layer, or why a layer cannot be applied to the lower layers. Messages show
/// paths with escapes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayerError {
    /// The tree cannot hold the entry.
    #[error("cannot add \"{}\"", path.escape_ascii())]
    Entry {
        /// Path of the entry.
        path: Vec<u8>,
        /// The reason.
        source: TreeError,
    },
    /// A component of the path is `..`.
    #[error("the path \"{}\" leads out of the layer", .0.escape_ascii())]
    Escape(Vec<u8>),
    /// A component of the path is a file or a device of the same layer.
    #[error("a component of the path \"{}\" is not a directory", .0.escape_ascii())]
    ParentNotDirectory(Vec<u8>),
    /// The path leads through more than 40 symlinks, possibly in a loop.
    #[error("the path \"{}\" has more than 40 symlinks", .0.escape_ascii())]
    SymlinkLoop(Vec<u8>),
    /// The layer's paths lead through more components of symlink targets than a layer of its size may have. Such a
    /// layer was made to take long.
    #[error(
        "the symlinks on the path \"{}\" have too many components: those of all paths of the \
        layer together may have {limit}",
        path.escape_ascii()
    )]
    Steps {
        /// The path at which the limit was exceeded.
        path: Vec<u8>,
        /// Number of steps that the layer may take.
        limit: u64,
    },
    /// The caller stopped the operation.
    #[error("stopped")]
    Stopped,
    /// The target of the hard link is neither in this layer nor in a lower layer, or the target is the link itself.
    #[error(
        "\"{}\" is a hard link to \"{}\", which does not exist",
        path.escape_ascii(), target.escape_ascii()
    )]
    LinkTarget {
        /// Path of the entry.
        path: Vec<u8>,
        /// The link's target.
        target: Vec<u8>,
    },
    /// The target of the hard link is a directory.
    #[error(
        "\"{}\" is a hard link to \"{}\", a directory",
        path.escape_ascii(), target.escape_ascii()
    )]
    LinkToDirectory {
        /// Path of the entry.
        path: Vec<u8>,
        /// The link's target.
        target: Vec<u8>,
    },
    /// An entry for the root is not a directory.
    #[error("the root is not a directory")]
    RootNotDirectory,
    /// A component of the path other than the last one is a whiteout.
    #[error("\"{}\" is below a whiteout", .0.escape_ascii())]
    BelowWhiteout(Vec<u8>),
    /// An entry of the layer would be missing from the tree. This is a bug in this module; it must not lose files
    /// silently.
    #[error("\"{}\" would be missing from the image", .0.escape_ascii())]
    Lost(Vec<u8>),
    /// Some entries were neither laid out nor replaced, and do not hide others. This is a bug in this module, like
    /// [`Lost`](Self::Lost).
    #[error(
        "{given} entries do not add up: {laid} are laid out, {hide} hide others, and {replaced} \
        are replaced"
    )]
    Unaccounted {
        /// Number of entries of the layer.
        given: u64,
        /// Number of entries that are names of the tree now.
        laid: u64,
        /// Number of whiteouts and of ignored names.
        hide: u64,
        /// Number of entries that a later entry of the same layer replaced.
        replaced: u64,
    },
}

/// Numbers of entries of a layer, by their effect.
#[derive(Debug, Default)]
struct Tally {
    /// All entries that were added without an error.
    given: u64,
    /// Whiteouts and ignored names.
    hide: u64,
    /// Number of entries that a later entry replaced. Entries below a replaced directory are not included.
    replaced: u64,
}

/// Mode of every symlink on Linux, which replaces the mode in a tar. Source: symlink(7), "Ownership, permissions, and
/// timestamps".
const SYMLINK_PERMISSIONS: u16 = 0o777;

/// The names of lower layers that a whiteout hides.
#[derive(Debug)]
enum Hidden {
    /// One name in a directory.
    Name {
        /// Path of the directory.
        directory: Vec<u8>,
        name: Vec<u8>,
    },
    /// All names in the directory at this path.
    Children(Vec<u8>),
}

/// A hard link whose target is not an earlier entry of its layer.
#[derive(Debug)]
struct Pending {
    /// Inode that stands for the target until the target is found.
    placeholder: InodeId,
    path: Vec<u8>,
    target: Vec<u8>,
}

/// The entries of one layer, and the names that it hides in the lower layers.
#[derive(Debug)]
pub struct Layer {
    tree: Builder,
    hidden: Vec<Hidden>,
    pending: Vec<Pending>,
    tally: Tally,
    steps: Steps,
    /// Directory of the last entry, because the next entry is often in the same: its path in that entry, and its
    /// inode.
    last: (Vec<u8>, InodeId),
}

impl Default for Layer {
    fn default() -> Self {
        Self::new()
    }
}

/// The meaning of an entry's path.
enum Role<'a> {
    /// The root directory.
    Root,
    /// A file or directory: the path of its parent directory, and its name.
    Entry(&'a [u8], &'a [u8]),
    /// A whiteout.
    Hides(Hidden),
    /// A name without an effect.
    Ignored,
}

fn role(path: &[u8]) -> Result<Role<'_>, LayerError> {
    let mut last: Option<&[u8]> = None;
    for name in components(path).filter(|name| *name != b".") {
        if name == b".." {
            return Err(LayerError::Escape(path.to_vec()));
        }
        match last.map(whiteout) {
            None | Some(Whiteout::None) => {}
            // AUFS keeps its metadata below such a directory.
            Some(Whiteout::Ignored) => return Ok(Role::Ignored),
            Some(Whiteout::Hide(_) | Whiteout::Opaque) => {
                return Err(LayerError::BelowWhiteout(path.to_vec()));
            }
        }
        last = Some(name);
    }
    let Some(name) = last else { return Ok(Role::Root) };
    let start = name.as_ptr().addr() - path.as_ptr().addr();
    let directory = &path[..start];
    Ok(match whiteout(name) {
        Whiteout::None => Role::Entry(directory, name),
        Whiteout::Ignored => Role::Ignored,
        Whiteout::Opaque => Role::Hides(Hidden::Children(directory.to_vec())),
        Whiteout::Hide(hidden) => {
            Role::Hides(Hidden::Name { directory: directory.to_vec(), name: hidden.to_vec() })
        }
    })
}

impl Layer {
    /// Creates a layer without entries.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tree: Builder::new(),
            hidden: Vec::new(),
            pending: Vec::new(),
            tally: Tally::default(),
            steps: Steps::new(),
            last: (Vec::new(), InodeId::ROOT),
        }
    }

    /// Adds a set of xattrs for [`Layer::entry`], like [`Builder::xattrs`].
    ///
    /// # Errors
    /// [`TreeError`] if a name or value is invalid.
    pub fn xattrs<'a>(
        &mut self,
        pairs: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Result<XattrsId, TreeError> {
        self.tree.xattrs(pairs)
    }

    /// Adds an entry that is not a hard link. Leading slashes and components `.` are dropped. Returns the inode, or
    /// `None` for a whiteout or another name without an inode.
    ///
    /// # Errors
    /// [`LayerError`]. The parent directories of the entry may have been added nevertheless.
    pub fn entry(
        &mut self,
        path: &[u8],
        metadata: &Metadata,
        xattrs: XattrsId,
        node: Node<'_>,
    ) -> Result<Option<InodeId>, LayerError> {
        let mut metadata = *metadata;
        if let Node::Symlink(_) = node {
            metadata.permissions = SYMLINK_PERMISSIONS;
        }
        let added = self.add_entry(path, &metadata, xattrs, node)?;
        self.tally.given += 1;
        self.steps.add_entry();
        Ok(added)
    }

    fn add_entry(
        &mut self,
        path: &[u8],
        metadata: &Metadata,
        xattrs: XattrsId,
        node: Node<'_>,
    ) -> Result<Option<InodeId>, LayerError> {
        let failed = |source| LayerError::Entry { path: path.to_vec(), source };
        let (directory, name) = match role(path)? {
            Role::Ignored => {
                self.tally.hide += 1;
                return Ok(None);
            }
            Role::Hides(hidden) => {
                self.tally.hide += 1;
                self.hidden.push(hidden);
                return Ok(None);
            }
            Role::Root if node == Node::Directory => {
                self.describe(InodeId::ROOT, metadata, xattrs).map_err(failed)?;
                return Ok(Some(InodeId::ROOT));
            }
            Role::Root => return Err(LayerError::RootNotDirectory),
            Role::Entry(directory, name) => (self.directory(path, directory)?, name),
        };
        let old = self.tree.lookup(directory, name);
        if let Some(old) = old.filter(|old| node == Node::Directory && self.tree.is_directory(*old))
        {
            self.describe(old, metadata, xattrs).map_err(failed)?;
            return Ok(Some(old));
        }
        check_name(name).map_err(failed)?;
        let inode = self.tree.inode(metadata, xattrs, node).map_err(failed)?;
        self.put(directory, name, inode).map_err(failed)?;
        Ok(Some(inode))
    }

    /// Adds a hard link, which is a further name of the file at `target`.
    ///
    /// # Errors
    /// [`LayerError`], as for an entry. [`Layer::onto`] reports a missing target.
    pub fn link(&mut self, path: &[u8], target: &[u8]) -> Result<(), LayerError> {
        self.add_link(path, target)?;
        self.tally.given += 1;
        self.steps.add_entry();
        Ok(())
    }

    fn add_link(&mut self, path: &[u8], target: &[u8]) -> Result<(), LayerError> {
        let failed = |source| LayerError::Entry { path: path.to_vec(), source };
        let to = match role(target)? {
            Role::Entry(directory, name) => Some((directory, name)),
            Role::Root => None,
            // Such a path contains no file.
            Role::Hides(_) | Role::Ignored => Some((target, b"".as_slice())),
        };
        let (directory, name) = match role(path)? {
            Role::Ignored => {
                self.tally.hide += 1;
                return Ok(());
            }
            // AUFS writes whiteouts as hard links to one file.
            Role::Hides(hidden) => {
                self.tally.hide += 1;
                self.hidden.push(hidden);
                return Ok(());
            }
            Role::Root => return Err(LayerError::RootNotDirectory),
            Role::Entry(directory, name) => (self.directory(path, directory)?, name),
        };
        let to_directory =
            || LayerError::LinkToDirectory { path: path.to_vec(), target: target.to_vec() };
        let (below, target_name) = to.ok_or_else(to_directory)?;
        let earlier = match follow::directory(&mut self.tree, below, Missing::Stop, &mut self.steps)
        {
            Ok(FollowedPath::Directory(found)) => self.tree.lookup(found, target_name),
            Err(blocked @ Blocked::Steps { .. }) => return Err(blocked.into_error(path)),
            Ok(FollowedPath::Missing) | Err(_) => None,
        };
        let inode = match earlier {
            Some(found) if self.tree.is_directory(found) => return Err(to_directory()),
            Some(found) if self.tree.lookup(directory, name) == Some(found) => {
                self.tally.replaced += 1;
                return Ok(());
            }
            Some(found) => found,
            None => {
                check_name(name).map_err(failed)?;
                let inode = self.tree.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Fifo);
                let placeholder = inode.map_err(failed)?;
                let (path, target) = (path.to_vec(), target.to_vec());
                self.pending.push(Pending { placeholder, path, target });
                placeholder
            }
        };
        self.put(directory, name, inode).map_err(failed)
    }

    /// Sets the object of an external file that was added without one; does nothing for other inodes.
    ///
    /// # Errors
    /// [`TreeError::TooLarge`] if the strings take more than 4 GiB.
    pub fn set_object(&mut self, inode: InodeId, object: &ObjectId) -> Result<(), TreeError> {
        self.tree.set_object(inode, object)
    }

    fn put(&mut self, directory: InodeId, name: &[u8], inode: InodeId) -> Result<(), TreeError> {
        if let Some(old) = self.tree.remove(directory, name) {
            self.tally.replaced += u64::from(!self.tree.is_implicit(old));
            // The removed name may have been part of that path.
            self.last = (Vec::new(), InodeId::ROOT);
        }
        self.tree.insert(directory, name, inode, Link::Equal)
    }

    /// Gives a directory the metadata of an entry. An earlier entry for the directory then counts as replaced.
    fn describe(
        &mut self,
        inode: InodeId,
        metadata: &Metadata,
        xattrs: XattrsId,
    ) -> Result<(), TreeError> {
        let was_described = !self.tree.is_implicit(inode);
        self.tree.describe(inode, metadata, xattrs)?;
        self.tally.replaced += u64::from(was_described);
        Ok(())
    }

    /// Returns the directory at the path `at`, which is created if it does not exist.
    fn directory(&mut self, path: &[u8], at: &[u8]) -> Result<InodeId, LayerError> {
        if self.last.0 == at {
            return Ok(self.last.1);
        }
        let FollowedPath::Directory(found) =
            follow::directory(&mut self.tree, at, Missing::Make, &mut self.steps)
                .map_err(|it| it.into_error(path))?
        else {
            return Err(LayerError::ParentNotDirectory(path.to_vec()));
        };
        self.last.0.clear();
        self.last.0.extend_from_slice(at);
        self.last.1 = found;
        Ok(found)
    }
}
