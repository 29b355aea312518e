//! Parses the maps of sparse files, which state the positions of their data.
#![warn(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::indexing_slicing)]

use super::Segment;
use super::error::{Limit, TarCorruption};

/// Maximum number of data regions in a sparse file. Their map takes 1 MiB of memory.
pub const SPARSE_REGIONS_MAX: usize = 65536;

/// The regions of a sparse file in the order of the map, as pairs of offset and length.
#[derive(Debug, Default)]
pub(super) struct Map {
    numbers: Vec<u64>,
}

impl Map {
    pub(super) fn clear(&mut self) {
        self.numbers.clear();
    }

    /// Returns the number of complete regions, and whether another region has only its offset.
    pub(super) const fn regions(&self) -> (usize, bool) {
        (self.numbers.len() >> 1, self.numbers.len() & 1 == 1)
    }

    pub(super) fn push(&mut self, number: u64) -> Result<(), Limit> {
        let (regions, _) = self.regions();
        if regions >= SPARSE_REGIONS_MAX {
            return Err(Limit::SparseRegions(super::wide(regions).saturating_add(1)));
        }
        self.numbers.push(number);
        Ok(())
    }

    /// Appends the segments of a file of `size` bytes, of which `stored` bytes are in the tar. Regions must be
    /// ascending without overlap, as every writer makes them, and their lengths must add up to `stored`.
    pub(super) fn segments(
        &self,
        size: u64,
        stored: u64,
        segments: &mut Vec<Segment>,
    ) -> Result<(), TarCorruption> {
        let wrong = |reason, value, bound| Err(TarCorruption::SparseMap { reason, value, bound });
        let mut end: u64 = 0;
        let mut sum: u64 = 0;
        let (pairs, odd) = self.numbers.as_chunks::<2>();
        if let [number] = odd {
            return wrong("has an offset without a length", *number, super::wide(pairs.len()));
        }
        for &[offset, length] in pairs {
            if offset < end {
                return wrong("has a region that begins before the previous one ends", offset, end);
            }
            end = match offset.checked_add(length) {
                Some(end) if end <= size => end,
                _ => return wrong("has data after the end of the file", offset, size),
            };
            sum = sum.saturating_add(length);
            // GNU tar marks the end of a file that ends in a hole with an empty region.
            if length > 0 {
                segments.push(Segment { offset, length });
            }
        }
        if sum != stored {
            return wrong("has regions that do not add up to the data", sum, stored);
        }
        Ok(())
    }
}

/// Parses the map at the start of the data in GNU's version 1.0: decimal numbers, each on a separate line: the number
/// of regions, and then the offset and the length of each region. Zeros fill the rest of the block.
#[derive(Debug, Default)]
pub(super) struct TextMap {
    count: Option<u64>,
    number: Option<u64>,
}

impl TextMap {
    /// Parses a block of the map, and returns whether it was the last.
    pub(super) fn block(&mut self, block: &[u8], map: &mut Map) -> Result<bool, TextMapError> {
        for &byte in block {
            if let Some(digit) = byte.checked_sub(b'0').filter(|&digit| digit < 10) {
                let number = self.number.unwrap_or(0);
                self.number = number
                    .checked_mul(10)
                    .and_then(|number| number.checked_add(u64::from(digit)))
                    .map(Some)
                    .ok_or_else(|| text_error(map, number))?;
                continue;
            }
            let number = self
                .number
                .take()
                .filter(|_| byte == b'\n')
                .ok_or_else(|| text_error(map, byte.into()))?;
            match self.count {
                None if number > super::wide(SPARSE_REGIONS_MAX) => {
                    return Err(TextMapError::Limit(Limit::SparseRegions(number)));
                }
                None => self.count = Some(number),
                Some(_) => map.push(number).map_err(TextMapError::Limit)?,
            }
            if self.count.is_some_and(|count| (super::narrow(count), false) == map.regions()) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum TextMapError {
    Limit(Limit),
    Corrupt(TarCorruption),
}

fn text_error(map: &Map, value: u64) -> TextMapError {
    let (regions, _) = map.regions();
    let reason = "has a value that is not a number, after this many regions";
    TextMapError::Corrupt(TarCorruption::SparseMap { reason, value, bound: super::wide(regions) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(numbers: &[u64]) -> Map {
        let mut map = Map::default();
        for &number in numbers {
            map.push(number).unwrap();
        }
        map
    }

    #[track_caller]
    fn check(numbers: &[u64], size: u64, stored: u64, expected: &[(u64, u64)]) {
        let mut segments = Vec::new();
        map(numbers).segments(size, stored, &mut segments).unwrap();
        let found: Vec<_> =
            segments.iter().map(|segment| (segment.offset, segment.length)).collect();
        assert_eq!(found, expected);
    }

    #[track_caller]
    fn check_refused(numbers: &[u64], size: u64, stored: u64, expected: &str) {
        let error = map(numbers).segments(size, stored, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn segments() {
        check(&[], 10, 0, &[]);
        check(&[0, 0], 0, 0, &[]);
        check(&[0, 4, 8, 2], 10, 6, &[(0, 4), (8, 2)]);
        check(&[4, 2, 10, 0], 10, 2, &[(4, 2)]);
        check(&[0, 2, 2, 2], 10, 4, &[(0, 2), (2, 2)]);
        let most = i64::MAX.cast_unsigned();
        check(&[most - 1, 1], most, 1, &[(most - 1, 1)]);
    }

    #[test]
    fn refused_segments() {
        check_refused(&[0, 4, 3, 2], 10, 6, "before the previous one ends: 3 and 4");
        check_refused(&[4, 2, 0, 2], 10, 4, "before the previous one ends: 0 and 6");
        check_refused(&[8, 3], 10, 3, "after the end of the file: 8 and 10");
        check_refused(&[u64::MAX, 3], 10, 3, "after the end");
        check_refused(&[0, 4], 10, 5, "regions that do not add up to the data: 4 and 5");
        check_refused(&[0, 4, 5], 10, 4, "without a length: 5");
    }

    #[track_caller]
    fn check_text(text: &str, expected: Result<&[u64], &str>) {
        let mut found = Map::default();
        let mut reader = TextMap::default();
        // Parses one byte at a time, because the rest of a block after the last number is ignored.
        let mut result = Ok(false);
        for byte in text.bytes() {
            result = reader.block(&[byte], &mut found);
            if result != Ok(false) {
                break;
            }
        }
        match (result, expected) {
            (Ok(true), Ok(numbers)) => assert_eq!(found.numbers, numbers, "{text}"),
            (Ok(false), Err("incomplete")) => {}
            (Err(TextMapError::Limit(error)), Err(message)) => {
                assert!(error.to_string().contains(message), "{error}");
            }
            (Err(TextMapError::Corrupt(error)), Err(message)) => {
                assert!(error.to_string().contains(message), "{error}");
            }
            (result, _) => panic!("{text}: {result:?}"),
        }
    }

    #[test]
    fn text_maps() {
        check_text("0\n", Ok(&[]));
        check_text("2\n0\n512\n1024\n7\n\0\0", Ok(&[0, 512, 1024, 7]));
        check_text("1\n0\n", Err("incomplete"));
        check_text("1\n0\n\0", Err("a value that is not a number, after this many regions: 0"));
        check_text("\n", Err("not a number"));
        check_text("1\n-1\n", Err("not a number"));
        check_text("99999999999999999999\n", Err("not a number"));
        check_text("65537\n", Err("65537 regions, more than 65536"));
    }
}
