//! The composefs dump: a tree as text, with one line per entry. `docs/format/dump.md` has the rules.
//!
//! [`parse()`] accepts the input of `mkcomposefs --from-file` with the same meaning; [`write()`] writes the output of
//! `composefs-info dump`.

mod field;
mod link;
mod parse;
mod write;

#[cfg(test)]
mod tests;

pub use parse::parse;
pub use write::{Escape, Links, directory_size, escape, write, write_some};

use crate::tree::TreeError;

/// Maximum length in bytes of a file whose content is in the dump. Source: `mkcomposefs`, which refuses 5001.
pub const INLINE_MAX: usize = 5000;
/// Maximum length of PAYLOAD in bytes after unescaping: the kernel's `PATH_MAX` less the final NUL.
pub const PAYLOAD_MAX: usize = 4095;
/// Maximum length in bytes of a line's xattrs, including escapes and the spaces between them.
pub const LINE_XATTRS_MAX: usize = 65535;
/// Maximum size in bytes of an inode's xattrs in an image, counted as [`XATTRS_HEADER`] plus [`XATTR_OVERHEAD`], name
/// and value for each xattr. Source: `mkcomposefs`, which refuses one byte more.
pub const XATTRS_MAX: usize = 32767;
/// Bytes counted once for an inode with xattrs: the size of EROFS's `erofs_xattr_ibody_header`.
pub const XATTRS_HEADER: usize = 12;
/// Bytes counted for each xattr: the size of EROFS's `erofs_xattr_entry` and the maximum padding.
pub const XATTR_OVERHEAD: usize = 7;
/// Maximum length of a line in bytes. `mkcomposefs` has no limit; this one prevents an endless line from filling
/// memory.
pub const LINE_MAX: usize = 1 << 24;

/// How strictly a dump is parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// Parses like `mkcomposefs` by default.
    Lenient,
    /// Parses like `mkcomposefs` with `CFS_PARSE_STRICT`: the last line must end with a newline, and only devices may
    /// have a device number. A symlink's size must be its target's length, and its content must be empty.
    Strict,
    /// Keeps or refuses each number and name unchanged, while `mkcomposefs` truncates numbers that are too large and
    /// cuts a name at its first NUL. Apart from that, like [`Lenient`](Self::Lenient).
    Exact,
}

/// A field of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// Path of the entry.
    Path,
    /// Length in bytes.
    Size,
    /// Type and permissions in octal; a preceding `@` marks a hard link.
    Mode,
    /// Number of links.
    Nlink,
    /// User id of the owner.
    Uid,
    /// Group id of the owner.
    Gid,
    /// Device number.
    Rdev,
    /// Modification time: seconds, a dot, nanoseconds.
    Mtime,
    /// A regular file's location, a symlink's target, or a hard link's target.
    Payload,
    /// A regular file's content.
    Content,
    /// A regular file's fs-verity digest.
    Digest,
    /// Xattrs, as `NAME=VALUE`: the rest of the line.
    Xattr,
}

impl Field {
    /// The fields before the xattrs, in order.
    const FIXED: [Self; 11] = [
        Self::Path,
        Self::Size,
        Self::Mode,
        Self::Nlink,
        Self::Uid,
        Self::Gid,
        Self::Rdev,
        Self::Mtime,
        Self::Payload,
        Self::Content,
        Self::Digest,
    ];
}

impl std::fmt::Display for Field {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Path => "PATH",
            Self::Size => "SIZE",
            Self::Mode => "MODE",
            Self::Nlink => "NLINK",
            Self::Uid => "UID",
            Self::Gid => "GID",
            Self::Rdev => "RDEV",
            Self::Mtime => "MTIME",
            Self::Payload => "PAYLOAD",
            Self::Content => "CONTENT",
            Self::Digest => "DIGEST",
            Self::Xattr => "the xattrs",
        })
    }
}

/// The reason why a dump is refused.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// Reading the input failed.
    #[error("cannot read line {line} of the dump")]
    Read {
        /// Number of the line, counted from 1.
        line: u64,
        /// The input's error.
        source: std::io::Error,
    },
    /// A line is invalid.
    #[error("line {line} of the dump is invalid")]
    Line {
        /// Number of the line, counted from 1.
        line: u64,
        /// The reason.
        source: Reason,
    },
    /// The dump has no lines.
    #[error("the dump is empty: it has no line for \"/\"")]
    Empty,
}

