//! Devices: files that contain the data of many objects, and that EROFS images use as devices.
//!
//! `data/ID` is a device and `data/ID.index` its index. `docs/format/object-store.md`, "Devices", describes the
//! layout.

mod catalog;
mod index;
mod pieces;
mod ranges;
mod reader;

pub use index::{IndexDamage, exercise_data_index};
pub use pieces::{ObjectPiece, StoredPiece};
pub use reader::ObjectReader;

pub(crate) use catalog::{Look, OpenMade, key};
pub(crate) use index::{Builder, Entry, Header, Index, IndexError, IndexPiece as PieceKey, Record};
pub(crate) use pieces::resolve;
pub(crate) use ranges::Ranges;

use std::fs::File;
use std::sync::{Arc, Mutex};

use image::verity::{DeviceId, ObjectId};
use rustix::fs::Stat;

use catalog::Catalog;

use super::data_error::DataError;
use super::images::id_of;
use super::objects::ObjectLookupError;
use super::{LateDirectory, Listing, is_in_use};
use crate::disk::{Directory, DiskError, length, on_disk};
use crate::staging::Tmp;

/// The directory, which is created with the first device.
pub(crate) const DATA: &str = "data";

/// Suffix of an index file.
const INDEX: &str = ".index";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// The device contains whole objects in blocks of 512 bytes. Objects of more than seven blocks begin at a multiple
    /// of 4096 bytes; shorter objects do not cross such a multiple.
    Packed,
    /// The uncompressed tar of a layer, padded with zeros to a whole block.
    Tar,
}

impl DeviceKind {
    /// Number of the kind in an index.
    pub(crate) const fn number(self) -> u32 {
        match self {
            Self::Packed => 1,
            Self::Tar => 2,
        }
    }
}

/// Length of a device's block in bytes. Every object begins at a multiple of this.
pub const DATA_BLOCK: u64 = 512;

/// A device in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredDevice {
    /// fs-verity digest of the device's bytes. An image's device table contains it in hex.
    pub id: DeviceId,
    /// Length in bytes, a multiple of the block.
    pub bytes: u64,
    pub kind: DeviceKind,
}

/// Location of an object in a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    pub object: ObjectId,
    /// The device. For an object in pieces, the device whose index lists the pieces.
    pub device: DeviceId,
    /// Length of the device in bytes.
    pub device_bytes: u64,
    /// Kind of the device.
    pub kind: DeviceKind,
    /// Offset of the object in the device, in bytes; 0 for an empty object, and for an object in pieces.
    pub offset: u64,
    /// Length of the whole object in bytes.
    pub size: u64,
    /// SHA-256 of the object's bytes.
    pub sha256: [u8; 32],
    /// Pieces of an object in pieces, in order.
    pub pieces: Option<Arc<[StoredPiece]>>,
}

impl StoredObject {
    /// Returns the devices that contain the object's bytes, and the device whose index lists the object. A device may
    /// occur more than once.
    pub fn devices(&self) -> impl Iterator<Item = StoredDevice> {
        let pieces = self.pieces.iter().flat_map(|it| it.iter());
        let of = |it: &Self| StoredDevice { id: it.device, bytes: it.device_bytes, kind: it.kind };
        let pieces = pieces.filter_map(move |it| it.stored.as_ref().map(of));
        std::iter::once(of(self)).chain(pieces)
    }
}

/// Location of an object in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Where {
    /// A file in `objects/`, as composefs images need it.
    File,
    /// A location in a device.
    Device(Box<StoredObject>),
}

/// Returns the file name of a device.
pub(crate) fn device_name(id: &DeviceId) -> String {
    id.to_string()
}

/// Returns the file name of a device's index.
pub(crate) fn index_name(id: &DeviceId) -> String {
    format!("{id}{INDEX}")
}

/// A file in `data/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DataFile {
    Device(DeviceId),
    Index(DeviceId),
}

impl DataFile {
    /// Parses a name in `data/`. Names are SHA-256 digests.
    pub(crate) fn parse(name: &[u8]) -> Option<Self> {
        let sha256 = |id: &DeviceId| id.algorithm() == image::verity::Algorithm::Sha256;
        match name.strip_suffix(INDEX.as_bytes()) {
            Some(name) => id_of(name).filter(sha256).map(Self::Index),
            None => id_of(name).filter(sha256).map(Self::Device),
        }
    }
}

