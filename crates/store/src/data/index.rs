//! The index of a data blob: which object is where in it, and the ends that are not.
//!
//! The format: `docs/format/object-store.md`, "Data blobs".
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

mod build;
mod exercise;
mod records;

pub(crate) use build::Builder;
pub use exercise::exercise_data_index;
pub(crate) use records::{Piece, PiecesKey, Record, key_of};

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use image::verity::ObjectId;
use sha2::{Digest as _, Sha256};

use super::{BlobKind, StoredObject};
use crate::digest::Digest;

/// The first bytes of the file.
const MAGIC: &[u8; 8] = b"quiredat";
/// Before the hash of the whole file; its last byte is the version.
const END: &[u8; 8] = b"datend\0\x01";
/// Of an index with objects in pieces.
const END_PIECES: &[u8; 8] = b"datend\0\x02";
/// The first bytes of a blob's last block.
const IMPRINT: &[u8; 8] = b"quireblb";
const HEADER: usize = 128;
/// Where in the header the number of objects in pieces is, and behind it that of their pieces.
const COUNTS: usize = 104;
const ENTRY: usize = 96;
const FRAME: usize = 8;
/// Two numbers of 8 bytes, SHA-256 of the tables, [`END`], SHA-256 of everything before.
const TRAILER: usize = 88;
/// A frame takes no further end from here on.
const FRAME_FULL: usize = 256 << 10;
/// The longest end: less than a block of the largest block size that EROFS has.
pub(super) const END_MAX: usize = 64 << 10;
/// The most bytes in a frame.
const FRAME_MAX: u32 = 320 << 10;
/// More than that is no index: its tables are held in memory.
const TABLES_MAX: u64 = 4 << 30;

/// One object of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub(crate) id: [u8; 32],
    /// Where in the blob it begins; 0 if nothing of it is there.
    pub(crate) offset: u64,
    /// Of the whole object.
    pub(crate) size: u64,
    /// Bytes of its end that are in the index.
    pub(crate) end_len: u32,
    /// Where in all ends these begin.
    pub(crate) end_at: u64,
    pub(crate) sha256: [u8; 32],
}

impl Entry {
    /// Its name.
    pub(crate) fn object(&self) -> ObjectId {
        ObjectId::from_bytes(&self.id).expect("32 bytes")
    }

    /// Bytes of it that are in the blob.
    pub(crate) fn in_blob(&self) -> u64 {
        self.size.saturating_sub(u64::from(self.end_len))
    }

    /// Where in the blob it ends.
    pub(crate) fn until(&self) -> u64 {
        self.offset.saturating_add(self.in_blob())
    }

    /// What is wrong with it, in a blob of this kind and length.
    fn check(&self, kind: BlobKind, bytes: u64) -> Result<(), &'static str> {
        let in_blob = self.size.checked_sub(u64::from(self.end_len));
        let in_blob = in_blob.ok_or("the end of an object is longer than the object")?;
        if self.end_len == 0 && self.end_at != 0 {
            return Err("an object without an end has a place for it");
        }
        if in_blob == 0 {
            return if self.offset == 0 { Ok(()) } else { Err("nothing has a place in the blob") };
        }
        if !self.offset.is_multiple_of(kind.block_size()) {
            return Err("an object does not begin with a block");
        }
        // The last block says what the blob is.
        let last = bytes.saturating_sub(kind.block_size());
        match self.offset.checked_add(in_blob) {
            Some(until) if until <= last => Ok(()),
            _ => Err("an object is not within the blob"),
        }
    }
}

/// Sorts by place those with bytes in the blob, and refuses any that overlap.
fn by_offset(entries: &[Entry]) -> Result<Vec<u32>, &'static str> {
    let count = u32::try_from(entries.len()).map_err(|_many| "it has too many objects")?;
    let entry = |at: &u32| usize::try_from(*at).ok().and_then(|at| entries.get(at));
    let there = |at: &u32| entry(at).is_some_and(|it| it.in_blob() > 0);
    let mut order: Vec<u32> = (0..count).filter(there).collect();
    order.sort_unstable_by_key(|at| entry(at).map(|it| it.offset));
    let mut until = 0;
    for entry in order.iter().filter_map(entry) {
        if entry.offset < until {
            return Err("two objects overlap");
        }
        until = entry.until();
    }
    Ok(order)
}

