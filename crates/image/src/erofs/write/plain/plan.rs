//! The first pass, which assigns a position to every part of the image.

use hashbrown::HashMap;

use super::Flavor;
use super::pack::{Packer, Shape};
use super::survey::{Data, Survey};
use crate::erofs::layout::{RawDeviceSlot, RawSuperblock, SLOT_SIZE, SUPERBLOCK_OFFSET};
use crate::erofs::write::WriteError;
use crate::erofs::write::listing::Listing;
use crate::erofs::write::place::{BlockSize, DirectoryExtent, Extent};
use crate::tree::{Inode, InodeId};

/// Maximum length in bytes of a tail, which is stored after the inode, for blocks of 4096 bytes; proportional for
/// other blocks. Longer tails waste more space before the ends of blocks than they save: 3400 gives the smallest
/// images of Debian, or images within 0.003 % of the smallest. A lower maximum makes images larger and listings
/// faster, because listings read the blocks with inodes: `docs/format/erofs-profile.md` has the numbers.
const TAIL_MAX: u64 = 3400;
/// Maximum size in bytes of an inode's xattrs: the 16 bits of `i_xattr_icount` count the header of 12 bytes as one,
/// and 4 bytes each after it.
const XATTRS_MAX: u64 = 12 + 4 * (u16::MAX as u64 - 1);

/// An image whose inodes and blocks all have positions, ready to be written.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// The survey, with its items in the order of their positions.
    pub(super) survey: Survey<'a>,
    /// Nids of the inodes by [`InodeId::index`].
    nids: Vec<u32>,
    /// The device table, after the superblock. The long prefixes follow it.
    pub(super) device_table: Vec<RawDeviceSlot>,
    /// Offset of the shared xattrs in bytes.
    pub(super) inodes_end: u64,
    /// Offset in bytes of the blocks of directories and symlinks, which are followed by those of files.
    pub(super) data_start: u64,
    /// Length of the image in blocks.
    pub(super) blocks: u32,
}

impl<'a> Plan<'a> {
    pub(super) fn of(mut survey: Survey<'a>) -> Result<Self, WriteError> {
        let tree = survey.tree;
        let block_size = survey.block_size.bytes();
        let mut nids = vec![0; tree.inode_bound()];
        let mut packer = Packer::new(first_inode(&survey), block_size);
        let mut items = std::mem::take(&mut survey.items);
        for item in &mut items {
            let inode = tree.inode(item.id);
            let data = Data::of(&inode);
            let xattrs = survey.xattrs_size(&inode);
            if xattrs > XATTRS_MAX {
                return Err(WriteError::XattrsTooLarge { path: inode.path(), bytes: xattrs });
            }
            let extent = extent_of(&survey, &inode, &data);
            let table = survey.table(&data).map(|(_, table)| table);
            let mut shape = Shape {
                inode: item.form.size(),
                xattrs: table.map_or(xattrs, |table| xattrs.next_multiple_of(8) + table.size()),
                tail: extent.tail,
                whole: matches!(data, Data::Symlink(_)),
            };
            let position = match packer.place(shape) {
                Some(position) => position,
                None => {
                    shape = Shape { tail: 0, whole: false, ..shape };
                    packer.place(shape).expect("an inode without a tail fits a block")
                }
            };
            item.tail = u16::try_from(shape.tail).expect("a tail is less than a block");
            let nid = u32::try_from(position / SLOT_SIZE);
            nids[item.id.index()] =
                nid.map_err(|_wide| WriteError::TooLarge("128 GiB of inodes"))?;
        }
        items.sort_unstable_by_key(|item| nids[item.id.index()]);
        survey.items = items;
        let inodes_end = packer.end();
        let data_start = (inodes_end + survey.shared_bytes()).next_multiple_of(block_size);
        let blocks = place_blocks(&mut survey, data_start / block_size)?;
        let device_table = survey.devices.table(blocks);
        Ok(Self { survey, nids, device_table, inodes_end, data_start, blocks })
    }

    pub(super) fn nid(&self, id: InodeId) -> u32 {
        self.nids[id.index()]
    }

