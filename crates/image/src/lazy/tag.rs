//! Tags of blocks: short hashes with a secret key, by which a process recognizes bytes that it has verified before.
//!
//! A unit is compared with its SHA-256 digest once. The tags of its blocks are made of the same bytes. When a part of
//! the unit is read again, only the blocks of that part are hashed, and about ten times as fast as by SHA-256.
//!
//! A tag is the upper half of a sum modulo 2^128: each 64-bit word of the block is multiplied by a random number of 128
//! bits. This is a universal hash (Lemire and Kaser, "Strongly universal string hashing is fast", The Computer Journal
//! 57, 2014: "Multilinear"): whatever two different blocks are, at most one in 2^63 keys gives both the same tag. The key
//! and the tags never leave the process, so no other program can choose bytes by them.

use super::UNIT;

/// Bytes of a device that have one tag. The last block of a device may be shorter.
pub const TAGGED: u64 = 4096;
/// Number of tags of a unit.
pub const TAGS: usize = 16;
const _: () = assert!(TAGGED * 16 == UNIT);

/// Number of 64-bit words in a block.
const WORDS: usize = 512;
/// Bytes of a key.
pub const KEY: usize = WORDS * 16;

/// A secret key, for tags of one process.
pub struct TagKey(Vec<u128>);

impl std::fmt::Debug for TagKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TagKey")
    }
}

impl TagKey {
    /// Makes a key of random bytes.
    #[must_use]
    pub fn new(random: &[u8; KEY]) -> Self {
        let (numbers, _) = random.as_chunks::<16>();
        Self(numbers.iter().map(|it| u128::from_le_bytes(*it)).collect())
    }

    /// Returns the tag of a block of at most [`TAGGED`] bytes. A shorter block has the tag of the same bytes with zeros
    /// behind them. The caller knows the length of each block.
    #[must_use]
    pub fn tag(&self, block: &[u8]) -> u64 {
        let (words, rest) = block.as_chunks::<8>();
        let mut last = [0; 8];
        last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        let product = |(word, key): (&[u8; 8], &u128)| {
            key.wrapping_mul(u128::from(u64::from_le_bytes(*word)))
        };
        let of_words = words.iter().chain([&last]).zip(&self.0);
        let sum = of_words.map(product).fold(0, u128::wrapping_add);
        u64::try_from(sum >> 64).unwrap_or_default()
    }

    /// Returns the tags of a unit.
    #[must_use]
    pub fn tags(&self, unit: &[u8]) -> [u64; TAGS] {
        let mut tags = [0; TAGS];
        let blocks = unit.chunks(WORDS * 8);
        tags.iter_mut().zip(blocks).for_each(|(tag, block)| *tag = self.tag(block));
        tags
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> TagKey {
        let mut random = [0; KEY];
        random.iter_mut().zip(noise()).for_each(|(to, from)| *to = from);
        TagKey::new(&random)
    }

    /// Endless bytes of a linear congruential generator.
    fn noise() -> impl Iterator<Item = u8> {
        let next = |state: &u64| {
            Some(
                state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407),
            )
        };
        std::iter::successors(Some(1_u64), next).map(|it| it.to_le_bytes()[7])
    }

    /// Computes the definition with numbers of 32 bits, by long multiplication.
    #[expect(clippy::arithmetic_side_effects, reason = "no sum of these numbers exceeds 64 bits")]
    fn by_hand(key: &TagKey, block: &[u8]) -> u64 {
        let mut sum = [0_u32; 4];
        for (word, number) in block.chunks(8).zip(&key.0) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            let halves = [0, 4].map(|it| u32::from_le_bytes(bytes[it..it + 4].try_into().unwrap()));
            let parts =
                [0, 32, 64, 96].map(|it| u32::try_from(number >> it & 0xffff_ffff).unwrap());
            for (low, half) in halves.into_iter().enumerate() {
                let mut carry = 0_u64;
                for at in low..4 {
                    let product = u64::from(half) * u64::from(parts[at - low]);
                    let total = product + u64::from(sum[at]) + carry;
                    sum[at] = u32::try_from(total & 0xffff_ffff).unwrap();
                    carry = total >> 32;
                }
            }
        }
        u64::from(sum[3]) << 32 | u64::from(sum[2])
    }

    #[test]
    fn a_tag_is_the_upper_half_of_the_sum_of_products() {
        let key = key();
        let block: Vec<u8> = noise().skip(KEY).take(4096).collect();
        for length in [0, 1, 7, 8, 9, 100, 4088, 4095, 4096] {
            assert_eq!(key.tag(&block[..length]), by_hand(&key, &block[..length]), "{length}");
        }
        assert_eq!(key.tag(&[0xff; 4096]), by_hand(&key, &[0xff; 4096]));
    }

    #[test]
    fn each_bit_of_a_block_changes_its_tag() {
        let key = key();
        let block: Vec<u8> = noise().skip(KEY).take(4096).collect();
        let tag = key.tag(&block);
        for bit in 0..4096 * 8 {
            let mut other = block.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(key.tag(&other), tag, "bit {bit}");
        }
        // Bytes that a failing disk may return.
        assert_ne!(key.tag(&[0; 4096]), tag);
        assert_ne!(key.tag(&[&block[2048..], &block[..2048]].concat()), tag);
    }

    #[test]
    fn a_unit_has_the_tags_of_its_blocks() {
        let key = key();
        let unit: Vec<u8> = noise().take(65_536 - 5000).collect();
        let tags = key.tags(&unit);
        for (number, block) in unit.chunks(4096).enumerate() {
            assert_eq!(tags[number], key.tag(block));
        }
        // The unit ends in block 14.
        assert_eq!(tags[15], 0);
        assert!(tags[..15].iter().all(|it| *it != 0));
    }
}
