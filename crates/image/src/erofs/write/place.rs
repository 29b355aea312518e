//! The arithmetic of the layout pass, independent of trees.

use crate::erofs::layout::{RawDirent, SLOT_SIZE};

/// Size of an image's blocks, which depends on its profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockSize {
    /// 512 bytes, the block size of tars, for native images. Supported since Linux 6.4.
    B512,
    /// 4096 bytes, for all other images.
    B4096,
}

impl BlockSize {
    /// Returns the size in bytes.
    pub(super) const fn bytes(self) -> u64 {
        1 << self.bits()
    }

    /// Returns the binary logarithm of the size.
    pub(super) const fn bits(self) -> u8 {
        match self {
            Self::B512 => 9,
            Self::B4096 => 12,
        }
    }
}

/// Bytes in a block of composefs images.
pub(super) const BLOCK_SIZE: u64 = BlockSize::B4096.bytes();
/// Maximum length in bytes of the tail of a directory or an inline file, which is stored after the inode. A longer
/// one takes a block.
const TAIL_MAX: u64 = BLOCK_SIZE / 2;

/// The size of an inode's data: whole blocks, and a tail after the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Extent {
    /// Number of blocks.
    pub(super) blocks: u64,
    /// Bytes after the inode, at most a block.
    pub(super) tail: u64,
}

impl Extent {
    /// Data with `blocks` blocks and a tail, which becomes a block if it is too long.
    pub(super) const fn with_tail(blocks: u64, tail: u64) -> Self {
        if tail > TAIL_MAX { Self { blocks: blocks + 1, tail: 0 } } else { Self { blocks, tail } }
    }

    /// Data that is stored entirely after the inode.
    pub(super) const fn behind(tail: u64) -> Self {
        Self { blocks: 0, tail }
    }
}

/// Divides a directory into blocks: an entry that does not fit in the current block begins the next one.
#[derive(Debug)]
pub(super) struct DirectoryExtent {
    block_size: u64,
    full: u64,
    filled: u64,
}

/// Returns the number of bytes that an entry takes in a directory block.
pub(super) const fn dirent_size(name: &[u8]) -> u64 {
    (size_of::<RawDirent>() + name.len()) as u64
}

impl DirectoryExtent {
    pub(super) const fn new(block_size: BlockSize) -> Self {
        Self { block_size: block_size.bytes(), full: 0, filled: 0 }
    }

    /// Adds an entry, and returns whether the entry begins a new block.
    pub(super) const fn push(&mut self, name: &[u8]) -> bool {
        let size = dirent_size(name);
        let next = self.filled + size > self.block_size;
        if next {
            self.full += 1;
            self.filled = 0;
        }
        self.filled += size;
        next
    }

    pub(super) const fn finish(&self) -> Extent {
        Extent::with_tail(self.full, self.filled)
    }

    /// Returns the number of full blocks, and the number of bytes in the last block.
    pub(super) const fn cut(&self) -> (u64, u64) {
        (self.full, self.filled)
    }
}

/// The part of an inode that should not cross the end of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Only the tail; the inode and its xattrs may cross it.
    Tail,
    /// The inode, xattrs and target of a symlink, if they fit in a block.
    Whole,
}

/// Assigns positions to inodes, one after the other.
#[derive(Debug)]
pub(super) struct Placer {
    position: u64,
}

impl Placer {
    /// Begins at offset `position` of the image, in bytes.
    pub(super) const fn new(position: u64) -> Self {
        Self { position }
    }

    /// Returns the position in bytes of an inode of `head` bytes (the inode and its xattrs). A tail that does not fit
    /// after it becomes a block.
    pub(super) fn place(&mut self, head: u64, data: &mut Extent, keep: Keep) -> u64 {
        let mut position = self.position.next_multiple_of(SLOT_SIZE);
        match keep {
            Keep::Whole => {
                let whole = head + data.tail;
                if whole >= BLOCK_SIZE {
                    data.blocks += 1;
                    data.tail = 0;
                }
                // Like C, count the tail even if it became a block, so the inode may move to a new block needlessly.
                if position / BLOCK_SIZE != (position + whole - 1) / BLOCK_SIZE {
                    position = position.next_multiple_of(BLOCK_SIZE);
                }
            }
            Keep::Tail => {
                let left = |at: u64| BLOCK_SIZE - at % BLOCK_SIZE;
                let rest = left(position + head);
                if rest < data.tail {
                    let pad = rest.next_multiple_of(SLOT_SIZE);
                    if data.tail <= left(position + head + pad) {
                        position += pad;
                    } else {
                        data.blocks += 1;
                        data.tail = 0;
                        position = position.next_multiple_of(BLOCK_SIZE);
                    }
                }
            }
        }
        self.position = position + head + data.tail;
        position
    }

