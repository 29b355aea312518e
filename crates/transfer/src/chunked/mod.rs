//! Layers with a table of contents, eStargz and zstd:chunked: only what the store lacks of them is downloaded.
//!
//! Both are ordinary compressed tars in which each file's content begins a gzip member or zstd frame of its own, so
//! that parts of them can be unpacked alone. A [`Plan`] gives the exact tar: some parts come from the store, the others
//! from the blob. The tar is then imported as usual, and its diff id is compared. So a false table or a damaged store
//! costs a second download and nothing else. The format is described in `docs/format/chunked.md`.

mod keep;
mod locate;
mod memory_budget;
mod plan;
mod read;
mod toc;

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use image::digest::Digest;
use image::verity::DeviceId;
use oci::manifest::Descriptor;

pub use keep::KeepError;
pub use memory_budget::Room;
pub use plan::{Plan, Stats, plans};

use toc::Contents;

/// Layers of fewer bytes are downloaded whole: the requests would cost more.
pub const BLOB_MIN: u64 = 1 << 20;

/// Access to parts of one blob.
pub trait Ranges: Sync {
    /// These bytes of the blob, in order. What goes wrong is told when they are read; fewer bytes are an error to whoever
    /// asked.
    fn read(&self, range: Range<u64>) -> Box<dyn Read + Send + '_>;
}

/// Why a table of contents is refused, and the layer with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChunkedError {
    /// It is not the table that the manifest names.
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

/// A table of contents with the digest that the manifest names.
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
    /// Fetches a layer's table of contents. `None` if it has none, or none that is of use; then the layer is pulled as
    /// usual. The table's memory is taken from `room` while the table exists.
    ///
    /// # Errors
    /// [`ChunkedError`] if the table is not the one that the manifest names.
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
                tracing::debug!(blob = %layer.digest, %why, "cannot use its table of contents");
                Ok(None)
            }
        }
    }
}

impl Toc {
    /// Whether a layer announces a table, and is large enough for the table to be of use.
    #[must_use]
    pub fn is_announced(layer: &Descriptor) -> bool {
        layer.size >= BLOB_MIN && locate::is_announced(layer)
    }

    /// The bytes that came with the table, and their offset in the blob. The blob's digest covers them.
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

/// A layer's tar, made of parts. Compare its diff id before use.
pub struct Tar<'a> {
    /// The tar, uncompressed.
    pub reader: Box<dyn Read + Send + 'a>,
    /// The sealed device of the store that begins with the tar, if there is one: it becomes the device of the layer.
    pub sealed: Option<DeviceId>,
    /// Bytes of the blob that are not downloaded.
    pub skipped: u64,
    /// Bytes of the blob that were downloaded so far.
    pub fetched: Arc<AtomicU64>,
}

impl std::fmt::Debug for Tar<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut tar = f.debug_struct("Tar");
        tar.field("skipped", &self.skipped).field("fetched", &self.fetched).finish_non_exhaustive()
    }
}

/// Parses `bytes` as a table of contents of either format, for fuzzers.
#[doc(hidden)]
pub fn exercise(bytes: &[u8]) {
    toc::exercise(bytes);
    locate::exercise(bytes);
}

#[cfg(test)]
mod tests;
