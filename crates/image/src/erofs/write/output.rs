//! Buffers the image's bytes on their way to the output.

use std::io;
use std::mem::offset_of;

use crc::{CRC_32_ISCSI, Crc};
use zerocopy::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

use super::ErofsWriteError;
use super::blocks::BlockSize;
use crate::erofs::layout::{RawSuperblock, SUPERBLOCK_OFFSET};

/// Size of the buffer in bytes at which it is written out.
const GATHERED: usize = 256 << 10;
/// Additional room in the buffer for an inode with its xattrs and tail, or for a block, before it is written out.
const ROOM: usize = 128 << 10;

/// A buffered output that knows its position in the image.
#[derive(Debug)]
pub(super) struct Output<W> {
    inner: W,
    pub(super) buffer: Vec<u8>,
    /// Number of bytes written out.
    gone: u64,
    /// Whether the first block gets a checksum before it is written out.
    checksum: Checksum,
    pub(super) block_size: BlockSize,
}

/// Whether the superblock's block has a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checksum {
    /// Without a checksum, as in composefs images.
    None,
    /// crc32c. The whole first block is buffered before it is written out.
    Crc32c,
}

impl<W: io::Write> Output<W> {
    pub(super) fn new(inner: W, checksum: Checksum, block_size: BlockSize) -> Self {
        let buffer = Vec::with_capacity(GATHERED + ROOM);
        Self { inner, buffer, gone: 0, checksum, block_size }
    }

    pub(super) fn position(&self) -> u64 {
        self.gone + self.buffer.len() as u64
    }

    pub(super) fn put(&mut self, value: &(impl IntoBytes + Immutable)) {
        self.buffer.extend_from_slice(value.as_bytes());
    }

    /// Writes zeros up to `position`.
    pub(super) fn pad_to(&mut self, position: u64) {
        let zeros = position.checked_sub(self.position()).expect("the plan goes forward");
        let zeros = usize::try_from(zeros).expect("gaps are less than two blocks");
        self.buffer.resize(self.buffer.len() + zeros, 0);
    }

    pub(super) fn pad_to_block(&mut self) {
        self.pad_to(self.position().next_multiple_of(self.block_size.bytes()));
    }

    pub(super) fn flush_if_full(&mut self) -> Result<(), ErofsWriteError> {
        if self.buffer.len() < GATHERED { Ok(()) } else { self.flush() }
    }

    /// Writes out the buffer.
    pub(super) fn flush(&mut self) -> Result<(), ErofsWriteError> {
        if self.gone == 0 && self.checksum == Checksum::Crc32c {
            self.put_checksum();
        }
        self.inner.write_all(&self.buffer).map_err(ErofsWriteError::Output)?;
        self.gone += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Buffers bytes, or writes them out directly if they are many.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ErofsWriteError> {
        if bytes.len() < ROOM {
            self.buffer.extend_from_slice(bytes);
            return self.flush_if_full();
        }
        self.flush()?;
        self.inner.write_all(bytes).map_err(ErofsWriteError::Output)?;
        self.gone += bytes.len() as u64;
        Ok(())
    }

    /// Writes out the rest, and returns the total number of bytes.
    pub(super) fn finish(mut self) -> Result<u64, ErofsWriteError> {
        self.flush()?;
        self.inner.flush().map_err(ErofsWriteError::Output)?;
        Ok(self.gone)
    }

    /// Stores the checksum: crc32c from the superblock to the end of its block, computed with the checksum as 0 and
    /// without the final inversion. For blocks of 512 bytes, which end before the superblock, it covers 512 bytes.
    /// Source: `erofs_superblock_csum_verify` in Linux `fs/erofs/super.c`.
    fn put_checksum(&mut self) {
        let end = match self.block_size {
            BlockSize::B512 => SUPERBLOCK_OFFSET + 512,
            BlockSize::B4096 => 4096,
        };
        let superblock = &self.buffer[SUPERBLOCK_OFFSET..end];
        let checksum = U32::new(!Crc::<u32>::new(&CRC_32_ISCSI).checksum(superblock));
        let at = SUPERBLOCK_OFFSET + offset_of!(RawSuperblock, checksum);
        self.buffer[at..at + size_of::<U32>()].copy_from_slice(checksum.as_bytes());
    }
}
