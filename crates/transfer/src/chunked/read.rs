//! Assembles the tar of a plan.

use std::io::{self, Cursor, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;
use image::verity::ObjectId;
use store::{ChunkKey, DigestHasher, ObjectPart, ObjectReader};

use super::plan::{AssemblyPlan, ChunkPlace, Known, Step};
use super::toc::Format;
use super::{Ranges, Tar};
use crate::lazy::ZSTD_WINDOW_LOG;

/// Maximum number of an object's bytes per read. Chunks up to this length are read once. Longer chunks are read
/// twice: to compare their digest, and to return their bytes.
const PIECE: usize = 1 << 20;
/// Buffer size for downloads, in bytes.
const DOWNLOAD: usize = 64 << 10;

pub(super) fn tar<'p>(plan: &'p AssemblyPlan<'_>, ranges: &'p dyn Ranges) -> Tar<'p> {
    let fetched = Arc::new(AtomicU64::new(0));
    let skipped = plan.stats().skip;
    let assembly = Assembly {
        plan,
        ranges,
        next: 0,
        now: Now::Nothing,
        gap: 0..0,
        open: None,
        buffer: Vec::new(),
        fetched: Arc::clone(&fetched),
    };
    Tar { reader: Box::new(assembly), sealed: None, skipped, fetched }
}

/// The source of the bytes that are being returned.
enum Now<'p> {
    Nothing,
    /// A decompressed part of the blob.
    Unpacking(Box<dyn Read + Send + 'p>),
    /// The rest of a verified part of an object: start and end offset.
    Object(u64, u64),
    /// The buffer, from this offset on.
    Buffer(usize),
    /// A range of the plan's bytes.
    Bytes(Range<usize>),
}

struct Assembly<'p, 'a> {
    plan: &'p AssemblyPlan<'a>,
    ranges: &'p dyn Ranges,
    next: usize,
    now: Now<'p>,
    /// Range of the plan's bytes that follow `now`.
    gap: Range<usize>,
    /// The object used last.
    open: Option<(ObjectId, ObjectReader)>,
    buffer: Vec<u8>,
    fetched: Arc<AtomicU64>,
}

impl<'p> Assembly<'p, '_> {
    fn begin(&mut self, step: &'p Step) -> io::Result<()> {
        match step {
            Step::Fetch(range) => self.now = Now::Unpacking(self.fetch(range)?),
            Step::Known { blob, chunk, gap } => {
                self.gap = gap.clone().unwrap_or(0..0);
                match chunk {
                    None => {}
                    Some(known) if self.take(known) => {}
                    Some(_) => {
                        let bytes = blob.end - blob.start;
                        tracing::debug!(
                            bytes,
                            "downloading a file that disappeared from the store"
                        );
                        self.gap = 0..0;
                        self.now = Now::Unpacking(self.fetch(blob)?);
                    }
                }
            }
        }
        Ok(())
    }

    fn fetch(&self, range: &Range<u64>) -> io::Result<Box<dyn Read + Send + 'p>> {
        let toc = &self.plan.toc;
        let download = Download {
            source: self.ranges.read(range.clone()),
            left: range.end - range.start,
            fetched: Arc::clone(&self.fetched),
        };
        // The end of the blob was downloaded with the table.
        let is_last = range.end == toc.contents.end;
        let tail = Cursor::new(if is_last { toc.tail() } else { &[] });
        let source = io::BufReader::with_capacity(DOWNLOAD, download.chain(tail));
        Ok(match toc.format {
            Format::Estargz => Box::new(MultiGzDecoder::new(source)),
            Format::ZstdChunked => {
                let mut decoder = zstd::Decoder::with_buffer(source)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG)?;
                Box::new(decoder)
            }
        })
    }

    /// Prepares a chunk to be returned. Returns `false` if the bytes in the store do not match.
    fn take(&mut self, known: &Known) -> bool {
        match &known.place {
            ChunkPlace::Bytes(range) => {
                let is_right = AssemblyPlan::matches(&known.key, &self.plan.bytes[range.clone()]);
                if is_right {
                    self.now = Now::Bytes(range.clone());
                }
                is_right
            }
            ChunkPlace::Object(part) => match self.compare(&known.key, part) {
                Ok(is_right) => is_right,
                Err(error) => {
                    tracing::debug!(object = %part.object, %error, "cannot read the object");
                    false
                }
            },
        }
    }

    fn compare(&mut self, key: &ChunkKey, part: &ObjectPart) -> io::Result<bool> {
        if self.open.as_ref().is_none_or(|(object, _)| *object != part.object) {
            let file = self.plan.store.object(&part.object).map_err(io::Error::other)?;
            self.open = Some((part.object, file));
        }
        let Some((_, file)) = &self.open else { return Ok(false) };
        let end = part.offset.checked_add(part.length);
        let end = end.ok_or_else(|| io::Error::other("the chunk is outside its object"))?;
        let mut hasher = DigestHasher::sha256();
        let mut at = part.offset;
        self.buffer.resize(PIECE, 0);
        while at < end {
            let length = usize::try_from(end - at).map_or(PIECE, |left| left.min(PIECE));
            file.read_exact_at(&mut self.buffer[..length], at)?;
            hasher.update(&self.buffer[..length]);
            at += length as u64;
        }
        if hasher.finish().as_bytes() != key.0 {
            tracing::debug!(object = %part.object, "the object does not have the chunk's bytes");
            return Ok(false);
        }
        self.now = match usize::try_from(part.length) {
            Ok(length) if length <= PIECE => {
                self.buffer.truncate(length);
                Now::Buffer(0)
            }
            _ => Now::Object(part.offset, end),
        };
        Ok(true)
    }
}

