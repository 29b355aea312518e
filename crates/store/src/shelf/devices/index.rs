//! The index of a device, which has the location of each object in it.
//!
//! `docs/format/object-store.md`, "Devices", describes the format.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

mod build;
mod exercise;
mod records;

pub use crate::shelf::index_damage::IndexDamage;
pub(crate) use crate::shelf::index_damage::IndexError;
pub(crate) use build::Builder;
pub use exercise::exercise_data_index;
pub(crate) use records::{IndexPiece, PiecesKey, Record, key_of};

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use image::verity::{DeviceId, ObjectId};
use sha2::{Digest as _, Sha256};

use super::{DATA_BLOCK, DeviceKind, StoredObject};
use image::digest::Digest;

/// Magic number at the start of the file.
const MAGIC: &[u8; 8] = b"quiredat";
/// Field before the hash. Its last byte is the version.
const END: &[u8; 8] = b"datend\0\x02";
/// Magic number at the start of a device's last block.
const IMPRINT: &[u8; 8] = b"quireblb";
const HEADER: usize = 128;
/// Offset in the header, in bytes, of three numbers: of entries, of objects in pieces, and of their pieces.
const COUNTS: usize = 104;
const ENTRY: usize = 80;
/// Length in bytes of [`END`] and the SHA-256 digest of all preceding bytes.
const TRAILER: usize = 40;
/// Maximum length in bytes of an index, because it is held in memory.
const SIZE_MAX: u64 = 4 << 30;

/// An object of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub(crate) id: [u8; 32],
    /// Offset in the device, in bytes; 0 for an empty object.
    pub(crate) offset: u64,
    /// Length in bytes.
    pub(crate) size: u64,
    pub(crate) sha256: [u8; 32],
}

impl Entry {
    /// Returns the object's id.
    pub(crate) fn object(&self) -> ObjectId {
        ObjectId::from_bytes(&self.id).expect("32 bytes")
    }

    /// Returns the end offset in the device, in bytes.
    pub(crate) const fn until(&self) -> u64 {
        self.offset.saturating_add(self.size)
    }

    /// Checks the entry for a device of this length.
    fn check(&self, bytes: u64) -> Result<(), IndexDamage> {
        let Self { offset, size, .. } = *self;
        if size == 0 {
            return if offset == 0 { Ok(()) } else { Err(IndexDamage::EmptyAt(offset)) };
        }
        if !offset.is_multiple_of(DATA_BLOCK) {
            return Err(IndexDamage::Start(offset));
        }
        // The last block identifies the device.
        let last = bytes.saturating_sub(DATA_BLOCK);
        match offset.checked_add(size) {
            Some(until) if until <= last => Ok(()),
            _ => Err(IndexDamage::Outside { offset, size }),
        }
    }
}

/// Sorts the non-empty entries by offset, and refuses overlaps.
fn by_offset(entries: &[Entry]) -> Result<Vec<u32>, IndexDamage> {
    let count = u32::try_from(entries.len()).map_err(|_many| IndexDamage::TooManyObjects)?;
    let entry = |at: &u32| usize::try_from(*at).ok().and_then(|at| entries.get(at));
    let there = |at: &u32| entry(at).is_some_and(|it| it.size > 0);
    let mut order: Vec<u32> = (0..count).filter(there).collect();
    order.sort_unstable_by_key(|at| entry(at).map(|it| it.offset));
    let mut before: Option<&Entry> = None;
    for entry in order.iter().filter_map(entry) {
        if let Some(before) = before.filter(|it| entry.offset < it.until()) {
            return Err(IndexDamage::Overlap(before.offset, entry.offset));
        }
        before = Some(entry);
    }
    Ok(order)
}

/// Description of a device in its index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: DeviceKind,
    /// Length of the device in bytes.
    pub(crate) bytes: u64,
    /// Number of objects that `gc` has dropped. Their bytes, and the bytes between objects, may be gone.
    pub(crate) dropped: u64,
    /// The layer, if the device is a tar.
    pub(crate) layer: Option<Digest>,
}

impl Header {
    fn encode(&self) -> Vec<u8> {
        let kind = self.kind.number();
        let block = u32::try_from(DATA_BLOCK).expect("512");
        let layer = self.layer.as_ref().map(Digest::as_bytes).unwrap_or_default();
        let layer_len = u32::try_from(layer.len()).expect("32 or 64");
        let mut header = MAGIC.to_vec();
        header.extend_from_slice(&kind.to_le_bytes());
        header.extend_from_slice(&block.to_le_bytes());
        header.extend_from_slice(&self.bytes.to_le_bytes());
        header.extend_from_slice(&self.dropped.to_le_bytes());
        header.extend_from_slice(&layer_len.to_le_bytes());
        header.extend_from_slice(&[0; 4]);
        header.extend_from_slice(layer);
        header.resize(HEADER, 0);
        header
    }

