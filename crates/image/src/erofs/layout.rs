//! The on-disk structures of EROFS and of composefs, as bytes without checks and methods.
//!
//! All structures are little-endian and unaligned, and fields keep the kernel's names. Unless an item names another
//! source, the source is Linux `fs/erofs/erofs_fs.h` as of 6.17, with the `ishare` field of 7.0.
//! `docs/format/erofs-profile.md` describes each field and the code that checks it; a test compares the offsets in
//! that document with these structures.

use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Offset of the superblock in the image in bytes. `EROFS_SUPER_OFFSET`.
pub const SUPERBLOCK_OFFSET: usize = 1024;
/// Magic number of the superblock. `EROFS_SUPER_MAGIC_V1` in `linux/magic.h`.
pub const SUPERBLOCK_MAGIC: u32 = 0xE0F5_E1E2;
/// Bytes in an extension slot. A superblock takes 128 + `sb_extslots` * 16 bytes. `EROFS_SB_EXTSLOT_SIZE`.
pub const SUPERBLOCK_EXTSLOT_SIZE: usize = 16;
/// Bytes in an inode slot. A nid counts slots from `meta_blkaddr`. `EROFS_ISLOTBITS` in `fs/erofs/internal.h`.
pub const SLOT_SIZE: u64 = 32;

/// Bits of `feature_compat`. A reader may ignore unknown ones.
pub mod compat {
    /// The superblock's `checksum` is valid.
    pub const SB_CHKSUM: u32 = 0x1;
    /// Extended inodes store modification times, not change times.
    pub const MTIME: u32 = 0x2;
    /// Xattr headers have a name filter.
    pub const XATTR_FILTER: u32 = 0x4;
    /// Shared xattrs are in the metabox inode.
    pub const SHARED_EA_IN_METABOX: u32 = 0x8;
    /// The long prefix table is stored directly in the image, not in the packed or metabox inode.
    pub const PLAIN_XATTR_PFX: u32 = 0x10;
    /// Files may have a content fingerprint: an xattr whose name is given by `ishare_xattr_prefix_id`.
    pub const ISHARE_XATTRS: u32 = 0x20;
    /// The image is RAFS, Nydus's format, whose data is compressed outside of EROFS. Source: Nydus
    /// `rafs/src/metadata/layout/v6.rs`, `EROFS_FEATURE_COMPAT_RAFS_V6`.
    pub const RAFS_V6: u32 = 0x4000_0000;
}

/// Bits of `feature_incompat`. A reader that does not know one of them cannot read the image.
pub mod incompat {
    /// Compressed data has padding before it.
    pub const ZERO_PADDING: u32 = 0x1;
    /// Compression settings follow the superblock. The same bit means physical clusters of several blocks.
    pub const COMPR_CFGS: u32 = 0x2;
    /// The image has chunk-based files. (composefs does not set the bit, although it has such files.)
    pub const CHUNKED_FILE: u32 = 0x4;
    /// The image has a device table. The same bit means a second compressed head type.
    pub const DEVICE_TABLE: u32 = 0x8;
    /// Tails of compressed files are inline.
    pub const ZTAILPACKING: u32 = 0x10;
    /// Parts of compressed files are in the packed inode.
    pub const FRAGMENTS: u32 = 0x20;
    /// The image has a table of long xattr prefixes.
    pub const XATTR_PREFIXES: u32 = 0x40;
    /// Block numbers have 48 bits, and the root's nid 64.
    pub const ADDRESS_48BIT: u32 = 0x80;
    /// Metadata is in the (compressed) metabox inode.
    pub const METABOX: u32 = 0x100;
}

