//! Errors of reading a layer.

use std::io;

/// Why a layer could not be read. Names are shown with escapes.
///
/// After [`TarError::Unsupported`] the reader can go on with the next entry; every other error ends it.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// The stream itself failed.
    #[error("cannot read the tar at byte {offset}")]
    Read {
        /// Bytes read before the failure.
        offset: u64,
        /// The error of the stream.
        source: io::Error,
    },
    /// The tar is invalid.
    #[error("the tar is corrupt at byte {offset}, entry \"{}\": {kind}", entry.escape_ascii())]
    Corrupt {
        /// Offset of the entry's header, or of the invalid block, in bytes.
        offset: u64,
        /// The entry's name, or empty if unknown.
        entry: Vec<u8>,
        /// The reason, with the values that prove it.
        kind: Corrupt,
    },
    /// A path or a hard link's target that leaves the root, or that no directory can hold.
    #[error("entry \"{}\" has an invalid name: {reason}", entry.escape_ascii())]
    Name {
        /// The path or target in the tar.
        entry: Vec<u8>,
        /// The reason.
        reason: NameError,
    },
    /// The entry exceeds a limit of this reader.
    #[error("entry \"{}\" has {limit}", entry.escape_ascii())]
    Limit {
        /// The entry's name, or that of the header that extends it.
        entry: Vec<u8>,
        /// The limit, and the value that exceeds it.
        limit: Limit,
    },
    /// A valid entry that no tree can hold. The caller may skip it: ask for the next event.
    #[error("entry \"{}\" is {kind}, which is not supported", entry.escape_ascii())]
    Unsupported {
        /// The entry's name.
        entry: Vec<u8>,
        /// The unsupported feature.
        kind: Unsupported,
    },
    /// An earlier call failed, so the reader cannot go on.
    #[error("an earlier error stopped the reading of the tar")]
    Stopped,
}

/// Why a tar is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// The stream ended within a header, an extension or content.
    #[error("the stream ends {missing} bytes early")]
    Truncated {
        /// Number of missing bytes, at least.
        missing: u64,
    },
    /// The header's checksum matches neither its unsigned nor its signed sum.
    #[error("the header's checksum is {actual}, but it states \"{}\"", stated.escape_ascii())]
    Checksum {
        /// The checksum field.
        stated: [u8; 8],
        /// The unsigned sum.
        actual: u32,
    },
    /// One block of zeros, then something else: a damaged archive, or two of them.
    #[error("a single block of zeros does not end an archive")]
    LoneZeroBlock,
    /// A field of a header that is not a number, or out of range.
    #[error("field {field} has the invalid value \"{}\"", value.escape_ascii())]
    Number {
        /// The field, as POSIX or GNU names it.
        field: &'static str,
        /// Its bytes.
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
    /// A value of an extended header that its key does not allow.
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
    /// A sparse map of something other than a regular file.
    #[error("a file of type {:?} cannot have a sparse map", char::from(*.0))]
    SparseType(u8),
    /// A symbolic or hard link without a target.
    #[error("the link has no target")]
    NoTarget,
    /// Long names or extended headers without an entry after them.
    #[error("the archive ends between an extended header and its entry")]
    Dangling,
}

/// Why a name is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A component is `..`.
    #[error("it contains \"..\"")]
    Parent,
    /// A component is longer than a directory can hold.
    #[error("a component has {0} bytes, more than 255")]
    TooLong(usize),
    /// It contains a NUL byte.
    #[error("it contains a NUL byte")]
    Nul,
    /// The root is not a directory.
    #[error("it is the root, which must be a directory")]
    Root,
}

/// A limit that an entry exceeds. The limits are constants of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// More than [`EXTENSION_MAX`](super::EXTENSION_MAX) bytes in one extension.
    #[error("{what} of {size} bytes, more than 1 MiB")]
    Extension {
        /// The kind of extension.
        what: &'static str,
        /// Its stated size in bytes.
        size: u64,
    },
    /// More than [`GLOBAL_MAX`](super::GLOBAL_MAX) bytes in the global extended headers up to here.
    #[error("global extended headers of {0} bytes, more than 16 KiB")]
    Global(u64),
    /// More than [`SPARSE_REGIONS_MAX`](super::SPARSE_REGIONS_MAX) regions of data.
    #[error("a sparse map of {0} regions, more than 65536")]
    SparseRegions(u64),
    /// More than [`XATTR_NAMES_MAX`](super::XATTR_NAMES_MAX) bytes of xattr names.
    #[error("{0} bytes of xattr names, more than 65536")]
    XattrNames(usize),
    /// An xattr's name of more than [`XATTR_NAME_MAX`](crate::tree::XATTR_NAME_MAX) bytes.
    #[error("an xattr name of {0} bytes, more than 255")]
    XattrName(usize),
    /// An xattr's value of more than [`XATTR_VALUE_MAX`](crate::tree::XATTR_VALUE_MAX) bytes.
    #[error("an xattr value of {0} bytes, more than 65535")]
    XattrValue(usize),
}

/// A feature that a tree cannot hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// A type flag without a file type: a socket of some writers, a part of a multi-volume archive, and so on.
    #[error("of type {:?}", char::from(*.0))]
    Type(u8),
    /// A sparse file in a format other than GNU tar's.
    #[error("a sparse file in the format of {0}")]
    Sparse(&'static str),
}