    fn decode(header: &[u8; HEADER]) -> Result<Self, IndexDamage> {
        let mut fields = Fields(header);
        if fields.take::<8>()? != *MAGIC {
            return Err(IndexDamage::Format);
        }
        let kind = match fields.u32()? {
            1 => DeviceKind::Packed,
            2 => DeviceKind::Tar,
            other => return Err(IndexDamage::Kind(other)),
        };
        let block = fields.u32()?;
        if u64::from(block) != DATA_BLOCK {
            return Err(IndexDamage::BlockSize(block));
        }
        let (bytes, dropped) = (fields.u64()?, fields.u64()?);
        let layer_len = fields.u32()?;
        fields.take::<4>()?;
        let layer: [u8; 64] = fields.take()?;
        let layer = match (kind, layer_len) {
            (DeviceKind::Packed, 0) => None,
            (DeviceKind::Tar, 32) => layer.first_chunk::<32>().map(Digest::from_sha256),
            (DeviceKind::Tar, 64) => Some(Digest::from_sha512(&layer)),
            _ => return Err(IndexDamage::Layer(layer_len)),
        };
        let header_again = Self { kind, bytes, dropped, layer };
        // This also checks that unused fields are zero.
        if header_again.encode() != *without_counts(header) {
            return Err(IndexDamage::Header);
        }
        if !bytes.is_multiple_of(DATA_BLOCK) {
            return Err(IndexDamage::DeviceLength(bytes));
        }
        Ok(header_again)
    }
}

/// Returns the header with all counts set to zero.
fn without_counts(header: &[u8; HEADER]) -> Box<[u8; HEADER]> {
    let mut header = Box::new(*header);
    header.iter_mut().skip(COUNTS).for_each(|it| *it = 0);
    header
}

/// Decodes fields from the front of a slice.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], IndexDamage> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(IndexDamage::Short)?;
        self.0 = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, IndexDamage> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, IndexDamage> {
        self.take().map(u64::from_le_bytes)
    }
}

/// A checked index in memory.
#[derive(Debug)]
pub(crate) struct Index {
    pub(crate) header: Header,
    /// Sorted by id. An object may have several entries.
    pub(crate) entries: Vec<Entry>,
    /// Numbers of the non-empty entries, sorted by offset.
    order: Vec<u32>,
    /// Objects in pieces, sorted by id.
    pub(crate) records: Vec<Record>,
    by_pieces: HashMap<PiecesKey, u32>,
}

impl Index {
    /// Reads an index, and checks it and its hash.
    pub(crate) fn read(file: &File, size: u64) -> Result<Self, IndexError> {
        let Some(tables) = usize::try_from(size).ok().and_then(|it| it.checked_sub(TRAILER)) else {
            return Err(IndexDamage::Short.into());
        };
        if size > SIZE_MAX {
            return Err(IndexDamage::TooManyObjects.into());
        }
        let mut header = [0; HEADER];
        if tables < HEADER {
            return Err(IndexDamage::Short.into());
        }
        file.read_exact_at(&mut header, 0).map_err(IndexError::Read)?;
        // The lengths are checked before memory is allocated for them, because the file may be damaged.
        let lengths = Lengths::parse(&header, tables)?;
        let mut bytes = vec![0; tables.saturating_add(TRAILER)];
        file.read_exact_at(&mut bytes, 0).map_err(IndexError::Read)?;
        Ok(Self::decode(&bytes, &lengths)?)
    }

    fn decode(bytes: &[u8], lengths: &Lengths) -> Result<Self, IndexDamage> {
        let (tables, trailer) = bytes.split_last_chunk::<TRAILER>().ok_or(IndexDamage::Short)?;
        let (end, hash) = trailer.split_first_chunk().ok_or(IndexDamage::Short)?;
        if end != END {
            return Err(IndexDamage::Format);
        }
        let hashed = bytes.len().saturating_sub(hash.len());
        if *hash != *Sha256::digest(bytes.get(..hashed).unwrap_or_default()) {
            return Err(IndexDamage::Checksum);
        }
        let (header, rest) = tables.split_first_chunk().ok_or(IndexDamage::Short)?;
        let header = Header::decode(header)?;
        let (entries, rest) = rest.split_at_checked(lengths.entries).ok_or(IndexDamage::Short)?;
        let (records, pieces) = rest.split_at_checked(lengths.records).ok_or(IndexDamage::Short)?;
        let records = records::decode(records, pieces, header.kind)?;
        let mut index = Self {
            entries: Vec::with_capacity(entries.len().checked_div(ENTRY).unwrap_or(0)),
            order: Vec::new(),
            header,
            by_pieces: records::by_pieces(&records)?,
            records,
        };
        for raw in entries.chunks_exact(ENTRY) {
            let mut fields = Fields(raw);
            let (id, sha256) = (fields.take()?, fields.take()?);
            let (offset, size) = (fields.u64()?, fields.u64()?);
            let entry = Entry { id, offset, size, sha256 };
            entry.check(index.header.bytes)?;
            if index.entries.last().is_some_and(|it| (it.id, it.offset) >= (id, offset)) {
                return Err(IndexDamage::Order);
            }
            index.entries.push(entry);
        }
        index.order = by_offset(&index.entries)?;
        Ok(index)
    }