/// What an index says of its blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: BlobKind,
    /// Length of the blob.
    pub(crate) bytes: u64,
    /// How many objects `gc` has dropped: their bytes, and those between, may be gone.
    pub(crate) dropped: u64,
    /// Of a tar, the layer.
    pub(crate) layer: Option<Digest>,
}

impl Header {
    fn encode(&self) -> Vec<u8> {
        let kind = self.kind.number();
        let block = u32::try_from(self.kind.block_size()).expect("512 or 4096");
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

    fn decode(header: &[u8; HEADER]) -> Result<Self, &'static str> {
        let mut fields = Fields(header);
        if fields.take::<8>()? != *MAGIC {
            return Err("it is no index of this format");
        }
        let kind = match fields.u32()? {
            1 => BlobKind::Packed,
            2 => BlobKind::Tar,
            3 => BlobKind::Dense,
            _ => return Err("it is of an unknown kind"),
        };
        if u64::from(fields.u32()?) != kind.block_size() {
            return Err("its block size is not that of its kind");
        }
        let (bytes, dropped) = (fields.u64()?, fields.u64()?);
        let layer_len = fields.u32()?;
        fields.take::<4>()?;
        let layer: [u8; 64] = fields.take()?;
        let layer = match (kind, layer_len) {
            (BlobKind::Packed | BlobKind::Dense, 0) => None,
            (BlobKind::Tar, 32) => layer.first_chunk::<32>().map(Digest::from_sha256),
            (BlobKind::Tar, 64) => Some(Digest::from_sha512(&layer)),
            _ => return Err("its layer makes no sense"),
        };
        let header_again = Self { kind, bytes, dropped, layer };
        // Also that what has no meaning is zero.
        if header_again.encode() != *without_counts(header) {
            return Err("its header makes no sense");
        }
        if !bytes.is_multiple_of(kind.block_size()) {
            return Err("its blob is not of whole blocks");
        }
        Ok(header_again)
    }
}

/// A header as if there were no objects in pieces.
fn without_counts(header: &[u8; HEADER]) -> Box<[u8; HEADER]> {
    let mut header = Box::new(*header);
    header.iter_mut().skip(COUNTS).take(16).for_each(|it| *it = 0);
    header
}

fn to_u64(size: usize) -> u64 {
    u64::try_from(size).expect("usize has at most 64 bits")
}

/// Takes fields from the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or("it is too short")?;
        self.0 = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        self.take().map(u64::from_le_bytes)
    }
}

/// Some of the ends, compressed as one.
#[derive(Debug, Clone, Copy)]
struct Frame {
    /// Where in all ends it begins, and how many bytes of them it has.
    start: u64,
    length: u32,
    /// Where in the file it is.
    at: u64,
    packed: u32,
}

/// An index that was read: its tables, checked.
#[derive(Debug)]
pub(crate) struct Index {
    pub(crate) header: Header,
    /// In order of their ids; an object may be at several places.
    pub(crate) entries: Vec<Entry>,
    /// In order of their places, those that have one.
    order: Vec<u32>,
    frames: Vec<Frame>,
    /// Objects in pieces, in order of their ids.
    pub(crate) records: Vec<Record>,
    by_pieces: HashMap<PiecesKey, u32>,
    /// Length of the file.
    file_size: u64,
    /// The frame that was read last.
    last: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
}

