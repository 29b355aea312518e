//! The images of a store, and the objects and devices that they need.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use image::erofs::read::{
    ByteOffset, Cached, DeviceSlot, FileType, Image, Objects, Owners, ReadAt, ReadError, RunPlace,
    View, native_tree, to_tree,
};
use image::tree::{Content, Node};
use image::verity::{Algorithm, DeviceId, Id, ImageId, ObjectId};

use super::refs::Form;
use super::{Listing, is_in_use};
use crate::disk::{Directory, DiskError, is_unsynced, length};

/// Why a file with the mark of files that are not synced is not used.
pub(crate) const TORN: &str = "a crash may have damaged it: the store's owner must run a command that can write to the \
    store and read /proc";

/// The directory `images/`, with EROFS images named by their ids.
#[derive(Debug)]
pub struct ImageShelf {
    pub(crate) directory: Directory,
    pub(crate) algorithm: Algorithm,
    /// Whether files that are not synced may have been damaged by a crash: the store could not be recovered since the
    /// last one.
    pub(crate) may_be_torn: bool,
}

impl ImageShelf {
    /// Returns the ids of all images, with or without a ref, sorted.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be read.
    pub fn ids(&self) -> Result<Vec<ImageId>, DiskError> {
        Ok(self.list()?.names)
    }

    pub(crate) fn list(&self) -> Result<Listing<ImageId>, DiskError> {
        let is_ours = |id: &ImageId| id.algorithm() == self.algorithm;
        Listing::read(&self.directory, |it| id_of(&it.name).filter(is_ours))
    }

    /// Whether a file with this id as name exists.
    pub(crate) fn has(&self, id: &ImageId) -> Result<bool, DiskError> {
        Ok(self.directory.stat(id.to_string())?.is_some())
    }

    /// Opens an image without protection from `gc`, for `gc` itself and for callers that hold the store's lock.
    pub(crate) fn open(&self, id: &ImageId) -> Result<Option<ImageFile>, DiskError> {
        let Some((file, stat)) = self.directory.read(id.to_string())? else { return Ok(None) };
        if self.may_be_torn && is_unsynced(&stat) {
            let torn = io::Error::new(io::ErrorKind::InvalidData, TORN);
            return Err(self.directory.failed("open", id.to_string(), torn));
        }
        Ok(Some(ImageFile::new(file, length(&stat))))
    }

    /// Whether a mount or a process has the image open. If that cannot be determined, `true`.
    pub(crate) fn is_in_use(&self, id: &ImageId) -> bool {
        is_in_use(&self.directory, &id.to_string())
    }
}

/// An image file that is read at any offset, as a source for `image::erofs::read::Image`. Each read is a system call,
/// so wrap it in `image::erofs::read::Cached`.
#[derive(Debug)]
pub struct ImageFile {
    file: File,
    size: u64,
}

impl ImageFile {
    pub(crate) const fn new(file: File, size: u64) -> Self {
        Self { file, size }
    }

    /// Opens an image outside of any store.
    ///
    /// # Errors
    /// The errors of `open`, and an error if it is not a regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::from(kernel::files::open_to_read(path)?);
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

    /// Returns the descriptor.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    #[must_use]
    pub fn into_file(self) -> File {
        self.file
    }

    /// Fills `buffer` with the bytes at `offset`.
    ///
    /// # Errors
    /// The errors of `pread`, and `UnexpectedEof` if the file ends before the buffer is full.
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

/// Parses the id in a file name. Only lower case is accepted, so that each id has one name.
pub(crate) fn id_of<K>(name: &[u8]) -> Option<Id<K>> {
    let id = Id::from_hex(name).ok()?;
    (id.to_string().as_bytes() == name).then_some(id)
}

/// A slot of an image's device table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceUse {
    /// Id of the device; `None` if the slot has another tag.
    pub(crate) device: Option<DeviceId>,
    /// Length in bytes that the image states.
    pub(crate) bytes: u64,
}

/// Whether an image has its files' bytes on devices or inside itself. If all files are small, it has no devices.
pub(crate) fn is_native<S: ReadAt>(image: &Image<S>) -> bool {
    image.superblock().composefs.is_none() || !image.devices().is_empty()
}

/// Storage of an image's data, according to its superblock.
#[derive(Debug)]
pub(crate) struct Devices {
    /// `None` for a native image without this header, which was written before the first release.
    pub(crate) form: Option<Form>,
    /// The slots in order; empty for a composefs image.
    pub(crate) uses: Vec<DeviceUse>,
}

/// Reads the device table.
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

/// Location of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Use {
    Object {
        object: ObjectId,
        /// Length in bytes that the image states.
        size: u64,
    },
    /// A range of a device. A file in several pieces has several ranges.
    Range(DevicePart),
}

/// A part of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DevicePart {
    pub(crate) device: DeviceId,
    pub(crate) offset: u64,
    /// Length in bytes, at least 1.
    pub(crate) len: u64,
    /// Length of the whole file in bytes.
    pub(crate) size: u64,
}

/// Data that is not in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LackingData {
    /// An object that is missing or has another size.
    Object(ObjectId),
    /// A part of this device, according to its index.
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

/// An error while the objects and devices that an image needs are read.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct ContentsError(#[from] ReadError);

/// Calls `visit` for every file whose bytes are outside of the image, depth first, with siblings in byte order.
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

/// Calls `visit` for the ranges that a native image uses on its devices.
fn ranges<S: ReadAt>(
    image: &Image<S>,
    visit: &mut dyn FnMut(&[u8], Use),
) -> Result<(), ContentsError> {
    // Refuses images whose few bytes describe so many ranges that reading them would take forever.
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
            if let RunPlace::Data(device, offset) = extent.place
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
            // For further names of the same file, the first piece is enough. If all pieces were examined for each
            // name, a small image could cause a very long walk.
            if !step.is_new {
                break;
            }
        }
    }
    Ok(())
}

/// Returns the objects of files inside a native image. The image itself does not need these objects, but other forms
/// of the image are made from them.
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

/// Maximum length in bytes of a file that is stored in the tree itself, as in composefs.
pub(crate) const INLINE_MAX: u64 = 64;
