//! Errors of copies that compress.

use std::io;

/// Which side of a copy failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The source cannot be read.
    #[error("cannot read what is to be packed")]
    Read(#[source] io::Error),
    /// The output cannot be written.
    #[error("cannot write what was packed")]
    Write(#[source] io::Error),
    /// The caller cancelled the copy.
    #[error("cancelled")]
    Cancelled,
}