/// `struct erofs_super_block`, at [`SUPERBLOCK_OFFSET`], without its extension slots.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawSuperblock {
    /// Magic number, [`SUPERBLOCK_MAGIC`].
    pub magic: U32,
    /// With [`compat::SB_CHKSUM`], crc32c from the superblock to the end of its block, computed with this field as 0.
    pub checksum: U32,
    /// Bits of [`compat`].
    pub feature_compat: U32,
    /// Binary logarithm of the block size in bytes.
    pub blkszbits: u8,
    /// Number of extension slots.
    pub sb_extslots: u8,
    /// Nid of the root; with [`incompat::ADDRESS_48BIT`], the high bits of the number of blocks.
    pub rootnid_2b: U16,
    /// Number of inodes.
    pub inos: U64,
    /// Modification time of compact inodes in seconds since 1970. Kernels since 6.15 add the inode's `i_mtime`.
    /// (Formerly `build_time`.)
    pub epoch: I64,
    /// Nanoseconds of the modification time of compact inodes. (Formerly `build_time_nsec`.)
    pub fixed_nsec: U32,
    /// Number of blocks in the primary device.
    pub blocks_lo: U32,
    /// Block in which nid 0 begins.
    pub meta_blkaddr: U32,
    /// Block at which the ids of shared xattrs begin to count, in units of 4 bytes.
    pub xattr_blkaddr: U32,
    /// UUID of the volume.
    pub uuid: [u8; 16],
    /// Name of the volume.
    pub volume_name: [u8; 16],
    /// Bits of [`incompat`].
    pub feature_incompat: U32,
    /// Compression algorithms; without [`incompat::COMPR_CFGS`], the LZ4 window.
    pub available_compr_algs: U16,
    /// Number of devices in addition to the primary one.
    pub extra_devices: U16,
    /// Start of the device table in units of [`RawDeviceSlot`].
    pub devt_slotoff: U16,
    /// Binary logarithm of the number of blocks in a directory block. Always 0.
    pub dirblkbits: u8,
    /// Number of long xattr prefixes.
    pub xattr_prefix_count: u8,
    /// Start of the long prefix table in units of 4 bytes.
    pub xattr_prefix_start: U32,
    /// Nid of the packed inode, or 0.
    pub packed_nid: U64,
    /// Name filters are valid only if this is 0.
    pub xattr_filter_reserved: u8,
    /// With [`compat::ISHARE_XATTRS`], number of the long prefix that names the content fingerprint.
    pub ishare_xattr_prefix_id: u8,
    /// Reserved, 0.
    pub reserved: [u8; 2],
    /// Time at which the image was made, in seconds after `epoch`.
    pub build_time: U32,
    /// With [`incompat::ADDRESS_48BIT`], nid of the root.
    pub rootnid_8b: U64,
    /// Reserved, 0.
    pub reserved2: U64,
}
const _: () = assert!(size_of::<RawSuperblock>() == 128);

/// `struct erofs_deviceslot`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawDeviceSlot {
    /// Name of the device for user space, such as a digest.
    pub tag: [u8; 64],
    /// Number of blocks in the device.
    pub blocks_lo: U32,
    /// First block of the device in the common address space of all devices, or 0. (Formerly `mapped_blkaddr`.)
    pub uniaddr_lo: U32,
    /// With [`incompat::ADDRESS_48BIT`], the high bits of `blocks_lo`.
    pub blocks_hi: U32,
    /// With [`incompat::ADDRESS_48BIT`], the high bits of `uniaddr_lo`.
    pub uniaddr_hi: U16,
    /// Reserved, 0.
    pub reserved: [u8; 50],
}
const _: () = assert!(size_of::<RawDeviceSlot>() == 128);

/// Bit of `i_format`: the inode is a [`RawExtendedInode`], otherwise a [`RawCompactInode`]. `EROFS_I_VERSION_BIT`.
pub const FORMAT_EXTENDED: u16 = 0x1;
/// Lowest bit of the data layout in `i_format`, which has 3 bits. `EROFS_I_DATALAYOUT_BIT`.
pub const FORMAT_LAYOUT_SHIFT: u16 = 1;
/// Mask of the data layout after shifting. `EROFS_I_DATALAYOUT_MASK`.
pub const FORMAT_LAYOUT_MASK: u16 = 0x7;
/// Bit 4 of `i_format`: a compact inode has one link and 48-bit addresses (`EROFS_I_NLINK_1_BIT`), or a directory has
/// no `.` (`EROFS_I_DOT_OMITTED_BIT`). Since Linux 6.15.
pub const FORMAT_BIT_4: u16 = 0x10;

