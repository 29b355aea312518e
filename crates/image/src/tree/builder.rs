//! The builder of trees.

mod lay;
mod merge;

pub use lay::{Choice, LayError};
pub use merge::Copied;

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher as _;

use super::freeze::freeze;
use super::frozen::Tree;
use super::intern::Interner;
use super::raw::{
    ATTACHED, IMPLICIT, Kind, OWNER, REMOVED, RawEntry, RawInode, STATED_LARGE, STATED_NLINK,
};
use super::{
    Content, InodeId, Location, Metadata, NAME_MAX, Node, SYMLINK_MAX, XATTR_NAME_MAX,
    XATTR_VALUE_MAX, XattrsId,
};
use crate::verity::ObjectId;

/// The reason why a tree cannot hold an entry. Messages show names and paths with escapes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// A file name that is empty, `.` or `..`, has more than 255 bytes, or contains `/` or NUL; with the reason.
    #[error("\"{}\" is not a file name: {}", .0.escape_ascii(), .1)]
    Name(Vec<u8>, &'static str),
    /// The directory already has an entry of that name.
    #[error("\"{}\" already exists", .0.escape_ascii())]
    Exists(Vec<u8>),
    /// A component of a path is not a directory.
    #[error("\"{}\" is not a directory", .0.escape_ascii())]
    NotDirectory(Vec<u8>),
    /// A second name for a directory.
    #[error("\"{}\" is a hard link to a directory", .0.escape_ascii())]
    LinkToDirectory(Vec<u8>),
    /// More permission bits than `0o7777`.
    #[error("mode {0:o} has bits beyond 7777")]
    Permissions(u16),
    /// A symlink target that is empty, longer than 4095 bytes, or contains NUL; with its length in bytes.
    #[error("a symlink's target must have 1 to 4095 bytes and no NUL; this one has {0}")]
    SymlinkTarget(usize),
    /// An external file whose size is 0 or more than 2^63 - 1 bytes.
    #[error("a file cannot have {0} bytes")]
    Size(u64),
    /// A location that is empty, contains NUL, or is that of an object although the file has no object.
    #[error("\"{}\" is not a valid path to a file's bytes", .0.escape_ascii())]
    Location(Vec<u8>),
    /// An xattr name that is empty, longer than 255 bytes, or contains NUL.
    #[error("\"{}\" is not an xattr name: it must have 1 to 255 bytes and no NUL", .0.escape_ascii())]
    XattrName(Vec<u8>),
    /// An xattr value of more than 65535 bytes, which no image can hold: the xattr's name, and the value's length.
    #[error("xattr \"{}\" has a value of {} bytes, more than 65535", .0.escape_ascii(), .1)]
    XattrValue(Vec<u8>, usize),
    /// More than 2^31 inodes, 2^32 names, or 4 GiB of names, of contents or of xattr sets.
    #[error("the tree is too large: it has more than {0}")]
    TooLarge(&'static str),
}

/// Whether a name owns its inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// The source states that this name is the file, and that the other names are links to it.
    Owner,
    /// The source states no owner: the first name in the byte order of whole paths owns the inode.
    Equal,
}

/// An unfinished tree. It accepts entries in any order, and finds names by hash.
#[derive(Debug)]
pub struct Builder {
    inodes: Vec<RawInode>,
    entries: Vec<RawEntry>,
    /// Indexes of `entries`, by parent and name.
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    names: Interner,
    strings: Interner,
    /// Sets of xattrs. A set is a list of pairs of numbers in `strings`, each 4 bytes little-endian.
    xattrs: Interner,
    scratch: Vec<u8>,
}

impl Default for Builder {
    fn default() -> Self {
        Self::new()
    }
}

/// Checks that `name` is valid in a directory: 1 to 255 bytes, no `/` or NUL, neither `.` nor `..`.
///
/// # Errors
/// [`TreeError::Name`] with the reason.
pub fn check_name(name: &[u8]) -> Result<(), TreeError> {
    let wrong = match name {
        b"" => "it is empty",
        b"." | b".." => "it is reserved for a directory",
        _ if name.len() > NAME_MAX => "it has more than 255 bytes",
        _ if name.contains(&b'/') => "it has a slash",
        _ if name.contains(&0) => "it has a NUL byte",
        _ => return Ok(()),
    };
    Err(TreeError::Name(name.to_vec(), wrong))
}

