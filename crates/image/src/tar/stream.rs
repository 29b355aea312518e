//! Buffers the bytes of the tar between the source and the reader. Each byte is returned once.

use std::fmt;
use std::io::{self, Read};

use super::error::{TarCorruption, TarError};
use super::{BLOCK, narrow, wide};

/// Size of the buffer in bytes: large enough for large reads, small enough for the second-level cache.
const BUFFER: usize = 256 << 10;

/// A buffered source. The buffer's bytes before `mark` are no longer needed, those from `mark` to `start` are
/// verbatim bytes to be returned, and those from `start` to `end` are not parsed yet.
///
/// `spill` holds verbatim bytes that must leave the buffer before they are returned.
pub(super) struct Stream<R> {
    source: R,
    buffer: Box<[u8]>,
    mark: usize,
    start: usize,
    end: usize,
    spill: Vec<u8>,
    /// Offset of `start` in the tar, in bytes.
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

    /// Returns the number of bytes of the tar that were parsed.
    pub(super) const fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns up to `count` of the next bytes, at most a block, without consuming them. Returns fewer bytes only at
    /// the end.
    pub(super) fn peek(&mut self, count: usize) -> Result<&[u8], TarError> {
        let count = count.min(BLOCK);
        while self.end - self.start < count && !self.ended {
            self.refill(count)?;
        }
        Ok(&self.buffer[self.start..self.end.min(self.start + count)])
    }

    /// Reads from the source once, after making room for `count` bytes at `start`.
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

    /// Whether no bytes are left to take.
    pub(super) fn at_end(&mut self) -> Result<bool, TarError> {
        if self.start == self.end && !self.ended {
            self.refill(1)?;
        }
        Ok(self.start == self.end)
    }

    /// Takes up to `count` bytes as verbatim bytes, and returns them. The result is empty only at the end.
    pub(super) fn verbatim(&mut self, count: u64) -> Result<&[u8], TarError> {
        let taken = self.take(count)?;
        Ok(&self.buffer[self.start - taken..self.start])
    }

    /// Takes up to `count` bytes as content, and returns them. The result is empty only at the end.
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

    /// Like [`Stream::content`], but into the caller's buffer: directly from the source if the buffer is empty.
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

    /// Takes a block as verbatim bytes; returns `None` at the end.
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

    /// Takes the padding after data as verbatim bytes. The stream may end instead.
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

    /// Takes `count` bytes as verbatim bytes, and appends them to `into`. The caller checks `count` against a limit.
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
        let kind = TarCorruption::Truncated { missing: wide(missing) };
        TarError::Corrupt { offset: self.offset, entry: entry.to_vec(), kind }
    }

    /// Returns the number of verbatim bytes that are not returned yet.
    pub(super) fn waiting(&self) -> usize {
        self.spill.len() + (self.start - self.mark)
    }

    /// Returns those verbatim bytes in one piece. [`Stream::handed_out`] then releases them.
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

/// Reads once, and repeats a read that a signal interrupted.
fn retry(source: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(into) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // If a source claims to have read more than the buffer can hold, this must not cause a panic.
            result => return result.map(|read| read.min(into.len())),
        }
    }
}
