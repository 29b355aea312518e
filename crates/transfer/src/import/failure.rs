//! Errors of one layer, and whether reading another copy or the whole blob may help.

use std::io;

use image::layer::LayerError;
use image::tar::{TarError, recipe};
use image::tree::TreeError;

use super::ImportError;
use super::decode::DecodeError;
use super::limits::ImportLimitError;
use super::objects::Stopped;
use crate::chunked::ChunkedError;
use image::digest::Digest;
use store::{DraftError, OperationError, TransactionError};

/// Why the content of an EROFS layer cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsLayerFlaw {
    /// A file has such a name, which would be a whiteout in the tar of the layer.
    #[error("its name begins with \".wh.\", which tars reserve for removed files")]
    WhiteoutName,
    /// Whether such a root hides lower layers depends on the program that mounts or reads them.
    #[error("its root is marked as opaque, which hides lower layers in some programs only")]
    OpaqueRoot,
    /// The image is one of composefs, so it does not have the contents of its files.
    #[error("the layer is a composefs image, and the contents of its files are elsewhere")]
    Composefs,
    /// The xattr makes overlayfs take the file's content, or the directory's, from elsewhere.
    #[error("it has an xattr of overlayfs that layers cannot have")]
    Overlay,
}

/// Why a layer cannot be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerFailure {
    /// The blob cannot be decompressed, or has another digest.
    #[error(transparent)]
    Blob(#[from] DecodeError),
    /// The content is not a valid tar.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// An entry is invalid within the layer, or cannot be applied to the layers below.
    #[error(transparent)]
    Entry(#[from] LayerError),
    /// The object of an entry cannot be set in the tree.
    #[error("cannot add an object to the tree")]
    Tree(#[source] TreeError),
    #[error("\"{}\" exceeds a limit", entry.escape_ascii())]
    Limit {
        /// Path of the entry.
        entry: Vec<u8>,
        source: ImportLimitError,
    },
    /// The tar's digest differs from the diff id in the config.
    #[error("its uncompressed tar has the digest {actual}, not {expected} as in the config")]
    DiffId {
        /// Diff id in the config.
        expected: Box<Digest>,
        actual: Box<Digest>,
    },
    /// The blob's table of contents differs from the table that the manifest names.
    #[error(transparent)]
    Contents(#[from] ChunkedError),
    /// The EROFS image of the layer cannot be read.
    #[error(transparent)]
    Image(Box<ImportError>),
    /// A name of an EROFS layer cannot be in a layer.
    #[error("cannot use \"{}\"", path.escape_ascii())]
    Erofs {
        /// Path of the name.
        path: Vec<u8>,
        /// The reason.
        #[source]
        flaw: ErofsLayerFlaw,
    },
    /// The tar has no end marker, and there is no digest to show that it is complete.
    #[error("the tar has no end marker: it is empty or was cut off")]
    Endless,
    #[error("cannot write the recipe of the layer")]
    Recipe(#[from] recipe::RecipeWriteError),
    /// The layer's recipe in the store cannot be read.
    #[error("cannot read the recipe of the layer")]
    Replay(#[from] recipe::RebuildError),
    /// The layer's record cannot be read from or written to the store.
    #[error("cannot store the layer")]
    Store(#[from] store::StoredLayerError),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// Another part of the import failed, or the caller cancelled it.
    #[error("stopped")]
    Stopped,
}

impl LayerFailure {
    /// Whether an attempt with the whole blob may succeed after assembling the layer from parts has failed. If the
    /// second attempt fails as well, it reports the reason.
    pub(super) const fn is_of_parts(&self) -> bool {
        match self {
            Self::Blob(DecodeError::Stopped)
            | Self::Contents(_)
            | Self::Recipe(_)
            | Self::Replay(_)
            | Self::Store(_)
            | Self::Failed(_)
            | Self::Stopped => false,
            Self::Blob(_)
            | Self::Tar(_)
            | Self::Entry(_)
            | Self::Tree(_)
            | Self::Limit { .. }
            | Self::DiffId { .. }
            | Self::Image(_)
            | Self::Erofs { .. }
            | Self::Endless => true,
        }
    }

    /// Whether another copy of the blob may be intact.
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

pub(super) fn data_failed(error: DraftError) -> OperationError {
    OperationError::of("store", "the layer's tar")(error)
}

pub(super) fn copy_failed(error: io::Error) -> OperationError {
    OperationError::of("write", "the layer's tar")(error)
}

pub(super) fn commit_failed(error: TransactionError) -> OperationError {
    OperationError::of("add", "the layer to the store")(error)
}

impl From<ImportError> for LayerFailure {
    fn from(error: ImportError) -> Self {
        match error {
            ImportError::Cancelled => Self::Stopped,
            error => Self::Image(Box::new(error)),
        }
    }
}

impl From<Stopped> for LayerFailure {
    fn from(Stopped: Stopped) -> Self {
        Self::Stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reading the whole blob would not help, and needs as many threads.
    #[test]
    fn a_missing_thread_is_not_the_fault_of_a_layers_parts() {
        let none = || std::io::Error::from(std::io::ErrorKind::WouldBlock);
        let failure = LayerFailure::from(store::parallel::thread_failed(none()));
        assert_eq!(failure.to_string(), "cannot start a thread");
        assert!(!failure.is_of_parts() && !failure.is_of_the_blob());
        assert!(LayerFailure::from(DecodeError::Read(none())).is_of_parts());
    }
}
