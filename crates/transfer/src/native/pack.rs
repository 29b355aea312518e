//! Writes packed devices: objects in sequence, with small ones in the gaps between larger ones. Large objects are cut
//! into pieces.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use image::verity::{Algorithm, DeviceId, Hasher, ObjectId, digest};
use sha2::{Digest as _, Sha256};
use store::{
    DeviceDraft, DeviceKind, DraftError, ObjectPiece, OperationError, StoredDevice, StoredObject,
    StoredPiece, Transaction,
};

use super::Dedup;
use super::waiting::{PAGE, SMALL_MAX, Small, Waiting};

/// Bytes per read.
const PIECE: usize = 256 << 10;
/// Objects of at least this many bytes are cut into pieces. Each piece is stored once, and pieces of zeros are not
/// stored. `docs/decisions/0012-pieces.md` has the measurements for this and the next constant.
const CUT_FROM: u64 = 256 << 10;
/// Size of a piece, in bytes.
const CHUNK: usize = 64 << 10;
/// Length of a device that is being written. A finished device is never empty.
const UNFINISHED: u64 = 0;

/// Why objects cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The device cannot be added to the store.
    #[error("cannot add a packed device to the store")]
    Draft(#[from] DraftError),
    /// The bytes of an object do not match its id.
    #[error("object {expected} is damaged: its digest is {actual}")]
    Damaged {
        /// Id of the object.
        expected: ObjectId,
        /// Id of the bytes.
        actual: Box<ObjectId>,
    },
    #[error("stopped")]
    Stopped,
}

/// An object to pack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) object: &'a ObjectId,
    /// Size in bytes.
    pub(crate) size: u64,
    /// SHA-256 of the bytes, if known. The bytes are then not verified, except for objects that are cut into pieces.
    pub(crate) sha256: Option<[u8; 32]>,
}

/// Packs objects in the order in which they come, into one device per layer.
#[derive(Debug)]
pub(crate) struct Packer<'t> {
    transaction: &'t Transaction<'t>,
    dedup: Dedup,
    cancel: &'t AtomicBool,
    /// Created with the first object.
    draft: Option<DeviceDraft<'t>>,
    /// Objects in this layer's device.
    pending: Vec<StoredObject>,
    /// Pieces of objects in this layer's device: their offset and SHA-256.
    pieces: HashMap<ObjectId, (u64, [u8; 32])>,
    /// Small objects that have no place in the device yet.
    waiting: Waiting,
    /// Objects that need not be packed again.
    seen: HashSet<ObjectId>,
    found: HashMap<ObjectId, StoredObject>,
    buffer: Vec<u8>,
}

/// Hashes the bytes of an object to verify them, and to compute their SHA-256.
struct Check<'p> {
    expected: &'p Packed<'p>,
    hasher: Option<Hasher>,
    sha256: Option<Sha256>,
}

impl<'p> Check<'p> {
    /// Verifies the bytes only if their SHA-256 is not known.
    fn new(expected: &'p Packed<'p>) -> Self {
        match expected.sha256 {
            Some(_) => Self { expected, hasher: None, sha256: None },
            None => Self::strict(expected),
        }
    }

    /// Verifies the bytes in any case.
    fn strict(expected: &'p Packed<'p>) -> Self {
        let sha256 = expected.sha256.is_none().then(Sha256::new);
        Self { expected, hasher: Some(Hasher::new(expected.object.algorithm())), sha256 }
    }

    fn take(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
        if let Some(sha256) = &mut self.sha256 {
            sha256.update(bytes);
        }
    }

    /// Returns the SHA-256 of all bytes.
    fn finish(self) -> Result<[u8; 32], PackError> {
        let expected = *self.expected.object;
        if let Some(actual) = self.hasher.map(Hasher::finish).filter(|it| it != expected.digest()) {
            return Err(PackError::Damaged { expected, actual: Box::new(actual.into()) });
        }
        let computed = self.sha256.map(|it| it.finalize().into());
        Ok(computed.or(self.expected.sha256).expect("the digest is computed if it is unknown"))
    }
}

impl<'t> Packer<'t> {
    pub(crate) fn new(
        transaction: &'t Transaction<'t>,
        dedup: Dedup,
        cancel: &'t AtomicBool,
    ) -> Self {
        let (pending, seen) = (Vec::new(), HashSet::new());
        let (found, buffer) = (HashMap::new(), vec![0; PIECE]);
        let (draft, pieces, waiting) = (None, HashMap::new(), Waiting::default());
        Self { transaction, dedup, cancel, draft, pending, pieces, waiting, seen, found, buffer }
    }

