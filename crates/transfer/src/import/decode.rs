//! Decompresses a layer's blob to its tar, and computes the blob's digest while it reads.

use std::io::{self, BufRead, Read};

use flate2::bufread::MultiGzDecoder;

use super::limits::{ImportLimitError, Limits};
use super::stop::Stop;
use super::tally::{Amounts, Attempt, TallyError};
use crate::lazy::{BlobSpans, SpanCompression, SpanIndexer, SpansError, ZSTD_WINDOW_LOG};
use image::digest::{Digest, DigestHasher};

/// Bytes per read from the source.
const READ: usize = 256 << 10;

/// The compression of a layer's tar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    /// The blob is the tar.
    None,
    /// RFC 1952, with one or more members.
    Gzip,
    /// zstd frames of any kind. Source: RFC 8878.
    Zstd,
}

/// The digest and size that a blob must have.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Expected<'a> {
    pub(super) digest: Option<&'a Digest>,
    pub(super) size: Option<u64>,
}

/// The digest and size in the manifest of a blob that was read only in part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Claimed {
    pub(super) digest: Digest,
    pub(super) size: u64,
}

/// Why a blob cannot be decompressed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The source cannot be read.
    #[error("cannot read it")]
    Read(#[source] io::Error),
    #[error("it has the digest {actual}, not {expected}")]
    Mismatch {
        /// Digest that the blob must have.
        expected: Box<Digest>,
        /// Digest of the content.
        actual: Box<Digest>,
    },
    /// The blob is longer or shorter than in the manifest.
    #[error("it has {}{actual} bytes, not {expected}", if *.actual > *.expected { "at least " } else { "" })]
    Size {
        /// Size in the manifest, in bytes.
        expected: u64,
        /// Number of bytes that were read.
        actual: u64,
    },
    /// The gzip data is damaged or truncated.
    #[error("it is not valid gzip")]
    Gzip(#[source] io::Error),
    /// Data follows the gzip data. Go's reader, which containerd and Docker use, also refuses such data, even zeros;
    /// gzip(1) ignores it.
    #[error("it has other data after its gzip data")]
    Trailing,
    /// The zstd data is damaged or truncated.
    #[error("it is not valid zstd")]
    Zstd(#[source] io::Error),
    /// The compression is not supported for layers.
    #[error("it is compressed with {0}, which is not supported: use gzip, zstd or no compression")]
    Unsupported(&'static str),
    /// The unpacked size exceeds a limit.
    #[error(transparent)]
    Limit(#[from] ImportLimitError),
    /// Another part of the import failed, or the caller cancelled it.
    #[error("stopped")]
    Stopped,
}

/// A way to read compressed blobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlobReading {
    /// Without an index, which is the fastest.
    Plain,
    /// An index is made while the blob is read.
    Indexing,
}

/// Properties of a blob that was read.
#[derive(Debug)]
pub(super) struct Decoded {
    pub(super) compression: Compression,
    /// The blob's digest as computed, by the algorithm of the expected one or else SHA-256; or that in [`Claimed`].
    pub(super) digest: Digest,
    pub(super) size: u64,
    /// Present for a compressed blob whose index is made.
    pub(super) spans: Option<Result<BlobSpans, SpansError>>,
    /// Whether the blob is gzip, and its trailer states the length of the whole tar. Such a blob has a single member,
    /// so it was not truncated between members.
    pub(super) is_whole_gzip: bool,
}

/// Recognizes, by the blob's first bytes, a compression or archive format that is not allowed for layers, and returns
/// its name. The name of the first file of a tar cannot begin with the bytes of any row. Source: magic(5) of file
/// 5.45, and for lz4 `lz4_Frame_format.md`.
fn foreign(first: &[u8]) -> Option<&'static str> {
    Some(match *first {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => "xz",
        [b'B', b'Z', b'h', b'1'..=b'9', 0x31 | 0x17, ..] => "bzip2",
        [0x1f, 0x9d | 0xa0, ..] => "compress (.Z)",
        [0x04 | 0x02, 0x22 | 0x21, 0x4d | 0x4c, 0x18, ..] => "lz4",
        // Properties, and a dictionary of 64 KiB or more.
        [0x5d, 0, 0, low, high, ..] if low | high != 0 => "lzma",
        [b'L', b'Z', b'I', b'P', 1, ..] => "lzip",
        [0x89, b'L', b'Z', b'O', 0, ..] => "lzop",
        [b'7', b'z', 0xbc, 0xaf, 0x27, 0x1c, ..] => "7z",
        [b'P', b'K', 3, 4, ..] => "zip",
        _ => return None,
    })
}

/// The source's bytes, hashed and counted.
struct Raw<'a, R> {
    source: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// `None` if the digest is not needed.
    hasher: Option<DigestHasher>,
    read: u64,
    /// The last four bytes read so far.
    last: [u8; 4],
    expected: Option<u64>,
    stop: &'a Stop<'a>,
    progress: &'a (dyn Fn(u64) + Sync),
    /// The reason why reading failed. It is stored because decoders pass on only an `io::Error`.
    failure: Option<DecodeError>,
}

impl<R: Read> Raw<'_, R> {
    fn refill(&mut self) -> Result<(), DecodeError> {
        if self.stop.is_set() {
            return Err(DecodeError::Stopped);
        }
        let read = loop {
            match self.source.read(&mut self.buffer) {
                Ok(read) => break read.min(self.buffer.len()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if self.stop.is_set() => return Err(DecodeError::Stopped),
                Err(error) => return Err(DecodeError::Read(error)),
            }
        };
        (self.start, self.end) = (0, read);
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&self.buffer[..read]);
        }
        self.read += read as u64;
        self.keep_last(read);
        if let Some(expected) = self.expected.filter(|expected| self.read > *expected) {
            return Err(DecodeError::Size { expected, actual: self.read });
        }
        (self.progress)(read as u64);
        Ok(())
    }

    /// Keeps the last four of the `count` bytes at the buffer's start, which have just been read.
    fn keep_last(&mut self, count: usize) {
        for byte in &self.buffer[count.saturating_sub(4)..count] {
            self.last.rotate_left(1);
            self.last[3] = *byte;
        }
    }

    /// Reads to the end, only to compute the digest.
    fn drain(&mut self) -> Result<(), DecodeError> {
        loop {
            self.refill()?;
            if self.end == 0 {
                return Ok(());
            }
        }
    }
}

