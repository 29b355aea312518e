//! Tests images that are made to use excessive resources, and damaged ones.

use std::cell::Cell;
use std::io;
use std::sync::atomic::AtomicBool;

use quire_image::erofs::layout::{
    LAYOUT_CHUNK_BASED, LAYOUT_COMPRESSED_FULL, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN,
    RawCompactInode, RawDirent, RawSuperblock, SUPERBLOCK_MAGIC,
};
use quire_image::erofs::read::{
    Image, Objects, Owners, ReadAt, ReadError, TreeBounds, View, examine, kept_bound, native_tree,
    to_tree, to_tree_within, unpacked_bound, work_bound,
};
use quire_image::verity::Algorithm;
use zerocopy::{FromZeros as _, IntoBytes as _};

use crate::small::{Options, Small, filter, icount, xattr, xattrs};

/// Makes an image with blocks of 4 KiB: a superblock, then everything that is added.
pub struct Maker {
    pub bytes: Vec<u8>,
}

impl Maker {
    pub fn new() -> Self {
        Self { bytes: vec![0; 4096] }
    }

    /// Adds a block, and returns its number.
    pub fn block(&mut self, block: &[u8]) -> u32 {
        let at = self.bytes.len().next_multiple_of(4096);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(block);
        self.bytes.resize((at + block.len()).next_multiple_of(4096), 0);
        (at / 4096) as u32
    }

    /// Adds an inode and the data after it, and returns its nid.
    pub fn inode(&mut self, raw: &RawCompactInode, behind: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(32), 0);
        let size = 32 + behind.len();
        if size <= 4096 && self.bytes.len() % 4096 + size > 4096 {
            self.bytes.resize(self.bytes.len().next_multiple_of(4096), 0);
        }
        let nid = self.bytes.len() / 32;
        self.bytes.extend_from_slice(raw.as_bytes());
        self.bytes.extend_from_slice(behind);
        nid as u64
    }

    pub fn finish(mut self, root: u64) -> Vec<u8> {
        self.block(&[]);
        let mut raw = RawSuperblock::new_zeroed();
        raw.magic = SUPERBLOCK_MAGIC.into();
        raw.blkszbits = 12;
        raw.feature_incompat = 0x80.into();
        raw.rootnid_8b = root.into();
        self.bytes[1024..1152].copy_from_slice(raw.as_bytes());
        self.bytes.resize(self.bytes.len().next_multiple_of(4096), 0);
        self.bytes
    }
}

pub fn inode(layout: u16, mode: u16, size: usize, block: u32) -> RawCompactInode {
    let mut raw = RawCompactInode::new_zeroed();
    raw.i_format = (layout << 1).into();
    raw.i_mode = mode.into();
    raw.i_nb = 1.into();
    raw.i_size = (size as u32).into();
    raw.i_u = block.into();
    raw
}

pub fn entries(entries: &[(String, u64, u8)]) -> Vec<u8> {
    let mut start = size_of::<RawDirent>() * entries.len();
    let mut bytes = Vec::new();
    for (name, nid, file_type) in entries {
        let (nid, nameoff) = ((*nid).into(), (start as u16).into());
        let raw = RawDirent { nid, nameoff, file_type: *file_type, reserved: 0 };
        bytes.extend_from_slice(raw.as_bytes());
        start += name.len();
    }
    bytes.extend(entries.iter().flat_map(|(name, ..)| name.bytes()));
    bytes
}

/// Returns a directory block with as many entries as fit.
fn block_of_entries(names: impl Iterator<Item = String>, nid: u64) -> Vec<u8> {
    let mut left = 4096;
    let all: Vec<_> = names
        .take_while(|name| {
            left -= 12 + name.len() as i32;
            left >= 0
        })
        .map(|name| (name, nid, 1))
        .collect();
    entries(&all)
}

/// An image that counts the bytes that are read.
struct Counted<'a> {
    bytes: &'a [u8],
    read: Cell<u64>,
}

impl<'a> Counted<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, read: Cell::new(0) }
    }

    /// Checks that the reader has read at most twice its own limit.
    fn check(&self) {
        let (read, bound) = (self.read.get(), 2 * work_bound(self.bytes.len() as u64));
        assert!(read <= bound, "{read} bytes were read of {}, more than {bound}", self.bytes.len());
    }
}

impl ReadAt for Counted<'_> {
    fn len(&self) -> u64 {
        ReadAt::len(self.bytes)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read.set(self.read.get() + buffer.len() as u64);
        self.bytes.read_at(offset, buffer)
    }
}

