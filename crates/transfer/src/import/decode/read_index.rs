//! Data for a layer's index that is collected while its blob is read.

use image::gzip::GzipError;
use store::Blob;

use crate::lazy::IndexParts;

/// The result of reading a layer's blob for its index.
pub(in crate::import) struct ReadIndex {
    pub(in crate::import) blob: Blob,
    /// `None` if the blob is not gzip, or was not read.
    pub(in crate::import) parts: Option<Result<IndexParts, GzipError>>,
}