/// Splits `path` at slashes and skips empty names. `.` and `..` are returned, so that [`check_name`] refuses them.
#[must_use]
pub fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> {
    path.split(|&byte| byte == b'/').filter(|name| !name.is_empty())
}

impl Builder {
    /// Creates a tree that consists of an implicit root directory.
    #[must_use]
    pub fn new() -> Self {
        let mut builder = Self {
            inodes: Vec::new(),
            entries: Vec::new(),
            index: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            names: Interner::new(),
            strings: Interner::new(),
            xattrs: Interner::new(),
            scratch: Vec::new(),
        };
        builder.inodes.push(implicit_directory(ATTACHED));
        builder
    }

    /// Adds a set of xattrs, in the order given. If a name occurs twice, the later value replaces the earlier.
    ///
    /// # Errors
    /// [`TreeError`] if a name or value is invalid, or the tree is too large.
    pub fn xattrs<'a>(
        &mut self,
        pairs: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Result<XattrsId, TreeError> {
        let mut set = std::mem::take(&mut self.scratch);
        set.clear();
        for (name, value) in pairs {
            if name.is_empty() || name.len() > XATTR_NAME_MAX || name.contains(&0) {
                return Err(TreeError::XattrName(name.to_vec()));
            }
            if value.len() > XATTR_VALUE_MAX {
                return Err(TreeError::XattrValue(name.to_vec(), value.len()));
            }
            let name = self.string(name)?.to_le_bytes();
            let value = self.string(value)?.to_le_bytes();
            match set.chunks_exact_mut(8).find(|pair| pair[..4] == name) {
                Some(pair) => pair[4..].copy_from_slice(&value),
                None => set.extend(name.into_iter().chain(value)),
            }
        }
        let id = self.xattrs.intern(&set);
        self.scratch = set;
        id.map(XattrsId).ok_or(TreeError::TooLarge("4 GiB of xattrs"))
    }

    /// Adds an inode without a name.
    ///
    /// # Errors
    /// [`TreeError`] if the metadata or the node is invalid, or the tree is too large.
    pub fn inode(
        &mut self,
        metadata: &Metadata,
        xattrs: XattrsId,
        node: Node<'_>,
    ) -> Result<InodeId, TreeError> {
        let id = self.next_inode()?;
        let mut raw = implicit_directory(0);
        raw.flags = 0;
        set_metadata(&mut raw, metadata, xattrs)?;
        match node {
            Node::Directory => {}
            Node::Regular(Content::Inline(bytes)) => {
                raw.kind = Kind::Inline;
                raw.first = self.string(bytes)?;
            }
            Node::Regular(Content::External { size, object, location }) => {
                if size == 0 || i64::try_from(size).is_err() {
                    return Err(TreeError::Size(size));
                }
                raw.kind = Kind::External;
                raw.size = size;
                match (location, object) {
                    (Location::None, _) => {}
                    (Location::Object, Some(_)) => raw.kind = Kind::ExternalOfObject,
                    (Location::Object, None) => return Err(TreeError::Location(Vec::new())),
                    (Location::Path(path), _) if path.is_empty() || path.contains(&0) => {
                        return Err(TreeError::Location(path.to_vec()));
                    }
                    (Location::Path(path), Some(object)) if path == object.path().as_bytes() => {
                        raw.kind = Kind::ExternalOfObject;
                    }
                    (Location::Path(path), _) => raw.second = self.string(path)?,
                }
                if let Some(object) = object {
                    raw.first = self.string(object.as_bytes())?;
                }
            }
            Node::Symlink(target) => {
                if target.is_empty() || target.len() > SYMLINK_MAX || target.contains(&0) {
                    return Err(TreeError::SymlinkTarget(target.len()));
                }
                raw.kind = Kind::Symlink;
                raw.first = self.string(target)?;
            }
            Node::CharDevice(number) => {
                raw.kind = Kind::CharDevice;
                raw.size = number;
            }
            Node::BlockDevice(number) => {
                raw.kind = Kind::BlockDevice;
                raw.size = number;
            }
            Node::Fifo => raw.kind = Kind::Fifo,
            Node::Socket => raw.kind = Kind::Socket,
        }
        self.inodes.push(raw);
        Ok(id)
    }