/// Checks the reader's result, and that it read a bounded number of bytes.
fn check(bytes: &[u8], expect: &str) {
    let source = Counted::new(bytes);
    let answer = match to_tree(&Image::open(&source).unwrap(), View::Plain) {
        Ok(read) => format!("{} inodes", read.tree.inode_count()),
        Err(error) => error.to_string(),
    };
    assert_eq!(answer.strip_prefix("the image is corrupt: ").unwrap_or(&answer), expect);
    source.check();
}

fn amplified(bound: u64) -> String {
    format!("the image uses some bytes so often that its metadata takes more than {bound} bytes")
}

#[test]
fn two_directories_in_each_other() {
    let mut maker = Maker::new();
    // Each inode takes 32 + 13 + 12 bytes, which are two slots.
    let first = maker.bytes.len() as u64 / 32;
    for child in [first + 2, first] {
        let list = entries(&[("x".to_owned(), child, 2)]);
        let nid = maker.inode(&inode(LAYOUT_FLAT_INLINE, 0o40_755, list.len(), 0), &list);
        assert_eq!(nid, first * 2 + 2 - child);
    }
    check(&maker.finish(first), &format!("directory {first} has a second name \"/x/x\""));
}

/// 20,000 directories with the same 300 names: 6 million names in a megabyte.
#[test]
fn directories_that_share_a_block() {
    let mut maker = Maker::new();
    let file = maker.inode(&inode(0, 0o100_644, 0, 0), &[]);
    let shared = block_of_entries((100..).map(|at| at.to_string()), file);
    let block = maker.block(&shared);
    let directory = inode(LAYOUT_FLAT_PLAIN, 0o40_755, shared.len(), block);
    let all: Vec<u64> = (0..20_000).map(|_| maker.inode(&directory, &[])).collect();
    let mut blocks = Vec::new();
    for (at, nids) in all.chunks(200).enumerate() {
        let name = |of: usize| format!("{:06}", at * 200 + of);
        let list = nids.iter().enumerate().map(|(of, nid)| (name(of), *nid, 2));
        let mut block = entries(&list.collect::<Vec<_>>());
        block.resize(4096, 0);
        blocks.extend(block);
    }
    let first = maker.block(&blocks);
    let root = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o40_755, blocks.len(), first), &[]);
    let bytes = maker.finish(root);
    check(&bytes, &amplified(kept_bound(bytes.len() as u64)));
}

/// 3,000 directories of 64 KiB with the same 16 names, one in each block.
#[test]
fn directories_that_share_large_blocks() {
    let mut maker = Maker::new();
    let file = maker.inode(&inode(0, 0o100_644, 0, 0), &[]);
    let mut shared = Vec::new();
    for at in 0..16_usize {
        shared.extend(entries(&[(format!("{at:02}"), file, 1)]));
        shared.resize((at + 1) * 4096, 0);
    }
    let block = maker.block(&shared);
    let directory = inode(LAYOUT_FLAT_PLAIN, 0o40_755, shared.len(), block);
    let all: Vec<u64> = (0..3_000).map(|_| maker.inode(&directory, &[])).collect();
    let bytes = with_named(maker, &all, 2);
    check(&bytes, &amplified(unpacked_bound(bytes.len() as u64)));
}

/// Limits of the caller, for an image that occupies few bytes of the disk.
#[test]
fn bounds_of_the_caller() {
    let read = |bytes: &[u8], cancel: bool| {
        let (names, cancel) = (1 << 20, AtomicBool::new(cancel));
        let bounds = TreeBounds { names, bytes: 1 << 20, stored: 0, cancel: &cancel };
        to_tree_within(&Image::open(bytes).unwrap(), View::Stored, bounds).map(|it| it.nids.len())
    };
    let directory = |size| {
        let mut maker = Maker::new();
        let directory = inode(LAYOUT_COMPRESSED_FULL, 0o40_755, size, 0);
        let nid = maker.inode(&directory, &[0; 64]);
        with_named(maker, &[nid], 2)
    };
    // The directory is not unpacked.
    let error = read(&directory((64 << 20) + 1), false).unwrap_err().to_string();
    assert!(error.ends_with(&amplified(64 << 20)), "{error}");
    let error = read(&directory(4096), false).unwrap_err().to_string();
    assert!(!error.contains("so often"), "{error}");
    let mut maker = Maker::new();
    let file = maker.inode(&inode(0, 0o100_644, 0, 0), &[]);
    let bytes = with_named(maker, &[file], 1);
    assert_eq!(read(&bytes, false).unwrap(), 2);
    assert!(matches!(read(&bytes, true), Err(ReadError::Cancelled)));
}

