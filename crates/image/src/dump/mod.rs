//! The composefs dump: a tree as text, one line an entry. `docs/format/dump.md` has the rules.
//!
//! [`parse()`] reads what `mkcomposefs --from-file` reads, with the same meaning; [`write()`] writes what `composefs-info
//! dump` writes.

mod field;
mod link;
mod parse;
mod write;

#[cfg(test)]
mod tests;

pub use parse::parse;
pub use write::{Escape, Links, directory_size, escape, write, write_some};

use crate::tree::TreeError;

/// The most bytes of a file that a dump holds itself. Source: `mkcomposefs`, which refuses 5001.
pub const INLINE_MAX: usize = 5000;
/// The most bytes in PAYLOAD once its escapes are undone: the kernel's `PATH_MAX` less the final NUL.
pub const PAYLOAD_MAX: usize = 4095;
/// The most bytes of a line that xattrs take, escapes and spaces between them included.
pub const LINE_XATTRS_MAX: usize = 65535;
/// The most that the xattrs of one inode may take in an image, counted as [`XATTRS_HEADER`] and, for each,
/// [`XATTR_OVERHEAD`], its name and its value. Source: `mkcomposefs`, which refuses one byte more.
pub const XATTRS_MAX: usize = 32767;
/// Counted once for an inode with xattrs: the bytes of EROFS's `erofs_xattr_ibody_header`.
pub const XATTRS_HEADER: usize = 12;
/// Counted for each xattr: EROFS's `erofs_xattr_entry` and the most padding.
pub const XATTR_OVERHEAD: usize = 7;
/// The most bytes in a line. `mkcomposefs` has no limit; this one keeps an endless line from filling the memory.
pub const LINE_MAX: usize = 1 << 24;

/// How strictly a dump is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// As `mkcomposefs` reads it by default.
    Lenient,
    /// As `mkcomposefs` reads it with `CFS_PARSE_STRICT`: the last line ends with a newline, only devices have a
    /// device number, a symlink's size is its target's length and it has no content.
    Strict,
    /// Every number and name is kept as it is, or refused: `mkcomposefs` truncates numbers that are too large, and ends
    /// a name at its first NUL. Otherwise like [`Lenient`](Self::Lenient).
    Exact,
}

/// A field of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// Path of the entry.
    Path,
    /// Length in bytes.
    Size,
    /// Type and permissions, octal; `@` before it makes a hard link.
    Mode,
    /// Number of links.
    Nlink,
    /// Owner.
    Uid,
    /// Group.
    Gid,
    /// Device number.
    Rdev,
    /// Last modification: seconds, a dot, nanoseconds.
    Mtime,
    /// A regular file's place, a symlink's target, or the target of a hard link.
    Payload,
    /// A regular file's bytes.
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

/// Why a dump is refused.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// The input fails.
    #[error("cannot read line {line} of the dump")]
    Read {
        /// Counted from 1.
        line: u64,
        /// The error of the input.
        source: std::io::Error,
    },
    /// A line is invalid.
    #[error("line {line} of the dump is invalid")]
    Line {
        /// Counted from 1.
        line: u64,
        /// The reason.
        source: Reason,
    },
    /// There are no lines.
    #[error("the dump is empty: it has no line for \"/\"")]
    Empty,
}

/// Why a line is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// More than [`LINE_MAX`] bytes.
    #[error("it has more than 16 MiB")]
    TooLong,
    /// A NUL byte, which can only be written with an escape.
    #[error("byte {0} is NUL")]
    Nul(usize),
    /// Strict: the last line has no newline.
    #[error("it does not end with a newline")]
    NoNewline,
    /// The line ends before this field.
    #[error("{0} is missing")]
    Missing(Field),
    /// A backslash followed by something else than `\`, `n`, `r`, `t` or `x` and two hexadecimal digits.
    #[error("{field} has the unknown escape \"{}\"", .escape.escape_ascii())]
    Escape {
        /// The field.
        field: Field,
        /// The backslash and what follows.
        escape: Vec<u8>,
    },
    /// Not a number.
    #[error("{field} is \"{}\", which is not {}", .text.escape_ascii(), if *.field == Field::Mode { "an octal number" } else { "a number" })]
    Number {
        /// The field.
        field: Field,
        /// The text of the field.
        text: Vec<u8>,
    },
    /// Exact: a number that the field cannot hold.
    #[error("{field} has the number \"{}\", which is not from {least} to {most}", .text.escape_ascii())]
    Range {
        /// The field.
        field: Field,
        /// The text of the field.
        text: Vec<u8>,
        /// The least that it can hold.
        least: i64,
        /// The most.
        most: u64,
    },
    /// Exact: a NUL, written by its escape, in a name.
    #[error("a name in {0} contains a NUL byte")]
    EscapedNul(Field),
    /// A time without a dot.
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
    /// No line before described the parent directory.
    #[error("the directory of \"{}\" is missing: it must come first", .0.escape_ascii())]
    NoParent(Vec<u8>),
    /// The parent is not a directory.
    #[error("the parent of \"{}\" is not a directory", .0.escape_ascii())]
    ParentNotDirectory(Vec<u8>),
    /// A hard link whose mode says that it is a directory, or whose target is one.
    #[error("a directory cannot be hard linked")]
    LinkToDirectory,
    /// A hard link without a target.
    #[error("the hard link has no target")]
    LinkNowhere,
    /// The target of a hard link is not in the dump.
    #[error("the target of the hard link, \"{}\", is not in the dump", .0.escape_ascii())]
    NoTarget(Vec<u8>),
    /// A hard link that leads back to itself.
    #[error("the hard link leads back to itself")]
    LinkLoop,
    /// More than [`PAYLOAD_MAX`] bytes.
    #[error("PAYLOAD has {0} bytes, more than 4095")]
    PayloadLength(usize),
    /// CONTENT that is not as long as SIZE says.
    #[error("CONTENT has {length} bytes, but SIZE is {size}")]
    ContentLength {
        /// Bytes in CONTENT.
        length: usize,
        /// Length in bytes that SIZE states.
        size: u64,
    },
    /// More than [`INLINE_MAX`] bytes.
    #[error("CONTENT has {0} bytes, more than 5000")]
    ContentTooLong(usize),
    /// A regular file outside of the dump with an invalid DIGEST.
    #[error("DIGEST is \"{}\", which is neither \"-\" nor 64 or 128 hexadecimal digits", .0.escape_ascii())]
    Digest(Vec<u8>),
    /// An xattr without `=`.
    #[error("the xattr \"{}\" has no \"=\"", .0.escape_ascii())]
    NoEqual(Vec<u8>),
    /// More than [`LINE_XATTRS_MAX`] bytes.
    #[error("the xattrs take {0} bytes of the line, more than 65535")]
    XattrsOfLine(usize),
    /// More than [`XATTRS_MAX`].
    #[error("the xattrs take more than 32767 bytes in an image")]
    Xattrs,
    /// Strict: a device number on something else than a device.
    #[error("RDEV is {0}, but the entry is not a device")]
    NotDevice(u64),
    /// Strict: a symlink's size is another than its target's length.
    #[error("SIZE is {size}, but the symlink's target has {length} bytes")]
    SymlinkSize {
        /// Length in bytes that SIZE states.
        size: u64,
        /// Bytes in the target.
        length: usize,
    },
    /// Strict: a symlink with content.
    #[error("a symlink cannot have CONTENT")]
    SymlinkContent,
    /// The tree cannot hold the entry.
    #[error(transparent)]
    Tree(#[from] TreeError),
}
