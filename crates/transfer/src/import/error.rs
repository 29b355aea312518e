//! Why an import fails.

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
    /// Another number of layers.
    #[error("it names {expected} layers, but {actual} were imported")]
    Count {
        /// Number in the document.
        expected: usize,
        /// Number of imported layers.
        actual: usize,
    },
    /// Another layer.
    #[error("its layer {number} is {expected}, but {actual} was imported")]
    Layer {
        /// Number of the layer; the lowest is 1.
        number: usize,
        /// Digest in the document: of the blob in a manifest, of the tar in a config.
        expected: Digest,
        /// Digest of the imported layer.
        actual: Digest,
    },
    /// Another config.
    #[error("its config is {expected}, but {actual} was given")]
    Config {
        /// Digest in the manifest.
        expected: Digest,
        /// Digest of the config that was given or made.
        actual: Digest,
    },
}

/// Why an import failed. The store is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Composefs images cannot name objects by this store's algorithm.
    #[error("composefs images need sha256, and this store names its objects by {0}")]
    Algorithm(Algorithm),
    /// Indexes are of layers' tars.
    #[error(
        "layers of images of the form {0} have no index: write --form tar with --index, or leave out --index"
    )]
    Index(Form),
    /// The index of a layer cannot be looked up or kept.
    #[error("cannot keep the index of layer {layer}")]
    LayerIndex {
        /// The layer's diff id.
        layer: Box<Digest>,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The layout does not have the image, or cannot be read.
    #[error("cannot import from the layout")]
    Layout(#[source] Box<LayoutError>),
    /// The layout does not have a foreign layer.
    #[error("cannot import layer {layer}, from the layout")]
    Foreign {
        /// Its digest, and where the manifest says that it is.
        layer: String,
        /// The cause.
        source: Box<LayoutError>,
    },
    /// The archive does not have the image, or cannot be read.
    #[error("cannot import from the archive {input}")]
    Docker {
        /// The archive.
        input: Input,
        /// The cause.
        source: Box<DockerError>,
    },
    /// The image is for another platform.
    #[error("cannot import the image")]
    Platform(#[source] PlatformMismatch),
    /// The archive cannot be unpacked.
    #[error("cannot unpack the archive {input}")]
    Unpack {
        /// The archive.
        input: Input,
        /// The cause.
        source: Box<DecodeError>,
    },
    /// A file has an xattr that means a deleted file in images of the form `objects`.
    #[error(
        "\"{}\" has the xattr \"{name}\", which marks deleted files in images of the form objects: leave it out of the source \
         (`quire import --skip-xattrs` drops all xattrs)", path.escape_debug()
    )]
    WhiteoutMark {
        /// The file.
        path: String,
        /// The xattr.
        name: String,
    },
    /// A file of the source cannot be opened or read.
    #[error("cannot read {input}")]
    Open {
        /// The input.
        input: Input,
        /// The cause.
        source: io::Error,
    },
    /// A temporary file cannot be written.
    #[error("cannot write a temporary file in {}", directory.display())]
    Scratch {
        /// Its directory.
        directory: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The source has no layers whose tars could be kept.
    #[error(
        "the form `tar` needs layers, and this source has none: use --form packed or --form objects"
    )]
    NoLayers,
    /// The image to convert cannot be opened.
    #[error(transparent)]
    OpenImage(Box<OpenImageError>),
    /// The image to convert cannot be read.
    #[error("cannot read image {image}")]
    Tree {
        /// The image.
        image: ImageId,
        /// The cause.
        source: Box<ContentsError>,
    },
    /// An object of the image cannot be opened.
    #[error("cannot open object {object}")]
    Lookup {
        /// The object.
        object: ObjectId,
        /// The cause.
        source: Box<LookupError>,
    },
    /// The manifest or the config that the image was made from cannot be used.
    #[error("cannot read the image's manifest or config")]
    Documents(#[from] StoredError),
    /// A manifest or config does not describe the imported layers.
    #[error("document {document} does not describe the imported image")]
    OtherLayers {
        /// The manifest or the config.
        document: Box<Digest>,
        /// The difference.
        source: Box<LayersMismatch>,
    },
    /// The data cannot be packed.
    #[error("cannot pack the data")]
    Pack(#[source] Box<PackError>),
    /// The image over devices cannot be made.
    #[error("cannot make the image")]
    Native(#[source] Box<NativeError>),
    /// A layer cannot be imported.
    #[error("cannot import layer {number} of {count} ({name})")]
    Layer {
        /// Number of the layer; the lowest is 1.
        number: usize,
        /// Number of layers.
        count: usize,
        /// Its digest, or the file that it came from.
        name: String,
        /// The cause.
        source: Box<LayerFailure>,
    },
    /// A layer of the base image is missing or damaged.
    #[error(
        "layer {0} of the base image is missing or damaged in the store: import or pull that image again (`quire fsck` \
         shows damage)"
    )]
    LayerBelow(Box<image::digest::Digest>),
    /// A directory cannot be read.
    #[error("cannot import the directory")]
    Walk(#[source] Box<store::walk::WalkError>),
    /// A file of the directory cannot be read, or changed while it was read.
    #[error("cannot read the file")]
    ReadFile(#[source] io::Error),
    /// A dump cannot be parsed.
    #[error("cannot import the dump {input}")]
    Dump {
        /// The dump.
        input: Input,
        /// Which line, and why.
        source: Box<image::dump::ParseError>,
    },
    /// The content of a file of the dump cannot be found.
    #[error("cannot import \"{}\" of the dump: {reason}", path.escape_ascii())]
    DumpFile {
        /// The file.
        path: Vec<u8>,
        /// The reason.
        reason: &'static str,
    },
    /// The files of the dump cannot be mapped to objects of the store.
    #[error("cannot map the dump's files to objects of the store")]
    Relocate {
        /// The cause.
        source: TreeError,
    },
    /// A path is longer than system calls allow.
    #[error("the path \"{}…\" has {length} bytes: paths may have up to {PATH_MAX}", start.escape_ascii())]
    Path {
        /// Its first bytes.
        start: Vec<u8>,
        /// Length with the leading slash, in bytes.
        length: usize,
    },
    /// The object is neither in the store nor in the folder of objects.
    #[error(
        "object {object} of \"{}\" is not in the store{}",
        path.escape_ascii(),
        if *.looked { ", nor in the folder of --objects" } else { ": name a folder that has it with --objects" }
    )]
    Missing {
        /// The object.
        object: ObjectId,
        /// A file with this content.
        path: Vec<u8>,
        /// Whether there was a folder to look in.
        looked: bool,
    },
    /// A file of a source image has no object that the store could have.
    #[error("cannot use \"{}\": {reason}", path.escape_ascii())]
    File {
        /// The file.
        path: Vec<u8>,
        /// The reason.
        reason: &'static str,
    },
    /// An object of a source image is missing, or has another size.
    #[error(
        "object {object} of \"{}\" is missing or damaged in the store: import that image again (`quire fsck` shows \
         damage)",
        path.escape_ascii()
    )]
    Gone {
        /// The object.
        object: ObjectId,
        /// A file with this content.
        path: Vec<u8>,
    },
    /// A file among the given objects does not have the content that its name says.
    #[error("{} should be object {expected}, but is object {actual}", path.display())]
    NotObject {
        /// The file.
        path: PathBuf,
        /// Id in its name.
        expected: Box<ObjectId>,
        /// Id of its content.
        actual: Box<ObjectId>,
    },
    /// An object cannot be added.
    #[error(transparent)]
    Object(store::DraftError),
    /// The bytes of an object cannot be written.
    #[error("cannot write an object to the store")]
    Write(#[source] io::Error),
    /// The image cannot be written.
    #[error("cannot write the image")]
    Image(#[source] WriteError),
    /// A manifest or config cannot be stored.
    #[error("cannot store the manifest")]
    Manifest(#[source] store::ManifestError),
    /// The origin of the image to convert cannot be read.
    #[error("cannot read where the image came from")]
    Origin(#[source] store::OriginError),
    /// The transaction cannot begin or end.
    #[error("cannot change the store")]
    Transaction(#[source] store::TransactionError),
    /// A thread cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// The caller cancelled the import.
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
