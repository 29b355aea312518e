//! Data for a layer's index that is collected while its blob is read.

use image::gzip::GzipError;
use store::Blob;

use crate::lazy::IndexParts;

/// The result of reading a layer's blob for its index.
pub(super) struct ReadIndex {
    pub(super) blob: Blob,
    /// `None` if the blob is not gzip, or was not read.
    pub(super) parts: Option<Result<IndexParts, GzipError>>,
}
