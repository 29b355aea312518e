//! Finds the root partition of a disk with a GUID partition table.
//!
//! Source: UEFI 2.10, 5.3 "GUID Partition Table (GPT) Disk Layout". The crate that writes tables is not used, because
//! it panics on some tables.

use std::io;
use std::ops::Range;

use flate2::Crc;
use image::erofs::layout::{SUPERBLOCK_MAGIC, SUPERBLOCK_OFFSET};
use image::erofs::read::ReadAt;

use crate::root_types::{ESP, ROOT_TYPES, root_types, type_bytes};

/// Sizes of sectors in bytes.
const SECTORS: [u64; 2] = [512, 4096];
const SIGNATURE: &[u8; 8] = b"EFI PART";
/// Length of a header without its padding. Source: table 5-5.
const HEADER: usize = 92;
/// Maximum length of a table in bytes. Partitioning tools write 16 KiB.
const TABLE_MAX: u64 = 1 << 20;
/// Minimum length of an entry. Source: table 5-6.
const ENTRY: usize = 128;

/// The reason why a disk has no partition that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    #[error("cannot read the partition table")]
    Read(#[source] io::Error),
    #[error("it has no valid GUID partition table")]
    NoTable,
    /// A partition leads beyond the end of the disk.
    #[error("partition {number} is at bytes {start} to {end}, but the disk has {len}")]
    Outside { number: usize, start: u64, end: u64, len: u64 },
    #[error(
        "it has {}: {listed}. `losetup --read-only --partscan --find --show FILE` makes a device of each partition, \
        which erofs:/dev/NAME reads",
        if *.roots == 0 {
            format!("no root partition for {architecture}, and {erofs} partitions with EROFS")
        } else {
            format!("{roots} root partitions for {architecture}")
        }
    )]
    Choice {
        architecture: String,
        /// Number of root partitions for the architecture.
        roots: usize,
        /// Number of partitions with EROFS.
        erofs: usize,
        /// The partitions, for people.
        listed: String,
    },
}

/// An entry of a partition table.
struct Partition {
    number: usize,
    kind: [u8; 16],
    /// Bytes of the disk.
    bytes: Range<u64>,
    /// The first letters of the name.
    name: String,
    has_erofs: bool,
}

/// The root partition of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RootPartition {
    /// Bytes of the disk.
    pub(super) bytes: Range<u64>,
    /// Whether the disk has a hash tree for it. It is not compared with the root.
    pub(super) has_tree: bool,
}

/// Returns the root partition of a disk for an architecture, named as in Go. Without one, it is the only partition
/// with EROFS. Partitions that verify a root, or that firmware boots, are never taken: an attacker could choose a few
/// of their bytes.
pub(super) fn root(disk: &impl ReadAt, architecture: &str) -> Result<RootPartition, DiskError> {
    let partitions = partitions(disk)?;
    let wanted = root_types(architecture);
    let is_root = |it: &&Partition| wanted.is_some_and(|types| it.kind == type_bytes(types.root));
    let roots: Vec<_> = partitions.iter().filter(is_root).collect();
    let is_candidate =
        |it: &&Partition| it.has_erofs && it.role().is_none_or(|(_, is_root)| is_root);
    let erofs: Vec<_> = partitions.iter().filter(is_candidate).collect();
    let (([chosen], _) | ([], [chosen])) = (&roots[..], &erofs[..]) else {
        let listed: Vec<_> = partitions.iter().map(Partition::shown).collect();
        return Err(DiskError::Choice {
            architecture: architecture.to_owned(),
            roots: roots.len(),
            erofs: erofs.len(),
            listed: if listed.is_empty() { "it is empty".to_owned() } else { listed.join(", ") },
        });
    };
    let types = ROOT_TYPES.iter().find(|it| type_bytes(it.root) == chosen.kind);
    let is_tree = |it: &Partition| types.is_some_and(|types| it.kind == type_bytes(types.verity));
    Ok(RootPartition { bytes: chosen.bytes.clone(), has_tree: partitions.iter().any(is_tree) })
}

impl Partition {
    /// Returns the purpose of the partition by its type, and whether it is a root; `None` for other types.
    fn role(&self) -> Option<(String, bool)> {
        if self.kind == type_bytes(ESP) {
            return Some(("EFI system partition".to_owned(), false));
        }
        ROOT_TYPES.iter().find_map(|types| {
            let parts = [
                (types.root, "root", true),
                (types.verity, "hash tree of the root", false),
                (types.signature, "signature of the root", false),
            ];
            let found = parts.into_iter().find(|it| type_bytes(it.0) == self.kind);
            found.map(|(_, what, is_root)| (format!("{what} of {}", types.architecture), is_root))
        })
    }

