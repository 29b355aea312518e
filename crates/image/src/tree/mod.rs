//! The tree of a root filesystem: every source is read into one, and every image is made from one.
//!
//! A [`Builder`] takes entries in any order and finds them by name; [`Builder::finish`] turns it into a [`Tree`],
//! which never changes: children in byte order, hard links counted, each inode owned by one of its names.
//! `docs/format/tree.md` defines the rules.
//!
//! Both are arenas: an entry costs 12 bytes, an inode 48, and every name, target, payload, digest and xattr set is
//! kept once.

mod builder;
mod freeze;
mod frozen;
mod intern;
mod raw;
#[cfg(test)]
mod tests;
mod userns_tree;

pub use builder::{Builder, Choice, Copied, LayError, Link, TreeError, check_name, components};
pub use frozen::{Children, Entry, Inode, Tree, Walk, Xattrs};
pub(crate) use frozen::{External, Place};
pub(crate) use intern::StringId;
pub use userns_tree::{TreeUser, UserTree, for_user};

use crate::verity::ObjectId;

/// The most bytes in a name. Source: Linux `NAME_MAX`.
pub const NAME_MAX: usize = 255;
/// The most bytes in a symlink's target: the kernel's `PATH_MAX` less the final NUL.
pub const SYMLINK_MAX: usize = 4095;
/// The most bytes in an xattr's name. Source: Linux `XATTR_NAME_MAX`.
pub const XATTR_NAME_MAX: usize = 255;
/// The most bytes in an xattr's value. Source: Linux `XATTR_SIZE_MAX` is 65536, but EROFS counts them in 16 bits.
pub const XATTR_VALUE_MAX: usize = 65535;

/// An inode of one builder, and of the tree made from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeId(u32);

impl InodeId {
    /// The root directory, of every tree.
    pub const ROOT: Self = Self(0);

    /// A number below [`Tree::inode_bound`], for side tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A set of xattrs of one builder, and of the tree made from it: equal sets are the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct XattrsId(u32);

impl XattrsId {
    /// No xattrs.
    pub const NONE: Self = Self(0);

    /// A number below [`Tree::xattrs_bound`], for side tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A point in time since 1970, in UTC; before it when `seconds` is negative. Ordered by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    /// Whole seconds, rounded down.
    pub seconds: i64,
    /// Nanoseconds after that, 0 to 999,999,999. (A composefs dump may state more; the writer keeps it.)
    pub nanoseconds: u32,
}

/// Metadata of every type of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Metadata {
    /// Permission, set-id and sticky bits: at most `0o7777`.
    pub permissions: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last modification.
    pub mtime: Timestamp,
}

impl Metadata {
    /// Metadata of directories that no source describes: mode 0755, owner 0:0, time 0.
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
    /// A directory; its children are entries.
    Directory,
    /// A regular file.
    Regular(Content<'a>),
    /// A symbolic link: 1 to 4095 bytes without NUL.
    Symlink(&'a [u8]),
    /// A character device. Number 0 is an overlayfs whiteout for the kernel, and an ordinary file here.
    CharDevice(u64),
    /// A block device.
    BlockDevice(u64),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
}

impl Node<'_> {
    /// The type bits of `st_mode`, `S_IFMT`. Source: `linux/stat.h`.
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

/// The place of a regular file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// In the tree. An empty file always is.
    Inline(&'a [u8]),
    /// In a file of its own.
    External {
        /// Length in bytes, 1 to 2^63 - 1.
        size: u64,
        /// Its fs-verity digest, if known.
        object: Option<ObjectId>,
        /// Its place, relative to an object directory.
        location: Location<'a>,
    },
}

/// The place of an external file's bytes, relative to an object directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location<'a> {
    /// Unknown: the source named no place.
    None,
    /// At [`ObjectId::path`] of its object.
    Object,
    /// At this path, as a dump states it: neither empty nor with NUL.
    Path(&'a [u8]),
}

impl Content<'_> {
    /// Length of the file in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::External { size, .. } => *size,
        }
    }
}
