//! Data for a layer's index that is collected while its blob is read.

use store::Blob;

use crate::lazy::{IndexParts, SpansError};

/// The result of reading a layer's blob for its index.
pub(in crate::import) struct ReadIndex {
    pub(in crate::import) blob: Blob,
    /// `None` if the blob is neither gzip nor zstd, or was not read.
    pub(in crate::import) parts: Option<Result<IndexParts, SpansError>>,
}
