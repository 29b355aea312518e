//! The images of a store, and the objects that they need.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use image::erofs::read::{
    ByteOffset, Cached, DeviceSlot, FileType, Image, Objects, Owners, Place, ReadAt, ReadError,
    View, native_tree, to_tree,
};
use image::tree::{Content, Node};
use image::verity::{Algorithm, DeviceId, Id, ImageId, ObjectId};

use super::refs::Form;
use super::{Listing, is_in_use};
use crate::disk::{Directory, DiskError, length};

/// `images/`: EROFS images by their ids.
#[derive(Debug)]
pub struct ImageShelf {
    pub(crate) directory: Directory,
    pub(crate) algorithm: Algorithm,
}

impl ImageShelf {
    /// The ids of all images, in order, with or without a ref.
    ///
    /// # Errors
    /// [`DiskError`] when the directory cannot be read.
    pub fn ids(&self) -> Result<Vec<ImageId>, DiskError> {
        Ok(self.list()?.names)
    }

    pub(crate) fn list(&self) -> Result<Listing<ImageId>, DiskError> {
        let is_ours = |id: &ImageId| id.algorithm() == self.algorithm;
        Listing::of(&self.directory, |it| id_of(&it.name).filter(is_ours))
    }

    /// Whether there is something of this name.
    pub(crate) fn has(&self, id: &ImageId) -> Result<bool, DiskError> {
        Ok(self.directory.stat(id.to_string())?.is_some())
    }

    /// The file of an image, without the promise that `gc` keeps it: for `gc` itself, and whoever holds the lock.
    pub(crate) fn open(&self, id: &ImageId) -> Result<Option<ImageFile>, DiskError> {
        let file = self.directory.read(id.to_string())?;
        Ok(file.map(|(file, stat)| ImageFile::new(file, length(&stat))))
    }

    /// Whether a mount or a process has the image open. When in doubt, yes.
    pub(crate) fn is_in_use(&self, id: &ImageId) -> bool {
        is_in_use(&self.directory, &id.to_string())
    }
}

/// An image file, to be read at any offset: a source for `image::erofs::read::Image`. Each read is a
/// system call; put `image::erofs::read::Cached` around it.
#[derive(Debug)]
pub struct ImageFile {
    file: File,
    size: u64,
}

impl ImageFile {
    pub(crate) const fn new(file: File, size: u64) -> Self {
        Self { file, size }
    }

    /// An image outside of any store.
    ///
    /// # Errors
    /// The errors of `open`; also when it is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
        }
        Ok(Self { file, size: metadata.len() })
    }

    /// Length in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The descriptor, for the kernel.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The file.
    #[must_use]
    pub fn into_file(self) -> File {
        self.file
    }

    /// Fills `buffer` from `offset`.
    ///
    /// # Errors
    /// The errors of `pread`, and `UnexpectedEof` when the file ends before the buffer is full.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

impl ReadAt for ImageFile {
    fn len(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }
}

/// The id that a file is named by: lower case only, so that it has one name.
pub(crate) fn id_of<K>(name: &[u8]) -> Option<Id<K>> {
    let id = Id::from_hex(name).ok()?;
    (id.to_string().as_bytes() == name).then_some(id)
}

/// A slot of an image's table of devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceUse {
    /// Its name; none if the device table has something else.
    pub(crate) device: Option<DeviceId>,
    /// Its length, as the image says.
    pub(crate) bytes: u64,
}

/// Whether an image has its files' bytes on devices or in itself; one of small files only has no devices.
pub(crate) fn is_native<S: ReadAt>(image: &Image<S>) -> bool {
    image.superblock().composefs.is_none() || !image.devices().is_empty()
}

/// What the superblock of an image says of where its data is.
#[derive(Debug)]
pub(crate) struct Devices {
    /// `None` of a native image without the header that says it, which was written before the first release.
    pub(crate) form: Option<Form>,
    /// In order; none of a composefs image.
    pub(crate) uses: Vec<DeviceUse>,
}

