//! Random access into gzip: spans that can be inflated without what comes before them.
//!
//! An [`Indexer`] inflates a blob once, as any import does, and notes where spans begin: at the end of a deflate block,
//! with the bytes of the window that the span refers to, or at the beginning of a member. [`Checkpoint::inflate`] gives the
//! bytes of one span. What it gives is compared with nothing here: whoever keeps checkpoints keeps digests, too.
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

/// How far back deflate can refer, in bytes. Source: RFC 1951, 3.2.5.
pub const WINDOW: usize = 32 << 10;

/// A span ends at the first place where it can, once it has so many bytes of output.
pub const SPAN: u64 = 256 << 10;

/// The most bytes of output in a span. Deflate knows no such limit. zlib, Go and libdeflate end a block of data that
/// compresses best after 9 MB at the most.
pub const SPAN_MAX: u64 = 16 << 20;

/// The most bytes of a blob that a span of so much output has: they are in memory at once. Data that does not compress has
/// little more than its output. Only empty blocks and members could make it more.
#[must_use]
pub const fn packed_max(unpacked: u64) -> u64 {
    unpacked.saturating_mul(2).saturating_add(64 << 10)
}

/// The most bytes of windows that are kept, while so many bytes of a blob are read: an eighth, where layers have 3 or 4 in a
/// hundred, and something to begin with.
const fn windows_max(packed: u64) -> u64 {
    (packed >> 3).saturating_add(16 << 20)
}

/// How inflating begins at a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the header of a member.
    Member,
    /// At a deflate block, after this many bits of the byte before: 0 to 7 bits of that byte are still to be read.
    Block(u8),
}

/// Where a span begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// How inflating begins.
    pub start: Start,
    /// The first byte of the blob of which all bits are the span's.
    pub packed: u64,
    /// The first byte of output.
    pub unpacked: u64,
    /// What the span refers to.
    pub window: Window,
}

/// Why a span cannot be inflated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpanError {
    /// The bytes are no deflate data, or no member's header.
    #[error("the bytes of the span are not valid gzip")]
    Damaged,
    /// The bytes end before the span.
    #[error("the bytes of the span end early")]
    Short,
    /// A span is longer than any that an [`Indexer`] makes.
    #[error("the span has {0} bytes, more than {SPAN_MAX}")]
    Long(u64),
}

impl Checkpoint {
    /// The bytes of the blob that a span needs, where `end` is the next checkpoint's [`packed`](Self::packed) or the blob's
    /// length. A byte that belongs to two blocks belongs to two spans.
    #[must_use]
    pub const fn needs(&self, end: u64) -> Range<u64> {
        let shared = if matches!(self.start, Start::Block(1..)) { 1 } else { 0 };
        self.packed.saturating_sub(shared)..end
    }

    /// The `length` bytes of output of the span that begins here, from its bytes of the blob: those that
    /// [`needs`](Self::needs) names.
    ///
    /// # Errors
    /// [`SpanError`]. Wrong bytes need not be an error: compare a digest.
    pub fn inflate(&self, packed: &[u8], length: u64) -> Result<Vec<u8>, SpanError> {
        let Some(wanted) = usize::try_from(length).ok().filter(|_| length <= SPAN_MAX) else {
            return Err(SpanError::Long(length));
        };
        // At most 16 MiB and some more.
        let end = WINDOW.saturating_add(wanted);
        let mut out = vec![0; end.saturating_add(ROOM)];
        self.window.write(&mut out);
        let mut inflater = Inflater::default();
        let mut rest = begin(&mut inflater, self.start, packed)?;
        let mut at = WINDOW;
        while at < end {
            let mut marks = Marks { origin: 0, needed: &mut [] };
            let step = inflater.step((rest, true), &mut out, at, &mut marks);
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
                // There is no more input than what it was given.
                Pause::Input => return Err(SpanError::Short),
                Pause::Block | Pause::End | Pause::Output => {}
            }
        }
        out.truncate(end);
        out.drain(..WINDOW);
        Ok(out)
    }
}

/// Has an inflater begin so with these bytes, and returns those that it is to be given.
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
