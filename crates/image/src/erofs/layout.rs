//! The on-disk structures of EROFS and of composefs, as bytes: no checks, no methods.
//!
//! Everything is little-endian and unaligned; fields keep the kernel's names. Source, where an item names none: Linux
//! `fs/erofs/erofs_fs.h` as of 6.17, with the `ishare` field of 7.0. Field by field, with who checks each, they are
//! described in `docs/format/erofs-profile.md`, and a test compares the offsets there with these.

use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Where the superblock begins, in bytes from the start of the image. `EROFS_SUPER_OFFSET`.
pub const SUPERBLOCK_OFFSET: usize = 1024;
/// `EROFS_SUPER_MAGIC_V1`, in `linux/magic.h`.
pub const SUPERBLOCK_MAGIC: u32 = 0xE0F5_E1E2;
/// Bytes in a superblock's extension slot: it takes 128 + `sb_extslots` * 16 bytes. `EROFS_SB_EXTSLOT_SIZE`.
pub const SUPERBLOCK_EXTSLOT_SIZE: usize = 16;
/// Bytes in an inode slot: an inode's nid counts them from `meta_blkaddr`. `EROFS_ISLOTBITS` in `fs/erofs/internal.h`.
pub const SLOT_SIZE: u64 = 32;

/// Bits of `feature_compat`: a reader that does not know one may go on.
pub mod compat {
    /// The superblock's `checksum` holds.
    pub const SB_CHKSUM: u32 = 0x1;
    /// Extended inodes keep modification times, not those of change.
    pub const MTIME: u32 = 0x2;
    /// Xattr headers have a name filter.
    pub const XATTR_FILTER: u32 = 0x4;
    /// Shared xattrs are in the metabox inode.
    pub const SHARED_EA_IN_METABOX: u32 = 0x8;
    /// The long prefix table stands by itself in the image, not in the packed or metabox inode.
    pub const PLAIN_XATTR_PFX: u32 = 0x10;
    /// Files may have a content fingerprint, an xattr named by `ishare_xattr_prefix_id`.
    pub const ISHARE_XATTRS: u32 = 0x20;
}

/// Bits of `feature_incompat`: a reader that does not know one cannot read the image.
pub mod incompat {
    /// Compressed data is padded in front.
    pub const ZERO_PADDING: u32 = 0x1;
    /// Compression settings follow the superblock. The same bit: physical clusters of several blocks.
    pub const COMPR_CFGS: u32 = 0x2;
    /// There are chunk-based files. (composefs does not set it, though it has them.)
    pub const CHUNKED_FILE: u32 = 0x4;
    /// There is a device table. The same bit: a second compressed head type.
    pub const DEVICE_TABLE: u32 = 0x8;
    /// Tails of compressed files are inline.
    pub const ZTAILPACKING: u32 = 0x10;
    /// Parts of compressed files are in the packed inode.
    pub const FRAGMENTS: u32 = 0x20;
    /// There is a table of long xattr prefixes.
    pub const XATTR_PREFIXES: u32 = 0x40;
    /// Block numbers have 48 bits, and the root's nid 64.
    pub const ADDRESS_48BIT: u32 = 0x80;
    /// Metadata is in the (compressed) metabox inode.
    pub const METABOX: u32 = 0x100;
}