/// Data layout: consecutive blocks. `EROFS_INODE_FLAT_PLAIN`.
pub const LAYOUT_FLAT_PLAIN: u16 = 0;
/// Data layout: compressed, with a table of [`RawClusterIndex`]es or [`RawExtent`]s. `EROFS_INODE_COMPRESSED_FULL`.
pub const LAYOUT_COMPRESSED_FULL: u16 = 1;
/// Data layout: consecutive blocks, and a tail that does not fill a block after the inode. `EROFS_INODE_FLAT_INLINE`.
pub const LAYOUT_FLAT_INLINE: u16 = 2;
/// Data layout: compressed, with packs of indexes of 2 or 4 bytes. `EROFS_INODE_COMPRESSED_COMPACT`.
pub const LAYOUT_COMPRESSED_COMPACT: u16 = 3;
/// Data layout: a table of block numbers or [`RawChunkIndex`]es after the inode. `EROFS_INODE_CHUNK_BASED`.
pub const LAYOUT_CHUNK_BASED: u16 = 4;

/// `struct erofs_inode_compact`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawCompactInode {
    /// [`FORMAT_EXTENDED`], the data layout and [`FORMAT_BIT_4`].
    pub i_format: U16,
    /// 0 without xattrs, otherwise 1 plus the number of 4-byte units after the [`RawXattrHeader`].
    pub i_xattr_icount: U16,
    /// `st_mode`.
    pub i_mode: U16,
    /// Number of links, unless [`FORMAT_BIT_4`] is set.
    pub i_nb: U16,
    /// Size in bytes.
    pub i_size: U32,
    /// Modification time in seconds after the superblock's `epoch`; 0 before Linux 6.15.
    pub i_mtime: U32,
    /// Block number, device number, or chunk format in the low 16 bits: [`CHUNK_BLKBITS_MASK`] and the flags after
    /// it.
    pub i_u: U32,
    /// Inode number for 32-bit `stat`.
    pub i_ino: U32,
    /// User id of the owner.
    pub i_uid: U16,
    /// Group id of the owner.
    pub i_gid: U16,
    /// Reserved, 0.
    pub i_reserved: U32,
}
const _: () = assert!(size_of::<RawCompactInode>() == 32);

/// `struct erofs_inode_extended`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawExtendedInode {
    /// [`FORMAT_EXTENDED`], the data layout and [`FORMAT_BIT_4`].
    pub i_format: U16,
    /// 0 without xattrs, otherwise 1 plus the number of 4-byte units after the [`RawXattrHeader`].
    pub i_xattr_icount: U16,
    /// `st_mode`.
    pub i_mode: U16,
    /// With [`incompat::ADDRESS_48BIT`], the high bits of a block number.
    pub i_nb: U16,
    /// Size in bytes.
    pub i_size: U64,
    /// Block number, device number, or chunk format in the low 16 bits: [`CHUNK_BLKBITS_MASK`] and the flags after
    /// it.
    pub i_u: U32,
    /// Inode number for 32-bit `stat`.
    pub i_ino: U32,
    /// User id of the owner.
    pub i_uid: U32,
    /// Group id of the owner.
    pub i_gid: U32,
    /// Modification time in seconds since 1970, signed.
    pub i_mtime: I64,
    /// Nanoseconds of the modification time.
    pub i_mtime_nsec: U32,
    /// Number of links.
    pub i_nlink: U32,
    /// Reserved, 0.
    pub i_reserved2: [u8; 16],
}
const _: () = assert!(size_of::<RawExtendedInode>() == 64);

