//! The table of long xattr prefixes.

use zerocopy::IntoBytes as _;
use zerocopy::little_endian::U16;

use crate::erofs::layout::{RawLongPrefix, XATTR_LONG_PREFIX};

/// Name of the xattr with a file's fingerprint. The whole name is a long prefix without a short prefix, so the rest
/// of the name is empty, as with `mkfs.erofs --xattr-inode-digest`.
pub(in crate::erofs::write) const FINGERPRINT: &[u8] = b"erofs.fingerprint.v1";

/// Long prefixes, which names of xattrs refer to by number.
#[derive(Debug, Default)]
pub(in crate::erofs::write) struct Prefixes {
    /// The encoded table.
    pub(in crate::erofs::write) bytes: Vec<u8>,
    pub(in crate::erofs::write) count: u8,
    pub(in crate::erofs::write) fingerprint: Option<u8>,
}

impl Prefixes {
    /// Creates a table with the prefix of fingerprints.
    pub(in crate::erofs::write) fn with_fingerprint() -> Self {
        let mut prefixes = Self::default();
        prefixes.fingerprint = prefixes.add(0, FINGERPRINT);
        prefixes
    }

    /// Adds a prefix and returns its number, or `None` if there are already 128.
    pub(in crate::erofs::write) fn add(&mut self, base_index: u8, infix: &[u8]) -> Option<u8> {
        let number = self.count;
        self.count = number.checked_add(1).filter(|count| *count <= XATTR_LONG_PREFIX)?;
        let size = U16::new(u16::try_from(1 + infix.len()).expect("a name has 255 bytes"));
        self.bytes.extend_from_slice(RawLongPrefix { size, base_index }.as_bytes());
        self.bytes.extend_from_slice(infix);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        Some(number)
    }
}
