//! The error of making or opening an artifact.

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use store::OperationError;

use super::documents::VERSION;
use crate::lazy::check::ImageCheckError;

/// Why an artifact cannot be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactError {
    /// A document is not JSON, or does not have the expected fields.
    #[error("the {what} of the index is malformed")]
    Json {
        /// `manifest` or `config`.
        what: &'static str,
        source: serde_json::Error,
    },
    /// A part is larger than in any valid artifact.
    #[error("the {what} of the index has {size} bytes, more than {max}")]
    TooLarge {
        what: &'static str,
        /// Size of the part in bytes.
        size: u64,
        /// Maximum size in bytes.
        max: u64,
    },
    /// The manifest has another media type or artifact type.
    #[error("the artifact is a \"{}\", not an index for lazy loading", .0.escape_debug())]
    Type(String),
    /// The config has another version.
    #[error(
        "the index has version {0}, but this version of Quire reads only {VERSION}: make the \
        index again"
    )]
    Version(u32),
    /// The artifact refers to another manifest.
    #[error("the index belongs to manifest {actual}, not to {expected}")]
    Subject {
        /// Digest of the image's manifest.
        expected: Box<Digest>,
        /// Digest of the manifest to which the artifact refers.
        actual: Box<Digest>,
    },
    /// A blob has another media type than expected at its position.
    #[error(
        "blob {blob} of the index is a \"{}\", not a \"{expected}\"",
        actual.escape_debug()
    )]
    BlobType {
        blob: Box<Digest>,
        /// Media type of the blob.
        actual: String,
        /// Expected media type.
        expected: &'static str,
    },
    /// The artifact has no blobs, or too many.
    #[error("the index has {0} blobs, not one for starts and one with windows for each device")]
    BlobCount(usize),
    /// The lengths of the parts are not those of the blob that contains them.
    #[error("the lengths of the index's parts are not the length of blob {blob}")]
    Lengths { blob: Box<Digest> },
    /// The windows of a device were not fetched with its index, so they cannot be pushed.
    #[error("the windows of device {0} are not in the store: `quire index` makes them")]
    NoWindows(DeviceId),
    /// A blob does not match its digest or length.
    #[error("blob {blob} of the index is damaged: its digest or length is wrong")]
    Blob { blob: Box<Digest> },
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// An id in the config is not valid.
    #[error(
        "the index names {what} \"{}\", which is not 64 lower-case hexadecimal digits",
        text.escape_debug()
    )]
    Id {
        /// `image` or `device`.
        what: &'static str,
        text: String,
    },
    /// The layers of the index differ from those of the image.
    #[error("the layers of the index are not those of the image: {0}")]
    Layers(String),
    /// The index of a layer does not match the config.
    #[error("the index of layer {layer} has another {what} than the config")]
    Contradiction {
        layer: Box<Digest>,
        /// The part that differs.
        what: &'static str,
    },
    /// The EROFS image is not identical to the output of Quire's writer.
    #[error(transparent)]
    Image(#[from] Box<ImageCheckError>),
    /// The EROFS image has another id than the config says.
    #[error("the image of the index is {actual}, not {expected}")]
    ImageId {
        /// Id in the config.
        expected: Box<ImageId>,
        /// Id of the image's bytes.
        actual: Box<ImageId>,
    },
}
