//! The tar of one layer, from the thread that unpacks it to the one that reads it.

use std::io::{self, Read, Write as _};
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use store::DeviceDraft;

use super::decode::{DecodeError, Decoded, Decoder};
use super::failure::LayerFailure;
use crate::lazy::{IndexParts, Units};
use image::digest::{Digest, DigestHasher};
use image::gzip::GzipError;

/// Bytes of tar in one piece.
const PIECE: usize = 256 << 10;
/// Pieces that may wait.
const PIECES: usize = 3;

/// Bytes that one layer on its way takes besides the queue of objects: pieces of tar, the blob's and the tar reader's
/// buffers, pieces of a large file, a batch in the making.
pub(super) const LAYER_COST: usize = (PIECES + 2) * PIECE + (512 << 10) + (3 << 20);

/// Pieces that may wait to be hashed for an index.
const HASHED_PIECES: usize = 2;

/// Of so many bytes of a blob, an index keeps one until it is written: windows, of which layers have 3 or 4 in a hundred bytes,
/// and digests.
const BLOB_PARTS: u64 = 16;

/// What the index of a blob of so many bytes adds: pieces that are hashed or wait for that, and what it keeps.
pub(super) fn index_cost(blob: u64) -> usize {
    let kept = usize::try_from(blob / BLOB_PARTS).unwrap_or(usize::MAX);
    kept.saturating_add((HASHED_PIECES + 1) * PIECE + (1 << 20))
}

/// Where the unpacking thread puts pieces.
struct Spout {
    full: SyncSender<Vec<u8>>,
    spent: Receiver<Vec<u8>>,
}

/// Hashes the units of an index, from pieces that were read.
struct UnitHasher {
    read: Receiver<Vec<u8>>,
    spent: Sender<Vec<u8>>,
}

/// Reads the tar, hashes it as it goes by, and writes it down if that is wanted.
pub(super) struct Feed<'t> {
    full: Receiver<Vec<u8>>,
    spent: Sender<Vec<u8>>,
    /// Where pieces go that were read, if not back.
    units: Option<SyncSender<Vec<u8>>>,
    piece: Vec<u8>,
    at: usize,
    hasher: DigestHasher,
    length: u64,
    copy: Option<DeviceDraft<'t>>,
    /// Why it could not be written down.
    failed: Option<io::Error>,
}

/// A tar that was read.
pub(super) struct Tar<'t> {
    /// Of all its bytes.
    pub(super) diff_id: Digest,
    /// How many they are.
    pub(super) length: u64,
    pub(super) copy: Option<DeviceDraft<'t>>,
}

/// A channel for a tar whose digest is wanted by the algorithm of `diff_id`, else by SHA-256; it is written to `copy`.
fn feed<'t>(diff_id: Option<&Digest>, copy: Option<DeviceDraft<'t>>) -> (Spout, Feed<'t>) {
    let (full_in, full) = sync_channel(PIECES);
    let (spent, spent_out) = channel();
    let hasher = diff_id.map_or_else(DigestHasher::sha256, Digest::hasher);
    let (piece, at, length, failed) = (Vec::new(), 0, 0, None);
    let feed = Feed { full, spent, units: None, piece, at, hasher, length, copy, failed };
    (Spout { full: full_in, spent: spent_out }, feed)
}

impl Spout {
    /// Unpacks to the end. When the reader goes away early, only finds out whether the blob is to blame.
    fn pour(self, mut decoder: Decoder<'_, impl Read>) -> Result<Decoded, DecodeError> {
        loop {
            let mut piece = self.spent.try_recv().unwrap_or_else(|_| vec![0; PIECE]);
            piece.resize(PIECE, 0);
            let length = decoder.fill(&mut piece)?;
            if length == 0 {
                return decoder.finish();
            }
            piece.truncate(length);
            if self.full.send(piece).is_err() {
                decoder.blame()?;
                return Err(DecodeError::Stopped);
            }
        }
    }
}

/// A tar that was unpacked and read.
pub(super) struct Poured<'t, T> {
    pub(super) tar: Tar<'t>,
    /// What the reader has made of it.
    pub(super) outcome: T,
    pub(super) decoded: Decoded,
    /// What an index is made of, if one is wanted.
    pub(super) index: Option<Result<IndexParts, GzipError>>,
}

