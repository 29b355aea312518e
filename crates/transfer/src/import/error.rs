//! Errors of imports.

use std::io;
use std::path::PathBuf;

use image::erofs::WriteError;
use image::erofs::read::PATH_MAX;
use image::tree::TreeError;
use image::verity::{Algorithm, ImageId, ObjectId};
use store::parallel::ThreadError;
use store::{ContentsError, Form, LookupError, OpenImageError};

use super::{DecodeError, LayerFailure, PlatformMismatch};
use crate::native::{NativeError, PackError};
use crate::stored::StoredError;
use image::digest::Digest;
use oci::docker::DockerError;
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
    /// The store's algorithm cannot name objects in composefs images.
    #[error("composefs images need sha256, but this store names its objects by {0}")]
    Algorithm(Algorithm),
    /// Only layers that are kept as tars can have an index.
    #[error(
        "layers of images of the form {0} have no index: use --form tar with --index, or leave \
        out --index"
    )]
    Index(Form),
    /// The index of a layer cannot be looked up or stored.
    #[error("cannot store the index of layer {layer}")]
    LayerIndex {
        /// Diff id of the layer.
        layer: Box<Digest>,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The layout does not have the image, or cannot be read.
    #[error("cannot import from the layout")]
    Layout(#[source] Box<LayoutError>),
    /// A foreign layer is missing from the layout.
    #[error("cannot import layer {layer}, from the layout")]
    Foreign {
        /// Digest of the layer, and its URLs in the manifest.
        layer: String,
        source: Box<LayoutError>,
    },
    /// The archive does not have the image, or cannot be read.
    #[error("cannot import from the archive {input}")]
    Docker { input: Input, source: Box<DockerError> },
    /// The image is for another platform.
    #[error("cannot import the image")]
    Platform(#[source] PlatformMismatch),
    #[error("cannot unpack the archive {input}")]
    Unpack { input: Input, source: Box<DecodeError> },
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
    /// A file of the source cannot be opened or read.
    #[error("cannot read {input}")]
    Open { input: Input, source: io::Error },
    #[error("cannot write a temporary file in {}", directory.display())]
    Scratch { directory: PathBuf, source: io::Error },
    /// The source has no layers, so there are no tars to keep.
    #[error(
        "the form `tar` needs layers, but this source has none: use --form packed or --form \
        objects"
    )]
    NoLayers,
    /// The image to convert cannot be opened.
    #[error(transparent)]
    OpenImage(Box<OpenImageError>),
    /// The image to convert cannot be read.
    #[error("cannot read image {image}")]
    Tree { image: ImageId, source: Box<ContentsError> },
    /// An object of the image cannot be opened.
    #[error("cannot open object {object}")]
    Lookup { object: ObjectId, source: Box<LookupError> },
    /// The stored manifest or config of the image cannot be used.
    #[error("cannot read the image's manifest or config")]
    Documents(#[from] StoredError),
    /// A manifest or config does not describe the imported layers.
    #[error("document {document} does not describe the imported image")]
    OtherLayers {
        /// Digest of the manifest or config.
        document: Box<Digest>,
        source: Box<LayersMismatch>,
    },
    #[error("cannot pack the data")]
    Pack(#[source] Box<PackError>),
    /// The image over devices cannot be made.
    #[error("cannot make the image")]
    Native(#[source] Box<NativeError>),
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
    #[error("cannot import the directory")]
    Walk(#[source] Box<store::walk::WalkError>),
    /// A file of the directory cannot be read, or changed while it was read.
    #[error("cannot read the file")]
    ReadFile(#[source] io::Error),
    #[error("cannot import the dump {input}")]
    Dump {
        input: Input,
        /// The line, and the reason.
        source: Box<image::dump::ParseError>,
    },
    /// The content of a file of the dump is not found.
    #[error("cannot import \"{}\" of the dump: {reason}", path.escape_ascii())]
    DumpFile {
        /// Path of the file.
        path: Vec<u8>,
        reason: &'static str,
    },
    /// The files of the dump cannot be mapped to objects of the store.
    #[error("cannot map the dump's files to objects of the store")]
    Relocate { source: TreeError },
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
    /// A file of a source image cannot be used, because it has no object that the store could have.
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
    /// The data of an object cannot be written.
    #[error("cannot write an object to the store")]
    Write(#[source] io::Error),
    #[error("cannot write the image")]
    Image(#[source] WriteError),
    /// A manifest or config cannot be stored.
    #[error("cannot store the manifest")]
    Manifest(#[source] store::ManifestError),
    /// The origin of the image to convert cannot be read.
    #[error("cannot read the origin of the image")]
    Origin(#[source] store::OriginError),
    /// The transaction cannot begin or end.
    #[error("cannot change the store")]
    Transaction(#[source] store::TransactionError),
    #[error(transparent)]
    Thread(#[from] ThreadError),
    #[error("cancelled")]
    Cancelled,
}

impl ImportError {
    pub(super) fn layout(source: LayoutError) -> Self {
        Self::Layout(Box::new(source))
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
            error => Self::Pack(Box::new(error)),
        }
    }
}

impl From<NativeError> for ImportError {
    fn from(error: NativeError) -> Self {
        Self::Native(Box::new(error))
    }
}
