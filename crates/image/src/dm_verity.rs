//! dm-verity hash trees, by which the kernel verifies each read of a partition.
//!
//! The trees have blocks of 4096 bytes and SHA-256. Source: Linux `Documentation/admin-guide/device-mapper/verity.rst`,
//! "Hash Tree" and "On-disk format", hash type 1; cryptsetup `lib/verity/verity.c`, `struct verity_sb`.

use std::fmt;
use std::io::{self, Write};

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

/// Data without a hash tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of data are not a positive number of blocks of 4096 bytes")]
pub struct HashTreeError {
    /// Length of the data.
    pub bytes: u64,
}

/// Computes a hash tree while the data is written. It keeps 32 bytes per block of data, 8 MiB per GiB, because the
/// tree begins with its highest level.
pub struct HashTreeBuilder {
    /// SHA-256 of the salt, with which each hash begins.
    salted: Sha256,
    salt: [u8; SALT as usize],
    uuid: [u8; 16],
    /// The beginning of a block.
    block: Vec<u8>,
    /// The digests of all complete blocks.
    digests: Vec<u8>,
}

impl HashTreeBuilder {
    /// Begins a tree with this salt. The superblock contains the UUID, which has no effect on the root hash.
    #[must_use]
    pub fn new(salt: [u8; SALT as usize], uuid: [u8; 16]) -> Self {
        let mut salted = Sha256::new();
        salted.update(salt);
        let block = Vec::with_capacity(BLOCK_SIZE);
        Self { salted, salt, uuid, block, digests: Vec::new() }
    }

    /// Adds the next bytes of the data.
    pub fn update(&mut self, mut bytes: &[u8]) {
        if !self.block.is_empty() {
            let count = bytes.len().min(BLOCK_SIZE - self.block.len());
            let (head, rest) = bytes.split_at(count);
            self.block.extend_from_slice(head);
            bytes = rest;
            if self.block.len() < BLOCK_SIZE {
                return;
            }
            self.digests.extend_from_slice(&hash(&self.salted, &self.block, 0));
            self.block.clear();
        }
        let mut blocks = bytes.chunks_exact(BLOCK_SIZE);
        for block in &mut blocks {
            self.digests.extend_from_slice(&hash(&self.salted, block, 0));
        }
        self.block.extend_from_slice(blocks.remainder());
    }

    /// Completes the tree.
    ///
    /// # Errors
    /// [`HashTreeError`] if the data is empty, or does not end with a whole block.
    pub fn finish(self) -> Result<HashTree, HashTreeError> {
        let Self { salted, salt, uuid, block, digests } = self;
        let blocks = (digests.len() / DIGEST) as u64;
        if blocks == 0 || !block.is_empty() {
            return Err(HashTreeError { bytes: blocks * BLOCK_SIZE as u64 + block.len() as u64 });
        }
        let mut levels = Vec::new();
        let mut level = digests;
        while level.len() > DIGEST {
            let above = level.chunks(BLOCK_SIZE).flat_map(|block| {
                let padding = BLOCK_SIZE - block.len();
                hash(&salted, block, padding)
            });
            let above = above.collect();
            levels.push(std::mem::replace(&mut level, above));
        }
        let mut root = [0; DIGEST];
        root.copy_from_slice(&level);
        Ok(HashTree { root: RootHash(root), blocks, salt, uuid, levels })
    }
}

impl fmt::Debug for HashTreeBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.digests.len() / DIGEST;
        f.debug_struct("HashTreeBuilder").field("blocks", &blocks).finish_non_exhaustive()
    }
}

/// Hashes a block whose last `padding` bytes are zeros.
fn hash(salted: &Sha256, block: &[u8], padding: usize) -> [u8; DIGEST] {
    const ZEROS: [u8; BLOCK_SIZE] = [0; BLOCK_SIZE];
    let mut hasher = salted.clone();
    hasher.update(block);
    hasher.update(&ZEROS[..padding]);
    hasher.finalize().into()
}