    /// Returns the entries of an object.
    pub(crate) fn places(&self, id: &[u8; 32]) -> &[Entry] {
        let from = self.entries.partition_point(|it| it.id < *id);
        let until = self.entries.partition_point(|it| it.id <= *id);
        self.entries.get(from..until).unwrap_or_default()
    }

    /// Returns the entry of an object at this offset.
    pub(crate) fn place(&self, id: &[u8; 32], offset: u64) -> Option<&Entry> {
        self.places(id).iter().find(|it| it.offset == offset)
    }

    /// Returns the entry that begins at this offset.
    pub(crate) fn at(&self, offset: u64) -> Option<&Entry> {
        let entry = |at: &u32| usize::try_from(*at).ok().and_then(|at| self.entries.get(at));
        let found =
            self.order.binary_search_by_key(&Some(offset), |at| entry(at).map(|it| it.offset));
        found.ok().and_then(|found| self.order.get(found)).and_then(entry)
    }

    /// Returns the last entry that begins at or before this offset.
    pub(crate) fn before(&self, offset: u64) -> Option<&Entry> {
        let entry = |at: &u32| usize::try_from(*at).ok().and_then(|at| self.entries.get(at));
        let after =
            self.order.partition_point(|at| entry(at).is_some_and(|it| it.offset <= offset));
        after.checked_sub(1).and_then(|at| self.order.get(at)).and_then(entry)
    }

    /// Returns the first of the `len` bytes from `offset` on that belongs to no object. They may belong to several
    /// adjacent objects.
    pub(crate) fn first_unknown(&self, offset: u64, len: u64) -> Option<u64> {
        let until = offset.saturating_add(len);
        let mut at = offset;
        while at < until {
            match self.before(at).filter(|it| it.size > 0 && at < it.until()) {
                Some(entry) => at = entry.until(),
                None => return Some(at),
            }
        }
        None
    }

    /// Returns an object in pieces.
    pub(crate) fn record(&self, id: &[u8; 32]) -> Option<&Record> {
        let at = self.records.binary_search_by_key(id, |it| it.id).ok()?;
        self.records.get(at)
    }

    /// Returns the object that consists of these pieces.
    pub(crate) fn record_of(&self, pieces: &[IndexPiece]) -> Option<&Record> {
        let at = self.by_pieces.get(&key_of(pieces))?;
        self.records.get(usize::try_from(*at).ok()?)
    }

    /// Returns an object that can be a piece of another one: it is in a packed device, and fills whole blocks or is
    /// followed by zeros.
    pub(crate) fn piece(&self, id: &[u8; 32], len: u64) -> Option<&Entry> {
        let found = self.places(id).iter().find(|it| it.size == len);
        found.filter(|_| self.header.kind == DeviceKind::Packed)
    }

    /// Returns the location of an entry's object.
    pub(crate) fn stored(&self, device: &DeviceId, entry: &Entry) -> StoredObject {
        StoredObject {
            object: entry.object(),
            device: *device,
            device_bytes: self.header.bytes,
            kind: self.header.kind,
            offset: entry.offset,
            size: entry.size,
            sha256: entry.sha256,
            pieces: None,
        }
    }

    /// Whether this index has every object of another one at the same offset, and nothing was dropped.
    pub(crate) fn has_all_of(&self, other: &Self) -> bool {
        self.header == other.header
            && self.header.dropped == 0
            && other
                .entries
                .iter()
                .all(|wanted| self.place(&wanted.id, wanted.offset) == Some(wanted))
            && other.records.iter().all(|wanted| self.record(&wanted.id) == Some(wanted))
    }

    /// Returns an object for which this index and another one have different SHA-256 digests. Its id determines its
    /// bytes, so one of the digests is wrong.
    pub(crate) fn contradiction(&self, other: &Self) -> Option<ObjectId> {
        let entries = other.entries.iter().filter(|it| {
            let own = self.places(&it.id);
            own.iter().any(|own| own.sha256 != it.sha256)
        });
        let records = other.records.iter().filter(|it| {
            let own = self.record(&it.id);
            own.is_some_and(|own| own.sha256 != it.sha256)
        });
        entries.map(Entry::object).chain(records.map(Record::object)).next()
    }
}

/// Lengths of the tables in bytes.
struct Lengths {
    entries: usize,
    records: usize,
}

impl Lengths {
    /// Decodes the lengths in a header. `tables` is the length of the file before its trailer.
    fn parse(header: &[u8; HEADER], tables: usize) -> Result<Self, IndexDamage> {
        let mut counts = Fields(header.get(COUNTS..).unwrap_or_default());
        let (entries, records, pieces) = (counts.u64()?, counts.u64()?, counts.u64()?);
        let times = |count: u64, size: usize| usize::try_from(count).ok()?.checked_mul(size);
        let sum = || {
            let entries = times(entries, ENTRY)?;
            let records = times(records, records::RECORD)?;
            let all = [HEADER, entries, records, times(pieces, records::PIECE)?];
            let all = all.into_iter().try_fold(0_usize, usize::checked_add)?;
            Some((Self { entries, records }, all))
        };
        match sum() {
            Some((lengths, all)) if all == tables => Ok(lengths),
            _ => Err(IndexDamage::Lengths),
        }
    }
}

#[cfg(test)]
mod tests;
