//! A place that has blobs: a repository of a registry, or a layout on disk. Callers that need bytes need no socket for them.

use std::io::{self, Read};
use std::ops::Range;

use crate::Digest;

/// What becomes of a request for a part of a blob that the source can only send as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whole {
    /// All of it is read, and the part is kept.
    Read,
    /// It is an error.
    Refuse,
}

/// A place that has blobs. It compares no digest: the reader has to.
pub trait BlobSource: Send + Sync {
    /// The bytes `range` of a blob that has `size` bytes, in order. Every error comes with a read, also that there is no such
    /// blob. The bytes may end before the range does.
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_>;

    /// Several ranges of a blob that has `size` bytes, in the order of `ranges`, each in memory.
    ///
    /// # Errors
    /// The first error of a read, or [`io::ErrorKind::UnexpectedEof`] for a range that ends behind the blob.
    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        // A reader of a part reads no more.
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

    /// Notes that the blob had wrong bytes: later reads ask other hosts first. Returns whether there is another host.
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

    fn distrust(&self, digest: &Digest) -> bool {
        (**self).distrust(digest)
    }
}

/// Refuses ranges that end behind a blob of `size` bytes.
pub(crate) fn within(size: u64, ranges: &[Range<u64>]) -> io::Result<()> {
    if ranges.iter().all(|range| range.end <= size) {
        return Ok(());
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// A reader that gives nothing but an error, at each read.
#[derive(Debug)]
pub struct FailingReader(Option<io::Error>);

impl FailingReader {
    /// A reader of this error.
    #[must_use]
    pub const fn new(error: io::Error) -> Self {
        Self(Some(error))
    }
}

impl Read for FailingReader {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(self.0.take().unwrap_or_else(|| io::Error::other("its bytes could not be had")))
    }
}
