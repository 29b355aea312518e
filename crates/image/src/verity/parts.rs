//! Verifies parts of a file without reading the rest, from one level of the file's Merkle tree.

use super::{Algorithm, BLOCK_SIZE, VerityDigest};

/// Largest size in bytes of the block hashes that [`Hasher::keeping`](super::Hasher::keeping) keeps: SHA-256 of a
/// file of 128 MiB. For larger files it keeps the next level, with SHA-256 64 KiB of hashes per GiB.
pub const KEPT_MAX: u64 = 1 << 20;

/// The hashes of all parts of a file: one level of its Merkle tree, which verifies each part without the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartHashes {
    pub(super) algorithm: Algorithm,
    pub(super) size: u64,
    pub(super) level: usize,
    pub(super) hashes: Vec<u8>,
}

impl PartHashes {
    /// Returns the length in bytes of each part except the last: a multiple of [`BLOCK_SIZE`].
    #[must_use]
    pub fn part(&self) -> u64 {
        let fan = (BLOCK_SIZE / self.algorithm.digest_len()) as u64;
        (0..self.level).fold(BLOCK_SIZE as u64, |part, _| part.saturating_mul(fan))
    }

    /// Returns the total length of the hashes in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Whether there are no hashes, because the file is empty or none were kept.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Whether `bytes` equal the file's bytes at `offset`. False unless `offset` is at the start of a part, and the
    /// end of `bytes` at the end of a part or of the file.
    #[must_use]
    pub fn match_at(&self, offset: u64, bytes: &[u8]) -> bool {
        let part = self.part();
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= self.size);
        let is_whole = end.is_some_and(|end| end == self.size || end.is_multiple_of(part));
        if !offset.is_multiple_of(part) || !is_whole {
            return false;
        }
        let digest = self.algorithm.digest_len();
        let first = usize::try_from(offset / part).unwrap_or(usize::MAX);
        let known = self.hashes.chunks_exact(digest).skip(first);
        let parts = bytes.chunks(usize::try_from(part).unwrap_or(usize::MAX));
        let mut compared = 0;
        for (bytes, known) in parts.clone().zip(known) {
            if self.hash(self.level, bytes).as_bytes() != known {
                return false;
            }
            compared += 1;
        }
        compared == parts.len()
    }

    /// Computes the hash at `level` of the Merkle tree from the data `bytes` below it.
    fn hash(&self, level: usize, bytes: &[u8]) -> VerityDigest {
        let mut block = [0; BLOCK_SIZE];
        let Some(below) = level.checked_sub(1) else {
            if let Ok(whole) = <&[u8; BLOCK_SIZE]>::try_from(bytes) {
                return self.algorithm.hash(whole);
            }
            block[..bytes.len()].copy_from_slice(bytes);
            return self.algorithm.hash(&block);
        };
        let digest = self.algorithm.digest_len();
        let fan = BLOCK_SIZE / digest;
        let length = (0..below).fold(BLOCK_SIZE, |length, _| length.saturating_mul(fan));
        for (bytes, place) in bytes.chunks(length).zip(block.chunks_exact_mut(digest)) {
            place.copy_from_slice(self.hash(below, bytes).as_bytes());
        }
        self.algorithm.hash(&block)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Hasher, digest};
    use super::*;

    fn bytes(size: usize) -> Vec<u8> {
        (0..size).map(|at| u8::try_from(at % 251).unwrap()).collect()
    }

    fn check(algorithm: Algorithm, size: usize, part: u64) {
        let mut bytes = bytes(size);
        let mut hasher = Hasher::keeping(algorithm, size as u64);
        hasher.update(&bytes);
        let (whole, hashes) = hasher.finish_kept();
        assert_eq!(whole, digest(algorithm, &bytes), "the digest is the same");
        assert_eq!((hashes.part(), hashes.is_empty()), (part, size == 0), "{size}");
        assert!(hashes.len() as u64 <= KEPT_MAX);
        let step = usize::try_from(part).unwrap();
        // Check all parts, or some at both ends of a large file.
        let places = (0..size).step_by(step);
        let some = places.clone().take(300).chain(places.rev().take(2));
        for at in some {
            let end = size.min(at + step);
            assert!(hashes.match_at(at as u64, &bytes[at..end]), "{at} of {size}");
            bytes[end - 1] ^= 1;
            assert!(!hashes.match_at(at as u64, &bytes[at..end]), "{at} of {size}");
            bytes[end - 1] ^= 1;
        }
        assert!(hashes.match_at(0, &bytes), "several parts");
        // Bytes do not match if they are not exactly a part: if they are cut short, moved, or extend beyond the file.
        if size > 0 {
            let is_part = (size as u64 - 1).is_multiple_of(part);
            assert_eq!(hashes.match_at(0, &bytes[..size - 1]), is_part);
            assert!(!hashes.match_at(1, &bytes[1..]));
            assert!(!hashes.match_at(0, &[&bytes[..], &[0]].concat()));
        }
    }

    #[test]
    fn parts_of_files_are_compared_alone() {
        for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
            for size in [0, 1, 4095, 4096, 4097, 8192, 524_288, 1_000_001] {
                check(algorithm, size, 4096);
            }
        }
    }

    /// A block has 128 hashes of SHA-256 or 64 of SHA-512.
    #[test]
    fn large_files_have_larger_parts() {
        check(Algorithm::Sha256, 128 << 20, 4096);
        check(Algorithm::Sha256, (128 << 20) + 1, 128 * 4096);
        check(Algorithm::Sha512, (64 << 20) + 4097, 64 * 4096);
    }

    #[test]
    fn hashes_that_were_not_kept_match_nothing() {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        hasher.update(b"x");
        assert!(!hasher.finish_kept().1.match_at(0, b"x"));
    }
}