/// Mask of the binary logarithm of the number of blocks in a chunk. `EROFS_CHUNK_FORMAT_BLKBITS_MASK`.
pub const CHUNK_BLKBITS_MASK: u16 = 0x1F;
/// Flag: the table has [`RawChunkIndex`]es instead of 4-byte block numbers. `EROFS_CHUNK_FORMAT_INDEXES`.
pub const CHUNK_INDEXES: u16 = 0x20;
/// Flag: indexes have 48-bit block numbers. `EROFS_CHUNK_FORMAT_48BIT`.
pub const CHUNK_48BIT: u16 = 0x40;
/// Block number of a hole, which reads as zeros. `EROFS_NULL_ADDR`.
pub const NULL_BLOCK: u32 = u32::MAX;

/// `struct erofs_inode_chunk_index`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawChunkIndex {
    /// With [`CHUNK_48BIT`], the high bits of the block number.
    pub startblk_hi: U16,
    /// Number of the device: 0 for the primary one, 1 for the first in the device table.
    pub device_id: U16,
    /// Block number, or [`NULL_BLOCK`].
    pub startblk_lo: U32,
}
const _: () = assert!(size_of::<RawChunkIndex>() == 8);

/// Bits of `h_advise` in [`RawMapHeader`].
pub mod advise {
    /// Compact layout: packs of 32 bytes with 16 indexes follow the first indexes. `Z_EROFS_ADVISE_COMPACTED_2B`.
    pub const COMPACTED_2B: u16 = 0x1;
    /// Full layout: the table consists of [`RawExtent`](super::RawExtent)s. `Z_EROFS_ADVISE_EXTENTS`, since Linux
    /// 6.15.
    pub const EXTENTS: u16 = 0x1;
    /// Physical clusters of the first type may have several blocks. `Z_EROFS_ADVISE_BIG_PCLUSTER_1`.
    pub const BIG_PCLUSTER_1: u16 = 0x2;
    /// Physical clusters of the second type, and uncompressed ones, may have several blocks.
    /// `Z_EROFS_ADVISE_BIG_PCLUSTER_2`.
    pub const BIG_PCLUSTER_2: u16 = 0x4;
    /// The last physical cluster follows the indexes. `Z_EROFS_ADVISE_INLINE_PCLUSTER`.
    pub const INLINE_PCLUSTER: u16 = 0x8;
    /// Uncompressed bytes have the same offset in their block as in the file's. `Z_EROFS_ADVISE_INTERLACED_PCLUSTER`.
    pub const INTERLACED_PCLUSTER: u16 = 0x10;
    /// The end of the file is in the packed inode. `Z_EROFS_ADVISE_FRAGMENT_PCLUSTER`.
    pub const FRAGMENT_PCLUSTER: u16 = 0x20;
    /// With [`EXTENTS`], lowest bit of the size of a record, which is 4 bytes shifted left by these 2 bits.
    /// `Z_EROFS_ADVISE_EXTRECSZ_BIT`.
    pub const RECORD_SIZE_SHIFT: u16 = 1;
    /// Mask of these bits after shifting. `Z_EROFS_ADVISE_EXTRECSZ_MASK`.
    pub const RECORD_SIZE_MASK: u16 = 0x3;
}

/// `struct z_erofs_map_header`: after the xattrs of a compressed inode, aligned to 8 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawMapHeader {
    /// With [`advise::EXTENTS`], the low 16 bits of the number of extents; otherwise reserved.
    pub h_reserved1: U16,
    /// With [`advise::EXTENTS`], the next 16 bits of that number. With [`advise::INLINE_PCLUSTER`], the size in bytes
    /// of the physical cluster after the indexes.
    pub h_idata_size: U16,
    /// Bits of [`advise`].
    pub h_advise: U16,
    /// Algorithms: bits 0 to 3 of the first type of physical clusters, bits 4 to 7 of the second. With
    /// [`advise::EXTENTS`], bits 32 to 39 of the number of extents.
    pub h_algorithmtype: u8,
    /// Bits 0 to 3: binary logarithm of the number of blocks in a logical cluster. [`MAP_WHOLE_FRAGMENT`]. With
    /// [`advise::EXTENTS`], bits 40 to 47 of the number of extents.
    pub h_clusterbits: u8,
}
const _: () = assert!(size_of::<RawMapHeader>() == 8);

