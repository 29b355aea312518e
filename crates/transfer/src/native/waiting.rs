//! Queues small objects until there is a gap for them between larger objects.
//!
//! An object of a page or more begins at a multiple of 4096 in its device, like pages of files in memory and on disks.
//! The unused ends of the last pages of such objects have enough space for all small objects of an ordinary image.

use std::collections::VecDeque;

use image::verity::ObjectId;

/// Size of a block of the device, in bytes.
const BLOCK: u16 = 512;
const _: () = assert!(store::DATA_BLOCK == BLOCK as u64);
/// Alignment of objects of a page or more, in bytes.
pub(super) const PAGE: u64 = 4096;
/// Size of the largest objects that fill gaps, in blocks.
const SMALL_BLOCKS: usize = 7;
/// Size of the largest objects that fill gaps, in bytes.
pub(super) const SMALL_MAX: u64 = PAGE - BLOCK as u64;
/// Maximum number of bytes in the queues; beyond it, the oldest objects get separate pages. A larger value fills more
/// gaps, but places small objects farther from the objects that were added with them.
const WAITING_MAX: usize = 1 << 20;

/// A small object whose content was verified.
#[derive(Debug)]
pub(super) struct Small {
    pub(super) object: ObjectId,
    pub(super) sha256: [u8; 32],
    /// Content, from 1 to [`SMALL_MAX`] bytes.
    pub(super) bytes: Vec<u8>,
}

/// Queues of small objects, by the number of blocks that they take.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    queues: [VecDeque<Small>; SMALL_BLOCKS],
    bytes: usize,
}

impl Waiting {
    pub(super) fn push(&mut self, small: Small) {
        self.bytes += small.bytes.len();
        let blocks = small.bytes.len().div_ceil(BLOCK.into());
        self.queues[blocks - 1].push_back(small);
    }

    /// Whether the queues exceed [`WAITING_MAX`].
    pub(super) fn is_full(&self) -> bool {
        self.bytes > WAITING_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Removes the largest object that fits into `room` bytes. Among objects of the same size in blocks, the oldest
    /// comes first.
    pub(super) fn take(&mut self, room: u64) -> Option<Small> {
        let blocks = usize::try_from(room / u64::from(BLOCK))
            .map_or(SMALL_BLOCKS, |it| it.min(SMALL_BLOCKS));
        let taken = self.queues[..blocks].iter_mut().rev().find_map(VecDeque::pop_front)?;
        self.bytes -= taken.bytes.len();
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use image::verity::{Algorithm, digest};

    use super::*;

    #[test]
    fn what_fits_best_is_taken_first() {
        let mut waiting = Waiting::default();
        assert!(waiting.take(PAGE).is_none());
        for length in [1_u16, 512, 513, 3584, 1536, 3073] {
            let bytes = vec![0; length.into()];
            let object = digest(Algorithm::Sha256, &length.to_le_bytes());
            waiting.push(Small { object: object.into(), sha256: [0; 32], bytes });
        }
        let mut take = |room| waiting.take(room).map(|it| it.bytes.len());
        assert_eq!(take(0), None);
        assert_eq!(take(511), None);
        assert_eq!(take(1023), Some(1));
        assert_eq!(take(PAGE), Some(3584));
        assert_eq!(take(PAGE), Some(3073));
        assert_eq!(take(1535), Some(513));
        assert_eq!(take(2048), Some(1536));
        assert_eq!(take(2048), Some(512));
        assert_eq!(take(PAGE), None);
    }

    #[test]
    fn only_so_much_waits() {
        let mut waiting = Waiting::default();
        let mut count = 0;
        while !waiting.is_full() {
            let object = digest(Algorithm::Sha256, b"");
            waiting.push(Small { object: object.into(), sha256: [0; 32], bytes: vec![0; 1000] });
            count += 1;
        }
        assert_eq!(count, WAITING_MAX / 1000 + 1);
        waiting.take(PAGE).unwrap();
        assert!(!waiting.is_full());
    }
}
