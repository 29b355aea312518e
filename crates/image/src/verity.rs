//! fs-verity digests, computed in user space. They name objects and images.
//!
//! A digest authenticates a file's size and every byte of the file through a Merkle tree of 4096-byte blocks. Source:
//! Linux `Documentation/filesystems/fsverity.rst`, "Merkle tree" and "fs-verity descriptor".

mod parts;
mod zeros;

use std::fmt;
use std::marker::PhantomData;

use sha2::{Digest as _, Sha256, Sha512};

pub use parts::{KEPT_MAX, PartHashes};

/// Bytes in a block of the Merkle tree, for data and for hashes. composefs uses no other size.
pub const BLOCK_SIZE: usize = 4096;

/// The hash algorithm of a store, for all of its objects and images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Algorithm {
    /// SHA-256, 32 bytes: the default, and the only algorithm of devices.
    #[default]
    Sha256,
    /// SHA-512, 64 bytes.
    Sha512,
}

impl Algorithm {
    /// Returns the length of a digest in bytes.
    #[must_use]
    pub const fn digest_len(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// Returns the kernel's number for the algorithm: `FS_VERITY_HASH_ALG_*` in `linux/fsverity.h`.
    #[must_use]
    pub const fn kernel_id(self) -> u8 {
        match self {
            Self::Sha256 => 1,
            Self::Sha512 => 2,
        }
    }

    /// Returns the name that commands and the store's `meta` use: `sha256` or `sha512`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    fn hash(self, block: &[u8]) -> VerityDigest {
        let mut bytes = [0; 64];
        match self {
            Self::Sha256 => bytes[..32].copy_from_slice(&Sha256::digest(block)),
            Self::Sha512 => bytes.copy_from_slice(&Sha512::digest(block)),
        }
        VerityDigest { algorithm: self, bytes }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The fs-verity digest of a whole file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VerityDigest {
    algorithm: Algorithm,
    bytes: [u8; 64],
}

/// Text or bytes that are not an fs-verity digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerityDigestError {
    /// The length is not 32 or 64 bytes, or not that of the algorithm.
    #[error("an fs-verity digest has 32 bytes (sha256) or 64 (sha512), not {0}")]
    Length(usize),
    /// A character that is not a hexadecimal digit of either case; the number is its position in bytes.
    #[error("an fs-verity digest is hexadecimal, but byte {0} is not a digit")]
    NotHex(usize),
}

impl VerityDigest {
    /// Wraps the bytes of a digest; the length determines the algorithm.
    ///
    /// # Errors
    /// [`VerityDigestError::Length`] unless the length is 32 or 64.
    pub fn from_bytes(digest: &[u8]) -> Result<Self, VerityDigestError> {
        let algorithm = match digest.len() {
            32 => Algorithm::Sha256,
            64 => Algorithm::Sha512,
            other => return Err(VerityDigestError::Length(other)),
        };
        let mut bytes = [0; 64];
        bytes[..digest.len()].copy_from_slice(digest);
        Ok(Self { algorithm, bytes })
    }

    /// Parses a digest of 64 or 128 hexadecimal digits of either case.
    ///
    /// # Errors
    /// [`VerityDigestError`] if the text has another length or another character.
    pub fn from_hex(text: &[u8]) -> Result<Self, VerityDigestError> {
        if !matches!(text.len(), 64 | 128) {
            return Err(VerityDigestError::Length(text.len() / 2));
        }
        let mut bytes = [0; 64];
        for (at, byte) in text.iter().enumerate() {
            let digit = match byte {
                b'0'..=b'9' => byte - b'0',
                b'a'..=b'f' => byte - b'a' + 10,
                b'A'..=b'F' => byte - b'A' + 10,
                _ => return Err(VerityDigestError::NotHex(at)),
            };
            bytes[at / 2] = bytes[at / 2] << 4 | digit;
        }
        Self::from_bytes(&bytes[..text.len() / 2])
    }

    /// Returns the hash algorithm.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns the digest: 32 or 64 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.algorithm.digest_len()]
    }
}

impl fmt::Display for VerityDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 128];
        for (pair, byte) in text.chunks_exact_mut(2).zip(self.as_bytes()) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        let length = self.as_bytes().len() * 2;
        f.write_str(std::str::from_utf8(&text[..length]).expect("hex digits are ASCII"))
    }
}

impl fmt::Debug for VerityDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for VerityDigest {
    type Err = VerityDigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::from_hex(text.as_bytes())
    }
}

