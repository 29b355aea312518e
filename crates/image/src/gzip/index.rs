//! Inflates a blob and finds its checkpoints on the way.

use std::io::{self, BufRead, Read};

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY,
    TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{BlockBoundaryState, DecompressorOxide, decompress};

use super::header::{Header, TRAILER, damaged};
use super::{Checkpoint, SPAN, SPAN_MAX, Start, WINDOW, Window};

/// Bytes of output at once, behind the window.
const OUT: usize = 256 << 10;

/// Why a blob has no checkpoints. It may be sound nevertheless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GzipError {
    /// One block has more output than is kept in memory.
    #[error("a deflate block has more than {SPAN_MAX} bytes of output")]
    Block,
}

/// Gives the bytes that are in a gzip blob, with every check that RFC 1952 knows, and finds checkpoints.
pub struct Indexer<R> {
    source: R,
    state: State,
    inflater: Box<DecompressorOxide>,
    /// The window, or what there is of it in this member, and output behind it.
    out: Box<[u8]>,
    /// Output that the caller has not taken: from here to `end`.
    start: usize,
    end: usize,
    crc: crc32fast::Hasher,
    /// Bytes of output of this member.
    member: u64,
    packed: u64,
    unpacked: u64,
    checkpoints: Vec<Checkpoint>,
    /// What the last checkpoint needs is not known yet.
    probe: Option<Probe>,
    failed: Option<GzipError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    Data,
    Trailer,
    /// A member has ended: another one may begin.
    Between,
    End,
}

/// Finds out what a span refers to. A reference reaches back one window, so only one window's length of output can have
/// any that lead out of the span.
struct Probe {
    state: BlockBoundaryState,
    window: Box<[u8]>,
    /// The blob from the checkpoint on.
    packed: Vec<u8>,
    /// The output from the checkpoint on.
    real: Vec<u8>,
}

impl<R> std::fmt::Debug for Indexer<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut indexer = f.debug_struct("Indexer");
        indexer.field("packed", &self.packed).field("unpacked", &self.unpacked);
        indexer.finish_non_exhaustive()
    }
}

impl<R: BufRead> Indexer<R> {
    /// Begins at the blob's first byte.
    pub fn new(source: R) -> Self {
        Self {
            source,
            state: State::Header,
            inflater: Box::default(),
            out: vec![0; WINDOW + OUT].into_boxed_slice(),
            start: 0,
            end: 0,
            crc: crc32fast::Hasher::new(),
            member: 0,
            packed: 0,
            unpacked: 0,
            checkpoints: Vec::new(),
            probe: None,
            failed: None,
        }
    }

    /// The source.
    pub const fn get_mut(&mut self) -> &mut R {
        &mut self.source
    }

    /// Whether an error is that something which is no member stands behind the last member.
    #[must_use]
    pub fn is_behind_a_member(&self) -> bool {
        self.state == State::Header && self.packed > 0
    }

    /// The checkpoints, once all was read. The first is the blob's first byte.
    ///
    /// # Errors
    /// [`GzipError`].
    pub fn finish(self) -> Result<Vec<Checkpoint>, GzipError> {
        self.failed.map_or(Ok(self.checkpoints), Err)
    }

    /// Bytes of output so far since the last checkpoint.
    fn since(&self) -> Option<u64> {
        Some(self.unpacked - self.checkpoints.last()?.unpacked)
    }

    fn is_due(&self) -> bool {
        self.since().is_none_or(|since| since >= SPAN)
    }

    fn note(&mut self, start: Start) {
        let (packed, unpacked, window) = (self.packed, self.unpacked, Window::default());
        self.checkpoints.push(Checkpoint { start, packed, unpacked, window });
    }

