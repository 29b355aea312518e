//! Inflates deflate data. Source: RFC 1951.
//!
//! The inflater can stop and resume between any two blocks, and records which bytes before a given position are
//! referred to by data after that position. Input and output are buffers of the caller.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "the innermost loop: `ROOM` and `AHEAD` bound each offset, and `fuzz/gzip_span` \
        looks for gaps in these bounds"
)]

use super::WINDOW;
use super::codes::{
    DISTANCE_BITS, DISTANCES_MAX, LENGTH_BITS, LENGTHS, LITERAL_BITS, LITERALS_MAX, Tables,
    WrongCode,
};

/// Bytes that are copied at once in a match.
const CHUNK: usize = 16;

/// Bytes of free output that a step needs: the longest match (RFC 1951, 3.2.5), a chunk after it, and literals before
/// it.
pub(super) const ROOM: usize = 258 + CHUNK + 4;

/// Bytes of input that a step needs unless the input ends: more than the longest header of a block, which has
/// 3 + 14 + 19 × 3 bits and up to 14 bits for each of 316 code lengths.
pub(super) const AHEAD: usize = 1024;

/// Order in which a header lists the lengths of the code for code lengths. Source: RFC 1951, 3.2.7.
const ORDER: [usize; LENGTHS] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// The reason why inflating has paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    /// More input is needed: [`AHEAD`] bytes, or all that remain.
    Input,
    /// Less than [`ROOM`] bytes of output are free.
    Output,
    /// A block has ended, and another one follows.
    Block,
    /// The last block has ended.
    End,
}

/// The reason why data cannot be inflated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InflateError {
    /// The data is not deflate data.
    Damaged,
    /// The data ends early.
    Short,
}

/// The result of a step: bytes read, bytes written, and the reason for the pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InflateStep {
    pub(super) read: usize,
    pub(super) written: usize,
    pub(super) pause: Pause,
}

/// Records which bytes before a position in the output are referred to by data after that position.
#[derive(Debug)]
pub(super) struct Marks<'a> {
    /// The position, or 0 to record nothing.
    pub(super) origin: usize,
    /// Set to 1 for each referenced byte of the window before the position. The other values are not changed.
    pub(super) needed: &'a mut [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    /// In a block that is not compressed, with the number of its remaining bytes.
    Stored(usize),
    /// In a block with codes.
    Codes,
}

/// Inflates one stream of deflate data, step by step.
#[derive(Debug)]
pub(super) struct Inflater {
    state: State,
    is_last: bool,
    /// The unread bits of the last byte that was read, lowest first.
    bits: u8,
    /// Number of those bits: 0 to 7.
    count: u8,
    tables: Box<Tables>,
}

impl From<WrongCode> for InflateError {
    fn from(_: WrongCode) -> Self {
        Self::Damaged
    }
}

impl Default for Inflater {
    /// Creates an inflater at the beginning of a stream.
    fn default() -> Self {
        let tables = Box::default();
        Self { state: State::Header, is_last: false, bits: 0, count: 0, tables }
    }
}

impl Inflater {
    /// Moves to a place between two blocks, where `count` high bits of `byte` are unread.
    pub(super) fn begin(&mut self, count: u8, byte: u8) {
        self.count = count.min(7);
        self.bits = if self.count == 0 { 0 } else { byte >> (8 - self.count) };
        (self.state, self.is_last) = (State::Header, false);
    }

    /// Returns the number of unread bits of the last byte that was read: 0 to 7.
    pub(super) const fn bits_left(&self) -> u8 {
        self.count
    }

    /// Inflates the next `input` and writes the output at `at`. References may refer to the bytes before `at`. Bytes
    /// after the new output may be overwritten. `is_all` states that no input follows.
    pub(super) fn step(
        &mut self,
        input: &[u8],
        is_all: bool,
        out: &mut [u8],
        at: usize,
        marks: &mut Marks<'_>,
    ) -> Result<InflateStep, InflateError> {
        let (bits, count) = (u64::from(self.bits), u32::from(self.count));
        let mut bits = Bits { input, at: 0, bits, count };
        let mut end = at;
        let pause = self.inflate(&mut bits, is_all, out, &mut end, marks);
        // If zeros beyond the end of the input were used, they may have caused any other error.
        if bits.is_beyond() {
            return Err(InflateError::Short);
        }
        let pause = pause?;
        bits.give_back();
        [self.bits, ..] = bits.bits.to_le_bytes();
        [self.count, ..] = bits.count.to_le_bytes();
        Ok(InflateStep { read: bits.at, written: end - at, pause })
    }

    fn inflate(
        &mut self,
        bits: &mut Bits<'_>,
        is_all: bool,
        out: &mut [u8],
        end: &mut usize,
        marks: &mut Marks<'_>,
    ) -> Result<Pause, InflateError> {
        if self.state == State::Header {
            if !is_all && bits.input.len() < AHEAD {
                return Ok(Pause::Input);
            }
            self.header(bits)?;
        }
        match self.state {
            State::Stored(left) => self.stored(left, bits, is_all, out, end),
            State::Header | State::Codes => self.codes(bits, is_all, out, end, marks),
        }
    }

