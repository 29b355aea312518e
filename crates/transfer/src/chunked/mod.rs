//! Layers with a table of contents, eStargz and zstd:chunked: only what the store lacks of them is downloaded.
//!
//! Both are ordinary compressed tars in which each file's content begins a gzip member or zstd frame of its own, so that
//! parts of them can be unpacked alone. A [`Plan`] gives the exact tar: what the store has of it comes from there, the rest
//! from the blob. The tar then goes the way of all tars, and has its diff id compared: a table that lies, or a store that
//! is damaged, costs a second download and nothing else. What is relied on is in `docs/format/chunked.md`.

mod keep;
mod locate;
mod plan;
mod read;
mod room;
mod toc;

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use image::digest::Digest;
use oci::manifest::Descriptor;

pub use keep::KeepError;
pub use plan::{Plan, Stats, plans};
pub use room::Room;

use toc::Contents;

/// Layers of fewer bytes are downloaded whole: the requests would cost more.
pub const BLOB_MIN: u64 = 1 << 20;

/// Parts of one blob.
pub trait Ranges: Sync {
    /// These bytes of the blob, in order. What goes wrong is told when they are read; fewer bytes are an error to whoever
    /// asked.
    fn read(&self, range: Range<u64>) -> Box<dyn Read + Send + '_>;
}

/// Why a table of contents is refused, and the layer with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChunkedError {
    /// It is not the one that the manifest names.
    #[error(
        "the layer's table of contents has the digest {actual}, not {expected} as the manifest says"
    )]
    Mismatch {
        /// The manifest's.
        expected: Box<Digest>,
        /// The table's.
        actual: Box<Digest>,
    },
}

/// A table of contents that is the one the manifest names.
#[derive(Debug)]
pub struct Toc {
    contents: Contents,
    format: toc::Format,
    /// Bytes of the blob.
    size: u64,
    /// Where in the blob these bytes are, which came with the table.
    at: u64,
    bytes: Vec<u8>,
}

impl Toc {
    /// Fetches a layer's table of contents. `None` when it has none, or one that is of no use: then the layer is pulled as
    /// any other. What it takes in memory is taken of `room`, for as long as that is there.
    ///
    /// # Errors
    /// [`ChunkedError`] when the table is not the one that the manifest names.
    pub fn fetch(
        layer: &Descriptor,
        ranges: &dyn Ranges,
        room: &Room,
    ) -> Result<Option<Self>, ChunkedError> {
        if !Self::is_announced(layer) {
            return Ok(None);
        }
        match locate::fetch(layer, ranges, room) {
            Ok(toc) => Ok(toc),
            Err(locate::Failure::Digest(error)) => Err(error),
            Err(locate::Failure::Odd(why)) => {
                tracing::debug!(blob = %layer.digest, %why, "its table of contents is not used");
                Ok(None)
            }
        }
    }
}

impl Toc {
    /// Whether a layer is long enough for a table to be of use, and says that it has one.
    #[must_use]
    pub fn is_announced(layer: &Descriptor) -> bool {
        layer.size >= BLOB_MIN && locate::is_announced(layer)
    }

    /// What came with the table, and where in the blob it begins. Whether all of it is right, the blob's digest says.
    #[must_use]
    pub fn bytes(&self) -> (u64, &[u8]) {
        (self.at, &self.bytes)
    }

    /// The blob's end, from the end of its files on, where it is part of the tar. What zstd:chunked has there are frames
    /// that decoders skip.
    fn tail(&self) -> &[u8] {
        match self.format {
            toc::Format::Estargz => &self.bytes,
            toc::Format::ZstdChunked => &[],
        }
    }
}

/// A layer's tar, made of parts. It is the right one only if it has the diff id.
pub struct Tar<'a> {
    /// The tar, uncompressed.
    pub reader: Box<dyn Read + Send + 'a>,
    /// Bytes of the blob that are not going to be downloaded.
    pub skipped: u64,
    /// Bytes of the blob that were, so far.
    pub fetched: Arc<AtomicU64>,
}

impl std::fmt::Debug for Tar<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut tar = f.debug_struct("Tar");
        tar.field("skipped", &self.skipped).field("fetched", &self.fetched).finish_non_exhaustive()
    }
}

/// Reads `bytes` as a table of contents of either format, for fuzzers.
#[doc(hidden)]
pub fn exercise(bytes: &[u8]) {
    toc::exercise(bytes);
    locate::exercise(bytes);
}

#[cfg(test)]
mod tests;