    /// Returns the end of the last inode's slot.
    pub(super) const fn end(&self) -> u64 {
        self.position.next_multiple_of(SLOT_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values were computed by hand from the rules in `docs/format/erofs-profile.md`.
    #[track_caller]
    fn check_place(
        at: u64,
        head: u64,
        keep: Keep,
        data: (u64, u64),
        expect: (u64, (u64, u64), u64),
    ) {
        let mut extent = Extent { blocks: data.0, tail: data.1 };
        let mut placer = Placer::new(at);
        let position = placer.place(head, &mut extent, keep);
        assert_eq!((position, (extent.blocks, extent.tail), placer.end()), expect);
    }

    #[test]
    fn an_inode_stands_at_a_slot() {
        check_place(1152, 32, Keep::Tail, (0, 0), (1152, (0, 0), 1184));
        check_place(1153, 32, Keep::Tail, (0, 5), (1184, (0, 5), 1248));
    }

    #[test]
    fn inode_and_xattrs_may_cross_a_block_but_a_tail_may_not() {
        check_place(4064, 64, Keep::Tail, (0, 0), (4064, (0, 0), 4128));
        // 4096 - 4064 - 32 = 0 bytes are left, so a whole block is available.
        check_place(4064, 32, Keep::Tail, (0, 100), (4064, (0, 100), 4224));
        // 32 bytes are left for 33, so the inode moves by 32.
        check_place(4032, 32, Keep::Tail, (0, 32), (4032, (0, 32), 4096));
        check_place(4032, 32, Keep::Tail, (0, 33), (4064, (0, 33), 4160));
        // 20 bytes are left for 21, so the inode moves by 32, and the tail begins 12 bytes into the next block.
        check_place(4032, 44, Keep::Tail, (0, 21), (4064, (0, 21), 4160));
    }

    #[test]
    fn a_tail_that_fits_nowhere_becomes_a_block() {
        check_place(4032, 44, Keep::Tail, (0, 4084), (4064, (0, 4084), 8192));
        check_place(4032, 44, Keep::Tail, (0, 4085), (4096, (1, 0), 4160));
        check_place(4032, 44, Keep::Tail, (2, 4096), (4096, (3, 0), 4160));
    }

    #[test]
    fn a_symlink_is_kept_whole() {
        check_place(4032, 32, Keep::Whole, (0, 32), (4032, (0, 32), 4096));
        check_place(4032, 32, Keep::Whole, (0, 33), (4096, (0, 33), 4192));
        check_place(4096, 32, Keep::Whole, (0, 4063), (4096, (0, 4063), 8192));
        check_place(4096, 32, Keep::Whole, (0, 4064), (4096, (1, 0), 4128));
        // The target becomes a block, and its former length still moves the inode.
        check_place(4128, 32, Keep::Whole, (0, 4064), (8192, (1, 0), 8224));
    }

    #[track_caller]
    fn check_directory(lengths: impl IntoIterator<Item = usize>, blocks: u64, tail: u64) {
        let mut extent = DirectoryExtent::new(BlockSize::B4096);
        for length in lengths {
            extent.push(&vec![b'x'; length]);
        }
        assert_eq!(extent.finish(), Extent { blocks, tail });
    }

    #[test]
    fn a_directory_is_cut_between_entries() {
        check_directory([1, 2], 0, 27);
        check_directory([244; 8], 0, 2048);
        check_directory([244; 8].into_iter().chain([1]), 1, 0);
        check_directory([244; 16], 1, 0);
        check_directory([244; 17], 1, 256);
        check_directory([255; 15].into_iter().chain([79]), 1, 0);
        check_directory([255; 15].into_iter().chain([80]), 1, 92);
    }
}
