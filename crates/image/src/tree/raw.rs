//! Inodes and entries of a tree, as the builder makes them and a finished tree stores them.

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

/// 48 bytes an inode.
#[derive(Debug, Clone)]
pub(super) struct RawInode {
    pub(super) seconds: i64,
    /// Length in bytes of an external file, or a device number.
    pub(super) size: u64,
    pub(super) nanoseconds: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// 0 until counted, unless the source stated it.
    pub(super) nlink: u32,
    pub(super) xattrs: XattrsId,
    /// Inline: the bytes. External: the digest. Symlink: the target. Directory, once frozen: its first child.
    pub(super) first: u32,
    /// External: the place. Directory, once frozen: the number of children.
    pub(super) second: u32,
    pub(super) permissions: u16,
    pub(super) kind: Kind,
    pub(super) flags: u8,
}

const _: () = assert!(size_of::<RawInode>() == 48);

/// The source did not describe this directory.
pub(super) const IMPLICIT: u8 = 1;

/// A directory that has a name already.
pub(super) const ATTACHED: u8 = 2;

/// The source stated `nlink`.
pub(super) const STATED_NLINK: u8 = 4;

/// The source stated a size of 4 GiB or more for a device, pipe or socket.
pub(super) const STATED_LARGE: u8 = 8;

/// 12 bytes an entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct RawEntry {
    pub(super) parent: u32,
    pub(super) name: u32,
    /// The inode, and [`OWNER`].
    pub(super) target: u32,
}

const _: () = assert!(size_of::<RawEntry>() == 12);

/// In `RawEntry::target`: this name owns the inode.
pub(super) const OWNER: u32 = 1 << 31;

/// In `RawEntry::parent`: removed.
pub(super) const REMOVED: u32 = u32::MAX;

impl RawEntry {
    pub(super) const fn inode(self) -> u32 {
        self.target & !OWNER
    }
}

/// In `owners`: nobody.
pub(super) const NO_OWNER: u32 = u32::MAX;