/// Bit of `h_clusterbits`: the whole file is in the packed inode. `Z_EROFS_FRAGMENT_INODE_BIT`.
pub const MAP_WHOLE_FRAGMENT: u8 = 0x80;
/// Bytes between the header and a table of [`RawClusterIndex`]es. `Z_EROFS_FULL_INDEX_START`.
pub const FULL_INDEX_GAP: u64 = 8;

/// `struct z_erofs_lcluster_index`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawClusterIndex {
    /// Bits 0 and 1: a value of [`cluster_type`]. [`CLUSTER_PARTIAL_REF`].
    pub di_advise: U16,
    /// Offset in the logical cluster of the extent that begins in it, in bytes.
    pub di_clusterofs: U16,
    /// If an extent begins in the cluster, the first block of the physical cluster. Otherwise the distances to the
    /// cluster in which the extent begins, with [`CLUSTER_BLOCKS`] (16 bits), and to the cluster in which the next one
    /// begins (16 bits).
    pub di_u: U32,
}
const _: () = assert!(size_of::<RawClusterIndex>() == 8);

/// Types of logical clusters, in 2 bits.
pub mod cluster_type {
    /// An extent begins, whose bytes are not compressed. `Z_EROFS_LCLUSTER_TYPE_PLAIN`.
    pub const PLAIN: u8 = 0;
    /// A compressed extent of the first type begins. `Z_EROFS_LCLUSTER_TYPE_HEAD1`.
    pub const HEAD1: u8 = 1;
    /// No extent begins. `Z_EROFS_LCLUSTER_TYPE_NONHEAD`.
    pub const NONHEAD: u8 = 2;
    /// A compressed extent of the second type begins. `Z_EROFS_LCLUSTER_TYPE_HEAD2`.
    pub const HEAD2: u8 = 3;
}

/// Bit of `di_advise`: the extent is only a part of what its physical cluster unpacks to. `Z_EROFS_LI_PARTIAL_REF`.
pub const CLUSTER_PARTIAL_REF: u16 = 0x8000;
/// Bit of the distance to the cluster in which the extent begins: the distance is 1, and the other bits are the number
/// of blocks of the physical cluster. `Z_EROFS_LI_D0_CBLKCNT`.
pub const CLUSTER_BLOCKS: u16 = 0x800;

/// `struct z_erofs_extent`. A table has only the first 4, 8, 16 or 32 bytes of each.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawExtent {
    /// Bits 0 to 20: length of the physical cluster in bytes, or 0 for a hole. [`EXTENT_PARTIAL`]. Bits 28 to 31: 0,
    /// or 1 and the algorithm.
    pub plen: U32,
    /// Offset of the physical cluster in the image, in bytes.
    pub pstart_lo: U32,
    /// High bits of that offset.
    pub pstart_hi: U32,
    /// Offset of the extent in the file, in bytes.
    pub lstart_lo: U32,
    /// High bits of that offset.
    pub lstart_hi: U32,
    /// Reserved, 0.
    pub reserved: [u8; 12],
}
const _: () = assert!(size_of::<RawExtent>() == 32);

/// Mask of the length in `plen`. `Z_EROFS_EXTENT_PLEN_MASK`.
pub const EXTENT_LEN_MASK: u32 = 0x1F_FFFF;
/// Bit of `plen`: the extent is only a part of what its physical cluster unpacks to. `Z_EROFS_EXTENT_PLEN_PARTIAL`.
pub const EXTENT_PARTIAL: u32 = 1 << 27;
/// Lowest bit of the algorithm in `plen`. `Z_EROFS_EXTENT_PLEN_FMT_BIT`.
pub const EXTENT_FORMAT_SHIFT: u32 = 28;

