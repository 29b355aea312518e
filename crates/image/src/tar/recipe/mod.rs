//! Recipes: the bytes of a tar, with references to objects in place of the files' contents.
//!
//! The importer of a layer passes each [`Event::Verbatim`](super::Event::Verbatim) to a [`Writer`], and for each entry
//! with segments the object that holds its content. [`TarReader`] rebuilds the tar, [`Skeleton`] rebuilds it with
//! zeros in place of the objects, and [`Reader`] lists the objects. `docs/format/recipe.md` defines the format.
//!
//! A recipe does not authenticate itself, so compare the digest of a rebuilt layer.

mod read;
mod tar;
mod write;

pub use read::{Malformed, Operation, Reader, RebuildError};
pub use tar::{ObjectPositions, Objects, Skeleton, TarReader, Zeros, object_at};
pub use write::{Content, RecipeWriteError, Writer};

use crate::verity::Algorithm;

/// The first bytes of every recipe.
const MAGIC: [u8; 8] = *b"QUIREREC";
/// The format version that this code writes. There is no other version.
const VERSION: u8 = 1;
/// Bytes of the header: magic, version, algorithm, and six zeros.
const HEADER: usize = 16;

/// Maximum number of bytes in a verbatim record. Longer runs take several records.
const VERBATIM_MAX: usize = 64 << 10;
/// Maximum number of ranges in a record.
const RANGES_MAX: u64 = super::SPARSE_REGIONS_MAX as u64;
/// Maximum length in bytes of a file and of a tar.
const LENGTH_MAX: u64 = i64::MAX.cast_unsigned();

/// Record type: the end. The tar's length follows, 8 bytes little-endian.
const END: u8 = 0;
/// Record type: bytes of the tar. Their number follows, then the bytes.
const VERBATIM: u8 = 1;
/// Record type: the first bytes of an object. Its id follows, then their number.
const WHOLE: u8 = 2;
/// Record type: ranges of an object. Its id and their number follow, then for each range the distance from the end of
/// the previous range, and the length.
const RANGES: u8 = 3;

const fn algorithm(number: u8) -> Option<Algorithm> {
    match number {
        1 => Some(Algorithm::Sha256),
        2 => Some(Algorithm::Sha512),
        _ => None,
    }
}
