//! An image that is laid out by hand, with at least one of each feature, at offsets that tests can refer to.

use quire_image::erofs::layout::{
    CHUNK_INDEXES, FORMAT_EXTENDED, LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN,
    RawCompactInode, RawDeviceSlot, RawDirent, RawExtendedInode, RawSuperblock, RawXattrHeader,
    SUPERBLOCK_MAGIC, compat, incompat,
};
use xxhash_rust::xxh32::xxh32;
use zerocopy::{FromZeros as _, IntoBytes as _};

/// Bytes reserved for each inode, so that inline data never crosses the end of a block.
const SLOT: usize = 512;
const FIRST_SLOT: usize = 2048;

pub const ROOT: usize = 0;
pub const DIR: usize = 1;
pub const FILE: usize = 2;
pub const TAIL: usize = 3;
pub const SPARSE: usize = 4;
pub const MAP: usize = 5;
pub const LINK: usize = 6;
pub const BLOCK: usize = 7;
pub const FIFO: usize = 8;
pub const SOCKET: usize = 9;
pub const LONG: usize = 10;
const SLOTS: usize = 11;

pub const DEVICE_TABLE: usize = 1536;
pub const PREFIXES: usize = 1664;
/// Offset of shared xattr 2048, because ids count from byte 0.
pub const SHARED: usize = 8192;

pub const COMPACT: usize = size_of::<RawCompactInode>();
pub const EXTENDED: usize = size_of::<RawExtendedInode>();

/// A made image.
#[derive(Clone)]
pub struct Small {
    pub bytes: Vec<u8>,
    pub device: Vec<u8>,
    pub block_size: usize,
    /// Offset of the data blocks: two of `dir`, two of `file`, one of `tail`, one of `sparse`.
    pub data: usize,
    metadata: usize,
}

/// Variants of the image.
#[derive(Clone, Copy, Default)]
pub struct Options {
    /// Nid 0 is at the first inode instead of the image's beginning. Requires blocks of at most 2 KiB.
    pub metadata_apart: bool,
    /// 48-bit addresses.
    pub wide: bool,
}

/// Returns the offset of an inode.
pub const fn at(slot: usize) -> usize {
    FIRST_SLOT + SLOT * slot
}

/// Returns bytes that differ from each other.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 % 251) as u8 ^ seed).collect()
}

pub fn entries(entries: &[(&str, usize, u8)], nid: impl Fn(usize) -> u64) -> Vec<u8> {
    let mut names = size_of::<RawDirent>() * entries.len();
    let mut bytes = Vec::new();
    for (name, slot, file_type) in entries {
        let (nid, nameoff) = (nid(*slot).into(), u16::try_from(names).unwrap().into());
        let raw = RawDirent { nid, nameoff, file_type: *file_type, reserved: 0 };
        bytes.extend_from_slice(raw.as_bytes());
        names += name.len();
    }
    for (name, ..) in entries {
        bytes.extend_from_slice(name.as_bytes());
    }
    bytes
}

