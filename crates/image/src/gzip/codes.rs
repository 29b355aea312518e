//! The Huffman codes of a deflate block, as tables that are indexed by the next bits. Source: RFC 1951, 3.2.2 to
//! 3.2.6.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::indexing_slicing,
    reason = "lengths are at most 15 and symbols at most 320, and each table has room for all \
        codes of these; u32 fits usize"
)]

/// Number of bits that index the first table of literals and lengths.
pub(super) const LITERAL_BITS: u32 = 11;
/// Number of bits that index the first table of distances.
pub(super) const DISTANCE_BITS: u32 = 8;
/// Number of bits that index the table of code lengths, whose codes have up to 7 bits.
pub(super) const LENGTH_BITS: u32 = 7;

/// Length of the longest code in bits.
const BITS_MAX: usize = 15;

/// Maximum number of entries in a table for all symbols, given the number of index bits and the length of the longest
/// code: 2342 for 288 symbols, and 402 for 32 symbols. Source: zlib's `examples/enough.c`.
const LITERAL_ENTRIES: usize = 2342;
const DISTANCE_ENTRIES: usize = 402;
const LENGTH_ENTRIES: usize = 1 << LENGTH_BITS;

/// Number of symbols of each kind of code.
pub(super) const LITERALS: usize = 288;
pub(super) const DISTANCES: usize = 32;
pub(super) const LENGTHS: usize = 19;

/// Maximum number of literals and lengths that a header gives codes to. Source: RFC 1951, 3.2.7.
pub(super) const LITERALS_MAX: usize = 286;
/// Maximum number of distances that a header gives codes to. Source: RFC 1951, 3.2.7.
pub(super) const DISTANCES_MAX: usize = 30;

/// The symbol that ends a block.
const END_OF_BLOCK: usize = 256;

/// An entry of a table: the meaning of the next bits. From the lowest bit up:
///
/// | bits | |
/// |---|---|
/// | 6 | number of bits that the entry consumes, including the extra bits after the code |
/// | 2 | zeros |
/// | 4 | number of those bits that belong to the code; in a link, number of bits that index the second table |
/// | 4 | one of the flags below, or none |
/// | 16 | a literal, the smallest length or distance, or the place of the second table that a link leads to |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CodeEntry(u32);

const LITERAL: u32 = 1 << 12;
const LINK: u32 = 1 << 13;
const END: u32 = 1 << 14;
const INVALID: u32 = 1 << 15;

impl CodeEntry {
    const INVALID: Self = Self(INVALID);

    const fn symbol(flag: u32, value: u32, extra: u32) -> Self {
        Self(value << 16 | flag | extra)
    }

    /// Adds the length of the code, which is `bits` bits.
    const fn coded(self, bits: u32) -> Self {
        Self((self.0 | bits << 8).wrapping_add(bits))
    }

    const fn link(place: u32, bits: u32, first: u32) -> Self {
        Self(place << 16 | LINK | bits << 8 | first)
    }

    #[inline(always)]
    pub(super) const fn is_literal(self) -> bool {
        self.0 & LITERAL != 0
    }

    #[inline(always)]
    pub(super) const fn is_link(self) -> bool {
        self.0 & LINK != 0
    }

    #[inline(always)]
    pub(super) const fn is_end(self) -> bool {
        self.0 & END != 0
    }

    /// Whether the entry is neither a length nor a distance, if it is known to be neither a literal nor a link.
    #[inline(always)]
    pub(super) const fn is_special(self) -> bool {
        self.0 & (END | INVALID) != 0
    }

    /// Returns the number of bits that the entry consumes.
    #[inline(always)]
    pub(super) const fn used(self) -> u32 {
        self.0 & 63
    }

    /// Returns the number of bits of the code, or of those that index a link's second table.
    #[inline(always)]
    pub(super) const fn code(self) -> u32 {
        self.0 >> 8 & 15
    }

    #[inline(always)]
    pub(super) const fn literal(self) -> u8 {
        self.0.to_le_bytes()[2]
    }

