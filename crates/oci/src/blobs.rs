//! Where blobs are: a repository of a registry, a layout on disk. Callers that need bytes need no socket for it.

use std::io::{self, Read};
use std::ops::Range;

use crate::Digest;

/// A place that has blobs. It compares nothing with a digest: that is for the one who reads.
pub trait BlobSource: Send + Sync {
    /// The bytes `range` of a blob that has `size` bytes, in order. Reads tell every error, so also that
    /// there is no such blob. An end before the range's end is one for the reader to find.
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_>;

    /// Several ranges of a blob that has `size` bytes, in the order in which they are asked for. All of them are in memory.
    ///
    /// # Errors
    /// The first error of a read; [`io::ErrorKind::UnexpectedEof`] for a range that is not there.
    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
    ) -> io::Result<Vec<Vec<u8>>> {
        let read = |range: &Range<u64>| {
            let mut bytes = Vec::new();
            self.blob(digest, size, range.clone()).read_to_end(&mut bytes)?;
            match bytes.len() as u64 == range.end.saturating_sub(range.start) {
                true => Ok(bytes),
                false => Err(io::ErrorKind::UnexpectedEof.into()),
            }
        };
        ranges.iter().map(read).collect()
    }

    /// The blob had wrong bytes. Later reads ask elsewhere first. Whether there is an elsewhere.
    fn distrust(&self, digest: &Digest) -> bool {
        let _ = digest;
        false
    }
}

/// Tells an error at the first read.
#[derive(Debug)]
pub struct FailingReader(Option<io::Error>);

impl FailingReader {
    /// A reader of nothing but this error.
    #[must_use]
    pub const fn new(error: io::Error) -> Self {
        Self(Some(error))
    }
}

impl Read for FailingReader {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        self.0.take().map_or(Ok(0), Err)
    }
}