    /// Returns the root's nid, which has 16 bits because the root is the first inode.
    pub(super) fn root_nid(&self) -> u16 {
        let nid = self.nid(InodeId::ROOT);
        u16::try_from(nid).expect("the root is next to the device table")
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

const fn too_many_blocks(block_size: BlockSize) -> WriteError {
    WriteError::TooLarge(match block_size {
        BlockSize::B512 => "2 TiB",
        BlockSize::B4096 => "16 TiB",
    })
}

/// Assigns blocks to all data besides tails: first to names and targets, so that metadata is contiguous, then to
/// files. Returns the number of blocks in the image.
fn place_blocks(survey: &mut Survey<'_>, start: u64) -> Result<u32, WriteError> {
    let too_many = || too_many_blocks(survey.block_size);
    let mut next = start;
    let mut shared = HashMap::new();
    let mut items = std::mem::take(&mut survey.items);
    for of_files in [false, true] {
        for item in &mut items {
            let inode = survey.tree.inode(item.id);
            let data = Data::of(&inode);
            if data.is_file() != of_files {
                continue;
            }
            let in_blocks = match survey.on_device(&data) {
                None => size_of_data(survey, &inode, &data, item.tail) - u64::from(item.tail),
                Some(_) => 0,
            };
            let blocks = in_blocks.div_ceil(survey.block_size.bytes());
            if blocks == 0 {
                continue;
            }
            let number = |block: u64| u32::try_from(block).map_err(|_wide| too_many());
            item.block = number(next)?;
            if let Some(object) = survey.shared(&data) {
                let first = shared.entry(object).or_insert(item.block);
                if *first != item.block {
                    item.block = *first;
                    continue;
                }
            }
            item.owns_blocks = true;
            next += blocks;
            number(next)?;
        }
    }
    survey.items = items;
    u32::try_from(next).map_err(|_wide| too_many_blocks(survey.block_size))
}

/// Returns a directory's number of full blocks, and the number of bytes in its last block.
fn cut(directory: &Inode<'_>, block_size: BlockSize) -> (u64, u64) {
    let mut extent = DirectoryExtent::new(block_size);
    for entry in Listing::plain(directory) {
        extent.push(entry.name);
    }
    extent.cut()
}

/// Returns how an inode's data is divided into blocks and a tail, if the tail fits after the inode.
fn extent_of(survey: &Survey<'_>, inode: &Inode<'_>, data: &Data<'_>) -> Extent {
    if survey.on_device(data).is_some() {
        return Extent::default();
    }
    let block_size = survey.block_size.bytes();
    let with_tail = |blocks, tail| {
        if tail * BlockSize::B4096.bytes() > TAIL_MAX * block_size {
            Extent { blocks: blocks + 1, tail: 0 }
        } else {
            Extent { blocks, tail }
        }
    };
    let cut_file = |size: u64| match (survey.flavor, survey.shared(data)) {
        (Flavor::Linux, None) => with_tail(size / block_size, size % block_size),
        _ => Extent { blocks: size.div_ceil(block_size), tail: 0 },
    };
    match data {
        Data::Directory => {
            let (full, last) = cut(inode, survey.block_size);
            with_tail(full, last)
        }
        Data::Symlink(target) => Extent::behind(target.len() as u64),
        Data::Inline(bytes) => cut_file(bytes.len() as u64),
        Data::External { size, .. } => cut_file(*size),
        Data::Device(_) | Data::Nothing => Extent::default(),
    }
}

/// Returns `i_size`. The size of a directory includes its blocks as a whole.
pub(super) fn size_of_data(
    survey: &Survey<'_>,
    inode: &Inode<'_>,
    data: &Data<'_>,
    tail: u16,
) -> u64 {
    match data {
        Data::Directory => {
            let (full, last) = cut(inode, survey.block_size);
            let block_size = survey.block_size.bytes();
            full * block_size + if tail == 0 { block_size } else { last }
        }
        Data::Symlink(bytes) | Data::Inline(bytes) => bytes.len() as u64,
        Data::External { size, .. } => *size,
        Data::Device(_) | Data::Nothing => 0,
    }
}