    fn next_inode(&self) -> Result<InodeId, TreeError> {
        let id = u32::try_from(self.inodes.len()).ok().filter(|id| *id < OWNER);
        id.map(InodeId).ok_or(TreeError::TooLarge("2^31 inodes"))
    }

    /// Replaces the metadata and xattrs of an inode, which then no longer counts as implicit.
    ///
    /// # Errors
    /// [`TreeError::Permissions`] if the mode has bits beyond `0o7777`.
    pub fn describe(
        &mut self,
        inode: InodeId,
        metadata: &Metadata,
        xattrs: XattrsId,
    ) -> Result<(), TreeError> {
        let raw = &mut self.inodes[inode.index()];
        raw.flags &= !IMPLICIT;
        set_metadata(raw, metadata, xattrs)
    }

    /// Sets the number of links of an inode, so that links are not counted. [`finish`](Self::finish) counts
    /// directories anyway.
    pub fn state_nlink(&mut self, inode: InodeId, nlink: u32) {
        let raw = &mut self.inodes[inode.index()];
        raw.flags |= STATED_NLINK;
        raw.nlink = nlink;
    }

    /// Sets the object of an external file, and the object's path as the file's location; does nothing for other
    /// inodes. A source that hashes files in the background adds the files first and sets their objects later.
    ///
    /// # Errors
    /// [`TreeError::TooLarge`] if the strings take more than 4 GiB.
    pub fn set_object(&mut self, inode: InodeId, object: &ObjectId) -> Result<(), TreeError> {
        let digest = self.string(object.as_bytes())?;
        let raw = &mut self.inodes[inode.index()];
        if matches!(raw.kind, Kind::External | Kind::ExternalOfObject) {
            raw.kind = Kind::ExternalOfObject;
            (raw.first, raw.second) = (digest, 0);
        }
        Ok(())
    }

    /// Records the size in bytes that a dump states for a device, pipe or socket; does nothing for other inodes. The
    /// tree keeps only whether it is 4 GiB or more: In that case, C's `mkcomposefs` writes a larger inode, so the
    /// composefs profile must do so as well.
    pub fn state_size(&mut self, inode: InodeId, size: u64) {
        let raw = &mut self.inodes[inode.index()];
        let sizeless =
            matches!(raw.kind, Kind::CharDevice | Kind::BlockDevice | Kind::Fifo | Kind::Socket);
        if sizeless && size > u64::from(u32::MAX) {
            raw.flags |= STATED_LARGE;
        }
    }

    /// Whether the inode is a directory.
    #[must_use]
    pub fn is_directory(&self, inode: InodeId) -> bool {
        self.inodes[inode.index()].kind == Kind::Directory
    }

    /// Whether the inode is a directory that the source does not describe.
    #[must_use]
    pub fn is_implicit(&self, inode: InodeId) -> bool {
        self.inodes[inode.index()].flags & IMPLICIT != 0
    }

    /// Returns the inode with this name in `directory`.
    #[must_use]
    pub fn lookup(&self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        let at = self.find_entry(directory, self.names.lookup(name)?)?;
        Some(InodeId(self.entries[at as usize].inode()))
    }

    /// Returns the inode at `path`. Symlinks are not followed.
    #[must_use]
    pub fn resolve(&self, path: &[u8]) -> Option<InodeId> {
        components(path).try_fold(InodeId::ROOT, |directory, name| self.lookup(directory, name))
    }

    /// Adds a name for an inode.
    ///
    /// # Errors
    /// [`TreeError`] if the name is invalid or taken, `directory` is not a directory, the inode is a directory that
    /// already has a name, or the tree is too large.
    pub fn insert(
        &mut self,
        directory: InodeId,
        name: &[u8],
        inode: InodeId,
        link: Link,
    ) -> Result<(), TreeError> {
        check_name(name)?;
        if !self.is_directory(directory) {
            return Err(TreeError::NotDirectory(name.to_vec()));
        }
        let id = self.names.intern(name).ok_or(TreeError::TooLarge("4 GiB of names"))?;
        if self.find_entry(directory, id).is_some() {
            return Err(TreeError::Exists(name.to_vec()));
        }
        let raw = &mut self.inodes[inode.index()];
        if raw.kind == Kind::Directory {
            if raw.flags & ATTACHED != 0 {
                return Err(TreeError::LinkToDirectory(name.to_vec()));
            }
            raw.flags |= ATTACHED;
        }
        let owner = if link == Link::Owner { OWNER } else { 0 };
        let at = u32::try_from(self.entries.len()).ok().filter(|at| *at < REMOVED);
        let at = at.ok_or(TreeError::TooLarge("2^32 names"))?;
        self.entries.push(RawEntry { parent: directory.0, name: id, target: inode.0 | owner });
        let Self { index, entries, hasher, .. } = self;
        index.insert_unique(key(hasher, directory.0, id), at, |&at| {
            let entry = &entries[at as usize];
            key(hasher, entry.parent, entry.name)
        });
        Ok(())
    }