    /// Goes on until there is output, or no more.
    fn fill(&mut self) -> io::Result<()> {
        loop {
            match self.state {
                State::Header => {
                    if self.is_due() {
                        self.note(Start::Member);
                    }
                    self.packed += Header::read(&mut self.source)?.length;
                    (self.inflater, self.crc) = (Box::default(), crc32fast::Hasher::new());
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
                    self.source.read_exact(&mut trailer)?;
                    self.packed += TRAILER as u64;
                    let [crc, length] = [0, 4]
                        .map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|byte| trailer[at + byte])));
                    // Source: RFC 1952, 2.3.1: modulo 2^32.
                    if crc != self.crc.clone().finalize()
                        || u64::from(length) != self.member & u64::from(u32::MAX)
                    {
                        return Err(damaged("the checksum of a gzip member differs"));
                    }
                    self.state = State::Between;
                }
                State::Between => {
                    let is_end = self.source.fill_buf()?.is_empty();
                    self.state = if is_end { State::End } else { State::Header };
                }
                State::End => return Ok(()),
            }
        }
    }

    /// Some output, or a step on the way to it: whether there is any.
    fn inflate(&mut self) -> io::Result<bool> {
        if self.end == self.out.len() {
            self.out.copy_within(self.end - WINDOW.., 0);
            (self.start, self.end) = (WINDOW, WINDOW);
        }
        let input = self.source.fill_buf()?;
        if input.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF
            | TINFL_FLAG_STOP_ON_BLOCK_BOUNDARY
            | TINFL_FLAG_HAS_MORE_INPUT;
        let (status, read, written) =
            decompress(&mut self.inflater, input, &mut self.out, self.end, flags);
        let output = &self.out[self.end..self.end + written];
        self.crc.update(output);
        let is_known = self.probe.as_mut().is_some_and(|it| it.add(&input[..read], output));
        self.source.consume(read);
        self.packed += read as u64;
        self.end += written;
        self.member += written as u64;
        self.unpacked += written as u64;
        if is_known || status == TINFLStatus::Done {
            self.settle();
        }
        if self.failed.is_none() && self.since().is_some_and(|since| since > SPAN_MAX) {
            self.failed = Some(GzipError::Block);
        }
        match status {
            TINFLStatus::Done => self.state = State::Trailer,
            TINFLStatus::BlockBoundary if self.is_due() && self.failed.is_none() => {
                self.checkpoint();
            }
            TINFLStatus::BlockBoundary
            | TINFLStatus::HasMoreOutput
            | TINFLStatus::NeedsMoreInput => {}
            _ => return Err(damaged("its deflate data is damaged")),
        }
        Ok(written > 0)
    }

    /// Between two blocks: the next span begins here.
    fn checkpoint(&mut self) {
        let Some(state) = self.inflater.block_boundary_state() else { return };
        let have = WINDOW.min(usize::try_from(self.member).unwrap_or(WINDOW));
        let mut window = vec![0; WINDOW].into_boxed_slice();
        window[WINDOW - have..].copy_from_slice(&self.out[self.end - have..self.end]);
        self.note(Start::Block(state.num_bits));
        let (packed, real) = (Vec::new(), Vec::with_capacity(WINDOW));
        self.probe = Some(Probe { state, window, packed, real });
    }

    /// What the last checkpoint needs is known.
    fn settle(&mut self) {
        if let (Some(probe), Some(checkpoint)) = (self.probe.take(), self.checkpoints.last_mut()) {
            checkpoint.window = probe.window();
        }
    }
}

impl<R: BufRead> Read for Indexer<R> {
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

impl Probe {
    /// Takes what was read and what came of it; whether that is enough.
    fn add(&mut self, packed: &[u8], output: &[u8]) -> bool {
        self.packed.extend_from_slice(packed);
        let left = WINDOW - self.real.len();
        self.real.extend_from_slice(&output[..left.min(output.len())]);
        self.real.len() == WINDOW
    }

    /// Each byte of the window is changed in two ways that tell which byte it is. Wherever the output then differs, a
    /// reference led to that byte.
    fn window(&self) -> Window {
        let low = self.inflated(|at| 1 + at % 255);
        let high = self.inflated(|at| 1 + at / 255);
        let mut needed = vec![false; WINDOW];
        for ((real, low), high) in self.real.iter().zip(low).zip(high) {
            if let (low @ 1.., high @ 1..) = (real ^ low, real ^ high) {
                let at = usize::from(low - 1) + 255 * usize::from(high - 1);
                if let Some(needed) = needed.get_mut(at) {
                    *needed = true;
                }
            }
        }
        Window::new(&self.window, &needed)
    }

    /// The output, if the byte `at` of the window were another one.
    fn inflated(&self, change: impl Fn(usize) -> usize) -> Vec<u8> {
        let changed = (0..).zip(&*self.window);
        let changed = changed.map(|(at, byte)| byte ^ u8::try_from(change(at)).unwrap_or(0));
        let mut out: Vec<u8> = changed.collect();
        out.resize(WINDOW + self.real.len(), 0);
        let mut inflater = DecompressorOxide::from_block_boundary_state(&self.state);
        let (mut rest, mut at) = (&self.packed[..], WINDOW);
        let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF | TINFL_FLAG_HAS_MORE_INPUT;
        while at < out.len() {
            let (status, read, written) = decompress(&mut inflater, rest, &mut out, at, flags);
            (rest, at) = (&rest[read..], at + written);
            if status != TINFLStatus::HasMoreOutput {
                break;
            }
        }
        out.drain(..WINDOW);
        out
    }
}
