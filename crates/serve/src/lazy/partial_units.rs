//! Parts of units that fetched spans contained, until the rest of the unit is fetched.
//!
//! Spans begin in the middle of units. So a request for some spans also returns the end of the unit before these
//! spans, and the beginning of the unit behind them. If these parts are kept for a while, the next request need not
//! fetch a span again.

use std::collections::VecDeque;

/// Largest number of remembered units, each with less than 64 KiB: the units at both edges of the prefetch requests
/// that run at the same time, and of the groups of requests that a completion with peers has not finished.
const SEAMS_MAX: usize = 128;

/// A side of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// From the first byte on.
    Beginning,
    /// Up to the last byte.
    End,
}

/// Unverified parts of units, the latest first.
#[derive(Debug, Default)]
pub(super) struct Seams(VecDeque<Seam>);

#[derive(Debug, Default)]
struct Seam {
    unit: usize,
    beginning: Vec<u8>,
    end: Vec<u8>,
}

impl Seam {
    const fn side(&mut self, side: Side) -> &mut Vec<u8> {
        match side {
            Side::Beginning => &mut self.beginning,
            Side::End => &mut self.end,
        }
    }
}

impl Seams {
    /// Keeps a part of a unit that has `length` bytes. If the rest of the unit is known, returns the whole unit.
    pub(super) fn keep(
        &mut self,
        unit: usize,
        side: Side,
        bytes: &[u8],
        length: usize,
    ) -> Option<Vec<u8>> {
        let mut seam = self.remove(unit).unwrap_or_else(|| Seam { unit, ..Seam::default() });
        let part = seam.side(side);
        if part.len() < bytes.len() {
            *part = bytes.to_vec();
        }
        let missing = length.checked_sub(seam.beginning.len())?;
        if let Some(twice) = seam.end.len().checked_sub(missing) {
            let mut whole = seam.beginning;
            whole.extend_from_slice(&seam.end[twice..]);
            return Some(whole);
        }
        self.0.truncate(SEAMS_MAX - 1);
        self.0.push_front(seam);
        None
    }

    /// Takes a part of a unit, which is empty if unknown.
    pub(super) fn take(&mut self, unit: usize, side: Side) -> Vec<u8> {
        let found = self.0.iter_mut().find(|it| it.unit == unit);
        found.map(|it| std::mem::take(it.side(side))).unwrap_or_default()
    }

    pub(super) fn forget(&mut self, unit: usize) {
        self.remove(unit);
    }

    fn remove(&mut self, unit: usize) -> Option<Seam> {
        self.0.iter().position(|it| it.unit == unit).and_then(|at| self.0.remove(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_parts_make_a_unit_in_either_order() {
        let mut seams = Seams::default();
        assert_eq!(seams.keep(7, Side::Beginning, b"abc", 5), None);
        assert_eq!(seams.keep(8, Side::End, b"yz", 5), None);
        assert_eq!(seams.keep(7, Side::End, b"de", 5).as_deref(), Some(&b"abcde"[..]));
        assert_eq!(seams.keep(8, Side::Beginning, b"vwx", 5).as_deref(), Some(&b"vwxyz"[..]));
        // Both units were removed.
        assert!(seams.0.is_empty());
        // Bytes that both parts contain occur once in the result.
        assert_eq!(seams.keep(9, Side::Beginning, b"abcd", 5), None);
        assert_eq!(seams.keep(9, Side::End, b"cde", 5).as_deref(), Some(&b"abcde"[..]));
        // A part with all bytes needs no other.
        assert_eq!(seams.keep(9, Side::End, b"abcde", 5).as_deref(), Some(&b"abcde"[..]));
    }

    #[test]
    fn the_longer_part_stays() {
        let mut seams = Seams::default();
        assert_eq!(seams.keep(1, Side::Beginning, b"ab", 9), None);
        assert_eq!(seams.keep(1, Side::Beginning, b"abcd", 9), None);
        assert_eq!(seams.keep(1, Side::Beginning, b"a", 9), None);
        assert_eq!(seams.take(1, Side::End), b"");
        assert_eq!(seams.take(1, Side::Beginning), b"abcd");
        assert_eq!(seams.take(1, Side::Beginning), b"");
    }

    #[test]
    fn no_more_than_that_is_kept() {
        let mut seams = Seams::default();
        for unit in 0..SEAMS_MAX + 3 {
            assert_eq!(seams.keep(unit, Side::End, b"z", 5), None);
        }
        assert_eq!(seams.0.len(), SEAMS_MAX);
        assert_eq!(seams.take(2, Side::End), b"");
        assert_eq!(seams.take(3, Side::End), b"z");
        seams.forget(4);
        assert_eq!(seams.take(4, Side::End), b"");
    }
}
