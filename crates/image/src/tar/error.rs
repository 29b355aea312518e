//! The errors of reading a layer.

use std::io;

/// The reason why a layer cannot be read. Messages show names with escapes.
///
/// After [`TarError::Unsupported`] the reader can continue with the next entry; every other error is final.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// Reading the stream failed.
    #[error("cannot read the tar at byte {offset}")]
    Read {
        /// Number of bytes read before the failure.
        offset: u64,
        /// The error of the stream.
        source: io::Error,
    },
    /// The tar is invalid.
    #[error("the tar is corrupt at byte {offset}, entry \"{}\": {kind}", entry.escape_ascii())]
    Corrupt {
        /// Offset of the entry's header, or of the invalid block, in bytes.
        offset: u64,
        /// Name of the entry, or empty if unknown.
        entry: Vec<u8>,
        /// The reason, with the values that prove it.
        kind: TarCorruption,
    },
    /// A path or a hard link's target that leads out of the root, or is not a valid name.
    #[error("entry \"{}\" has an invalid name: {reason}", entry.escape_ascii())]
    Name {
        /// The path or target as in the tar.
        entry: Vec<u8>,
        /// The reason.
        reason: NameError,
    },
    /// The entry exceeds a limit of this reader.
    #[error("entry \"{}\" has {limit}", entry.escape_ascii())]
    Limit {
        /// Name of the entry, or of the header that extends it.
        entry: Vec<u8>,
        /// The limit, and the value that exceeds it.
        limit: Limit,
    },
    /// A valid entry that a tree cannot hold. The caller may skip the entry by reading the next event.
    #[error("entry \"{}\" is {kind}, which is not supported", entry.escape_ascii())]
    Unsupported {
        /// The entry's name.
        entry: Vec<u8>,
        /// The unsupported feature.
        kind: Unsupported,
    },
    /// An earlier call failed, so the reader cannot continue.
    #[error("an earlier error stopped the reading of the tar")]
    Stopped,
}

/// The reason why a tar is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TarCorruption {
    /// The stream ended within a header, an extension or content.
    #[error("the stream ends {missing} bytes early")]
    Truncated {
        /// Minimum number of missing bytes.
        missing: u64,
    },
    /// The header's checksum matches neither the unsigned nor the signed sum.
    #[error("the header's checksum is {actual}, but it states \"{}\"", stated.escape_ascii())]
    Checksum {
        /// The checksum field.
        stated: [u8; 8],
        /// The unsigned sum of the header's bytes.
        actual: u32,
    },
    /// A single block of zeros is followed by other data: the archive is damaged, or two archives are concatenated.
    #[error("a single block of zeros does not end an archive")]
    LoneZeroBlock,
    /// A field of a header is not a number, or is out of range.
    #[error("field {field} has the invalid value \"{}\"", value.escape_ascii())]
    Number {
        /// Name of the field in POSIX or GNU tar.
        field: &'static str,
        /// Bytes of the field.
        value: Vec<u8>,
    },
    /// An extended header is not a sequence of `LENGTH KEY=VALUE\n`.
    #[error("the extended header's record at byte {at} {reason}")]
    PaxRecord {
        /// Offset in the extended header, in bytes.
        at: usize,
        /// The reason.
        reason: &'static str,
    },
    /// A value in an extended header is invalid for its key.
    #[error("the extended header {}={} is invalid", key.escape_ascii(), value.escape_ascii())]
    PaxValue {
        /// The key.
        key: Vec<u8>,
        /// The first bytes of the value.
        value: Vec<u8>,
    },
    /// An invalid ACL.
    #[error("the ACL has \"{}\": {reason}", text.escape_ascii())]
    Acl {
        /// The invalid line.
        text: Vec<u8>,
        /// The reason.
        reason: &'static str,
    },
    /// A sparse file's map does not describe the file.
    #[error("the sparse map {reason}: {value} and {bound}")]
    SparseMap {
        /// The reason.
        reason: &'static str,
        /// The invalid value.
        value: u64,
        /// The value that it contradicts.
        bound: u64,
    },
    /// A file that is not regular has a sparse map: its type flag.
    #[error("a file of type {:?} cannot have a sparse map", char::from(*.0))]
    SparseType(u8),
    /// A symbolic or hard link without a target.
    #[error("the link has no target")]
    NoTarget,
    /// Long names or extended headers are not followed by an entry.
    #[error("the archive ends between an extended header and its entry")]
    Dangling,
}

/// The reason why a name is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A component is `..`.
    #[error("it contains \"..\"")]
    Parent,
    /// A component has more than 255 bytes: its length.
    #[error("a component has {0} bytes, more than 255")]
    TooLong(usize),
    /// It contains a NUL byte.
    #[error("it contains a NUL byte")]
    Nul,
    /// The path is the root, but the entry is not a directory.
    #[error("it is the root, which must be a directory")]
    Root,
}

/// A limit that an entry exceeds. The limits are constants of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// An extension has more than [`EXTENSION_MAX`](super::EXTENSION_MAX) bytes.
    #[error("{what} of {size} bytes at byte {at} of the tar, more than 1 MiB")]
    Extension {
        /// The kind of extension.
        what: &'static str,
        /// Stated size of the extension in bytes.
        size: u64,
        /// Offset of its header, or of the entry's, in bytes. The header's own name is often the same for all entries.
        at: u64,
    },
    /// The global extended headers so far have more than [`GLOBAL_MAX`](super::GLOBAL_MAX) bytes.
    #[error("global extended headers of {0} bytes, more than 16 KiB")]
    Global(u64),
    /// A sparse file has more than [`SPARSE_REGIONS_MAX`](super::SPARSE_REGIONS_MAX) regions of data.
    #[error("a sparse map of {0} regions, more than 65536")]
    SparseRegions(u64),
    /// The names of an entry's xattrs have more than [`XATTR_NAMES_MAX`](super::XATTR_NAMES_MAX) bytes.
    #[error("{0} bytes of xattr names, more than 65536")]
    XattrNames(usize),
    /// An xattr's name has more than [`XATTR_NAME_MAX`](crate::tree::XATTR_NAME_MAX) bytes.
    #[error("an xattr name of {0} bytes, more than 255")]
    XattrName(usize),
    /// An xattr's value has more than [`XATTR_VALUE_MAX`](crate::tree::XATTR_VALUE_MAX) bytes.
    #[error("an xattr value of {0} bytes, more than 65535")]
    XattrValue(usize),
}

/// A feature that a tree cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// A type flag that is not a file type, such as a socket of some writers or a part of a multi-volume archive.
    #[error("of type {:?}", char::from(*.0))]
    Type(u8),
    /// A sparse file in a format other than GNU tar's.
    #[error("a sparse file in the format of {0}")]
    Sparse(&'static str),
}
