//! Partition tables of disks whose partitions follow each other.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom, Write};

use gpt::disk::LogicalBlockSize;
use gpt::mbr::ProtectiveMBR;
use gpt::partition::Partition;
use gpt::partition_types::{OperatingSystem, Type};
use gpt::{GptConfig, GptError};
use uuid::Uuid;

/// Offset of the first partition, and the alignment of all lengths, as partitioning tools recommend.
pub(super) const MIB: u64 = 1 << 20;
/// Length of a sector in bytes.
pub(super) const SECTOR: u64 = 512;
/// Sectors of the table behind the partitions: 128 entries of 128 bytes, and the header. The table before the
/// partitions also contains the MBR.
const BACKUP_SECTORS: u64 = 33;
/// Flag for partitions that are mounted read-only, and therefore not grown. Source: Discoverable Partitions
/// Specification, "Partition Attribute Flags".
pub(super) const READ_ONLY: u64 = 1 << 60;

/// A partition.
#[derive(Debug, Clone, Copy)]
pub(super) struct DiskPartition {
    pub(super) kind: Uuid,
    pub(super) id: Uuid,
    pub(super) name: &'static str,
    pub(super) flags: u64,
    /// Length in bytes, a multiple of [`MIB`].
    pub(super) bytes: u64,
}

/// A disk without its partitions.
#[derive(Debug)]
pub(super) struct DiskTable {
    /// The bytes before the first partition, without the zeros at their end.
    pub(super) head: Vec<u8>,
    /// The last bytes of the disk.
    pub(super) tail: Vec<u8>,
    /// Length of the disk in bytes.
    pub(super) bytes: u64,
}

impl DiskTable {
    /// Makes the table of a disk with this GUID and these partitions, in order. The disk's length is a multiple of
    /// `align`.
    pub(super) fn new(disk: Uuid, partitions: &[DiskPartition], align: u64) -> io::Result<Self> {
        let mut end = MIB;
        let entries = partitions.iter().zip(1..).map(|(partition, number)| {
            let start = end;
            end += partition.bytes;
            let entry = Partition {
                part_type_guid: Type { guid: partition.kind, os: OperatingSystem::Linux },
                part_guid: partition.id,
                first_lba: start / SECTOR,
                last_lba: end / SECTOR - 1,
                flags: partition.flags,
                name: partition.name.to_owned(),
            };
            (number, entry)
        });
        let entries: BTreeMap<_, _> = entries.collect();
        let bytes = (end + BACKUP_SECTORS * SECTOR).next_multiple_of(align);
        let failed = |error: GptError| match error {
            GptError::Io(error) => error,
            error => io::Error::other(error),
        };
        let mut ends = Ends::new(bytes);
        // The field has 32 bits: larger disks have all bits set. Source: UEFI 2.10, 5.2.3 "Protective MBR".
        let sectors = u32::try_from(bytes / SECTOR - 1).unwrap_or(u32::MAX);
        ProtectiveMBR::with_lb_size(sectors).overwrite_lba0(&mut ends).map_err(io::Error::other)?;
        let config = GptConfig::new().writable(true).logical_block_size(LogicalBlockSize::Lb512);
        let mut table = config.create_from_device(ends, Some(disk)).map_err(failed)?;
        table.update_partitions(entries).map_err(failed)?;
        let Ends { head, tail, .. } = table.write().map_err(failed)?;
        Ok(Self { head, tail, bytes })
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

pub(super) fn zeros(out: &mut dyn Write, count: u64) -> io::Result<()> {
    io::copy(&mut io::repeat(0).take(count), out).map(drop)
}
