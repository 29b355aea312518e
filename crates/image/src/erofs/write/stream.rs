//! The second pass: the image's bytes, from first to last.

use std::io;
use std::ops::Range;

use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromZeros as _, Immutable, IntoBytes};

use super::WriteError;
use super::composefs::{Data, Facts, Item};
use super::listing::Listed;
use super::place::{BLOCK_SIZE, DirectoryExtent, Extent};
use super::plan::{Plan, size_of_data};
use crate::erofs::layout::{
    COMPOSEFS_HAS_ACL, COMPOSEFS_HEADER_VERSION, COMPOSEFS_MAGIC, FORMAT_EXTENDED,
    FORMAT_LAYOUT_SHIFT, LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, NULL_BLOCK,
    RawCompactInode, RawComposefsHeader, RawDirent, RawExtendedInode, RawSuperblock,
    RawXattrHeader, SLOT_SIZE, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, compat,
};
use crate::tree::Metadata;

/// Bytes that are gathered before they go out.
const GATHERED: usize = 256 << 10;

/// Bytes on their way out, and how far they are.
struct Output<W> {
    inner: W,
    buffer: Vec<u8>,
    /// Bytes that went out.
    gone: u64,
}

impl<W: io::Write> Output<W> {
    fn position(&self) -> u64 {
        self.gone + self.buffer.len() as u64
    }

    fn put(&mut self, value: &(impl IntoBytes + Immutable)) {
        self.buffer.extend_from_slice(value.as_bytes());
    }

    /// Zeros up to a position. Nothing when it is here.
    fn pad_to(&mut self, position: u64) {
        let zeros = position.checked_sub(self.position()).expect("the plan goes forward");
        let zeros = usize::try_from(zeros).expect("gaps are less than two blocks");
        self.buffer.resize(self.buffer.len() + zeros, 0);
    }

    fn pad_to_block(&mut self) {
        self.pad_to(self.position().next_multiple_of(BLOCK_SIZE));
    }