/// The kinds of files that an [`Id`] names.
pub mod kind {
    /// The content of a regular file, which the store keeps once.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Object {}
    /// An EROFS image.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Image {}
    /// A file with the data of many files, which EROFS reads alongside an image.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Device {}
}

/// The name of a file in the store: its fs-verity digest. Ids of different kinds of files are different types.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id<K> {
    digest: VerityDigest,
    kind: PhantomData<K>,
}

/// The id of an object, the content of a file.
pub type ObjectId = Id<kind::Object>;
/// The id of an EROFS image.
pub type ImageId = Id<kind::Image>;
/// The id of a device, a file with the data of many files that EROFS reads alongside an image.
pub type DeviceId = Id<kind::Device>;

impl<K> Id<K> {
    /// Returns the id of the file with this digest.
    #[must_use]
    pub const fn new(digest: VerityDigest) -> Self {
        Self { digest, kind: PhantomData }
    }

    /// Wraps the bytes of a digest; the length determines the algorithm.
    ///
    /// # Errors
    /// [`VerityDigestError::Length`] unless the length is 32 or 64.
    pub fn from_bytes(digest: &[u8]) -> Result<Self, VerityDigestError> {
        VerityDigest::from_bytes(digest).map(Self::new)
    }

    /// Parses an id of 64 or 128 hexadecimal digits of either case.
    ///
    /// # Errors
    /// [`VerityDigestError`] if the text has another length or another character.
    pub fn from_hex(text: &[u8]) -> Result<Self, VerityDigestError> {
        VerityDigest::from_hex(text).map(Self::new)
    }

    /// Returns the digest of the file.
    #[must_use]
    pub const fn digest(&self) -> &VerityDigest {
        &self.digest
    }

    /// Returns the hash algorithm.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.digest.algorithm
    }

    /// Returns the digest: 32 or 64 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.digest.as_bytes()
    }
}

impl ObjectId {
    /// Returns the file's path in an object directory: the first byte in hex, a slash, and the rest in hex.
    #[must_use]
    pub fn path(&self) -> String {
        let mut hex = self.to_string();
        hex.insert(2, '/');
        hex
    }
}

impl<K> From<VerityDigest> for Id<K> {
    fn from(digest: VerityDigest) -> Self {
        Self::new(digest)
    }
}

impl<K> fmt::Display for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.digest, f)
    }
}

impl<K> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<K> std::str::FromStr for Id<K> {
    type Err = VerityDigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self::new)
    }
}

/// A level of the Merkle tree: the hashes of its last block, which is not yet hashed itself.
struct Level {
    block: Box<[u8; BLOCK_SIZE]>,
    filled: usize,
}

/// Computes the digest of a file from its bytes, which arrive in order, in pieces of any size.
pub struct Hasher {
    algorithm: Algorithm,
    size: u64,
    /// The file's last bytes, which do not fill a block yet.
    data: Box<[u8; BLOCK_SIZE]>,
    filled: usize,
    levels: Vec<Level>,
    /// The level whose hashes are kept, and those hashes.
    kept: Option<(usize, Vec<u8>)>,
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hasher")
            .field("algorithm", &self.algorithm)
            .field("size", &self.size)
            .finish()
    }
}

impl Hasher {
    /// Creates a hasher that has hashed no bytes.
    #[must_use]
    pub fn new(algorithm: Algorithm) -> Self {
        Self {
            algorithm,
            size: 0,
            data: Box::new([0; BLOCK_SIZE]),
            filled: 0,
            levels: Vec::new(),
            kept: None,
        }
    }

    /// Creates a hasher that also keeps the hashes of the parts of a file of `size` bytes. A part is a block, or the
    /// data below a block of hashes if the hashes of all blocks would take more than [`KEPT_MAX`] bytes.
    #[must_use]
    pub fn keeping(algorithm: Algorithm, size: u64) -> Self {
        let blocks = size.div_ceil(BLOCK_SIZE as u64);
        let level = usize::from(blocks > KEPT_MAX / algorithm.digest_len() as u64);
        Self { kept: Some((level, Vec::new())), ..Self::new(algorithm) }
    }

