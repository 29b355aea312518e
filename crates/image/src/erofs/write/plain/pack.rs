//! Assigns positions to inodes: one after the other, with small ones in gaps that larger ones left shortly before.

use std::collections::VecDeque;

use crate::erofs::layout::SLOT_SIZE;

/// Number of gaps that are remembered. It is small so that an inode is never far from its neighbours: a gap is filled
/// only while its block is among the last ones.
const GAPS: usize = 16;

/// The space that an inode takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Bytes of the inode itself, which must not cross the end of a block.
    pub(super) inode: u64,
    /// Bytes of its xattrs and of a chunk table after them, which may cross it.
    pub(super) xattrs: u64,
    /// Bytes of its tail, which must not cross it.
    pub(super) tail: u64,
    /// Whether all of it must be in one block, which older kernels require for a symlink with a tail. Source:
    /// `erofs_fill_symlink` in Linux `fs/erofs/inode.c`.
    pub(super) whole: bool,
}

impl Shape {
    const fn size(self) -> u64 {
        self.inode + self.xattrs + self.tail
    }

    fn fits(self, at: u64, block: u64) -> bool {
        let within = |at: u64, size: u64| at % block + size <= block;
        within(at, self.inode)
            && within(at + self.inode + self.xattrs, self.tail)
            && (!self.whole || within(at, self.size()))
    }
}

/// Assigns positions to inodes.
#[derive(Debug)]
pub(super) struct Packer {
    block: u64,
    position: u64,
    gaps: VecDeque<(u64, u64)>,
}

impl Packer {
    /// Begins at offset `position` in bytes of an image with blocks of `block` bytes.
    pub(super) const fn new(position: u64, block: u64) -> Self {
        Self { block, position, gaps: VecDeque::new() }
    }

    /// Returns the position of an inode in bytes; `None` if its tail fits nowhere after it.
    pub(super) fn place(&mut self, shape: Shape) -> Option<u64> {
        for (start, end) in &mut self.gaps {
            let at = *start;
            if at + shape.size() <= *end && shape.fits(at, self.block) {
                *start = (at + shape.size()).next_multiple_of(SLOT_SIZE);
                return Some(at);
            }
        }
        let from = self.position.next_multiple_of(SLOT_SIZE);
        // Try every slot of a block.
        let places = (0..=self.block / SLOT_SIZE).map(|slot| from + slot * SLOT_SIZE);
        let at = places.into_iter().find(|at| shape.fits(*at, self.block))?;
        if at > from {
            self.gaps.push_back((from, at));
        }
        self.gaps.retain(|(start, end)| start < end);
        if self.gaps.len() > GAPS {
            self.gaps.pop_front();
        }
        self.position = at + shape.size();
        Some(at)
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

    /// Expected values were computed by hand from the rules in `docs/format/erofs-profile.md`.
    #[track_caller]
    fn check(from: u64, shapes: &[Shape], expect: &[Option<u64>], end: u64) {
        let mut packer = Packer::new(from, 4096);
        let got: Vec<_> = shapes.iter().map(|shape| packer.place(*shape)).collect();
        assert_eq!((&got[..], packer.end()), (expect, end));
    }

    #[test]
    fn one_after_the_other() {
        let shapes = [shape(32, 0, 0), shape(64, 12, 5), shape(32, 0, 1)];
        check(1152, &shapes, &[Some(1152), Some(1184), Some(1280)], 1344);
    }

    #[test]
    fn an_inode_and_a_tail_never_cross_a_block_but_xattrs_do() {
        check(4064, &[shape(64, 0, 0)], &[Some(4096)], 4160);
        check(4064, &[shape(32, 0, 100)], &[Some(4064)], 4224);
        check(4032, &[shape(32, 0, 33)], &[Some(4064)], 4160);
        check(4032, &[shape(64, 100, 10)], &[Some(4032)], 4224);
        // 44 bytes of inode and xattrs end 20 bytes before the block's end, so a tail of 21 must begin after that
        // end.
        check(4032, &[shape(32, 12, 21)], &[Some(4064)], 4160);
        check(4032, &[shape(32, 12, 4084)], &[Some(4064)], 8192);
        check(4032, &[shape(32, 12, 4085)], &[None], 4032);
    }

    #[test]
    fn small_ones_fill_what_is_left() {
        let shapes = [shape(32, 0, 2000), shape(64, 0, 0), shape(32, 0, 40), shape(32, 0, 0)];
        let expect = [Some(4032 + 32), Some(6112), Some(6176), Some(4032)];
        check(4032, &shapes, &expect, 6272);
        let shapes = [shape(32, 0, 3000), shape(32, 0, 3000), shape(32, 0, 900), shape(64, 0, 0)];
        check(0, &shapes, &[Some(0), Some(4064), Some(3040), Some(3040 + 960)], 7104);
    }

    #[test]
    fn a_symlink_is_kept_whole() {
        let whole = |inode, xattrs, tail| Shape { whole: true, ..shape(inode, xattrs, tail) };
        check(4000, &[whole(32, 40, 24)], &[Some(4000)], 4096);
        check(4000, &[whole(32, 40, 25)], &[Some(4096)], 4224);
        check(4000, &[whole(32, 0, 4064)], &[Some(4096)], 8192);
        check(4000, &[whole(32, 0, 4065)], &[None], 4000);
    }
}
