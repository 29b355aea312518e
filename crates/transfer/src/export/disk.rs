//! Writes a disk for a virtual machine: a partition table, and one partition with a self-contained image. `verified`
//! writes one with further partitions.
//!
//! Section 4.7 of `docs/format/erofs-profile.md` describes the layout. The disk is written from front to back. The
//! image's first block contains its length, so this block is held back until the partition table is made.

mod boot;
mod der;
mod fat;
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
pub use self::signature::{RootSigner, SignerError, SigningKey};
use self::table::{DiskPartition, DiskTable, MIB, READ_ONLY, zeros};
pub use self::verified::{VerifiedDisk, VerifiedDiskReport, to_verified_disk};
use super::erofs::{PMEM_ALIGN, derived, image_only};
use super::{ErofsReport, ExportError, Options};
use crate::root_types::{ROOT_TYPES, RootTypes, root_types};

/// Size of a block of the image, in bytes. The image's length is a multiple of this.
const BLOCK: usize = 4096;
/// Offset of `blocks_lo` in the superblock, which begins at byte 1024. Source: Linux `fs/erofs/erofs_fs.h`, `struct
/// erofs_super_block`.
const BLOCKS_AT: usize = 1024 + 36;
/// Name of the partition, for `root=PARTLABEL=root`.
const NAME: &str = "root";

/// Types of a root partition and of the partitions that verify it. They identify the processor architecture of the
/// root.
#[derive(Debug, Clone, Copy)]
pub struct RootType(&'static RootTypes);

impl RootType {
    /// Returns the types for an architecture, named as in Go; `None` if it has none.
    #[must_use]
    pub fn for_architecture(architecture: &str) -> Option<Self> {
        root_types(architecture).map(Self)
    }

    /// Returns the architectures that have types.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        ROOT_TYPES.iter().map(|it| it.architecture)
    }

    /// Returns the type of the root partition.
    fn root(self) -> Uuid {
        Uuid::from_u128(self.0.root)
    }

    /// Returns the type of the partition with the hash tree.
    fn verity(self) -> Uuid {
        Uuid::from_u128(self.0.verity)
    }

    /// Returns the type of the partition with the signature.
    fn signature(self) -> Uuid {
        Uuid::from_u128(self.0.signature)
    }
}

/// Result of writing a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskReport {
    /// The image, which begins at the partition's first byte.
    pub image: ErofsReport,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// UUID of the partition, for `root=PARTUUID=`.
    pub partition: Uuid,
}

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

/// The differences between disks of two flavors.
#[derive(Debug, Clone, Copy)]
struct Variant {
    /// Disks with different bytes have different ids, so this is in the texts that ids are derived from.
    suffix: &'static str,
    /// Alignment of the disk's length in bytes, a multiple of [`MIB`]. With DAX, it is that of pmem devices.
    align: u64,
}

impl Variant {
    fn of(flavor: Flavor) -> Self {
        match flavor {
            Flavor::Dax => Self { suffix: " dax", align: PMEM_ALIGN },
            Flavor::Linux | Flavor::Gvisor => Self { suffix: "", align: MIB },
        }
    }

    /// Derives a UUID from what it is for, from the image, and from `more`, which begins with a space unless it is
    /// empty.
    fn guid(self, what: &str, root: RootType, id: &ImageId, more: &str) -> Uuid {
        let (root, suffix) = (root.root(), self.suffix);
        Uuid::from_bytes(derived(&format!("quire {what} {root} {id}{suffix}{more}")))
    }
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
struct Layout {
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
    layout: Option<Layout>,
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
            let mut blocks = [0; 4];
            blocks.copy_from_slice(&self.start[BLOCKS_AT..BLOCKS_AT + 4]);
            let image = u64::from(u32::from_le_bytes(blocks)) * BLOCK as u64;
            let layout = Layout::for_image(image, &self.ids)?;
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
        let Some(layout) = self.layout.filter(|it| it.image == self.written) else {
            return Err(io::Error::other(format!(
                "the image has {} bytes, but its superblock states {length:?}",
                self.written
            )));
        };
        let table = layout.table;
        zeros(self.out, table.bytes - MIB - layout.image - table.tail.len() as u64)?;
        self.out.write_all(&table.tail)?;
        self.out.flush()?;
        Ok(table.bytes)
    }
}

impl Layout {
    fn for_image(image: u64, ids: &Ids) -> io::Result<Self> {
        let partition = DiskPartition {
            kind: ids.root.root(),
            id: ids.partition,
            name: NAME,
            flags: READ_ONLY,
            bytes: image.next_multiple_of(MIB),
        };
        Ok(Self { image, table: DiskTable::new(ids.disk, &[partition], ids.align)? })
    }
}

#[cfg(test)]
mod tests;
