//! Inodes and entries of a tree, in the form that the builder makes and a finished tree stores.

use super::XattrsId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Directory,
    Inline,
    External,
    ExternalOfObject,
    Symlink,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
}

/// An inode, in 48 bytes.
#[derive(Debug, Clone)]
pub(super) struct RawInode {
    pub(super) seconds: i64,
    /// Length in bytes of an external file, or a device number.
    pub(super) size: u64,
    pub(super) nanoseconds: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// 0 until links are counted, unless the source states the number.
    pub(super) nlink: u32,
    pub(super) xattrs: XattrsId,
    /// For an inline file, the bytes; for an external file, the object id; for a symlink, the target; for a frozen
    /// directory, its first child.
    pub(super) first: u32,
    /// For an external file, the path of its location; for a frozen directory, the number of its children.
    pub(super) second: u32,
    pub(super) permissions: u16,
    pub(super) kind: Kind,
    pub(super) flags: u8,
}

const _: () = assert!(size_of::<RawInode>() == 48);

/// In `flags`: the source does not describe this directory.
pub(super) const IMPLICIT: u8 = 1;

/// In `flags`: the directory already has a name.
pub(super) const ATTACHED: u8 = 2;

/// In `flags`: the source states `nlink`.
pub(super) const STATED_NLINK: u8 = 4;

/// In `flags`: the source states a size of 4 GiB or more for a device, pipe or socket.
pub(super) const STATED_LARGE: u8 = 8;

/// A directory entry, in 12 bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawEntry {
    pub(super) parent: u32,
    pub(super) name: u32,
    /// The number of the inode, and the bit [`OWNER`].
    pub(super) target: u32,
}

const _: () = assert!(size_of::<RawEntry>() == 12);

/// In [`RawEntry::target`]: this name owns the inode.
pub(super) const OWNER: u32 = 1 << 31;

/// In [`RawEntry::parent`]: the entry is removed.
pub(super) const REMOVED: u32 = u32::MAX;

impl RawEntry {
    pub(super) const fn inode(self) -> u32 {
        self.target & !OWNER
    }
}

/// In [`Tree::owners`](super::Tree): no entry owns the inode.
pub(super) const NO_OWNER: u32 = u32::MAX;
