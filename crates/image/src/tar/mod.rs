//! Reads tar layers as events, and makes recipes from which the exact tar can be rebuilt.
//!
//! [`Reader`] reads events from any `Read`: entries with their full metadata and content, and between them the bytes
//! of the tar that belong to no file's content. A [`recipe`] stores these bytes, with references to the objects that
//! contain the file contents. Every byte of the stream is in the recipe or in an object, and never in both.
//!
//! Formats: V7, POSIX ustar, pax (with the keywords of GNU tar, star and libarchive), GNU tar, and the sparse files
//! of GNU tar in all four formats. Where readers differ, Go's `archive/tar` decides, because it reads nearly every
//! image; but global extended headers apply to the entries after them, as POSIX says and GNU tar does, and extended
//! headers without an entry after them are refused. The data of sparse files is contiguous in the tar, without
//! padding between regions. [`TarError`] lists the refused features and the limits.

mod acl;
mod content;
mod error;
mod exercise;
mod header;
mod name;
mod pax;
mod reader;
pub mod recipe;
mod sparse;
mod stream;
pub mod write;
mod xattrs;

pub use content::{Chunk, Content};
pub use error::{Limit, NameError, TarCorruption, TarError, Unsupported};
#[doc(hidden)]
pub use exercise::exercise;
pub use name::{Whiteout, whiteout};
pub use pax::{EXTENSION_MAX, GLOBAL_MAX};
pub use reader::{Entry, Event, Kind, Reader, UnusualTar};
pub use sparse::SPARSE_REGIONS_MAX;
pub use xattrs::{EntryXattrs, XATTR_NAMES_MAX, XattrRecords};

/// Bytes in a block. A header takes one block, and data is padded to whole blocks. Source: POSIX `pax`, "ustar
/// Interchange Format".
pub const BLOCK: usize = 512;

/// A range of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub length: u64,
}

impl Segment {
    /// Returns the offset of the first byte after the segment.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}

/// Converts a length in memory to the type of offsets.
const fn wide(length: usize) -> u64 {
    const { assert!(size_of::<usize>() <= size_of::<u64>()) }
    #[expect(
        clippy::as_conversions,
        reason = "there is no `From`, and the line above ensures that it fits"
    )]
    {
        length as u64
    }
}

/// Converts `count` to a length in memory, capped at the maximum, for use in `min` with a real length.
fn narrow(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// Returns the number of padding bytes after `size` bytes of data.
const fn padding(size: u64) -> u64 {
    size.wrapping_neg() % wide(BLOCK)
}
