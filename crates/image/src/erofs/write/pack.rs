//! Assigns positions to inodes, independent of trees.

use std::collections::VecDeque;

use crate::erofs::layout::SLOT_SIZE;

/// Number of gaps that are remembered. It is small so that an inode is never far from its neighbours: a gap is filled
/// only while its block is among the last ones.
const GAPS: usize = 16;

/// The rules by which inodes get positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// The positions of C composefs: one inode after the other. An inode and its xattrs may cross the end of a block.
    /// A symlink must take less than a block. An inode whose tail becomes a block begins at a block boundary.
    InOrder,
    /// One inode after the other, but small inodes fill gaps that larger inodes have left shortly before.
    FillGaps,
}

/// The space that an inode takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes of the inode itself, which must not cross the end of a block.
    pub(super) inode: u64,
    /// Bytes of the xattrs, and of a chunk table after them, which may cross the end of a block.
    pub(super) xattrs: u64,
    /// Bytes of the tail, which must not cross the end of a block.
    pub(super) tail: u64,
    /// Whether all of it must be in one block, which older kernels require for a symlink with a tail. Source:
    /// `erofs_fill_symlink` in Linux `fs/erofs/inode.c`.
    pub(super) whole: bool,
}

impl Shape {
    const fn size(self) -> u64 {
        self.inode + self.xattrs + self.tail
    }

    /// Returns where the part begins that would cross the end of a block if the inode were at `at`.
    fn crossing(self, at: u64, block: u64) -> Option<u64> {
        let whole = if self.whole { self.size() } else { self.inode };
        let parts = [(at, whole), (at + self.inode + self.xattrs, self.tail)];
        let crosses = |(start, size): &(u64, u64)| offset(*start, block) + size > block;
        parts.into_iter().find(crosses).map(|(start, _)| start)
    }

    /// Returns the first slot from `from` on at which no part crosses the end of a block; `None` if there is none.
    fn first_fit(self, from: u64, block: u64) -> Option<u64> {
        let mut at = from;
        // If a part crosses the end of a block, it also does so from later slots on, until it begins after that end.
        while let Some(start) = self.crossing(at, block) {
            at += (block - offset(start, block)).next_multiple_of(SLOT_SIZE);
            // The slots of the next block are equivalent to those of this block.
            if at > from + block {
                return None;
            }
        }
        Some(at)
    }
}

/// Returns the offset in its block. The size of a block is a power of two.
const fn offset(at: u64, block: u64) -> u64 {
    at & (block - 1)
}

/// The position of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    /// Offset in the image in bytes.
    pub(super) position: u64,
    /// Whether the tail follows the inode. If not, the tail fits at no position after the inode, and becomes a block.
    pub(super) has_tail: bool,
}

/// Assigns positions to inodes.
#[derive(Debug)]
pub(super) struct Packer {
    packing: Packing,
    block: u64,
    position: u64,
    gaps: VecDeque<(u64, u64)>,
}

impl Packer {
    /// Begins at offset `position` in bytes of an image with blocks of `block` bytes.
    pub(super) const fn new(packing: Packing, position: u64, block: u64) -> Self {
        Self { packing, block, position, gaps: VecDeque::new() }
    }

    /// Returns the position of the next inode.
    pub(super) fn place(&mut self, shape: Shape) -> Spot {
        if let Some(position) = self.fitting_position(shape) {
            return Spot { position, has_tail: true };
        }
        if self.packing == Packing::InOrder {
            self.position = self.position.next_multiple_of(self.block);
        }
        let position = self.fitting_position(Shape { tail: 0, whole: false, ..shape });
        let position = position.expect("an inode without a tail fits a block");
        Spot { position, has_tail: false }
    }

    fn fitting_position(&mut self, shape: Shape) -> Option<u64> {
        let from = self.position.next_multiple_of(SLOT_SIZE);
        let at = match self.packing {
            Packing::InOrder if shape.whole && shape.size() >= self.block => return None,
            Packing::InOrder => {
                let xattrs = shape.inode + shape.xattrs;
                Shape { inode: 0, xattrs, ..shape }.first_fit(from, self.block)?
            }
            Packing::FillGaps => {
                if let Some(at) = self.fill_gap(shape) {
                    return Some(at);
                }
                let at = shape.first_fit(from, self.block)?;
                self.add_gap(from, at);
                at
            }
        };
        self.position = at + shape.size();
        Some(at)
    }

    fn fill_gap(&mut self, shape: Shape) -> Option<u64> {
        let size = shape.size();
        let fits = |at: u64| shape.crossing(at, self.block).is_none();
        let mut gaps = self.gaps.iter_mut();
        let (start, _) = gaps.find(|(start, end)| *start + size <= *end && fits(*start))?;
        let at = *start;
        *start = (at + size).next_multiple_of(SLOT_SIZE);
        Some(at)
    }

    fn add_gap(&mut self, start: u64, end: u64) {
        if end > start {
            self.gaps.push_back((start, end));
        }
        self.gaps.retain(|(start, end)| start < end);
        if self.gaps.len() > GAPS {
            self.gaps.pop_front();
        }
    }

