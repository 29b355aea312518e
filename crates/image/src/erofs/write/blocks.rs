//! Sizes of blocks and of data in blocks, independent of trees.

use crate::erofs::layout::RawDirent;

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

/// The size of an inode's data: whole blocks, and a tail after the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Extent {
    /// Number of blocks.
    pub(super) blocks: u64,
    /// Bytes after the inode, at most a block.
    pub(super) tail: u64,
}

/// Divides a directory into blocks: an entry that does not fit in the current block begins the next one.
#[derive(Debug)]
pub(super) struct DirectoryExtent {
    block_size: u64,
    full: u64,
    filled: u64,
}

impl DirectoryExtent {
    pub(super) const fn new(block_size: BlockSize) -> Self {
        Self { block_size: block_size.bytes(), full: 0, filled: 0 }
    }

    /// Adds an entry, and returns whether the entry begins a new block.
    pub(super) const fn push(&mut self, name: &[u8]) -> bool {
        let size = (size_of::<RawDirent>() + name.len()) as u64;
        let next = self.filled + size > self.block_size;
        if next {
            self.full += 1;
            self.filled = 0;
        }
        self.filled += size;
        next
    }

    /// Returns the number of full blocks, and the number of bytes in the last block.
    pub(super) const fn finish(&self) -> Extent {
        Extent { blocks: self.full, tail: self.filled }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        check_directory([244; 16], 0, 4096);
        check_directory([244; 17], 1, 256);
        check_directory([255; 15].into_iter().chain([79]), 0, 4096);
        check_directory([255; 15].into_iter().chain([80]), 1, 92);
    }
}
