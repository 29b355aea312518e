//! Inflates a blob and records its checkpoints.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::indexing_slicing,
    reason = "offsets lie in buffers of known lengths; counters count bytes that were read"
)]

use std::io::{self, Read};

use super::header::{Header, TRAILER, damaged};
use super::inflate::{AHEAD, InflateError, Inflater, Marks, Pause, ROOM};
use super::{Checkpoint, SPAN, SPAN_MAX, Start, WINDOW, Window, packed_max, windows_max};

/// Bytes of output in the buffer, after the window.
const OUT: usize = 256 << 10;

/// Bytes of the blob in the buffer.
const IN: usize = 128 << 10;

/// The reason why a blob has no checkpoints. Its data may still be valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GzipError {
    /// The output of one block exceeds the limit for data in memory.
    #[error("a deflate block has more than {SPAN_MAX} bytes of output")]
    Block,
    /// A span has many empty blocks or members, so its compressed data is too large.
    #[error("a part of the blob is more than twice as large as its output")]
    Empty,
    /// The windows, which are held in memory and stored in the index, are too large.
    #[error("its spans refer to more preceding output than an index may keep")]
    Windows,
}

/// Reads the decompressed bytes of a gzip blob, with all checks of RFC 1952, and records checkpoints.
pub struct Indexer<R> {
    input: Input<R>,
    state: State,
    inflater: Inflater,
    /// The window, or the part of it that belongs to this member, followed by output.
    out: Box<[u8]>,
    /// Start of the output that the caller has not read; it ends at `end`.
    start: usize,
    end: usize,
    crc: crc32fast::Hasher,
    /// Bytes of output of the current member.
    member: u64,
    packed: u64,
    unpacked: u64,
    checkpoints: Vec<Checkpoint>,
    probe: Probe,
    /// Size in memory of the checkpoints' windows, in bytes.
    windows: u64,
    failed: Option<GzipError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    Data,
    Trailer,
    /// A member has ended, and another one may follow.
    Between,
    End,
}

/// Finds the bytes to which the last span refers. A reference reaches back at most one window, so references to bytes
/// before the span can only occur in the first [`WINDOW`] bytes of the span's output.
struct Probe {
    /// Whether the search is not finished.
    is_open: bool,
    /// The window before the span.
    window: Box<[u8]>,
    /// 1 for each byte of the window that the span is known to refer to, and 0 for the others.
    needed: Box<[u8]>,
}

/// The blob, read in order through a buffer.
struct Input<R> {
    source: R,
    buffer: Box<[u8]>,
    /// Start of the unused bytes in `buffer`; they end at `end`.
    start: usize,
    end: usize,
    /// Whether the source has no bytes after `end`.
    is_all: bool,
}

impl<R> std::fmt::Debug for Indexer<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut indexer = f.debug_struct("Indexer");
        indexer.field("packed", &self.packed).field("unpacked", &self.unpacked);
        indexer.finish_non_exhaustive()
    }
}

impl<R: Read> Indexer<R> {
    /// Creates an indexer at the first byte of a blob.
    pub fn new(source: R) -> Self {
        Self {
            input: Input {
                source,
                buffer: vec![0; IN].into_boxed_slice(),
                start: 0,
                end: 0,
                is_all: false,
            },
            state: State::Header,
            inflater: Inflater::default(),
            out: vec![0; WINDOW + OUT + ROOM].into_boxed_slice(),
            start: 0,
            end: 0,
            crc: crc32fast::Hasher::new(),
            member: 0,
            packed: 0,
            unpacked: 0,
            checkpoints: Vec::new(),
            probe: Probe {
                is_open: false,
                window: vec![0; WINDOW].into_boxed_slice(),
                needed: vec![0; WINDOW].into_boxed_slice(),
            },
            windows: 0,
            failed: None,
        }
    }

    /// Returns the source.
    pub const fn get_mut(&mut self) -> &mut R {
        &mut self.input.source
    }

    /// Whether an error that [`read`](Read::read) returned concerns data after the last member that is not a member.
    #[must_use]
    pub fn is_behind_a_member(&self) -> bool {
        self.state == State::Header && self.packed > 0
    }

    /// Returns the checkpoints after the whole blob was read. The first checkpoint is at the blob's first byte.
    ///
    /// # Errors
    /// [`GzipError`] if one of the limits was exceeded.
    pub fn finish(mut self) -> Result<Vec<Checkpoint>, GzipError> {
        self.check_span();
        self.failed.map_or(Ok(self.checkpoints), Err)
    }

    /// Checks the compressed size of the span that ends at this position.
    fn check_span(&mut self) {
        let packed = self.checkpoints.last().map_or(0, |it| self.packed - it.packed);
        if packed > packed_max(self.since().unwrap_or(0)) {
            self.fail(GzipError::Empty);
        }
    }

    /// Records that there will be no checkpoints, and frees the windows.
    fn fail(&mut self, error: GzipError) {
        if self.failed.is_some() {
            return;
        }
        self.failed = Some(error);
        self.checkpoints.iter_mut().for_each(|it| it.window = Window::default());
        self.probe.is_open = false;
    }

    /// Returns the bytes of output since the last checkpoint.
    fn since(&self) -> Option<u64> {
        Some(self.unpacked - self.checkpoints.last()?.unpacked)
    }

