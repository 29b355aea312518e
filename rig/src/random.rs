//! Random numbers for generated inputs: the same seed always gives the same input on every machine.

use std::ops::RangeInclusive;

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    pub fn number(&mut self, range: RangeInclusive<u64>) -> u64 {
        let width = (range.end() - range.start()).wrapping_add(1);
        let drawn = if width == 0 { self.draw() } else { self.draw() % width };
        range.start() + drawn
    }

    pub fn size(&mut self, range: RangeInclusive<usize>) -> usize {
        let (low, high) = (*range.start(), *range.end());
        low + usize::try_from(self.number(0..=u64::try_from(high - low).expect("64 bits")))
            .expect("at most high - low")
    }

    pub fn byte(&mut self) -> u8 {
        self.draw().to_le_bytes()[7]
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }

    pub fn percent(&mut self, percent: u64) -> bool {
        self.number(0..=99) < percent
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.size(0..=from.len() - 1)]
    }

    /// Returns a number of up to `bits` bits, in which each length is equally likely.
    pub fn magnitude(&mut self, bits: u64) -> u64 {
        let bits = self.number(0..=bits);
        if bits == 0 { 0 } else { self.draw() >> (64 - bits) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_reference_values() {
        // From the reference C code (Vigna, splitmix64.c) with the state 1234567.
        let mut random = Random::new(1_234_567);
        let values = [random.draw(), random.draw(), random.draw()];
        assert_eq!(values, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }
}
