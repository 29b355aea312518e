//! What can be wrong with a layer.

use std::io;

/// Why a layer could not be read. Names are shown with escapes.
///
/// After [`TarError::Unsupported`] the reader goes on behind the entry if it is asked for the next one; every other error
/// ends it.
#[derive(Debug, thiserror::Error)]
pub enum TarError {
    /// The stream itself failed.
    #[error("cannot read the tar at byte {offset}")]
    Read {
        /// Bytes read before the failure.
        offset: u64,
        /// What the stream said.
        source: io::Error,
    },
    /// No reader could make sense of these bytes.
    #[error("the tar is corrupt at byte {offset}, entry \"{}\": {kind}", entry.escape_ascii())]
    Corrupt {
        /// Where the header of the entry, or the block in question, begins.
        offset: u64,
        /// The entry's name as far as it was known, else empty.
        entry: Vec<u8>,
        /// What is wrong, with the values that show it.
        kind: Corrupt,
    },
    /// A path or a hard link's target that does not stay within the root, or that no directory can hold.
    #[error("entry \"{}\" has an invalid name: {reason}", entry.escape_ascii())]
    Name {
        /// The path or target as the tar has it.
        entry: Vec<u8>,
        /// What is wrong with it.
        reason: NameError,
    },
    /// The entry is larger than any real one in a way that costs memory.
    #[error("entry \"{}\" has {limit}", entry.escape_ascii())]
    Limit {
        /// The entry's name, or that of the header that extends it.
        entry: Vec<u8>,
        /// Which bound, and by what it was passed.
        limit: Limit,
    },
    /// A valid entry that no tree can hold. The caller may skip it: ask for the next event.
    #[error("entry \"{}\" is {kind}, which is not supported", entry.escape_ascii())]
    Unsupported {
        /// The entry's name.
        entry: Vec<u8>,
        /// What it is.
        kind: Unsupported,
    },
    /// An earlier call failed, so there is nothing to go on from.
    #[error("an earlier error stopped the reading of the tar")]
    Stopped,
}

/// What makes a tar unreadable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// The stream ended within a header, an extension or content.
    #[error("the stream ends {missing} bytes early")]
    Truncated {
        /// How many bytes more there should have been, at least.
        missing: u64,
    },
    /// Neither the unsigned nor the signed sum of the header is the stated one.
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
    /// A field of a header that is no number, or one outside of the field's range.
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
        /// Where in the extended header.
        at: usize,
        /// What is wrong with it.
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
    /// An ACL that is no ACL.
    #[error("the ACL has \"{}\": {reason}", text.escape_ascii())]
    Acl {
        /// The line in question.
        text: Vec<u8>,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A sparse file's map does not describe the file.
    #[error("the sparse map {reason}: {value} and {bound}")]
    SparseMap {
        /// What is wrong with it.
        reason: &'static str,
        /// The value in question.
        value: u64,
        /// The value it does not agree with.
        bound: u64,
    },
    /// A map of a sparse file for something that is no regular file.
    #[error("an entry of type {:?} has a sparse map", char::from(*.0))]
    SparseType(u8),
    /// A symbolic or hard link to nowhere.
    #[error("the link has no target")]
    NoTarget,
    /// Long names or extended headers at the end, for no entry.
    #[error("the archive ends between an extended header and its entry")]
    Dangling,
}

/// Why a name is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A component is `..`.
    #[error("it contains \"..\"")]
    Parent,
    /// A component is longer than a directory can hold.
    #[error("a component has {0} bytes, more than 255")]
    TooLong(usize),
    /// There is a NUL in it.
    #[error("it contains a NUL byte")]
    Nul,
    /// The root is not a directory.
    #[error("it is the root, which must be a directory")]
    Root,
}

/// Which bound was passed. The numbers are the constants of this module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// More than [`EXTENSION_MAX`](super::EXTENSION_MAX) bytes in one extension.
    #[error("{what} of {size} bytes, more than 1 MiB")]
    Extension {
        /// Which.
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

/// What a tree does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// A type flag of no type of file: a socket of some writers, a part of a multi-volume archive, and so on.
    #[error("of type {:?}", char::from(*.0))]
    Type(u8),
    /// An entry with an ACL for a user or group that has a name but no number: so GNU tar writes it, and
    /// only the system that it was made on knows the number.
    #[error("a file with an ACL entry without a numeric id (\"{}\")", .0.escape_ascii())]
    AclName(Vec<u8>),
    /// A sparse file in a dialect other than GNU tar's.
    #[error("a sparse file in the format of {0}")]
    Sparse(&'static str),
}