/// Maximum size in bytes of a physical cluster. `Z_EROFS_PCLUSTER_MAX_SIZE`.
pub const PHYSICAL_CLUSTER_MAX: u64 = 1 << 20;
/// Maximum size in bytes of what a physical cluster unpacks to. `Z_EROFS_PCLUSTER_MAX_DSIZE`.
pub const UNPACKED_MAX: u64 = 12 << 20;

/// `struct z_erofs_lzma_cfgs`: settings of MicroLZMA, after the superblock and a length of 2 bytes.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLzmaConfig {
    /// Size of the window in bytes, at most [`LZMA_WINDOW_MAX`].
    pub dict_size: U32,
    /// 0.
    pub format: U16,
    /// Reserved, 0.
    pub reserved: [u8; 8],
}
const _: () = assert!(size_of::<RawLzmaConfig>() == 14);

/// `Z_EROFS_LZMA_MAX_DICT_SIZE`.
pub const LZMA_WINDOW_MAX: u32 = 8 << 20;

/// `struct z_erofs_deflate_cfgs`: settings of deflate.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawDeflateConfig {
    /// Binary logarithm of the size of the window, 8 to 15.
    pub windowbits: u8,
    /// Reserved, 0.
    pub reserved: [u8; 5],
}
const _: () = assert!(size_of::<RawDeflateConfig>() == 6);

/// `struct z_erofs_zstd_cfgs`: settings of zstd.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawZstdConfig {
    /// 0.
    pub format: u8,
    /// Binary logarithm of the size of the window, minus 10; at most 10.
    pub windowlog: u8,
    /// Reserved, 0.
    pub reserved: [u8; 4],
}
const _: () = assert!(size_of::<RawZstdConfig>() == 6);

/// `struct erofs_dirent`. A directory block begins with all its dirents; their names follow without separators.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawDirent {
    /// Nid of the inode.
    pub nid: U64,
    /// Offset of the name in the block. The name ends where the next one begins, and the last one at a NUL or the
    /// end.
    pub nameoff: U16,
    /// A value of [`file_type`].
    pub file_type: u8,
    /// Reserved, 0.
    pub reserved: u8,
}
const _: () = assert!(size_of::<RawDirent>() == 12);

/// File types in dirents. Source: `FT_*` in Linux `include/linux/fs_types.h`.
pub mod file_type {
    /// Regular file.
    pub const REGULAR: u8 = 1;
    /// Directory.
    pub const DIRECTORY: u8 = 2;
    /// Character device.
    pub const CHAR_DEVICE: u8 = 3;
    /// Block device.
    pub const BLOCK_DEVICE: u8 = 4;
    /// Named pipe.
    pub const FIFO: u8 = 5;
    /// Socket.
    pub const SOCKET: u8 = 6;
    /// Symbolic link.
    pub const SYMLINK: u8 = 7;
}

/// `struct erofs_xattr_ibody_header`, after an inode with xattrs. The ids of shared xattrs follow, 4 bytes each, then
/// inline [`RawXattrEntry`]s.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawXattrHeader {
    /// With [`compat::XATTR_FILTER`], the name filter: a bit of 1 means that no name with that hash is present.
    pub h_name_filter: U32,
    /// Number of shared xattrs.
    pub h_shared_count: u8,
    /// Reserved, 0.
    pub h_reserved2: [u8; 7],
}
const _: () = assert!(size_of::<RawXattrHeader>() == 12);

/// `struct erofs_xattr_entry`, aligned to 4 bytes. The name without its prefix and the value follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawXattrEntry {
    /// Length of the name without its prefix, in bytes.
    pub e_name_len: u8,
    /// A number of [`XATTR_PREFIXES`], or [`XATTR_LONG_PREFIX`] and a number in the table of long prefixes.
    pub e_name_index: u8,
    /// Length of the value in bytes.
    pub e_value_size: U16,
}
const _: () = assert!(size_of::<RawXattrEntry>() == 4);

/// `struct erofs_xattr_long_prefix`, preceded by its length. `size` - 1 bytes of infix follow, padded to 4.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLongPrefix {
    /// Length of `base_index` and infix in bytes.
    pub size: U16,
    /// Number of the short prefix that precedes the infix.
    pub base_index: u8,
}
const _: () = assert!(size_of::<RawLongPrefix>() == 3);

