//! Passes the tar of one layer from the thread that unpacks it to the thread that reads it.

use std::io::{self, Read, Write as _};
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use store::DeviceDraft;
use store::parallel::thread_failed;

use crate::import::decode::{DecodeError, Decoded, Decoder};
use crate::import::failure::{LayerFailure, copy_failed};
use crate::lazy::{IndexParts, SpansError, Units};
use image::digest::{Digest, DigestHasher};

/// Size of a piece of tar, in bytes.
const PIECE: usize = 256 << 10;
/// Number of pieces that may be queued.
const PIECES: usize = 3;

/// Bytes of memory that a layer in progress takes besides the queue of objects: pieces of tar, the buffers of the
/// blob and of the tar reader, pieces of a large file, and a batch being filled.
pub(in crate::import) const LAYER_COST: usize = (PIECES + 2) * PIECE + (512 << 10) + (3 << 20);

/// Number of pieces that may wait to be hashed for an index.
const HASHED_PIECES: usize = 2;

/// An index keeps one byte in memory per this many bytes of a blob until it is written: windows, which are 3 or 4
/// percent of a layer, and digests.
const BLOB_PARTS: u64 = 16;

/// Returns the additional memory that making the index of a blob of this size takes: the pieces that are hashed or
/// wait to be hashed, and the index's data.
pub(in crate::import) fn index_cost(blob: u64) -> usize {
    let kept = usize::try_from(blob / BLOB_PARTS).unwrap_or(usize::MAX);
    kept.saturating_add((HASHED_PIECES + 1) * PIECE + (1 << 20))
}

/// The unpacking thread's end of the channel.
struct DecodedSender {
    full: SyncSender<Vec<u8>>,
    spent: Receiver<Vec<u8>>,
}

/// Hashes the units of an index, from pieces of the tar that were read.
struct UnitHasher {
    read: Receiver<Vec<u8>>,
    spent: Sender<Vec<u8>>,
}

/// The reading thread's end of the channel: hashes the tar, and writes a copy of it if that is wanted.
pub(in crate::import) struct Feed<'t> {
    full: Receiver<Vec<u8>>,
    spent: Sender<Vec<u8>>,
    /// Channel to which pieces are sent after they were read, instead of `spent`.
    units: Option<SyncSender<Vec<u8>>>,
    piece: Vec<u8>,
    at: usize,
    hasher: DigestHasher,
    length: u64,
    copy: Option<DeviceDraft<'t>>,
    /// Why the copy could not be written.
    failed: Option<io::Error>,
}

/// A tar that was read.
pub(in crate::import) struct Tar<'t> {
    /// Digest of all bytes.
    pub(in crate::import) diff_id: Digest,
    /// Length in bytes.
    pub(in crate::import) length: u64,
    pub(in crate::import) copy: Option<DeviceDraft<'t>>,
}

/// Makes a channel for a tar. The tar is hashed by the algorithm of `diff_id`, or else by SHA-256, and written to
/// `copy`.
fn tar_channel<'t>(
    diff_id: Option<&Digest>,
    copy: Option<DeviceDraft<'t>>,
) -> (DecodedSender, Feed<'t>) {
    let (full_in, full) = sync_channel(PIECES);
    let (spent, spent_out) = channel();
    let hasher = diff_id.map_or_else(DigestHasher::sha256, Digest::hasher);
    let (piece, at, length, failed) = (Vec::new(), 0, 0, None);
    let feed = Feed { full, spent, units: None, piece, at, hasher, length, copy, failed };
    (DecodedSender { full: full_in, spent: spent_out }, feed)
}

