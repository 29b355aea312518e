//! Why an artifact is not used, or not made.

use std::io;

use image::digest::Digest;
use image::lazy::HeadError;
use image::verity::ImageId;
use store::TraceError;
use store::parallel::ThreadError;

use super::documents::VERSION;
use crate::lazy::check::ImageCheckError;

/// Why an artifact is not used, or not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactError {
    /// A document is not JSON, or JSON of another shape.
    #[error("the {what} of the index is malformed")]
    Json {
        /// `manifest` or `config`.
        what: &'static str,
        /// Where and why.
        source: serde_json::Error,
    },
    /// Something is larger than any real one.
    #[error("the {what} of the index has {size} bytes: at most {max} are read")]
    TooLarge {
        /// The part.
        what: &'static str,
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes.
        max: u64,
    },
    /// It is another artifact.
    #[error("the artifact is a \"{}\", no index for lazy loading", .0.escape_debug())]
    Type(String),
    /// Its config has another version.
    #[error("the index has version {0}, and this Quire knows version {VERSION}: make it again")]
    Version(u32),
    /// It belongs to another manifest.
    #[error("the index is one of manifest {actual}, not of {expected}")]
    Subject {
        /// The image's manifest.
        expected: Box<Digest>,
        /// The manifest that it refers to.
        actual: Box<Digest>,
    },
    /// A blob stands where another kind belongs.
    #[error(
        "blob {blob} of the index is a \"{}\", where a \"{expected}\" belongs",
        actual.escape_debug()
    )]
    BlobType {
        /// The blob.
        blob: Box<Digest>,
        /// Its media type.
        actual: String,
        /// The right one.
        expected: &'static str,
    },
    /// It has no image, or a head without windows.
    #[error("the index has {0} blobs, not an image, and a head and windows for each device")]
    BlobCount(usize),
    /// A blob has other bytes than its name says.
    #[error("blob {blob} of the index is damaged: it has another digest or length")]
    Blob {
        /// The blob.
        blob: Box<Digest>,
    },
    /// A blob cannot be had.
    #[error("cannot read blob {blob} of the index")]
    Fetch {
        /// The blob.
        blob: Box<Digest>,
        /// The cause.
        source: io::Error,
    },
    /// An id in the config is none.
    #[error(
        "the index names {what} \"{}\", which is not 64 lower-case hexadecimal digits",
        text.escape_debug()
    )]
    Id {
        /// `image` or `device`.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// The layers of the index are not those of the image.
    #[error("the index is of other layers than the image: {0}")]
    Layers(String),
    /// An index and its device contradict each other.
    #[error("the index of layer {layer} is of another {what} than the config says")]
    Contradiction {
        /// The layer.
        layer: Box<Digest>,
        /// The part that differs.
        what: &'static str,
    },
    /// The EROFS image cannot be decompressed, or has another length.
    #[error("cannot decompress the image of the index")]
    Decompress(#[source] io::Error),
    /// The EROFS image cannot be compressed.
    #[error("cannot compress the image of the index")]
    Compress(#[source] io::Error),
    /// A head cannot be used.
    #[error("the head {blob} of the index cannot be used")]
    Head {
        /// The blob.
        blob: Box<Digest>,
        /// Why not.
        source: HeadError,
    },
    /// The EROFS image is not one that our writer writes.
    #[error(transparent)]
    Image(#[from] Box<ImageCheckError>),
    /// No thread can be had that fetches blobs.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// The traces cannot be used.
    #[error("the traces of the index cannot be used")]
    Traces(#[source] TraceError),
    /// The EROFS image has another id than the config says.
    #[error("the image of the index is {actual}, not {expected}")]
    ImageId {
        /// The id in the config.
        expected: Box<ImageId>,
        /// The id of its bytes.
        actual: Box<ImageId>,
    },
}
