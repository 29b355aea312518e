//! Parses the header `Range`. Source: RFC 9110, 14.

use std::ops::Range;

/// The part of a body that a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WantedRange {
    /// All bytes.
    Whole,
    /// These bytes.
    Part(Range<u64>),
    /// No bytes of the body are in the range, or there are several ranges.
    Unsatisfiable,
}

impl WantedRange {
    /// Parses the value of `Range` for a body of `size` bytes. An invalid value is ignored, as the RFC demands.
    pub(super) fn parse(value: Option<&[u8]>, size: u64) -> Self {
        match Self::parse_part(value, size) {
            Self::Part(part) if part == (0..size) => Self::Whole,
            other => other,
        }
    }

    /// As [`parse`](Self::parse), but a range of all bytes is a part.
    pub(super) fn parse_part(value: Option<&[u8]>, size: u64) -> Self {
        let text = value.and_then(|it| std::str::from_utf8(it).ok());
        let Some(range) = text.and_then(|it| it.trim().strip_prefix("bytes=")) else {
            return Self::Whole;
        };
        // A server may refuse several ranges. Clients then ask for one at a time.
        if range.contains(',') {
            return Self::Unsatisfiable;
        }
        let Some((first, last)) = range.split_once('-') else { return Self::Whole };
        let number = |text: &str| {
            let text = text.trim();
            let is_number = !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
            // A number that is too large is beyond every body.
            is_number.then(|| text.parse().unwrap_or(u64::MAX))
        };
        let part = match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => first..last.saturating_add(1).min(size),
            (Some(first), None) if last.trim().is_empty() => first..size,
            (None, Some(length)) if first.trim().is_empty() => size.saturating_sub(length)..size,
            _ => return Self::Whole,
        };
        match part {
            part if part.start >= part.end => Self::Unsatisfiable,
            part => Self::Part(part),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let part = |start, end| WantedRange::Part(start..end);
        let (whole, none) = (WantedRange::Whole, WantedRange::Unsatisfiable);
        // The first rows are from RFC 9110, 14.1.2, for a body of 10000 bytes.
        for (text, expect) in [
            ("bytes=0-499", part(0, 500)),
            ("bytes=500-999", part(500, 1000)),
            ("bytes=-500", part(9500, 10_000)),
            ("bytes=9500-", part(9500, 10_000)),
            ("bytes=0-0", part(0, 1)),
            ("bytes=9999-9999", part(9999, 10_000)),
            ("bytes=9999-10001", part(9999, 10_000)),
            ("bytes=0-", whole.clone()),
            ("bytes=0-9999", whole.clone()),
            ("bytes=0-99999999999999999999999", whole.clone()),
            ("bytes=-10000", whole.clone()),
            ("bytes=-99999999999999999999999", whole.clone()),
            ("bytes=10000-", none.clone()),
            ("bytes=99999999999999999999999-", none.clone()),
            ("bytes=-0", none.clone()),
            ("bytes=0-1,5-6", none.clone()),
            ("bytes=5-4", whole.clone()),
            ("bytes=-", whole.clone()),
            ("bytes=x-4", whole.clone()),
            ("bytes=+1-4", whole.clone()),
            ("bytes=--4", whole.clone()),
            ("items=0-4", whole.clone()),
            ("", whole.clone()),
        ] {
            assert_eq!(WantedRange::parse(Some(text.as_bytes()), 10_000), expect, "{text}");
        }
        assert_eq!(WantedRange::parse(None, 10), whole);
        for (text, expect) in [
            ("bytes=0-9999", part(0, 10_000)),
            ("bytes=0-", part(0, 10_000)),
            ("bytes=1-", part(1, 10_000)),
            ("bytes=10000-", none.clone()),
            ("bytes=-", whole.clone()),
        ] {
            assert_eq!(WantedRange::parse_part(Some(text.as_bytes()), 10_000), expect, "{text}");
        }
        assert_eq!(WantedRange::parse_part(None, 10), whole);
        assert_eq!(WantedRange::parse(Some(b"bytes=\xff-"), 10), whole);
        assert_eq!(WantedRange::parse(Some(b"bytes=0-"), 0), none);
        assert_eq!(WantedRange::parse(Some(b"bytes=0-0"), 0), none);
    }
}
