//! Trees as composefs-rs makes them of OCI images, so that Quire computes the ids that composefs-rs prints.
//!
//! The rules differ from those of [`layer`](crate::layer) and [`tree`](crate::tree). So a [`Draft`] takes the entries
//! of all layers in order, is then transformed, and becomes a tree for the writer.
//! `docs/format/composefs-rs.md` has the rules, which are numbered, with their sources.

mod finish;
mod labels;
mod layout2;

use std::collections::{BTreeMap, BTreeSet};

pub use labels::{LabelError, LabelPolicy, POLICY_MAX, PolicyText, policy_name};
pub use layout2::write_layout2;

use crate::erofs::read::PATH_MAX;
use crate::tree::{Content, InodeId, Location, Metadata, Node, Tree, components};
use crate::verity::ObjectId;

/// The xattr that is kept in images. Rule X1.
const KEPT_XATTR: &[u8] = b"security.capability";

/// The reason why composefs-rs makes no image of the layers, or why Quire cannot follow it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SealedTreeError {
    /// A path is longer than Linux allows.
    #[error("the path that begins with \"{}\" has {length} bytes, more than 4095", start.escape_ascii())]
    Path {
        /// The first bytes of the path.
        start: Vec<u8>,
        /// Length of the path in bytes.
        length: usize,
    },
    /// The directory of an entry, or of a link's target, is missing or is another type of file.
    #[error(
        "\"{}\" needs the directory \"{}\", which no entry before it has made",
        path.escape_ascii(), directory.escape_ascii()
    )]
    NoDirectory {
        /// Path of the entry.
        path: Vec<u8>,
        /// Path of the directory.
        directory: Vec<u8>,
    },
    /// A hard link does not lead to a file.
    #[error(
        "\"{}\" is a hard link to \"{}\", which is not a file that an entry before it has made",
        path.escape_ascii(), target.escape_ascii()
    )]
    Link {
        /// Path of the link.
        path: Vec<u8>,
        /// Path that the link states.
        target: Vec<u8>,
    },
    /// The image lacks a directory that the transformation needs.
    #[error("the image has no directory /{0}, which composefs-rs requires")]
    Required(&'static str),
    /// A path that must be a directory, if it exists, is another type of file.
    #[error("/{0} is not a directory of the image, and composefs-rs refuses such images")]
    NotDirectory(String),
    /// A file of the SELinux policy is not a regular file.
    #[error("/{0} is not a regular file, and composefs-rs refuses such images")]
    NotRegular(String),
    /// A time is before 1970. composefs-rs reads such times as very late ones, or refuses them.
    #[error("\"{}\" has a time before 1970, which composefs-rs does not read as such", .0.escape_ascii())]
    Time(Vec<u8>),
    /// A character device 0:0 has several names.
    #[error("\"{}\" is another name of a device 0:0, which composefs-rs does not write", .0.escape_ascii())]
    LinkedDevice(Vec<u8>),
    /// The entries are more than 2^32.
    #[error("the layers have more than 2^32 entries")]
    TooLarge,
}

/// The layout of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComposefsLayout {
    /// C's, which composefs-rs writes by default.
    V1,
    /// That of composefs-rs before it had V1.
    V2,
}

/// A regular file of a draft whose object can be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftFile(usize);

/// A tree that is made of entries in their order.
#[derive(Debug)]
pub struct Draft {
    /// The first one is the root. Items that no directory leads to are not in the tree.
    items: Vec<Item>,
    /// The values of labels, by [`Item::label`].
    labels: Vec<Vec<u8>>,
}

#[derive(Debug, Clone)]
struct Item {
    metadata: Metadata,
    /// Value of [`KEPT_XATTR`].
    capability: Option<Box<[u8]>>,
    /// Index of the SELinux label.
    label: Option<u32>,
    kind: ItemKind,
}

#[derive(Debug, Clone)]
enum ItemKind {
    Directory(BTreeMap<Box<[u8]>, u32>),
    Inline(Box<[u8]>),
    External { size: u64, object: Option<ObjectId> },
    Symlink(Box<[u8]>),
    CharDevice(u64),
    BlockDevice(u64),
    Fifo,
    Socket,
}