impl<R: Read> BufRead for Raw<'_, R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.start == self.end
            && let Err(failure) = self.refill()
        {
            let failure = self.failure.insert(failure);
            return Err(io::Error::other(failure.to_string()));
        }
        Ok(&self.buffer[self.start..self.end])
    }

    fn consume(&mut self, amount: usize) {
        self.start += amount;
    }
}

impl<R: Read> Read for Raw<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = self.fill_buf()?;
        let count = bytes.len().min(into.len());
        into[..count].copy_from_slice(&bytes[..count]);
        self.consume(count);
        Ok(count)
    }
}

enum Inner<'a, R> {
    Plain(Box<Raw<'a, R>>),
    /// The decoder, and whether the first member's header is valid.
    Gzip(Box<MultiGzDecoder<Raw<'a, R>>>, bool),
    Indexed(Box<SpanIndexer<Raw<'a, R>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, Raw<'a, R>>>),
}

/// A decoder of one blob.
pub(super) struct Decoder<'a, R> {
    inner: Inner<'a, R>,
    expected: Expected<'a>,
    claimed: Option<Claimed>,
    limits: &'a Limits,
    unpacked: u64,
    /// Counts the content, if the blob is a layer.
    attempt: Option<&'a Attempt<'a>>,
    /// Number of bytes of the blob that were counted. Only a blob of unknown size is counted as it is read.
    counted: u64,
}

