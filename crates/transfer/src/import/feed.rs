//! The tar of one layer, from the thread that unpacks it to the one that reads it.

use std::io::{self, Read, Write as _};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use store::DeviceDraft;

use super::decode::{DecodeError, Decoded, Decoder};
use image::digest::{Digest, DigestHasher};

/// Bytes of tar in one piece.
const PIECE: usize = 256 << 10;
/// Pieces that may wait.
const PIECES: usize = 3;

/// Bytes that one layer on its way takes besides the queue of objects: pieces of tar, the blob's and the tar reader's
/// buffers, pieces of a large file, a batch in the making.
pub(super) const LAYER_COST: usize = (PIECES + 2) * PIECE + (512 << 10) + (3 << 20);

/// Where the unpacking thread puts pieces.
pub(super) struct Spout {
    full: SyncSender<Vec<u8>>,
    spent: Receiver<Vec<u8>>,
}

/// Reads the tar, hashes it as it goes by, and writes it down if that is wanted.
pub(super) struct Feed<'t> {
    full: Receiver<Vec<u8>>,
    spent: Sender<Vec<u8>>,
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
pub(super) fn feed<'t>(
    diff_id: Option<&Digest>,
    copy: Option<DeviceDraft<'t>>,
) -> (Spout, Feed<'t>) {
    let (full_in, full) = sync_channel(PIECES);
    let (spent, spent_out) = channel();
    let hasher = diff_id.map_or_else(DigestHasher::sha256, Digest::hasher);
    let (piece, at, length, failed) = (Vec::new(), 0, 0, None);
    let feed = Feed { full, spent, piece, at, hasher, length, copy, failed };
    (Spout { full: full_in, spent: spent_out }, feed)
}

impl Spout {
    /// Unpacks to the end. When the reader goes away early, only finds out whether the blob is to blame.
    pub(super) fn pour(self, mut decoder: Decoder<'_, impl Read>) -> Result<Decoded, DecodeError> {
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

impl<'t> Feed<'t> {
    /// What was read; an error if it could not be written down.
    pub(super) fn finish(self) -> io::Result<Tar<'t>> {
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
            // The unpacking thread may be gone, and then needs no buffers.
            let spent = std::mem::take(&mut self.piece);
            if spent.capacity() > 0 {
                drop(self.spent.send(spent));
            }
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
