//! Why a layer cannot be imported, and whether another copy or another way may work.

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
    /// The blob cannot be unpacked, or has another digest.
    #[error(transparent)]
    Blob(#[from] DecodeError),
    /// The content is not a valid tar.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// An entry does not fit into the layer, or onto those below.
    #[error(transparent)]
    Entry(#[from] LayerError),
    /// An object cannot be added for its entry.
    #[error("cannot add an object to the tree")]
    Tree(#[source] TreeError),
    /// An entry exceeds a limit.
    #[error("\"{}\" exceeds a limit", entry.escape_ascii())]
    Limit {
        /// The entry's path.
        entry: Vec<u8>,
        /// The limit.
        source: LimitError,
    },
    /// The tar does not have the diff id that the config names.
    #[error("its uncompressed tar has the digest {actual}, not {expected} as the config says")]
    DiffId {
        /// Diff id in the config.
        expected: Box<Digest>,
        /// Digest of the tar.
        actual: Box<Digest>,
    },
    /// The blob's table of contents is not the one that the manifest names.
    #[error(transparent)]
    Contents(#[from] ChunkedError),
    /// The tar has no end marker, and nothing else tells where it ends.
    #[error("the tar has no end marker: it is empty or was cut off")]
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
    /// The tar itself cannot be written.
    #[error("cannot write the layer's tar")]
    Copy(#[source] std::io::Error),
    /// The layer cannot be made durable.
    #[error("cannot add the layer to the store")]
    Commit(#[source] store::TransactionError),
    /// Another part of the import failed.
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
