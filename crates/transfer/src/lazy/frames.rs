//! Random access to zstd blobs of several frames (RFC 8878), as `image::gzip` gives it to gzip blobs.
//!
//! A frame refers to no data before it, so a span consists of whole frames and has no window.

use std::io::{self, BufRead, Read};

use image::gzip::{Checkpoint, SPAN, SPAN_MAX, SpanError, Start, Window, packed_max};
use zstd::stream::raw::{DParameter, Decoder, Operation as _, Status};
use zstd::zstd_safe;

/// Largest accepted window of a zstd frame, as a power of 2. Source: RFC 8878 asks decoders for 8 MiB; `zstd --long`
/// makes 128 MiB, and the tool itself refuses larger windows by default.
pub(crate) const ZSTD_WINDOW_LOG: u32 = 27;

/// Why a zstd blob is not divided into spans. Its data may still be valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FramesError {
    /// A span, which ends with a frame, exceeds the limit for data in memory.
    #[error("a zstd frame has too much output: a span would have more than {SPAN_MAX} bytes")]
    Large,
    /// A span has long skippable frames or many empty frames, so its compressed data is too large.
    #[error("a part of the blob is more than twice as large as its output")]
    Empty,
}

/// The spans of a zstd blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrameSpans {
    /// The beginnings of the spans. The first one is at the blob's first byte.
    pub checkpoints: Vec<Checkpoint>,
    /// End in the blob of the last span, in bytes.
    pub data_end: u64,
}

/// Reads the decompressed bytes of a zstd blob, and records at which frames spans begin.
pub struct FrameIndexer<R> {
    source: R,
    decoder: Decoder<'static>,
    /// Whether a frame has begun that has not ended.
    is_inside: bool,
    /// Whether the current frame has output.
    has_output: bool,
    packed: u64,
    unpacked: u64,
    /// Offset in the blob at which the next span begins, once the last one is long enough. The next span is recorded
    /// when it has output, because frames without output may be the last ones.
    next: Option<u64>,
    /// End of the last frame that had output.
    data_end: u64,
    checkpoints: Vec<Checkpoint>,
    failed: Option<FramesError>,
}

impl<R> std::fmt::Debug for FrameIndexer<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut indexer = f.debug_struct("FrameIndexer");
        indexer.field("packed", &self.packed).field("unpacked", &self.unpacked);
        indexer.finish_non_exhaustive()
    }
}

impl<R: BufRead> FrameIndexer<R> {
    /// Creates an indexer at the first byte of a blob.
    pub fn new(source: R) -> io::Result<Self> {
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG))?;
        Ok(Self {
            source,
            decoder,
            is_inside: false,
            has_output: false,
            packed: 0,
            unpacked: 0,
            next: Some(0),
            data_end: 0,
            checkpoints: Vec::new(),
            failed: None,
        })
    }

    /// Returns the source.
    pub const fn get_mut(&mut self) -> &mut R {
        &mut self.source
    }

    /// Returns the spans after the whole blob was read.
    pub fn finish(mut self) -> Result<FrameSpans, FramesError> {
        self.check_span(self.data_end);
        let Self { checkpoints, data_end, failed, .. } = self;
        failed.map_or(Ok(FrameSpans { checkpoints, data_end }), Err)
    }

    /// Checks the compressed size of the last span, which ends at this offset in the blob.
    fn check_span(&mut self, end: u64) {
        let packed = self.checkpoints.last().map_or(0, |it| end - it.packed);
        if packed > packed_max(self.since()) {
            self.fail(FramesError::Empty);
        }
    }

    fn fail(&mut self, error: FramesError) {
        if self.failed.is_none() {
            self.failed = Some(error);
            self.checkpoints = Vec::new();
        }
    }

    /// Returns the bytes of output since the last span began.
    fn since(&self) -> u64 {
        self.checkpoints.last().map_or(0, |it| self.unpacked - it.unpacked)
    }

    /// Records one step of the decoder.
    fn note(&mut self, status: &Status) {
        self.packed += status.bytes_read as u64;
        if status.bytes_written > 0 {
            if let Some(packed) = self.next.take().filter(|_| self.failed.is_none()) {
                self.check_span(packed);
                let (unpacked, window) = (self.unpacked, Window::default());
                self.checkpoints.push(Checkpoint {
                    start: Start::Member,
                    packed,
                    unpacked,
                    window,
                });
            }
            self.unpacked += status.bytes_written as u64;
            self.has_output = true;
            if self.since() > SPAN_MAX {
                self.fail(FramesError::Large);
            }
        }
        self.is_inside = status.remaining > 0;
        if !self.is_inside {
            if std::mem::take(&mut self.has_output) {
                self.data_end = self.packed;
            }
            if self.since() >= SPAN {
                self.next = self.next.or(Some(self.packed));
            }
        }
    }
}

impl<R: BufRead> Read for FrameIndexer<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            let input = self.source.fill_buf()?;
            let is_end = input.is_empty();
            if is_end && !self.is_inside {
                return Ok(0);
            }
            // A step ends with the frame, so its bytes belong to one frame.
            let status = self.decoder.run_on_buffers(input, into)?;
            self.source.consume(status.bytes_read);
            self.note(&status);
            if status.bytes_written > 0 {
                return Ok(status.bytes_written);
            }
            if is_end && self.is_inside {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

/// Decompresses a span of whole frames, and returns its output of `length` bytes. It goes to one buffer, so the window
/// that a frame claims to need takes no memory.
///
/// # Errors
/// [`SpanError`]. Wrong bytes need not cause an error, so compare the output with a digest.
pub(super) fn inflate_frames(packed: &[u8], length: u64) -> Result<Vec<u8>, SpanError> {
    let Some(wanted) = usize::try_from(length).ok().filter(|_| length <= SPAN_MAX) else {
        return Err(SpanError::Long(length));
    };
    let bytes = zstd::bulk::decompress(packed, wanted).or(Err(SpanError::Damaged))?;
    if bytes.len() < wanted { Err(SpanError::Short) } else { Ok(bytes) }
}

/// Decompresses whole frames up to an output of `wanted` bytes. Other frames may follow. Memory is limited as in
/// [`inflate_frames`].
///
/// # Errors
/// [`SpanError`], also if a frame ends behind the wanted bytes.
pub(super) fn inflate_first_frames(packed: &[u8], wanted: usize) -> Result<Vec<u8>, SpanError> {
    let mut rest = packed;
    let mut bytes = vec![0; wanted];
    let mut at = 0;
    while at < wanted {
        if rest.is_empty() {
            return Err(SpanError::Short);
        }
        let length = zstd_safe::find_frame_compressed_size(rest).or(Err(SpanError::Damaged))?;
        let frame = rest.split_at_checked(length).filter(|_| length > 0);
        let (frame, behind) = frame.ok_or(SpanError::Short)?;
        at += zstd_safe::decompress(&mut bytes[at..], frame).or(Err(SpanError::Damaged))?;
        rest = behind;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