impl<'a, R: Read> Decoder<'a, R> {
    /// Detects the compression by the first bytes.
    pub(super) fn new(
        source: R,
        expected: Expected<'a>,
        reading: BlobReading,
        limits: &'a Limits,
        stop: &'a Stop<'a>,
        progress: &'a (dyn Fn(u64) + Sync),
    ) -> Result<Self, DecodeError> {
        let mut raw = Raw {
            source,
            buffer: vec![0; READ].into_boxed_slice(),
            start: 0,
            end: 0,
            hasher: Some(expected.digest.map_or_else(DigestHasher::sha256, Digest::hasher)),
            read: 0,
            last: [0; 4],
            expected: expected.size,
            stop,
            progress,
            failure: None,
        };
        // One read of a pipe may return fewer bytes than the detection needs.
        let mut filled = 0;
        while filled < 6 {
            let mut rest = std::mem::take(&mut raw.buffer);
            let read = raw.source.read(&mut rest[filled..]);
            raw.buffer = rest;
            match read {
                Ok(0) => break,
                Ok(read) => filled += read.min(READ - filled),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if stop.is_set() => return Err(DecodeError::Stopped),
                Err(error) => return Err(DecodeError::Read(error)),
            }
        }
        raw.end = filled;
        raw.read = filled as u64;
        raw.keep_last(filled);
        if let Some(hasher) = &mut raw.hasher {
            hasher.update(&raw.buffer[..filled]);
        }
        (raw.progress)(raw.read);
        let compression = SpanCompression::detect(&raw.buffer[..filled]);
        let foreign = foreign(&raw.buffer[..filled]);
        let inner = match compression {
            None => Inner::Plain(Box::new(raw)),
            Some(compression) if reading == BlobReading::Indexing => {
                let indexer = SpanIndexer::new(compression, raw);
                Inner::Indexed(Box::new(indexer.map_err(DecodeError::Zstd)?))
            }
            Some(SpanCompression::Gzip) => {
                let decoder = MultiGzDecoder::new(raw);
                let begun = decoder.header().is_some();
                Inner::Gzip(Box::new(decoder), begun)
            }
            Some(SpanCompression::Zstd) => {
                let decoder = zstd::stream::read::Decoder::with_buffer(raw);
                let mut decoder = decoder.map_err(DecodeError::Zstd)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(DecodeError::Zstd)?;
                Inner::Zstd(Box::new(decoder))
            }
        };
        let (claimed, attempt) = (None, None);
        let mut decoder =
            Self { inner, expected, claimed, limits, unpacked: 0, attempt, counted: 0 };
        match foreign {
            Some(name) => Err(decoder.blamed(DecodeError::Unsupported(name))),
            None => Ok(decoder),
        }
    }

    /// Makes a decoder that passes a tar on unchanged, without looking at its first bytes. The tar was already
    /// unpacked from a blob that was read only in part, so the caller must check its diff id.
    pub(super) fn of_tar(
        source: R,
        claimed: Claimed,
        limits: &'a Limits,
        stop: &'a Stop<'a>,
        progress: &'a (dyn Fn(u64) + Sync),
    ) -> Self {
        let raw = Raw {
            source,
            buffer: vec![0; READ].into_boxed_slice(),
            start: 0,
            end: 0,
            hasher: None,
            read: 0,
            last: [0; 4],
            expected: None,
            stop,
            progress,
            failure: None,
        };
        Self {
            inner: Inner::Plain(Box::new(raw)),
            expected: Expected::default(),
            claimed: Some(claimed),
            limits,
            unpacked: 0,
            attempt: None,
            counted: 0,
        }
    }

    /// Adds the bytes of this blob to the counts of an attempt.
    pub(super) fn counted(self, attempt: &'a Attempt<'a>) -> Self {
        Self { attempt: Some(attempt), ..self }
    }

