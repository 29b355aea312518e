//! The options of images whose files' bytes are in other files, which EROFS uses as devices.
//!
//! Section 5 of `docs/format/erofs-profile.md` has the rules.

use std::fmt;

use super::blocks::BlockSize;
use crate::verity::{DeviceId, ObjectId};

/// Block size of these images, because files on devices begin at multiples of 512.
pub(super) const BLOCK_SIZE: BlockSize = BlockSize::B512;
/// Maximum number of devices of an image. The root must be near the beginning of the image, after the device table.
pub const DEVICES_MAX: usize = 4096;

/// The options of an image over devices. An image without devices is self-contained.
#[derive(Clone, Copy)]
pub struct Native<'a> {
    /// Whether a device is a tar, which the image's header states.
    pub has_tar: bool,
    /// The devices, in the order of the device table.
    pub devices: &'a [DeviceFile],
    /// Finds the location of an object's bytes; `None` for objects to be stored in the image. Called once per object.
    pub find: &'a dyn Fn(&ObjectId) -> Option<Placed<'a>>,
    /// UUID of the volume; zeros for none.
    pub uuid: [u8; 16],
}

impl<'a> Native<'a> {
    /// Creates options without a uuid and without a tar.
    #[must_use]
    pub fn new(
        devices: &'a [DeviceFile],
        find: &'a dyn Fn(&ObjectId) -> Option<Placed<'a>>,
    ) -> Self {
        Self { has_tar: false, devices, find, uuid: [0; 16] }
    }
}

impl fmt::Debug for Native<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { has_tar, devices, find: _, uuid } = self;
        let mut debug = f.debug_struct("Native");
        debug.field("has_tar", has_tar).field("devices", devices);
        debug.field("uuid", uuid).finish_non_exhaustive()
    }
}

/// A device: a file with the bytes of many files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFile {
    /// SHA-256 id of the device, which is stored in the device table.
    pub id: DeviceId,
    /// Length of the device in bytes, a multiple of 512.
    pub bytes: u64,
}

/// The location of an object's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed<'a> {
    /// One run on one device.
    Whole(Stored),
    /// Several runs.
    Pieces {
        /// The runs, in order.
        runs: &'a [Run],
        /// SHA-256 of the object's bytes, like [`Stored::fingerprint`].
        fingerprint: [u8; 32],
    },
}

/// A run of an object's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Length in bytes: whole blocks, except for an object's last run, which is padded with zeros to a whole block.
    pub len: u64,
    /// Index of the device in [`Native::devices`], and offset of the run on the device in bytes, a multiple of 512;
    /// `None` for zeros, which are not stored.
    pub place: Option<(u16, u64)>,
}

/// The location of an object that is stored as one run, padded with zeros to a whole block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Index of the device in [`Native::devices`].
    pub device: u16,
    /// Offset of the first byte on the device in bytes, a multiple of 512.
    pub offset: u64,
    /// SHA-256 of the file's bytes. The caller guarantees it, because kernels treat files with equal fingerprints as
    /// equal.
    pub fingerprint: [u8; 32],
}
