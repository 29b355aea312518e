//! Why a layer cannot be imported, and whether another copy or another way may do.

use image::layer::LayerError;
use image::tar::{TarError, recipe};
use image::tree::TreeError;

use super::decode::DecodeError;
use super::limits::LimitError;
use super::objects::Stopped;
use crate::chunked::ChunkedError;
use image::digest::Digest;

/// Why a layer cannot be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerFailure {
    /// The blob does not unpack, or is another one.
    #[error(transparent)]
    Blob(#[from] DecodeError),
    /// What is in it is no tar.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// An entry cannot stand in the layer, or on those below.
    #[error(transparent)]
    Entry(#[from] LayerError),
    /// An object cannot be put where its entry is.
    #[error("cannot add an object to the tree")]
    Tree(#[source] TreeError),
    /// An entry passes a bound.
    #[error("\"{}\" is too much", entry.escape_ascii())]
    Limit {
        /// The entry's path.
        entry: Vec<u8>,
        /// Which bound.
        source: LimitError,
    },
    /// The unpacked tar is not the one that the config names.
    #[error("unpacked it has the digest {actual}, but the config has {expected}")]
    DiffId {
        /// The config's.
        expected: Box<Digest>,
        /// The tar's.
        actual: Box<Digest>,
    },
    /// The table of contents that the blob came with is another one.
    #[error(transparent)]
    Contents(#[from] ChunkedError),
    /// Nothing but the tar itself says where it ends, and it does not.
    #[error("the tar has no end: it is empty, or was cut off")]
    Endless,
    /// The recipe cannot be written.
    #[error("cannot write the recipe of the layer")]
    Recipe(#[from] recipe::WriteError),
    /// The recipe that the store has cannot be read.
    #[error("cannot read the recipe of the layer")]
    Replay(#[from] recipe::RebuildError),
    /// The layer cannot be stored.
    #[error("cannot store the layer")]
    Store(#[from] store::LayerError),
    /// The tar itself cannot be stored.
    #[error("cannot store the layer's tar")]
    Data(#[source] store::DraftError),
    /// The tar itself cannot be written down.
    #[error("cannot write the layer's tar")]
    Copy(#[source] std::io::Error),
    /// The layer cannot be made durable.
    #[error("cannot add the layer to the store")]
    Commit(#[source] store::TransactionError),
    /// Something else failed.
    #[error("stopped")]
    Stopped,
}

impl LayerFailure {
    /// Whether a layer that was made of parts may be right when it is read as a whole. What is wrong with it then is told
    /// then.
    pub(super) const fn is_of_parts(&self) -> bool {
        match self {
            Self::Blob(DecodeError::Stopped)
            | Self::Contents(_)
            | Self::Recipe(_)
            | Self::Replay(_)
            | Self::Store(_)
            | Self::Data(_)
            | Self::Copy(_)
            | Self::Commit(_)
            | Self::Stopped => false,
            Self::Blob(_)
            | Self::Tar(_)
            | Self::Entry(_)
            | Self::Tree(_)
            | Self::Limit { .. }
            | Self::DiffId { .. }
            | Self::Endless => true,
        }
    }

    /// Whether another copy of the blob may be better.
    pub(super) const fn is_of_the_blob(&self) -> bool {
        match self {
            Self::Blob(error) => matches!(
                error,
                DecodeError::Mismatch { .. }
                    | DecodeError::Size { .. }
                    | DecodeError::Gzip(_)
                    | DecodeError::Zstd(_)
            ),
            _ => false,
        }
    }
}

impl From<Stopped> for LayerFailure {
    fn from(Stopped: Stopped) -> Self {
        Self::Stopped
    }
}
