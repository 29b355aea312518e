//! Errors of devices, which lookups of objects return as well.

use image::verity::DeviceId;

use super::index_damage::IndexDamage;

/// A reason why a device cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    #[error("device {0} is not in the store")]
    Absent(DeviceId),
    /// The name belongs to something other than a regular file.
    #[error("device {0} is not a regular file")]
    NotAFile(DeviceId),
    /// The file is too short or too long.
    #[error("device {device} has {actual} bytes, not {expected}: `quire fsck` shows the damage")]
    Length {
        device: DeviceId,
        /// Length in bytes that the image or the index states.
        expected: u64,
        /// Length of the file in bytes.
        actual: u64,
    },
    #[error(
        "the index of device {device} is damaged: {reason}; import its image again to rewrite the index"
    )]
    Index { device: DeviceId, reason: Box<IndexDamage> },
}
