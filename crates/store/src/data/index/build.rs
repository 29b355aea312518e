//! Making an index.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::io;

use sha2::{Digest as _, Sha256};

use super::{
    BlobKind, COUNTS, END, END_MAX, END_PIECES, Entry, FRAME_FULL, Header, IMPRINT, Record,
    by_offset, records,
};
use crate::digest::Digest;

/// Ends of files are text and code as often as not: zstd's own default.
const LEVEL: i32 = 3;

/// An index that is being made.
pub(crate) struct Builder {
    entries: Vec<Entry>,
    records: Vec<Record>,
    gathered: Vec<u8>,
    /// Where in all ends the gathered ones begin.
    start: u64,
    /// Bytes of each frame, and of what it is compressed to.
    frames: Vec<(u32, u32)>,
    packed: Vec<u8>,
    compressor: zstd::bulk::Compressor<'static>,
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("entries", &self.entries.len()).finish()
    }
}

impl Builder {
    pub(crate) fn new() -> io::Result<Self> {
        let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
        compressor.include_checksum(true)?;
        Ok(Self {
            entries: Vec::new(),
            records: Vec::new(),
            gathered: Vec::new(),
            start: 0,
            frames: Vec::new(),
            packed: Vec::new(),
            compressor,
        })
    }

    /// Adds an object; its end's place and length come from `end`.
    pub(crate) fn add(&mut self, entry: &Entry, end: &[u8]) -> io::Result<()> {
        let invalid = |text| io::Error::new(io::ErrorKind::InvalidInput, text);
        if end.len() > END_MAX {
            return Err(invalid("the end of an object is too long"));
        }
        let mut entry = Entry { end_at: 0, end_len: 0, ..*entry };
        if !end.is_empty() {
            if self.gathered.len() >= FRAME_FULL {
                self.end_frame()?;
            }
            let at = u64::try_from(self.gathered.len()).map_err(io::Error::other)?;
            entry.end_at = self.start.checked_add(at).ok_or_else(|| invalid("too many ends"))?;
            entry.end_len = u32::try_from(end.len()).map_err(io::Error::other)?;
            self.gathered.extend_from_slice(end);
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Adds an object in pieces.
    pub(crate) fn add_record(&mut self, record: Record) {
        self.records.push(record);
    }

    fn end_frame(&mut self) -> io::Result<()> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        let packed = self.compressor.compress(&self.gathered)?;
        let length = u32::try_from(self.gathered.len()).map_err(io::Error::other)?;
        let packed_length = u32::try_from(packed.len()).map_err(io::Error::other)?;
        self.packed.extend_from_slice(&packed);
        self.frames.push((length, packed_length));
        self.start = self.start.saturating_add(u64::from(length));
        self.gathered.clear();
        Ok(())
    }

    /// What stands at the end of the blob, so that blobs with other objects in them have other names, also where these
    /// differ in their ends alone, or in what kind of blob it is.
    pub(crate) fn imprint(&mut self, kind: BlobKind, layer: Option<&Digest>) -> Vec<u8> {
        self.entries.sort_unstable();
        self.entries.dedup_by_key(|it| (it.id, it.offset));
        let mut hasher = Sha256::new();
        for entry in &self.entries {
            hasher.update(entry.id);
            hasher.update(entry.offset.to_le_bytes());
            hasher.update(entry.size.to_le_bytes());
            hasher.update(entry.end_len.to_le_bytes());
        }
        records::sort(&mut self.records);
        records::hash(&self.records, &mut hasher);
        let mut imprint = IMPRINT.to_vec();
        imprint.extend_from_slice(&kind.number().to_le_bytes());
        imprint.extend_from_slice(&hasher.finalize());
        imprint.extend_from_slice(layer.map(Digest::as_bytes).unwrap_or_default());
        imprint.resize(usize::try_from(kind.block_size()).unwrap_or_default(), 0);
        imprint
    }

    /// The whole file. An object that was added twice at one place is there once.
    pub(crate) fn encode(mut self, header: &Header) -> io::Result<Vec<u8>> {
        let invalid = |text| io::Error::new(io::ErrorKind::InvalidInput, text);
        self.end_frame()?;
        self.entries.sort_unstable();
        self.entries.dedup_by_key(|it| (it.id, it.offset));
        self.entries
            .iter()
            .try_for_each(|it| it.check(header.kind, header.bytes))
            .map_err(invalid)?;
        by_offset(&self.entries).map_err(invalid)?;
        records::sort(&mut self.records);
        self.records.iter().try_for_each(|it| it.check(header.kind)).map_err(invalid)?;
        records::by_pieces(&self.records).map_err(invalid)?;
        let number = |count: usize| u64::try_from(count).map_err(io::Error::other);
        let pieces = self.records.iter().map(|it| it.pieces.len()).sum();
        let counts = [number(self.records.len())?, number(pieces)?].map(u64::to_le_bytes);
        let mut file = header.encode();
        file.splice(COUNTS..COUNTS.saturating_add(16), counts.into_iter().flatten());
        for entry in &self.entries {
            file.extend_from_slice(&entry.id);
            file.extend_from_slice(&entry.sha256);
            file.extend_from_slice(&entry.offset.to_le_bytes());
            file.extend_from_slice(&entry.size.to_le_bytes());
            file.extend_from_slice(&entry.end_at.to_le_bytes());
            file.extend_from_slice(&entry.end_len.to_le_bytes());
            file.extend_from_slice(&[0; 4]);
        }
        for (length, packed) in &self.frames {
            file.extend_from_slice(&length.to_le_bytes());
            file.extend_from_slice(&packed.to_le_bytes());
        }
        records::encode(&self.records, &mut file).ok_or_else(|| invalid("too many pieces"))?;
        let tables = Sha256::digest(&file);
        file.append(&mut self.packed);
        for count in [self.entries.len(), self.frames.len()] {
            file.extend_from_slice(&number(count)?.to_le_bytes());
        }
        file.extend_from_slice(&tables);
        file.extend_from_slice(if self.records.is_empty() { END } else { END_PIECES });
        let hash = Sha256::digest(&file);
        file.extend_from_slice(&hash);
        Ok(file)
    }
}
