//! Images whose files' bytes are in other files, which EROFS is given as devices.
//!
//! Section 5 of `docs/format/erofs-profile.md` has the rules.

use std::fmt;

use crate::erofs::write::place::BlockSize;
use crate::verity::{DeviceId, ObjectId};

/// Blocks of these images, since devices have files at multiples of 512.
pub(super) const BLOCK_SIZE: BlockSize = BlockSize::B512;
/// Limit of devices of an image: the root must be near the beginning of the image.
pub const DEVICES_MAX: usize = 4096;

/// How an image over devices is made. Without devices it is self-contained.
#[derive(Clone, Copy)]
pub struct Native<'a> {
    /// Whether a device is a tar, which the image's header says.
    pub has_tar: bool,
    /// The device table.
    pub devices: &'a [DeviceFile],
    /// Finds the place of an object's bytes; `None` for those that go into the image. Called once for each object.
    pub find: &'a dyn Fn(&ObjectId) -> Option<Placed<'a>>,
    /// The volume's uuid; zeros for none.
    pub uuid: [u8; 16],
}

impl<'a> Native<'a> {
    /// Without a uuid, and without a tar.
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
    /// Its SHA-256 id, which goes into the device table.
    pub id: DeviceId,
    /// Its length in bytes, a multiple of 512.
    pub bytes: u64,
}

/// The place of an object's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed<'a> {
    /// In one run on one device.
    Whole(Stored),
    /// In several places.
    Pieces {
        /// The runs, in order.
        runs: &'a [Run],
        /// As [`Stored::fingerprint`].
        fingerprint: [u8; 32],
    },
}

/// A run of an object's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Length in bytes: whole blocks, except for an object's last run, which is padded with zeros to a whole block.
    pub len: u64,
    /// The device, by its place in [`Native::devices`], and where on it the run begins, a multiple of 512;
    /// `None` for zeros, which are not stored.
    pub place: Option<(u16, u64)>,
}

/// The place of all bytes of an object, padded with zeros to a whole block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// The device, by its place in [`Native::devices`].
    pub device: u16,
    /// Offset of the first byte on the device, in bytes, a multiple of 512.
    pub offset: u64,
    /// SHA-256 of the file's bytes. The caller guarantees it: kernels take files with equal fingerprints for equal.
    pub fingerprint: [u8; 32],
}
