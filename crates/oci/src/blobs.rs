//! Sources of blobs: a repository of a registry, or a layout on disk. Their callers need no socket.

use std::io::{self, Read};
use std::ops::Range;

use crate::Digest;

/// How to handle a range of a blob that the source can only send as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whole {
    /// Read the whole blob, and keep the range.
    Read,
    /// Return an error.
    Refuse,
}

/// The peers that are asked for a part of a layer's tar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedPeers {
    /// Those that are likely to have it: that have the whole tar, or did not lack a part of it a moment ago.
    Likely,
    /// Also those that have just lacked another part, because no reader waits.
    All,
}

/// A part of a layer's tar. The bytes are unverified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerPart {
    /// The bytes of the requested range.
    pub bytes: Vec<u8>,
    /// Address of the only host that the bytes came from.
    pub host: String,
}

/// A source of blobs. It does not verify digests; its callers must do so.
pub trait BlobSource: Send + Sync {
    /// Reads the bytes `range` of a blob of `size` bytes. All errors are returned by reads, even the error that the
    /// blob does not exist. The data may end before the end of the range.
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_>;

    /// Reads several ranges of a blob of `size` bytes into memory. The result has the order of `ranges`.
    ///
    /// # Errors
    /// The first error of a read, or [`io::ErrorKind::UnexpectedEof`] for a range that ends beyond the blob.
    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        // The reader of a range never fetches the whole blob.
        let _ = whole;
        within(size, ranges)?;
        let read = |range: &Range<u64>| {
            let (mut bytes, length) = (Vec::new(), range.end.saturating_sub(range.start));
            self.blob(digest, size, range.clone()).take(length).read_to_end(&mut bytes)?;
            if bytes.len() as u64 == length {
                Ok(bytes)
            } else {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
        };
        ranges.iter().map(read).collect()
    }

    /// Fetches ranges like [`ranges`](Self::ranges), if no reader waits for them. They delay the ranges that readers
    /// wait for as little as possible.
    ///
    /// # Errors
    /// As [`ranges`](Self::ranges).
    fn ranges_in_background(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        self.ranges(digest, size, ranges, whole)
    }

    /// Returns a reader of the uncompressed tar of a layer, and the number of its bytes, if the source lacks the layer's
    /// blob and has its tar. The caller must compare the bytes with the diff id.
    fn tar(&self, blob: &Digest, diff_id: &Digest) -> Option<(Box<dyn Read + Send + '_>, u64)> {
        let _ = (blob, diff_id);
        None
    }

    /// Returns a range of the uncompressed tar of a layer, if the source lacks the layer's blob and has this part of its
    /// tar. The caller must verify the bytes, and call [`distrust_peer`](Self::distrust_peer) if they are wrong.
    fn tar_part(
        &self,
        blob: &Digest,
        diff_id: &Digest,
        range: Range<u64>,
        asked: AskedPeers,
    ) -> Option<PeerPart> {
        let _ = (blob, diff_id, range, asked);
        None
    }

    /// Records that a [`PeerPart`] of the layer with this blob was wrong. Its host is not asked for other parts of this
    /// layer, and is asked last for the blob.
    fn distrust_peer(&self, blob: &Digest, host: &str) {
        let _ = (blob, host);
    }

    /// Whether other hosts that fetch the same layer may have parts of its tar.
    fn may_have_peers(&self, blob: &Digest) -> bool {
        let _ = blob;
        false
    }

    /// Records that the blob's data was wrong, so that later reads try other hosts first. Returns whether there is
    /// another host.
    #[must_use]
    fn distrust(&self, digest: &Digest) -> bool {
        let _ = digest;
        false
    }
}

impl<T: BlobSource + ?Sized> BlobSource for &T {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        (**self).blob(digest, size, range)
    }

    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        (**self).ranges(digest, size, ranges, whole)
    }

    fn ranges_in_background(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        (**self).ranges_in_background(digest, size, ranges, whole)
    }

    fn tar(&self, blob: &Digest, diff_id: &Digest) -> Option<(Box<dyn Read + Send + '_>, u64)> {
        (**self).tar(blob, diff_id)
    }

    fn tar_part(
        &self,
        blob: &Digest,
        diff_id: &Digest,
        range: Range<u64>,
        asked: AskedPeers,
    ) -> Option<PeerPart> {
        (**self).tar_part(blob, diff_id, range, asked)
    }

    fn distrust_peer(&self, blob: &Digest, host: &str) {
        (**self).distrust_peer(blob, host);
    }

    fn may_have_peers(&self, blob: &Digest) -> bool {
        (**self).may_have_peers(blob)
    }

    fn distrust(&self, digest: &Digest) -> bool {
        (**self).distrust(digest)
    }
}

/// Refuses ranges that end beyond a blob of `size` bytes.
pub(crate) fn within(size: u64, ranges: &[Range<u64>]) -> io::Result<()> {
    if ranges.iter().all(|range| range.end <= size) {
        return Ok(());
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// A reader whose reads all fail: the first with the given error, later ones with a general one.
#[derive(Debug)]
pub struct FailingReader(Option<io::Error>);

impl FailingReader {
    /// Makes a reader that fails with this error.
    #[must_use]
    pub const fn new(error: io::Error) -> Self {
        Self(Some(error))
    }
}

impl Read for FailingReader {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(self.0.take().unwrap_or_else(|| io::Error::other("its bytes were not available")))
    }
}
