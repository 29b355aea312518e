//! Pulls a layer by fetching only the missing bytes: the tar is assembled from objects in the store, and from the
//! spans of the blob that contain the missing objects.
//!
//! The artifact of an index has a recipe for each layer, which contains the whole tar except the contents of files,
//! and the object id of each file. The artifact is not trusted. The tar is imported as usual, and its diff id is
//! compared, so a false recipe or index costs only a second download. See `docs/decisions/0018-lazy.md`, "Updates".

mod plan;
mod read;

use image::digest::Digest;
use store::OperationError;

pub use plan::{UpdatePlan, memory, plan};

/// Reason why a whole layer is downloaded although there is an index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A blob of the index does not match its digest or length.
    #[error("blob {0} of the index is damaged: its digest or length is wrong")]
    Blob(Box<Digest>),
    /// The head belongs to another layer.
    #[error("the head of the index belongs to another layer")]
    Layer,
    /// The length of the recipe's tar differs from the length in the head.
    #[error("the recipe of the index makes a tar of {actual} bytes, not {expected}")]
    Length {
        /// Length in the head, in bytes.
        expected: u64,
        /// Length of the recipe's tar in bytes, or of its beginning if that is already too long.
        actual: u64,
    },
    /// The length of the windows differs from the length in the head.
    #[error("the length of the index's windows is not that in its head")]
    Windows,
}

/// For fuzzers: makes a plan from `bytes`, a decompressed recipe.
#[doc(hidden)]
pub fn exercise(bytes: &[u8]) {
    plan::exercise(bytes);
}