/// Prefixes of names with their `e_name_index`. `EROFS_XATTR_INDEX_*`; kernel and writers do not use 5, Lustre's.
pub const XATTR_PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];
/// Bit of `e_name_index`: the other bits are a number in the table of long prefixes. `EROFS_XATTR_LONG_PREFIX`.
pub const XATTR_LONG_PREFIX: u8 = 0x80;
/// Seed of the name filter. A name's bit is the xxh32 of the name without its prefix, with this plus `e_name_index`
/// as seed, modulo 32. `EROFS_XATTR_FILTER_SEED`.
pub const XATTR_FILTER_SEED: u32 = 0x25BB_E08F;

/// `struct lcfs_erofs_header_s` of composefs, at byte 0. Source: composefs `libcomposefs/lcfs-erofs.h`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawComposefsHeader {
    /// Magic number, [`COMPOSEFS_MAGIC`].
    pub magic: U32,
    /// Version of the header, [`COMPOSEFS_HEADER_VERSION`].
    pub version: U32,
    /// 0 or [`COMPOSEFS_HAS_ACL`].
    pub flags: U32,
    /// Version of composefs's rules by which the image was made: 0 or 1 by C composefs, 2 by composefs-rs.
    pub composefs_version: U32,
    /// Reserved, 0.
    pub unused: [U32; 4],
}
const _: () = assert!(size_of::<RawComposefsHeader>() == 32);

/// Quire's header, at byte 0 of images of the native profile.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawNativeHeader {
    /// Magic bytes, [`NATIVE_MAGIC`].
    pub magic: [u8; 8],
    /// Version of the header, [`NATIVE_HEADER_VERSION`].
    pub version: U32,
    /// [`NATIVE_HAS_ACL`] and [`NATIVE_HAS_TAR`].
    pub flags: U32,
}
const _: () = assert!(size_of::<RawNativeHeader>() == 16);

/// The first bytes of a native image.
pub const NATIVE_MAGIC: [u8; 8] = *b"quireimg";
/// Version of the header. Images with version 1 or without a header are older than the first release.
pub const NATIVE_HEADER_VERSION: u32 = 2;
/// Flag: an inode has a POSIX ACL. Without the flag, the image is mounted with `noacl`.
pub const NATIVE_HAS_ACL: u32 = 0x1;
/// Flag: a device is a tar.
pub const NATIVE_HAS_TAR: u32 = 0x2;

