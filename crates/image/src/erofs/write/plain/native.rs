//! Images whose files' bytes are in other files, which EROFS is given as devices.
//!
//! Section 5 of `docs/format/erofs-profile.md` has the rules.

use std::fmt;

use crate::erofs::write::place::BlockSize;
use crate::verity::{DeviceId, ObjectId};

/// Blocks of these images, since devices have files at multiples of 512.
pub(super) const BLOCK_SIZE: BlockSize = BlockSize::B512;
/// Devices that an image may have: the root has to be near its beginning.
pub const DEVICES_MAX: usize = 4096;

/// How an image over devices is made. Without any it is self-contained.
#[derive(Clone, Copy)]
pub struct Native<'a> {
    /// Whether a device is a tar, which the image's header says.
    pub has_tar: bool,
    /// The device table.
    pub devices: &'a [DeviceFile],
    /// Where an object's bytes are; `None` for those that are to be in the image itself. Asked once for each object.
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

/// A file with many files' bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFile {
    /// Its name, which goes into the device table. By SHA-256.
    pub id: DeviceId,
    /// Its length, a multiple of 512.
    pub bytes: u64,
}

/// Where an object's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed<'a> {
    /// One behind the other on one device.
    Whole(Stored),
    /// In several places.
    Pieces {
        /// These, in order.
        runs: &'a [Run],
        /// As [`Stored::fingerprint`].
        fingerprint: [u8; 32],
    },
}

/// A run of an object's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Bytes: whole blocks, but for an object's last run, behind which zeros follow up to a block's end.
    pub len: u64,
    /// The device, by its place in [`Native::devices`], and where on it the run begins, a multiple of 512;
    /// `None` for zeros, which are nowhere.
    pub place: Option<(u16, u64)>,
}

/// Where all of an object's bytes are, with zeros behind them up to a block's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// By its place in [`Native::devices`].
    pub device: u16,
    /// Where the first byte is on the device, a multiple of 512.
    pub offset: u64,
    /// SHA-256 of the file's bytes. Who answers vouches for it: kernels take files with the same for the same file.
    pub fingerprint: [u8; 32],
}