    fn ended(&mut self) -> Pause {
        self.state = State::Header;
        if self.is_last { Pause::End } else { Pause::Block }
    }

    fn header(&mut self, bits: &mut Bits<'_>) -> Result<(), InflateError> {
        bits.refill();
        self.is_last = bits.take(1) == 1;
        match bits.take(2) {
            0 => {
                bits.take(bits.count % 8);
                bits.refill();
                let [length, check] = [bits.take(16), bits.take(16)];
                if length ^ check != 0xffff {
                    return Err(InflateError::Damaged);
                }
                self.state = State::Stored(length);
            }
            1 => {
                self.tables.set_fixed()?;
                self.state = State::Codes;
            }
            2 => {
                self.codes_of_header(bits)?;
                self.state = State::Codes;
            }
            _ => return Err(InflateError::Damaged),
        }
        Ok(())
    }

    /// Reads the codes of a block with dynamic codes. Source: RFC 1951, 3.2.7.
    fn codes_of_header(&mut self, bits: &mut Bits<'_>) -> Result<(), InflateError> {
        let [literals, distances] = [bits.take(5) + 257, bits.take(5) + 1];
        if literals > LITERALS_MAX || distances > DISTANCES_MAX {
            return Err(InflateError::Damaged);
        }
        let mut lengths = [0; LENGTHS];
        let count = bits.take(4) + 4;
        for at in ORDER.into_iter().take(count) {
            bits.refill();
            [lengths[at], ..] = bits.take(3).to_le_bytes();
        }
        self.tables.set_lengths(&lengths)?;
        let mut lengths = [0; LITERALS_MAX + DISTANCES_MAX];
        let all = &mut lengths[..literals + distances];
        let mut at = 0;
        while at < all.len() {
            bits.refill();
            let entry = self.tables.lengths.first(bits.bits, LENGTH_BITS);
            bits.drop(entry.used());
            let (length, times) = match entry.value() {
                16 => {
                    let before = at.checked_sub(1).ok_or(InflateError::Damaged)?;
                    (all[before], 3 + bits.take(2))
                }
                17 => (0, 3 + bits.take(3)),
                18 => (0, 11 + bits.take(7)),
                length => (length.to_le_bytes()[0], 1),
            };
            all.get_mut(at..at + times).ok_or(InflateError::Damaged)?.fill(length);
            at += times;
        }
        let (literals, distances) = all.split_at(literals);
        Ok(self.tables.set(literals, distances)?)
    }

    fn stored(
        &mut self,
        mut left: usize,
        bits: &mut Bits<'_>,
        is_all: bool,
        out: &mut [u8],
        end: &mut usize,
    ) -> Result<Pause, InflateError> {
        bits.give_back();
        let from = bits.input.get(bits.at..).ok_or(InflateError::Short)?;
        let count = left.min(from.len()).min(out.len() - *end);
        out[*end..*end + count].copy_from_slice(&from[..count]);
        bits.at += count;
        *end += count;
        left -= count;
        self.state = State::Stored(left);
        Ok(match from.len() - count {
            _ if left == 0 => self.ended(),
            0 if is_all => return Err(InflateError::Short),
            0 => Pause::Input,
            _ => Pause::Output,
        })
    }

    fn codes(
        &mut self,
        bits: &mut Bits<'_>,
        is_all: bool,
        out: &mut [u8],
        end: &mut usize,
        marks: &mut Marks<'_>,
    ) -> Result<Pause, InflateError> {
        let mut pause = symbols(&self.tables, bits, out, end, marks)?;
        if pause == Pause::Input && is_all {
            // Less than 8 bytes are left, so zeros are appended. `Bits::is_beyond` detects if they are used.
            let rest = bits.input.get(bits.at..).unwrap_or_default();
            let mut padded = [0; 32];
            padded[..rest.len()].copy_from_slice(rest);
            let mut last = Bits { input: &padded, at: 0, ..*bits };
            let ended = symbols(&self.tables, &mut last, out, end, marks);
            *bits = Bits { input: bits.input, at: bits.at + last.at, ..last };
            pause = ended?;
        }
        Ok(if pause == Pause::Block { self.ended() } else { pause })
    }
}