    fn is_due(&self) -> bool {
        self.since().is_none_or(|since| since >= SPAN)
    }

    fn note(&mut self, start: Start) {
        self.check_span();
        let (packed, unpacked, window) = (self.packed, self.unpacked, Window::default());
        self.checkpoints.push(Checkpoint { start, packed, unpacked, window });
    }

    /// Inflates until there is output or the blob ends.
    fn fill(&mut self) -> io::Result<()> {
        loop {
            match self.state {
                State::Header => {
                    if self.is_due() {
                        self.note(Start::Member);
                    }
                    self.packed += Header::read(&mut self.input)?.length;
                    self.inflater.begin(0, 0);
                    self.crc = crc32fast::Hasher::new();
                    (self.start, self.end, self.member) = (0, 0, 0);
                    self.state = State::Data;
                }
                State::Data => {
                    if self.inflate()? {
                        return Ok(());
                    }
                }
                State::Trailer => {
                    let mut trailer = [0; TRAILER];
                    self.input.read_exact(&mut trailer)?;
                    self.packed += TRAILER as u64;
                    let [crc, length] = [0, 4]
                        .map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|byte| trailer[at + byte])));
                    // The length is stored modulo 2^32. Source: RFC 1952, 2.3.1.
                    if crc != self.crc.clone().finalize()
                        || u64::from(length) != self.member & u64::from(u32::MAX)
                    {
                        return Err(damaged("the checksum of a gzip member is wrong"));
                    }
                    self.state = State::Between;
                }
                State::Between => {
                    let is_end = self.input.at_least(1)?.is_empty();
                    self.state = if is_end { State::End } else { State::Header };
                }
                State::End => return Ok(()),
            }
        }
    }

    /// Inflates one step, and returns whether the step wrote output.
    fn inflate(&mut self) -> io::Result<bool> {
        if self.end + ROOM > self.out.len() {
            self.out.copy_within(self.end - WINDOW..self.end, 0);
            (self.start, self.end) = (WINDOW, WINDOW);
        }
        self.input.at_least(AHEAD)?;
        let input = &self.input.buffer[self.input.start..self.input.end];
        let since = self.since().and_then(|it| usize::try_from(it).ok()).unwrap_or(0);
        let origin = if self.probe.is_open { self.end - since } else { 0 };
        let mut marks = Marks { origin, needed: &mut self.probe.needed };
        let is_all = self.input.is_all;
        let step = self.inflater.step(input, is_all, &mut self.out, self.end, &mut marks);
        let step = step.map_err(|error| match error {
            InflateError::Damaged => damaged("its deflate data is damaged"),
            InflateError::Short => io::ErrorKind::UnexpectedEof.into(),
        })?;
        self.crc.update(&self.out[self.end..self.end + step.written]);
        self.input.start += step.read;
        self.packed += step.read as u64;
        self.end += step.written;
        self.member += step.written as u64;
        self.unpacked += step.written as u64;
        let since = self.since().unwrap_or(0);
        if step.pause == Pause::End || since >= WINDOW as u64 {
            self.settle();
        }
        if self.failed.is_none() && since > SPAN_MAX {
            self.fail(GzipError::Block);
        }
        match step.pause {
            Pause::End => self.state = State::Trailer,
            Pause::Block if self.is_due() && self.failed.is_none() => self.checkpoint(),
            Pause::Block | Pause::Output | Pause::Input => {}
        }
        Ok(step.written > 0)
    }

    /// Begins the next span at this position, between two blocks.
    fn checkpoint(&mut self) {
        let have = WINDOW.min(usize::try_from(self.member).unwrap_or(WINDOW));
        let Probe { is_open, window, needed } = &mut self.probe;
        window[WINDOW - have..].copy_from_slice(&self.out[self.end - have..self.end]);
        needed.fill(0);
        *is_open = true;
        self.note(Start::Block(self.inflater.bits_left()));
    }

    /// Stores the window of the last checkpoint, whose needed bytes are now all known.
    fn settle(&mut self) {
        if let (true, Some(checkpoint)) = (self.probe.is_open, self.checkpoints.last_mut()) {
            checkpoint.window = Window::new(&self.probe.window, &self.probe.needed);
            self.probe.is_open = false;
            self.windows += checkpoint.window.memory();
            if self.windows > windows_max(self.packed) {
                self.fail(GzipError::Windows);
            }
        }
    }
}

impl<R: Read> Read for Indexer<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.start == self.end {
            self.fill()?;
        }
        let length = into.len().min(self.end - self.start);
        into[..length].copy_from_slice(&self.out[self.start..self.start + length]);
        self.start += length;
        Ok(length)
    }
}

impl<R: Read> Input<R> {
    /// Returns the next unused bytes: at least `count`, unless the source ends.
    fn at_least(&mut self, count: usize) -> io::Result<&[u8]> {
        while !self.is_all && self.end - self.start < count {
            if self.buffer.len() - self.start < count {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            }
            let read = self.source.read(&mut self.buffer[self.end..])?;
            self.end += read.min(self.buffer.len() - self.end);
            self.is_all = read == 0;
        }
        Ok(&self.buffer[self.start..self.end])
    }
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let bytes = self.at_least(1)?;
        let count = bytes.len().min(into.len());
        into[..count].copy_from_slice(&bytes[..count]);
        self.start += count;
        Ok(count)
    }
}
