//! The tree of a root filesystem. Every source is read into a tree, and every image is made from one.
//!
//! A [`Builder`] takes entries in any order and finds them by name. [`Builder::finish`] turns the builder into a
//! [`Tree`], which is immutable: its children are in byte order, its hard links are counted, and each inode is owned
//! by one of its names. `docs/format/tree.md` defines the rules.
//!
//! Both are arenas: an entry takes 12 bytes, an inode 48, and every name, target, payload, digest and xattr set is
//! stored once.

mod builder;
mod freeze;
mod frozen;
mod intern;
mod raw;
#[cfg(test)]
mod tests;
mod userns_tree;

pub use builder::{Builder, Choice, Copied, LayError, Link, TreeError, check_name, components};
pub use frozen::{Children, Entry, Inode, Tree, TreeXattrs, Walk};
pub(crate) use frozen::{External, StoredLocation};
pub(crate) use intern::StringId;
pub use userns_tree::{TreeUser, UserTree, for_user, is_users_xattr};

use crate::verity::ObjectId;

/// Maximum length of a name in bytes. Source: Linux `NAME_MAX`.
pub const NAME_MAX: usize = 255;
/// Maximum length of a symlink's target in bytes: the kernel's `PATH_MAX` less the final NUL.
pub const SYMLINK_MAX: usize = 4095;
/// Maximum length of an xattr's name in bytes. Source: Linux `XATTR_NAME_MAX`.
pub const XATTR_NAME_MAX: usize = 255;
/// Maximum length of an xattr's value in bytes. Linux `XATTR_SIZE_MAX` is 65536, but EROFS stores the length in 16
/// bits.
pub const XATTR_VALUE_MAX: usize = 65535;

/// The id of an inode in one builder, and in the tree made from the builder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId(u32);

impl InodeId {
    /// The root directory of every tree.
    pub const ROOT: Self = Self(0);

    /// Returns a number below [`Tree::inode_bound`], for side tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The id of a set of xattrs in one builder, and in the tree made from the builder. Equal sets have equal ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct XattrsId(u32);

impl XattrsId {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns a number below [`Tree::xattrs_bound`], for side tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A point in time relative to 1970, in UTC; `seconds` is negative before 1970. Timestamps are ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    /// Whole seconds, rounded down.
    pub seconds: i64,
    /// Nanoseconds after `seconds`, 0 to 999,999,999. (A composefs dump may state a larger number, which the writer
    /// keeps.)
    pub nanoseconds: u32,
}

/// The metadata that files of every type have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Metadata {
    /// Permission, set-id and sticky bits: at most `0o7777`.
    pub permissions: u16,
    /// User id of the owner.
    pub uid: u32,
    /// Group id of the owner.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
}

impl Metadata {
    /// Metadata of a directory that the source does not describe: mode 0755, owner 0:0, time 0.
    pub const IMPLICIT: Self = Self {
        permissions: 0o755,
        uid: 0,
        gid: 0,
        mtime: Timestamp { seconds: 0, nanoseconds: 0 },
    };
}

/// The type and content of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node<'a> {
    /// A directory. Its children are entries of the tree.
    Directory,
    /// A regular file.
    Regular(Content<'a>),
    /// A symbolic link: 1 to 4095 bytes without NUL.
    Symlink(&'a [u8]),
    /// A character device. The kernel's overlayfs treats a device with the number 0 as a whiteout; in a tree it is an
    /// ordinary device.
    CharDevice(u64),
    /// A block device.
    BlockDevice(u64),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl Node<'_> {
    /// Returns the type bits of `st_mode`, `S_IFMT`. Source: `linux/stat.h`.
    #[must_use]
    pub const fn type_bits(&self) -> u16 {
        match self {
            Self::Directory => 0o040_000,
            Self::Regular(_) => 0o100_000,
            Self::Symlink(_) => 0o120_000,
            Self::CharDevice(_) => 0o020_000,
            Self::BlockDevice(_) => 0o060_000,
            Self::Fifo => 0o010_000,
            Self::Socket => 0o140_000,
        }
    }
}

/// The content of a regular file, or its location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// Bytes that are stored in the tree. An empty file is always inline.
    Inline(&'a [u8]),
    /// Bytes that are stored in a separate file.
    External {
        /// Length in bytes, 1 to 2^63 - 1.
        size: u64,
        /// The fs-verity digest of the separate file, if known.
        object: Option<ObjectId>,
        /// The location of the separate file, relative to an object directory.
        location: Location<'a>,
    },
}

/// The location of an external file's bytes, relative to an object directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location<'a> {
    /// Unknown, because the source states no location.
    None,
    /// The path [`ObjectId::path`] of the file's object.
    Object,
    /// A path from a dump, which is neither empty nor contains NUL.
    Path(&'a [u8]),
}

impl Content<'_> {
    /// Returns the length of the file in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::External { size, .. } => *size,
        }
    }
}