/// Opens an object in a device that is not published yet.
pub(crate) fn open_made(
    index: &Index,
    stored: &StoredObject,
    device: File,
) -> Option<ObjectReader> {
    let entry = index.place(&catalog::key(&stored.object)?, stored.offset)?;
    Some(ObjectReader::part(device, entry.offset, entry.size))
}

/// Returns the location of an object according to an index: the location of the whole object, or those of its pieces,
/// which `find` looks up.
pub(crate) fn first_of(
    index: &Index,
    device: &DeviceId,
    object: &ObjectId,
    find: &dyn Fn(&[u8; 32], u64) -> Option<StoredObject>,
) -> Option<StoredObject> {
    let key = catalog::key(object)?;
    catalog::first(index, device, &key)
        .or_else(|| resolve(index, device, index.record(&key)?, find))
}

/// Returns the location of a piece in this device.
pub(crate) fn piece_of(
    index: &Index,
    device: &DeviceId,
    id: &[u8; 32],
    len: u64,
) -> Option<StoredObject> {
    index.piece(id, len).map(|entry| index.stored(device, entry))
}

/// The directory `data/`, with devices and their indexes.
#[derive(Debug)]
pub struct DeviceShelf {
    pub(crate) directory: LateDirectory,
    tmp: Arc<Tmp>,
    catalog: Mutex<Catalog>,
}

impl DeviceShelf {
    pub(crate) fn new(root: &Arc<Directory>, tmp: &Arc<Tmp>) -> Self {
        let directory = LateDirectory::new(Arc::clone(root), DATA);
        Self { directory, tmp: Arc::clone(tmp), catalog: Mutex::default() }
    }

    pub(crate) fn list(&self) -> Result<Listing<DataFile>, DiskError> {
        match self.directory.get()? {
            Some(data) => Listing::read(data, |it| DataFile::parse(&it.name)),
            None => Ok(Listing { names: Vec::new(), strays: Vec::new() }),
        }
    }

    /// Opens a device, which must have this length.
    pub(crate) fn open(
        &self,
        id: &DeviceId,
        bytes: u64,
    ) -> Result<(File, Stat), ObjectLookupError> {
        let found = match self.directory.get()? {
            Some(data) => data.read(device_name(id)),
            None => Ok(None),
        };
        match found {
            Ok(Some((_, stat))) if length(&stat) != bytes => {
                let (device, actual) = (*id, length(&stat));
                Err(DataError::Length { device, expected: bytes, actual }.into())
            }
            Ok(Some(found)) => Ok(found),
            Ok(None) => Err(DataError::Absent(*id).into()),
            Err(error) if error.is_not_a_file() => Err(DataError::NotAFile(*id).into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a device's file, if that is possible.
    pub(crate) fn file(&self, id: &DeviceId) -> Option<(File, Stat)> {
        self.directory.get().ok()??.read(device_name(id)).ok()?
    }

    /// Returns the file of a device. `None` if the device is not complete, or cannot be opened.
    #[must_use]
    pub fn bytes_of(&self, id: &DeviceId) -> Option<File> {
        Some(self.file(id)?.0)
    }

    /// Returns the bytes on disk of each device.
    pub(crate) fn sizes(&self) -> Result<Vec<(DeviceId, u64)>, DiskError> {
        let mut sizes = Vec::new();
        for file in self.list()?.names {
            if let DataFile::Device(id) = file {
                let stat = self.directory.existing()?.stat(device_name(&id))?;
                sizes.push((id, stat.map_or(0, |stat| on_disk(&stat))));
            }
        }
        Ok(sizes)
    }

    /// Whether a mount or a process has the device open. If that cannot be determined, `true`.
    pub(crate) fn is_in_use(&self, id: &DeviceId) -> Result<bool, DiskError> {
        Ok(self.directory.get()?.is_some_and(|data| is_in_use(data, &device_name(id))))
    }

    /// Whether the device has another hard link, such as in a bundle for a virtual machine.
    pub(crate) fn has_other_links(&self, id: &DeviceId) -> Result<bool, DiskError> {
        let Some(data) = self.directory.get()? else { return Ok(false) };
        Ok(data.stat(device_name(id))?.is_some_and(|it| it.st_nlink > 1))
    }
}