    /// Removes a name, with everything below it if it is a directory. Returns the inode that the name referred to.
    pub fn remove(&mut self, directory: InodeId, name: &[u8]) -> Option<InodeId> {
        let id = self.names.lookup(name)?;
        let hash = key(&self.hasher, directory.0, id);
        let entries = &mut self.entries;
        let found = self.index.find_entry(hash, |&at| {
            let entry = &entries[at as usize];
            entry.parent == directory.0 && entry.name == id
        });
        let (at, _) = found.ok()?.remove();
        let entry = &mut entries[at as usize];
        entry.parent = REMOVED;
        Some(InodeId(entry.inode()))
    }

    /// Returns the directory `name` in `directory`, which is created as an implicit one if it does not exist.
    ///
    /// # Errors
    /// [`TreeError::NotDirectory`] if the name is not a directory; otherwise as [`inode`](Self::inode) and
    /// [`insert`](Self::insert).
    pub fn subdirectory(&mut self, directory: InodeId, name: &[u8]) -> Result<InodeId, TreeError> {
        match self.lookup(directory, name) {
            Some(found) if self.is_directory(found) => Ok(found),
            Some(_) => Err(TreeError::NotDirectory(name.to_vec())),
            None => {
                let new = self.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Directory)?;
                self.inodes[new.index()].flags = IMPLICIT;
                self.insert(directory, name, new, Link::Equal)?;
                Ok(new)
            }
        }
    }

    /// Finishes the tree. Inodes without a name are left out of it.
    #[must_use]
    pub fn finish(self) -> Tree {
        let Self { inodes, entries, names, strings, xattrs, index, .. } = self;
        // The index is freed first, so that a large tree can reuse its memory.
        drop(index);
        freeze(inodes, entries, names.into_strings(), strings.into_strings(), xattrs.into_strings())
    }

    fn find_entry(&self, directory: InodeId, name: u32) -> Option<u32> {
        let found = self.index.find(key(&self.hasher, directory.0, name), |&at| {
            let entry = &self.entries[at as usize];
            entry.parent == directory.0 && entry.name == name
        });
        found.copied()
    }

    fn string(&mut self, bytes: &[u8]) -> Result<u32, TreeError> {
        self.strings.intern(bytes).ok_or(TreeError::TooLarge("4 GiB of contents"))
    }
}

fn key(hasher: &DefaultHashBuilder, parent: u32, name: u32) -> u64 {
    hasher.hash_one(u64::from(parent) << 32 | u64::from(name))
}

fn implicit_directory(flags: u8) -> RawInode {
    let Metadata { permissions, uid, gid, mtime } = Metadata::IMPLICIT;
    RawInode {
        seconds: mtime.seconds,
        size: 0,
        nanoseconds: mtime.nanoseconds,
        uid,
        gid,
        nlink: 0,
        xattrs: XattrsId::NONE,
        first: 0,
        second: 0,
        permissions,
        kind: Kind::Directory,
        flags: flags | IMPLICIT,
    }
}

fn set_metadata(
    raw: &mut RawInode,
    metadata: &Metadata,
    xattrs: XattrsId,
) -> Result<(), TreeError> {
    if metadata.permissions > 0o7777 {
        return Err(TreeError::Permissions(metadata.permissions));
    }
    raw.permissions = metadata.permissions;
    raw.uid = metadata.uid;
    raw.gid = metadata.gid;
    raw.seconds = metadata.mtime.seconds;
    raw.nanoseconds = metadata.mtime.nanoseconds;
    raw.xattrs = xattrs;
    Ok(())
}
