//! Layers with a table of contents (eStargz and zstd:chunked): only the parts that the store lacks are downloaded.
//!
//! Both formats are ordinary compressed tars in which each file's content begins a separate gzip member or zstd frame,
//! so that it can be decompressed separately. An [`AssemblyPlan`] reproduces the exact tar from parts in the store and
//! parts of the blob. The tar is then imported as usual, and its diff id is compared. So a false table or a damaged
//! store costs only a second download. `docs/format/chunked.md` describes the format.
//!
//! A lazy pull makes an image from the tables of all layers, if the image has no index: `tree` makes the trees.

mod entry;
mod keep;
mod locate;
mod memory_budget;
mod plan;
mod read;
mod toc;
pub(crate) mod tree;

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use image::digest::Digest;
use image::verity::DeviceId;
use oci::manifest::Descriptor;

pub use keep::KeepError;
pub use memory_budget::Room;
pub use plan::{AssemblyPlan, Stats, plans};

pub(crate) use toc::{Contents, Format};
use tree::TocTree;

/// Layers of fewer bytes are downloaded whole, because separate requests would cost more.
pub const BLOB_MIN: u64 = 1 << 20;

/// Access to parts of one blob.
pub trait Ranges: Sync {
    /// Reads these bytes of the blob, in order. An error is returned by the reader, and the caller treats a reader
    /// that ends early as an error.
    fn read(&self, range: Range<u64>) -> Box<dyn Read + Send + '_>;
}

/// Why a table of contents, and the layer with it, is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChunkedError {
    /// The table's digest differs from the digest in the manifest.
    #[error(
        "the layer's table of contents has the digest {actual}, not {expected} as in the manifest"
    )]
    Mismatch {
        /// Digest in the manifest.
        expected: Box<Digest>,
        /// Digest of the table.
        actual: Box<Digest>,
    },
}

/// A table of contents with the digest that the manifest names.
#[derive(Debug)]
pub struct Toc {
    pub(crate) contents: Contents,
    pub(crate) format: Format,
    /// The layer's tree, if it was wanted.
    #[cfg_attr(
        not(feature = "registry"),
        expect(dead_code, reason = "only lazy pulls want a tree")
    )]
    pub(crate) tree: Option<TocTree>,
    /// Length of the blob in bytes.
    size: u64,
    /// Offset of `bytes` in the blob. They were fetched with the table.
    at: u64,
    bytes: Vec<u8>,
}

impl Toc {
    /// Fetches a layer's table of contents. Returns `None` if the layer has no table or an unusable one; the layer is
    /// then pulled as usual. The table's memory is subtracted from `room`, and is not added again.
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
        match locate::fetch(layer, ranges, room, None) {
            Ok(toc) => Ok(toc),
            Err(locate::Failure::Digest(error)) => Err(error),
            Err(locate::Failure::Odd(why)) => {
                tracing::debug!(blob = %layer.digest, %why, "cannot use its table of contents");
                Ok(None)
            }
        }
    }
}

/// Why a layer's table gives no tree.
#[cfg(feature = "registry")]
#[derive(Debug, thiserror::Error)]
pub(crate) enum TocTreeError {
    #[error("it has no table of contents")]
    None,
    #[error("its table of contents cannot be used: {0}")]
    Unusable(String),
    #[error(transparent)]
    Refused(#[from] ChunkedError),
}

#[cfg(feature = "registry")]
impl Toc {
    /// Fetches a layer's table of contents, and makes the layer's tree from it. Small layers are not left out, and a
    /// layer may have no files.
    ///
    /// # Errors
    /// [`TocTreeError`], also if the table cannot be used.
    pub(crate) fn fetch_with_tree(
        layer: &Descriptor,
        ranges: &dyn Ranges,
        room: &Room,
    ) -> Result<Self, TocTreeError> {
        // The annotations have the digest of the table.
        let seed = format!("{} {:?}", layer.digest, layer.annotations);
        let tree = TocTree::new(&Digest::sha256(seed.as_bytes()));
        match locate::fetch(layer, ranges, room, Some(tree)) {
            Ok(Some(toc)) => Ok(toc),
            Ok(None) => Err(TocTreeError::None),
            Err(locate::Failure::Digest(error)) => Err(error.into()),
            Err(locate::Failure::Odd(why)) => Err(TocTreeError::Unusable(why)),
        }
    }

    /// Returns whether a layer of any size announces a table.
    pub(crate) fn is_announced_by(layer: &Descriptor) -> bool {
        locate::is_announced(layer)
    }
}

impl Toc {
    /// Returns whether a layer announces a table and is large enough for the table to be useful.
    #[must_use]
    pub fn is_announced(layer: &Descriptor) -> bool {
        layer.size >= BLOB_MIN && locate::is_announced(layer)
    }

    /// Returns the bytes that were fetched with the table, and their offset in the blob. The blob's digest covers
    /// them.
    #[must_use]
    pub fn bytes(&self) -> (u64, &[u8]) {
        (self.at, &self.bytes)
    }

    /// Returns the part of the blob after its files, if this part belongs to the compressed tar. In zstd:chunked, it
    /// consists of frames that decoders skip.
    fn tail(&self) -> &[u8] {
        match self.format {
            Format::Estargz => &self.bytes,
            Format::ZstdChunked => &[],
        }
    }
}

/// A layer's tar, assembled from parts. The caller must compare its diff id before use.
pub struct Tar<'a> {
    /// Reads the uncompressed tar.
    pub reader: Box<dyn Read + Send + 'a>,
    /// The store's sealed device that begins with the tar, if there is one. This device becomes the device of the
    /// layer.
    pub sealed: Option<DeviceId>,
    /// Number of the blob's bytes that are not downloaded.
    pub skipped: u64,
    /// Number of the blob's bytes that have been downloaded so far.
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
