//! Chunk tables, which locate the bytes of files on devices.

use zerocopy::little_endian::U16;

use super::devices::{Devices, halves};
use super::native::{BLOCK_SIZE, Run};
use super::on_device::{DataForm, OnDevice};
use crate::erofs::layout::{CHUNK_48BIT, CHUNK_INDEXES, RawChunkIndex};

/// Maximum binary logarithm of the number of blocks in a chunk that an inode's format can state.
const BITS_MAX: u32 = 31;
/// Block number of a hole: all bits are ones. In a table with 32-bit numbers, only the low bits are stored. Source:
/// `EROFS_NULL_ADDR` in Linux `fs/erofs/erofs_fs.h`.
const NOWHERE: u64 = (1 << 48) - 1;

/// A file whose bytes are at several locations, as runs of blocks.
#[derive(Debug)]
pub(super) struct Pieces {
    /// Binary logarithm of the number of blocks in a chunk.
    bits: u8,
    runs: Vec<BlockRun>,
}

#[derive(Debug, Clone, Copy)]
struct BlockRun {
    /// Number of blocks of the file before the run.
    start: u64,
    /// Location of the run; `None` for zeros.
    place: Option<Block>,
}

/// A block of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    device: u16,
    number: u64,
}

impl Pieces {
    /// Converts a file's runs, and also returns the file's pieces, unless the runs are consecutive. Returns `None` if
    /// the runs are invalid, or their length differs from `size`.
    pub(super) fn place(
        runs: &[Run],
        size: u64,
        devices: &Devices,
    ) -> Option<(OnDevice, Option<Self>)> {
        let mut found: Vec<BlockRun> = Vec::new();
        let (mut start, mut left, block) = (0, size, BLOCK_SIZE.bytes());
        for run in runs {
            left = left.checked_sub(run.len)?;
            if run.len == 0 || left > 0 && run.len % block != 0 {
                return None;
            }
            let blocks = run.len.div_ceil(block);
            let place = match run.place {
                None => None,
                Some((device, offset)) => {
                    let number = offset / block;
                    let end = number.checked_add(blocks)?;
                    if offset % block != 0 || end > devices.blocks(device)? {
                        return None;
                    }
                    Some(Block { device, number })
                }
            };
            let before = found.last().map(|it| it.at(start));
            if before != Some(place) {
                found.push(BlockRun { start, place });
            }
            start += blocks;
        }
        let first = found.first().filter(|_| left == 0)?.place;
        let Block { device, number: block } = first.unwrap_or(Block { device: 0, number: 0 });
        let file = OnDevice { device, block, size, form: DataForm::Consecutive };
        if found.len() == 1 && first.is_some() {
            return Some((file, None));
        }
        let starts = found.iter().skip(1).map(|run| run.start.trailing_zeros());
        let bits = starts.fold(bits_of_one(start)?, u32::min);
        let pieces = Self { bits: u8::try_from(bits).expect("31 at most"), runs: found };
        Some((file, Some(pieces)))
    }
}

impl BlockRun {
    /// Returns the location of a block of the file. The block must be in the run, or directly after it.
    fn at(&self, block: u64) -> Option<Block> {
        self.place.map(|place| Block { number: place.number + (block - self.start), ..place })
    }
}

/// Returns the binary logarithm of the number of blocks in a chunk that holds `blocks` blocks, or in the largest
/// chunk.
fn bits_of_one(blocks: u64) -> Option<u32> {
    Some(blocks.checked_next_power_of_two()?.trailing_zeros().min(BITS_MAX))
}

/// The chunk table after an inode.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkTable<'p> {
    /// Binary logarithm of the number of blocks in a chunk.
    bits: u8,
    pub(super) entries: u64,
    /// Whether block numbers have 48 bits.
    is_wide: bool,
    what: What<'p>,
}

#[derive(Debug, Clone, Copy)]
enum What<'p> {
    /// Chunks that are consecutive on the device.
    Consecutive,
    Pieces(&'p Pieces),
}

impl<'p> ChunkTable<'p> {
    /// Makes the table of a file whose blocks are consecutive.
    pub(super) fn consecutive(file: &OnDevice, is_wide: bool) -> Self {
        let blocks = file.size.div_ceil(BLOCK_SIZE.bytes());
        let bits = bits_of_one(blocks).expect("a device has fewer than 2^48");
        let bits = u8::try_from(bits).expect("31 at most");
        Self { bits, entries: blocks.div_ceil(1 << bits), is_wide, what: What::Consecutive }
    }

    /// Makes the table of a file in pieces.
    pub(super) fn of_pieces(file: &OnDevice, pieces: &'p Pieces, is_wide: bool) -> Self {
        let blocks = file.size.div_ceil(BLOCK_SIZE.bytes());
        let entries = blocks.div_ceil(1 << pieces.bits);
        Self { bits: pieces.bits, entries, is_wide, what: What::Pieces(pieces) }
    }

    /// Returns the size of the table in bytes.
    pub(super) const fn size(&self) -> u64 {
        self.entries * size_of::<RawChunkIndex>() as u64
    }

    /// Returns `i_u`.
    pub(super) fn format(&self) -> u32 {
        let wide = if self.is_wide { CHUNK_48BIT } else { 0 };
        (CHUNK_INDEXES | wide | u16::from(self.bits)).into()
    }

    pub(super) fn entry(&self, file: &OnDevice, at: u64) -> RawChunkIndex {
        let first = at << self.bits;
        let on_device = |device: u16, block: u64| (device + 1, block);
        let (device, block) = match self.what {
            What::Consecutive => on_device(file.device, file.block + first),
            What::Pieces(pieces) => {
                let behind = pieces.runs.partition_point(|run| run.start <= first);
                match pieces.runs[behind - 1].at(first) {
                    Some(block) => on_device(block.device, block.number),
                    None => (0, NOWHERE),
                }
            }
        };
        let (high, startblk_lo) = halves(block);
        RawChunkIndex {
            startblk_hi: if self.is_wide { high } else { U16::ZERO },
            device_id: U16::new(device),
            startblk_lo,
        }
    }
}
