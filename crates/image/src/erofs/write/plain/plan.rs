//! The first pass: where everything goes.

use hashbrown::HashMap;

use super::Flavor;
use super::pack::{Packer, Shape};
use super::survey::{Data, Survey};
use crate::erofs::layout::{RawSuperblock, SLOT_SIZE, SUPERBLOCK_OFFSET};
use crate::erofs::write::WriteError;
use crate::erofs::write::listing::Listing;
use crate::erofs::write::place::{BLOCK_SIZE, DirectoryExtent, Extent};
use crate::tree::{Inode, InodeId};

/// Most bytes of an end that go behind the inode. With more, what has to be left free before blocks' ends costs what is
/// saved: of Debian images those with 3400 are the smallest, or within 0.003 % of it. With fewer, images are larger and
/// listings faster, since these read the blocks that inodes are in: `docs/format/erofs-profile.md` has the numbers.
const TAIL_MAX: u64 = 3400;
/// `i_xattr_icount` counts 4 bytes in 16 bits, and a header of 12 bytes as one.
const XATTRS_MAX: u64 = 12 + 4 * (u16::MAX as u64 - 1);

/// An image with every inode and block in its place, ready to be written.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// With its items in the order of their places.
    pub(super) survey: Survey<'a>,
    /// Slots of the inodes by [`InodeId::index`].
    nids: Vec<u32>,
    /// Where the shared xattrs begin, in bytes.
    pub(super) inodes_end: u64,
    /// Where the blocks of directories and symlinks begin, and behind them those of files, in bytes.
    pub(super) data_start: u64,
    /// Length of the image in blocks.
    pub(super) blocks: u32,
}

impl<'a> Plan<'a> {
    pub(super) fn of(mut survey: Survey<'a>) -> Result<Self, WriteError> {
        const FIRST: u64 = (SUPERBLOCK_OFFSET + size_of::<RawSuperblock>()) as u64;
        let tree = survey.tree;
        let mut nids = vec![0; tree.inode_bound()];
        let mut packer = Packer::new(FIRST);
        let mut items = std::mem::take(&mut survey.items);
        for item in &mut items {
            let inode = tree.inode(item.id);
            let data = Data::of(&inode);
            let xattrs = survey.xattrs.size_of(survey.set_of(&inode), None);
            if xattrs > XATTRS_MAX {
                return Err(WriteError::XattrsTooLarge { path: inode.path(), bytes: xattrs });
            }
            let extent = extent_of(&survey, &inode, &data);
            let mut shape = Shape {
                inode: item.form.size(),
                xattrs,
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
        let data_start = (inodes_end + survey.xattrs.shared_bytes()).next_multiple_of(BLOCK_SIZE);
        let blocks = place_blocks(&mut survey, data_start / BLOCK_SIZE)?;
        Ok(Self { survey, nids, inodes_end, data_start, blocks })
    }

    pub(super) fn nid(&self, id: InodeId) -> u32 {
        self.nids[id.index()]
    }

    /// The root is the first inode, so that its nid has 16 bits.
    pub(super) fn root_nid(&self) -> u16 {
        let nid = self.nid(InodeId::ROOT);
        u16::try_from(nid).expect("the root stands in the first two blocks")
    }
}

/// Gives blocks to all that has data beyond its tail: first to names and targets, so that metadata is together, then to
/// files. Answers the number of blocks in the image.
fn place_blocks(survey: &mut Survey<'_>, start: u64) -> Result<u32, WriteError> {
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
            let (size, tail) = (size_of_data(&inode, &data, item.tail), u64::from(item.tail));
            let blocks = (size - tail).div_ceil(BLOCK_SIZE);
            if blocks == 0 {
                continue;
            }
            let number =
                |block: u64| u32::try_from(block).map_err(|_wide| WriteError::TooLarge("16 TiB"));
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
    u32::try_from(next).map_err(|_wide| WriteError::TooLarge("16 TiB"))
}

/// How a directory is cut into blocks.
pub(super) fn cut(directory: &Inode<'_>) -> (u64, u64) {
    let mut extent = DirectoryExtent::default();
    for entry in Listing::plain(directory) {
        extent.push(entry.name);
    }
    extent.cut()
}

/// What of an inode's data would go where, if there is room behind it.
fn extent_of(survey: &Survey<'_>, inode: &Inode<'_>, data: &Data<'_>) -> Extent {
    let cut_file = |size: u64| match (survey.flavor, survey.shared(data)) {
        (Flavor::Linux, None) => with_tail(size / BLOCK_SIZE, size % BLOCK_SIZE),
        _ => Extent { blocks: size.div_ceil(BLOCK_SIZE), tail: 0 },
    };
    match data {
        Data::Directory => {
            let (full, last) = cut(inode);
            with_tail(full, last)
        }
        Data::Symlink(target) => Extent::behind(target.len() as u64),
        Data::Inline(bytes) => cut_file(bytes.len() as u64),
        Data::External { size, .. } => cut_file(*size),
        Data::Device(_) | Data::Nothing => Extent::default(),
    }
}

const fn with_tail(blocks: u64, tail: u64) -> Extent {
    if tail > TAIL_MAX { Extent { blocks: blocks + 1, tail: 0 } } else { Extent { blocks, tail } }
}

/// `i_size`. A directory's counts whole blocks.
pub(super) fn size_of_data(inode: &Inode<'_>, data: &Data<'_>, tail: u16) -> u64 {
    match data {
        Data::Directory => {
            let (full, last) = cut(inode);
            full * BLOCK_SIZE + if tail == 0 { BLOCK_SIZE } else { last }
        }
        Data::Symlink(bytes) | Data::Inline(bytes) => bytes.len() as u64,
        Data::External { size, .. } => *size,
        Data::Device(_) | Data::Nothing => 0,
    }
}
