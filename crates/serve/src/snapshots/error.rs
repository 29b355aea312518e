//! Errors of requests of an engine.

use std::path::PathBuf;

use container::bundle::userns::MapError;
use container::changes::ChangesError;
use container::root::filestore::{SIZE_MAX, SIZE_MIN};
use container::root::{MakeRootError, RootError};
use oci::policy::ImageOrigin;
use store::{
    BytesError, DiskError, OpenImageError, OperationError, SnapshotError, StoredLayerError,
};
use transfer::evidence::UseError;
use transfer::export::CopyError;
use transfer::import::ImportError;

use super::content::ContentError;
use super::grpc::filter::FilterError;
use super::lengths;

/// Reason why a request was refused or failed. Such a request has changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotterError {
    /// The name is in use.
    #[error("snapshot {}: already exists", .0.escape_debug())]
    Exists(String),
    /// The engine need not download the layer of this snapshot. It treats this error as success.
    #[error("snapshot {}: already exists, so its layer need not be downloaded", .0.escape_debug())]
    Skipped(String),
    /// The snapshot does not exist.
    #[error("snapshot {}: not found", .0.escape_debug())]
    Absent(String),
    /// A committed snapshot has no mounts.
    #[error("snapshot {} is committed: only active ones and views have mounts", .0.escape_debug())]
    Committed(String),
    /// Only active snapshots can be committed.
    #[error("snapshot {} is not active, so it cannot be committed", .0.escape_debug())]
    NotActive(String),
    /// A layer can only be applied to an unchanged snapshot.
    #[error("snapshot {} already has changes, so no layer can be applied to it", .0.escape_debug())]
    Written(String),
    /// The engine's own differ has unpacked the layer to another path.
    #[error(
        "no layer was applied to snapshot {}, and its root was not mounted: configure containerd \
        to use the differ of this service for all layers of an image, or for none",
        .0.escape_debug()
    )]
    NeverUnpacked(String),
    /// The root was never mounted, so there are no changes.
    #[error(
        "the root of snapshot {} was never mounted, so it has no changes: request its mounts first",
        .0.escape_debug()
    )]
    NeverMounted(String),
    /// The record of a snapshot below could not be read.
    #[error(
        "its parent is unknown: record number {0} of this instance was damaged when the service \
        started (see the log). Remove the snapshots above it, and let the engine pull the image \
        again"
    )]
    Broken(u64),
    /// A parent must be committed.
    #[error("snapshot {} is not committed, so it cannot be a parent", .0.escape_debug())]
    NotCommitted(String),
    /// A snapshot with children cannot be removed.
    #[error("cannot remove snapshot {}: it is the parent of snapshot {}", .0.escape_debug(), .1.escape_debug())]
    HasChild(String, String),
    /// The engine named another parent than that of the snapshot.
    #[error(
        "the parent of snapshot {} is {}: this snapshotter cannot change it (capability rebase)",
        .0.escape_debug(), .1.escape_debug()
    )]
    OtherParent(String, String),
    /// The name is empty or too long.
    #[error("the name of a snapshot must have 1 to {MAX} bytes", MAX = lengths::NAME_MAX)]
    Name,
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A label is too long.
    #[error("label {} and its value have more than {MAX} bytes", .0.escape_debug(), MAX = lengths::LABEL_MAX)]
    Label(String),
    /// The labels are too long together.
    #[error("all labels together have more than {MAX} bytes", MAX = lengths::LABELS_MAX)]
    Labels,
    /// Only labels can be changed.
    #[error("cannot change the field {} of a snapshot: only labels can be changed", .0.escape_debug())]
    Field(String),
    /// The labels contain an invalid id map.
    #[error(
        "the labels of snapshot {} have an invalid map of ids: uidmapping and gidmapping are \
        CONTAINER:HOST:SIZE",
        name.escape_debug()
    )]
    Map {
        /// Name of the snapshot.
        name: String,
        source: MapError,
    },
    /// The labels contain an invalid size limit.
    #[error(
        "the labels of snapshot {} request a limit of {} bytes: max-size is {SIZE_MIN} to \
        {SIZE_MAX} bytes",
        name.escape_debug(), size.escape_debug()
    )]
    Size {
        /// Name of the snapshot.
        name: String,
        /// The value of the label.
        size: String,
    },
    /// A filter is invalid.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The policies cannot be read.
    #[error("cannot read the policies, so all images are refused: {0}")]
    Policies(String),
    /// A policy refuses the image.
    #[error(transparent)]
    Refused(Box<UseError>),
    /// A policy refuses images of unknown origin, which include those whose layers an engine has downloaded.
    #[error(
        "the default of {} refuses image {image}: its layers came from the engine, so its origin \
        is unknown, and no rule matches it. Only default = \"any\" accepts it; a last [[rule]] \
        there with match = [\"**\", \"local\"] and accept = \"none\" refuses all others",
        file.display()
    )]
    UnknownOrigin {
        image: String,
        /// Path of the policy.
        file: PathBuf,
    },
    /// The image cannot be opened.
    #[error(transparent)]
    Image(Box<OpenImageError>),
    /// The id map lacks the owner of the root directory.
    #[error(
        "the root directory of {image} belongs to user {user} and group {group}, and the map of \
        ids in the labels lacks one or both. An engine maps owners by itself, and so twice, if \
        its [proxy_plugins] lacks capabilities = [\"remap-ids\"] for this snapshotter: add that \
        line as `quire serve --snapshotter --print-config containerd` prints it, restart the \
        engine, and make the container again"
    )]
    Unmapped {
        /// Name of the image.
        image: String,
        /// Owner of its root directory.
        user: u32,
        /// Group of its root directory.
        group: u32,
    },
    /// The root cannot be made.
    #[error(transparent)]
    Root(Box<MakeRootError>),
    /// The changes cannot be read.
    #[error(transparent)]
    Changes(#[from] ChangesError),
    /// The changes were modified each time they were read.
    #[error(
        "read the changes of a container {tries} times, but it kept writing: pause it, or try \
        again"
    )]
    Busy {
        /// Number of attempts.
        tries: u32,
        /// The last modification.
        source: ChangesError,
    },
    /// The changes cannot be made a layer.
    #[error(transparent)]
    Import(Box<ImportError>),
    /// A layer of the store cannot be read.
    #[error(transparent)]
    Layer(StoredLayerError),
    /// The tar of a layer cannot be read.
    #[error(transparent)]
    Bytes(Box<BytesError>),
    /// A layer cannot be packed.
    #[error(transparent)]
    Pack(#[from] CopyError),
    /// A call of the engine's content store failed.
    #[error(transparent)]
    Content(#[from] ContentError),
    /// The record cannot be written.
    #[error(transparent)]
    Store(#[from] SnapshotError),
}

/// Returns the error of a directory with changes that cannot be opened.
pub(super) fn unopened(error: std::io::Error) -> OperationError {
    OperationError::of("open", "the directory of a snapshot's changes")(error)
}

impl From<Box<UseError>> for SnapshotterError {
    fn from(error: Box<UseError>) -> Self {
        match *error {
            UseError::Refused(refusal)
                if refusal.rule.is_none() && refusal.subject.source == ImageOrigin::Unknown =>
            {
                let refusal = *refusal;
                Self::UnknownOrigin { image: refusal.subject.name, file: refusal.file }
            }
            error => Self::Refused(Box::new(error)),
        }
    }
}

impl From<MakeRootError> for SnapshotterError {
    fn from(error: MakeRootError) -> Self {
        match error {
            MakeRootError::Root(RootError::Nobody { name: image, user, group }) => {
                Self::Unmapped { image, user, group }
            }
            error => Self::Root(Box::new(error)),
        }
    }
}

impl From<DiskError> for SnapshotterError {
    fn from(error: DiskError) -> Self {
        Self::Store(error.into())
    }
}

impl From<ImportError> for SnapshotterError {
    fn from(error: ImportError) -> Self {
        Self::Import(Box::new(error))
    }
}
