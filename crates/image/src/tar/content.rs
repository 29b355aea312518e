//! The content of an entry: the data in the tar, and zeros for holes.

use std::io::{self, Read};

use super::error::TarError;
use super::stream::Stream;
use super::{Segment, narrow, wide};

/// The reader's position in the content of the current entry.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    pub(super) at: u64,
    pub(super) size: u64,
    /// Index of the current or next segment.
    pub(super) segment: usize,
}

impl Cursor {
    pub(super) const fn new(size: u64) -> Self {
        Self { at: 0, size, segment: 0 }
    }

    /// Returns the rest of the current segment or hole.
    fn next(&mut self, segments: &[Segment]) -> Option<Run> {
        if self.at >= self.size {
            return None;
        }
        match segments.get(self.segment) {
            None => Some(Run::Zeros(self.size - self.at)),
            Some(segment) if self.at < segment.offset => Some(Run::Zeros(segment.offset - self.at)),
            Some(segment) => Some(Run::Data(segment.end() - self.at)),
        }
    }

    fn passed(&mut self, count: u64, segments: &[Segment]) {
        self.at += count;
        if segments.get(self.segment).is_some_and(|segment| self.at == segment.end()) {
            self.segment += 1;
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Run {
    Data(u64),
    Zeros(u64),
}

/// A piece of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// Bytes in the tar, at least one.
    Data(&'a [u8]),
    /// A number of zeros that are not in the tar, at least 1.
    Zeros(u64),
}

/// Reads the content of an entry, with zeros for holes. Unread content is skipped.
///
/// A sparse file may have any size while the tar stays small, so check [`Entry::size`](super::Entry::size) before
/// reading.
#[derive(Debug)]
pub struct Content<'a, R> {
    pub(super) stream: &'a mut Stream<R>,
    pub(super) cursor: &'a mut Cursor,
    pub(super) segments: &'a [Segment],
    pub(super) entry: &'a [u8],
}

impl<R: Read> Content<'_, R> {
    /// Returns the number of unread bytes.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.cursor.size - self.cursor.at
    }

    /// Returns the next piece, as large as possible without copying; `None` at the end.
    ///
    /// # Errors
    /// [`TarError::Read`], or [`TarError::Corrupt`] if the stream ends early.
    pub fn chunk(&mut self) -> Result<Option<Chunk<'_>>, TarError> {
        match self.cursor.next(self.segments) {
            None => Ok(None),
            Some(Run::Zeros(count)) => {
                self.cursor.passed(count, self.segments);
                Ok(Some(Chunk::Zeros(count)))
            }
            Some(Run::Data(count)) => {
                if self.stream.at_end()? {
                    return Err(self.stream.truncated(self.entry, narrow(count)));
                }
                let bytes = self.stream.content(count)?;
                self.cursor.passed(wide(bytes.len()), self.segments);
                Ok(Some(Chunk::Data(bytes)))
            }
        }
    }

    /// Reads bytes, which are zeros for holes, into the start of `into`, and returns their number. It may be less than
    /// the length of `into`, and is 0 at the end. Large pieces are read from the stream directly into `into`.
    ///
    /// # Errors
    /// As [`Content::chunk`].
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, TarError> {
        if into.is_empty() {
            return Ok(0);
        }
        let read = match self.cursor.next(self.segments) {
            None => return Ok(0),
            Some(Run::Zeros(count)) => {
                let count = narrow(count).min(into.len());
                into[..count].fill(0);
                count
            }
            Some(Run::Data(count)) => {
                let read = self.stream.content_into(count, into)?;
                if read == 0 {
                    return Err(self.stream.truncated(self.entry, narrow(count)));
                }
                read
            }
        };
        self.cursor.passed(wide(read), self.segments);
        Ok(read)
    }

    /// Skips the unread content.
    pub(super) fn skip(&mut self) -> Result<(), TarError> {
        while self.chunk()?.is_some() {}
        Ok(())
    }
}

/// Lets functions such as `io::copy` read the content. An `io::Error` holds a [`TarError`].
impl<R: Read> Read for Content<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read(into).map_err(io::Error::other)
    }
}