/// `struct erofs_super_block`, at [`SUPERBLOCK_OFFSET`]; its extension slots are not part of it.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawSuperblock {
    /// [`SUPERBLOCK_MAGIC`].
    pub magic: U32,
    /// crc32c of the block from the superblock on, with this field 0, when [`compat::SB_CHKSUM`] is set.
    pub checksum: U32,
    /// [`compat`].
    pub feature_compat: U32,
    /// Block size is 2 to this power.
    pub blkszbits: u8,
    /// Number of extension slots.
    pub sb_extslots: u8,
    /// Nid of the root; with [`incompat::ADDRESS_48BIT`] the high bits of the number of blocks.
    pub rootnid_2b: U16,
    /// Number of inodes.
    pub inos: U64,
    /// Modification time of compact inodes in seconds, less their `i_mtime` on kernels since 6.15. (Was `build_time`.)
    pub epoch: I64,
    /// And in nanoseconds. (Was `build_time_nsec`.)
    pub fixed_nsec: U32,
    /// Blocks in the primary device.
    pub blocks_lo: U32,
    /// Block that nid 0 stands at.
    pub meta_blkaddr: U32,
    /// Block that shared xattr ids count from, in units of 4 bytes.
    pub xattr_blkaddr: U32,
    /// Volume's uuid.
    pub uuid: [u8; 16],
    /// Volume's name.
    pub volume_name: [u8; 16],
    /// [`incompat`].
    pub feature_incompat: U32,
    /// Compression algorithms, or the LZ4 window without [`incompat::COMPR_CFGS`].
    pub available_compr_algs: U16,
    /// Number of devices besides the primary one.
    pub extra_devices: U16,
    /// Device table's start, in units of [`RawDeviceSlot`].
    pub devt_slotoff: U16,
    /// Directory block size is the block size times 2 to this power. Always 0.
    pub dirblkbits: u8,
    /// Number of long xattr prefixes.
    pub xattr_prefix_count: u8,
    /// Long prefix table's start, in units of 4 bytes.
    pub xattr_prefix_start: U32,
    /// Nid of the packed inode, or 0.
    pub packed_nid: U64,
    /// Name filters hold only when this is 0.
    pub xattr_filter_reserved: u8,
    /// Long prefix that names the content fingerprint, with [`compat::ISHARE_XATTRS`].
    pub ishare_xattr_prefix_id: u8,
    /// 0.
    pub reserved: [u8; 2],
    /// When the image was made, in seconds after `epoch`.
    pub build_time: U32,
    /// Nid of the root, with [`incompat::ADDRESS_48BIT`].
    pub rootnid_8b: U64,
    /// 0.
    pub reserved2: U64,
}
const _: () = assert!(size_of::<RawSuperblock>() == 128);

/// `struct erofs_deviceslot`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawDeviceSlot {
    /// Name of the device for user space, such as a digest.
    pub tag: [u8; 64],
    /// Blocks in the device.
    pub blocks_lo: U32,
    /// Block that the device begins at when all devices are one address space, or 0. (Was `mapped_blkaddr`.)
    pub uniaddr_lo: U32,
    /// High bits of `blocks_lo`, with [`incompat::ADDRESS_48BIT`].
    pub blocks_hi: U32,
    /// High bits of `uniaddr_lo`, with [`incompat::ADDRESS_48BIT`].
    pub uniaddr_hi: U16,
    /// 0.
    pub reserved: [u8; 50],
}
const _: () = assert!(size_of::<RawDeviceSlot>() == 128);

/// `EROFS_I_VERSION_BIT` of `i_format`: the inode is a [`RawExtendedInode`], else a [`RawCompactInode`].
pub const FORMAT_EXTENDED: u16 = 0x1;
/// Where the data layout is in `i_format`, of 3 bits. `EROFS_I_DATALAYOUT_BIT`.
pub const FORMAT_LAYOUT_SHIFT: u16 = 1;
/// Mask of the data layout, once shifted. `EROFS_I_DATALAYOUT_MASK`.
pub const FORMAT_LAYOUT_MASK: u16 = 0x7;
/// Bit 4 of `i_format`: one link and 48-bit addresses in a compact inode (`EROFS_I_NLINK_1_BIT`), or no `.` in a
/// directory (`EROFS_I_DOT_OMITTED_BIT`). Since 6.15.
pub const FORMAT_BIT_4: u16 = 0x10;

/// `EROFS_INODE_FLAT_PLAIN`: data is in consecutive blocks.
pub const LAYOUT_FLAT_PLAIN: u16 = 0;
/// `EROFS_INODE_COMPRESSED_FULL`.
pub const LAYOUT_COMPRESSED_FULL: u16 = 1;
/// `EROFS_INODE_FLAT_INLINE`: as plain, but what does not fill a block is behind the inode.
pub const LAYOUT_FLAT_INLINE: u16 = 2;
/// `EROFS_INODE_COMPRESSED_COMPACT`.
pub const LAYOUT_COMPRESSED_COMPACT: u16 = 3;
/// `EROFS_INODE_CHUNK_BASED`: a table of block numbers or [`RawChunkIndex`]es is behind the inode.
pub const LAYOUT_CHUNK_BASED: u16 = 4;

