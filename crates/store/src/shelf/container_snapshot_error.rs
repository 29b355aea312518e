//! Errors of snapshots of containers.

use std::path::PathBuf;

use image::verity::ImageId;

use crate::disk::DiskError;
use crate::record::RecordError;

/// Maximum number of snapshots in a chain that are opened. Quire merges longer chains than 16.
pub(super) const CHAIN_MAX: usize = 64;

/// An error while a container snapshot is made, opened or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ContainerSnapshotError {
    /// The name is not 1 to 64 of `a-z A-Z 0-9 - _ .`, or begins with a dot or a hyphen.
    #[error(
        "\"{}\" is not a name of a snapshot: use 1 to 64 letters, digits, - _ and ., beginning \
        with a letter, a digit or _", .0.escape_debug()
    )]
    Name(String),
    #[error(
        "another snapshot has the name {0}: choose another one, or remove that snapshot with \
        `quire snapshot rm {0}`"
    )]
    NameTaken(String),
    #[error("there is no snapshot \"{}\": `quire snapshot list` shows all", .0.escape_debug())]
    Absent(String),
    /// Several ids begin with these digits.
    #[error("the ids of several snapshots begin with {0}: give more digits of one")]
    Ambiguous(String),
    /// A snapshot that another one needs does not exist.
    #[error(
        "snapshot {id} cannot be used: snapshot {below}, which is below it, is not in the store. \
        Remove what needs it with `quire snapshot rm {id}`, or `quire rm` for containers"
    )]
    NothingBelow {
        id: String,
        /// Id of the missing snapshot.
        below: String,
    },
    /// Each snapshot of a chain needs the next one, without an end.
    #[error("snapshot {0} has more than {CHAIN_MAX} snapshots below it: its record is damaged")]
    Endless(String),
    /// The machine stopped before the data was on the disk.
    #[error(
        "snapshot {0} is lost, because the host restarted before its data was on the disk. Remove the \
        containers that need it (`quire rm`); then `quire gc` removes it"
    )]
    Lost(String),
    /// The disk could not write the snapshot's data.
    #[error(
        "the disk failed to write snapshot {0}: it can be used until the host restarts, so save it with \
        `quire commit`"
    )]
    Unwritten(String),
    /// The record of a snapshot cannot be read.
    #[error(
        "the record of snapshot {id} is damaged: `quire fsck --repair` removes the snapshot, once \
        nothing needs it"
    )]
    Damaged { id: String, source: RecordError },
    /// The snapshot's image is not in the store.
    #[error("the snapshot needs image {0}, which is not in the store: pull or import it again")]
    NoImage(ImageId),
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(PathBuf),
    #[error(transparent)]
    Disk(#[from] DiskError),
}
