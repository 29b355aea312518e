//! Why an import fails.

use std::io;
use std::path::PathBuf;

use image::erofs::WriteError;
use image::erofs::read::PATH_MAX;
use image::tree::TreeError;
use image::verity::{Algorithm, ImageId, ObjectId};
use store::parallel::ThreadError;
use store::{ContentsError, LookupError, OpenImageError};

use super::{DecodeError, LayerFailure, PlatformMismatch};
use crate::native::{NativeError, PackError};
use crate::stored::StoredError;
use image::digest::Digest;
use oci::docker::DockerError;
use oci::layout::LayoutError;
use oci::source::Input;

/// What differs between a document of an image and what was imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LayersMismatch {
    /// It names more layers, or fewer.
    #[error("it names {expected} layers, but {actual} were imported")]
    Count {
        /// As the document says.
        expected: usize,
        /// So many were imported.
        actual: usize,
    },
    /// It names another layer.
    #[error("its layer {number} is {expected}, but {actual} was imported")]
    Layer {
        /// Which one, from 1: the lowest.
        number: usize,
        /// As the document says: a manifest names the blob, a config the tar.
        expected: Digest,
        /// What was imported.
        actual: Digest,
    },
    /// It names another config.
    #[error("its config is {expected}, but {actual} was given")]
    Config {
        /// As the manifest says.
        expected: Digest,
        /// What was given, or was made.
        actual: Digest,
    },
}

/// Why there is no new image. The store is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Objects of this store cannot be named in a composefs image.
    #[error("the store names objects by {0}, but composefs images know only sha256")]
    Algorithm(Algorithm),
    /// The layout has no such image.
    #[error("cannot import from the layout")]
    Layout(#[source] Box<LayoutError>),
    /// The archive has no such image.
    #[error("cannot import from the archive {input}")]
    Docker {
        /// The archive.
        input: Input,
        /// Why not.
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
        /// Why not.
        source: Box<DecodeError>,
    },
    /// A file of the source cannot be opened or read.
    #[error("cannot read {input}")]
    Open {
        /// Which one.
        input: Input,
        /// Why.
        source: io::Error,
    },
    /// A file for a while cannot be written.
    #[error("cannot write a temporary file in {}", directory.display())]
    Scratch {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There are no tars to keep.
    #[error(
        "it came without layers, whose tars the form `tar` keeps: use --form packed or objects"
    )]
    NoLayers,
    /// The image to convert cannot be opened.
    #[error(transparent)]
    OpenImage(Box<OpenImageError>),
    /// The image to convert cannot be read.
    #[error("cannot read image {image}")]
    Tree {
        /// Which one.
        image: ImageId,
        /// Why.
        source: Box<ContentsError>,
    },
    /// An object of the image cannot be opened.
    #[error("cannot open object {object}")]
    Lookup {
        /// Which one.
        object: ObjectId,
        /// Why.
        source: Box<LookupError>,
    },
    /// The manifest or the config that the image was made from cannot be used.
    #[error("cannot read what the image was made from")]
    Documents(#[from] StoredError),
    /// A document of an image is not one of its layers.
    #[error("{document} is a document of another image than the one that was imported")]
    OtherLayers {
        /// The manifest or the config.
        document: Box<Digest>,
        /// What it names.
        source: Box<LayersMismatch>,
    },
    /// The data cannot be packed.
    #[error("cannot pack the data")]
    Pack(#[source] Box<PackError>),
    /// The image over devices cannot be made.
    #[error("cannot make the image")]
    Native(#[source] Box<NativeError>),
    /// A layer is not what it should be.
    #[error("cannot import layer {number} of {count} ({name})")]
    Layer {
        /// Which one, counted from 1, the lowest.
        number: usize,
        /// How many there are.
        count: usize,
        /// Its digest, or the file that it came from.
        name: String,
        /// Why.
        source: Box<LayerFailure>,
    },
    /// A layer of the image below is gone, or damaged.
    #[error(
        "the store lacks layer {0} of the image below: import or pull that image again, and `quire fsck` tells of damage"
    )]
    LayerBelow(Box<image::digest::Digest>),
    /// A directory cannot be read.
    #[error("cannot import the directory")]
    Walk(#[source] Box<store::walk::WalkError>),
    /// A file of a directory cannot be read, or changes meanwhile.
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
    /// A dump's file is no object that the store can find.
    #[error("cannot import \"{}\" of the dump: {reason}", path.escape_ascii())]
    DumpFile {
        /// The file.
        path: Vec<u8>,
        /// Why not.
        reason: &'static str,
    },
    /// A dump cannot be told where its files are in the store.
    #[error("cannot put the dump's files where the store has them")]
    Relocate {
        /// Why.
        source: TreeError,
    },
    /// A path is longer than any system call could name.
    #[error("the path \"{}…\" has {length} bytes: paths may have up to {PATH_MAX}", start.escape_ascii())]
    Path {
        /// Its first bytes.
        start: Vec<u8>,
        /// How long it is, with its leading slash, in bytes.
        length: usize,
    },
    /// The object is neither in the store nor in the folder of objects.
    #[error(
        "object {object} of \"{}\" is not in the store{}",
        path.escape_ascii(),
        if *.looked { ", nor among the given objects" } else { ": give the folder that has it" }
    )]
    Missing {
        /// The object.
        object: ObjectId,
        /// A file that has it.
        path: Vec<u8>,
        /// There was a folder to look in.
        looked: bool,
    },
    /// A file of an image that a new one is made of is none that the store could have.
    #[error("cannot take \"{}\": {reason}", path.escape_ascii())]
    File {
        /// The file.
        path: Vec<u8>,
        /// Why not.
        reason: &'static str,
    },
    /// An object of an image that a new one is made of is gone, or has another size.
    #[error(
        "the store lacks object {object} of \"{}\", or it is damaged: import that image again, and `quire fsck` tells of \
         damage",
        path.escape_ascii()
    )]
    Gone {
        /// The object.
        object: ObjectId,
        /// A file that has it.
        path: Vec<u8>,
    },
    /// A file among the given objects has other bytes than its name says.
    #[error("{} is not object {expected}, but {actual}", path.display())]
    NotObject {
        /// The file.
        path: PathBuf,
        /// By its name.
        expected: Box<ObjectId>,
        /// By its bytes.
        actual: Box<ObjectId>,
    },
    /// An object cannot be added.
    #[error(transparent)]
    Object(store::DraftError),
    /// The bytes of an object cannot be written.
    #[error("cannot write an object of the store")]
    Write(#[source] io::Error),
    /// The image cannot be written.
    #[error("cannot write the image")]
    Image(#[source] WriteError),
    /// A manifest or config cannot be stored.
    #[error("cannot store the manifest")]
    Manifest(#[source] store::ManifestError),
    /// It cannot be told where the image that is converted came from.
    #[error("cannot tell where the image came from")]
    Origin(#[source] store::OriginError),
    /// The transaction cannot begin or end.
    #[error("cannot change the store")]
    Transaction(#[source] store::TransactionError),
    /// A thread cannot be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// As asked for.
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