/// Inflates symbols of a block with codes, to the end of the block or as long as there are 8 bytes of input.
fn symbols(
    tables: &Tables,
    from: &mut Bits<'_>,
    out: &mut [u8],
    end: &mut usize,
    marks: &mut Marks<'_>,
) -> Result<Pause, InflateError> {
    let Tables { literals, distances, .. } = tables;
    // The fields are copied to local variables, because data behind a pointer is not kept in registers.
    let Bits { input, at: mut next, mut bits, mut count } = *from;
    let mut at = *end;
    // At least 56 bits are loaded: a length takes up to 20, a distance 28, and a literal of the first table 11.
    macro_rules! refill {
        () => {
            let Some(word) = input.get(next..).and_then(|it| it.first_chunk()) else {
                break Ok(Pause::Input);
            };
            bits |= u64::from_le_bytes(*word) << (count & 63);
            next += usize::from((63 - (count & 63)).to_le_bytes()[0] >> 3);
            count |= 56;
        };
    }
    macro_rules! used {
        ($entry:ident) => {
            bits >>= $entry.used();
            count = count.wrapping_sub($entry.used());
        };
    }
    macro_rules! literal {
        ($entry:ident) => {
            used!($entry);
            out[at] = $entry.literal();
            at += 1;
        };
    }
    let pause = loop {
        if at + ROOM > out.len() {
            break Ok(Pause::Output);
        }
        refill!();
        let mut entry = literals.first(bits, LITERAL_BITS);
        if entry.is_literal() {
            literal!(entry);
            entry = literals.first(bits, LITERAL_BITS);
            if entry.is_literal() {
                literal!(entry);
                entry = literals.first(bits, LITERAL_BITS);
                if entry.is_literal() {
                    literal!(entry);
                    continue;
                }
            }
            refill!();
        }
        if entry.is_link() {
            entry = literals.second(entry, bits);
            if entry.is_literal() {
                literal!(entry);
                continue;
            }
        }
        if entry.is_special() {
            if !entry.is_end() {
                break Err(InflateError::Damaged);
            }
            used!(entry);
            break Ok(Pause::Block);
        }
        let length = entry.number(bits);
        used!(entry);
        let mut entry = distances.first(bits, DISTANCE_BITS);
        if entry.is_link() {
            entry = distances.second(entry, bits);
        }
        if entry.is_special() {
            break Err(InflateError::Damaged);
        }
        let distance = entry.number(bits);
        used!(entry);
        let Some(from) = at.checked_sub(distance) else { break Err(InflateError::Damaged) };
        if from < marks.origin {
            marks.mark(from, length);
        }
        copy(out, from, at, length);
        at += length;
    };
    (*from, *end) = (Bits { input, at: next, bits, count }, at);
    pause
}

/// Copies `length` bytes, whose source may overlap the output, and overwrites up to [`CHUNK`] bytes after them.
#[inline(always)]
fn copy(out: &mut [u8], from: usize, to: usize, length: usize) {
    let distance = to - from;
    let out = &mut out[from..to + length + CHUNK];
    if distance >= CHUNK {
        let mut at = 0;
        while at < length {
            let (before, behind) = out.split_at_mut(at + distance);
            if let (Some(chunk), Some(into)) =
                (before[at..].first_chunk::<CHUNK>(), behind.first_chunk_mut())
            {
                *into = *chunk;
            }
            at += CHUNK;
        }
    } else if distance == 1 {
        let byte = out[0];
        out[1..=length].fill(byte);
    } else {
        for at in 0..length {
            out[at + distance] = out[at];
        }
    }
}

impl Marks<'_> {
    /// Records a reference to `length` bytes at `from`.
    #[cold]
    fn mark(&mut self, from: usize, length: usize) {
        let start = (from + WINDOW).saturating_sub(self.origin);
        let end = WINDOW.min(start + length);
        if let Some(needed) = self.needed.get_mut(start..end) {
            needed.fill(1);
        }
    }
}

/// Input that is read bit by bit. Zeros follow its end; [`Bits::is_beyond`] detects their use.
#[derive(Clone, Copy)]
struct Bits<'a> {
    input: &'a [u8],
    /// Index of the next byte of `input` to load.
    at: usize,
    /// Loaded bits, lowest first. The bits above the first `count` are either those of the input or zero.
    bits: u64,
    count: u32,
}

impl Bits<'_> {
    /// Loads bits until at least 56 are available.
    fn refill(&mut self) {
        while self.count < 56 {
            let byte = self.input.get(self.at).copied().unwrap_or(0);
            self.bits |= u64::from(byte) << (self.count & 63);
            self.at += 1;
            self.count += 8;
        }
    }

    fn drop(&mut self, count: u32) {
        self.bits >>= count & 63;
        self.count = self.count.wrapping_sub(count);
    }

    /// Returns the next `count` bits, at most 16, as a number.
    fn take(&mut self, count: u32) -> usize {
        let bits = self.bits & ((1 << (count & 63)) - 1);
        self.drop(count);
        usize::try_from(bits).unwrap_or(0)
    }

    /// Returns whole unused bytes to the input.
    fn give_back(&mut self) {
        self.at -= usize::from((self.count >> 3).to_le_bytes()[0]);
        self.count &= 7;
        self.bits &= (1 << self.count) - 1;
    }

    /// Whether more bits were used than the input has.
    fn is_beyond(&self) -> bool {
        let beyond = self.at.saturating_sub(self.input.len());
        beyond > usize::from((self.count >> 3).to_le_bytes()[0])
    }
}

#[cfg(test)]
mod tests;