    /// Returns the value without the extra bits after the code.
    #[inline(always)]
    pub(super) const fn value(self) -> usize {
        (self.0 >> 16) as usize
    }

    /// Returns the length or the distance. `bits` begin with the code.
    #[inline(always)]
    pub(super) fn number(self, bits: u64) -> usize {
        let extra = (bits & ((1 << self.used()) - 1)) >> self.code();
        self.value() + usize::try_from(extra).unwrap_or(0)
    }
}

/// A table of `ENTRIES` entries: the first table, followed by the second tables that links lead to.
#[derive(Debug)]
pub(super) struct Table<const ENTRIES: usize>([CodeEntry; ENTRIES]);

/// The tables of a block.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) literals: Table<LITERAL_ENTRIES>,
    pub(super) distances: Table<DISTANCE_ENTRIES>,
    pub(super) lengths: Table<LENGTH_ENTRIES>,
    /// Whether the tables hold the fixed codes of RFC 1951, 3.2.6.
    is_fixed: bool,
}

/// An error for code lengths that do not make a valid code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WrongCode;

impl Default for Tables {
    fn default() -> Self {
        Self {
            literals: Table([CodeEntry::INVALID; LITERAL_ENTRIES]),
            distances: Table([CodeEntry::INVALID; DISTANCE_ENTRIES]),
            lengths: Table([CodeEntry::INVALID; LENGTH_ENTRIES]),
            is_fixed: false,
        }
    }
}

impl Tables {
    /// Sets the codes of a block with dynamic codes.
    pub(super) fn set(&mut self, literals: &[u8], distances: &[u8]) -> Result<(), WrongCode> {
        self.is_fixed = false;
        if literals.get(END_OF_BLOCK).is_none_or(|length| *length == 0) {
            return Err(WrongCode);
        }
        self.literals.set(LITERAL_BITS, literals, literal_entry)?;
        self.distances.set(DISTANCE_BITS, distances, distance_entry)
    }

    /// Sets the fixed codes.
    pub(super) fn set_fixed(&mut self) -> Result<(), WrongCode> {
        if self.is_fixed {
            return Ok(());
        }
        let mut literals = [8; LITERALS];
        literals[144..256].fill(9);
        literals[256..280].fill(7);
        self.set(&literals, &[5; DISTANCES])?;
        self.is_fixed = true;
        Ok(())
    }

    /// Sets the code for code lengths.
    pub(super) fn set_lengths(&mut self, lengths: &[u8; LENGTHS]) -> Result<(), WrongCode> {
        let entry = |symbol: usize| CodeEntry::symbol(0, u32::try_from(symbol).unwrap_or(0), 0);
        self.lengths.set(LENGTH_BITS, lengths, entry)?;
        // Unlike the codes for literals and distances, this code must be complete.
        if self.lengths.0.contains(&CodeEntry::INVALID) { Err(WrongCode) } else { Ok(()) }
    }
}

fn literal_entry(symbol: usize) -> CodeEntry {
    let symbol = u32::try_from(symbol).unwrap_or(u32::MAX);
    // Source: RFC 1951, 3.2.5.
    match symbol {
        0..256 => CodeEntry::symbol(LITERAL, symbol, 0),
        256 => CodeEntry::symbol(END, 0, 0),
        257..265 => CodeEntry::symbol(0, symbol - 254, 0),
        265..285 => {
            let (extra, step) = ((symbol - 261) / 4, (symbol - 261) % 4);
            CodeEntry::symbol(0, ((4 + step) << extra) + 3, extra)
        }
        285 => CodeEntry::symbol(0, 258, 0),
        _ => CodeEntry::INVALID,
    }
}

fn distance_entry(symbol: usize) -> CodeEntry {
    let symbol = u32::try_from(symbol).unwrap_or(u32::MAX);
    // Source: RFC 1951, 3.2.5.
    match symbol {
        0..4 => CodeEntry::symbol(0, symbol + 1, 0),
        4..30 => {
            let (extra, step) = ((symbol - 2) / 2, symbol % 2);
            CodeEntry::symbol(0, ((2 + step) << extra) + 1, extra)
        }
        _ => CodeEntry::INVALID,
    }
}

