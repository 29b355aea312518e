//! Reads EROFS images: images of Quire, images of C composefs, and images of `mkfs.erofs`.
//!
//! Goals, in order: correct on hostile images, then easy, then fast. Every value in an image is checked:
//! [`Image::open`] and the methods below return [`ReadError::NotErofs`], [`ReadError::Unsupported`] with the feature,
//! or [`ReadError::Corrupt`] with the values that prove it. Files may be compressed ([`FileReader`] reads them
//! fastest). Compressed metadata, files with fragments in another inode, and RAFS images are unsupported.
//!
//! # Bounds
//! For any bytes, reading terminates, never panics, and holds at most:
//! - one inode, one directory block of at most 64 KiB and one name, while a directory is read or searched;
//! - [`XATTRS_BYTES_MAX`] for the xattrs of one inode, of which names take at most [`XATTR_LIST_MAX`];
//! - 16 MiB in [`Cached`], if it is used;
//! - 27 MiB in a [`FileReader`] of a compressed file: an extent of 12 MiB, a decoder's window of the same size, a
//!   physical cluster of 1 MiB, and the state of a decoder, at most 2 MiB;
//! - [`kept_bound`] bytes of names, xattrs, targets and content that one [`Walk`] or [`to_tree()`] takes from the
//!   image. The structures built from them (a tree, the numbers of inodes, open directories) take a small multiple of
//!   that.
//!
//! Work is also bounded: a walk enters each directory once (a second name for a directory is corrupt, so there are no
//! loops), names in a directory ascend (so no block is used twice), a path has at most [`PATH_MAX`] bytes, and
//! [`work_bound`] limits the bytes of xattrs that are decoded, because one shared entry may belong to many inodes.
//! [`unpacked_bound`] limits the bytes of directories, because many of them may have the same bytes.

#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

mod compressed;
mod data;
mod directory;
mod error;
mod examine;
mod inode;
mod native;
mod native_files;
mod overlay_view;
mod source;
mod superblock;
mod to_tree;
mod walk;
mod xattr;

pub use compressed::{Algorithm, FileReader};
pub use data::{Extent, Extents, RunPlace};
pub use directory::{DirEntry, DirPosition, ReadDir};
pub use error::{ErofsCorruption, Part, ReadError, Unsupported};
pub use examine::{Examined, examine};
pub use inode::{FileType, Inode, Nid};
pub use native::{DeviceRange, native_tree};
pub use native_files::{Located, Objects};
pub use overlay_view::{ShownContent, ShownEntry, ShownFile, ShownImage, ShownName};
pub use source::{CacheSize, Cached, ReadAt};
pub use superblock::{BlockBits, ComposefsHeader, DeviceSlot, NativeHeader, Superblock};
pub use to_tree::{ImageTree, Owners, TreeBounds, View, to_tree, to_tree_within};
pub use walk::{PATH_MAX, Step, Walk, kept_bound, unpacked_bound, work_bound};
pub use xattr::{InodeXattrs, XATTR_LIST_MAX, XATTRS_BYTES_MAX, Xattr};

use std::fmt;

use zerocopy::{FromBytes, IntoBytes};

use compressed::PackedWork;
use xattr::LongPrefix;

/// An offset in bytes from the beginning of an image, a device or a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteOffset(pub u64);

impl fmt::Display for ByteOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The number of a device: 0 for the image itself, and from 1 on for the devices of its device table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Device(pub u16);

impl Device {
    /// The image itself.
    pub const IMAGE: Self = Self(0);

    /// Returns the device's index in the device table, or `None` for the image itself.
    #[must_use]
    pub fn slot(self) -> Option<usize> {
        usize::from(self.0).checked_sub(1)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => write!(f, "the image"),
            number => write!(f, "device {number}"),
        }
    }
}

/// An EROFS image whose superblock was checked.
#[derive(Debug)]
pub struct Image<S> {
    source: S,
    superblock: Superblock,
    devices: Vec<DeviceSlot>,
    prefixes: Vec<LongPrefix>,
    work: PackedWork,
}

impl<S: ReadAt> Image<S> {
    /// Reads and checks the superblock, the device table and the long xattr prefixes, and checks that the root is a
    /// directory.
    ///
    /// # Errors
    /// [`ReadError`] if the image is invalid, unsupported or cannot be read.
    pub fn open(source: S) -> Result<Self, ReadError> {
        let (superblock, raw) = superblock::read(&source)?;
        let devices = superblock::devices(&source, &superblock, &raw)?;
        let (prefixes, work) = (Vec::new(), PackedWork::default());
        let mut image = Self { source, superblock, devices, prefixes, work };
        image.prefixes = image.long_prefixes(&raw)?;
        let root = image.root()?;
        if root.file_type() != FileType::Directory {
            return Err(ErofsCorruption::Root { nid: root.nid(), mode: root.mode() }.into());
        }
        Ok(image)
    }

    /// Returns the superblock.
    #[must_use]
    pub const fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Returns the device table, which lists other files that hold data. The first is [`Device`] 1.
    #[must_use]
    pub fn devices(&self) -> &[DeviceSlot] {
        &self.devices
    }

    /// Returns the source of the image's bytes.
    #[must_use]
    pub const fn source(&self) -> &S {
        &self.source
    }

    /// Reads the root directory's inode.
    ///
    /// # Errors
    /// As [`inode`](Self::inode).
    pub fn root(&self) -> Result<Inode, ReadError> {
        self.inode(self.superblock.root)
    }

    fn fetch(&self, at: ByteOffset, buffer: &mut [u8], part: Part) -> Result<(), ReadError> {
        fetch(&self.source, Device::IMAGE, at, buffer, part)
    }

    fn fetch_raw<T: FromBytes + IntoBytes>(
        &self,
        at: ByteOffset,
        part: Part,
    ) -> Result<T, ReadError> {
        fetch_raw(&self.source, at, part)
    }
}

/// Fills `buffer` with the bytes at `at`, which must be within the source.
fn fetch(
    source: &impl ReadAt,
    device: Device,
    at: ByteOffset,
    buffer: &mut [u8],
    part: Part,
) -> Result<(), ReadError> {
    let (len, bound) = (to_u64(buffer.len()), source.len());
    if at.0.checked_add(len).is_none_or(|end| end > bound) {
        return Err(ErofsCorruption::Outside { part, device, offset: at, len, bound }.into());
    }
    source.read_at(at.0, buffer).map_err(|source| ReadError::Io {
        device,
        offset: at,
        len: buffer.len(),
        source,
    })
}

fn fetch_raw<T: FromBytes + IntoBytes>(
    source: &impl ReadAt,
    at: ByteOffset,
    part: Part,
) -> Result<T, ReadError> {
    let mut raw = T::new_zeroed();
    fetch(source, Device::IMAGE, at, raw.as_mut_bytes(), part)?;
    Ok(raw)
}

fn to_u64(len: usize) -> u64 {
    u64::try_from(len).expect("usize has at most 64 bits")
}

/// Converts a length that is already bounded by the size of memory.
fn to_usize(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}
