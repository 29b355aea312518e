//! dm-verity hash trees, by which the kernel verifies each read of a partition.
//!
//! The trees have blocks of 4096 bytes and SHA-256. Source: Linux `Documentation/admin-guide/device-mapper/verity.rst`,
//! "Hash Tree" and "On-disk format", hash type 1; cryptsetup `lib/verity/verity.c`, `struct verity_sb`.

use std::fmt;
use std::io;

use sha2::{Digest as _, Sha256};

/// Length of a block in bytes, for data and for hashes.
pub const BLOCK_SIZE: usize = BLOCK as usize;
const BLOCK: u32 = 4096;
/// Length of a salt in bytes, as `veritysetup` chooses it.
const SALT: u16 = 32;
/// Length of a digest in bytes.
const DIGEST: usize = 32;
/// Length of the superblock without its padding to a whole block, in bytes.
const SUPERBLOCK: usize = 512;

/// The root hash: with the salt, which is in the superblock, it authenticates all data blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RootHash([u8; DIGEST]);

impl RootHash {
    /// Returns the hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; DIGEST] {
        &self.0
    }

    /// Returns the two halves of the hash. They are the UUIDs of the data's partition and of the tree's. Source:
    /// Discoverable Partitions Specification, "Verity".
    #[must_use]
    pub fn halves(&self) -> [[u8; 16]; 2] {
        let (mut data, mut tree) = ([0; 16], [0; 16]);
        data.copy_from_slice(&self.0[..16]);
        tree.copy_from_slice(&self.0[16..]);
        [data, tree]
    }
}

impl fmt::Display for RootHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for RootHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RootHash({self})")
    }
}

/// Data that has no hash tree, or another length than was stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HashTreeError {
    /// The data is empty, or ends within a block.
    #[error("{bytes} bytes of data are not a positive number of blocks of 4096 bytes")]
    Blocks {
        /// Length of the data.
        bytes: u64,
    },
    /// There is more or less data than was stated.
    #[error("the data has {actual} bytes, not {stated}")]
    Length {
        /// Length that was stated before.
        stated: u64,
        /// Length of the data so far.
        actual: u64,
    },
}

/// Takes a part of a hash device: its offset, and its bytes, which are a whole block.
pub type TreeSink<'a> = dyn FnMut(u64, &[u8]) -> io::Result<()> + 'a;

/// Computes a hash tree while the data is written. It passes each block of the tree on when the block is complete, and
/// keeps one block of each level, because the places of all blocks follow from the length of the data. Seven levels
/// are enough for 2 EiB.
pub struct HashTreeBuilder {
    /// SHA-256 of the salt, with which each hash begins.
    salted: Sha256,
    salt: [u8; SALT as usize],
    uuid: [u8; 16],
    /// Number of data blocks.
    blocks: u64,
    /// Number of data blocks that were hashed.
    hashed: u64,
    /// The beginning of a data block.
    block: Vec<u8>,
    /// The levels from the lowest on, whose digests are those of the data blocks.
    levels: Vec<Level>,
    /// The digest of the highest level, or of the only data block.
    root: Option<[u8; DIGEST]>,
}

/// A level of a hash tree.
struct Level {
    /// Offset of the next block in the hash device.
    offset: u64,
    /// The digests in the next block.
    digests: Vec<u8>,
}

impl HashTreeBuilder {
    /// Begins the tree of `bytes` bytes with this salt. The superblock contains the UUID, which has no effect on the
    /// root hash.
    ///
    /// # Errors
    /// [`HashTreeError::Blocks`].
    pub fn new(
        salt: [u8; SALT as usize],
        uuid: [u8; 16],
        bytes: u64,
    ) -> Result<Self, HashTreeError> {
        let block_size = u64::from(BLOCK);
        if bytes == 0 || !bytes.is_multiple_of(block_size) {
            return Err(HashTreeError::Blocks { bytes });
        }
        let blocks = bytes / block_size;
        let mut counts = Vec::new();
        let mut count = blocks;
        while count > 1 {
            count = count.div_ceil(block_size / DIGEST as u64);
            counts.push(count);
        }
        // The highest level comes first, behind the superblock.
        let mut offset = block_size;
        let mut levels: Vec<_> = counts
            .iter()
            .rev()
            .map(|count| {
                let level = Level { offset, digests: Vec::with_capacity(BLOCK_SIZE) };
                offset += count * block_size;
                level
            })
            .collect();
        levels.reverse();
        let mut salted = Sha256::new();
        salted.update(salt);
        let block = Vec::with_capacity(BLOCK_SIZE);
        Ok(Self { salted, salt, uuid, blocks, hashed: 0, block, levels, root: None })
    }

