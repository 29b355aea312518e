//! The first pass, which assigns a position to every part of the image.

use super::WriteError;
use super::composefs::{Data, Facts, Item, Survey};
use super::listing::Source;
use super::place::{BLOCK_SIZE, BlockSize, DirectoryExtent, Extent, Keep, Placer};
use crate::erofs::layout::{
    RawCompactInode, RawExtendedInode, RawSuperblock, SLOT_SIZE, SUPERBLOCK_OFFSET,
};
use crate::tree::{InodeId, Tree};

/// An image whose inodes and blocks all have positions, ready to be written.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) survey: Survey<'a>,
    /// Nids of the tree's inodes by [`InodeId::index`]. 32 bits suffice for 128 GiB of inodes.
    nids: Vec<u32>,
    shadow_nids: [u32; 256],
    /// Offset of the shared xattrs in bytes.
    pub(super) inodes_end: u64,
    /// Offset of the data blocks in bytes.
    pub(super) data_start: u64,
    /// Length of the image in blocks.
    pub(super) blocks: u32,
}

impl<'a> Plan<'a> {
    pub(super) fn of(tree: &'a Tree, mut survey: Survey<'a>) -> Result<Self, WriteError> {
        const FIRST: u64 = (SUPERBLOCK_OFFSET + size_of::<RawSuperblock>()) as u64;
        let mut placer = Placer::new(FIRST);
        let mut nids = vec![0; tree.inode_bound()];
        let mut shadow_nids = [0; 256];
        let mut data_blocks = 0_u64;
        let mut items = std::mem::take(&mut survey.items);
        for item in &mut items {
            let facts = survey.facts(item.source);
            let (mut extent, keep) = extent_of(&survey, item, &facts);
            item.extended = is_extended(&survey, &facts, &extent);
            let head = inode_size(item) + xattrs_size(&survey, item);
            let position = placer.place(head, &mut extent, keep);
            item.blocks = u32::try_from(extent.blocks).map_err(|_wide| too_many_blocks())?;
            item.tail = u16::try_from(extent.tail).expect("a tail is at most a block");
            data_blocks += extent.blocks;
            let nid = position / SLOT_SIZE;
            let nid =
                u32::try_from(nid).map_err(|_wide| WriteError::TooLarge("128 GiB of inodes"))?;
            match item.source {
                Source::Tree(id) => nids[id.index()] = nid,
                Source::Shadow(byte) => shadow_nids[usize::from(byte)] = nid,
            }
        }
        survey.items = items;
        let inodes_end = placer.end();
        let data_start = (inodes_end + survey.xattrs.shared_bytes()).next_multiple_of(BLOCK_SIZE);
        let blocks = u32::try_from(data_start / BLOCK_SIZE + data_blocks)
            .map_err(|_wide| too_many_blocks())?;
        Ok(Self { survey, nids, shadow_nids, inodes_end, data_start, blocks })
    }

    pub(super) fn nid(&self, source: Source) -> u32 {
        match source {
            Source::Tree(id) => self.nids[id.index()],
            Source::Shadow(byte) => self.shadow_nids[usize::from(byte)],
        }
    }

    /// Returns the root's nid, which has 16 bits because the root is the first inode and little data precedes it.
    pub(super) fn root_nid(&self) -> u16 {
        let nid = self.nid(Source::Tree(InodeId::ROOT));
        u16::try_from(nid).expect("the root is in the first two blocks")
    }
}

const fn too_many_blocks() -> WriteError {
    WriteError::TooLarge("2^32 blocks")
}

/// Returns the size of the inode itself in bytes.
pub(super) const fn inode_size(item: &Item) -> u64 {
    let size =
        if item.extended { size_of::<RawExtendedInode>() } else { size_of::<RawCompactInode>() };
    size as u64
}

/// Returns the size in bytes of the xattrs after the inode.
pub(super) fn xattrs_size(survey: &Survey<'_>, item: &Item) -> u64 {
    survey.xattrs.size_of(survey.set_of(item), survey.file_pairs(item))
}

fn extent_of(survey: &Survey<'_>, item: &Item, facts: &Facts<'_>) -> (Extent, Keep) {
    match facts.data {
        Data::Directory => {
            let mut extent = DirectoryExtent::new(BlockSize::B4096);
            for entry in survey.listing(item.source) {
                extent.push(entry.name);
            }
            (extent.finish(), Keep::Tail)
        }
        Data::Symlink(target) => (Extent::behind(target.len() as u64), Keep::Whole),
        Data::Inline(bytes) => {
            let size = bytes.len() as u64;
            (Extent::with_tail(size / BLOCK_SIZE, size % BLOCK_SIZE), Keep::Tail)
        }
        Data::Chunks { chunks, .. } => {
            (Extent::behind(chunks * size_of::<u32>() as u64), Keep::Tail)
        }
        Data::Device(_) | Data::Nothing => (Extent::default(), Keep::Tail),
    }
}

/// Returns `i_size`. The size of a directory includes its blocks as a whole.
pub(super) const fn size_of_data(facts: &Facts<'_>, extent: &Extent) -> u64 {
    match facts.data {
        Data::Directory => extent.blocks * BLOCK_SIZE + extent.tail,
        Data::Symlink(bytes) | Data::Inline(bytes) => bytes.len() as u64,
        Data::Chunks { size, .. } => size,
        Data::Device(_) | Data::Nothing => 0,
    }
}

/// Whether the inode does not fit in the compact form.
fn is_extended(survey: &Survey<'_>, facts: &Facts<'_>, extent: &Extent) -> bool {
    let wide = |number: u32| number > u32::from(u16::MAX);
    facts.metadata.mtime != survey.earliest
        || wide(facts.nlink)
        || wide(facts.metadata.uid)
        || wide(facts.metadata.gid)
        || size_of_data(facts, extent) > u64::from(u32::MAX)
        || facts.large
}