const ROOT: u32 = 0;

/// A file below a directory of a draft.
#[derive(Debug)]
pub enum Lookup<'a> {
    /// The directory does not exist.
    NoDirectory,
    /// The directory has no such name.
    Absent,
    /// The regular file.
    Found(Content<'a>),
}

impl Default for Draft {
    fn default() -> Self {
        Self::new()
    }
}

impl Draft {
    /// Creates a tree that consists of a root directory.
    #[must_use]
    pub fn new() -> Self {
        let kind = ItemKind::Directory(BTreeMap::new());
        let root = Item { metadata: Metadata::IMPLICIT, capability: None, label: None, kind };
        Self { items: vec![root], labels: Vec::new() }
    }

    /// Copies a tree, which was not made of layers.
    ///
    /// # Errors
    /// [`SealedTreeError`] if a path is too long.
    pub fn from_tree(tree: &Tree) -> Result<Self, SealedTreeError> {
        let mut draft = Self::new();
        let mut made: Vec<Option<u32>> = vec![None; tree.inode_bound()];
        if let Some(root) = made.get_mut(InodeId::ROOT.index()) {
            *root = Some(ROOT);
        }
        let mut walk = tree.walk();
        while let Some((path, entry)) = walk.next() {
            let inode = entry.inode;
            let parent = draft.parent(path)?;
            let at = match made[inode.id().index()] {
                Some(at) => at,
                None => {
                    let xattrs = inode.xattrs();
                    let at = draft.push(&inode.metadata(), xattrs, inode.node())?;
                    made[inode.id().index()] = Some(at);
                    at
                }
            };
            draft.children_mut(parent).insert(entry.name.into(), at);
        }
        Ok(draft)
    }

