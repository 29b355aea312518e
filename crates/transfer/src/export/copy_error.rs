//! Errors of copies that compress.

use std::io;

/// Which side of a copy has failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The bytes cannot be had.
    #[error("cannot read what is to be packed")]
    Read(#[source] io::Error),
    /// They cannot be given away.
    #[error("cannot write what was packed")]
    Write(#[source] io::Error),
    /// The caller cancelled it.
    #[error("cancelled")]
    Cancelled,
}