/// `struct erofs_inode_compact`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawCompactInode {
    /// [`FORMAT_EXTENDED`] and the rest.
    pub i_format: U16,
    /// 0 without xattrs, else 1 and the 4-byte units that follow the [`RawXattrHeader`].
    pub i_xattr_icount: U16,
    /// `st_mode`.
    pub i_mode: U16,
    /// Links, unless [`FORMAT_BIT_4`] says otherwise.
    pub i_nb: U16,
    /// Bytes.
    pub i_size: U32,
    /// Seconds after the superblock's `epoch`; 0 before 6.15.
    pub i_mtime: U32,
    /// Block number, device number, or [`CHUNK_BLKBITS_MASK`] and the rest in the low 16 bits.
    pub i_u: U32,
    /// Inode number for a 32-bit `stat`.
    pub i_ino: U32,
    /// Owner.
    pub i_uid: U16,
    /// Group.
    pub i_gid: U16,
    /// 0.
    pub i_reserved: U32,
}
const _: () = assert!(size_of::<RawCompactInode>() == 32);

/// `struct erofs_inode_extended`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawExtendedInode {
    /// [`FORMAT_EXTENDED`] and the rest.
    pub i_format: U16,
    /// 0 without xattrs, else 1 and the 4-byte units that follow the [`RawXattrHeader`].
    pub i_xattr_icount: U16,
    /// `st_mode`.
    pub i_mode: U16,
    /// High bits of a block number, with [`incompat::ADDRESS_48BIT`].
    pub i_nb: U16,
    /// Bytes.
    pub i_size: U64,
    /// Block number, device number, or [`CHUNK_BLKBITS_MASK`] and the rest in the low 16 bits.
    pub i_u: U32,
    /// Inode number for a 32-bit `stat`.
    pub i_ino: U32,
    /// Owner.
    pub i_uid: U32,
    /// Group.
    pub i_gid: U32,
    /// Seconds since 1970, signed.
    pub i_mtime: I64,
    /// Nanoseconds.
    pub i_mtime_nsec: U32,
    /// Links.
    pub i_nlink: U32,
    /// 0.
    pub i_reserved2: [u8; 16],
}
const _: () = assert!(size_of::<RawExtendedInode>() == 64);

/// Chunk size is the block size times 2 to this power. `EROFS_CHUNK_FORMAT_BLKBITS_MASK`.
pub const CHUNK_BLKBITS_MASK: u16 = 0x1F;
/// The table has [`RawChunkIndex`]es, else 4-byte block numbers. `EROFS_CHUNK_FORMAT_INDEXES`.
pub const CHUNK_INDEXES: u16 = 0x20;
/// Indexes have 48-bit block numbers. `EROFS_CHUNK_FORMAT_48BIT`.
pub const CHUNK_48BIT: u16 = 0x40;
/// A block number that stands for a hole, which reads as zeros. `EROFS_NULL_ADDR`.
pub const NULL_BLOCK: u32 = u32::MAX;

/// `struct erofs_inode_chunk_index`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawChunkIndex {
    /// High bits of the block number, with [`CHUNK_48BIT`].
    pub startblk_hi: U16,
    /// 0 is the primary device, 1 the first of the device table.
    pub device_id: U16,
    /// Block number, or [`NULL_BLOCK`].
    pub startblk_lo: U32,
}
const _: () = assert!(size_of::<RawChunkIndex>() == 8);

/// `struct erofs_dirent`. A directory block begins with all of its dirents; the names follow, without separators.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawDirent {
    /// The inode.
    pub nid: U64,
    /// Where the name begins in this block. It ends where the next begins; the last one at a NUL or the end.
    pub nameoff: U16,
    /// [`file_type`].
    pub file_type: u8,
    /// 0.
    pub reserved: u8,
}
const _: () = assert!(size_of::<RawDirent>() == 12);

/// Types in dirents. Source: `FT_*` in Linux `include/linux/fs_types.h`.
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

/// `struct erofs_xattr_ibody_header`, behind an inode with xattrs. Ids of shared ones follow, 4 bytes each, then inline
/// [`RawXattrEntry`]s.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawXattrHeader {
    /// A bit that is 1 says that no name with that hash is here, with [`compat::XATTR_FILTER`].
    pub h_name_filter: U32,
    /// Number of shared ids.
    pub h_shared_count: u8,
    /// 0.
    pub h_reserved2: [u8; 7],
}
const _: () = assert!(size_of::<RawXattrHeader>() == 12);

