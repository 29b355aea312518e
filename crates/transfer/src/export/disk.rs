//! Writes a disk for a virtual machine: a partition table, and one partition with a self-contained image. `verified`
//! writes one with further partitions.
//!
//! Section 4.7 of `docs/format/erofs-profile.md` describes the layout. The disk is written from front to back. The
//! image's first block contains its length, so this block is held back until the partition table is made.

mod boot;
mod fat;
mod first_block;
mod identity;
mod pe;
mod signature;
mod table;
mod verified;

use std::io::{self, Write};

use image::erofs::Flavor;
use image::verity::ImageId;
use store::{OperationError, Store};
use uuid::Uuid;

pub use self::boot::{BootError, BootFiles, BootProgram, StubError};
use self::first_block::{BLOCK, image_length, wrong_length};
pub use self::identity::{DiskReport, RootType};
use self::identity::{ROOT_NAME, Variant};
pub use self::signature::{RootHashKey, RootSigner, SignerError};
use self::table::{DiskPartition, DiskTable, MIB, READ_ONLY, zeros};
pub use self::verified::{VerifiedDisk, VerifiedDiskReport, to_verified_disk};
use super::erofs::image_only;
use super::{ExportError, Options};

/// Writes a disk whose only partition is the image that [`to_erofs`](super::to_erofs) makes for this flavor. The same
/// image, partition type and flavor give the same bytes.
///
/// # Errors
/// An [`ExportError`]; the output is incomplete then.
pub fn to_disk(
    store: &Store,
    id: &ImageId,
    root: RootType,
    flavor: Flavor,
    out: &mut dyn Write,
    options: &Options<'_>,
) -> Result<DiskReport, ExportError> {
    let variant = Variant::of(flavor);
    let ids = Ids {
        disk: variant.guid("disk", root, id, ""),
        root,
        partition: variant.guid("partition", root, id, ""),
        align: variant.align,
    };
    let mut disk = Disk { out, ids, start: Vec::with_capacity(BLOCK), layout: None, written: 0 };
    let image = image_only(store, id, flavor, &mut disk, options)?;
    let bytes = disk.finish().map_err(OperationError::of("make", "the disk"))?;
    Ok(DiskReport { image, bytes, partition: ids.partition })
}

/// UUIDs in a partition table, and the alignment of the disk's length.
#[derive(Debug, Clone, Copy)]
struct Ids {
    disk: Uuid,
    root: RootType,
    partition: Uuid,
    /// In bytes, a multiple of [`MIB`].
    align: u64,
}

/// Lengths of the image in bytes, and the table.
#[derive(Debug)]
struct DiskLayout {
    image: u64,
    table: DiskTable,
}

/// A writer that takes the image's bytes and writes the disk.
struct Disk<'a> {
    out: &'a mut dyn Write,
    ids: Ids,
    /// The first block of the image, until it is complete.
    start: Vec<u8>,
    /// `None` until the first block is complete.
    layout: Option<DiskLayout>,
    /// Number of bytes of the image that were written.
    written: u64,
}

impl Write for Disk<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.layout.is_some() {
            let written = self.out.write(bytes)?;
            self.written += written as u64;
            return Ok(written);
        }
        let count = bytes.len().min(BLOCK - self.start.len());
        self.start.extend_from_slice(&bytes[..count]);
        if self.start.len() == BLOCK {
            let layout = DiskLayout::for_image(image_length(&self.start), &self.ids)?;
            self.out.write_all(&layout.table.head)?;
            zeros(self.out, MIB - layout.table.head.len() as u64)?;
            self.out.write_all(&self.start)?;
            self.written = BLOCK as u64;
            self.layout = Some(layout);
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Disk<'_> {
    /// Writes the data after the image. Returns the length of the disk in bytes.
    fn finish(self) -> io::Result<u64> {
        let length = self.layout.as_ref().map(|it| it.image);
        let layout = self.layout.filter(|it| it.image == self.written);
        let layout = layout.ok_or_else(|| wrong_length(self.written, length))?;
        let table = layout.table;
        zeros(self.out, table.bytes - MIB - layout.image - table.tail.len() as u64)?;
        self.out.write_all(&table.tail)?;
        self.out.flush()?;
        Ok(table.bytes)
    }
}

impl DiskLayout {
    fn for_image(image: u64, ids: &Ids) -> io::Result<Self> {
        let partition = DiskPartition {
            kind: ids.root.root(),
            id: ids.partition,
            name: ROOT_NAME,
            flags: READ_ONLY,
            bytes: image.next_multiple_of(MIB),
        };
        Ok(Self { image, table: DiskTable::new(ids.disk, &[partition], ids.align)? })
    }
}

#[cfg(test)]
mod tests;
