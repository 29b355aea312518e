//! Hashes zeros without reading them, for holes in files.

use std::sync::OnceLock;

use super::{Algorithm, BLOCK_SIZE, Hasher, Level, VerityDigest};

pub(super) const ZEROS: [u8; BLOCK_SIZE] = [0; BLOCK_SIZE];

/// Levels of the tree of a file of 2^64 bytes. With SHA-512, which has 64 hashes in a block, a hash at level 9 covers
/// 64^9 blocks, which are 2^66 bytes.
const LEVELS: usize = 10;

/// Returns the hash at each level of a tree whose data is all zeros: the hash of a block of zeros, the hash of a block
/// of such hashes, and so on.
pub(super) fn hashes(algorithm: Algorithm) -> &'static [VerityDigest; LEVELS] {
    static SHA256: OnceLock<[VerityDigest; LEVELS]> = OnceLock::new();
    static SHA512: OnceLock<[VerityDigest; LEVELS]> = OnceLock::new();
    let known = match algorithm {
        Algorithm::Sha256 => &SHA256,
        Algorithm::Sha512 => &SHA512,
    };
    known.get_or_init(|| {
        let mut hashes = [algorithm.hash(&ZEROS); LEVELS];
        for level in 1..LEVELS {
            let below = hashes[level - 1];
            let fan = BLOCK_SIZE / algorithm.digest_len();
            hashes[level] = algorithm.hash(&below.as_bytes().repeat(fan));
        }
        hashes
    })
}

impl Hasher {
    /// Hashes `count` zeros, with the same result as [`update`](Self::update). The time does not depend on `count`,
    /// except for the hashes that are [kept](Self::keeping).
    pub fn zeros(&mut self, mut count: u64) {
        if self.filled > 0 {
            let room = BLOCK_SIZE - self.filled;
            let taken = usize::try_from(count).map_or(room, |count| count.min(room));
            self.update(&ZEROS[..taken]);
            count -= taken as u64;
            if self.filled > 0 {
                return;
            }
        }
        let fan = (BLOCK_SIZE / self.algorithm.digest_len()) as u64;
        let highest = self.kept.as_ref().map_or(LEVELS - 1, |it| it.0);
        let mut before = self.size / BLOCK_SIZE as u64;
        let mut blocks = count / BLOCK_SIZE as u64;
        while blocks > 0 {
            // This finds the largest part of the tree that begins with this block and consists only of zeros.
            let (mut level, mut part) = (0, 1_u64);
            while level < highest
                && let Some(larger) = part.checked_mul(fan)
                && larger <= blocks
                && before.is_multiple_of(larger)
            {
                (level, part) = (level + 1, larger);
            }
            self.push_above(level);
            self.push(level, &hashes(self.algorithm)[level]);
            before += part;
            blocks -= part;
        }
        let rest = count % BLOCK_SIZE as u64;
        self.size += count - rest;
        self.update(&ZEROS[..usize::try_from(rest).unwrap_or(BLOCK_SIZE)]);
    }

    /// Prepares the levels below `level`, each of them full or empty, for a hash that is inserted at `level`
    /// directly.
    fn push_above(&mut self, level: usize) {
        while self.levels.len() < level {
            self.levels.push(Level { block: Box::new(ZEROS), filled: 0 });
        }
        for below in 0..level {
            let Level { block, filled } = &mut self.levels[below];
            if *filled > 0 {
                debug_assert_eq!(*filled, BLOCK_SIZE, "level {below} of a whole part");
                let hash = self.algorithm.hash(&block[..]);
                *filled = 0;
                self.push(below + 1, &hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `size` bytes: the bytes 0 to 250, repeated.
    fn pattern(size: u64) -> Vec<u8> {
        (0..=250).cycle().take(usize::try_from(size).unwrap()).collect()
    }

    /// Hashes zeros between other bytes, as bytes and as a count, at all borders of blocks and of parts of the tree.
    #[test]
    fn zeros_need_not_be_read() {
        let block = BLOCK_SIZE as u64;
        for algorithm in [Algorithm::Sha256, Algorithm::Sha512] {
            let fan = block / algorithm.digest_len() as u64;
            let counts = [
                0,
                1,
                block - 1,
                block,
                block + 1,
                fan * block - 1,
                fan * block,
                (fan + 1) * block,
                2 * fan * block + 7,
                (fan * fan + fan + 1) * block,
            ];
            for before in [0, block + 1, fan * block - 1, (fan + 2) * block] {
                for count in counts {
                    for after in [0, fan * block + 1] {
                        check(algorithm, [before, count, after]);
                    }
                }
            }
            check(algorithm, [0, 3 * fan * fan * block + 5, fan * fan * block]);
        }
    }

    #[track_caller]
    fn check(algorithm: Algorithm, [before, zeros, after]: [u64; 3]) {
        let make = |keeps: bool| match keeps {
            true => Hasher::keeping(algorithm, before + zeros + after),
            false => Hasher::new(algorithm),
        };
        let piece = vec![0; 1 << 20];
        for keeps in [false, true] {
            let (mut read, mut skipped) = (make(keeps), make(keeps));
            for hasher in [&mut read, &mut skipped] {
                hasher.update(&pattern(before));
            }
            let mut left = zeros;
            while left > 0 {
                let count = left.min(piece.len() as u64);
                read.update(&piece[..usize::try_from(count).unwrap()]);
                left -= count;
            }
            skipped.zeros(zeros / 3);
            skipped.zeros(zeros - zeros / 3);
            assert_eq!(skipped.size(), read.size());
            for hasher in [&mut read, &mut skipped] {
                hasher.update(&pattern(after));
            }
            let message = format!("{algorithm}: {before}, {zeros} zeros, {after}, {keeps}");
            assert_eq!(skipped.finish_kept(), read.finish_kept(), "{message}");
        }
    }

    /// Compares with the digests that `fsverity digest` of fsverity-utils 1.5 prints for files that consist of one
    /// hole.
    #[test]
    fn holes_of_terabytes() {
        for (size, expect) in [
            (4096, "babc284ee4ffe7f449377fbf6692715b43aec7bc39c094a95878904d34bac97e"),
            (4 << 20, "c5cdc3513cdb09b6e3058b4523e75b27829e856bbc4d056c7b2123b829d10fa7"),
            ((1 << 30) + 1, "51e181760e4ab01a52b24ba0e01316cfd84608a87191db449ada61291c264565"),
        ] {
            let mut hasher = Hasher::new(Algorithm::Sha256);
            hasher.zeros(size);
            assert_eq!(hasher.finish().to_string(), expect, "{size}");
        }
        // The largest file, which would take years to read.
        let mut hasher = Hasher::new(Algorithm::Sha512);
        hasher.update(b"x");
        hasher.zeros((1 << 63) - 2);
        assert_eq!(hasher.size(), (1 << 63) - 1);
        assert_eq!(hasher.finish().as_bytes().len(), 64);
    }
}
