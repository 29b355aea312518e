//! What a pass over a layer's blob finds for its index.

use image::gzip::GzipError;
use store::Blob;

use crate::lazy::IndexParts;

/// What the pass over a layer's blob has told.
pub(super) struct ReadIndex {
    pub(super) blob: Blob,
    /// `None` if the blob is no gzip, or was not read.
    pub(super) parts: Option<Result<IndexParts, GzipError>>,
}