/// Reads the table of devices.
pub(crate) fn devices(image: &ImageFile) -> Result<Devices, ContentsError> {
    let image = Image::open(image)?;
    let block = image.superblock().block_bits.size();
    let uses = image.devices().iter().map(|slot| DeviceUse {
        device: id_of(&slot.tag),
        bytes: slot.blocks.saturating_mul(block),
    });
    let uses: Vec<_> = uses.collect();
    let form = if is_native(&image) {
        let header = image.superblock().native;
        header.map(|it| if it.has_tar { Form::Tar } else { Form::Packed })
    } else {
        Some(Form::Objects)
    };
    Ok(Devices { form, uses })
}

/// A file of an image, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Use {
    /// An object, in `objects/`.
    Object {
        object: ObjectId,
        /// Length in bytes, as the image says.
        size: u64,
    },
    /// A range of a device. A file in several pieces is told with each of them.
    Range(DevicePart),
}

/// A part of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DevicePart {
    pub(crate) device: DeviceId,
    pub(crate) offset: u64,
    /// Bytes, at least 1.
    pub(crate) len: u64,
    /// Of the whole file.
    pub(crate) size: u64,
}

/// Data that is not in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LackingData {
    /// An object, or it has another size.
    Object(ObjectId),
    /// A part of this device, as its index says.
    Device(DeviceId),
}

impl std::fmt::Display for LackingData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Object(object) => write!(f, "object {object}"),
            Self::Device(device) => write!(f, "a part of device {device}"),
        }
    }
}

/// Why the objects and devices that an image needs cannot be read.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ContentsError(#[from] ReadError);

/// Calls `visit` with every path whose bytes are elsewhere, depth first, siblings in byte order.
pub(crate) fn uses(
    image: &ImageFile,
    visit: &mut dyn FnMut(&[u8], Use),
) -> Result<(), ContentsError> {
    let image = Image::open(Cached::new(image))?;
    if is_native(&image) {
        return ranges(&image, visit);
    }
    let tree = to_tree(&image, View::Composefs(Owners::FirstMet))?.tree;
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        if let Node::Regular(Content::External { size, object: Some(object), .. }) =
            entry.inode.node()
        {
            visit(path, Use::Object { object, size });
        }
    }
    Ok(())
}

/// What a native image has on its devices.
fn ranges<S: ReadAt>(
    image: &Image<S>,
    visit: &mut dyn FnMut(&[u8], Use),
) -> Result<(), ContentsError> {
    // Refuses images of which so little says so much that reading them would take for ever.
    image.device_ranges(|_| {})?;
    let devices: Vec<_> = image.devices().iter().map(DeviceSlot::device_id).collect();
    let mut walk = image.walk();
    while let Some(step) = walk.next()? {
        let inode = step.inode;
        if inode.file_type() != FileType::Regular || inode.is_compressed() {
            continue;
        }
        let mut at = 0_u64;
        while let Some(extent) = image.map(&inode, ByteOffset(at))? {
            at = at.saturating_add(extent.len);
            if let Place::Data(device, offset) = extent.place
                && let Some(Some(device)) = device.slot().and_then(|slot| devices.get(slot))
            {
                let range = DevicePart {
                    device: *device,
                    offset: offset.0,
                    len: extent.len,
                    size: inode.size(),
                };
                visit(step.path, Use::Range(range));
            }
            // Of a further name, the first piece says enough: else few bytes could say much.
            if !step.is_new {
                break;
            }
        }
    }
    Ok(())
}

/// The objects of files that a native image has in itself: their bytes are needed nowhere else, but other forms of the
/// image come from them.
pub(crate) fn inside(image: &ImageFile) -> Result<Vec<ObjectId>, ContentsError> {
    let image = Image::open(Cached::new(image))?;
    let mut found = Vec::new();
    if !is_native(&image) {
        return Ok(found);
    }
    let objects = Objects { algorithm: Algorithm::Sha256, inline_max: INLINE_MAX, find: &|_| None };
    let tree = native_tree(&image, objects)?.tree;
    let mut walk = tree.walk();
    while let Some((_, entry)) = walk.next() {
        if let Node::Regular(Content::External { object: Some(object), .. }) = entry.inode.node() {
            found.push(object);
        }
    }
    Ok(found)
}

/// Up to so many bytes, a file is in the tree itself, as composefs has it.
pub(crate) const INLINE_MAX: u64 = 64;
