//! Compares parts of a file without the others, by one level of its Merkle tree.

use super::{Algorithm, BLOCK_SIZE, VerityDigest};

/// The most bytes of hashes of blocks that [`Hasher::keeping`](super::Hasher::keeping) keeps: SHA-256 of a file of 128 MiB.
/// Larger files have 64 KiB of hashes for each GiB.
pub const KEPT_MAX: u64 = 1 << 20;

/// Hashes of all parts of a file: one level of its Merkle tree. With them, any part can be compared without the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartHashes {
    pub(super) algorithm: Algorithm,
    pub(super) size: u64,
    pub(super) level: usize,
    pub(super) hashes: Vec<u8>,
}

impl PartHashes {
    /// Length of each part but the last in bytes: a multiple of [`BLOCK_SIZE`].
    #[must_use]
    pub fn part(&self) -> u64 {
        let fan = (BLOCK_SIZE / self.algorithm.digest_len()) as u64;
        (0..self.level).fold(BLOCK_SIZE as u64, |part, _| part.saturating_mul(fan))
    }

    /// Bytes that the hashes take in memory.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Whether there are none: of an empty file, or where none were kept.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Whether `bytes` are those of the file from `offset` on. Both begin and end where parts do, or at the end of the file.
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

    /// The hash of a part, of whose Merkle tree this is a level.
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
        // All of them, or of a large file some at both ends.
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
        // What is no part: cut short, moved, or longer than the file.
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

    /// A hash block of SHA-256 has 128 hashes, and one of SHA-512 has 64.
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