    /// Returns the length of the hash device with the superblock and all levels, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        let mut count = self.blocks;
        let mut size = u64::from(BLOCK);
        while count > 1 {
            count = count.div_ceil(u64::from(BLOCK) / DIGEST as u64);
            size += count * u64::from(BLOCK);
        }
        size
    }

    /// Adds the next bytes of the data.
    ///
    /// # Errors
    /// Those of `sink`, or [`HashTreeError::Length`] for more data than was stated.
    pub fn update(&mut self, mut bytes: &[u8], sink: &mut TreeSink<'_>) -> io::Result<()> {
        if !self.block.is_empty() {
            let count = bytes.len().min(BLOCK_SIZE - self.block.len());
            let (head, rest) = bytes.split_at(count);
            self.block.extend_from_slice(head);
            bytes = rest;
            if self.block.len() < BLOCK_SIZE {
                return Ok(());
            }
            let digest = hash(&self.salted, &self.block);
            self.block.clear();
            self.add_block(digest, sink)?;
        }
        let mut blocks = bytes.chunks_exact(BLOCK_SIZE);
        for block in &mut blocks {
            self.add_block(hash(&self.salted, block), sink)?;
        }
        self.block.extend_from_slice(blocks.remainder());
        Ok(())
    }

    /// Adds the digest of a data block.
    fn add_block(&mut self, digest: [u8; DIGEST], sink: &mut TreeSink<'_>) -> io::Result<()> {
        if self.hashed == self.blocks {
            return Err(self.wrong_length(BLOCK_SIZE));
        }
        self.hashed += 1;
        self.add(0, digest, sink)
    }

    /// Adds a digest to a level, and completes all blocks that are full then.
    fn add(
        &mut self,
        level: usize,
        mut digest: [u8; DIGEST],
        sink: &mut TreeSink<'_>,
    ) -> io::Result<()> {
        for level in &mut self.levels[level..] {
            level.digests.extend_from_slice(&digest);
            if level.digests.len() < BLOCK_SIZE {
                return Ok(());
            }
            digest = level.complete(&self.salted, sink)?;
        }
        self.root = Some(digest);
        Ok(())
    }

    /// Completes the tree, with the superblock.
    ///
    /// # Errors
    /// Those of `sink`, or [`HashTreeError::Length`] for less data than was stated.
    pub fn finish(mut self, sink: &mut TreeSink<'_>) -> io::Result<RootHash> {
        for at in 0..self.levels.len() {
            if !self.levels[at].digests.is_empty() {
                let digest = self.levels[at].complete(&self.salted, sink)?;
                self.add(at + 1, digest, sink)?;
            }
        }
        match self.root {
            Some(root) if self.hashed == self.blocks && self.block.is_empty() => {
                let mut first = self.superblock().to_vec();
                first.resize(BLOCK_SIZE, 0);
                sink(0, &first)?;
                Ok(RootHash(root))
            }
            _ => Err(self.wrong_length(0)),
        }
    }

    /// Returns the error for data of another length, with `more` bytes that were not counted yet.
    fn wrong_length(&self, more: usize) -> io::Error {
        let [stated, hashed] = [self.blocks, self.hashed].map(|it| it * u64::from(BLOCK));
        let actual = hashed + (self.block.len() + more) as u64;
        io::Error::other(HashTreeError::Length { stated, actual })
    }

    /// Section 4.7 of `docs/format/erofs-profile.md` has the fields.
    fn superblock(&self) -> [u8; SUPERBLOCK] {
        let mut bytes = [0; SUPERBLOCK];
        let block = BLOCK.to_le_bytes();
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, b"verity\0\0");
        put(8, &1u32.to_le_bytes());
        put(12, &1u32.to_le_bytes());
        put(16, &self.uuid);
        put(32, b"sha256");
        put(64, &block);
        put(68, &block);
        put(72, &self.blocks.to_le_bytes());
        put(80, &SALT.to_le_bytes());
        put(88, &self.salt);
        bytes
    }
}

