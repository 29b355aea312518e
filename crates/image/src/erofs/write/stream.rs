//! The second pass, which writes the image's bytes from first to last.

use std::io;

use zerocopy::FromZeros as _;
use zerocopy::little_endian::{I64, U16, U32, U64};

use super::WriteError;
use super::composefs::{Data, Facts, Item};
use super::directory::{Dirent, put_directory};
use super::inode::{Form, Record, icount};
use super::output::{Checksum, Output};
use super::place::{BLOCK_SIZE, BlockSize, Extent};
use super::plan::{Plan, size_of_data};
use crate::erofs::layout::{
    COMPOSEFS_HAS_ACL, COMPOSEFS_HEADER_VERSION, COMPOSEFS_MAGIC, LAYOUT_CHUNK_BASED,
    LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN, NULL_BLOCK, RawComposefsHeader, RawSuperblock,
    SLOT_SIZE, SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET, compat,
};

/// Writes the image, and returns its length in bytes.
pub(super) fn write(plan: &Plan<'_>, out: impl io::Write) -> Result<u64, WriteError> {
    let mut out = Output::new(out, Checksum::None, BlockSize::B4096);
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
    let bytes = out.finish()?;
    assert_eq!(bytes, u64::from(plan.blocks) * BLOCK_SIZE, "the plan has the length of the image");
    Ok(bytes)
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
                put_directory(dirents(plan, item), item.blocks, tail, out)?;
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
            // If the table takes a block, the block number's high half is stored here, as in C, although readers
            // cannot use it.
            (LAYOUT_CHUNK_BASED, blocks & 0xffff_0000 | (bits - BLOCK_SIZE.trailing_zeros()))
        }
        Data::Device(number) => (LAYOUT_FLAT_PLAIN, number),
        _ if item.tail > 0 => (LAYOUT_FLAT_INLINE, blocks),
        _ => (LAYOUT_FLAT_PLAIN, blocks),
    };
    let extent = Extent { blocks: item.blocks.into(), tail: item.tail.into() };
    let record = Record {
        layout,
        icount,
        mode: facts.mode,
        nlink: facts.nlink,
        size: size_of_data(facts, &extent),
        i_u,
        ino,
        metadata: facts.metadata,
    };
    record.put(if item.extended { Form::Extended } else { Form::Compact }, out);
}

/// Writes a chunk table whose chunks are all holes.
fn put_holes(bytes: u64, out: &mut Output<impl io::Write>) {
    for _ in 0..bytes / size_of::<U32>() as u64 {
        out.put(&U32::new(NULL_BLOCK));
    }
}

fn dirents<'a>(plan: &'a Plan<'_>, item: &Item) -> impl Iterator<Item = Dirent<'a>> {
    plan.survey.listing(item.source).map(|entry| Dirent {
        name: entry.name,
        nid: plan.nid(entry.source),
        file_type: plan.survey.file_type(entry.source),
    })
}

fn write_blocks(plan: &Plan<'_>, out: &mut Output<impl io::Write>) -> Result<(), WriteError> {
    for item in plan.survey.items.iter().filter(|item| item.blocks > 0) {
        match plan.survey.facts(item.source).data {
            Data::Directory => {
                put_directory(dirents(plan, item), item.blocks, 0..item.blocks, out)?;
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
