//! Tar layers as pure events, and the recipe from which the exact tar comes back.
//!
//! [`Reader`] pulls events out of any `Read`: entries with their full metadata and content, and between them the bytes
//! of the tar that belong to no file's content. [`recipe`] writes the latter down, with references to the objects that
//! hold the former. Every byte of the stream is in exactly one of them.
//!
//! Formats: V7, POSIX ustar, pax (with the keywords of GNU tar, star and libarchive), GNU tar, and the sparse files of
//! GNU tar in all four formats. Where readers differ, Go's `archive/tar` decides, since it reads nearly every image;
//! but global extended headers hold for the entries behind them, as POSIX says and GNU tar does, and extended headers
//! with no entry behind them are refused. The data of sparse files is dense, whatever the lengths of their regions.
//! [`TarError`] lists the refused features and the limits.

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
pub use error::{Corrupt, Limit, NameError, TarError, Unsupported};
#[doc(hidden)]
pub use exercise::exercise;
pub use name::{Whiteout, whiteout};
pub use pax::{EXTENSION_MAX, GLOBAL_MAX};
pub use reader::{Entry, Event, Kind, Reader};
pub use sparse::SPARSE_REGIONS_MAX;
pub use xattrs::{XATTR_NAMES_MAX, XattrRecords, Xattrs};

/// Bytes in a block: headers fill one, data is padded to them. Source: POSIX `pax`, "ustar Interchange Format".
pub const BLOCK: usize = 512;

/// A range of a file's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Segment {
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Length in bytes, at least 1.
    pub length: u64,
}

impl Segment {
    /// The first byte after the segment.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}

/// `length` as the type that offsets have.
const fn wide(length: usize) -> u64 {
    const { assert!(size_of::<usize>() <= size_of::<u64>()) }
    #[expect(
        clippy::as_conversions,
        reason = "there is no `From`, and the line above shows that it fits"
    )]
    {
        length as u64
    }
}

/// `count` where it is a length of memory, else the longest one: for `min` with a real length.
fn narrow(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// Bytes after `size` bytes of data up to the next block.
const fn padding(size: u64) -> u64 {
    size.wrapping_neg() % wide(BLOCK)
}
