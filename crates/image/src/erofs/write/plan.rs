//! The first pass, which assigns a position to every part of the image.

use hashbrown::HashMap;

use super::ErofsWriteError;
use super::blocks::{BlockSize, DirectoryExtent, Extent};
use super::inode::Form;
use super::listing::{InodeSource, SHADOWS};
use super::pack::{Packer, Packing, Shape};
use super::survey::{Item, PlainData, Survey};
use crate::erofs::layout::{RawDeviceSlot, RawSuperblock, SLOT_SIZE, SUPERBLOCK_OFFSET};
use crate::tree::InodeId;

/// Maximum size in bytes of an inode's xattrs: `i_xattr_icount` has 16 bits, counts the header of 12 bytes as one
/// unit, and each further 4 bytes as one unit.
const XATTRS_MAX: u64 = 12 + 4 * (u16::MAX as u64 - 1);

/// An image whose inodes and blocks all have positions, ready to be written.
#[derive(Debug)]
pub(super) struct PlainPlan<'a> {
    /// The survey, with its items in the order of their positions.
    pub(super) survey: Survey<'a>,
    /// Nids of the tree's inodes, by [`InodeId::index`], followed by the nids of shadows. 32 bits suffice for 128 GiB
    /// of inodes.
    nids: Vec<u32>,
    /// The device table, after the superblock. The long prefixes follow it.
    pub(super) device_table: Vec<RawDeviceSlot>,
    /// Offset of the shared xattrs in bytes.
    pub(super) inodes_end: u64,
    /// Offset of the data blocks in bytes.
    pub(super) data_start: u64,
    /// Length of the image in blocks.
    pub(super) blocks: u32,
}

impl<'a> PlainPlan<'a> {
    pub(super) fn from_survey(mut survey: Survey<'a>) -> Result<Self, ErofsWriteError> {
        let rules = survey.rules;
        let block_size = rules.block_size.bytes();
        let mut nids = vec![0; survey.tree.inode_bound() + SHADOWS.len()];
        let mut packer = Packer::new(rules.packing, first_inode(&survey), block_size);
        let mut items = std::mem::take(&mut survey.items);
        for item in &mut items {
            let position = place_inode(&survey, item, &mut packer)?;
            let nid = u32::try_from(position / SLOT_SIZE);
            nids[index(&survey, item.source)] =
                nid.map_err(|_wide| ErofsWriteError::TooLarge("128 GiB of inodes"))?;
        }
        if rules.packing == Packing::FillGaps {
            items.sort_unstable_by_key(|item| nids[index(&survey, item.source)]);
        }
        let inodes_end = packer.end();
        let data_start = (inodes_end + survey.shared_bytes()).next_multiple_of(block_size);
        let blocks = place_blocks(&survey, &mut items, data_start / block_size)?;
        survey.items = items;
        let device_table = survey.devices.table(blocks);
        Ok(Self { survey, nids, device_table, inodes_end, data_start, blocks })
    }

    pub(super) fn nid(&self, source: InodeSource) -> u32 {
        self.nids[index(&self.survey, source)]
    }

    /// Returns the root's nid, which has 16 bits because the root is the first inode.
    pub(super) fn root_nid(&self) -> u16 {
        let nid = self.nid(InodeSource::Tree(InodeId::ROOT));
        u16::try_from(nid).expect("the root is next to the device table")
    }
}

/// Returns the index of an inode in [`PlainPlan::nids`].
fn index(survey: &Survey<'_>, source: InodeSource) -> usize {
    match source {
        InodeSource::Tree(id) => id.index(),
        InodeSource::Shadow(byte) => survey.tree.inode_bound() + usize::from(byte),
    }
}

/// Offset of the device table in bytes, after the superblock.
pub(super) const DEVICE_TABLE: u64 = (SUPERBLOCK_OFFSET + size_of::<RawSuperblock>()) as u64;

/// Returns the offset of the long prefixes in bytes.
pub(super) fn prefixes_start(survey: &Survey<'_>) -> u64 {
    DEVICE_TABLE + u64::from(survey.devices.len()) * size_of::<RawDeviceSlot>() as u64
}

fn first_inode(survey: &Survey<'_>) -> u64 {
    prefixes_start(survey) + survey.prefixes.bytes.len() as u64
}