impl Read for Assembly<'_, '_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        loop {
            let read = match &mut self.now {
                Now::Nothing => 0,
                Now::Unpacking(source) => source.read(into)?,
                Now::Object(at, end) => {
                    let (_, file) = self.open.as_ref().expect("the object was compared before");
                    let left = usize::try_from(*end - *at).unwrap_or(usize::MAX);
                    let length = left.min(into.len());
                    file.read_exact_at(&mut into[..length], *at)?;
                    *at += length as u64;
                    length
                }
                Now::Buffer(at) => {
                    let length = (self.buffer.len() - *at).min(into.len());
                    into[..length].copy_from_slice(&self.buffer[*at..*at + length]);
                    *at += length;
                    length
                }
                Now::Bytes(range) => {
                    let length = range.len().min(into.len());
                    let end = range.start + length;
                    into[..length].copy_from_slice(&self.plan.bytes[range.start..end]);
                    range.start = end;
                    length
                }
            };
            if read > 0 {
                return Ok(read);
            }
            self.now = Now::Nothing;
            let gap = std::mem::take(&mut self.gap);
            if !gap.is_empty() {
                self.now = Now::Bytes(gap);
                continue;
            }
            let plan = self.plan;
            let Some(step) = plan.steps.get(self.next) else { return Ok(0) };
            self.next += 1;
            self.begin(step)?;
        }
    }
}

/// Reads a part of the blob, with exactly the requested number of bytes.
struct Download<'p> {
    source: Box<dyn Read + Send + 'p>,
    left: u64,
    fetched: Arc<AtomicU64>,
}

impl Read for Download<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = usize::try_from(self.left).map_or(into.len(), |left| left.min(into.len()));
        if length == 0 {
            return Ok(0);
        }
        let read = self.source.read(&mut into[..length])?;
        if read == 0 {
            let error = "the registry sent less of the blob than requested";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, error));
        }
        self.left = self.left.saturating_sub(read as u64);
        self.fetched.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl AssemblyPlan<'_> {
    /// Opens the tar, whose missing parts come from `ranges`. The caller must verify the layer's diff id once all of
    /// the tar has been read.
    #[must_use]
    pub fn open<'p>(&'p self, ranges: &'p dyn Ranges) -> Tar<'p> {
        tar(self, ranges)
    }
}