    fn go_on(&self) -> Result<(), PackError> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(PackError::Stopped),
            false => Ok(()),
        }
    }

    /// Packs an object unless it is stored already. `read` fills a buffer from an offset in the object.
    pub(crate) fn add(
        &mut self,
        file: &Packed<'_>,
        read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
    ) -> Result<(), PackError> {
        self.go_on()?;
        let object = *file.object;
        if !self.seen.insert(object) {
            return Ok(());
        }
        if self.dedup == Dedup::Store
            && let Some(stored) = self.transaction.reuse_packed(&object)?
            // An object of another size is damaged, which `fsck` reports.
            && stored.size == file.size
        {
            self.found.insert(object, stored);
            return Ok(());
        }
        if self.draft.is_none() {
            self.draft = Some(self.transaction.device(DeviceKind::Packed)?);
        }
        let stored = match file.size {
            CUT_FROM.. => self.cut(file, read)?,
            1..=SMALL_MAX => return self.small(file, read),
            _ => self.whole(file, read)?,
        };
        self.pending.push(stored);
        Ok(())
    }

    /// Queues an object until a gap is found for it.
    fn small(
        &mut self,
        file: &Packed<'_>,
        mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
    ) -> Result<(), PackError> {
        let object = *file.object;
        let mut bytes = vec![0; usize::try_from(file.size).expect("it is less than a page")];
        read(&mut bytes, 0).map_err(OperationError::of("read object", &object))?;
        let mut check = Check::new(file);
        check.take(&bytes);
        let sha256 = check.finish()?;
        self.waiting.push(Small { object, sha256, bytes });
        while self.waiting.is_full() {
            self.page_of_small()?;
        }
        Ok(())
    }

    /// Fills the rest of the device's current page with queued objects that fit.
    fn fill_page(&mut self) -> Result<(), PackError> {
        let draft = self.draft.as_mut().expect("the device was begun");
        loop {
            let offset = draft.position();
            let room = offset.next_multiple_of(PAGE) - offset;
            let Some(Small { object, sha256, bytes }) = self.waiting.take(room) else { break };
            self.pending.push(place(draft, object, sha256, &bytes)?);
        }
        Ok(draft.align_to(PAGE)?)
    }

    /// Fills the rest of the current page, and another page, with queued objects.
    fn page_of_small(&mut self) -> Result<(), PackError> {
        self.fill_page()?;
        let draft = self.draft.as_mut().expect("the device was begun");
        if let Some(Small { object, sha256, bytes }) = self.waiting.take(PAGE) {
            self.pending.push(place(draft, object, sha256, &bytes)?);
            self.fill_page()?;
        }
        Ok(())
    }

    /// Writes an object into the device.
    fn whole(
        &mut self,
        file: &Packed<'_>,
        mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
    ) -> Result<StoredObject, PackError> {
        self.fill_page()?;
        let draft = self.draft.as_mut().expect("the device was begun");
        let (object, size) = (*file.object, file.size);
        let mut check = Check::new(file);
        let offset = draft.position();
        let mut at = 0;
        while at < size {
            let count = usize::try_from(size - at).map_or(PIECE, |left| left.min(PIECE));
            let piece = &mut self.buffer[..count];
            read(piece, at).map_err(OperationError::of("read object", &object))?;
            check.take(piece);
            draft.write_all(piece).map_err(OperationError::of("write", "a packed device"))?;
            at += count as u64;
        }
        draft.align()?;
        let sha256 = check.finish()?;
        draft.add(object, sha256, offset, size);
        Ok(StoredObject { offset, ..unfinished(object, size, sha256) })
    }

    /// Writes the pieces of an object into the device, except pieces that are already stored and pieces of zeros.
    fn cut(
        &mut self,
        file: &Packed<'_>,
        mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
    ) -> Result<StoredObject, PackError> {
        let (object, size) = (*file.object, file.size);
        // The ids of pieces are computed from these bytes, so the bytes must match the object.
        let mut check = Check::strict(file);
        let mut pieces: Vec<StoredPiece> = Vec::new();
        let mut buffer = vec![0; CHUNK];
        let mut at = 0;
        while at < size {
            self.go_on()?;
            let count = usize::try_from(size - at).map_or(CHUNK, |left| left.min(CHUNK));
            let bytes = &mut buffer[..count];
            read(bytes, at).map_err(OperationError::of("read object", &object))?;
            check.take(bytes);
            let len = count as u64;
            at += len;
            let is_zeros = bytes.iter().all(|byte| *byte == 0);
            let stored = if is_zeros { None } else { Some(self.piece(bytes)?) };
            match pieces.last_mut() {
                Some(hole) if is_zeros && hole.stored.is_none() => hole.len += len,
                _ => pieces.push(StoredPiece { len, stored }),
            }
        }
        let sha256 = check.finish()?;
        let name = |it: &StoredPiece| ObjectPiece {
            object: it.stored.as_ref().map(|it| it.object),
            len: it.len,
        };
        let names: Vec<ObjectPiece> = pieces.iter().map(name).collect();
        let draft = self.draft.as_mut().expect("the device was begun");
        draft.add_pieces(object, sha256, size, &names);
        Ok(StoredObject { pieces: Some(pieces.into()), ..unfinished(object, size, sha256) })
    }

    /// Finds a piece, or writes it into the device.
    fn piece(&mut self, bytes: &[u8]) -> Result<StoredObject, PackError> {
        let (id, size) = (ObjectId::new(digest(Algorithm::Sha256, bytes)), bytes.len() as u64);
        if let Some((offset, sha256)) = self.pieces.get(&id) {
            return Ok(StoredObject { offset: *offset, ..unfinished(id, size, *sha256) });
        }
        if self.dedup == Dedup::Store
            && let Some(found) = self.transaction.reuse_piece(&id, size)?
        {
            return Ok(found);
        }
        self.fill_page()?;
        let draft = self.draft.as_mut().expect("the device was begun");
        let stored = place(draft, id, Sha256::digest(bytes).into(), bytes)?;
        self.pieces.insert(id, (stored.offset, stored.sha256));
        Ok(stored)
    }

    /// Ends a layer, so that later objects go into another device.
    pub(crate) fn end_layer(&mut self) -> Result<(), PackError> {
        self.pieces.clear();
        while !self.waiting.is_empty() {
            self.page_of_small()?;
        }
        if let Some(draft) = self.draft.take() {
            let device = draft.finish()?;
            for mut stored in self.pending.drain(..) {
                finish(&mut stored, &device);
                if let Some(pieces) = &mut stored.pieces {
                    let pieces = Arc::get_mut(pieces).expect("no reader has seen it yet");
                    pieces.iter_mut().filter_map(|it| it.stored.as_mut()).for_each(|it| {
                        finish(it, &device);
                    });
                }
                self.found.entry(stored.object).or_insert(stored);
            }
        }
        Ok(())
    }

    /// Returns the locations of all packed objects.
    pub(crate) fn finish(mut self) -> Result<HashMap<ObjectId, StoredObject>, PackError> {
        self.end_layer()?;
        Ok(self.found)
    }
}