/// Returns an encoded xattr with padding.
pub fn xattr(index: u8, rest: &str, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![u8::try_from(rest.len()).unwrap(), index];
    bytes.extend_from_slice(&u16::try_from(value.len()).unwrap().to_le_bytes());
    bytes.extend_from_slice(rest.as_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns a filter that includes these names. Source of the formula: Linux `fs/erofs/xattr.c`.
pub fn filter(names: &[(u32, &str)]) -> u32 {
    names.iter().fold(u32::MAX, |filter, (base, rest)| {
        filter & !(1 << (xxh32(rest.as_bytes(), 0x25BB_E08F + base) % 32))
    })
}

pub fn xattrs(filter: u32, shared: &[u32], inline: &[Vec<u8>]) -> Vec<u8> {
    let mut header = RawXattrHeader::new_zeroed();
    header.h_name_filter = filter.into();
    header.h_shared_count = u8::try_from(shared.len()).unwrap();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(shared.iter().flat_map(|id| id.to_le_bytes()));
    bytes.extend(inline.concat());
    bytes
}

pub const fn icount(xattrs: &[u8]) -> u16 {
    ((xattrs.len() - size_of::<RawXattrHeader>()) / 4 + 1) as u16
}

impl Small {
    pub fn new(bits: u8, options: Options) -> Self {
        let block_size = 1 << bits;
        let metadata = if options.metadata_apart { FIRST_SLOT } else { 0 };
        let nid = |slot| ((at(slot) - metadata) / 32) as u64;
        let data = (SHARED + 64_usize).next_multiple_of(block_size);
        let block = (data / block_size) as u32;
        let mut bytes = vec![0; data + 6 * block_size];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);

        let compact = |layout: u16, mode: u16, nlink: u16, size: usize, u: u32| {
            let mut raw = RawCompactInode::new_zeroed();
            raw.i_format = (layout << 1).into();
            raw.i_mode = mode.into();
            raw.i_nb = nlink.into();
            raw.i_size = u32::try_from(size).unwrap().into();
            raw.i_u = u.into();
            raw.i_uid = 7.into();
            raw.i_gid = 8.into();
            raw
        };
        let extended = |layout: u16, mode: u16, nlink: u32, size: usize, u: u32| {
            let mut raw = RawExtendedInode::new_zeroed();
            raw.i_format = (layout << 1 | FORMAT_EXTENDED).into();
            raw.i_mode = mode.into();
            raw.i_size = (size as u64).into();
            raw.i_u = u.into();
            raw.i_uid = 70_000.into();
            raw.i_gid = 80_000.into();
            raw.i_mtime = (-5).into();
            raw.i_mtime_nsec = 999_999_999.into();
            raw.i_nlink = nlink.into();
            raw
        };

        let root = entries(
            &[
                (".", ROOT, 2),
                ("..", ROOT, 2),
                ("block", BLOCK, 4),
                ("dir", DIR, 2),
                ("fifo", FIFO, 5),
                ("file", FILE, 1),
                ("link", LINK, 7),
                ("long", LONG, 1),
                ("map", MAP, 1),
                ("socket", SOCKET, 6),
                ("sparse", SPARSE, 1),
                ("tail", TAIL, 1),
            ],
            nid,
        );
        put(at(ROOT), compact(LAYOUT_FLAT_INLINE, 0o40_755, 3, root.len(), 0).as_bytes());
        put(at(ROOT) + COMPACT, &root);

        let first = entries(&[(".", DIR, 2), ("..", ROOT, 2), ("a", FILE, 1)], nid);
        let second = entries(&[("b", FILE, 1)], nid);
        let own = filter(&[(1, "a"), (6, "selinux")]);
        let own = xattrs(own, &[(SHARED / 4) as u32], &[xattr(1, "a", b"1")]);
        let mut raw = extended(LAYOUT_FLAT_PLAIN, 0o40_700, 2, block_size + second.len(), block);
        raw.i_xattr_icount = icount(&own).into();
        put(at(DIR), raw.as_bytes());
        put(at(DIR) + EXTENDED, &own);
        put(data, &first);
        put(data + block_size, &second);
        put(SHARED, &xattr(6, "selinux", b"label"));

        let size = block_size + 100;
        put(at(FILE), extended(LAYOUT_FLAT_PLAIN, 0o100_644, 3, size, block + 2).as_bytes());
        put(data + 2 * block_size, &pattern(1, size));
        let size = block_size + 10;
        put(at(TAIL), compact(LAYOUT_FLAT_INLINE, 0o104_755, 1, size, block + 4).as_bytes());
        put(data + 4 * block_size, &pattern(2, block_size));
        put(at(TAIL) + COMPACT, &pattern(3, 10));

        // Three chunks of one block each: on device 1, a hole, and in the image.
        let format = u32::from(CHUNK_INDEXES);
        let size = 2 * block_size + 50;
        put(at(SPARSE), compact(LAYOUT_CHUNK_BASED, 0o100_600, 1, size, format).as_bytes());
        let mut table = Vec::new();
        for (device, block) in [(1_u16, 1), (0, u32::MAX), (0, block + 5)] {
            table.extend_from_slice(&[0, 0]);
            table.extend_from_slice(&device.to_le_bytes());
            table.extend_from_slice(&block.to_le_bytes());
        }
        put(at(SPARSE) + COMPACT, &table);
        put(data + 5 * block_size, &pattern(4, 50));
        // Two chunks of two blocks: those of `file`, and a hole.
        let size = 4 * block_size;
        put(at(MAP), compact(LAYOUT_CHUNK_BASED, 0o100_600, 1, size, 1).as_bytes());
        put(at(MAP) + COMPACT, &(block + 2).to_le_bytes());
        put(at(MAP) + COMPACT + 4, &u32::MAX.to_le_bytes());

        put(at(LINK), compact(LAYOUT_FLAT_INLINE, 0o120_777, 1, 6, 0).as_bytes());
        put(at(LINK) + COMPACT, b"target");
        // Device 8:300 in the encoding of the kernel's new_encode_dev.
        let number = 300 & 0xff | 8 << 8 | (300 & !0xff) << 12;
        put(at(BLOCK), compact(0, 0o60_660, 1, 0, number).as_bytes());
        put(at(FIFO), compact(0, 0o10_600, 1, 0, 0).as_bytes());
        put(at(SOCKET), compact(0, 0o140_600, 1, 0, 0).as_bytes());
        let own = xattrs(filter(&[(1, "long.prefix.x")]), &[], &[xattr(0x80, "x", b"yz")]);
        let mut raw = compact(0, 0o100_644, 1, 0, 0);
        raw.i_xattr_icount = icount(&own).into();
        put(at(LONG), raw.as_bytes());
        put(at(LONG) + COMPACT, &own);
        put(PREFIXES, &[13, 0, 1]);
        put(PREFIXES + 3, b"long.prefix.");

        let mut slot = RawDeviceSlot::new_zeroed();
        slot.tag[..4].copy_from_slice(b"blob");
        slot.blocks_lo = 2.into();
        put(DEVICE_TABLE, slot.as_bytes());
        let mut raw = RawSuperblock::new_zeroed();
        raw.magic = SUPERBLOCK_MAGIC.into();
        raw.feature_compat = (compat::SB_CHKSUM | compat::MTIME | compat::XATTR_FILTER).into();
        raw.feature_incompat =
            (incompat::CHUNKED_FILE | incompat::DEVICE_TABLE | incompat::XATTR_PREFIXES).into();
        raw.blkszbits = bits;
        raw.rootnid_2b = u16::try_from(nid(ROOT)).unwrap().into();
        raw.inos = (SLOTS as u64).into();
        raw.epoch = 1_000_000_000.into();
        raw.fixed_nsec = 5.into();
        raw.blocks_lo = u32::try_from((data + 6 * block_size) / block_size).unwrap().into();
        raw.meta_blkaddr = u32::try_from(metadata / block_size).unwrap().into();
        raw.extra_devices = 1.into();
        raw.devt_slotoff = u16::try_from(DEVICE_TABLE / 128).unwrap().into();
        raw.xattr_prefix_count = 1;
        raw.xattr_prefix_start = u32::try_from(PREFIXES / 4).unwrap().into();
        if options.wide {
            raw.feature_incompat = (raw.feature_incompat.get() | incompat::ADDRESS_48BIT).into();
            raw.rootnid_2b = 0.into();
            raw.rootnid_8b = nid(ROOT).into();
        }
        put(1024, raw.as_bytes());
        let device = pattern(9, 2 * block_size);
        let mut image = Self { bytes, device, block_size, data, metadata };
        image.seal();
        image
    }

    pub fn nid(&self, slot: usize) -> u64 {
        ((at(slot) - self.metadata) / 32) as u64
    }

    /// Corrects the superblock's checksum, computed bit by bit so that no code is shared with the reader.
    pub fn seal(&mut self) {
        let len = if self.block_size > 1024 { self.block_size - 1024 } else { self.block_size };
        self.bytes[1028..1032].fill(0);
        let mut crc = u32::MAX;
        for byte in &self.bytes[1024..1024 + len] {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = crc >> 1 ^ if crc & 1 != 0 { 0x82F6_3B78 } else { 0 };
            }
        }
        self.bytes[1028..1032].copy_from_slice(&crc.to_le_bytes());
    }

    /// Overwrites bytes and corrects the checksum.
    pub fn patch(mut self, at: usize, bytes: &[u8]) -> Self {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.seal();
        self
    }
}
