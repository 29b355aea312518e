//! Spans of a blob, for each compression that can have an index.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;
use image::gzip::{Checkpoint, GzipError, Indexer, SpanError, Window};
use image::lazy::{BlobKind, CHUNK_MAX, Head};

use super::frames::{FrameIndexer, FrameSpans, FramesError, inflate_first_frames, inflate_frames};

/// A compression whose blobs can have an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SpanCompression {
    Gzip,
    Zstd,
}

impl SpanCompression {
    /// Number of bytes of a blob that [`detect`](Self::detect) needs.
    pub(crate) const MAGIC: usize = 4;

    /// Detects the compression of a blob by its first bytes.
    pub(crate) const fn detect(first: &[u8]) -> Option<Self> {
        match first {
            // Source: RFC 1952, 2.3.1.
            [0x1f, 0x8b, ..] => Some(Self::Gzip),
            // A frame, or a skippable frame. Source: RFC 8878, 3.1.1 and 3.1.2.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            _ => None,
        }
    }
}

/// Why a blob is not divided into spans. Its data may still be valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpansError {
    /// The blob is gzip.
    #[error(transparent)]
    Gzip(GzipError),
    /// The blob is zstd.
    #[error(transparent)]
    Zstd(FramesError),
}

/// The spans of a blob.
#[derive(Debug)]
pub(crate) struct BlobSpans {
    pub(crate) kind: BlobKind,
    /// The beginnings of the spans.
    pub(crate) checkpoints: Vec<Checkpoint>,
}

/// Reads the decompressed bytes of a blob, and records where spans begin.
#[derive(Debug)]
pub(crate) enum SpanIndexer<R> {
    Gzip(Indexer<R>),
    Zstd(FrameIndexer<R>),
}

impl<R: BufRead> SpanIndexer<R> {
    /// Creates an indexer at the first byte of a blob.
    pub(crate) fn new(compression: SpanCompression, source: R) -> io::Result<Self> {
        Ok(match compression {
            SpanCompression::Gzip => Self::Gzip(Indexer::new(source)),
            SpanCompression::Zstd => Self::Zstd(FrameIndexer::new(source)?),
        })
    }

    /// Returns the source.
    pub(crate) const fn get_mut(&mut self) -> &mut R {
        match self {
            Self::Gzip(indexer) => indexer.get_mut(),
            Self::Zstd(indexer) => indexer.get_mut(),
        }
    }

    /// Whether an error that [`read`](Read::read) returned concerns data after the last gzip member that is not a
    /// member.
    pub(crate) fn is_behind_a_member(&self) -> bool {
        matches!(self, Self::Gzip(indexer) if indexer.is_behind_a_member())
    }

    /// Returns the spans after the whole blob was read.
    pub(crate) fn finish(self) -> Result<BlobSpans, SpansError> {
        match self {
            Self::Gzip(indexer) => {
                let checkpoints = indexer.finish().map_err(SpansError::Gzip)?;
                Ok(BlobSpans { kind: BlobKind::Gzip, checkpoints })
            }
            Self::Zstd(indexer) => {
                let FrameSpans { checkpoints, data_end } =
                    indexer.finish().map_err(SpansError::Zstd)?;
                Ok(BlobSpans { kind: BlobKind::Zstd { data_end }, checkpoints })
            }
        }
    }
}

impl<R> SpanIndexer<R> {
    /// Returns the compression of the blob.
    pub(crate) const fn compression(&self) -> SpanCompression {
        match self {
            Self::Gzip(_) => SpanCompression::Gzip,
            Self::Zstd(_) => SpanCompression::Zstd,
        }
    }
}

impl<R: BufRead> Read for SpanIndexer<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Gzip(indexer) => indexer.read(into),
            Self::Zstd(indexer) => indexer.read(into),
        }
    }
}

/// Inflates a span and returns its bytes of the tar. `packed` are the bytes of the blob in the range that
/// [`Head::packed`] returns.
///
/// # Errors
/// [`SpanError`]. Wrong bytes need not cause an error: see [`Head::is_unit`].
pub fn inflate_span(
    head: &Head,
    span: usize,
    window: Window,
    packed: &[u8],
) -> Result<Vec<u8>, SpanError> {
    let unpacked = head.unpacked(&(span..span.saturating_add(1)));
    let length = unpacked.end.saturating_sub(unpacked.start);
    match head.kind {
        BlobKind::Gzip => {
            head.checkpoint(span, window).ok_or(SpanError::Short)?.inflate(packed, length)
        }
        BlobKind::Zstd { .. } => inflate_frames(packed, length),
        BlobKind::GzipChunks { .. } | BlobKind::ZstdChunks { .. } => {
            inflate_chunk(head, span, packed)
        }
    }
}

/// Inflates a chunk, and returns it with the zeros behind it. Tar headers may follow the chunk in `packed`.
fn inflate_chunk(head: &Head, span: usize, packed: &[u8]) -> Result<Vec<u8>, SpanError> {
    let chunk = head.chunk(span);
    let length = chunk.end.saturating_sub(chunk.start);
    let Some(wanted) = usize::try_from(length).ok().filter(|_| length <= CHUNK_MAX) else {
        return Err(SpanError::Long(length));
    };
    let mut bytes = match head.kind {
        BlobKind::ZstdChunks { .. } => inflate_first_frames(packed, wanted)?,
        _ => {
            let mut bytes = Vec::with_capacity(wanted);
            let mut decoder = MultiGzDecoder::new(packed).take(length);
            decoder.read_to_end(&mut bytes).or(Err(SpanError::Damaged))?;
            bytes
        }
    };
    if bytes.len() < wanted {
        return Err(SpanError::Short);
    }
    let padding = head.spans.get(span).map_or(0, |it| it.padding);
    bytes.resize(wanted.saturating_add(padding.into()), 0);
    Ok(bytes)
}