/// Unpacks in a thread of its own while `read` reads the tar. A third one hashes for an index.
pub(super) fn pour<'t, T>(
    decoder: Decoder<'_, impl Read + Send>,
    diff_id: Option<&Digest>,
    copy: Option<DeviceDraft<'t>>,
    read: impl FnOnce(&mut Feed<'t>) -> Result<T, LayerFailure>,
) -> Result<Poured<'t, T>, LayerFailure> {
    let (spout, mut feed) = feed(diff_id, copy);
    let unit_hasher = decoder.is_indexing().then(|| feed.unit_hasher());
    thread::scope(|scope| {
        let hashing = unit_hasher.map(|hasher| {
            thread::Builder::new()
                .name("units".to_owned())
                .spawn_scoped(scope, || hasher.hash())
                .map_err(DecodeError::Read)
        });
        let hashing = hashing.transpose()?;
        let unpacking = thread::Builder::new()
            .name("unpack".to_owned())
            .spawn_scoped(scope, || spout.pour(decoder));
        let unpacking = match unpacking {
            Ok(unpacking) => unpacking,
            Err(error) => {
                // What the other thread may wait for.
                drop(feed);
                return Err(DecodeError::Read(error).into());
            }
        };
        let outcome = read(&mut feed);
        // Once the feed is gone, so is what the other threads may wait for.
        let tar = feed.finish();
        let decoded = unpacking.join().unwrap_or_else(|panic| resume_unwind(panic));
        let units = hashing.map(|it| it.join().unwrap_or_else(|panic| resume_unwind(panic)));
        match (tar, outcome, decoded) {
            // The tar could not be written down, which ended all else.
            (Err(error), ..) => Err(LayerFailure::Copy(error)),
            // What the blob is comes before what is in it, and a consequence after its cause.
            (_, Err(failure), Err(DecodeError::Stopped)) => Err(failure),
            (_, _, Err(error)) => Err(error.into()),
            (_, Err(failure), Ok(_)) => Err(failure),
            (Ok(tar), Ok(outcome), Ok(mut decoded)) => {
                let parts = decoded.checkpoints.take().zip(units);
                let index = parts.map(|(checkpoints, units)| {
                    Ok(IndexParts { checkpoints: checkpoints?, units, tar_bytes: tar.length })
                });
                Ok(Poured { tar, outcome, decoded, index })
            }
        }
    })
}

impl UnitHasher {
    /// Hashes all that is read. It ends when the feed does.
    fn hash(self) -> Units {
        let mut units = Units::default();
        for piece in self.read {
            units.add(&piece);
            // The unpacking thread may be gone, and then needs no buffers.
            drop(self.spent.send(piece));
        }
        units
    }
}

impl<'t> Feed<'t> {
    /// Has what is read hashed for an index, too: by a thread of its own, since this one and that which unpacks have
    /// enough to do.
    fn unit_hasher(&mut self) -> UnitHasher {
        let (units, read) = sync_channel(HASHED_PIECES);
        self.units = Some(units);
        UnitHasher { read, spent: self.spent.clone() }
    }

    /// Hands on the piece that was read.
    fn hand_on(&mut self) {
        let piece = std::mem::take(&mut self.piece);
        if piece.capacity() > 0 {
            // Both threads may be gone, and then need no buffers.
            match &self.units {
                Some(units) => drop(units.send(piece)),
                None => drop(self.spent.send(piece)),
            }
        }
    }

    /// What was read; an error if it could not be written down.
    fn finish(mut self) -> io::Result<Tar<'t>> {
        self.hand_on();
        match self.failed {
            Some(error) => Err(error),
            None => {
                let (diff_id, length) = (self.hasher.finish(), self.length);
                Ok(Tar { diff_id, length, copy: self.copy })
            }
        }
    }
}

impl Read for &mut Feed<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            self.hand_on();
            self.at = 0;
            // It ends at the tar's end or when unpacking failed. That thread tells which, after this one has ended.
            let Ok(piece) = self.full.recv() else { return Ok(0) };
            self.hasher.update(&piece);
            if let Some(copy) = &mut self.copy
                && let Err(error) = copy.write_all(&piece)
            {
                self.failed = Some(error);
                return Err(io::Error::other("cannot write the tar"));
            }
            self.length += piece.len() as u64;
            self.piece = piece;
        }
        let count = into.len().min(self.piece.len() - self.at);
        into[..count].copy_from_slice(&self.piece[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