/// There is a file in each slot of 32 bytes. The xattrs of each file take 256 KiB, and overlap those of others.
#[test]
fn inodes_that_overlap() {
    let mut maker = Maker::new();
    let mut raw = inode(0, 0o100_644, 0, 0);
    raw.i_xattr_icount = 0xffff.into();
    // Read as xattrs, an inode has a filter, no shared ids, and then entries that each cover the next one.
    let first = maker.bytes.len() as u64 / 32;
    for _ in 0..30_000 {
        maker.inode(&raw, &[]);
    }
    let mut blocks = Vec::new();
    for nids in (first..first + 20_000).collect::<Vec<_>>().chunks(200) {
        let list = nids.iter().map(|nid| (format!("{nid:06}"), *nid, 1));
        let mut block = entries(&list.collect::<Vec<_>>());
        block.resize(4096, 0);
        blocks.extend(block);
    }
    let block = maker.block(&blocks);
    let root = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o40_755, blocks.len(), block), &[]);
    let bytes = maker.finish(root);
    let answer = examine(&bytes, 0).unwrap_err().to_string();
    assert!(answer.contains("xattr"), "{answer}");
}

/// 2,000 files with the same shared xattrs of 60,000 bytes. For an image of two megabytes, even 200 of these xattrs
/// are too many, and 20 of them still take two gigabytes in total.
#[test]
fn shared_xattrs() {
    let many = files_with_shared_xattrs(200);
    check(&many, &amplified(kept_bound(many.len() as u64)));
    let often = files_with_shared_xattrs(20);
    check(&often, &amplified(work_bound(often.len() as u64)));
    check(&files_with_shared_xattrs(1), "2001 inodes");
}

fn files_with_shared_xattrs(count: usize) -> Vec<u8> {
    let mut maker = Maker::new();
    let mut blocks = Vec::new();
    let mut ids = Vec::new();
    for at in 0..count {
        ids.push(blocks.len() as u32 / 4);
        // Each value extends over the entries after it.
        blocks.extend(xattr(1, &at.to_string(), &[])[..4].to_vec());
        let at_value = blocks.len() - 2;
        blocks[at_value..at_value + 2].copy_from_slice(&60_000_u16.to_le_bytes());
        blocks.extend(format!("{at}   ").bytes().take(4));
    }
    blocks.resize(blocks.len() + 61_000, 7);
    let start = maker.block(&blocks);
    ids.iter_mut().for_each(|id| *id += start * 1024);
    let own = xattrs(0, &ids, &[]);
    let mut raw = inode(0, 0o100_644, 0, 0);
    raw.i_xattr_icount = icount(&own).into();
    let all: Vec<u64> = (0..2_000).map(|_| maker.inode(&raw, &own)).collect();
    let mut list = Vec::new();
    for nids in all.chunks(200) {
        let some = nids.iter().map(|nid| (format!("{nid:08}"), *nid, 1));
        let mut block = entries(&some.collect::<Vec<_>>());
        block.resize(4096, 0);
        list.extend(block);
    }
    let block = maker.block(&list);
    let root = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o40_755, list.len(), block), &[]);
    maker.finish(root)
}

/// Symlinks whose targets are overlapping parts of the same bytes.
#[test]
fn symlinks_that_share_a_target() {
    let mut maker = Maker::new();
    let target = maker.block(&[b'x'; 8192]);
    let link = inode(LAYOUT_FLAT_PLAIN, 0o120_777, 4000, target);
    let all: Vec<u64> = (0..4_000).map(|_| maker.inode(&link, &[])).collect();
    let mut list = Vec::new();
    for nids in all.chunks(200) {
        let some = nids.iter().map(|nid| (format!("{nid:08}"), *nid, 7));
        let mut block = entries(&some.collect::<Vec<_>>());
        block.resize(4096, 0);
        list.extend(block);
    }
    let block = maker.block(&list);
    let root = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o40_755, list.len(), block), &[]);
    let bytes = maker.finish(root);
    check(&bytes, &amplified(kept_bound(bytes.len() as u64)));
}

/// Adds a root with these files.
fn with_files(maker: Maker, nids: &[u64]) -> Vec<u8> {
    with_named(maker, nids, 1)
}

