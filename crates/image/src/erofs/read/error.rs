//! The errors of reading an image.

use std::fmt;
use std::io;

use super::{Algorithm, ByteOffset, Device, Nid};
use crate::tree::TreeError;

/// The reason why an image cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// There is no EROFS superblock.
    #[error("not an EROFS image")]
    NotErofs,
    /// The image was not made by composefs, but a composefs image is needed.
    #[error("not a composefs image")]
    NotComposefs,
    /// The image uses a feature that this reader does not support.
    #[error("the image uses unsupported {0}")]
    Unsupported(Unsupported),
    /// The image contradicts itself or the format.
    #[error("the image is corrupt: {0}")]
    Corrupt(ErofsCorruption),
    /// The image has more names than the caller accepts.
    #[error("the image has more than {0} names")]
    Names(u64),
    /// The caller has cancelled the walk.
    #[error("cancelled")]
    Cancelled,
    /// The bytes are on a device that the caller did not provide.
    #[error("the data is on {0}, which is not open")]
    NoDevice(Device),
    /// Reading the source failed.
    #[error("cannot read {len} bytes of {device} at byte {offset}")]
    Io {
        /// The image itself or one of its devices.
        device: Device,
        /// Offset in the device, in bytes.
        offset: ByteOffset,
        /// Number of bytes requested.
        len: usize,
        /// The source's error.
        source: io::Error,
    },
}

/// A feature that this reader does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsupported {
    /// Unknown bits of `feature_incompat`.
    Features(u32),
    /// Metadata in a separate (compressed) inode, the metabox.
    Metabox,
    /// RAFS, the format of Nydus, version 6.
    Rafs,
    /// A compressed file whose end, or all of it, is in another inode.
    Fragments(Nid),
    /// Unknown bits of the algorithms that the image may use.
    Algorithms(u16),
    /// A compressed file with an unknown algorithm.
    Algorithm(Nid, u8),
    /// Settings of an algorithm in another format.
    AlgorithmFormat(Algorithm, u16),
    /// Unknown bits of the index of a compressed file.
    MapFormat(Nid, u16),
    /// A compressed file with logical clusters of 2 to this power of bytes.
    ClusterSize(Nid, u32),
    /// Directory blocks of 2 to this power of blocks.
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
            Self::Rafs => write!(f, "data of RAFS, the format of Nydus"),
            Self::Fragments(nid) => write!(f, "fragments (inode {nid})"),
            Self::Algorithms(bits) => write!(f, "compression algorithms {bits:#x}"),
            Self::Algorithm(nid, number) => {
                write!(f, "compression algorithm {number} of inode {nid}")
            }
            Self::AlgorithmFormat(algorithm, format) => {
                write!(f, "settings of {algorithm} in format {format}")
            }
            Self::MapFormat(nid, bits) => {
                write!(f, "format {bits:#x} of the compression of inode {nid}")
            }
            Self::ClusterSize(nid, bits) => {
                write!(f, "logical clusters of 2^{bits} bytes of inode {nid}")
            }
            Self::DirectoryBlocks(bits) => write!(f, "directory blocks of 2^{bits} blocks"),
            Self::InodeFormat(nid, bits) => write!(f, "format {bits:#x} of inode {nid}"),
            Self::DataLayout(nid, layout) => write!(f, "data layout {layout} of inode {nid}"),
            Self::ChunkFormat(nid, bits) => write!(f, "chunk format {bits:#x} of inode {nid}"),
            Self::ComposefsHeader(version) => write!(f, "composefs header version {version}"),
            Self::NativeHeader(version) => write!(f, "native header version {version}"),
        }
    }
}

impl From<ErofsCorruption> for ReadError {
    // `Corrupt` is not the `source`, because the message contains it and would print it twice.
    fn from(corrupt: ErofsCorruption) -> Self {
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
    /// The superblock, including the rest of its block if that is checksummed.
    Superblock,
    /// A slot of the device table.
    Device(Device),
    /// An entry of the table of long xattr prefixes.
    LongPrefix(u8),
    /// An inode.
    Inode(Nid),
    /// The xattrs after an inode.
    Xattrs(Nid),
    /// A shared xattr.
    SharedXattr(u32),
    /// The chunk table after an inode.
    ChunkTable(Nid),
    /// The compression settings after the superblock.
    Settings,
    /// The index of a compressed inode.
    ClusterIndex(Nid),
    /// The data of an inode: a file's content, a directory's entries or a symlink's target.
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
            Self::Settings => write!(f, "the compression settings"),
            Self::ClusterIndex(nid) => write!(f, "the index of compressed inode {nid}"),
            Self::Data(nid) => write!(f, "the data of inode {nid}"),
        }
    }
}

