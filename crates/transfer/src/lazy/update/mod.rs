//! Updates by missing bytes: a layer's tar is made of objects that the store has, and of the spans of the blob that have the
//! others.
//!
//! The artifact of an index has the recipe of each layer: all of the tar but the contents of files, and the object id of
//! each. Nothing in it is believed. The tar is imported as usual, and its diff id compared, so a false recipe or index costs
//! a second download and nothing else. See `docs/decisions/0018-lazy.md`, "Updates".

mod plan;
mod read;

use std::io;

use image::digest::Digest;
use image::lazy::HeadError;
use image::tar::recipe::RebuildError;

pub use plan::{UpdatePlan, memory, plan};

/// Why a layer is pulled as a whole though there is an index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// A blob of the index cannot be had.
    #[error("cannot read blob {blob} of the index")]
    Fetch {
        /// The blob.
        blob: Box<Digest>,
        /// The cause.
        source: io::Error,
    },
    /// A blob of the index has other bytes than its name says.
    #[error("blob {0} of the index is damaged: it has another digest or length")]
    Blob(Box<Digest>),
    /// The head cannot be used.
    #[error("the head of the index cannot be used")]
    Head(#[from] HeadError),
    /// The head is one of another layer.
    #[error("the head of the index is one of another layer")]
    Layer,
    /// The recipe cannot be read.
    #[error("the recipe of the index cannot be used")]
    Recipe(#[from] RebuildError),
    /// The recipe cannot be decompressed.
    #[error("the recipe of the index cannot be decompressed")]
    Decompress(#[source] io::Error),
    /// The recipe makes a tar of another length than the head says.
    #[error("the recipe of the index makes a tar of {actual} bytes, not {expected}")]
    Length {
        /// Length in the head, in bytes.
        expected: u64,
        /// Length of the recipe's tar, in bytes; or of a part of it that is too long.
        actual: u64,
    },
    /// The windows have another length than the head says.
    #[error("the windows of the index have another length than its head says")]
    Windows,
}

/// Plans by `bytes` as a recipe that is decompressed, for fuzzers.
#[doc(hidden)]
pub fn exercise(bytes: &[u8]) {
    plan::exercise(bytes);
}