/// Adds a root with these inodes of a type.
fn with_named(mut maker: Maker, nids: &[u64], file_type: u8) -> Vec<u8> {
    let mut list = Vec::new();
    for nids in nids.chunks(200) {
        let some = nids.iter().map(|nid| (format!("{nid:08}"), *nid, file_type));
        let mut block = entries(&some.collect::<Vec<_>>());
        block.resize(4096, 0);
        list.extend(block);
    }
    let block = maker.block(&list);
    let root = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o40_755, list.len(), block), &[]);
    maker.finish(root)
}

/// Checks the result like [`check`], for a tree of objects.
fn check_native(bytes: &[u8], expect: &str) {
    let source = Counted::new(bytes);
    let objects = Objects { algorithm: Algorithm::Sha256, inline_max: 64, find: &|_| None };
    let answer = match native_tree(&Image::open(&source).unwrap(), objects) {
        Ok(read) => format!("{} inodes", read.tree.inode_count()),
        Err(error) => error.to_string(),
    };
    assert_eq!(answer.strip_prefix("the image is corrupt: ").unwrap_or(&answer), expect);
    source.check();
}

/// 4,000 files of a megabyte that differ only in a byte, so that all must be hashed; and a file of 4 GiB that is one
/// hole.
#[test]
fn bytes_that_are_hashed() {
    let files = |sizes: std::ops::Range<usize>| {
        let mut maker = Maker::new();
        let block = maker.block(&vec![b'x'; 1 << 20]);
        let file = |size| maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o100_644, size, block), &[]);
        let nids: Vec<u64> = sizes.map(file).collect();
        with_files(maker, &nids)
    };
    let many = files(1_000_000..1_004_000);
    check_native(&many, &amplified(kept_bound(many.len() as u64)));
    check_native(&files(1_000_000..1_000_004), "5 inodes");
    let mut maker = Maker::new();
    let hole = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o100_644, 0xffff_ffff, u32::MAX), &[]);
    let hole = with_files(maker, &[hole]);
    check_native(&hole, &amplified(kept_bound(hole.len() as u64)));
}

/// 7,000 files that share a table of 10,000 chunks, which follows the xattrs of each.
#[test]
fn tables_that_overlap() {
    const FILES: usize = 7_000;
    let mut maker = Maker::new();
    let file = |at: usize| {
        let mut raw = inode(LAYOUT_CHUNK_BASED, 0o100_644, 10_000 * 4096, 0);
        // Chunks of one block, with indexes.
        raw.i_u = 0x20.into();
        raw.i_xattr_icount = (((FILES - at - 1) * 32 - 12) / 4 + 1).try_into().unwrap();
        maker.inode(&raw, &[])
    };
    let nids: Vec<u64> = (0..FILES - 1).map(file).collect();
    // Block 5 of the first device.
    let table = [0, 0, 1, 0, 5, 0, 0, 0].repeat(10_001);
    maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o100_644, 0, 0), &table);
    let mut bytes = with_files(maker, &nids);
    let slot = 1152;
    bytes[slot + 64..slot + 68].copy_from_slice(&u32::MAX.to_le_bytes());
    bytes[1024 + 80] |= 0x8;
    bytes[1024 + 86] = 1;
    bytes[1024 + 88] = 9;
    let source = Counted::new(&bytes);
    let (image, mut runs) = (Image::open(&source).unwrap(), 0_u64);
    let error = image.device_ranges(|_| runs += 1).unwrap_err().to_string();
    let bound = kept_bound(bytes.len() as u64);
    assert_eq!(error, format!("the image is corrupt: {}", amplified(bound)));
    assert!(runs > 10_000);
    source.check();
}

/// A chain of directories that is deeper than the longest path.
#[test]
fn a_deep_chain() {
    let chain = |depth: usize| {
        let mut maker = Maker::new();
        let leaf = entries(&[("f".to_owned(), maker.bytes.len() as u64 / 32 + 2, 1)]);
        let mut child = maker.inode(&inode(LAYOUT_FLAT_INLINE, 0o40_755, leaf.len(), 0), &leaf);
        maker.inode(&inode(0, 0o100_644, 0, 0), &[]);
        for _ in 1..depth {
            let list = entries(&[("d".to_owned(), child, 2)]);
            child = maker.inode(&inode(LAYOUT_FLAT_INLINE, 0o40_755, list.len(), 0), &list);
        }
        maker.finish(child)
    };
    check(&chain(2047), "2048 inodes");
    check(&chain(2048), "a path has 4096 bytes, more than 4095");
    check(&chain(100_000), "a path has 4096 bytes, more than 4095");
}