    /// Hashes the next bytes of the file.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.size += bytes.len() as u64;
        if self.filled > 0 {
            let taken = bytes.len().min(BLOCK_SIZE - self.filled);
            self.data[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled < BLOCK_SIZE {
                return;
            }
            let hash = self.algorithm.hash(&self.data[..]);
            self.push(0, &hash);
            self.filled = 0;
        }
        let mut blocks = bytes.chunks_exact(BLOCK_SIZE);
        for block in &mut blocks {
            // Most blocks differ from zeros in their first bytes, so the comparison costs nothing.
            let hash = match block == zeros::ZEROS {
                true => zeros::hashes(self.algorithm)[0],
                false => self.algorithm.hash(block),
            };
            self.push(0, &hash);
        }
        let rest = blocks.remainder();
        self.data[..rest.len()].copy_from_slice(rest);
        self.filled = rest.len();
    }

    /// Returns the number of bytes hashed so far.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    fn push(&mut self, mut level: usize, hash: &VerityDigest) {
        let mut hash = *hash;
        loop {
            if let Some((_, hashes)) = self.kept.as_mut().filter(|it| it.0 == level) {
                hashes.extend_from_slice(hash.as_bytes());
            }
            if level == self.levels.len() {
                self.levels.push(Level { block: Box::new([0; BLOCK_SIZE]), filled: 0 });
            }
            let Level { block, filled } = &mut self.levels[level];
            // A full block is hashed only when another hash follows, because the topmost block has no level above it.
            let carried = (*filled == BLOCK_SIZE).then(|| self.algorithm.hash(&block[..]));
            if carried.is_some() {
                *filled = 0;
            }
            let bytes = hash.as_bytes();
            block[*filled..*filled + bytes.len()].copy_from_slice(bytes);
            *filled += bytes.len();
            match carried {
                Some(up) => hash = up,
                None => return,
            }
            level += 1;
        }
    }

    /// Returns the digest of all bytes hashed.
    #[must_use]
    pub fn finish(self) -> VerityDigest {
        self.finish_kept().0
    }

    /// Returns the digest and the [kept](Self::keeping) hashes, which are empty if the hasher keeps none.
    #[must_use]
    pub fn finish_kept(mut self) -> (VerityDigest, PartHashes) {
        if self.filled > 0 {
            self.data[self.filled..].fill(0);
            let hash = self.algorithm.hash(&self.data[..]);
            self.push(0, &hash);
        }
        let digest = self.algorithm.digest_len();
        let mut level = 0;
        // The root hash of an empty file is zeros; that of a file of one block is the block's hash.
        let mut root = [0; 64];
        while level < self.levels.len() {
            let top = level + 1 == self.levels.len();
            let Level { block, filled } = &mut self.levels[level];
            if top && *filled == digest {
                root[..digest].copy_from_slice(&block[..digest]);
                break;
            }
            // The level above already covers all of this level.
            if *filled == 0 {
                level += 1;
                continue;
            }
            block[*filled..].fill(0);
            let hash = self.algorithm.hash(&block[..]);
            self.push(level + 1, &hash);
            level += 1;
        }
        // `struct fsverity_descriptor`: version, algorithm, log2 of the block size, salt length, 4 reserved bytes,
        // data size, root hash padded to 64 bytes; salt and the rest are zero.
        let mut descriptor = [0; 256];
        descriptor[0] = 1;
        descriptor[1] = self.algorithm.kernel_id();
        descriptor[2] = 12;
        descriptor[8..16].copy_from_slice(&self.size.to_le_bytes());
        descriptor[16..80].copy_from_slice(&root);
        let digest = self.algorithm.hash(&descriptor);
        let (level, hashes) = self.kept.take().unwrap_or_default();
        (digest, PartHashes { algorithm: self.algorithm, size: self.size, level, hashes })
    }
}

impl std::io::Write for Hasher {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Passes bytes on to a writer and computes their digest.
#[derive(Debug)]
pub struct Tee<W> {
    inner: W,
    hasher: Hasher,
}

impl<W: std::io::Write> Tee<W> {
    /// Wraps the writer `inner`.
    #[must_use]
    pub fn new(inner: W, algorithm: Algorithm) -> Self {
        Self { inner, hasher: Hasher::new(algorithm) }
    }

    /// Returns the writer, and the digest of all bytes that it accepted.
    #[must_use]
    pub fn finish(self) -> (W, VerityDigest) {
        (self.inner, self.hasher.finish())
    }
}

impl<W: std::io::Write> std::io::Write for Tee<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let taken = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner.flush()
    }
}

