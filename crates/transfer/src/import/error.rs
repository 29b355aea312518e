//! Errors of imports.

use std::io;
use std::path::PathBuf;

use image::erofs::read::{PATH_MAX, ReadError};
use image::tree::TreeError;
use image::verity::{Algorithm, ObjectId};
use store::{Form, OpenImageError, OperationError};

use super::LayerFailure;
use crate::native::{NativeError, PackError};
use crate::stored::StoredError;
use image::digest::Digest;
use oci::layout::LayoutError;
use oci::source::Input;

/// How an image's manifest or config differs from the imported layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayersMismatch {
    /// The number of layers differs.
    #[error("it names {expected} layers, but {actual} were imported")]
    Count {
        /// Number in the document.
        expected: usize,
        /// Number of imported layers.
        actual: usize,
    },
    /// A layer differs.
    #[error("its layer {number} is {expected}, but {actual} was imported")]
    Layer {
        /// Number of the layer; the lowest is 1.
        number: usize,
        /// Digest in the document: of the blob in a manifest, of the tar in a config.
        expected: Digest,
        /// Digest of the imported layer.
        actual: Digest,
    },
    /// The config differs.
    #[error("its config is {expected}, but {actual} was given")]
    Config {
        /// Digest in the manifest.
        expected: Digest,
        /// Digest of the config that was supplied or made.
        actual: Digest,
    },
}

/// Why an import failed. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Images of the form have devices, which the store's algorithm cannot name.
    #[error(
        "images of the form {0} need sha256, but this store names its objects by {1}: use --form objects"
    )]
    Algorithm(Form, Algorithm),
    /// Only layers that are kept as tars can have an index.
    #[error(
        "layers of images of the form {0} have no index: use --form tar with --index, or leave \
        out --index"
    )]
    Index(Form),
    /// A file has an xattr that marks a deleted file in images of the form `objects`.
    #[error(
        "\"{}\" has the xattr \"{name}\", which marks deleted files in images of the form \
        objects: remove it from the source (`quire import --skip-xattrs` drops all xattrs)", path.escape_debug()
    )]
    WhiteoutMark {
        /// Path of the file.
        path: String,
        /// Name of the xattr.
        name: String,
    },
    /// The source has no layers, so there are no tars that could be kept.
    #[error(
        "the form `tar` needs layers, but this source has none: use --form packed or --form \
        objects"
    )]
    NoLayers,
    /// The image to convert cannot be opened.
    #[error(transparent)]
    OpenImage(Box<OpenImageError>),
    /// A manifest or config does not describe the imported layers.
    #[error("document {document} does not describe the imported image")]
    OtherLayers {
        /// Digest of the manifest or config.
        document: Box<Digest>,
        source: Box<LayersMismatch>,
    },
    #[error("cannot import layer {number} of {count} ({name})")]
    Layer {
        /// Number of the layer; the lowest is 1.
        number: usize,
        count: usize,
        /// Digest of the layer, or the file that contains it.
        name: String,
        source: Box<LayerFailure>,
    },
    /// A layer of the base image is missing or damaged.
    #[error(
        "layer {0} of the base image is missing or damaged in the store: import or pull that \
        image again (`quire fsck` shows the damage)"
    )]
    LayerBelow(Box<image::digest::Digest>),
    /// The content of a file of a dump or a composefs image is not found.
    #[error("cannot import \"{}\": {reason}", path.escape_ascii())]
    DumpFile {
        /// Path of the file.
        path: Vec<u8>,
        reason: &'static str,
    },
    /// A file of an EROFS image cannot be read.
    #[error("cannot read \"{}\" of the EROFS image", path.escape_ascii())]
    ErofsFile {
        /// Path of the file.
        path: Vec<u8>,
        source: Box<ReadError>,
    },
    /// A path is longer than system calls allow.
    #[error("the path \"{}…\" has {length} bytes, more than {PATH_MAX}", start.escape_ascii())]
    Path {
        /// The first 60 bytes of the path.
        start: Vec<u8>,
        /// Length of the path in bytes, with the leading slash.
        length: usize,
    },
    /// The object is neither in the store nor in the directory of objects.
    #[error(
        "object {object} of \"{}\" is not in the store{}",
        path.escape_ascii(),
        if *.looked { ", nor in the directory of --objects" } else { ": name a directory that has it with --objects" }
    )]
    Missing {
        object: ObjectId,
        /// Path of a file with this content.
        path: Vec<u8>,
        /// Whether a folder of objects was given.
        looked: bool,
    },
    /// A file of a source image cannot be used, because its data is not in an object that the store could have.
    #[error("cannot use \"{}\": {reason}", path.escape_ascii())]
    File {
        /// Path of the file.
        path: Vec<u8>,
        reason: &'static str,
    },
    /// An object of a source image is missing, or has another size.
    #[error(
        "object {object} of \"{}\" is missing or damaged in the store: import that image again \
        (`quire fsck` shows the damage)",
        path.escape_ascii()
    )]
    Gone {
        object: ObjectId,
        /// Path of a file with this content.
        path: Vec<u8>,
    },
    /// A file in the folder of objects does not have the content that its name claims.
    #[error("{} should be object {expected}, but is object {actual}", path.display())]
    NotObject {
        path: PathBuf,
        /// Object id in the file's name.
        expected: Box<ObjectId>,
        /// Object id of the file's content.
        actual: Box<ObjectId>,
    },
    #[error(transparent)]
    Object(store::DraftError),
    #[error(transparent)]
    Failed(#[from] OperationError),
    #[error("cancelled")]
    Cancelled,
}

impl ImportError {
    /// Returns the error of a step that failed.
    pub(super) fn failed(
        operation: &'static str,
        object: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        OperationError::of(operation, &object.into())(source).into()
    }

    pub(super) fn layout(source: LayoutError) -> Self {
        Self::failed("import from", "the layout", source)
    }

    pub(super) fn open(input: &Input, source: io::Error) -> Self {
        Self::failed("read", input.to_string(), source)
    }

    pub(super) fn write(source: io::Error) -> Self {
        Self::failed("write", "an object to the store", source)
    }

    pub(crate) fn manifest(source: store::StoredManifestError) -> Self {
        Self::failed("store", "the manifest", source)
    }

    pub(super) fn relocate(source: TreeError) -> Self {
        Self::failed("map", "the image's files to objects of the store", source)
    }

    pub(super) fn origin(source: store::OriginError) -> Self {
        Self::failed("read", "the origin of the image", source)
    }

    /// Returns the error of a transaction that cannot begin or end.
    #[must_use]
    pub fn transaction(source: store::TransactionError) -> Self {
        Self::failed("change", "the store", source)
    }

    pub(super) fn other_layers(document: &Digest) -> impl Fn(Box<LayersMismatch>) -> Self + use<> {
        let document = *document;
        move |source| Self::OtherLayers { document: Box::new(document), source }
    }
}

impl From<PackError> for ImportError {
    fn from(error: PackError) -> Self {
        match error {
            PackError::Stopped => Self::Cancelled,
            error => Self::failed("pack", "the data", error),
        }
    }
}

impl From<NativeError> for ImportError {
    fn from(error: NativeError) -> Self {
        Self::failed("make", "the image", error)
    }
}

impl From<StoredError> for ImportError {
    fn from(error: StoredError) -> Self {
        Self::failed("read", "the image's manifest or config", error)
    }
}
