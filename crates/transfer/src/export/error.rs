//! Why an export fails.

use std::io;
use std::path::PathBuf;

use image::verity::ImageId;

use store::parallel::ThreadError;
use store::{BytesError, VerifyError};

use crate::stored::StoredError;
use image::digest::Digest;
use oci::layout::LayoutError;

/// Why an image was not given back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// A layer that the image needs is not in the store.
    #[error("the store has no layer {0}")]
    Absent(Digest),
    /// The manifest or the config cannot be used.
    #[error(transparent)]
    Documents(#[from] StoredError),
    /// Docker's manifests have no name for such layers, and its tools refuse them.
    #[error("manifests of Docker's schema 2 have no layers compressed by zstd")]
    DockerZstd,
    /// A layer cannot be given.
    #[error("cannot give layer {diff_id}")]
    Layer {
        /// Which one, by the digest of its tar.
        diff_id: Digest,
        /// Why.
        source: Box<BytesError>,
    },
    /// A file for a while cannot be written.
    #[error("cannot write a temporary file in {}", directory.display())]
    Scratch {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The folder is no layout, or one that is not understood.
    #[error("cannot add to the layout")]
    Layout(#[source] Box<LayoutError>),
    /// The folder has something in it, and is no layout.
    #[error("{} has files in it, and is not an OCI layout", .0.display())]
    NotEmpty(PathBuf),
    /// Somebody else writes there.
    #[error("another export writes to {}", .0.display())]
    Busy(PathBuf),
    /// A layout can have one image without a tag.
    #[error("{} has an image without a tag already: name a tag", .0.display())]
    Untagged(PathBuf),
    /// A file of the layout cannot be written.
    #[error("cannot write {}", path.display())]
    File {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The archive cannot be written.
    #[error("cannot write the archive")]
    Archive(#[source] image::tar::write::WriteError),
    /// The image cannot be opened.
    #[error("cannot open image {image}")]
    Open {
        /// Which one.
        image: ImageId,
        /// Why.
        source: Box<store::OpenImageError>,
    },
    /// The image is not the one that its name says.
    #[error(transparent)]
    Image(#[from] VerifyError),
    /// The image cannot be understood.
    #[error("cannot read image {image}")]
    Tree {
        /// Which one.
        image: ImageId,
        /// Why.
        source: Box<store::ContentsError>,
    },
    /// A file of the image cannot be given.
    #[error("cannot give \"{}\"", path.escape_ascii())]
    Content {
        /// The file's path.
        path: Vec<u8>,
        /// Why.
        source: Box<BytesError>,
    },
    /// The EROFS image cannot be made.
    #[error("cannot make the EROFS image")]
    Erofs(#[source] Box<image::erofs::WriteError>),
    /// The disk around the EROFS image cannot be made.
    #[error("cannot make the disk")]
    Disk {
        /// Why.
        source: io::Error,
    },
    /// No tar can hold it, or hold it so that it comes back.
    #[error("a tar cannot hold \"{}\": {reason}", path.escape_ascii())]
    Unsupported {
        /// The file's path.
        path: Vec<u8>,
        /// What it is.
        reason: &'static str,
    },
    /// A thread cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// As asked for.
    #[error("cancelled")]
    Cancelled,
}

impl ExportError {
    /// What failed while the bytes of a layer were read, as [`VerifiedBytes`](store::VerifiedBytes) tells it.
    pub(super) fn layer(diff_id: Digest, error: io::Error) -> Self {
        Self::Layer { diff_id, source: Box::new(BytesError::of(error)) }
    }

    /// Whether something in the store is not as it was written: a check of the store tells what.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Layer { source, .. } | Self::Content { source, .. } => source.is_damage(),
            Self::Image(VerifyError::Damaged { .. }) | Self::Tree { .. } => true,
            Self::Erofs(source) => {
                use image::erofs::WriteError::{ContentChanged, ContentSize};
                matches!(**source, ContentChanged | ContentSize { .. })
            }
            Self::Documents(source) => source.is_damage(),
            _ => false,
        }
    }
}