/// Magic number of composefs's header. `LCFS_EROFS_MAGIC`.
pub const COMPOSEFS_MAGIC: u32 = 0xD078_629A;
/// Version of composefs's header. `LCFS_EROFS_VERSION`.
pub const COMPOSEFS_HEADER_VERSION: u32 = 1;
/// Flag: an inode has a POSIX ACL. Without the flag, the image is mounted with `noacl`. `LCFS_EROFS_FLAGS_HAS_ACL`.
pub const COMPOSEFS_HAS_ACL: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// Lists the name, offset and size of each field. A missing field does not compile.
    macro_rules! fields {
        ($raw:ident { $($field:ident),* $(,)? }) => {{
            let raw = <$raw as zerocopy::FromZeros>::new_zeroed();
            let $raw { $($field: _),* } = raw;
            let fields = vec![$((
                stringify!($field).to_owned(),
                std::mem::offset_of!($raw, $field),
                size_of_val(&raw.$field),
            )),*];
            (stringify!($raw), fields)
        }};
    }

    /// Returns the text below a heading in the document.
    fn section(heading: &str) -> &'static str {
        let document = include_str!("../../../../docs/format/erofs-profile.md");
        let section = document.split(&format!("### {heading}\n")).nth(1).expect(heading);
        section.split("\n#").next().unwrap()
    }

    /// Returns the cells of the first drawing below a heading: name, offset (from the preceding sizes), and size.
    fn drawn(heading: &str) -> Vec<(String, usize, usize)> {
        let drawing = section(heading).split("```\n").nth(1).expect(heading);
        let mut cells = Vec::new();
        let mut next = 0;
        for line in drawing.lines() {
            let Some((offset, row)) = line.split_once(" │ ") else { continue };
            assert_eq!(offset.trim().parse(), Ok(next), "{heading}: {line}");
            for cell in row.split('│').map(str::trim).filter(|cell| !cell.is_empty()) {
                let (name, size) = cell.rsplit_once(' ').expect(cell);
                let size = size.parse().expect(cell);
                cells.push((name.trim_end().to_owned(), next, size));
                next += size;
            }
        }
        cells
    }

    /// Returns the rows of the table below a heading in the document.
    fn documented(heading: &str) -> Vec<(String, usize, usize)> {
        let rows = section(heading).lines().filter_map(|line| {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let [_, offset, size, field, _, who, _] = cells[..] else { return None };
            let (offset, size) = (offset.parse().ok()?, size.parse().ok()?);
            assert!(!who.is_empty(), "{heading} {field}: somebody checks it, or nobody");
            Some((field.to_owned(), offset, size))
        });
        rows.collect()
    }

    #[test]
    fn the_document_has_every_field_where_it_is() {
        let structures = [
            fields!(RawComposefsHeader { magic, version, flags, composefs_version, unused }),
            fields!(RawNativeHeader { magic, version, flags }),
            fields!(RawSuperblock {
                magic,
                checksum,
                feature_compat,
                blkszbits,
                sb_extslots,
                rootnid_2b,
                inos,
                epoch,
                fixed_nsec,
                blocks_lo,
                meta_blkaddr,
                xattr_blkaddr,
                uuid,
                volume_name,
                feature_incompat,
                available_compr_algs,
                extra_devices,
                devt_slotoff,
                dirblkbits,
                xattr_prefix_count,
                xattr_prefix_start,
                packed_nid,
                xattr_filter_reserved,
                ishare_xattr_prefix_id,
                reserved,
                build_time,
                rootnid_8b,
                reserved2,
            }),
            fields!(RawDeviceSlot { tag, blocks_lo, uniaddr_lo, blocks_hi, uniaddr_hi, reserved }),
            fields!(RawCompactInode {
                i_format,
                i_xattr_icount,
                i_mode,
                i_nb,
                i_size,
                i_mtime,
                i_u,
                i_ino,
                i_uid,
                i_gid,
                i_reserved,
            }),
            fields!(RawExtendedInode {
                i_format,
                i_xattr_icount,
                i_mode,
                i_nb,
                i_size,
                i_u,
                i_ino,
                i_uid,
                i_gid,
                i_mtime,
                i_mtime_nsec,
                i_nlink,
                i_reserved2,
            }),
            fields!(RawChunkIndex { startblk_hi, device_id, startblk_lo }),
            fields!(RawMapHeader {
                h_reserved1,
                h_idata_size,
                h_advise,
                h_algorithmtype,
                h_clusterbits,
            }),
            fields!(RawClusterIndex { di_advise, di_clusterofs, di_u }),
            fields!(RawExtent { plen, pstart_lo, pstart_hi, lstart_lo, lstart_hi, reserved }),
            fields!(RawLzmaConfig { dict_size, format, reserved }),
            fields!(RawDeflateConfig { windowbits, reserved }),
            fields!(RawZstdConfig { format, windowlog, reserved }),
            fields!(RawDirent { nid, nameoff, file_type, reserved }),
            fields!(RawXattrHeader { h_name_filter, h_shared_count, h_reserved2 }),
            fields!(RawXattrEntry { e_name_len, e_name_index, e_value_size }),
            fields!(RawLongPrefix { size, base_index }),
        ];
        for (name, fields) in structures {
            assert_eq!(documented(name), fields, "{name}");
            assert_eq!(drawn(name), fields, "the drawing of {name}");
        }
    }
}