impl Level {
    /// Passes on the next block, with zeros at its end, and returns its digest.
    fn complete(&mut self, salted: &Sha256, sink: &mut TreeSink<'_>) -> io::Result<[u8; DIGEST]> {
        self.digests.resize(BLOCK_SIZE, 0);
        sink(self.offset, &self.digests)?;
        let digest = hash(salted, &self.digests);
        self.offset += u64::from(BLOCK);
        self.digests.clear();
        Ok(digest)
    }
}

impl fmt::Debug for HashTreeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut builder = f.debug_struct("HashTreeBuilder");
        builder.field("blocks", &self.blocks).field("hashed", &self.hashed).finish_non_exhaustive()
    }
}

/// Hashes a block.
fn hash(salted: &Sha256, block: &[u8]) -> [u8; DIGEST] {
    let mut hasher = salted.clone();
    hasher.update(block);
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of data blocks, the root hash, the blocks of the tree, and their SHA-256. A program of 20 lines with
    /// Python's hashlib computed them from the kernel's description, and `veritysetup format --no-superblock` of
    /// cryptsetup 2.6.1 has the same results.
    const TREES: [(usize, &str, u64, &str); 7] = [
        (
            1,
            "f9629ec228b5c00268d95f3299754de3ec27dd878f059ded6c9b3955d01775ee",
            0,
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        ),
        (
            2,
            "f3c6c4e5ec27940a193ff84f3a96c5956ed6854bbc1d46c3c5ef2dec6e670fc0",
            1,
            "2e4399340ca829b4a30106f706a6d267b1241992ffbeef0a7cc625ac44cb66c6",
        ),
        (
            127,
            "05193f3b12e6502da3858e23d1941d07b4e00f42ef35a2254ca91369e391f7e2",
            1,
            "cd84cf53b3f783a843d5dab9cc72a623a88a56470be02f22b95f5af96a39afa4",
        ),
        (
            128,
            "aeed836743e049ba4415cf73bdbeed1b509b9a2c614611abde9367616afbfa99",
            1,
            "67719cbae2d2732a8e974fa0d4ade427f367b3232f0b555f269d2711d221fcdf",
        ),
        (
            129,
            "47dc6c1d9c2cc61492a6d2448ad946ed1192d281478f00c3a8a29316890a435b",
            3,
            "dc224dfb0f3991edd311ecaac76ebeb994b4000171003a79b9e9ad3090829448",
        ),
        (
            16384,
            "817289901a4ebe4ba3674bb0d872f06ad62191cd5bdcc7eea89d3007b7032239",
            129,
            "2515eba008ae1ab82df94730f547d86c943eb2c01e3fa3df3e54e9bab80daae9",
        ),
        (
            16385,
            "4cb89ba5dd50276027e74fa4a5dd1107e55032057f716997bbc5e236b2f52fc7",
            132,
            "08450306abce9078cd19e74ca68d2b989e4229db72ce477467a7a0da30492f29",
        ),
    ];

    fn salt() -> [u8; 32] {
        std::array::from_fn(|at| u8::try_from(at).unwrap())
    }

    fn pattern(length: usize) -> Vec<u8> {
        (0..251).cycle().take(length).collect()
    }

    /// Builds the tree of a pattern, given in pieces, and returns its root hash and the hash device.
    fn build(length: usize, piece: usize) -> (RootHash, Vec<u8>) {
        let mut builder = HashTreeBuilder::new(salt(), [7; 16], length as u64).unwrap();
        let mut device = vec![None; usize::try_from(builder.size()).unwrap() / BLOCK_SIZE];
        let mut most = 0;
        let mut sink = |offset: u64, block: &[u8]| {
            let at = usize::try_from(offset).unwrap();
            assert_eq!((at % BLOCK_SIZE, block.len()), (0, BLOCK_SIZE));
            // Each block comes once.
            assert_eq!(device[at / BLOCK_SIZE].replace(block.to_vec()), None);
            Ok(())
        };
        for piece in pattern(length).chunks(piece) {
            builder.update(piece, &mut sink).unwrap();
            let kept: usize = builder.levels.iter().map(|it| it.digests.capacity()).sum();
            most = most.max(kept + builder.block.capacity());
        }
        let root = builder.finish(&mut sink).unwrap();
        // The memory does not depend on the length: a block of data, and one of each of three levels.
        assert!(most <= 4 * BLOCK_SIZE, "{most}");
        (root, device.into_iter().flat_map(Option::unwrap).collect())
    }

    #[test]
    fn trees_are_those_of_another_implementation() {
        for (blocks, root, size, digest) in TREES {
            let (found, device) = build(blocks * BLOCK_SIZE, 1 << 20);
            assert_eq!(found.to_string(), root, "{blocks}");
            assert_eq!(device.len() as u64, BLOCK_SIZE as u64 * (size + 1), "{blocks}");
            let found = crate::digest::Digest::sha256(&device[BLOCK_SIZE..]);
            assert_eq!(found.to_string(), format!("sha256:{digest}"), "{blocks}");
        }
    }

    #[test]
    fn pieces_do_not_matter() {
        let whole = build(129 * BLOCK_SIZE, 129 * BLOCK_SIZE);
        for piece in [1, 4095, 4096, 4097, 10_000] {
            assert!(build(129 * BLOCK_SIZE, piece) == whole, "{piece}");
        }
    }

    #[test]
    fn only_whole_blocks_have_a_tree() {
        for bytes in [0, 1, 4095, 4097] {
            let error = HashTreeBuilder::new(salt(), [7; 16], bytes).unwrap_err();
            assert_eq!(error, HashTreeError::Blocks { bytes });
        }
    }

    #[test]
    fn data_of_another_length_has_no_tree() {
        let check = |stated: u64, actual: usize| {
            let mut builder = HashTreeBuilder::new(salt(), [7; 16], stated).unwrap();
            let mut sink = |_: u64, _: &[u8]| Ok(());
            let written = builder.update(&pattern(actual), &mut sink);
            let error = written.and_then(|()| builder.finish(&mut sink)).unwrap_err().to_string();
            assert_eq!(error, format!("the data has {actual} bytes, not {stated}"));
        };
        check(4096, 0);
        check(4096, 4095);
        check(4096, 4097);
        check(4096, 8192);
        check(8192, 4096);
        check(129 << 12, 128 << 12);
        check(128 << 12, 129 << 12);
    }

    /// The fields at their offsets, as cryptsetup's struct has them.
    #[test]
    fn the_superblock_describes_the_tree() {
        let (_, device) = build(129 * BLOCK_SIZE, 4096);
        let mut expect = b"verity\0\0\x01\0\0\0\x01\0\0\0".to_vec();
        expect.extend([7; 16]);
        expect.extend(b"sha256");
        expect.resize(64, 0);
        expect.extend(b"\0\x10\0\0\0\x10\0\0\x81\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0");
        expect.extend(salt());
        expect.resize(BLOCK_SIZE, 0);
        assert!(device[..BLOCK_SIZE] == expect);
    }

    #[test]
    fn the_halves_of_a_root_hash_are_in_order() {
        let [data, tree] = RootHash(salt()).halves();
        assert_eq!((data[0], data[15], tree[0], tree[15]), (0, 15, 16, 31));
    }
}