    fn flush_if_full(&mut self) -> Result<(), WriteError> {
        if self.buffer.len() < GATHERED { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        self.inner.write_all(&self.buffer).map_err(WriteError::Output)?;
        self.gone += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// Writes the image. Answers its length in bytes.
pub(super) fn write(plan: &Plan<'_>, out: impl io::Write) -> Result<u64, WriteError> {
    // An inode with its xattrs and tail, or a block, may go beyond before the buffer is emptied.
    let buffer = Vec::with_capacity(GATHERED + (128 << 10));
    let mut out = Output { inner: out, buffer, gone: 0 };
    out.put(&header(plan));
    out.pad_to(SUPERBLOCK_OFFSET as u64);
    out.put(&superblock(plan));
    write_inodes(plan, &mut out)?;
    out.pad_to(plan.inodes_end);
    for put in plan.survey.xattrs.shared_entries() {
        put(&mut out.buffer);
        out.flush_if_full()?;
    }
    out.pad_to(plan.data_start);
    write_blocks(plan, &mut out)?;
    out.flush()?;
    assert_eq!(
        out.gone,
        u64::from(plan.blocks) * BLOCK_SIZE,
        "the plan says how long the image is"
    );
    out.inner.flush().map_err(WriteError::Output)?;
    Ok(out.gone)
}

fn header(plan: &Plan<'_>) -> RawComposefsHeader {
    RawComposefsHeader {
        magic: U32::new(COMPOSEFS_MAGIC),
        version: U32::new(COMPOSEFS_HEADER_VERSION),
        flags: U32::new(if plan.survey.has_acl { COMPOSEFS_HAS_ACL } else { 0 }),
        composefs_version: U32::new(plan.survey.version.number()),
        unused: [U32::ZERO; 4],
    }
}

fn superblock(plan: &Plan<'_>) -> RawSuperblock {
    let xattr_block = plan.inodes_end / BLOCK_SIZE;
    RawSuperblock {
        magic: U32::new(SUPERBLOCK_MAGIC),
        feature_compat: U32::new(compat::MTIME | compat::XATTR_FILTER),
        blkszbits: 12,
        rootnid_2b: U16::new(plan.root_nid()),
        inos: U64::new(plan.survey.items.len() as u64),
        epoch: I64::new(plan.survey.earliest.seconds),
        fixed_nsec: U32::new(plan.survey.earliest.nanoseconds),
        blocks_lo: U32::new(plan.blocks),
        xattr_blkaddr: U32::new(
            u32::try_from(xattr_block).expect("it is before the last block, which has 32 bits"),
        ),
        ..RawSuperblock::new_zeroed()
    }
}

fn write_inodes(plan: &Plan<'_>, out: &mut Output<impl io::Write>) -> Result<(), WriteError> {
    let first_id = u32::try_from(plan.inodes_end % BLOCK_SIZE / 4).expect("less than a block");
    let mut block = u32::try_from(plan.data_start / BLOCK_SIZE).expect("before the last block");
    let mut xattrs = Vec::new();
    let mut listed = Vec::new();
    for (ino, item) in (0_u32..).zip(&plan.survey.items) {
        out.pad_to(u64::from(plan.nid(item.source)) * SLOT_SIZE);
        let facts = plan.survey.facts(item.source);
        let (set, pairs) = (plan.survey.set_of(item), plan.survey.file_pairs(item));
        xattrs.clear();
        plan.survey.xattrs.put(set, pairs, first_id, &mut xattrs);
        put_inode(out, item, &facts, ino, block, icount(xattrs.len()));
        out.buffer.extend_from_slice(&xattrs);
        block += item.blocks;
        match facts.data {
            Data::Directory if item.tail > 0 => {
                let tail = item.blocks..item.blocks + 1;
                put_directory(plan, item, tail, &mut listed, out)?;
            }
            Data::Symlink(bytes) | Data::Inline(bytes) => {
                out.buffer.extend_from_slice(&bytes[bytes.len() - usize::from(item.tail)..]);
            }
            Data::Chunks { .. } => put_holes(item.tail.into(), out),
            Data::Directory | Data::Device(_) | Data::Nothing => {}
        }
        out.flush_if_full()?;
    }
    Ok(())
}

/// `i_xattr_icount` of so many bytes.
fn icount(xattrs: usize) -> u16 {
    let entries = match xattrs.checked_sub(size_of::<RawXattrHeader>()) {
        None => 0,
        Some(bytes) => 1 + bytes / size_of::<u32>(),
    };
    u16::try_from(entries).expect("what composefs counts allows 64 KiB")
}

fn put_inode(
    out: &mut Output<impl io::Write>,
    item: &Item,
    facts: &Facts<'_>,
    ino: u32,
    block: u32,
    icount: u16,
) {
    let blocks = if item.blocks > 0 { block } else { 0 };
    let (layout, i_u) = match facts.data {
        Data::Chunks { bits, .. } => {
            // A table that is a block leaves the high half of its number here. C does so; nobody can read that.
            (LAYOUT_CHUNK_BASED, blocks & 0xffff_0000 | (bits - BLOCK_SIZE.trailing_zeros()))
        }
        Data::Device(number) => (LAYOUT_FLAT_PLAIN, number),
        _ if item.tail > 0 => (LAYOUT_FLAT_INLINE, blocks),
        _ => (LAYOUT_FLAT_PLAIN, blocks),
    };
    let extent = Extent { blocks: item.blocks.into(), tail: item.tail.into() };
    let size = size_of_data(facts, &extent);
    let format = layout << FORMAT_LAYOUT_SHIFT;
    let Metadata { uid, gid, mtime, .. } = facts.metadata;
    if item.extended {
        out.put(&RawExtendedInode {
            i_format: U16::new(format | FORMAT_EXTENDED),
            i_xattr_icount: U16::new(icount),
            i_mode: U16::new(facts.mode),
            i_nb: U16::ZERO,
            i_size: U64::new(size),
            i_u: U32::new(i_u),
            i_ino: U32::new(ino),
            i_uid: U32::new(uid),
            i_gid: U32::new(gid),
            i_mtime: I64::new(mtime.seconds),
            i_mtime_nsec: U32::new(mtime.nanoseconds),
            i_nlink: U32::new(facts.nlink),
            i_reserved2: [0; 16],
        });
    } else {
        let narrow = |number| u16::try_from(number).expect("else the inode is extended");
        out.put(&RawCompactInode {
            i_format: U16::new(format),
            i_xattr_icount: U16::new(icount),
            i_mode: U16::new(facts.mode),
            i_nb: U16::new(narrow(facts.nlink)),
            i_size: U32::new(u32::try_from(size).expect("else the inode is extended")),
            i_mtime: U32::ZERO,
            i_u: U32::new(i_u),
            i_ino: U32::new(ino),
            i_uid: U16::new(narrow(uid)),
            i_gid: U16::new(narrow(gid)),
            i_reserved: U32::ZERO,
        });
    }
}

/// A table of chunks that are all holes.
fn put_holes(bytes: u64, out: &mut Output<impl io::Write>) {
    for _ in 0..bytes / size_of::<U32>() as u64 {
        out.put(&U32::new(NULL_BLOCK));
    }
}

/// Writes those blocks of a directory, where the one after the last full one is its tail.
fn put_directory<'a>(
    plan: &Plan<'a>,
    item: &Item,
    wanted: Range<u32>,
    listed: &mut Vec<Listed<'a>>,
    out: &mut Output<impl io::Write>,
) -> Result<(), WriteError> {
    let mut extent = DirectoryExtent::default();
    let mut block = 0;
    listed.clear();
    for entry in plan.survey.listing(item.source) {
        if extent.push(entry.name) {
            if wanted.contains(&block) {
                put_dirents(plan, item, block, listed, out)?;
            }
            block += 1;
            listed.clear();
        }
        listed.push(entry);
    }
    if wanted.contains(&block) {
        put_dirents(plan, item, block, listed, out)?;
    }
    Ok(())
}

fn put_dirents(
    plan: &Plan<'_>,
    item: &Item,
    block: u32,
    listed: &[Listed<'_>],
    out: &mut Output<impl io::Write>,
) -> Result<(), WriteError> {
    let mut name = listed.len() * size_of::<RawDirent>();
    for entry in listed {
        out.put(&RawDirent {
            nid: U64::new(plan.nid(entry.source).into()),
            nameoff: U16::new(u16::try_from(name).expect("names are in the block")),
            file_type: plan.survey.file_type(entry.source),
            reserved: 0,
        });
        name += entry.name.len();
    }
    for entry in listed {
        out.buffer.extend_from_slice(entry.name);
    }
    if block < item.blocks {
        out.pad_to_block();
    }
    out.flush_if_full()
}

fn write_blocks(plan: &Plan<'_>, out: &mut Output<impl io::Write>) -> Result<(), WriteError> {
    let mut listed = Vec::new();
    for item in plan.survey.items.iter().filter(|item| item.blocks > 0) {
        match plan.survey.facts(item.source).data {
            Data::Directory => {
                put_directory(plan, item, 0..item.blocks, &mut listed, out)?;
            }
            Data::Symlink(bytes) | Data::Inline(bytes) => {
                out.buffer.extend_from_slice(&bytes[..bytes.len() - usize::from(item.tail)]);
                out.pad_to_block();
            }
            Data::Chunks { .. } => put_holes(BLOCK_SIZE, out),
            Data::Device(_) | Data::Nothing => {}
        }
        out.flush_if_full()?;
    }
    Ok(())
}
