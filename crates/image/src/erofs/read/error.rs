//! Why an image cannot be read.

use std::fmt;
use std::io;

use super::{ByteOffset, Device, Nid};
use crate::tree::TreeError;

/// Why an image cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No EROFS superblock.
    #[error("not an EROFS image")]
    NotErofs,
    /// An EROFS image that composefs did not make, where a composefs image is needed.
    #[error("not a composefs image")]
    NotComposefs,
    /// A feature that this reader does not know.
    #[error("the image uses unsupported {0}")]
    Unsupported(Unsupported),
    /// The image contradicts itself or the format.
    #[error("the image is corrupt: {0}")]
    Corrupt(Corrupt),
    /// The bytes are on a device that the caller did not supply.
    #[error("the data is on {0}, which is not open")]
    NoDevice(Device),
    /// The source failed.
    #[error("cannot read {len} bytes of {device} at byte {offset}")]
    Io {
        /// The image itself or one of its devices.
        device: Device,
        /// Offset in the device, in bytes.
        offset: ByteOffset,
        /// Number of bytes.
        len: usize,
        /// The error of the source.
        source: io::Error,
    },
}

/// A feature that this reader does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsupported {
    /// Unknown bits of `feature_incompat`.
    Features(u32),
    /// Metadata in a (compressed) file of its own.
    Metabox,
    /// Compressed data.
    Compression(Nid),
    /// Directory blocks of another size than blocks.
    DirectoryBlocks(u8),
    /// Unknown bits of an inode's format.
    InodeFormat(Nid, u16),
    /// An unknown data layout.
    DataLayout(Nid, u16),
    /// Unknown bits of a chunk format.
    ChunkFormat(Nid, u16),
    /// A composefs header of another version.
    ComposefsHeader(u32),
    /// A native header of a later version.
    NativeHeader(u32),
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Features(bits) => write!(f, "features {bits:#x}"),
            Self::Metabox => write!(f, "metadata compression"),
            Self::Compression(nid) => write!(f, "compression (inode {nid})"),
            Self::DirectoryBlocks(bits) => write!(f, "directory blocks of 2^{bits} blocks"),
            Self::InodeFormat(nid, bits) => write!(f, "format {bits:#x} of inode {nid}"),
            Self::DataLayout(nid, layout) => write!(f, "data layout {layout} of inode {nid}"),
            Self::ChunkFormat(nid, bits) => write!(f, "chunk format {bits:#x} of inode {nid}"),
            Self::ComposefsHeader(version) => write!(f, "composefs header version {version}"),
            Self::NativeHeader(version) => write!(f, "native header version {version}"),
        }
    }
}

impl From<Corrupt> for ReadError {
    // No source of its own: the message says it, and would be printed twice.
    fn from(corrupt: Corrupt) -> Self {
        Self::Corrupt(corrupt)
    }
}

impl From<Unsupported> for ReadError {
    fn from(feature: Unsupported) -> Self {
        Self::Unsupported(feature)
    }
}

/// A part of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The superblock, with the rest of its block where that is checksummed.
    Superblock,
    /// A slot of the device table.
    Device(Device),
    /// An entry of the table of long xattr prefixes.
    LongPrefix(u8),
    /// An inode.
    Inode(Nid),
    /// The xattrs behind an inode.
    Xattrs(Nid),
    /// A shared xattr.
    SharedXattr(u32),
    /// The chunk table behind an inode.
    ChunkTable(Nid),
    /// The data of an inode: a file's bytes, a directory's entries or a symlink's target.
    Data(Nid),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock => write!(f, "the superblock"),
            Self::Device(device) => write!(f, "the device table's slot of {device}"),
            Self::LongPrefix(at) => write!(f, "long xattr prefix {at}"),
            Self::Inode(nid) => write!(f, "inode {nid}"),
            Self::Xattrs(nid) => write!(f, "the xattrs of inode {nid}"),
            Self::SharedXattr(id) => write!(f, "shared xattr {id}"),
            Self::ChunkTable(nid) => write!(f, "the chunk table of inode {nid}"),
            Self::Data(nid) => write!(f, "the data of inode {nid}"),
        }
    }
}

