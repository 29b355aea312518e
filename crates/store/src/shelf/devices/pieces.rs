//! Objects in pieces: files that are large, changed in the middle, or full of zeros.

use std::sync::Arc;

use image::verity::{DeviceId, ObjectId};

use super::index::Record;
use super::{Index, StoredObject};

/// A run of an object's bytes, identified by object id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectPiece {
    /// The object with exactly these bytes, in a packed device; `None` for zeros, which are not stored.
    pub object: Option<ObjectId>,
    /// Length in bytes. It is a multiple of a block, except for an object's last piece.
    pub len: u64,
}

/// A run of an object's bytes, with its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPiece {
    /// Length in bytes.
    pub len: u64,
    /// Location of the bytes; `None` for zeros, which are not stored.
    pub stored: Option<StoredObject>,
}

/// Looks up the pieces of an object, first in the device whose index lists them, then by `find`. Returns `None` if a
/// piece is missing.
pub(crate) fn resolve(
    index: &Index,
    device: &DeviceId,
    record: &Record,
    find: &dyn Fn(&[u8; 32], u64) -> Option<StoredObject>,
) -> Option<StoredObject> {
    let mut pieces = Vec::with_capacity(record.pieces.len());
    for piece in &record.pieces {
        let stored = match &piece.id {
            None => None,
            Some(id) => Some(
                super::piece_of(index, device, id, piece.len).or_else(|| find(id, piece.len))?,
            ),
        };
        pieces.push(StoredPiece { len: piece.len, stored });
    }
    Some(StoredObject {
        object: record.object(),
        device: *device,
        device_bytes: index.header.bytes,
        kind: index.header.kind,
        offset: 0,
        size: record.size,
        sha256: record.sha256,
        pieces: Some(Arc::from(pieces)),
    })
}
