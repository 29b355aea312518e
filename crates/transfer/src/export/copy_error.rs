//! Errors of copies, which may compress.

use std::io;

use store::parallel::ThreadError;

/// The side of a copy that failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The input cannot be read.
    #[error("cannot read the data to pack")]
    Read(#[source] io::Error),
    /// The output cannot be written.
    #[error("cannot write the packed data")]
    Write(#[source] io::Error),
    /// The system cannot start another thread.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    #[error("cancelled")]
    Cancelled,
}