/// The reason why a line is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// The line has more than [`LINE_MAX`] bytes.
    #[error("it has more than 16 MiB")]
    TooLong,
    /// A NUL byte at this position, counted from 0. NUL must be written as an escape.
    #[error("byte {0} is NUL")]
    Nul(usize),
    /// Strict: the last line does not end with a newline.
    #[error("it does not end with a newline")]
    NoNewline,
    /// The line ends before this field.
    #[error("{0} is missing")]
    Missing(Field),
    /// A backslash that is not followed by `\`, `n`, `r`, `t` or `x` and two hexadecimal digits.
    #[error("{field} has the unknown escape \"{}\"", .escape.escape_ascii())]
    Escape {
        /// The field with the escape.
        field: Field,
        /// The backslash and the next one to three bytes.
        escape: Vec<u8>,
    },
    /// A field that is not a number.
    #[error("{field} is \"{}\", which is not {}", .text.escape_ascii(), if *.field == Field::Mode { "an octal number" } else { "a number" })]
    Number {
        /// The field with the text.
        field: Field,
        /// The text of the field.
        text: Vec<u8>,
    },
    /// Exact: a number outside the field's range.
    #[error("{field} has the number \"{}\", which is not from {least} to {most}", .text.escape_ascii())]
    Range {
        /// The field with the number.
        field: Field,
        /// The text of the field.
        text: Vec<u8>,
        /// Smallest number that the field can hold.
        least: i64,
        /// Largest number that the field can hold.
        most: u64,
    },
    /// Exact: a name that contains an escaped NUL.
    #[error("a name in {0} contains a NUL byte")]
    EscapedNul(Field),
    /// A modification time without a dot.
    #[error("MTIME is \"{}\", which is not SECONDS.NANOSECONDS", .0.escape_ascii())]
    Mtime(Vec<u8>),
    /// A mode without a file type.
    #[error("mode {0:o} has no file type")]
    Type(u32),
    /// The first entry is not the root.
    #[error("the first entry is not \"/\"")]
    FirstNotRoot,
    /// The root is not a directory.
    #[error("\"/\" is not a directory")]
    RootNotDirectory,
    /// A second `/`.
    #[error("\"/\" already exists")]
    SecondRoot,
    /// An empty path.
    #[error("the path is empty")]
    EmptyPath,
    /// The parent directory is not described by an earlier line.
    #[error("the directory of \"{}\" is missing: it must come first", .0.escape_ascii())]
    NoParent(Vec<u8>),
    /// The parent is not a directory.
    #[error("the parent of \"{}\" is not a directory", .0.escape_ascii())]
    ParentNotDirectory(Vec<u8>),
    /// A hard link with the mode of a directory, or to a directory.
    #[error("a directory cannot be hard linked")]
    LinkToDirectory,
    /// A hard link without a target.
    #[error("the hard link has no target")]
    LinkNowhere,
    /// The target of a hard link is not in the dump.
    #[error("the target of the hard link, \"{}\", is not in the dump", .0.escape_ascii())]
    NoTarget(Vec<u8>),
    /// A hard link that leads back to itself, through other hard links or directly.
    #[error("the hard link leads back to itself")]
    LinkLoop,
    /// PAYLOAD has more than [`PAYLOAD_MAX`] bytes.
    #[error("PAYLOAD has {0} bytes, more than 4095")]
    PayloadLength(usize),
    /// The length of CONTENT differs from SIZE.
    #[error("CONTENT has {length} bytes, but SIZE is {size}")]
    ContentLength {
        /// Length of CONTENT in bytes.
        length: usize,
        /// Length in bytes that SIZE states.
        size: u64,
    },
    /// CONTENT has more than [`INLINE_MAX`] bytes.
    #[error("CONTENT has {0} bytes, more than 5000")]
    ContentTooLong(usize),
    /// A regular file without CONTENT has an invalid DIGEST.
    #[error("DIGEST is \"{}\", which is neither \"-\" nor 64 or 128 hexadecimal digits", .0.escape_ascii())]
    Digest(Vec<u8>),
    /// An xattr without `=`.
    #[error("the xattr \"{}\" has no \"=\"", .0.escape_ascii())]
    NoEqual(Vec<u8>),
    /// The xattrs take more than [`LINE_XATTRS_MAX`] bytes of the line.
    #[error("the xattrs take {0} bytes of the line, more than 65535")]
    XattrsOfLine(usize),
    /// The xattrs take more than [`XATTRS_MAX`] bytes in an image.
    #[error("the xattrs take more than 32767 bytes in an image")]
    Xattrs,
    /// Strict: an entry that is not a device has a device number.
    #[error("RDEV is {0}, but the entry is not a device")]
    NotDevice(u64),
    /// Strict: a symlink's SIZE differs from its target's length.
    #[error("SIZE is {size}, but the symlink's target has {length} bytes")]
    SymlinkSize {
        /// Length in bytes that SIZE states.
        size: u64,
        /// Length of the target in bytes.
        length: usize,
    },
    /// Strict: a symlink has CONTENT.
    #[error("a symlink cannot have CONTENT")]
    SymlinkContent,
    /// The tree cannot hold the entry.
    #[error(transparent)]
    Tree(#[from] TreeError),
}