    /// Whether data for an index is collected.
    pub(super) const fn is_indexing(&self) -> bool {
        matches!(self.inner, Inner::Indexed(_))
    }

    /// Whether the blob is compressed.
    pub(super) const fn is_compressed(&self) -> bool {
        !matches!(self.inner, Inner::Plain(_))
    }

    /// Whether the blob is the tar itself and is hashed with the algorithm of `digest`.
    pub(super) fn is_hashed_as(&self, digest: &Digest) -> bool {
        let Inner::Plain(raw) = &self.inner else { return false };
        let length = self.expected.digest.map_or(32, |it| it.as_bytes().len());
        raw.hasher.is_some() && length == digest.as_bytes().len()
    }

    const fn compression(&self) -> Compression {
        match self.inner {
            Inner::Plain(_) => Compression::None,
            Inner::Gzip(..) => Compression::Gzip,
            Inner::Indexed(ref indexer) => match indexer.compression() {
                SpanCompression::Gzip => Compression::Gzip,
                SpanCompression::Zstd => Compression::Zstd,
            },
            Inner::Zstd(_) => Compression::Zstd,
        }
    }

    fn raw(&mut self) -> &mut Raw<'a, R> {
        match &mut self.inner {
            Inner::Plain(raw) => raw,
            Inner::Gzip(decoder, _) => decoder.get_mut(),
            Inner::Indexed(indexer) => indexer.get_mut(),
            Inner::Zstd(decoder) => decoder.get_mut(),
        }
    }

    /// Fills `into` with bytes of the tar, and returns their number: fewer than its length only at the tar's end.
    /// Checks all limits.
    pub(super) fn fill(&mut self, into: &mut [u8]) -> Result<usize, DecodeError> {
        let mut filled = 0;
        while filled < into.len() {
            match self.read_once(&mut into[filled..])? {
                0 => break,
                read => filled += read,
            }
        }
        self.counted_bytes(filled)
    }

    /// Reads the next bytes, of which there may be fewer than fit. Returns 0 at the end.
    pub(super) fn read_part(&mut self, into: &mut [u8]) -> Result<usize, DecodeError> {
        let read = self.read_once(into)?;
        self.counted_bytes(read)
    }

    fn read_once(&mut self, into: &mut [u8]) -> Result<usize, DecodeError> {
        loop {
            let read = match &mut self.inner {
                Inner::Plain(raw) => raw.read(into),
                Inner::Gzip(decoder, _) => decoder.read(into),
                Inner::Indexed(indexer) => indexer.read(into),
                Inner::Zstd(decoder) => decoder.read(into),
            };
            match read {
                Ok(read) => return Ok(read),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
    }

    fn counted_bytes(&mut self, filled: usize) -> Result<usize, DecodeError> {
        match self.count(filled as u64) {
            Err(beyond @ DecodeError::Limit(_)) => Err(self.beyond(beyond)),
            counted => counted.map(|()| filled),
        }
    }

    /// Returns the failure of a blob with more content than a limit. A mirror that sends a bomb must not end the pull,
    /// so the blob is compared with its digest, unless the blob itself is too large to be read on.
    fn beyond(&mut self, failure: DecodeError) -> DecodeError {
        if let Some(attempt) = self.attempt {
            attempt.give_up();
        }
        match self.expected.size {
            Some(size) if size <= self.limits.layer_bytes => self.blamed(failure),
            _ => failure,
        }
    }

    /// Compares the size of the tar with the limits, after more bytes of it were unpacked.
    fn count(&mut self, filled: u64) -> Result<(), DecodeError> {
        self.unpacked += filled;
        if self.unpacked > self.limits.layer_bytes {
            return Err(ImportLimitError::LayerBytes(self.limits.layer_bytes).into());
        }
        let (read, unpacked) = (self.raw().read, self.unpacked);
        let claimed = self.claimed.map(|it| it.size);
        let known = self.expected.size.or(claimed);
        self.limits.check_ratio(known.unwrap_or(read), unpacked)?;
        if let Some(attempt) = self.attempt {
            let packed = if known.is_some() { 0 } else { read - self.counted };
            self.counted = read;
            let added = Amounts { packed, unpacked: filled, ..Amounts::default() };
            attempt.add(added).map_err(|error| match error {
                TallyError::Limit(error) => DecodeError::Limit(error),
                TallyError::Stopped => DecodeError::Stopped,
            })?;
        }
        Ok(())
    }

    /// Returns the best reason for a decoder's failure: a blob with the wrong digest or size, if it is one.
    fn failed(&mut self, error: io::Error) -> DecodeError {
        if let Some(failure) = self.raw().failure.take() {
            return failure;
        }
        let failure = match &self.inner {
            Inner::Plain(_) => DecodeError::Read(error),
            // The decoder has a header only while it is within a member.
            Inner::Gzip(decoder, true) if decoder.header().is_none() => DecodeError::Trailing,
            Inner::Indexed(indexer) if indexer.is_behind_a_member() => DecodeError::Trailing,
            Inner::Gzip(..) | Inner::Indexed(..) | Inner::Zstd(_) => match self.compression() {
                Compression::Zstd => DecodeError::Zstd(error),
                Compression::None | Compression::Gzip => DecodeError::Gzip(error),
            },
        };
        self.blamed(failure)
    }

    /// Returns the failure that explains another one: wrong bytes, if the blob has another digest or size.
    fn blamed(&mut self, failure: DecodeError) -> DecodeError {
        match self.blame() {
            Err(wrong @ (DecodeError::Mismatch { .. } | DecodeError::Size { .. })) => wrong,
            _ => failure,
        }
    }

    /// Reads the blob to its end, without unpacking it, and compares it with the expected digest and size. Used to
    /// find the cause of a failure.
    pub(super) fn blame(&mut self) -> Result<(), DecodeError> {
        if self.expected.digest.is_some() {
            self.raw().drain()?;
            self.check()?;
        }
        Ok(())
    }

    fn check(&mut self) -> Result<Digest, DecodeError> {
        let Expected { digest, size } = self.expected;
        let raw = self.raw();
        if let Some(expected) = size.filter(|size| *size != raw.read) {
            return Err(DecodeError::Size { expected, actual: raw.read });
        }
        let actual = raw.hasher.take().unwrap_or_else(DigestHasher::sha256).finish();
        match digest {
            Some(expected) if *expected != actual => {
                let (expected, actual) = (Box::new(*expected), Box::new(actual));
                Err(DecodeError::Mismatch { expected, actual })
            }
            _ => Ok(actual),
        }
    }

    /// Checks the whole blob, after [`fill`](Self::fill) reached the tar's end.
    pub(super) fn finish(mut self) -> Result<Decoded, DecodeError> {
        // Decoders stop at the end of their data, and trailing data is refused, so this normally reads no bytes. It
        // ensures that the digest covers the whole blob.
        let raw = self.raw();
        raw.drain()?;
        if let Some(Claimed { digest, size }) = self.claimed {
            let compression = self.compression();
            let (spans, is_whole_gzip) = (None, false);
            return Ok(Decoded { compression, digest, size, spans, is_whole_gzip });
        }
        let digest = self.check()?;
        let (size, compression) = (self.raw().read, self.compression());
        // Source: RFC 1952, "ISIZE": the length modulo 2^32, in the last four bytes.
        let length = u32::from_le_bytes(self.raw().last);
        let is_whole_gzip =
            compression == Compression::Gzip && self.unpacked % (1 << 32) == u64::from(length);
        let spans = match self.inner {
            Inner::Indexed(indexer) => Some(indexer.finish()),
            _ => None,
        };
        Ok(Decoded { compression, digest, size, spans, is_whole_gzip })
    }
}

pub(super) mod pipeline;
pub(super) mod read_index;
#[cfg(test)]
mod tests;
