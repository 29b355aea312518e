//! Recipes: a tar's own bytes, with references to objects in place of the files' contents.
//!
//! The importer of a layer passes each [`Event::Verbatim`](super::Event::Verbatim) to a [`Writer`], and for each entry
//! with segments the object that holds its content. [`TarReader`] rebuilds the tar, [`Skeleton`] the same with zeros for
//! objects; [`Reader`] lists the objects that it needs. `docs/format/recipe.md` defines the format.
//!
//! A recipe does not prove itself: compare the digest of a rebuilt layer.

mod read;
mod tar;
mod write;

pub use read::{Malformed, Operation, Reader, RebuildError};
pub use tar::{ObjectPositions, Objects, Skeleton, TarReader, Zeros};
pub use write::{Content, WriteError, Writer};

use crate::verity::Algorithm;

/// The first bytes of every recipe.
const MAGIC: [u8; 8] = *b"QUIREREC";
/// The version this code writes, and the only one there is.
const VERSION: u8 = 1;
/// Bytes of the header: magic, version, algorithm, and six zeros.
const HEADER: usize = 16;

/// The most bytes in one verbatim record; longer runs take several.
const VERBATIM_MAX: usize = 64 << 10;
/// The most ranges of one object in a record.
const RANGES_MAX: u64 = super::SPARSE_REGIONS_MAX as u64;
/// The first byte that no file and no tar has.
const LENGTH_MAX: u64 = i64::MAX.cast_unsigned();

/// The end: the tar's length follows, 8 bytes little-endian.
const END: u8 = 0;
/// Bytes of the tar: their number follows, then they do.
const VERBATIM: u8 = 1;
/// The first bytes of an object: its id follows, then their number.
const WHOLE: u8 = 2;
/// Ranges of an object: its id follows, their number, and for each the distance from the last one's end, and its length.
const RANGES: u8 = 3;

const fn algorithm(number: u8) -> Option<Algorithm> {
    match number {
        1 => Some(Algorithm::Sha256),
        2 => Some(Algorithm::Sha512),
        _ => None,
    }
}