    /// Adds an entry of a layer; paths are normalised, as [`Reader`](crate::tar::Reader) does. Returns the file if it
    /// is external and in the tree. Rules L1 to L5.
    ///
    /// # Errors
    /// [`SealedTreeError`] if composefs-rs refuses the entry.
    pub fn entry<'x>(
        &mut self,
        path: &[u8],
        metadata: &Metadata,
        xattrs: impl Iterator<Item = (&'x [u8], &'x [u8])>,
        node: Node<'_>,
    ) -> Result<Option<DraftFile>, SealedTreeError> {
        let Some(name) = components(path).next_back() else {
            // The metadata of the root come from /usr.
            return Ok(None);
        };
        if metadata.mtime.seconds < 0 {
            return Err(SealedTreeError::Time(path.to_vec()));
        }
        let parent = self.parent(path)?;
        if self.hide(parent, name) {
            return Ok(None);
        }
        let is_directory = node == Node::Directory;
        if is_directory
            && let Some(&there) = self.children(parent).get(name)
            && self.is_directory(there)
        {
            let capability = capability(xattrs);
            let item = &mut self.items[there as usize];
            (item.metadata, item.capability) = (*metadata, capability);
            return Ok(None);
        }
        let at = self.push(metadata, xattrs, node)?;
        self.children_mut(parent).insert(name.into(), at);
        let is_external = matches!(node, Node::Regular(Content::External { .. }));
        Ok(is_external.then_some(DraftFile(at as usize)))
    }

    /// Adds a hard link of a layer. Rule L6.
    ///
    /// # Errors
    /// [`SealedTreeError`] if composefs-rs refuses the link.
    pub fn link(&mut self, path: &[u8], target: &[u8]) -> Result<(), SealedTreeError> {
        let wrong = || SealedTreeError::Link { path: path.to_vec(), target: target.to_vec() };
        let target_name = components(target).next_back().ok_or_else(wrong)?;
        let directory = self.parent(target).map_err(|_no_directory| wrong())?;
        let found = self.children(directory).get(target_name).copied();
        let found = found.filter(|it| !self.is_directory(*it)).ok_or_else(wrong)?;
        let name = components(path).next_back().ok_or_else(wrong)?;
        let parent = self.parent(path)?;
        if !self.hide(parent, name) {
            self.children_mut(parent).insert(name.into(), found);
        }
        Ok(())
    }

    /// Sets the object of an external file.
    pub fn set_object(&mut self, file: DraftFile, id: ObjectId) {
        if let ItemKind::External { object, .. } = &mut self.items[file.0].kind {
            *object = Some(id);
        }
    }

    /// Returns a regular file, of a directory that may be absent.
    ///
    /// # Errors
    /// [`SealedTreeError`] if the directory or the file is of another type.
    pub fn file(&self, directory: &str, name: &str) -> Result<Lookup<'_>, SealedTreeError> {
        let mut at = ROOT;
        for component in components(directory.as_bytes()) {
            match self.children(at).get(component) {
                None => return Ok(Lookup::NoDirectory),
                Some(&next) if self.is_directory(next) => at = next,
                Some(_) => return Err(SealedTreeError::NotDirectory(directory.to_owned())),
            }
        }
        let Some(&found) = self.children(at).get(name.as_bytes()) else {
            return Ok(Lookup::Absent);
        };
        Ok(Lookup::Found(match &self.items[found as usize].kind {
            ItemKind::Inline(bytes) => Content::Inline(bytes),
            ItemKind::External { size, object } => {
                Content::External { size: *size, object: *object, location: Location::None }
            }
            _ => return Err(SealedTreeError::NotRegular(format!("{directory}/{name}"))),
        }))
    }

    /// Applies the rules for images of OCI layers: R1 and R2.
    ///
    /// # Errors
    /// [`SealedTreeError`] if composefs-rs refuses the image.
    pub fn transform(&mut self) -> Result<(), SealedTreeError> {
        let usr = &self.items[self.required("usr")? as usize];
        let (metadata, capability) = (usr.metadata, usr.capability.clone());
        let root = &mut self.items[ROOT as usize];
        (root.metadata, root.capability) = (metadata, capability);
        if let Some(&run) = self.children(ROOT).get(&b"run"[..]) {
            if !self.is_directory(run) {
                return Err(SealedTreeError::NotDirectory("run".to_owned()));
            }
            self.children_mut(run).clear();
            self.items[run as usize].metadata.mtime = metadata.mtime;
        }
        Ok(())
    }

    /// Empties the directories that a boot fills: rules B0 and B1. [`relabel`](Self::relabel) must follow if the
    /// image has an SELinux policy.
    ///
    /// # Errors
    /// [`SealedTreeError`] if one of them is missing, or is another type of file.
    pub fn transform_for_boot(&mut self) -> Result<(), SealedTreeError> {
        // composefs-rs looks for kernels and boot loader entries in these directories.
        for directory in
            ["boot/loader/entries", "boot/EFI/Linux", "boot/loader/addons", "usr/lib/modules"]
        {
            self.file(directory, "")?;
        }
        let seconds = self.items[self.required("usr")? as usize].metadata.mtime.seconds;
        for name in ["boot", "sysroot"] {
            let at = self.required(name)?;
            self.children_mut(at).clear();
            self.items[at as usize].metadata.mtime.seconds = seconds;
        }
        Ok(())
    }

    /// Checks that no character device 0:0 has several names: composefs-rs writes it as an escaped whiteout, and
    /// refuses one with several names.
    ///
    /// # Errors
    /// [`SealedTreeError::LinkedDevice`], with one of the names.
    pub fn check_devices(&self) -> Result<(), SealedTreeError> {
        let (mut open, mut seen) = (vec![ROOT], BTreeSet::new());
        while let Some(at) = open.pop() {
            for (name, &child) in self.children(at) {
                match &self.items[child as usize].kind {
                    ItemKind::Directory(_) => open.push(child),
                    // The number of an inode has 32 bits.
                    ItemKind::CharDevice(number)
                        if number & 0xffff_ffff == 0 && !seen.insert(child) =>
                    {
                        return Err(SealedTreeError::LinkedDevice(name.to_vec()));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Returns the objects of all files in the tree.
    #[must_use]
    pub fn objects(&self) -> BTreeMap<ObjectId, u64> {
        let mut found = BTreeMap::new();
        let mut open = vec![ROOT];
        let mut seen = BTreeSet::new();
        while let Some(at) = open.pop() {
            match &self.items[at as usize].kind {
                ItemKind::Directory(children) => open.extend(children.values()),
                ItemKind::External { size, object: Some(object) } if seen.insert(at) => {
                    found.insert(*object, *size);
                }
                _ => {}
            }
        }
        found
    }

    fn push<'x>(
        &mut self,
        metadata: &Metadata,
        xattrs: impl Iterator<Item = (&'x [u8], &'x [u8])>,
        node: Node<'_>,
    ) -> Result<u32, SealedTreeError> {
        let at =
            u32::try_from(self.items.len()).map_err(|_out_of_range| SealedTreeError::TooLarge)?;
        let kind = match node {
            Node::Directory => ItemKind::Directory(BTreeMap::new()),
            Node::Regular(Content::Inline(bytes)) => ItemKind::Inline(bytes.into()),
            Node::Regular(Content::External { size, object, .. }) => {
                ItemKind::External { size, object }
            }
            Node::Symlink(target) => ItemKind::Symlink(target.into()),
            Node::CharDevice(number) => ItemKind::CharDevice(number),
            Node::BlockDevice(number) => ItemKind::BlockDevice(number),
            Node::Fifo => ItemKind::Fifo,
            Node::Socket => ItemKind::Socket,
        };
        let capability = capability(xattrs);
        self.items.push(Item { metadata: *metadata, capability, label: None, kind });
        Ok(at)
    }

    /// Applies a whiteout, at its position among the entries. Returns false for another name. Rule L4.
    fn hide(&mut self, directory: u32, name: &[u8]) -> bool {
        let Some(hidden) = name.strip_prefix(b".wh.") else { return false };
        let children = self.children_mut(directory);
        if hidden == b".wh..opq" {
            children.clear();
        } else {
            children.remove(hidden);
        }
        true
    }

    /// Returns the directory of a path, which an earlier entry must have made. Symlinks are not followed. Rule L2.
    fn parent(&self, path: &[u8]) -> Result<u32, SealedTreeError> {
        if path.len() > PATH_MAX {
            return Err(SealedTreeError::Path { start: path[..60].to_vec(), length: path.len() });
        }
        let mut names = components(path);
        names.next_back();
        let mut at = ROOT;
        for (depth, name) in names.enumerate() {
            match self.children(at).get(name) {
                Some(&next) if self.is_directory(next) => at = next,
                _ => {
                    let names: Vec<_> = components(path).take(depth + 1).collect();
                    let directory = names.join(&b'/');
                    return Err(SealedTreeError::NoDirectory { path: path.to_vec(), directory });
                }
            }
        }
        Ok(at)
    }

    fn required(&self, name: &'static str) -> Result<u32, SealedTreeError> {
        let found = self.children(ROOT).get(name.as_bytes()).copied();
        found.filter(|it| self.is_directory(*it)).ok_or(SealedTreeError::Required(name))
    }

    fn is_directory(&self, at: u32) -> bool {
        matches!(self.items[at as usize].kind, ItemKind::Directory(_))
    }

    /// Returns the names in a directory.
    fn children(&self, at: u32) -> &BTreeMap<Box<[u8]>, u32> {
        let ItemKind::Directory(children) = &self.items[at as usize].kind else {
            unreachable!("the caller has checked that it is a directory")
        };
        children
    }

    fn children_mut(&mut self, at: u32) -> &mut BTreeMap<Box<[u8]>, u32> {
        let ItemKind::Directory(children) = &mut self.items[at as usize].kind else {
            unreachable!("the caller has checked that it is a directory")
        };
        children
    }
}

/// Returns the value of the only xattr that is kept. Rule X1.
fn capability<'x>(xattrs: impl Iterator<Item = (&'x [u8], &'x [u8])>) -> Option<Box<[u8]>> {
    xattrs.filter(|(name, _)| *name == KEPT_XATTR).map(|(_, value)| value.into()).last()
}

#[cfg(test)]
mod tests;
