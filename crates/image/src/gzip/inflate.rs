//! Inflates deflate data. Source: RFC 1951.
//!
//! It can stop between any two blocks and go on from there, and says which bytes before a place are referred to behind it.
//! Input and output are the caller's memory.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "the innermost loop: `ROOM` and `AHEAD` bound each place, and `fuzz/gzip_span` looks for what they miss"
)]

use super::WINDOW;
use super::codes::{
    DISTANCE_BITS, DISTANCES_MAX, LENGTH_BITS, LENGTHS, LITERAL_BITS, LITERALS_MAX, Tables,
    WrongCode,
};

/// Bytes that a match is copied by.
const CHUNK: usize = 16;

/// Room that there has to be for output: for the longest match (RFC 1951, 3.2.5), a chunk behind it, and literals before.
pub(super) const ROOM: usize = 258 + CHUNK + 4;

/// Input that has to be there, if it is not all: more than the longest header of a block has. That is 3 + 14 + 19 × 3 bits,
/// and up to 14 bits for each of 316 lengths of codes.
pub(super) const AHEAD: usize = 1024;

/// In which order a header has the lengths of the code for lengths. Source: RFC 1951, 3.2.7.
const ORDER: [usize; LENGTHS] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// Why inflating has paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    /// More input is needed: [`AHEAD`] bytes are enough, or all that there is.
    Input,
    /// There is less than [`ROOM`] left.
    Output,
    /// A block has ended, and another one follows.
    Block,
    /// The last block has ended.
    End,
}

/// Why data cannot be inflated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InflateError {
    /// It is no deflate data.
    Damaged,
    /// It ends early.
    Short,
}

/// What a step has read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InflateStep {
    pub(super) read: usize,
    pub(super) written: usize,
    pub(super) pause: Pause,
}

/// Finds out which bytes before a place in the output are referred to from behind it.
#[derive(Debug)]
pub(super) struct Marks<'a> {
    /// The place. 0 where nothing is looked for.
    pub(super) origin: usize,
    /// 1 for each byte of the window before it that is. The others stay as they are.
    pub(super) needed: &'a mut [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    /// In a block that is not compressed: bytes that are left of it.
    Stored(usize),
    /// In a block with codes.
    Codes,
}

/// Inflates one stream of deflate data, step by step.
#[derive(Debug)]
pub(super) struct Inflater {
    state: State,
    is_last: bool,
    /// The bits of the last byte that are still to be read, from the lowest up.
    bits: u8,
    /// How many they are: 0 to 7.
    count: u8,
    tables: Box<Tables>,
}

impl From<WrongCode> for InflateError {
    fn from(_: WrongCode) -> Self {
        Self::Damaged
    }
}

impl Default for Inflater {
    /// At the beginning of a stream.
    fn default() -> Self {
        let tables = Box::default();
        Self { state: State::Header, is_last: false, bits: 0, count: 0, tables }
    }
}

impl Inflater {
    /// Goes between two blocks, where this many high bits of a byte are still to be read.
    pub(super) fn begin(&mut self, count: u8, byte: u8) {
        self.count = count.min(7);
        self.bits = if self.count == 0 { 0 } else { byte >> (8 - self.count) };
        (self.state, self.is_last) = (State::Header, false);
    }

    /// How many bits of the last byte that was read are still to be read: 0 to 7.
    pub(super) const fn bits_left(&self) -> u8 {
        self.count
    }

    /// Goes on with `input`, and writes from `at` on. What is before `at` can be referred to, and what is behind the new
    /// output may be overwritten. `is_all` says that no input comes behind this.
    pub(super) fn step(
        &mut self,
        (input, is_all): (&[u8], bool),
        out: &mut [u8],
        at: usize,
        marks: &mut Marks<'_>,
    ) -> Result<InflateStep, InflateError> {
        let (bits, count) = (u64::from(self.bits), u32::from(self.count));
        let mut bits = Bits { input, at: 0, bits, count };
        let mut end = at;
        let pause = self.inflate(&mut bits, is_all, out, &mut end, marks);
        // Where zeros were read that are not there, nothing else is to blame.
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

    /// Source: RFC 1951, 3.2.7.
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
            // Less than 8 bytes are left. Zeros are put behind them, and seen if they are used.
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

/// Inflates what is in a block with codes, to its end or as long as there are 8 bytes of input.
fn symbols(
    tables: &Tables,
    from: &mut Bits<'_>,
    out: &mut [u8],
    end: &mut usize,
    marks: &mut Marks<'_>,
) -> Result<Pause, InflateError> {
    let Tables { literals, distances, .. } = tables;
    // What is pointed at does not stay in registers.
    let Bits { input, at: mut next, mut bits, mut count } = *from;
    let mut at = *end;
    // At least 56 bits: a length has 20, a distance 28, and a literal's code that is found at once 11.
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

/// Repeats `length` bytes, which may be there only as they are written, and up to [`CHUNK`] bytes of whatever behind them.
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
    /// A reference leads to so many bytes from there on.
    #[cold]
    fn mark(&mut self, from: usize, length: usize) {
        let start = (from + WINDOW).saturating_sub(self.origin);
        let end = WINDOW.min(start + length);
        if let Some(needed) = self.needed.get_mut(start..end) {
            needed.fill(1);
        }
    }
}

/// Input, bit by bit. Zeros come behind its end, which [`Bits::is_beyond`] tells.
#[derive(Clone, Copy)]
struct Bits<'a> {
    input: &'a [u8],
    /// The next byte of it.
    at: usize,
    /// From the lowest up. What is above `count` of them is as in the input, or zero.
    bits: u64,
    count: u32,
}

impl Bits<'_> {
    /// There are at least 56 bits from here on.
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

    /// The next bits, 16 at the most, as a number.
    fn take(&mut self, count: u32) -> usize {
        let bits = self.bits & ((1 << (count & 63)) - 1);
        self.drop(count);
        usize::try_from(bits).unwrap_or(0)
    }

    /// Gives back whole bytes that were not used.
    fn give_back(&mut self) {
        self.at -= usize::from((self.count >> 3).to_le_bytes()[0]);
        self.count &= 7;
        self.bits &= (1 << self.count) - 1;
    }

    /// Whether more bits were used than there are.
    fn is_beyond(&self) -> bool {
        let beyond = self.at.saturating_sub(self.input.len());
        beyond > usize::from((self.count >> 3).to_le_bytes()[0])
    }
}

#[cfg(test)]
mod tests;
