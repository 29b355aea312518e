//! Writes a disk for a virtual machine: a partition table, and one partition with a self-contained image.
//!
//! Section 4.7 of `docs/format/erofs-profile.md` describes the layout. The disk is written from front to back. The
//! image's first block contains its length, so this block is held back until the partition table is made.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom, Write};

use gpt::disk::LogicalBlockSize;
use gpt::mbr::ProtectiveMBR;
use gpt::partition::Partition;
use gpt::partition_types::{OperatingSystem, Type};
use gpt::{GptConfig, GptError};
use image::erofs::Flavor;
use image::verity::ImageId;
use store::{OperationError, Store};
use uuid::Uuid;

use super::erofs::{PMEM_ALIGN, derived, image_only};
use super::{ErofsReport, ExportError, Options};
use crate::root_types::ROOT_TYPES;

/// Offset of the partition, and the alignment of its length and the disk's, as partitioning tools recommend. With DAX,
/// the disk has the alignment of pmem devices.
const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;
/// Sectors of the table behind the partition: 128 entries of 128 bytes, and the header. The table before the partition
/// also contains the MBR.
const BACKUP_SECTORS: u64 = 33;
/// Size of a block of the image, in bytes. The image's length is a multiple of this.
const BLOCK: usize = 4096;
/// Offset of `blocks_lo` in the superblock, which begins at byte 1024. Source: Linux `fs/erofs/erofs_fs.h`, `struct
/// erofs_super_block`.
const BLOCKS_AT: usize = 1024 + 36;
/// Flag for partitions that are mounted read-only, and therefore not grown. Source: Discoverable Partitions
/// Specification, "Partition Attribute Flags".
const READ_ONLY: u64 = 1 << 60;
/// Name of the partition, for `root=PARTLABEL=root`.
const NAME: &str = "root";

/// Type of a root partition, which identifies the processor architecture of the root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootType(Uuid);

impl RootType {
    /// Returns the type for an architecture, named as in Go; `None` if it has none.
    #[must_use]
    pub fn for_architecture(architecture: &str) -> Option<Self> {
        let found = ROOT_TYPES.iter().find(|(name, _)| *name == architecture);
        found.map(|(_, number)| Self(Uuid::from_u128(*number)))
    }

    /// Returns the architectures that have a type.
    pub fn architectures() -> impl Iterator<Item = &'static str> {
        ROOT_TYPES.iter().map(|(name, _)| *name)
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
    // Disks with different bytes have different ids.
    let (suffix, align) = match flavor {
        Flavor::Dax => (" dax", PMEM_ALIGN),
        Flavor::Linux | Flavor::Gvisor => ("", MIB),
    };
    let guid = |what| Uuid::from_bytes(derived(&format!("quire {what} {} {id}{suffix}", root.0)));
    let ids = Ids { disk: guid("disk"), root, partition: guid("partition"), align };
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

/// Lengths of the image and the disk in bytes, and the tables at both ends of the disk.
#[derive(Debug)]
struct Layout {
    image: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
    bytes: u64,
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
            self.out.write_all(&layout.head)?;
            zeros(self.out, MIB - layout.head.len() as u64)?;
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
        zeros(self.out, layout.bytes - MIB - layout.image - layout.tail.len() as u64)?;
        self.out.write_all(&layout.tail)?;
        self.out.flush()?;
        Ok(layout.bytes)
    }
}

impl Layout {
    fn for_image(image: u64, ids: &Ids) -> io::Result<Self> {
        let partition = image.next_multiple_of(MIB);
        let bytes = (MIB + partition + BACKUP_SECTORS * SECTOR).next_multiple_of(ids.align);
        let failed = |error: GptError| match error {
            GptError::Io(error) => error,
            error => io::Error::other(error),
        };
        let mut ends = Ends::new(bytes);
        // The field has 32 bits: larger disks have all bits set. Source: UEFI 2.10, 5.2.3 "Protective MBR".
        let sectors = u32::try_from(bytes / SECTOR - 1).unwrap_or(u32::MAX);
        ProtectiveMBR::with_lb_size(sectors).overwrite_lba0(&mut ends).map_err(io::Error::other)?;
        let config = GptConfig::new().writable(true).logical_block_size(LogicalBlockSize::Lb512);
        let mut table = config.create_from_device(ends, Some(ids.disk)).map_err(failed)?;
        let entry = Partition {
            part_type_guid: Type { guid: ids.root.0, os: OperatingSystem::Linux },
            part_guid: ids.partition,
            first_lba: MIB / SECTOR,
            last_lba: (MIB + partition) / SECTOR - 1,
            flags: READ_ONLY,
            name: NAME.to_owned(),
        };
        table.update_partitions(BTreeMap::from([(1, entry)])).map_err(failed)?;
        let Ends { head, tail, .. } = table.write().map_err(failed)?;
        Ok(Self { image, head, tail, bytes })
    }
}

/// A disk with only its beginning and its end in memory, into which the partition table is written.
#[derive(Debug)]
struct Ends {
    bytes: u64,
    position: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl Ends {
    fn new(bytes: u64) -> Self {
        let zeros = |sectors: u64| (0..sectors * SECTOR).map(|_| 0).collect();
        Self { bytes, position: 0, head: zeros(1 + BACKUP_SECTORS), tail: zeros(BACKUP_SECTORS) }
    }

    /// Returns the bytes from the position to the end of the part that contains it: the beginning or the end of the
    /// disk. Returns an error if the position is between these parts.
    fn here(&mut self) -> io::Result<&mut [u8]> {
        let tail = self.bytes - self.tail.len() as u64;
        let (end, start) = match self.position.checked_sub(tail) {
            Some(behind) => (&mut self.tail, behind),
            None => (&mut self.head, self.position),
        };
        let here = usize::try_from(start).ok().and_then(|start| end.get_mut(start..));
        here.ok_or_else(|| io::Error::other("the partition table would overwrite the image"))
    }
}

impl Read for Ends {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let here = self.here()?;
        let count = into.len().min(here.len());
        into[..count].copy_from_slice(&here[..count]);
        self.position += count as u64;
        Ok(count)
    }
}

impl Write for Ends {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let here = self.here()?;
        let count = bytes.len().min(here.len());
        here[..count].copy_from_slice(&bytes[..count]);
        self.position += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Ends {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let place = match to {
            SeekFrom::Start(place) => Some(place),
            SeekFrom::End(from) => self.bytes.checked_add_signed(from),
            SeekFrom::Current(from) => self.position.checked_add_signed(from),
        };
        self.position = place.ok_or_else(|| io::Error::other("cannot seek to before the disk"))?;
        Ok(self.position)
    }
}

fn zeros(out: &mut dyn Write, count: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(count), out).map(drop)
}

#[cfg(test)]
mod tests;
