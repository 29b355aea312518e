//! The first block of an image on a disk.

use std::io;

/// Size of a block of the image, in bytes. The image's length is a multiple of this.
pub(super) const BLOCK: usize = 4096;
/// Offset of `blocks_lo` in the superblock, which begins at byte 1024. Source: Linux `fs/erofs/erofs_fs.h`, `struct
/// erofs_super_block`.
const BLOCKS_AT: usize = 1024 + 36;

/// Returns the length in bytes that the first block of an image states.
pub(super) fn image_length(block: &[u8]) -> u64 {
    let mut blocks = [0; 4];
    blocks.copy_from_slice(&block[BLOCKS_AT..BLOCKS_AT + 4]);
    u64::from(u32::from_le_bytes(blocks)) * BLOCK as u64
}

/// Returns the error for an image of another length than its first block states.
pub(super) fn wrong_length(written: u64, stated: Option<u64>) -> io::Error {
    io::Error::other(format!("the image has {written} bytes, but its superblock states {stated:?}"))
}
