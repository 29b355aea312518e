//! Objects in pieces: lists of other objects in devices whose concatenated bytes are the object.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use std::collections::HashMap;

use image::verity::ObjectId;
use sha2::{Digest as _, Sha256};

use super::{DATA_BLOCK, DeviceKind, Fields, IndexDamage};

/// Lengths in bytes of an encoded record and of an encoded piece.
pub(super) const RECORD: usize = 96;
pub(super) const PIECE: usize = 40;

/// A run of an object's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct IndexPiece {
    /// Key of the object with exactly these bytes; `None` for zeros, which are not stored.
    pub(crate) id: Option<[u8; 32]>,
    pub(crate) len: u64,
}

/// An object in pieces. Its pieces may be in other devices. If a piece is missing, the object is missing as well.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Record {
    pub(crate) id: [u8; 32],
    pub(crate) sha256: [u8; 32],
    pub(crate) size: u64,
    pub(crate) pieces: Vec<IndexPiece>,
}

/// SHA-256 digest of a list of pieces.
pub(crate) type PiecesKey = [u8; 32];

/// Returns the key of a list of pieces.
pub(crate) fn key_of(pieces: &[IndexPiece]) -> PiecesKey {
    let mut hash = Sha256::new();
    pieces.iter().for_each(|it| hash.update(it.encode()));
    hash.finalize().into()
}

impl IndexPiece {
    fn encode(&self) -> [u8; PIECE] {
        let mut raw = [0; PIECE];
        let (id, len) = raw.split_at_mut(32);
        id.copy_from_slice(&self.id.unwrap_or_default());
        len.copy_from_slice(&self.len.to_le_bytes());
        raw
    }
}

impl Record {
    /// Returns the object's id.
    pub(crate) fn object(&self) -> ObjectId {
        ObjectId::from_bytes(&self.id).expect("32 bytes")
    }

    /// Returns the keys of the objects from which the pieces are taken.
    pub(crate) fn parts(&self) -> impl Iterator<Item = [u8; 32]> {
        self.pieces.iter().filter_map(|it| it.id)
    }

    /// Checks the record against the rules for a device of this kind.
    pub(super) fn check(&self, kind: DeviceKind) -> Result<(), IndexDamage> {
        if kind != DeviceKind::Packed {
            return Err(IndexDamage::PiecesOfTar);
        }
        let mut left = self.size;
        let mut after_hole = false;
        for piece in &self.pieces {
            left = match left.checked_sub(piece.len) {
                Some(left) if piece.len > 0 => left,
                _ => return Err(IndexDamage::PieceSum(self.size)),
            };
            if left > 0 && !piece.len.is_multiple_of(DATA_BLOCK) {
                return Err(IndexDamage::PieceEnd(piece.len));
            }
            let is_hole = piece.id.is_none();
            if is_hole && after_hole {
                return Err(IndexDamage::ZerosTwice);
            }
            after_hole = is_hole;
        }
        match (left, self.pieces.is_empty()) {
            (0, false) => Ok(()),
            _ => Err(IndexDamage::PieceSum(self.size)),
        }
    }
}

/// Sorts records by id, and removes duplicates.
pub(super) fn sort(records: &mut Vec<Record>) {
    records.sort_unstable();
    records.dedup_by(|one, other| one.id == other.id);
}

/// Appends the table of records, followed by the table of pieces.
pub(super) fn encode(records: &[Record], file: &mut Vec<u8>) -> Option<()> {
    let mut first = 0_u64;
    for record in records {
        let count = u64::try_from(record.pieces.len()).ok()?;
        file.extend_from_slice(&record.id);
        file.extend_from_slice(&record.sha256);
        for number in [record.size, first, count, 0] {
            file.extend_from_slice(&number.to_le_bytes());
        }
        first = first.checked_add(count)?;
    }
    for piece in records.iter().flat_map(|it| &it.pieces) {
        file.extend_from_slice(&piece.encode());
    }
    Some(())
}

/// Hashes the records for the device's imprint, so that devices with other records have other ids.
pub(super) fn hash(records: &[Record], hasher: &mut Sha256) {
    for record in records {
        hasher.update(record.id);
        hasher.update(record.size.to_le_bytes());
        hasher.update(key_of(&record.pieces));
    }
}

/// Decodes both tables.
pub(super) fn decode(
    records: &[u8],
    mut pieces: &[u8],
    kind: DeviceKind,
) -> Result<Vec<Record>, IndexDamage> {
    let mut found: Vec<Record> = Vec::new();
    let mut next = 0_u64;
    for raw in records.chunks_exact(RECORD) {
        let mut fields = Fields(raw);
        let (id, sha256) = (fields.take()?, fields.take()?);
        let (size, first, count) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let reserved = fields.u64()?;
        if reserved != 0 {
            return Err(IndexDamage::Reserved(reserved));
        }
        if first != next {
            return Err(IndexDamage::PieceOrder { expected: next, actual: first });
        }
        next = next.checked_add(count).ok_or(IndexDamage::Lengths)?;
        let bytes = usize::try_from(count).ok().and_then(|count| count.checked_mul(PIECE));
        let taken = bytes.and_then(|bytes| pieces.split_at_checked(bytes));
        let (own, rest) = taken.ok_or(IndexDamage::FewPieces)?;
        pieces = rest;
        let own = own.chunks_exact(PIECE).map(|raw| {
            let mut fields = Fields(raw);
            let id: [u8; 32] = fields.take()?;
            Ok::<_, IndexDamage>(IndexPiece {
                id: (id != [0; 32]).then_some(id),
                len: fields.u64()?,
            })
        });
        let record = Record { id, sha256, size, pieces: own.collect::<Result<_, _>>()? };
        record.check(kind)?;
        if found.last().is_some_and(|last| last.id >= id) {
            return Err(IndexDamage::RecordOrder);
        }
        found.push(record);
    }
    if !pieces.is_empty() {
        return Err(IndexDamage::ManyPieces(pieces.len()));
    }
    Ok(found)
}

/// Maps lists of pieces to records. Two records with the same pieces are an error.
pub(super) fn by_pieces(records: &[Record]) -> Result<HashMap<PiecesKey, u32>, IndexDamage> {
    let mut found = HashMap::new();
    for (record, number) in records.iter().zip(0..) {
        if found.insert(key_of(&record.pieces), number).is_some() {
            return Err(IndexDamage::SamePieces);
        }
    }
    Ok(found)
}
