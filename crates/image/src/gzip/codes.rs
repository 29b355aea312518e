//! The Huffman codes of a deflate block, as tables that are looked up by the next bits. Source: RFC 1951, 3.2.2 to 3.2.6.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::indexing_slicing,
    reason = "lengths are at most 15 and symbols at most 320, and each table has room for all codes of such; u32 fits usize"
)]

/// Bits that the first look into the table of literals and lengths takes.
pub(super) const LITERAL_BITS: u32 = 11;
/// The same for distances.
pub(super) const DISTANCE_BITS: u32 = 8;
/// The lengths of codes have up to 7 bits themselves.
pub(super) const LENGTH_BITS: u32 = 7;

/// The longest code.
const BITS_MAX: usize = 15;

/// Entries of tables with these first bits, the longest code and all symbols: at most 2342 for 288 symbols, and 402 for 32.
/// Source: zlib's `examples/enough.c`.
const LITERAL_ENTRIES: usize = 2342;
const DISTANCE_ENTRIES: usize = 402;
const LENGTH_ENTRIES: usize = 1 << LENGTH_BITS;

/// The symbols of each code.
pub(super) const LITERALS: usize = 288;
pub(super) const DISTANCES: usize = 32;
pub(super) const LENGTHS: usize = 19;

/// Literals and lengths that a header may give codes to. Source: RFC 1951, 3.2.7.
pub(super) const LITERALS_MAX: usize = 286;
/// The same for distances.
pub(super) const DISTANCES_MAX: usize = 30;

/// The symbol that ends a block.
const END_OF_BLOCK: usize = 256;

/// What some bits stand for. From the lowest bit up:
///
/// | bits | |
/// |---|---|
/// | 6 | how many bits are used up, those of a number behind the code among them |
/// | 2 | zeros |
/// | 4 | how many of them are the code's. In a link: how many bits tell the entry |
/// | 4 | one of the flags below, or none |
/// | 16 | a literal, the least length or distance, or where a link leads |
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

    /// With a code of so many bits.
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

    /// Whether it is neither a length nor a distance.
    #[inline(always)]
    pub(super) const fn is_special(self) -> bool {
        self.0 & (END | INVALID) != 0
    }

    /// The bits that are used up.
    #[inline(always)]
    pub(super) const fn used(self) -> u32 {
        self.0 & 63
    }

    /// The bits of the code, or those that tell a link's entry.
    #[inline(always)]
    pub(super) const fn code(self) -> u32 {
        self.0 >> 8 & 15
    }

    #[inline(always)]
    pub(super) const fn literal(self) -> u8 {
        self.0.to_le_bytes()[2]
    }

    /// What it is without the bits behind the code.
    #[inline(always)]
    pub(super) const fn value(self) -> usize {
        (self.0 >> 16) as usize
    }

    /// The length or distance, where `bits` begin with the code.
    #[inline(always)]
    pub(super) fn number(self, bits: u64) -> usize {
        let extra = (bits & ((1 << self.used()) - 1)) >> self.code();
        self.value() + usize::try_from(extra).unwrap_or(0)
    }
}

/// A table of so many entries, the first `1 << BITS` of which are looked up first.
#[derive(Debug)]
pub(super) struct Table<const ENTRIES: usize>([CodeEntry; ENTRIES]);

/// The tables of a block.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) literals: Table<LITERAL_ENTRIES>,
    pub(super) distances: Table<DISTANCE_ENTRIES>,
    pub(super) lengths: Table<LENGTH_ENTRIES>,
    /// Whether the tables have the codes that are the same everywhere.
    is_fixed: bool,
}

/// The lengths of codes are those of no code.
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
    /// The codes of a block that brings its own.
    pub(super) fn set(&mut self, literals: &[u8], distances: &[u8]) -> Result<(), WrongCode> {
        self.is_fixed = false;
        if literals.get(END_OF_BLOCK).is_none_or(|length| *length == 0) {
            return Err(WrongCode);
        }
        self.literals.set(LITERAL_BITS, literals, literal_entry)?;
        self.distances.set(DISTANCE_BITS, distances, distance_entry)
    }

    /// The codes that are the same everywhere.
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

    /// The code for lengths of codes.
    pub(super) fn set_lengths(&mut self, lengths: &[u8; LENGTHS]) -> Result<(), WrongCode> {
        let entry = |symbol: usize| CodeEntry::symbol(0, u32::try_from(symbol).unwrap_or(0), 0);
        self.lengths.set(LENGTH_BITS, lengths, entry)?;
        // Only a distance may stand alone.
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
    /// The entry for the next bits. `first` is the number of bits that are looked up first.
    #[inline(always)]
    pub(super) fn first(&self, bits: u64, first: u32) -> CodeEntry {
        let at = usize::try_from(bits & ((1 << first) - 1)).unwrap_or(0);
        self.0[at]
    }

    /// The entry that a link leads to.
    #[inline]
    pub(super) fn second(&self, link: CodeEntry, bits: u64) -> CodeEntry {
        let within = bits >> (link.used() & 63) & ((1 << link.code()) - 1);
        let at = link.value() + usize::try_from(within).unwrap_or(0);
        self.0.get(at).copied().unwrap_or(CodeEntry::INVALID)
    }

    /// Makes the table of the code whose symbols have codes of these lengths; 0 for no code. A code has to be complete, or
    /// of one bit alone, as with zlib.
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
        // The codes that are left, of each length.
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
        // Symbols in the order of their codes.
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
        // The lowest bit of a code comes last: they are kept turned around.
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
                        // As many bits as fill up with the codes that are left.
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