/// The way in which an image contradicts itself or the format. Messages show names with escapes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsCorruption {
    /// The superblock's checksum does not match.
    #[error("the superblock has the checksum {computed:#010x}, but states {stored:#010x}")]
    Checksum {
        /// Checksum in the superblock.
        stored: u32,
        /// Computed crc32c.
        computed: u32,
    },
    /// The block size is not one of EROFS: its binary logarithm.
    #[error("block size 2^{0} bytes is not between 2^9 and 2^16")]
    BlockBits(u8),
    /// The image is shorter than its superblock states.
    #[error("the image has {len} bytes, but its superblock states {blocks} blocks of {block_size}")]
    Truncated {
        /// Number of blocks that the superblock states.
        blocks: u64,
        /// Size of a block in bytes.
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
        /// Offset of the part in bytes; the largest number if it does not fit in 64 bits.
        offset: ByteOffset,
        /// Length of the part in bytes.
        len: u64,
        /// Length of the device in bytes.
        bound: u64,
    },
    /// The root is not a directory.
    #[error("the root, inode {nid}, is not a directory: it has mode {mode:o}")]
    Root {
        /// Nid of the root.
        nid: Nid,
        /// `st_mode` of the root.
        mode: u16,
    },
    /// An inode has an invalid file type.
    #[error("inode {nid} has mode {mode:o}, which has no file type")]
    Mode {
        /// The inode.
        nid: Nid,
        /// `st_mode` of the inode.
        mode: u16,
    },
    /// An inode has more bytes than a file can have.
    #[error("inode {nid} has {size} bytes, more than 2^63 - 1")]
    Size {
        /// The inode.
        nid: Nid,
        /// Size of the inode in bytes.
        size: u64,
    },
    /// The time of an inode has a second or more of nanoseconds.
    #[error("inode {nid} has {nanoseconds} nanoseconds in its time, more than 999999999")]
    Nanoseconds {
        /// The inode.
        nid: Nid,
        /// The nanoseconds.
        nanoseconds: u32,
    },
    /// A symlink has an empty target, or one of more than 4095 bytes.
    #[error("symlink {nid} has a target of {size} bytes, not 1 to 4095")]
    SymlinkSize {
        /// The symlink.
        nid: Nid,
        /// Length of the target in bytes.
        size: u64,
    },
    /// The target of a symlink has a NUL byte.
    #[error("the target of symlink {nid} has a NUL byte at {at}")]
    SymlinkNul {
        /// The symlink.
        nid: Nid,
        /// Offset of the NUL in the target, in bytes.
        at: usize,
    },
    /// Inline data after an inode does not end in the block in which it begins.
    #[error(
        "inode {nid} has {len} bytes of inline data at byte {offset}, beyond the end of the block"
    )]
    InlineData {
        /// The inode.
        nid: Nid,
        /// Offset of the data in the image, in bytes.
        offset: ByteOffset,
        /// Length of the data in bytes.
        len: u64,
    },
    /// A chunk is on a device that the image does not have.
    #[error("inode {nid} has data on {device}, but the image has only {count} besides itself")]
    Device {
        /// The inode.
        nid: Nid,
        /// The device.
        device: Device,
        /// Number of devices in the device table.
        count: usize,
    },
    /// The first name of a directory block does not begin after a whole number of entries.
    #[error("block {block} of directory {nid} has {len} bytes and its first name at byte {offset}")]
    DirectoryBlock {
        /// The directory.
        nid: Nid,
        /// Index of the block in the directory.
        block: u64,
        /// Offset of the first name in the block, in bytes.
        offset: u16,
        /// Length of the block in bytes.
        len: usize,
    },
    /// The name of an entry is outside the block's names, empty, or too long.
    #[error(
        "entry {entry} in block {block} of directory {nid} has a name at bytes {start} to {end}"
    )]
    NameRange {
        /// The directory.
        nid: Nid,
        /// Index of the block in the directory.
        block: u64,
        /// Index of the entry in the block.
        entry: usize,
        /// Offset of the name in the block, in bytes.
        start: usize,
        /// End of the name in the block, in bytes.
        end: usize,
    },
    /// A name in a directory is invalid.
    #[error("directory {nid} has an invalid entry: {reason}")]
    Name {
        /// The directory.
        nid: Nid,
        /// The reason.
        reason: TreeError,
    },
    /// Names do not ascend in byte order, so the kernel would not find them.
    #[error("directory {nid} has \"{}\" after \"{}\"", .name.escape_ascii(), .previous.escape_ascii())]
    NameOrder {
        /// The directory.
        nid: Nid,
        /// The preceding name.
        previous: Vec<u8>,
        /// The name.
        name: Vec<u8>,
    },
    /// `.` or `..` refers to the wrong directory.
    #[error("directory {nid} has \"{}\" at inode {found}, not at {expected}", .name.escape_ascii())]
    Dots {
        /// The directory.
        nid: Nid,
        /// `.` or `..`.
        name: Vec<u8>,
        /// The inode that it refers to.
        found: Nid,
        /// The inode that it should refer to.
        expected: Nid,
    },
    /// The file types of an entry and its inode differ.
    #[error("directory {nid} has \"{}\" with type {entry}, but it has mode {mode:o}", .name.escape_ascii())]
    EntryType {
        /// The directory.
        nid: Nid,
        /// Name of the entry.
        name: Vec<u8>,
        /// Type in the entry.
        entry: u8,
        /// `st_mode` of the inode.
        mode: u16,
    },
    /// A directory has two names, which may be a loop.
    #[error("directory {nid} has a second name \"{}\"", .path.escape_ascii())]
    DirectoryTwice {
        /// The directory.
        nid: Nid,
        /// Path of the second name.
        path: Vec<u8>,
    },
    /// A path is longer than [`PATH_MAX`](super::PATH_MAX): its length in bytes.
    #[error("a path has {0} bytes, more than 4095")]
    PathLength(usize),
    /// The ids of shared xattrs do not fit in an inode's xattrs.
    #[error("inode {nid} has {size} bytes of xattrs, too few for {shared} shared ones")]
    XattrHeader {
        /// The inode.
        nid: Nid,
        /// Size of the inode's xattrs in bytes.
        size: u32,
        /// Number of shared xattrs.
        shared: u8,
    },
    /// An xattr does not fit in the rest of an inode's xattrs.
    #[error(
        "inode {nid} has an xattr of {need} bytes at byte {at} of its xattrs, where {left} are left"
    )]
    XattrEntry {
        /// The inode.
        nid: Nid,
        /// Offset after the inode, in bytes.
        at: usize,
        /// Number of bytes that the xattr takes.
        need: usize,
        /// Number of bytes left.
        left: usize,
    },
    /// An xattr has a prefix that does not exist.
    #[error("inode {nid} has an xattr with prefix {index:#x}, which does not exist")]
    XattrPrefix {
        /// The inode.
        nid: Nid,
        /// `e_name_index` of the xattr.
        index: u8,
    },
    /// The name of an xattr is empty, too long, or has a NUL byte.
    #[error("inode {nid} has an invalid xattr: {reason}")]
    XattrName {
        /// The inode.
        nid: Nid,
        /// The reason.
        reason: TreeError,
    },
    /// An inode has two xattrs of one name.
    #[error("inode {nid} has xattr \"{}\" twice", .name.escape_ascii())]
    XattrTwice {
        /// The inode.
        nid: Nid,
        /// Name of the xattrs.
        name: Vec<u8>,
    },
    /// An xattr is absent according to the inode's name filter, so the kernel would not find it.
    #[error("inode {nid} has xattr \"{}\", which its name filter {filter:#010x} denies", .name.escape_ascii())]
    XattrFilter {
        /// The inode.
        nid: Nid,
        /// Name of the xattr.
        name: Vec<u8>,
        /// Name filter of the inode.
        filter: u32,
    },
    /// The names of an inode's xattrs take more bytes than the kernel can list.
    #[error("the names of the xattrs of inode {nid} take {len} bytes, more than 65536")]
    XattrList {
        /// The inode.
        nid: Nid,
        /// Length of all names with their final NULs, in bytes.
        len: usize,
    },
    /// A long prefix has 0 or more than 256 bytes.
    #[error("long xattr prefix {at} has {size} bytes, not 1 to 256")]
    LongPrefix {
        /// Number of the prefix.
        at: u8,
        /// Length of base index and infix in bytes.
        size: u16,
    },
    /// A long prefix continues a prefix that does not exist.
    #[error("long xattr prefix {at} continues prefix {base}, which does not exist")]
    LongPrefixBase {
        /// Number of the prefix.
        at: u8,
        /// `base_index` of the prefix.
        base: u8,
    },
    /// The long prefix that names fingerprints does not exist.
    #[error("fingerprints use long xattr prefix {at}, but the image has only {count}")]
    FingerprintPrefix {
        /// Number of the prefix.
        at: u8,
        /// Number of long prefixes.
        count: usize,
    },
    /// The image has more metadata than its length allows unless the same bytes are used many times.
    #[error("the image uses some bytes so often that its metadata takes more than {bound} bytes")]
    Amplified {
        /// Number of bytes that an image of this length may have.
        bound: u64,
    },
    /// A compression algorithm has settings that the format does not allow.
    #[error("the settings of {algorithm} have the value {value}, which is not allowed")]
    Settings {
        /// The algorithm.
        algorithm: Algorithm,
        /// The size or logarithm of the window, or the length of the settings in bytes.
        value: u32,
    },
    /// A compressed file uses an algorithm that the image does not state.
    #[error("inode {nid} is compressed with {algorithm}, which the image does not state")]
    Algorithm {
        /// The file.
        nid: Nid,
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// The header of a file's index contradicts the superblock or itself.
    #[error("the index of compressed inode {nid} has the contradictory flags {flags:#x}")]
    MapHeader {
        /// The file.
        nid: Nid,
        /// Flags of the header.
        flags: u16,
    },
    /// A logical cluster states that an extent begins after its end.
    #[error("cluster {cluster} of inode {nid} states an extent at byte {offset} of the cluster")]
    ClusterOffset {
        /// The file.
        nid: Nid,
        /// Number of the logical cluster.
        cluster: u64,
        /// Offset of the extent in the cluster, in bytes.
        offset: u64,
    },
    /// The distance from a logical cluster to the one in which its extent begins is wrong.
    #[error("the extent of cluster {cluster} of inode {nid} does not begin {back} clusters before")]
    ClusterBack {
        /// The file.
        nid: Nid,
        /// Number of the logical cluster.
        cluster: u64,
        /// The distance.
        back: u64,
    },
    /// A logical cluster lacks the number of blocks of a physical cluster, or states a wrong one.
    #[error("cluster {cluster} of inode {nid} states no valid number of compressed blocks")]
    ClusterBlocks {
        /// The file.
        nid: Nid,
        /// Number of the logical cluster.
        cluster: u64,
    },
    /// An extent or its physical cluster has a wrong length.
    #[error("inode {nid} has {len} bytes at byte {start} in {packed} bytes of the image")]
    ExtentLength {
        /// The file.
        nid: Nid,
        /// Offset of the extent in the file.
        start: ByteOffset,
        /// Length of the extent in bytes.
        len: u64,
        /// Length of the physical cluster in bytes.
        packed: u64,
    },
    /// An extent overlaps another one.
    #[error("inode {nid} has an extent of {len} bytes at byte {start} for byte {offset}")]
    ExtentOverlap {
        /// The file.
        nid: Nid,
        /// Offset of the extent in the file.
        start: ByteOffset,
        /// Length of the extent in bytes.
        len: u64,
        /// Offset of the byte that was read.
        offset: ByteOffset,
    },
    /// A table of extents begins after the beginning of the file, or is empty.
    #[error("inode {nid} has no extent for byte {offset}")]
    NoExtent {
        /// The file.
        nid: Nid,
        /// Offset of the byte in the file.
        offset: ByteOffset,
    },
    /// Extents are not in the order of their offsets.
    #[error("extent {number} of inode {nid} begins at byte {start}, after the next one")]
    ExtentOrder {
        /// The file.
        nid: Nid,
        /// Number of the extent.
        number: u64,
        /// Offset of the extent in the file.
        start: ByteOffset,
    },
    /// The bytes of a physical cluster are damaged, or they unpack to another number of bytes.
    #[error(
        "inode {nid} has {len} bytes at byte {start} that do not come from the {packed} bytes at byte {at} of the \
        image as {method} data"
    )]
    Unpacked {
        /// The file.
        nid: Nid,
        /// Offset of the extent in the file.
        start: ByteOffset,
        /// Length of the extent in bytes.
        len: u64,
        /// Offset of the physical cluster in the image.
        at: ByteOffset,
        /// Length of the physical cluster in bytes.
        packed: u64,
        /// The algorithm.
        method: &'static str,
    },
    /// Large physical clusters are used for few bytes.
    #[error("the image has {packed} bytes of compressed data for {unpacked} bytes of files")]
    PackedWork {
        /// Bytes of physical clusters that were read.
        packed: u64,
        /// Bytes of files.
        unpacked: u64,
    },
    /// In a composefs image, a file has more inline bytes than composefs allows.
    #[error("file {nid} has {size} bytes inside the image, more than the 5000 of composefs")]
    InlineContent {
        /// The file.
        nid: Nid,
        /// Size of the file in bytes.
        size: u64,
    },
    /// In a composefs image, a `trusted.overlay.metacopy` is not a digest.
    #[error("file {nid} has a metacopy xattr of {len} bytes that is not an fs-verity digest")]
    Metacopy {
        /// The file.
        nid: Nid,
        /// Length of the xattr's value in bytes.
        len: usize,
    },
    /// In a composefs image, a whiteout has several names.
    #[error("whiteout {nid} has {nlink} links")]
    WhiteoutLinks {
        /// The whiteout.
        nid: Nid,
        /// Number of links of the whiteout.
        nlink: u32,
    },
    /// A tree cannot hold an inode.
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
    use super::{ErofsCorruption, ReadError};

    #[test]
    fn what_is_corrupt_is_told_once() {
        let error = ReadError::from(ErofsCorruption::BlockBits(3));
        assert!(error.to_string().contains("block size 2^3"), "{error}");
        assert!(std::error::Error::source(&error).is_none());
    }
}
