//! Errors of copies, which may compress.

use std::io;

use store::parallel::ThreadError;

/// The side of a copy that failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The input cannot be read.
    #[error("cannot read what is to be packed")]
    Read(#[source] io::Error),
    /// The output cannot be written.
    #[error("cannot write what was packed")]
    Write(#[source] io::Error),
    /// The system cannot start another thread.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    #[error("cancelled")]
    Cancelled,
}