    /// Returns the end of the last inode's slot.
    pub(super) const fn end(&self) -> u64 {
        self.position.next_multiple_of(SLOT_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn shape(inode: u64, xattrs: u64, tail: u64) -> Shape {
        Shape { inode, xattrs, tail, whole: false }
    }

    const fn whole(inode: u64, xattrs: u64, tail: u64) -> Shape {
        Shape { whole: true, ..shape(inode, xattrs, tail) }
    }

    /// Compares the positions of inodes, and the end of the last one, with values that were computed by hand from the
    /// rules in `docs/format/erofs-profile.md`. `Err` is the position of an inode whose tail becomes a block.
    #[track_caller]
    fn check(packing: Packing, from: u64, shapes: &[Shape], expect: &[Result<u64, u64>], end: u64) {
        let mut packer = Packer::new(packing, from, 4096);
        let place = |shape: &Shape| match packer.place(*shape) {
            Spot { position, has_tail: true } => Ok(position),
            Spot { position, has_tail: false } => Err(position),
        };
        let got: Vec<_> = shapes.iter().map(place).collect();
        assert_eq!((&got[..], packer.end()), (expect, end));
    }

    #[track_caller]
    fn check_gaps(from: u64, shapes: &[Shape], expect: &[Result<u64, u64>], end: u64) {
        check(Packing::FillGaps, from, shapes, expect, end);
    }

    #[track_caller]
    fn check_in_order(from: u64, shape: Shape, expect: Result<u64, u64>, end: u64) {
        check(Packing::InOrder, from, &[shape], &[expect], end);
    }

    #[test]
    fn one_after_the_other() {
        let shapes = [shape(32, 0, 0), shape(64, 12, 5), shape(32, 0, 1)];
        for packing in [Packing::InOrder, Packing::FillGaps] {
            check(packing, 1152, &shapes, &[Ok(1152), Ok(1184), Ok(1280)], 1344);
        }
        check_in_order(1153, shape(32, 0, 5), Ok(1184), 1248);
    }

    #[test]
    fn an_inode_and_a_tail_never_cross_a_block_but_xattrs_do() {
        check_gaps(4064, &[shape(64, 0, 0)], &[Ok(4096)], 4160);
        check_gaps(4064, &[shape(32, 0, 100)], &[Ok(4064)], 4224);
        check_gaps(4032, &[shape(32, 0, 33)], &[Ok(4064)], 4160);
        check_gaps(4032, &[shape(64, 100, 10)], &[Ok(4032)], 4224);
        // 44 bytes of inode and xattrs end 20 bytes before the block's end, so a tail of 21 bytes must begin after
        // that end.
        check_gaps(4032, &[shape(32, 12, 21)], &[Ok(4064)], 4160);
        check_gaps(4032, &[shape(32, 12, 4084)], &[Ok(4064)], 8192);
        check_gaps(4032, &[shape(32, 12, 4085)], &[Err(4032)], 4096);
    }

    #[test]
    fn small_ones_fill_what_is_left() {
        let shapes = [shape(32, 0, 2000), shape(64, 0, 0), shape(32, 0, 40), shape(32, 0, 0)];
        check_gaps(4032, &shapes, &[Ok(4032 + 32), Ok(6112), Ok(6176), Ok(4032)], 6272);
        let shapes = [shape(32, 0, 3000), shape(32, 0, 3000), shape(32, 0, 900), shape(64, 0, 0)];
        check_gaps(0, &shapes, &[Ok(0), Ok(4064), Ok(3040), Ok(3040 + 960)], 7104);
    }

    #[test]
    fn a_symlink_is_kept_whole() {
        check_gaps(4000, &[whole(32, 40, 24)], &[Ok(4000)], 4096);
        check_gaps(4000, &[whole(32, 40, 25)], &[Ok(4096)], 4224);
        check_gaps(4000, &[whole(32, 0, 4064)], &[Ok(4096)], 8192);
        check_gaps(4000, &[whole(32, 0, 4065)], &[Err(4000)], 4032);
    }

    #[test]
    fn in_order_an_inode_may_cross_a_block_but_a_tail_may_not() {
        check_in_order(4064, shape(64, 0, 0), Ok(4064), 4128);
        // 4096 - 4064 - 32 = 0 bytes are left, so a whole block is available.
        check_in_order(4064, shape(32, 0, 100), Ok(4064), 4224);
        // 32 bytes are left for 33, so the inode moves by 32.
        check_in_order(4032, shape(32, 0, 32), Ok(4032), 4096);
        check_in_order(4032, shape(32, 0, 33), Ok(4064), 4160);
        // 20 bytes are left for a tail of 21 bytes, so the inode moves by 32, and the tail begins 12 bytes into the
        // next block.
        check_in_order(4032, shape(32, 12, 21), Ok(4064), 4160);
    }

    #[test]
    fn in_order_an_inode_begins_a_block_if_its_tail_becomes_one() {
        check_in_order(4032, shape(32, 12, 4084), Ok(4064), 8192);
        check_in_order(4032, shape(32, 12, 4085), Err(4096), 4160);
        check_in_order(4032, shape(32, 12, 4096), Err(4096), 4160);
    }

    #[test]
    fn in_order_a_symlink_takes_less_than_a_block() {
        check_in_order(4032, whole(32, 0, 32), Ok(4032), 4096);
        check_in_order(4032, whole(32, 0, 33), Ok(4096), 4192);
        check_in_order(4096, whole(32, 0, 4063), Ok(4096), 8192);
        check_in_order(4096, whole(32, 0, 4064), Err(4096), 4128);
        check_in_order(4128, whole(32, 0, 4064), Err(8192), 8224);
    }
}
