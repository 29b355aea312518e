//! Errors of exports.

use std::io;
use std::path::PathBuf;

use image::verity::ImageId;

use store::{BytesError, OperationError, VerifyError};

use crate::stored::StoredError;
use image::digest::Digest;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// A layer of the image is not in the store.
    #[error("the store has no layer {0}")]
    Absent(Digest),
    /// The manifest or the config cannot be used.
    #[error(transparent)]
    Documents(#[from] StoredError),
    /// Docker's manifests have no media type for zstd layers, and Docker's tools refuse such layers.
    #[error("manifests of Docker's schema 2 cannot name zstd layers: choose another --compression")]
    DockerZstd,
    /// containerd unpacks EROFS layers only with zstd.
    #[error("EROFS layers cannot be compressed with gzip: choose another --compression")]
    ErofsGzip,
    /// docker and podman read the layers of their archives as tars.
    #[error("docker archives cannot have EROFS layers: export to oci:DIRECTORY or tar:FILE")]
    ErofsArchive,
    #[error("cannot read layer {diff_id}")]
    Layer { diff_id: Digest, source: Box<BytesError> },
    #[error("cannot write a temporary file in {}", directory.display())]
    Scratch { directory: PathBuf, source: io::Error },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The directory is neither empty nor an OCI layout.
    #[error("{} is not empty and is not an OCI layout: choose another directory", .0.display())]
    NotEmpty(PathBuf),
    /// Another export is writing to the directory.
    #[error("another export is writing to {}", .0.display())]
    Busy(PathBuf),
    /// A layout can contain only one image without a tag.
    #[error("{} already has an image without a tag: add a tag", .0.display())]
    Untagged(PathBuf),
    /// The image does not match its id.
    #[error(transparent)]
    Image(#[from] VerifyError),
    /// The image's metadata cannot be read.
    #[error("cannot read image {image}")]
    Tree { image: ImageId, source: Box<store::ContentsError> },
    /// The content of a file cannot be read.
    #[error("cannot read \"{}\" of the image", path.escape_ascii())]
    Content { path: Vec<u8>, source: Box<BytesError> },
    #[error("cannot make the EROFS image")]
    Erofs(#[source] Box<image::erofs::ErofsWriteError>),
    /// A tar cannot represent the file, or only with a loss.
    #[error("a tar cannot contain \"{}\": {reason}", path.escape_ascii())]
    Unsupported { path: Vec<u8>, reason: &'static str },
    #[error("cancelled")]
    Cancelled,
}

impl ExportError {
    /// Converts an error of a read of the layer's bytes, which contains the [`BytesError`] of a
    /// [`VerifiedBytes`](store::VerifiedBytes).
    pub(super) fn layer(diff_id: Digest, error: io::Error) -> Self {
        Self::Layer { diff_id, source: Box::new(BytesError::from_io(error)) }
    }

    /// Whether the error shows damage in the store, which `fsck` can locate.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Layer { source, .. } | Self::Content { source, .. } => source.is_damage(),
            Self::Image(VerifyError::Damaged { .. }) | Self::Tree { .. } => true,
            Self::Erofs(source) => {
                use image::erofs::ErofsWriteError::{ContentChanged, ContentSize};
                matches!(**source, ContentChanged | ContentSize { .. })
            }
            Self::Documents(source) => source.is_damage(),
            _ => false,
        }
    }
}