    /// Describes the partition for people.
    fn shown(&self) -> String {
        let mut words = Vec::new();
        words.extend(self.role().map(|it| it.0));
        words.extend(self.has_erofs.then(|| "EROFS".to_owned()));
        let words = match words.join(", ") {
            words if words.is_empty() => String::new(),
            words => format!(" ({words})"),
        };
        format!("partition {} \"{}\"{words}", self.number, self.name.escape_debug())
    }
}

/// Reads the table: the primary one, or else the one at the end of the disk.
fn partitions(disk: &impl ReadAt) -> Result<Vec<Partition>, DiskError> {
    for sector in SECTORS {
        for at in [Some(sector), disk.len().checked_sub(sector)].into_iter().flatten() {
            if let Some(entries) = table(disk, at, sector)? {
                return entries.into_iter().map(|entry| entry.read(disk, sector)).collect();
            }
        }
    }
    Err(DiskError::NoTable)
}

/// A used entry, before its numbers are checked.
struct Entry {
    number: usize,
    bytes: Vec<u8>,
}

/// Returns the used entries of the table whose header is at byte `at`; `None` if there is no valid table.
fn table(disk: &impl ReadAt, at: u64, sector: u64) -> Result<Option<Vec<Entry>>, DiskError> {
    let Some(header) = read(disk, at, sector)? else { return Ok(None) };
    if !header.starts_with(SIGNATURE) {
        return Ok(None);
    }
    let (Some(size), Some(stated)) = (word(&header, 12), word(&header, 16)) else {
        return Ok(None);
    };
    let Some(mut used) =
        usize::try_from(size).ok().and_then(|size| header.get(..size)).map(<[u8]>::to_vec)
    else {
        return Ok(None);
    };
    if used.len() < HEADER {
        return Ok(None);
    }
    // The checksum is computed with this field as 0.
    used[16..20].fill(0);
    let own = long(&used, 24).and_then(|own| own.checked_mul(sector));
    if checksum(&used) != stated || own != Some(at) {
        return Ok(None);
    }
    let (Some(first), Some(count), Some(size), Some(stated)) =
        (long(&used, 72), word(&used, 80), word(&used, 84), word(&used, 88))
    else {
        return Ok(None);
    };
    let length = u64::from(count) * u64::from(size);
    let start = first.checked_mul(sector);
    let (Some(start), ENTRY.., 1..=TABLE_MAX) = (start, size as usize, length) else {
        return Ok(None);
    };
    let Some(entries) = read(disk, start, length)? else { return Ok(None) };
    if checksum(&entries) != stated {
        return Ok(None);
    }
    let entries = entries.chunks_exact(size as usize).zip(1..);
    let used = entries.filter(|(bytes, _)| bytes[..16] != [0; 16]);
    Ok(Some(used.map(|(bytes, number)| Entry { number, bytes: bytes.to_vec() }).collect()))
}

impl Entry {
    fn read(self, disk: &impl ReadAt, sector: u64) -> Result<Partition, DiskError> {
        let Self { number, bytes } = self;
        let [first, last] = [32, 40].map(|at| long(&bytes, at).unwrap_or(u64::MAX));
        let start = first.saturating_mul(sector);
        let end = last.saturating_add(1).saturating_mul(sector);
        let len = disk.len();
        if start >= end || end > len {
            return Err(DiskError::Outside { number, start, end, len });
        }
        let magic = start + SUPERBLOCK_OFFSET as u64;
        let has_erofs = magic + 4 <= end
            && read(disk, magic, 4)?.is_some_and(|it| it == SUPERBLOCK_MAGIC.to_le_bytes());
        let letters = bytes[56..ENTRY].chunks_exact(2).map(|it| u16::from_le_bytes([it[0], it[1]]));
        let letters = letters.take_while(|it| *it != 0);
        let name = char::decode_utf16(letters).map(|it| it.unwrap_or(char::REPLACEMENT_CHARACTER));
        let mut kind = [0; 16];
        kind.copy_from_slice(&bytes[..16]);
        Ok(Partition { number, kind, bytes: start..end, name: name.collect(), has_erofs })
    }
}

/// Reads `length` bytes; `None` if the disk ends before.
fn read(disk: &impl ReadAt, at: u64, length: u64) -> Result<Option<Vec<u8>>, DiskError> {
    let is_inside = at.checked_add(length).is_some_and(|end| end <= disk.len());
    let Some(length) = usize::try_from(length).ok().filter(|_| is_inside) else { return Ok(None) };
    let mut bytes = vec![0; length];
    disk.read_at(at, &mut bytes).map_err(DiskError::Read)?;
    Ok(Some(bytes))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn checksum(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

#[cfg(test)]
mod tests;