impl Index {
    /// Reads the tables and checks them against their hash: an I/O error, or what is wrong with it, or the index.
    pub(crate) fn read(file: &File, size: u64) -> io::Result<Result<Self, &'static str>> {
        let Some(trailer_at) = u64::try_from(TRAILER).ok().and_then(|it| size.checked_sub(it))
        else {
            return Ok(Err("it is too short"));
        };
        let mut trailer = [0; TRAILER];
        file.read_exact_at(&mut trailer, trailer_at)?;
        let mut header = [0; HEADER];
        if trailer_at < to_u64(HEADER) {
            return Ok(Err("it is too short"));
        }
        file.read_exact_at(&mut header, 0)?;
        let lengths = match Lengths::of(&trailer, trailer_at, &header) {
            Ok(lengths) => lengths,
            Err(reason) => return Ok(Err(reason)),
        };
        let mut tables = vec![0; lengths.tables];
        file.read_exact_at(&mut tables, 0)?;
        Ok(Self::decode(&tables, &lengths, size))
    }

    fn decode(tables: &[u8], lengths: &Lengths, file_size: u64) -> Result<Self, &'static str> {
        if lengths.hash != *Sha256::digest(tables) {
            return Err("the checksum of its tables is wrong");
        }
        let (header, rest) = tables.split_first_chunk().ok_or("it is too short")?;
        let header = Header::decode(header)?;
        let short = "it is too short";
        let (entries, rest) = rest.split_at_checked(lengths.entries).ok_or(short)?;
        let (frames, rest) = rest.split_at_checked(lengths.frame_rows).ok_or(short)?;
        let (records, pieces) = rest.split_at_checked(lengths.records).ok_or(short)?;
        let frames = read_frames(frames, lengths)?;
        let records = records::decode(records, pieces, header.kind)?;
        let mut index = Self {
            entries: Vec::with_capacity(entries.len().checked_div(ENTRY).unwrap_or(0)),
            order: Vec::new(),
            header,
            frames,
            by_pieces: records::by_pieces(&records)?,
            records,
            file_size,
            last: Mutex::default(),
        };
        for raw in entries.chunks_exact(ENTRY) {
            let mut fields = Fields(raw);
            let (id, sha256) = (fields.take()?, fields.take()?);
            let (offset, size) = (fields.u64()?, fields.u64()?);
            let (end_at, end_len) = (fields.u64()?, fields.u32()?);
            if fields.u32()? != 0 {
                return Err("an entry has something where nothing may be");
            }
            let entry = Entry { id, offset, size, end_len, end_at, sha256 };
            entry.check(index.header.kind, index.header.bytes)?;
            if index.entries.last().is_some_and(|it| (it.id, it.offset) >= (id, offset)) {
                return Err("its entries are not in order");
            }
            if end_len > 0 {
                index.frame_of(&entry).ok_or("an end is not within a frame")?;
            }
            index.entries.push(entry);
        }
        index.order = by_offset(&index.entries)?;
        Ok(index)
    }

    /// Which frame has the end of an object, and where in it.
    fn frame_of(&self, entry: &Entry) -> Option<(usize, usize)> {
        let after = self.frames.partition_point(|it| it.start <= entry.end_at);
        let number = after.checked_sub(1)?;
        let frame = self.frames.get(number)?;
        let into = entry.end_at.checked_sub(frame.start)?;
        let until = into.checked_add(u64::from(entry.end_len))?;
        (until <= u64::from(frame.length)).then_some((number, usize::try_from(into).ok()?))
    }

    /// The places of an object.
    pub(crate) fn places(&self, id: &[u8; 32]) -> &[Entry] {
        let from = self.entries.partition_point(|it| it.id < *id);
        let until = self.entries.partition_point(|it| it.id <= *id);
        self.entries.get(from..until).unwrap_or_default()
    }

    /// The object that begins at this place in the blob.
    pub(crate) fn at(&self, offset: u64) -> Option<&Entry> {
        let entry = |at: &u32| usize::try_from(*at).ok().and_then(|at| self.entries.get(at));
        let found =
            self.order.binary_search_by_key(&Some(offset), |at| entry(at).map(|it| it.offset));
        found.ok().and_then(|found| self.order.get(found)).and_then(entry)
    }

    /// The last object that begins at this place in the blob or before it.
    pub(crate) fn before(&self, offset: u64) -> Option<&Entry> {
        let entry = |at: &u32| usize::try_from(*at).ok().and_then(|at| self.entries.get(at));
        let after =
            self.order.partition_point(|at| entry(at).is_some_and(|it| it.offset <= offset));
        after.checked_sub(1).and_then(|at| self.order.get(at)).and_then(entry)
    }

    /// An object in pieces.
    pub(crate) fn record(&self, id: &[u8; 32]) -> Option<&Record> {
        let at = self.records.binary_search_by_key(id, |it| it.id).ok()?;
        self.records.get(at)
    }

    /// The object that is made of these pieces.
    pub(crate) fn record_of(&self, pieces: &[Piece]) -> Option<&Record> {
        let at = self.by_pieces.get(&key_of(pieces))?;
        self.records.get(usize::try_from(*at).ok()?)
    }

    /// An object that can be a piece of another: all of it in whole blocks of the blob, or with zeros behind it.
    pub(crate) fn piece(&self, id: &[u8; 32], len: u64) -> Option<&Entry> {
        let is_it = |entry: &&Entry| entry.end_len == 0 && entry.size == len;
        let found = self.places(id).iter().find(is_it);
        found.filter(|_| self.header.kind.is_packed())
    }

    /// Where an entry says that its object is.
    pub(crate) fn stored(&self, blob: &ObjectId, entry: &Entry) -> StoredObject {
        StoredObject {
            object: entry.object(),
            blob: *blob,
            blob_bytes: self.header.bytes,
            kind: self.header.kind,
            offset: entry.offset,
            size: entry.size,
            end_len: entry.end_len,
            sha256: entry.sha256,
            pieces: None,
        }
    }

    /// The end of an object, from the file that this index was read from.
    pub(crate) fn end(&self, file: &File, entry: &Entry) -> io::Result<Vec<u8>> {
        if entry.end_len == 0 {
            return Ok(Vec::new());
        }
        let odd = || io::Error::new(io::ErrorKind::InvalidData, "an end is not within a frame");
        let (number, into) = self.frame_of(entry).ok_or_else(odd)?;
        let frame = self.frame(file, number)?;
        let length = usize::try_from(entry.end_len).map_err(io::Error::other)?;
        let end = frame.get(into..).and_then(|rest| rest.get(..length));
        end.map(<[u8]>::to_vec).ok_or_else(odd)
    }

    fn frame(&self, file: &File, number: usize) -> io::Result<Arc<Vec<u8>>> {
        if let Some((last, bytes)) = &*self.last.lock().unwrap_or_else(PoisonError::into_inner)
            && *last == number
        {
            return Ok(Arc::clone(bytes));
        }
        let odd = |text| io::Error::new(io::ErrorKind::InvalidData, text);
        let frame = self.frames.get(number).ok_or_else(|| odd("there is no such frame"))?;
        let mut packed = vec![0; usize::try_from(frame.packed).map_err(io::Error::other)?];
        file.read_exact_at(&mut packed, frame.at)?;
        let length = usize::try_from(frame.length).map_err(io::Error::other)?;
        let bytes = zstd::bulk::decompress(&packed, length)?;
        if bytes.len() != length {
            return Err(odd("a frame has another length than stated"));
        }
        let bytes = Arc::new(bytes);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some((number, Arc::clone(&bytes)));
        Ok(bytes)
    }

    /// What is wrong with the file besides its tables, if anything.
    pub(crate) fn check_file(&self, file: &File) -> io::Result<Option<&'static str>> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; FRAME_FULL];
        let mut at = 0_u64;
        let until = self.file_size.saturating_sub(32);
        while at < until {
            let left = usize::try_from(until.saturating_sub(at)).unwrap_or(usize::MAX);
            let length = left.min(buffer.len());
            let piece = buffer.get_mut(..length).unwrap_or_default();
            file.read_exact_at(piece, at)?;
            hash.update(&*piece);
            at = at.saturating_add(u64::try_from(length).map_err(io::Error::other)?);
        }
        let mut stated = [0; 32];
        file.read_exact_at(&mut stated, until)?;
        Ok((stated != *hash.finalize()).then_some("its checksum is wrong"))
    }

    /// Whether every object of another index is here too, at its place, and nothing was dropped.
    pub(crate) fn has_all_of(&self, other: &Self) -> bool {
        self.header == other.header
            && self.header.dropped == 0
            && other.entries.iter().all(|wanted| {
                self.places(&wanted.id).iter().any(|it| {
                    (it.offset, it.size, it.end_len) == (wanted.offset, wanted.size, wanted.end_len)
                })
            })
            && other.records.iter().all(|wanted| self.record(&wanted.id) == Some(wanted))
    }
}

