//! Random access into gzip: spans that can be inflated without what comes before them.
//!
//! An [`Indexer`] inflates a blob once, as any import does, and notes where spans begin: at the end of a deflate block,
//! with the bytes of the window that the span refers to, or at the beginning of a member. [`Checkpoint::inflate`] gives the
//! bytes of one span. What it gives is compared with nothing here: whoever keeps checkpoints keeps digests, too.
//!
//! Sources: RFC 1951 (deflate), RFC 1952 (gzip).

mod header;
mod index;
mod window;

use std::io;
use std::ops::Range;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{BlockBoundaryState, DecompressorOxide, decompress};

pub use index::{GzipError, Indexer};
pub use window::Window;

use header::{Header, TRAILER};

/// How far back deflate can refer, in bytes. Source: RFC 1951, 3.2.5.
pub const WINDOW: usize = 32 << 10;

/// A span ends at the first place where it can, once it has so many bytes of output.
pub const SPAN: u64 = 256 << 10;

/// The most bytes of output in a span. Deflate knows no such limit. zlib, Go and libdeflate end a block of data that
/// compresses best after 9 MB at the most.
pub const SPAN_MAX: u64 = 16 << 20;

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
        let shared = matches!(self.start, Start::Block(1..)) as u64;
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
        let mut out = vec![0; WINDOW + wanted];
        self.window.write(&mut out[..WINDOW]);
        let (mut inflater, mut rest) = begin(self.start, packed)?;
        let mut at = WINDOW;
        let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF | TINFL_FLAG_HAS_MORE_INPUT;
        while at < out.len() {
            let (status, read, written) = decompress(&mut inflater, rest, &mut out, at, flags);
            rest = &rest[read..];
            at += written;
            match status {
                TINFLStatus::Done if at < out.len() => {
                    rest = rest.get(TRAILER..).ok_or(SpanError::Short)?;
                    (inflater, rest) = begin(Start::Member, rest)?;
                }
                TINFLStatus::Done => {}
                TINFLStatus::HasMoreOutput => {}
                TINFLStatus::NeedsMoreInput => return Err(SpanError::Short),
                _ => return Err(SpanError::Damaged),
            }
        }
        out.drain(..WINDOW);
        Ok(out)
    }
}

/// An inflater for bytes that begin so, and the bytes that it is to be given.
fn begin(start: Start, packed: &[u8]) -> Result<(Box<DecompressorOxide>, &[u8]), SpanError> {
    match start {
        Start::Member => {
            let mut rest = packed;
            Header::read(&mut rest).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => SpanError::Short,
                _ => SpanError::Damaged,
            })?;
            Ok((Box::default(), rest))
        }
        Start::Block(0) => Ok((resumed(0, 0), packed)),
        Start::Block(bits) => {
            let (first, rest) = packed.split_first().ok_or(SpanError::Short)?;
            Ok((resumed(bits, *first), rest))
        }
    }
}

/// An inflater between two blocks, which has still to read this many high bits of a byte.
fn resumed(bits: u8, byte: u8) -> Box<DecompressorOxide> {
    let num_bits = bits.min(7);
    let bit_buf = if num_bits == 0 { 0 } else { byte >> (8 - num_bits) };
    let state = BlockBoundaryState { num_bits, bit_buf, ..BlockBoundaryState::default() };
    Box::new(DecompressorOxide::from_block_boundary_state(&state))
}

#[cfg(test)]
mod tests;
