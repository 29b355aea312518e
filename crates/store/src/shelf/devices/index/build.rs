//! Builds an index.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::io;

use sha2::{Digest as _, Sha256};

use super::{
    COUNTS, DATA_BLOCK, DeviceKind, END, Entry, Header, IMPRINT, IndexDamage, Record, by_offset,
    records,
};
use image::digest::Digest;

/// An index that is being built.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    entries: Vec<Entry>,
    records: Vec<Record>,
}

impl Builder {
    pub(crate) fn add(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    pub(crate) fn add_record(&mut self, record: Record) {
        self.records.push(record);
    }

    /// Returns the last block of the device. The block depends on the objects, the kind and the layer, so that devices
    /// that differ only in these properties have different ids.
    pub(crate) fn imprint(&mut self, kind: DeviceKind, layer: Option<&Digest>) -> Vec<u8> {
        self.entries.sort_unstable();
        self.entries.dedup();
        let mut hasher = Sha256::new();
        for entry in &self.entries {
            hasher.update(entry.id);
            hasher.update(entry.offset.to_le_bytes());
            hasher.update(entry.size.to_le_bytes());
        }
        records::sort(&mut self.records);
        records::hash(&self.records, &mut hasher);
        let mut imprint = IMPRINT.to_vec();
        imprint.extend_from_slice(&kind.number().to_le_bytes());
        imprint.extend_from_slice(&hasher.finalize());
        imprint.extend_from_slice(layer.map(Digest::as_bytes).unwrap_or_default());
        imprint.resize(usize::try_from(DATA_BLOCK).unwrap_or_default(), 0);
        imprint
    }

    /// Encodes the whole file. An object that was added twice at the same offset occurs once.
    pub(crate) fn encode(mut self, header: &Header) -> io::Result<Vec<u8>> {
        let invalid = |damage: IndexDamage| io::Error::new(io::ErrorKind::InvalidInput, damage);
        self.entries.sort_unstable();
        self.entries.dedup();
        self.entries.iter().try_for_each(|it| it.check(header.bytes)).map_err(invalid)?;
        let mut pairs = self.entries.iter().zip(self.entries.iter().skip(1));
        if pairs.any(|(one, next)| one.id == next.id && one.sha256 != next.sha256) {
            return Err(invalid(IndexDamage::Digests));
        }
        by_offset(&self.entries).map_err(invalid)?;
        records::sort(&mut self.records);
        self.records.iter().try_for_each(|it| it.check(header.kind)).map_err(invalid)?;
        records::by_pieces(&self.records).map_err(invalid)?;
        let number = |count: usize| u64::try_from(count).map_err(io::Error::other);
        let pieces = self.records.iter().map(|it| it.pieces.len()).sum();
        let counts = [number(self.entries.len())?, number(self.records.len())?, number(pieces)?];
        let mut file = header.encode();
        file.splice(COUNTS.., counts.into_iter().flat_map(u64::to_le_bytes));
        for entry in &self.entries {
            file.extend_from_slice(&entry.id);
            file.extend_from_slice(&entry.sha256);
            file.extend_from_slice(&entry.offset.to_le_bytes());
            file.extend_from_slice(&entry.size.to_le_bytes());
        }
        records::encode(&self.records, &mut file).ok_or_else(|| invalid(IndexDamage::Lengths))?;
        file.extend_from_slice(END);
        let hash = Sha256::digest(&file);
        file.extend_from_slice(&hash);
        Ok(file)
    }
}
