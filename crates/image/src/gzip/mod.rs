//! Random access to gzip blobs, which are divided into spans that can be inflated without the data before them.
//!
//! An [`Indexer`] inflates a blob once, as any import does, and records a checkpoint where each span begins: at the
//! end of a deflate block, with the bytes of the window that the span refers to, or at the beginning of a member.
//! [`Checkpoint::inflate`] returns the output of one span. This module does not verify that output, so a caller that
//! stores checkpoints must also store digests.
//!
//! Sources: RFC 1951 (deflate), RFC 1952 (gzip).
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

mod codes;
mod header;
mod index;
mod inflate;
mod window;

use std::io;
use std::ops::Range;

pub use index::{GzipError, Indexer};
pub use window::Window;

use header::{Header, TRAILER};
use inflate::{InflateError, Inflater, Marks, Pause, ROOM};

/// Maximum distance in bytes of a reference in deflate data. Source: RFC 1951, 3.2.5.
pub const WINDOW: usize = 32 << 10;

/// Minimum output of a span in bytes. A span ends at the first possible place after that.
pub const SPAN: u64 = 256 << 10;

/// Maximum output of a span in bytes. Deflate has no such limit, but zlib, Go and libdeflate end a block after at
/// most 9 MB, even for data that compresses best.
pub const SPAN_MAX: u64 = 16 << 20;

/// Returns the maximum compressed size of a span with `unpacked` bytes of output, both in bytes, which is limited
/// because a span's compressed data is in memory as a whole. Data that does not compress is only slightly larger than
/// its output, so only empty blocks and members could exceed this.
#[must_use]
pub const fn packed_max(unpacked: u64) -> u64 {
    unpacked.saturating_mul(2).saturating_add(64 << 10)
}

/// Returns the maximum total size in bytes of the windows after `packed` bytes of a blob are read: 16 MiB plus an
/// eighth of those bytes. The windows of usual layers take 3 to 4 percent.
const fn windows_max(packed: u64) -> u64 {
    (packed >> 3).saturating_add(16 << 20)
}

/// The state in which inflating begins at a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The header of a member; in the index of a zstd blob, a frame.
    Member,
    /// A deflate block. The number, from 0 to 7, is the number of high bits of the preceding byte that belong to the
    /// block.
    Block(u8),
}

/// The beginning of a span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// State in which inflating begins.
    pub start: Start,
    /// Offset in the blob of the first byte all of whose bits belong to the span.
    pub packed: u64,
    /// Offset of the span's first byte in the output.
    pub unpacked: u64,
    /// The bytes before the span that the span refers to.
    pub window: Window,
}

/// The reason why a span cannot be inflated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpanError {
    /// The bytes are not deflate data, or not the header of a member. For a zstd blob: they are not whole frames, or
    /// have more output than the span.
    #[error("the compressed bytes of the span are damaged")]
    Damaged,
    /// The bytes end before the span's output is complete.
    #[error("the span ends early")]
    Short,
    /// The span is longer than any that an [`Indexer`] makes: its length in bytes.
    #[error("the span has {0} bytes, more than {SPAN_MAX}")]
    Long(u64),
}

impl Checkpoint {
    /// Returns the range of the blob that the span needs. `end` is the next checkpoint's [`packed`](Self::packed) or
    /// the blob's length. A byte that two blocks share is in the ranges of both spans.
    #[must_use]
    pub const fn needs(&self, end: u64) -> Range<u64> {
        let shared = if matches!(self.start, Start::Block(1..)) { 1 } else { 0 };
        self.packed.saturating_sub(shared)..end
    }

    /// Inflates the span and returns its output of `length` bytes. `packed` are the bytes of the blob that
    /// [`needs`](Self::needs) returns.
    ///
    /// # Errors
    /// [`SpanError`]. Wrong bytes need not cause an error, so compare the output with a digest.
    pub fn inflate(&self, packed: &[u8], length: u64) -> Result<Vec<u8>, SpanError> {
        let Some(wanted) = usize::try_from(length).ok().filter(|_| length <= SPAN_MAX) else {
            return Err(SpanError::Long(length));
        };
        // At most 16 MiB plus the window and the inflater's room.
        let end = WINDOW.saturating_add(wanted);
        let mut out = vec![0; end.saturating_add(ROOM)];
        self.window.write(&mut out);
        let mut inflater = Inflater::default();
        let mut rest = begin(&mut inflater, self.start, packed)?;
        let mut at = WINDOW;
        while at < end {
            let mut marks = Marks { origin: 0, needed: &mut [] };
            let step = inflater.step(rest, true, &mut out, at, &mut marks);
            let step = step.map_err(|error| match error {
                InflateError::Damaged => SpanError::Damaged,
                InflateError::Short => SpanError::Short,
            })?;
            rest = rest.get(step.read..).unwrap_or_default();
            at = at.saturating_add(step.written);
            match step.pause {
                Pause::End if at < end => {
                    rest = rest.get(TRAILER..).ok_or(SpanError::Short)?;
                    rest = begin(&mut inflater, Start::Member, rest)?;
                }
                // All remaining input was given.
                Pause::Input => return Err(SpanError::Short),
                Pause::Block | Pause::End | Pause::Output => {}
            }
        }
        out.truncate(end);
        out.drain(..WINDOW);
        Ok(out)
    }
}

/// Whether an output is all that packed data unpacks to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputPart {
    /// The data ends with the output.
    Whole,
    /// More output may follow, which is dropped.
    Start,
}

/// Inflates deflate data without a header, and returns its first `length` bytes. `None` if the data is damaged or has
/// another length.
pub(crate) fn inflate(packed: &[u8], length: usize, output: OutputPart) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length.saturating_add(ROOM)];
    let mut inflater = Inflater::default();
    let (mut rest, mut at) = (packed, 0_usize);
    loop {
        let mut marks = Marks { origin: 0, needed: &mut [] };
        let step = inflater.step(rest, true, &mut bytes, at, &mut marks).ok()?;
        rest = rest.get(step.read..)?;
        at = at.saturating_add(step.written);
        let is_done = match (output, step.pause) {
            (OutputPart::Start, _) if at >= length => true,
            (_, Pause::End) if at == length => true,
            (_, Pause::Block | Pause::Output) if at <= length => false,
            _ => return None,
        };
        if is_done {
            bytes.truncate(length);
            return Some(bytes);
        }
    }
}

/// Prepares an inflater to begin at `start` with `packed`, and returns the bytes to pass to it.
fn begin<'a>(
    inflater: &mut Inflater,
    start: Start,
    packed: &'a [u8],
) -> Result<&'a [u8], SpanError> {
    match start {
        Start::Member => {
            let mut rest = packed;
            Header::read(&mut rest).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => SpanError::Short,
                _ => SpanError::Damaged,
            })?;
            inflater.begin(0, 0);
            Ok(rest)
        }
        Start::Block(0) => {
            inflater.begin(0, 0);
            Ok(packed)
        }
        Start::Block(bits) => {
            let (first, rest) = packed.split_first().ok_or(SpanError::Short)?;
            inflater.begin(bits, *first);
            Ok(rest)
        }
    }
}

#[cfg(test)]
mod tests;