/// Computes the digest of a file that is in memory.
#[must_use]
pub fn digest(algorithm: Algorithm, bytes: &[u8]) -> VerityDigest {
    let mut hasher = Hasher::new(algorithm);
    hasher.update(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// Passes `size` bytes to `take` in pieces: the bytes 0 to 250, repeated.
    fn pattern(size: usize, piece: usize, mut take: impl FnMut(&[u8])) {
        let bytes: Vec<u8> = (0..=250).cycle().take(piece + 250).collect();
        let mut at = 0;
        while at < size {
            let length = piece.min(size - at);
            take(&bytes[at % 251..][..length]);
            at += length;
        }
    }

    #[track_caller]
    fn check(algorithm: Algorithm, size: usize, piece: usize, expect: &str) {
        let mut hasher = Hasher::new(algorithm);
        pattern(size, piece, |bytes| hasher.update(bytes));
        assert_eq!(hasher.size(), size as u64);
        assert_eq!(hasher.finish().to_string(), expect, "{algorithm}, {size} bytes in {piece}s");
    }

    /// Checks the example of `docs/format/verity.md`: a descriptor that was not made with Quire.
    #[test]
    fn the_hash_of_the_descriptor_is_the_object_id() {
        let descriptor = include_bytes!("../../../testdata/formats/descriptor");
        let expect = Algorithm::Sha256.hash(descriptor);
        assert_eq!(digest(Algorithm::Sha256, &[b'y'; 65]), expect);
        let text = "d35383ed2736abbd8313970a786f10579e9ed5d78b323fb24c078cc52f08dd2a";
        assert_eq!(expect.to_string(), text);
    }

    /// Digests from the Python script in `docs/format/verity.md`. fsverity-utils and composefs also publish the
    /// digest of the empty file.
    const SHA256: [(usize, &str); 10] = [
        (0, "3d248ca542a24fc62d1c43b916eae5016878e2533c88238480b26128a1f1af95"),
        (1, "b803429503d95915829b29fdbc8bbad142f3abfd11b1cadf5526582e685c0551"),
        (4095, "5f4953aad672b0188023d6cd6fbce9d09508eb7dad165b6298ce0086bc1e72db"),
        (4096, "13e9b8848ae484a36acb3f3cac0ceb2f7601e96633d15c92f9bd3dd44e492157"),
        (4097, "b0d074abef4d544404facfab6ba242f6a8ccbde90f1325cd286f3c8aa8d0f8aa"),
        (524287, "9735c4bb231d3222d1e5e23a4004d8b59dd33395d7de390530e15c2572000b47"),
        (524288, "d82861203d50ae9b60948504a704f35f5118bd229aeb1a22d6dae47b1767c4c4"),
        (524289, "4dc6905041c9c4ee73e13b53f63f5d289c46da359b664a965ead7f8cc4d799d4"),
        (67108864, "196650e8bd05f8516c0ede56deeb4d1ff2be9809dc2d827261db4a7773957567"),
        (67108865, "acba6554fbff4e8b2fc0361086b9e8ed6afbbd3196ade159c0f3e2bf9ecb2ed1"),
    ];
    const SHA512: [(usize, &str); 10] = [
        (
            0,
            "ccf9e5aea1c2a64efa2f2354a6024b90dffde6bbc017825045dce374474e13d1\
             0adb9dadcc6ca8e17a3c075fbd31336e8f266ae6fa93a6c3bed66f9e784e5abf",
        ),
        (
            1,
            "9fcf5172b085b1c8f9365eecb37a1869e193a4705654a5829f11939cd01d5c0f\
             d97276be8cd9d49f76cfc8dcfeb80f8128e3548a1de50b56912b9e3fc7bde27b",
        ),
        (
            4095,
            "1f4a9ea21af349cae1d1aa1ce4e560ce6d1e5882d8e2e7696b5afd14191f876e\
             608444553101ba7ff16386a79c7e8739b2905ed14baf8036ebd05e6f09063b2a",
        ),
        (
            4096,
            "7bf994782b368ecc4e20ce9144701b1a30524d5bbc90987625de22eebc8cf370\
             ec846c1b5e77f9099c6f6cfc0b590359b9ac8083a43e5f7fa5ec05a25dab6e03",
        ),
        (
            4097,
            "97a1e45daaa69bd7b31908cf835318ba36476984ffa7f4a5913c0187db04ce5f\
             19dc80306f493741d4ad1cdd212b7a9d2691aa3d42563d35471363fbb0fc7f1c",
        ),
        (
            262143,
            "dee2374ba55d7b74e084180e837a21ea9e37f5adf9f21d6d22f911d7c16bcef2\
             ffea3b2b9c9f65763f7c4f8add89df62660d38b093d1acc8018d0e77a5e6a979",
        ),
        (
            262144,
            "f3d1adb48d9e641487f0674034e494b8e1ad589f9430b34f2a7e56acdf051807\
             53d3f491f48c0958a8482edb1cda90fc82f0edd2bc6d22573bc743abd8e42a48",
        ),
        (
            262145,
            "db774f463acc1e672e4da91d045eb146f2647efec545951fb7005067ff9899da\
             3ae94dc206531b40985587ce4e5eb173a235d51b488074067d9e34131814b9de",
        ),
        (
            16777216,
            "00e37446888e4861896321669d6216f8b4e94a94d144de71e81040bedf016625\
             cb4a70a5aaeed1ccd10b1be93c72f9afe1cc90cd3179177e04007e4db320ec13",
        ),
        (
            16777217,
            "69b64bbea49e846e3c173e529e08a3aeafeefe3630625169d9b66f9e63ee0e12\
             170208af2f31fef79a0eff60353a63e613ad505f27df3e49d11c1c9e0aa76d16",
        ),
    ];

    #[test]
    fn digests_are_those_of_another_implementation() {
        for (algorithm, table) in [(Algorithm::Sha256, SHA256), (Algorithm::Sha512, SHA512)] {
            for (size, expect) in table {
                check(algorithm, size, 1 << 20, expect);
            }
        }
    }

    #[test]
    fn bytes_come_in_pieces_of_any_size() {
        for (algorithm, table) in [(Algorithm::Sha256, SHA256), (Algorithm::Sha512, SHA512)] {
            for (size, expect) in &table[..8] {
                for piece in [1, 7, 4095, 4096, 4097, 10_000] {
                    check(algorithm, *size, piece, expect);
                }
            }
        }
    }

    #[test]
    fn a_tee_hashes_what_was_taken() {
        struct Slow(Vec<u8>);
        impl std::io::Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                let taken = bytes.len().min(1000);
                self.0.extend_from_slice(&bytes[..taken]);
                Ok(taken)
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut tee = Tee::new(Slow(Vec::new()), Algorithm::Sha256);
        pattern(4097, 4097, |bytes| tee.write_all(bytes).unwrap());
        let (taken, digest) = tee.finish();
        assert_eq!((taken.0.len(), &*digest.to_string()), (4097, SHA256[4].1));
    }

    #[track_caller]
    fn check_hex(text: &str, expect: Result<&str, VerityDigestError>) {
        let answer = text.parse::<VerityDigest>().map(|id| id.to_string());
        assert_eq!(answer, expect.map(str::to_owned));
    }

    #[test]
    fn ids_are_written_in_hex() {
        let (a, b) = ("0123456789abcdef".repeat(4), "fe".repeat(64));
        check_hex(&a, Ok(&a));
        check_hex(&a.to_uppercase(), Ok(&a));
        check_hex(&b, Ok(&b));
        check_hex("", Err(VerityDigestError::Length(0)));
        check_hex(&a[2..], Err(VerityDigestError::Length(31)));
        check_hex(&format!("{a}{}", &a[..32]), Err(VerityDigestError::Length(48)));
        check_hex(&format!("{}g", &a[1..]), Err(VerityDigestError::NotHex(63)));
        check_hex(&format!("/{}", &a[1..]), Err(VerityDigestError::NotHex(0)));
    }

    #[test]
    fn ids_have_32_or_64_bytes() {
        for (length, expect) in [(32, Algorithm::Sha256), (64, Algorithm::Sha512)] {
            let id = VerityDigest::from_bytes(&vec![0xa1; length]).unwrap();
            assert_eq!(id.algorithm(), expect);
            assert_eq!(id.as_bytes(), vec![0xa1; length]);
        }
        for length in [0, 31, 33, 63, 65] {
            let refused = VerityDigest::from_bytes(&vec![0; length]);
            assert_eq!(refused, Err(VerityDigestError::Length(length)));
        }
    }

    #[test]
    fn an_object_is_in_a_folder_of_its_first_byte() {
        let path = ObjectId::from_bytes(&[0xa1; 32]).unwrap().path();
        assert_eq!(path, format!("a1/{}", "a1".repeat(31)));
    }
}