/// `struct erofs_xattr_entry`, aligned to 4 bytes. The name's rest and the value follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawXattrEntry {
    /// Bytes in the name's rest, without prefix.
    pub e_name_len: u8,
    /// [`XATTR_PREFIXES`], or [`XATTR_LONG_PREFIX`] and a number in the table of long prefixes.
    pub e_name_index: u8,
    /// Bytes in the value.
    pub e_value_size: U16,
}
const _: () = assert!(size_of::<RawXattrEntry>() == 4);

/// `struct erofs_xattr_long_prefix` with the length before it. `size` - 1 bytes of infix follow, padded to 4.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawLongPrefix {
    /// Bytes in `base_index` and infix.
    pub size: U16,
    /// The short prefix that the infix continues.
    pub base_index: u8,
}
const _: () = assert!(size_of::<RawLongPrefix>() == 3);

/// Prefixes of names, with their `e_name_index`. `EROFS_XATTR_INDEX_*`; 5, Lustre's, is unused by kernel and writers.
pub const XATTR_PREFIXES: [(u8, &[u8]); 5] = [
    (1, b"user."),
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (4, b"trusted."),
    (6, b"security."),
];
/// `EROFS_XATTR_LONG_PREFIX` of `e_name_index`: the other bits are a number in the table of long prefixes.
pub const XATTR_LONG_PREFIX: u8 = 0x80;
/// `EROFS_XATTR_FILTER_SEED`: a name's bit in the filter is the xxh32 of its rest, seeded with this plus `e_name_index`,
/// modulo 32.
pub const XATTR_FILTER_SEED: u32 = 0x25BB_E08F;

/// `struct lcfs_erofs_header_s` of composefs, at byte 0. Source: composefs `libcomposefs/lcfs-erofs.h`.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawComposefsHeader {
    /// [`COMPOSEFS_MAGIC`].
    pub magic: U32,
    /// [`COMPOSEFS_HEADER_VERSION`].
    pub version: U32,
    /// [`COMPOSEFS_HAS_ACL`].
    pub flags: U32,
    /// Version of the rules that the image was made by: 0 or 1.
    pub composefs_version: U32,
    /// 0.
    pub unused: [U32; 4],
}
const _: () = assert!(size_of::<RawComposefsHeader>() == 32);

/// Quire's header, at byte 0 of images of the native profile.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RawNativeHeader {
    /// [`NATIVE_MAGIC`].
    pub magic: [u8; 8],
    /// [`NATIVE_HEADER_VERSION`].
    pub version: U32,
    /// [`NATIVE_HAS_ACL`] and [`NATIVE_HAS_TAR`].
    pub flags: U32,
}
const _: () = assert!(size_of::<RawNativeHeader>() == 16);

/// The first bytes of a native image.
pub const NATIVE_MAGIC: [u8; 8] = *b"quireimg";
/// Version of the header. Images with version 1 or without a header are from before the first release.
pub const NATIVE_HEADER_VERSION: u32 = 2;
/// An inode has a POSIX ACL; without it the image is mounted with `noacl`.
pub const NATIVE_HAS_ACL: u32 = 0x1;
/// A device is a tar.
pub const NATIVE_HAS_TAR: u32 = 0x2;

/// `LCFS_EROFS_MAGIC`.
pub const COMPOSEFS_MAGIC: u32 = 0xD078_629A;
/// `LCFS_EROFS_VERSION`.
pub const COMPOSEFS_HEADER_VERSION: u32 = 1;
/// `LCFS_EROFS_FLAGS_HAS_ACL`: an inode has a POSIX ACL; without it the image is mounted with `noacl`.
pub const COMPOSEFS_HAS_ACL: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// Name, offset and size of each field. Leaving one out does not compile.
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

    /// What stands below a heading in the document.
    fn section(heading: &str) -> &'static str {
        let document = include_str!("../../../../docs/format/erofs-profile.md");
        let section = document.split(&format!("### {heading}\n")).nth(1).expect(heading);
        section.split("\n#").next().unwrap()
    }

    /// The cells of the first drawing below a heading: name, offset by the sizes before it, and size.
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

    /// The rows of the table below a heading in the document.
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
