//! Reads images over devices: objects by their addresses, fingerprints, and the used parts of devices.

use super::error::{ErofsCorruption, ReadError};
use super::inode::{FileType, Inode, Nid};
use super::native_files::{FileConversion, Objects, parse};
use super::source::ReadAt;
use super::superblock::DeviceSlot;
use super::to_tree::{ImageTree, Reader, View};
use super::walk::{Budget, kept_bound};
use super::{ByteOffset, Device, Image, RunPlace};
use crate::verity::DeviceId;

/// A run of a file's bytes on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceRange {
    /// The file.
    pub nid: Nid,
    /// Offset in the file, in bytes.
    pub start: ByteOffset,
    /// The device.
    pub device: Device,
    /// Offset in the device, in bytes.
    pub offset: ByteOffset,
    /// Length in bytes, at least 1.
    pub len: u64,
}

/// Makes the tree from which an image over devices was written. Files on devices become external files with the object
/// that [`Objects::find`] returns, if any; the objects of files in the image are computed. The tree has no
/// fingerprints.
///
/// # Errors
/// As [`to_tree`](super::to_tree()).
pub fn native_tree<S: ReadAt>(
    image: &Image<S>,
    objects: Objects<'_>,
) -> Result<ImageTree, ReadError> {
    let fingerprint = image.fingerprint_name()?.unwrap_or_default();
    let files = FileConversion::new(objects, fingerprint, kept_bound(image.source().len()));
    Reader::new(image, View::Plain, Some(files)).read(None)
}

impl<S: ReadAt> Image<S> {
    /// Returns the name of the xattr with a file's fingerprint, if files have one.
    pub(super) fn fingerprint_name(&self) -> Result<Option<Vec<u8>>, ErofsCorruption> {
        let Some(at) = self.superblock.fingerprint_prefix else { return Ok(None) };
        let count = self.prefixes.len();
        let prefix = self.prefixes.get(usize::from(at));
        let prefix = prefix.ok_or(ErofsCorruption::FingerprintPrefix { at, count })?;
        Ok(Some(prefix.name()))
    }

    /// Returns the SHA-256 of a file's bytes, if the image states it. Kernels share pages of files with equal
    /// fingerprints.
    ///
    /// # Errors
    /// [`ReadError`] if the inode's xattrs are invalid or cannot be read.
    pub fn fingerprint(&self, inode: &Inode) -> Result<Option<[u8; 32]>, ReadError> {
        let Some(name) = self.fingerprint_name()? else { return Ok(None) };
        Ok(self.xattr(inode, &name)?.as_deref().and_then(parse))
    }

    /// Passes every run of a file's bytes on devices to `tell`, file by file.
    ///
    /// # Errors
    /// [`ReadError`]. Runs of earlier files may have been passed to `tell`.
    pub fn device_ranges(&self, mut tell: impl FnMut(DeviceRange)) -> Result<(), ReadError> {
        self.named_device_ranges(|_, range| tell(range))
    }

    /// As [`device_ranges`](Self::device_ranges), with the first path of each file.
    ///
    /// # Errors
    /// As [`device_ranges`](Self::device_ranges).
    pub fn named_device_ranges(
        &self,
        mut tell: impl FnMut(&[u8], DeviceRange),
    ) -> Result<(), ReadError> {
        if self.devices.is_empty() {
            return Ok(());
        }
        // An entry in a table of chunks has 4 or 8 bytes, and belongs to one file.
        let mut entries = Budget::new(kept_bound(self.source.len()));
        let mut walk = self.walk();
        while let Some(step) = walk.next()? {
            let inode = step.inode;
            if !step.is_new || inode.file_type() != FileType::Regular || inode.is_compressed() {
                continue;
            }
            let mut at = 0_u64;
            while let Some(extent) = self.map(&inode, ByteOffset(at))? {
                entries.spend(4)?;
                at = at.saturating_add(extent.len);
                if let RunPlace::Data(device, offset) = extent.place
                    && device != Device::IMAGE
                {
                    let (nid, start, len) = (inode.nid(), extent.start, extent.len);
                    tell(step.path, DeviceRange { nid, start, device, offset, len });
                }
            }
        }
        Ok(())
    }
}

impl DeviceSlot {
    /// Returns the id of the device, if the slot's tag is an id in lower-case hexadecimal digits.
    #[must_use]
    pub fn device_id(&self) -> Option<DeviceId> {
        let id = DeviceId::from_hex(&self.tag).ok()?;
        (id.to_string().as_bytes() == self.tag).then_some(id)
    }

    /// Returns the length of the device in bytes, if the image states it. The kernel reads missing bytes as zeros.
    #[must_use]
    pub const fn bytes(&self) -> Option<u64> {
        self.len
    }
}
