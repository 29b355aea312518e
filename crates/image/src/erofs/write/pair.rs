//! Xattrs to be written: names, values and the encoding of both.

use std::borrow::Cow;
use std::cmp::Ordering;

use xxhash_rust::xxh32::xxh32;
use zerocopy::IntoBytes as _;
use zerocopy::little_endian::U16;

use crate::erofs::layout::{
    RawLongPrefix, RawXattrEntry, XATTR_FILTER_SEED, XATTR_LONG_PREFIX, XATTR_PREFIXES,
};
use crate::verity::{Algorithm, VerityDigest};

/// The names of an overlay's xattrs. Source: Linux `Documentation/filesystems/overlayfs.rst`, "Permission model" and
/// "Metadata only copy up".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OverlayNames {
    /// Prefix of the names of all xattrs of overlayfs.
    pub(super) overlay: &'static [u8],
    /// Replacement for that prefix in xattrs of the source. overlayfs restores the prefix.
    pub(super) escaped: &'static [u8],
    /// Xattr of a file whose data is in another file, with that file's digest.
    pub(super) metacopy: &'static [u8],
    /// Xattr with the path of the file that has the data.
    pub(super) redirect: &'static [u8],
    /// Xattr of a directory that hides the names of lower layers.
    pub(super) opaque: &'static [u8],
}

impl OverlayNames {
    /// Names for overlays that root mounts.
    pub(super) const TRUSTED: Self = Self {
        overlay: b"trusted.overlay.",
        escaped: b"trusted.overlay.overlay.",
        metacopy: b"trusted.overlay.metacopy",
        redirect: b"trusted.overlay.redirect",
        opaque: b"trusted.overlay.opaque",
    };
    /// Names for overlays that are mounted with `userxattr`.
    pub(super) const USER: Self = Self {
        overlay: b"user.overlay.",
        escaped: b"user.overlay.overlay.",
        metacopy: b"user.overlay.metacopy",
        redirect: b"user.overlay.redirect",
        opaque: b"user.overlay.opaque",
    };
}

/// The name of an xattr.
#[derive(Debug)]
pub(super) struct Name<'a> {
    /// The whole name.
    pub(super) full: Cow<'a, [u8]>,
    /// `e_name_index`.
    index: u8,
    /// Length of the prefix, after which the rest of the name is written.
    prefix: usize,
    /// Mask with the name's bit in the name filter.
    pub(super) bit: u32,
}

impl Name<'_> {
    pub(super) fn new(full: Cow<'_, [u8]>) -> Name<'_> {
        let known = XATTR_PREFIXES.iter().find(|(_, prefix)| full.starts_with(prefix));
        let (index, prefix) = known.map_or((0, 0), |(index, prefix)| (*index, prefix.len()));
        let seed = XATTR_FILTER_SEED + u32::from(index);
        let bit = 1 << (xxh32(&full[prefix..], seed) % 32);
        Name { full, index, prefix, bit }
    }

    /// Returns the part of the name that is written, without the prefix.
    pub(super) fn rest(&self) -> &[u8] {
        &self.full[self.prefix..]
    }

    /// Returns the number of the short prefix, or of the long prefix if the name has one.
    pub(super) const fn index(&self) -> u8 {
        self.index
    }

    /// Stores the whole name as the long prefix with this number. The name's bit in the filter does not change.
    pub(super) fn set_long_prefix(&mut self, number: u8) {
        self.index = XATTR_LONG_PREFIX | number;
        self.prefix = self.full.len();
    }
}

/// The value of an xattr, before it is encoded.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    Bytes(&'a [u8]),
    /// The metacopy of this digest: version 0, length, no flags, algorithm, digest. Source: Linux
    /// `fs/overlayfs/overlayfs.h`, `struct ovl_metacopy`.
    Metacopy(&'a [u8]),
    /// A slash and the path of the object with this digest.
    Object(&'a [u8]),
    /// A slash and this path.
    Path(&'a [u8]),
}

impl Value<'_> {
    pub(super) const fn len(self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Metacopy(digest) => 4 + digest.len(),
            Self::Object(digest) => 2 + 2 * digest.len(),
            Self::Path(path) => 1 + path.len(),
        }
    }

    pub(super) fn put(self, out: &mut Vec<u8>) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        match self {
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
            Self::Metacopy(digest) => {
                let len = u8::try_from(4 + digest.len()).expect("a digest has at most 64 bytes");
                let sha512 = digest.len() == Algorithm::Sha512.digest_len();
                let algorithm = if sha512 { Algorithm::Sha512 } else { Algorithm::Sha256 };
                out.extend_from_slice(&[0, len, 0, algorithm.kernel_id()]);
                out.extend_from_slice(digest);
            }
            Self::Object(digest) => {
                for (at, byte) in digest.iter().enumerate() {
                    if at < 2 {
                        out.push(b'/');
                    }
                    out.push(DIGITS[usize::from(byte >> 4)]);
                    out.push(DIGITS[usize::from(byte & 15)]);
                }
            }
            Self::Path(path) => {
                out.push(b'/');
                out.extend_from_slice(path);
            }
        }
    }

    /// Compares by length, then by bytes.
    pub(super) fn cmp(self, other: Self) -> Ordering {
        self.len().cmp(&other.len()).then_with(|| match (self, other) {
            (Self::Bytes(a), Self::Bytes(b))
            | (Self::Metacopy(a), Self::Metacopy(b))
            | (Self::Object(a), Self::Object(b))
            | (Self::Path(a), Self::Path(b)) => a.cmp(b),
            _ => {
                let (mut a, mut b) = (Vec::new(), Vec::new());
                self.put(&mut a);
                other.put(&mut b);
                a.cmp(&b)
            }
        })
    }
}

/// Returns the size of an entry in bytes, with padding.
pub(super) fn entry_size(name: &Name<'_>, value: Value<'_>) -> u64 {
    let size = size_of::<RawXattrEntry>() + name.rest().len() + value.len();
    size.next_multiple_of(4) as u64
}

/// Returns the size of a long prefix in its table in bytes, with padding.
pub(super) fn long_prefix_size(infix: &[u8]) -> usize {
    (size_of::<RawLongPrefix>() + infix.len()).next_multiple_of(size_of::<u32>())
}

pub(super) fn put_entry(name: &Name<'_>, value: Value<'_>, out: &mut Vec<u8>) {
    let rest = name.rest();
    let entry = RawXattrEntry {
        e_name_len: u8::try_from(rest.len())
            .expect("escaping adds no more than the prefix takes away"),
        e_name_index: name.index,
        e_value_size: U16::new(
            u16::try_from(value.len())
                .expect("the tree and the account of composefs allow no more"),
        ),
    };
    let size = size_of::<RawXattrEntry>() + rest.len() + value.len();
    out.extend_from_slice(entry.as_bytes());
    out.extend_from_slice(rest);
    value.put(out);
    out.resize(out.len() + (size.next_multiple_of(4) - size), 0);
}

/// If the path is the path of an object, returns the object's digest.
pub(super) fn object_of_path(path: &[u8]) -> Option<VerityDigest> {
    let (first, rest) = path.split_at_checked(2)?;
    let hex = [first, rest.strip_prefix(b"/")?].concat();
    if hex.iter().any(u8::is_ascii_uppercase) {
        return None;
    }
    VerityDigest::from_hex(&hex).ok()
}
