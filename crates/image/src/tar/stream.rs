//! The bytes of the tar on their way from the source, each to be lent out once.

use std::fmt;
use std::io::{self, Read};

use super::error::{Corrupt, TarError};
use super::{BLOCK, narrow, wide};

/// Bytes of the buffer: enough that a source answers in large pieces, small enough for the second-level cache.
const BUFFER: usize = 256 << 10;

/// A buffered source. Of the buffer, what lies before `mark` is done with; from there to `start` are verbatim bytes, to
/// be handed out; from there to `end` is what nobody looked at yet.
///
/// Verbatim bytes that must leave the buffer before they are handed out wait in `spill`.
pub(super) struct Stream<R> {
    source: R,
    buffer: Box<[u8]>,
    mark: usize,
    start: usize,
    end: usize,
    spill: Vec<u8>,
    /// Bytes of the tar before `start`.
    offset: u64,
    ended: bool,
}

impl<R> fmt::Debug for Stream<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("offset", &self.offset).finish_non_exhaustive()
    }
}

impl<R: Read> Stream<R> {
    pub(super) fn new(source: R) -> Self {
        Self {
            source,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            mark: 0,
            start: 0,
            end: 0,
            spill: Vec::new(),
            offset: 0,
            ended: false,
        }
    }

    /// Bytes of the tar that were looked at.
    pub(super) const fn offset(&self) -> u64 {
        self.offset
    }

    /// Lends up to `count` of the bytes that come next without taking them, at most a block; fewer only at the end.
    pub(super) fn peek(&mut self, count: usize) -> Result<&[u8], TarError> {
        let count = count.min(BLOCK);
        while self.end - self.start < count && !self.ended {
            self.refill(count)?;
        }
        Ok(&self.buffer[self.start..self.end.min(self.start + count)])
    }

    /// Reads once, after making room for `count` bytes from `start` on.
    fn refill(&mut self, count: usize) -> Result<(), TarError> {
        if self.start == self.end || self.buffer.len() - self.start < count {
            self.spill.extend_from_slice(&self.buffer[self.mark..self.start]);
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            self.mark = 0;
        }
        let read = retry(&mut self.source, &mut self.buffer[self.end..])
            .map_err(|source| self.failed(source))?;
        self.ended = read == 0;
        self.end += read;
        Ok(())
    }

    fn failed(&self, source: io::Error) -> TarError {
        TarError::Read { offset: self.offset.saturating_add(wide(self.end - self.start)), source }
    }

    /// Whether nothing is left to take.
    pub(super) fn at_end(&mut self) -> Result<bool, TarError> {
        if self.start == self.end && !self.ended {
            self.refill(1)?;
        }
        Ok(self.start == self.end)
    }

    /// Takes up to `count` bytes, however many there are, as verbatim ones; lends them. None only at the end.
    pub(super) fn verbatim(&mut self, count: u64) -> Result<&[u8], TarError> {
        let taken = self.take(count)?;
        Ok(&self.buffer[self.start - taken..self.start])
    }

    /// Takes up to `count` bytes, however many there are, as content; lends them. None only at the end.
    pub(super) fn content(&mut self, count: u64) -> Result<&[u8], TarError> {
        let taken = self.take(count)?;
        self.mark = self.start;
        Ok(&self.buffer[self.start - taken..self.start])
    }

    fn take(&mut self, count: u64) -> Result<usize, TarError> {
        self.at_end()?;
        let taken = narrow(count).min(self.end - self.start);
        self.start += taken;
        self.offset = self.offset.saturating_add(wide(taken));
        Ok(taken)
    }

    /// As [`Stream::content`], but into the caller's buffer: straight from the source when nothing is waiting.
    pub(super) fn content_into(&mut self, count: u64, into: &mut [u8]) -> Result<usize, TarError> {
        let length = narrow(count).min(into.len());
        if self.start < self.end || length < BUFFER / 4 {
            let bytes = self.content(wide(length))?;
            into[..bytes.len()].copy_from_slice(bytes);
            return Ok(bytes.len());
        }
        let read =
            retry(&mut self.source, &mut into[..length]).map_err(|error| self.failed(error))?;
        self.ended = read == 0;
        self.offset = self.offset.saturating_add(wide(read));
        Ok(read)
    }

    /// Takes a block as verbatim bytes, or `None` at the end.
    pub(super) fn block(&mut self) -> Result<Option<[u8; BLOCK]>, TarError> {
        let bytes = self.peek(BLOCK)?;
        let found = bytes.len();
        let Some(&block) = bytes.first_chunk::<BLOCK>() else {
            if found == 0 {
                return Ok(None);
            }
            return Err(self.truncated(&[], BLOCK - found));
        };
        self.take(wide(BLOCK))?;
        Ok(Some(block))
    }

    /// Takes the padding behind data, verbatim. The end of the stream may stand in for it.
    pub(super) fn padding(&mut self, mut count: u64) -> Result<(), TarError> {
        while count > 0 {
            let taken = wide(self.verbatim(count)?.len());
            if taken == 0 {
                break;
            }
            count -= taken;
        }
        Ok(())
    }

    /// Appends `count` bytes to `into`, verbatim. The caller has checked that they may be in memory.
    pub(super) fn collect(
        &mut self,
        mut count: u64,
        entry: &[u8],
        into: &mut Vec<u8>,
    ) -> Result<(), TarError> {
        while count > 0 {
            let bytes = self.verbatim(count)?;
            if bytes.is_empty() {
                return Err(self.truncated(entry, narrow(count)));
            }
            into.extend_from_slice(bytes);
            count -= wide(bytes.len());
        }
        Ok(())
    }

    pub(super) fn truncated(&self, entry: &[u8], missing: usize) -> TarError {
        let kind = Corrupt::Truncated { missing: wide(missing) };
        TarError::Corrupt { offset: self.offset, entry: entry.to_vec(), kind }
    }

    /// How many verbatim bytes wait to be handed out.
    pub(super) fn waiting(&self) -> usize {
        self.spill.len() + (self.start - self.mark)
    }

    /// Lends the verbatim bytes that wait, in one piece. They are forgotten by [`Stream::handed_out`].
    pub(super) fn waiting_bytes(&mut self) -> &[u8] {
        if self.spill.is_empty() {
            return &self.buffer[self.mark..self.start];
        }
        self.spill.extend_from_slice(&self.buffer[self.mark..self.start]);
        self.mark = self.start;
        &self.spill
    }

    pub(super) fn handed_out(&mut self) {
        self.spill.clear();
        self.mark = self.start;
    }
}

/// One read that was not interrupted by a signal.
fn retry(source: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A source that claims more than there was room for must not make slices panic.
            result => return result.map(|read| read.min(into.len())),
        }
    }
}