/// A file of 2^63 - 1 bytes that is one hole, and a directory of 4 GiB that is also one hole.
#[test]
fn vast_and_empty() {
    let mut maker = Maker::new();
    let directory = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o40_755, 0xffff_ffff, u32::MAX), &[]);
    let bytes = maker.finish(directory);
    let text =
        format!("block 0 of directory {directory} has 4096 bytes and its first name at byte 0");
    check(&bytes, &text);
}

/// More xattr names than a system call can list.
#[test]
fn many_xattrs() {
    let all: Vec<Vec<u8>> = (0..9_000).map(|at| xattr(1, &at.to_string(), b"")).collect();
    let names: Vec<(u32, String)> = (0..9_000).map(|at| (1, at.to_string())).collect();
    let names: Vec<(u32, &str)> = names.iter().map(|(base, name)| (*base, &name[..])).collect();
    let attempt = |count: usize| {
        let own = xattrs(filter(&names), &[], &all[..count]);
        let mut maker = Maker::new();
        let mut raw = inode(0, 0o100_644, 0, 0);
        raw.i_xattr_icount = icount(&own).into();
        let file = maker.inode(&raw, &own);
        let list = entries(&[("f".to_owned(), file, 1)]);
        let root = maker.inode(&inode(LAYOUT_FLAT_INLINE, 0o40_755, list.len(), 0), &list);
        (maker.finish(root), file)
    };
    // "user." with NUL takes 6 bytes; the digits take 10, 180 and 2,700, and 4 for each name from the thousandth on.
    let most = 1000 + (65_536 - 1000 * 6 - 10 - 180 - 2700) / 10;
    check(&attempt(most).0, "2 inodes");
    let (bytes, file) = attempt(most + 1);
    let len = 1000 * 6 + 2890 + (most + 1 - 1000) * 10;
    let text = format!("the names of the xattrs of inode {file} take {len} bytes, more than 65536");
    check(&bytes, &text);
}

/// A small random number generator with the same sequence each time.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % below
    }
}

/// Damages a valid image in `cases` ways: every read must end soon, without a panic.
pub fn damage(sound: &[u8], cases: usize, seed: u64) {
    let mut random = Random(seed | 1);
    let mut bytes = sound.to_vec();
    // The checksum is disabled, because otherwise every change would only be detected by the checksum.
    bytes[1024 + 8] &= !1;
    assert!(examine(&bytes, 1 << 20).is_ok());
    // Most metadata is at the beginning.
    let front = bytes.len().min(1 << 16);
    let mut refused = 0;
    for case in 0..cases {
        let mut changed = Vec::new();
        for _ in 0..=random.next(6) {
            let at = match random.next(8) {
                0 => random.next(bytes.len()),
                1 => 1024 + random.next(128),
                _ => random.next(front),
            };
            changed.push((at, bytes[at]));
            bytes[at] = match random.next(4) {
                0 => bytes[at] ^ 1 << random.next(8),
                1 => 0xff,
                2 => bytes[random.next(front)],
                _ => random.next(256) as u8,
            };
        }
        let len = if random.next(8) == 0 { random.next(bytes.len()) } else { bytes.len() };
        match examine(&bytes[..len], 1 << 18) {
            Ok(found) => assert!(found.bytes <= 1 << 18, "case {case}: {found:?}, {changed:?}"),
            Err(_) => refused += 1,
        }
        for (at, byte) in changed.into_iter().rev() {
            bytes[at] = byte;
        }
    }
    assert!(refused > cases / 20, "only {refused} of {cases} cases were refused");
}

#[test]
fn damaged() {
    for (bits, cases) in [(9, 6000), (12, 6000), (16, 300)] {
        damage(&Small::new(bits, Options::default()).bytes, cases, u64::from(bits));
    }
}

/// Damages every byte, one at a time.
#[test]
fn each_byte() {
    if !testing::long_tests() {
        return;
    }
    let mut small = Small::new(9, Options::default());
    small.bytes[1024 + 8] &= !1;
    for at in 0..small.bytes.len() {
        let sound = small.bytes[at];
        for byte in [0, 1, 0x7f, 0xff, sound ^ 1, sound ^ 0x80] {
            small.bytes[at] = byte;
            drop(examine(&small.bytes, 1 << 16));
        }
        small.bytes[at] = sound;
    }
}

/// Only the composefs view requires composefs's header.
#[test]
fn no_composefs_header() {
    let small = Small::new(12, Options::default());
    let image = Image::open(&small.bytes[..]).unwrap();
    let error = to_tree(&image, View::Composefs(Owners::AsWritten)).unwrap_err();
    assert_eq!(error.to_string(), "not a composefs image");
}