impl<const ENTRIES: usize> Table<ENTRIES> {
    /// Returns the entry for the next bits, `first` of which index the first table.
    #[inline(always)]
    pub(super) fn first(&self, bits: u64, first: u32) -> CodeEntry {
        let at = usize::try_from(bits & ((1 << first) - 1)).unwrap_or(0);
        self.0[at]
    }

    /// Returns the entry of the second table that `link` leads to.
    #[inline]
    pub(super) fn second(&self, link: CodeEntry, bits: u64) -> CodeEntry {
        let within = bits >> (link.used() & 63) & ((1 << link.code()) - 1);
        let at = link.value() + usize::try_from(within).unwrap_or(0);
        self.0.get(at).copied().unwrap_or(CodeEntry::INVALID)
    }

    /// Makes the table of the code in which each symbol has the given code length, or no code if the length is 0. As
    /// with zlib, the code must be complete or consist of a single code of one bit.
    fn set(
        &mut self,
        first: u32,
        lengths: &[u8],
        entry: impl Fn(usize) -> CodeEntry,
    ) -> Result<(), WrongCode> {
        let mut counts = [0_usize; BITS_MAX + 1];
        for length in lengths {
            counts[usize::from(*length).min(BITS_MAX)] += 1;
        }
        counts[0] = 0;
        let longest = counts.iter().rposition(|count| *count > 0).unwrap_or(0);
        // The number of unused codes of each length.
        let mut left = 1_usize;
        for count in &counts[1..] {
            left = (left * 2).checked_sub(*count).ok_or(WrongCode)?;
        }
        if left > 0 {
            if longest > 1 {
                return Err(WrongCode);
            }
            self.0.fill(CodeEntry::INVALID);
        }
        // Sort the symbols by their codes.
        let mut places = [0_usize; BITS_MAX + 2];
        for length in 1..=BITS_MAX {
            places[length + 1] = places[length] + counts[length];
        }
        let mut sorted = [0_u16; LITERALS];
        for (symbol, length) in (0..).zip(lengths) {
            if *length > 0 {
                let place = &mut places[usize::from(*length).min(BITS_MAX)];
                sorted[*place] = symbol;
                *place += 1;
            }
        }
        let first_entries = 1 << first;
        // A code's highest bit comes first in the data, so the tables are indexed by the reversed code.
        let (mut code, mut at) = (0_u32, 0);
        let (mut prefix, mut place, mut free) = (u32::MAX, 0, first_entries);
        for length in (1..).take(longest) {
            let bits = u32::try_from(length).unwrap_or(0);
            for number in 0..counts[length] {
                let symbol = usize::from(sorted[at]);
                at += 1;
                let made = entry(symbol);
                let turned = code.reverse_bits() >> (32 - bits);
                if bits <= first {
                    let step = 1 << bits;
                    let made = made.coded(bits);
                    for entry in self.0[turned as usize..first_entries].iter_mut().step_by(step) {
                        *entry = made;
                    }
                } else {
                    let start = turned & ((1 << first) - 1);
                    if start != prefix {
                        prefix = start;
                        // The number of index bits is chosen such that the remaining codes fill the second table.
                        let mut second = bits - first;
                        let mut room = (1_usize << second).saturating_sub(counts[length] - number);
                        let mut longer = length + 1;
                        while room > 0 && longer <= longest {
                            second += 1;
                            room = (room * 2).saturating_sub(counts[longer]);
                            longer += 1;
                        }
                        place = free;
                        free += 1 << second;
                        let link = u32::try_from(place).unwrap_or(0);
                        self.0[prefix as usize] = CodeEntry::link(link, second, first);
                    }
                    let entries = self.0.get_mut(place..free).ok_or(WrongCode)?;
                    let step = 1 << (bits - first);
                    for entry in entries.iter_mut().skip((turned >> first) as usize).step_by(step) {
                        *entry = made.coded(bits);
                    }
                }
                code += 1;
            }
            code <<= 1;
        }
        Ok(())
    }
}
