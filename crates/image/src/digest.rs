//! OCI digests: the names of manifests, configs and layers.

use std::fmt;
use std::io;

use sha2::{Digest as _, Sha256, Sha512};

use crate::verity::Algorithm;

/// An OCI digest: `sha256:…` or `sha512:…` in lower case. An object id, which is a Merkle root, is a different type.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    algorithm: Algorithm,
    bytes: [u8; 64],
}

/// Text that is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{}\" is not a digest: write sha256: and 64, or sha512: and 128 lower-case hexadecimal digits",
    .0.escape_debug()
)]
pub struct DigestError(pub String);

impl std::str::FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text, ':').ok_or_else(|| DigestError(text.to_owned()))
    }
}

impl Digest {
    /// Wraps the 32 bytes of a SHA-256 hash.
    #[must_use]
    pub fn from_sha256(hash: &[u8; 32]) -> Self {
        Self::from_slice(Algorithm::Sha256, hash)
    }

    /// Wraps the 64 bytes of a SHA-512 hash.
    #[must_use]
    pub fn from_sha512(hash: &[u8; 64]) -> Self {
        Self::from_slice(Algorithm::Sha512, hash)
    }

    fn from_slice(algorithm: Algorithm, hash: &[u8]) -> Self {
        let mut bytes = [0; 64];
        bytes[..hash.len()].copy_from_slice(hash);
        Self { algorithm, bytes }
    }

    /// Computes the SHA-256 digest of `bytes`.
    #[must_use]
    pub fn sha256(bytes: &[u8]) -> Self {
        Self::from_slice(Algorithm::Sha256, &Sha256::digest(bytes))
    }

    /// Whether `bytes` have this digest, computed with the digest's algorithm.
    #[must_use]
    pub fn matches(&self, bytes: &[u8]) -> bool {
        let mut hasher = self.hasher();
        hasher.update(bytes);
        hasher.finish() == *self
    }

    /// Returns a hasher with this digest's algorithm, to check a stream against the digest.
    #[must_use]
    pub fn hasher(&self) -> DigestHasher {
        match self.algorithm {
            Algorithm::Sha256 => DigestHasher(Hash::Sha256(Sha256::new())),
            Algorithm::Sha512 => DigestHasher(Hash::Sha512(Box::default())),
        }
    }

    /// Returns the hash: 32 or 64 bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.algorithm.digest_len()]
    }

    fn parse(text: &str, between: char) -> Option<Self> {
        let (algorithm, hex) = text.split_once(between)?;
        let algorithm = match algorithm {
            "sha256" => Algorithm::Sha256,
            "sha512" => Algorithm::Sha512,
            _ => return None,
        };
        if hex.len() != algorithm.digest_len() * 2 {
            return None;
        }
        let mut bytes = [0; 64];
        for (at, digit) in hex.bytes().enumerate() {
            let digit = match digit {
                b'0'..=b'9' => digit - b'0',
                b'a'..=b'f' => digit - b'a' + 10,
                _ => return None,
            };
            bytes[at / 2] = bytes[at / 2] << 4 | digit;
        }
        Some(Self { algorithm, bytes })
    }

    /// Returns the digest as a file name: `sha256-…`, because a colon is awkward in file names.
    #[must_use]
    pub fn file_name(&self) -> String {
        self.to_string().replacen(':', "-", 1)
    }

    /// Parses a [file name](Self::file_name); `None` if `name` is not a digest in that form.
    #[must_use]
    pub fn from_file_name(name: &str) -> Option<Self> {
        Self::parse(name, '-')
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.algorithm)?;
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

enum Hash {
    Sha256(Sha256),
    Sha512(Box<Sha512>),
}

/// Computes a digest from bytes that arrive in parts. It implements [`io::Write`].
pub struct DigestHasher(Hash);

impl fmt::Debug for DigestHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Hash::Sha256(_) => "DigestHasher(sha256)",
            Hash::Sha512(_) => "DigestHasher(sha512)",
        })
    }
}

impl DigestHasher {
    /// Creates a SHA-256 hasher, for a stream whose digest is not known beforehand.
    #[must_use]
    pub fn sha256() -> Self {
        Self(Hash::Sha256(Sha256::new()))
    }

    /// Hashes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            Hash::Sha256(hash) => hash.update(bytes),
            Hash::Sha512(hash) => hash.update(bytes),
        }
    }

    /// Returns the digest of all bytes hashed.
    #[must_use]
    pub fn finish(self) -> Digest {
        match self.0 {
            Hash::Sha256(hash) => Digest::from_slice(Algorithm::Sha256, &hash.finalize()),
            Hash::Sha512(hash) => Digest::from_slice(Algorithm::Sha512, &hash.finalize()),
        }
    }
}

impl io::Write for DigestHasher {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl serde::Serialize for Digest {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> serde::Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::Digest;

    // SHA-256 and SHA-512 of "abc", from FIPS 180-2, appendices B.1 and C.1.
    const ABC: &str = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const ABC_512: &str = "sha512:ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a\
                           2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f";

    #[test]
    fn digests_are_the_published_ones() {
        assert_eq!(Digest::sha256(b"abc").to_string(), ABC);
        for text in [ABC, ABC_512] {
            let digest: Digest = text.parse().unwrap();
            assert!(digest.matches(b"abc"));
            assert!(!digest.matches(b"abd"));
            assert_eq!(digest.to_string(), text);
            assert_eq!(Digest::from_file_name(&digest.file_name()), Some(digest));
        }
    }

    #[test]
    fn other_text_is_refused() {
        for text in [
            "",
            "sha256:",
            "sha256:ab",
            "sha1:da39a3ee5e6b4b0d3255bfef95601890afd80709",
            &ABC.to_uppercase(),
            &ABC.replace(':', "-"),
            &format!("{ABC}0"),
            &ABC.replace("ba78", "zz78"),
            &ABC.replace("sha256", "sha512"),
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
