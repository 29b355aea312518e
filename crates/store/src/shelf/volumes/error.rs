//! Errors of volumes.

use std::path::PathBuf;

use crate::disk::DiskError;
use crate::record::RecordError;

/// Maximum length of all labels of a volume as JSON, in bytes.
pub const VOLUME_LABELS_MAX: usize = 256 << 10;

/// An error of a volume.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeError {
    /// The name is invalid.
    #[error("\"{}\" is not a name of a volume: use 1 to 64 letters, digits, - _ and ., beginning with a letter, a \
        digit or _", .0.escape_debug())]
    Name(String),
    #[error("volume {0} already exists")]
    Exists(String),
    /// The text is podman's.
    #[error("no volume with name \"{}\" found: no such volume", .0.escape_debug())]
    Absent(String),
    /// A container needs the volume.
    #[error(
        "container {container} uses volume {name}: remove the container first (`quire rm {container}`)"
    )]
    InUse { name: String, container: String },
    /// A container's record is damaged, so the volumes that it uses are unknown.
    #[error(
        "the record of container {0} is damaged, so it may use any volume: remove it first (`quire rm --force {0}`)"
    )]
    UnknownUser(String),
    /// The record cannot be read.
    #[error("the record of volume {name} is damaged: `quire fsck --repair` makes a new one")]
    Damaged { name: String, source: RecordError },
    /// The labels do not fit into the record.
    #[error(
        "the labels of a volume may have {VOLUME_LABELS_MAX} bytes as JSON, and these have {bytes}: use shorter \
        ones, or fewer control characters"
    )]
    Labels {
        /// Length of the labels as JSON, in bytes.
        bytes: usize,
    },
    #[error("the store {} is open read-only", .0.display())]
    ReadOnly(PathBuf),
    #[error(transparent)]
    Disk(#[from] DiskError),
}