/// What the trailer says.
struct Lengths {
    /// Bytes of the entries, of what says how long frames are, of the objects in pieces, of all tables with the header,
    /// and of the frames.
    entries: usize,
    frame_rows: usize,
    records: usize,
    tables: usize,
    frames: u64,
    hash: [u8; 32],
}

impl Lengths {
    fn of(
        trailer: &[u8; TRAILER],
        trailer_at: u64,
        header: &[u8; HEADER],
    ) -> Result<Self, &'static str> {
        let mut fields = Fields(trailer);
        let (entries, frames) = (fields.u64()?, fields.u64()?);
        let hash = fields.take()?;
        let end = fields.take::<8>()?;
        let mut counts = Fields(header.get(COUNTS..).unwrap_or_default());
        let (records, pieces) = (counts.u64()?, counts.u64()?);
        let has_pieces = records > 0 || pieces > 0;
        if end != if has_pieces { *END_PIECES } else { *END } {
            return Err("it is no index of this format");
        }
        let times = |count: u64, size: usize| count.checked_mul(to_u64(size));
        let sum = || {
            let entries = times(entries, ENTRY)?;
            let frame_rows = times(frames, FRAME)?;
            let records = times(records, records::RECORD)?;
            let pieces = times(pieces, records::PIECE)?;
            let tables = [to_u64(HEADER), entries, frame_rows, records, pieces];
            let tables = tables.into_iter().try_fold(0_u64, u64::checked_add)?;
            Some((entries, frame_rows, records, tables, trailer_at.checked_sub(tables)?))
        };
        let (entries, frame_rows, records, tables, frames) =
            sum().ok_or("its lengths are absurd")?;
        if tables > TABLES_MAX {
            return Err("it has too many objects");
        }
        let size = |it: u64| usize::try_from(it).map_err(|_large| "its lengths are absurd");
        let (entries, frame_rows, records) = (size(entries)?, size(frame_rows)?, size(records)?);
        Ok(Self { entries, frame_rows, records, tables: size(tables)?, frames, hash })
    }
}

fn read_frames(raw: &[u8], lengths: &Lengths) -> Result<Vec<Frame>, &'static str> {
    let mut frames = Vec::new();
    let mut start = 0_u64;
    let tables = u64::try_from(lengths.tables).map_err(|_large| "its lengths are absurd")?;
    let mut at = tables;
    for raw in raw.chunks_exact(FRAME) {
        let mut fields = Fields(raw);
        let (length, packed) = (fields.u32()?, fields.u32()?);
        if !(1..=FRAME_MAX).contains(&length) || packed > FRAME_MAX.saturating_mul(2) {
            return Err("the lengths of its frames are absurd");
        }
        frames.push(Frame { start, length, at, packed });
        start = start.checked_add(u64::from(length)).ok_or("its lengths are absurd")?;
        at = at.checked_add(u64::from(packed)).ok_or("its lengths are absurd")?;
    }
    if at.checked_sub(tables) != Some(lengths.frames) {
        return Err("its lengths do not add up");
    }
    Ok(frames)
}

#[cfg(test)]
mod tests;