/// Writes a whole object at the end of a device.
fn place(
    draft: &mut DeviceDraft<'_>,
    object: ObjectId,
    sha256: [u8; 32],
    bytes: &[u8],
) -> Result<StoredObject, PackError> {
    let (offset, size) = (draft.position(), bytes.len() as u64);
    draft.write_all(bytes).map_err(OperationError::of("write", "a packed device"))?;
    draft.align()?;
    draft.add(object, sha256, offset, size);
    Ok(StoredObject { offset, ..unfinished(object, size, sha256) })
}

/// Returns the location of an object in a device whose id is not known yet. Until it is known, the object's digest
/// stands for the device's id.
fn unfinished(object: ObjectId, size: u64, sha256: [u8; 32]) -> StoredObject {
    let kind = DeviceKind::Packed;
    let device = DeviceId::new(*object.digest());
    let (device_bytes, offset, pieces) = (UNFINISHED, 0, None);
    StoredObject { object, device, device_bytes, kind, offset, size, sha256, pieces }
}

fn finish(stored: &mut StoredObject, device: &StoredDevice) {
    if stored.device_bytes == UNFINISHED {
        (stored.device, stored.device_bytes) = (device.id, device.bytes);
    }
}

#[cfg(test)]
mod tests {
    use store::{OpenOptions, Store};

    use super::*;

    #[test]
    fn pieces_are_not_named_by_other_bytes_than_the_object_has() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(
            &folder.path().join("store"),
            store::Who::this_process(),
            OpenOptions::create(),
        )
        .unwrap();
        let transaction = store.begin().unwrap();
        let never = AtomicBool::new(false);
        let bytes = vec![7; 300 << 10];
        let object = digest(Algorithm::Sha256, &bytes).into();
        let size = bytes.len() as u64;
        // For smaller objects a known SHA-256 is trusted, because `fsck` compares it with their ids. Pieces are
        // always verified.
        for sha256 in [None, Some(Sha256::digest(&bytes).into())] {
            let file = Packed { object: &object, size, sha256 };
            for flipped in [None, Some(200_000)] {
                let mut packer = Packer::new(&transaction, Dedup::Store, &never);
                let added = packer.add(&file, |buffer, at| {
                    buffer.fill(7);
                    let at = usize::try_from(at).unwrap();
                    if let Some(flipped) = flipped.filter(|it| (at..at + buffer.len()).contains(it))
                    {
                        buffer[flipped - at] ^= 1;
                    }
                    Ok(())
                });
                match flipped {
                    None => added.unwrap(),
                    Some(_) => {
                        let error = added.unwrap_err();
                        assert!(
                            matches!(error, PackError::Damaged { expected, .. } if expected == object),
                            "{error}"
                        );
                    }
                }
            }
        }
    }
}