/// A hash tree with its superblock, as a hash device contains them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HashTree {
    root: RootHash,
    /// Number of data blocks.
    blocks: u64,
    salt: [u8; SALT as usize],
    uuid: [u8; 16],
    /// The digests of each level without padding. The first level has those of the data blocks.
    levels: Vec<Vec<u8>>,
}

impl HashTree {
    /// Returns the root hash.
    #[must_use]
    pub const fn root(&self) -> RootHash {
        self.root
    }

    /// Returns the length of what [`write`](Self::write) writes, in bytes: a multiple of [`BLOCK_SIZE`].
    #[must_use]
    pub fn size(&self) -> u64 {
        let levels = self.levels.iter().map(|it| it.len().next_multiple_of(BLOCK_SIZE));
        (BLOCK_SIZE + levels.sum::<usize>()) as u64
    }

    /// Writes the superblock in a block, and the levels, the highest first.
    ///
    /// # Errors
    /// The error of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut first = self.superblock().to_vec();
        first.resize(BLOCK_SIZE, 0);
        out.write_all(&first)?;
        for level in self.levels.iter().rev() {
            out.write_all(level)?;
            let padding = level.len().next_multiple_of(BLOCK_SIZE) - level.len();
            out.write_all(&vec![0; padding])?;
        }
        Ok(())
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

    /// Builds the tree of a pattern, given in pieces.
    fn build(length: usize, piece: usize) -> Result<HashTree, HashTreeError> {
        let mut builder = HashTreeBuilder::new(salt(), [7; 16]);
        pattern(length).chunks(piece).for_each(|piece| builder.update(piece));
        builder.finish()
    }

    #[test]
    fn trees_are_those_of_another_implementation() {
        for (blocks, root, size, digest) in TREES {
            let tree = build(blocks * BLOCK_SIZE, 1 << 20).unwrap();
            assert_eq!(tree.root().to_string(), root, "{blocks}");
            let mut bytes = Vec::new();
            tree.write(&mut bytes).unwrap();
            let size = BLOCK_SIZE as u64 * (size + 1);
            assert_eq!((tree.size(), bytes.len() as u64), (size, size), "{blocks}");
            let found = crate::digest::Digest::sha256(&bytes[BLOCK_SIZE..]);
            assert_eq!(found.to_string(), format!("sha256:{digest}"), "{blocks}");
        }
    }

    #[test]
    fn pieces_do_not_matter() {
        let whole = build(129 * BLOCK_SIZE, 129 * BLOCK_SIZE).unwrap();
        for piece in [1, 4095, 4096, 4097, 10_000] {
            assert_eq!(build(129 * BLOCK_SIZE, piece).unwrap(), whole, "{piece}");
        }
    }

    #[test]
    fn only_whole_blocks_have_a_tree() {
        for bytes in [0, 1, 4095, 4097] {
            let error = HashTreeError { bytes: bytes as u64 };
            assert_eq!(build(bytes, 1000).unwrap_err(), error, "{bytes}");
        }
    }

    /// The fields at their offsets, as cryptsetup's struct has them.
    #[test]
    fn the_superblock_describes_the_tree() {
        let superblock = build(129 * BLOCK_SIZE, 4096).unwrap().superblock();
        let mut expect = b"verity\0\0\x01\0\0\0\x01\0\0\0".to_vec();
        expect.extend([7; 16]);
        expect.extend(b"sha256");
        expect.resize(64, 0);
        expect.extend(b"\0\x10\0\0\0\x10\0\0\x81\0\0\0\0\0\0\0\x20\0\0\0\0\0\0\0");
        expect.extend(salt());
        expect.resize(512, 0);
        assert_eq!(superblock.as_slice(), expect);
    }

    #[test]
    fn the_halves_of_a_root_hash_are_in_order() {
        let [data, tree] = RootHash(salt()).halves();
        assert_eq!((data[0], data[15], tree[0], tree[15]), (0, 15, 16, 31));
    }
}
