//! Packed blobs: the whole blocks of objects one behind the other, their ends in the index.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

use image::erofs::PACKED_TAIL_MAX;
use image::verity::{Hasher, ObjectId};
use sha2::{Digest as _, Sha256};
use store::{BlobKind, DataBlob, DataBlobDraft, DraftError, StoredObject, Transaction};

use super::Dedup;

/// Bytes that are copied at once.
const PIECE: usize = 256 << 10;
/// Bytes of a block of a packed blob.
const BLOCK: u64 = BlobKind::Packed.block_size();

/// Why objects cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The blob cannot be written.
    #[error("cannot write a packed blob")]
    Write(#[source] io::Error),
    /// Nor be added to the store.
    #[error("cannot add a packed blob to the store")]
    Draft(#[from] DraftError),
    /// The bytes are not to be had.
    #[error("cannot read object {object}")]
    Read {
        /// Which one.
        object: ObjectId,
        /// Why.
        source: io::Error,
    },
    /// The bytes are other ones.
    #[error("object {expected} is damaged, its bytes are those of {actual}")]
    Damaged {
        /// As it should be.
        expected: ObjectId,
        /// As it is.
        actual: Box<ObjectId>,
    },
    /// The user wants no more of it.
    #[error("stopped")]
    Stopped,
}

/// An object to pack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) object: &'a ObjectId,
    /// Length in bytes.
    pub(crate) size: u64,
    /// SHA-256 of the bytes, if it is known; then the bytes are taken as they are. Otherwise they are verified.
    pub(crate) sha256: Option<[u8; 32]>,
}

/// Packs objects, a blob after the other, in the order in which they come.
#[derive(Debug)]
pub(crate) struct Packer<'t> {
    transaction: &'t Transaction<'t>,
    dedup: Dedup,
    cancel: &'t AtomicBool,
    /// Begun when there is something to put in.
    draft: Option<DataBlobDraft<'t>>,
    /// What is in this layer's blob.
    pending: Vec<StoredObject>,
    /// What need not be packed again.
    seen: HashSet<ObjectId>,
    found: HashMap<ObjectId, StoredObject>,
    buffer: Vec<u8>,
}

impl<'t> Packer<'t> {
    pub(crate) fn new(
        transaction: &'t Transaction<'t>,
        dedup: Dedup,
        cancel: &'t AtomicBool,
    ) -> Self {
        let (pending, seen) = (Vec::new(), HashSet::new());
        let (found, buffer) = (HashMap::new(), vec![0; PIECE]);
        Self { transaction, dedup, cancel, draft: None, pending, seen, found, buffer }
    }

    /// Packs an object, unless it need not be; `read` fills a buffer from a place in its bytes.
    pub(crate) fn add(
        &mut self,
        file: &Packed<'_>,
        mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
    ) -> Result<(), PackError> {
        if self.cancel.load(Ordering::Relaxed) {
            return Err(PackError::Stopped);
        }
        let (object, size) = (*file.object, file.size);
        if !self.seen.insert(object) {
            return Ok(());
        }
        if self.dedup == Dedup::Store
            && let Some(stored) = self.transaction.reuse_packed(&object)?
        {
            self.found.insert(object, stored);
            return Ok(());
        }
        let draft = match &mut self.draft {
            Some(draft) => draft,
            empty => empty.insert(self.transaction.data_blob(BlobKind::Packed)?),
        };
        let mut hashes = match file.sha256 {
            Some(_) => None,
            None => Some((Hasher::new(object.algorithm()), Sha256::new())),
        };
        let end = size % BLOCK;
        let end = if end > u64::from(PACKED_TAIL_MAX) { 0 } else { end };
        let offset = draft.position();
        let mut at = 0;
        let mut kept = 0..0;
        while at < size {
            let body = (size - end).saturating_sub(at);
            let left = if body > 0 { body } else { end };
            let count = usize::try_from(left).map_or(PIECE, |left| left.min(PIECE));
            let piece = &mut self.buffer[..count];
            read(piece, at).map_err(|source| PackError::Read { object, source })?;
            if let Some((hasher, sha256)) = &mut hashes {
                hasher.update(piece);
                sha256.update(&*piece);
            }
            if body > 0 {
                draft.write_all(piece).map_err(PackError::Write)?;
            } else {
                // It is less than a piece, and the last one.
                kept = 0..count;
            }
            at += count as u64;
        }
        draft.align()?;
        let sha256 = match (file.sha256, hashes) {
            (Some(known), _) => known,
            (None, hashes) => {
                let (hasher, sha256) = hashes.expect("made where none is known");
                let actual = hasher.finish();
                if actual != object {
                    return Err(PackError::Damaged { expected: object, actual: Box::new(actual) });
                }
                sha256.finalize().into()
            }
        };
        let end = &self.buffer[kept];
        draft.add(object, sha256, offset, size, end);
        self.pending.push(StoredObject {
            object,
            // Not known yet.
            blob: object,
            blob_bytes: 0,
            kind: BlobKind::Packed,
            offset,
            size,
            end_len: u32::try_from(end.len()).expect("less than a block"),
            sha256,
        });
        Ok(())
    }

    /// Ends a layer: what comes next is in another blob.
    pub(crate) fn end_layer(&mut self) -> Result<(), PackError> {
        if self.dedup == Dedup::Layer {
            self.seen.clear();
        }
        if let Some(draft) = self.draft.take() {
            let DataBlob { id, bytes, .. } = draft.finish()?;
            for stored in self.pending.drain(..) {
                let stored = StoredObject { blob: id, blob_bytes: bytes, ..stored };
                self.found.entry(stored.object).or_insert(stored);
            }
        }
        Ok(())
    }

    /// Where everything is that was to be packed.
    pub(crate) fn finish(mut self) -> Result<HashMap<ObjectId, StoredObject>, PackError> {
        self.end_layer()?;
        Ok(self.found)
    }
}