impl DecodedSender {
    /// Unpacks to the end. If the reader stops early, only checks whether the blob is wrong.
    fn send_all(self, mut decoder: Decoder<'_, impl Read>) -> Result<Decoded, DecodeError> {
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

/// A tar that was decompressed and read.
pub(in crate::import) struct DecodedTar<'t, T> {
    pub(in crate::import) tar: Tar<'t>,
    /// The reader's result.
    pub(in crate::import) outcome: T,
    pub(in crate::import) decoded: Decoded,
    /// Parts of the index, if one is wanted.
    pub(in crate::import) index: Option<Result<IndexParts, SpansError>>,
}

/// Unpacks in a separate thread while `read` reads the tar. A third thread hashes for the index.
pub(in crate::import) fn decode_and_read<'t, T>(
    decoder: Decoder<'_, impl Read + Send>,
    diff_id: Option<&Digest>,
    copy: Option<DeviceDraft<'t>>,
    read: impl FnOnce(&mut Feed<'t>) -> Result<T, LayerFailure>,
) -> Result<DecodedTar<'t, T>, LayerFailure> {
    let (spout, mut feed) = tar_channel(diff_id, copy);
    let unit_hasher = decoder.is_indexing().then(|| feed.unit_hasher());
    thread::scope(|scope| {
        let hashing = unit_hasher.map(|hasher| {
            thread::Builder::new()
                .name("units".to_owned())
                .spawn_scoped(scope, || hasher.hash())
                .map_err(thread_failed)
        });
        let hashing = hashing.transpose()?;
        let unpacking = thread::Builder::new()
            .name("unpack".to_owned())
            .spawn_scoped(scope, || spout.send_all(decoder));
        let unpacking = match unpacking {
            Ok(unpacking) => unpacking,
            Err(error) => {
                // Closes the channel for which the hashing thread waits.
                drop(feed);
                return Err(thread_failed(error).into());
            }
        };
        let outcome = read(&mut feed);
        // Dropping the feed closes the channels on which the other threads wait.
        let tar = feed.finish();
        let decoded = unpacking.join().unwrap_or_else(|panic| resume_unwind(panic));
        let units = hashing.map(|it| it.join().unwrap_or_else(|panic| resume_unwind(panic)));
        match (tar, outcome, decoded) {
            // Writing the copy failed, which is the cause of the other failures.
            (Err(error), ..) => Err(copy_failed(error).into()),
            // A wrong blob is reported rather than wrong content, and a cause rather than its consequence.
            (_, Err(failure), Err(DecodeError::Stopped)) => Err(failure),
            (_, _, Err(error)) => Err(error.into()),
            (_, Err(failure), Ok(_)) => Err(failure),
            (Ok(tar), Ok(outcome), Ok(mut decoded)) => {
                let parts = decoded.spans.take().zip(units);
                let index = parts.map(|(spans, units)| {
                    Ok(IndexParts { spans: spans?, units, tar_bytes: tar.length })
                });
                Ok(DecodedTar { tar, outcome, decoded, index })
            }
        }
    })
}

impl UnitHasher {
    /// Hashes all pieces until the feed is dropped.
    fn hash(self) -> Units {
        let mut units = Units::default();
        for piece in self.read {
            units.add(&piece);
            // If the unpacking thread has ended, it needs no buffers.
            drop(self.spent.send(piece));
        }
        units
    }
}

impl<'t> Feed<'t> {
    /// Also sends read pieces to a hasher for the index. It runs in a separate thread, because the reading and
    /// unpacking threads are busy enough.
    fn unit_hasher(&mut self) -> UnitHasher {
        let (units, read) = sync_channel(HASHED_PIECES);
        self.units = Some(units);
        UnitHasher { read, spent: self.spent.clone() }
    }

    /// Passes on the piece that was just read.
    fn hand_on(&mut self) {
        let piece = std::mem::take(&mut self.piece);
        if piece.capacity() > 0 {
            // If the receiving thread has ended, it needs no buffers.
            match &self.units {
                Some(units) => drop(units.send(piece)),
                None => drop(self.spent.send(piece)),
            }
        }
    }

    /// Returns the tar that was read, or the error if its copy could not be written.
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
            // The channel is closed at the end of the tar, or when unpacking has failed. The unpacking thread returns
            // which of them happened after this thread has ended.
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
