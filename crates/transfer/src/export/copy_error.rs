//! Errors of copies, which may compress.

use std::io;

use store::OperationError;

/// The side of a copy that failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The input cannot be read.
    #[error("cannot read the data to pack")]
    Read(#[source] io::Error),
    /// The output cannot be written.
    #[error("cannot write the packed data")]
    Write(#[source] io::Error),
    #[error(transparent)]
    Failed(#[from] OperationError),
    #[error("cancelled")]
    Cancelled,
}