const fn too_many_blocks(block_size: BlockSize) -> ErofsWriteError {
    ErofsWriteError::TooLarge(match block_size {
        BlockSize::B512 => "2 TiB",
        BlockSize::B4096 => "16 TiB",
    })
}

/// Chooses the form of an inode, divides its data into blocks and a tail, and returns the inode's position in bytes.
fn place_inode(
    survey: &Survey<'_>,
    item: &mut Item,
    packer: &mut Packer,
) -> Result<u64, ErofsWriteError> {
    let block_size = survey.rules.block_size;
    let facts = survey.facts(item.source);
    let mut extent = extent_of(survey, item.source, &facts.data);
    let size = facts.data.size(extent, block_size.bytes());
    if facts.metadata.mtime == survey.epoch && facts.is_narrow(size) {
        item.form = Form::Compact;
    }
    let xattrs = survey.xattrs_size(item);
    if xattrs > XATTRS_MAX {
        return Err(ErofsWriteError::XattrsTooLarge { path: survey.path(item), bytes: xattrs });
    }
    let table = survey.table(&facts.data).map(|(_, table)| table);
    let spot = packer.place(Shape {
        inode: item.form.size(),
        xattrs: table.map_or(xattrs, |table| xattrs.next_multiple_of(8) + table.size()),
        tail: extent.tail,
        whole: matches!(facts.data, PlainData::Symlink(_)),
    });
    if !spot.has_tail {
        let blocks = extent.tail.div_ceil(block_size.bytes());
        extent = Extent { blocks: extent.blocks + blocks, tail: 0 };
    }
    let blocks = u32::try_from(extent.blocks);
    item.blocks = blocks.map_err(|_wide| too_many_blocks(block_size))?;
    item.tail = u16::try_from(extent.tail).expect("a tail is at most a block");
    Ok(spot.position)
}

/// Assigns blocks to all data besides tails. Returns the number of blocks in the image.
fn place_blocks(
    survey: &Survey<'_>,
    items: &mut [Item],
    start: u64,
) -> Result<u32, ErofsWriteError> {
    let number =
        |block| u32::try_from(block).map_err(|_wide| too_many_blocks(survey.rules.block_size));
    let mut next = start;
    let mut shared = HashMap::new();
    for pass in survey.rules.blocks.passes() {
        for item in items.iter_mut().filter(|item| item.blocks > 0) {
            let data = survey.facts(item.source).data;
            if !data.is_in(*pass) {
                continue;
            }
            item.block = number(next)?;
            if let Some(object) = survey.shared(&data) {
                let first = *shared.entry(object).or_insert(item.block);
                if first != item.block {
                    (item.block, item.blocks) = (first, 0);
                }
            }
            next += u64::from(item.blocks);
        }
    }
    number(next)
}

/// Returns how an inode's data is divided into blocks and a tail, if the tail fits after the inode.
fn extent_of(survey: &Survey<'_>, source: InodeSource, data: &PlainData<'_>) -> Extent {
    let rules = &survey.rules;
    let block_size = rules.block_size.bytes();
    let with_tail = |Extent { blocks, tail }| {
        if tail > rules.tail_max {
            Extent { blocks: blocks + 1, tail: 0 }
        } else {
            Extent { blocks, tail }
        }
    };
    let file = |size: u64| {
        if rules.file_tails && survey.shared(data).is_none() {
            with_tail(Extent { blocks: size / block_size, tail: size % block_size })
        } else {
            Extent { blocks: size.div_ceil(block_size), tail: 0 }
        }
    };
    match data {
        PlainData::Directory => {
            let mut extent = DirectoryExtent::new(rules.block_size);
            for entry in survey.listing(source) {
                extent.push(entry.name);
            }
            with_tail(extent.finish())
        }
        PlainData::Symlink(target) => Extent { blocks: 0, tail: target.len() as u64 },
        PlainData::Inline(bytes) => file(bytes.len() as u64),
        PlainData::Holes { chunks, .. } => {
            Extent { blocks: 0, tail: chunks * size_of::<u32>() as u64 }
        }
        PlainData::External { .. } if survey.on_device(data).is_some() => Extent::default(),
        PlainData::External { size, .. } => file(*size),
        PlainData::Device(_) | PlainData::Nothing => Extent::default(),
    }
}