/// How an image contradicts itself or the format. Names are shown with escapes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Corrupt {
    /// The superblock's checksum does not match.
    #[error("the superblock has the checksum {computed:#010x}, but states {stored:#010x}")]
    Checksum {
        /// The checksum in the superblock.
        stored: u32,
        /// The computed crc32c.
        computed: u32,
    },
    /// A block size that EROFS does not have.
    #[error("block size 2^{0} bytes is not between 2^9 and 2^16")]
    BlockBits(u8),
    /// The image is shorter than its superblock states.
    #[error("the image has {len} bytes, but its superblock states {blocks} blocks of {block_size}")]
    Truncated {
        /// Number of blocks that the superblock states.
        blocks: u64,
        /// In bytes.
        block_size: u64,
        /// Length of the image in bytes.
        len: u64,
    },
    /// A part lies outside the image or the device that should contain it.
    #[error("{part} takes {len} bytes at byte {offset} of {device}, which has {bound}")]
    Outside {
        /// The part.
        part: Part,
        /// The device that should contain it.
        device: Device,
        /// Offset of the part; the largest number when it does not fit in 64 bits.
        offset: ByteOffset,
        /// Length of the part in bytes.
        len: u64,
        /// Length of the device in bytes.
        bound: u64,
    },
    /// The root is not a directory.
    #[error("the root, inode {nid}, is not a directory: it has mode {mode:o}")]
    Root {
        /// The root.
        nid: Nid,
        /// Its `st_mode`.
        mode: u16,
    },
    /// A file type that does not exist.
    #[error("inode {nid} has mode {mode:o}, which has no file type")]
    Mode {
        /// The inode.
        nid: Nid,
        /// Its `st_mode`.
        mode: u16,
    },
    /// More bytes than a file can have.
    #[error("inode {nid} has {size} bytes, more than 2^63 - 1")]
    Size {
        /// The inode.
        nid: Nid,
        /// Its length in bytes.
        size: u64,
    },
    /// A symlink of 0 or more than 4095 bytes.
    #[error("symlink {nid} has a target of {size} bytes, not 1 to 4095")]
    SymlinkSize {
        /// The symlink.
        nid: Nid,
        /// Length of its target in bytes.
        size: u64,
    },
    /// A symlink whose target has a NUL byte.
    #[error("the target of symlink {nid} has a NUL byte at {at}")]
    SymlinkNul {
        /// The symlink.
        nid: Nid,
        /// Offset in the target, in bytes.
        at: usize,
    },
    /// Data behind an inode that does not end in the block where it begins.
    #[error(
        "inode {nid} has {len} bytes of inline data at byte {offset}, beyond the end of the block"
    )]
    InlineData {
        /// The inode.
        nid: Nid,
        /// Offset of the data in the image, in bytes.
        offset: ByteOffset,
        /// Its length in bytes.
        len: u64,
    },
    /// A chunk on a device that the image does not have.
    #[error("inode {nid} has data on {device}, but the image has only {count} besides itself")]
    Device {
        /// The inode.
        nid: Nid,
        /// The device.
        device: Device,
        /// Devices in the device table.
        count: usize,
    },
    /// A directory block whose first name does not begin at the end of a whole number of entries.
    #[error("block {block} of directory {nid} has {len} bytes and its first name at byte {offset}")]
    DirectoryBlock {
        /// The directory.
        nid: Nid,
        /// Number of the block in the directory.
        block: u64,
        /// Offset of its first name in the block, in bytes.
        offset: u16,
        /// Bytes in the block.
        len: usize,
    },
    /// An entry whose name is outside the block's names, empty, or too long.
    #[error(
        "entry {entry} in block {block} of directory {nid} has a name at bytes {start} to {end}"
    )]
    NameRange {
        /// The directory.
        nid: Nid,
        /// Number of the block in the directory.
        block: u64,
        /// Number of the entry in the block.
        entry: usize,
        /// Offset of the name in the block, in bytes.
        start: usize,
        /// End of the name in the block, in bytes.
        end: usize,
    },
    /// A name with an invalid byte.
    #[error("directory {nid} has an invalid entry: {reason}")]
    Name {
        /// The directory.
        nid: Nid,
        /// The reason.
        reason: TreeError,
    },
    /// Names that do not ascend in byte order: the kernel would not find them.
    #[error("directory {nid} has \"{}\" after \"{}\"", .name.escape_ascii(), .previous.escape_ascii())]
    NameOrder {
        /// The directory.
        nid: Nid,
        /// The name before.
        previous: Vec<u8>,
        /// The name.
        name: Vec<u8>,
    },
    /// `.` or `..` leads to the wrong directory.
    #[error("directory {nid} has \"{}\" at inode {found}, not at {expected}", .name.escape_ascii())]
    Dots {
        /// The directory.
        nid: Nid,
        /// `.` or `..`.
        name: Vec<u8>,
        /// The inode that it leads to.
        found: Nid,
        /// The inode that it should lead to.
        expected: Nid,
    },
    /// An entry and its inode differ in the type of file.
    #[error("directory {nid} has \"{}\" with type {entry}, but it has mode {mode:o}", .name.escape_ascii())]
    EntryType {
        /// The directory.
        nid: Nid,
        /// The entry's name.
        name: Vec<u8>,
        /// Type in the entry.
        entry: u8,
        /// `st_mode` of the inode.
        mode: u16,
    },
    /// A directory with two names, which may be a loop.
    #[error("directory {nid} has a second name \"{}\"", .path.escape_ascii())]
    DirectoryTwice {
        /// The directory.
        nid: Nid,
        /// The second name's path.
        path: Vec<u8>,
    },
    /// A path longer than [`PATH_MAX`](super::PATH_MAX).
    #[error("a path has {0} bytes, more than 4095")]
    PathLength(usize),
    /// Shared ids that do not fit in an inode's xattrs.
    #[error("inode {nid} has {size} bytes of xattrs, too few for {shared} shared ones")]
    XattrHeader {
        /// The inode.
        nid: Nid,
        /// Bytes for its xattrs.
        size: u32,
        /// Number of shared ones.
        shared: u8,
    },
    /// An xattr that does not fit in what is left of an inode's xattrs.
    #[error(
        "inode {nid} has an xattr of {need} bytes at byte {at} of its xattrs, where {left} are left"
    )]
    XattrEntry {
        /// The inode.
        nid: Nid,
        /// Offset after the inode, in bytes.
        at: usize,
        /// Bytes it takes.
        need: usize,
        /// Bytes there are.
        left: usize,
    },
    /// A prefix that does not exist.
    #[error("inode {nid} has an xattr with prefix {index:#x}, which does not exist")]
    XattrPrefix {
        /// The inode.
        nid: Nid,
        /// `e_name_index`.
        index: u8,
    },
    /// A name that is empty, too long, or has a NUL byte.
    #[error("inode {nid} has an invalid xattr: {reason}")]
    XattrName {
        /// The inode.
        nid: Nid,
        /// The reason.
        reason: TreeError,
    },
    /// Two xattrs of one name.
    #[error("inode {nid} has xattr \"{}\" twice", .name.escape_ascii())]
    XattrTwice {
        /// The inode.
        nid: Nid,
        /// Their name.
        name: Vec<u8>,
    },
    /// An xattr that the inode's name filter denies: the kernel would not find it.
    #[error("inode {nid} has xattr \"{}\", which its name filter {filter:#010x} denies", .name.escape_ascii())]
    XattrFilter {
        /// The inode.
        nid: Nid,
        /// The xattr's name.
        name: Vec<u8>,
        /// The filter.
        filter: u32,
    },
    /// More names than the kernel can list.
    #[error("the names of the xattrs of inode {nid} take {len} bytes, more than 65536")]
    XattrList {
        /// The inode.
        nid: Nid,
        /// Bytes in all names with their final NULs.
        len: usize,
    },
    /// A long prefix of 0 or more than 256 bytes.
    #[error("long xattr prefix {at} has {size} bytes, not 1 to 256")]
    LongPrefix {
        /// Number of the prefix.
        at: u8,
        /// Bytes in base index and infix.
        size: u16,
    },
    /// A long prefix that continues a prefix that does not exist.
    #[error("long xattr prefix {at} continues prefix {base}, which does not exist")]
    LongPrefixBase {
        /// Number of the prefix.
        at: u8,
        /// `base_index`.
        base: u8,
    },
    /// Fingerprints by a long prefix that does not exist.
    #[error("fingerprints use long xattr prefix {at}, but the image has only {count}")]
    FingerprintPrefix {
        /// Number of the prefix.
        at: u8,
        /// Long prefixes.
        count: usize,
    },
    /// More metadata than an image of this length can have without using the same bytes many times.
    #[error("the image uses some bytes so often that its metadata takes more than {bound} bytes")]
    Amplified {
        /// Bytes that an image of this length may take.
        bound: u64,
    },
    /// In a composefs image, a file with more inline bytes than composefs allows.
    #[error("file {nid} has {size} bytes inside the image, more than the 5000 of composefs")]
    InlineContent {
        /// The file.
        nid: Nid,
        /// Its length in bytes.
        size: u64,
    },
    /// In a composefs image, a `trusted.overlay.metacopy` that is not a digest.
    #[error("file {nid} has a metacopy xattr of {len} bytes that is not an fs-verity digest")]
    Metacopy {
        /// The file.
        nid: Nid,
        /// Length of its value.
        len: usize,
    },
    /// In a composefs image, a whiteout with several names.
    #[error("whiteout {nid} has {nlink} links")]
    WhiteoutLinks {
        /// The whiteout.
        nid: Nid,
        /// Its number of links.
        nlink: u32,
    },
    /// An inode that a tree cannot hold.
    #[error("cannot add inode {nid} to a tree: {reason}")]
    Tree {
        /// The inode.
        nid: Nid,
        /// The reason.
        reason: TreeError,
    },
}

#[cfg(test)]
mod tests {
    use super::{Corrupt, ReadError};

    #[test]
    fn what_is_corrupt_is_told_once() {
        let error = ReadError::from(Corrupt::BlockBits(3));
        assert!(error.to_string().contains("block size 2^3"), "{error}");
        assert!(std::error::Error::source(&error).is_none());
    }
}
