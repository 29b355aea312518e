//! Parses durations in Go's format: `1m30s`, `500ms`, `1.5h`. Source: Go's `time.ParseDuration`.

use std::time::Duration;

/// Nanoseconds of each unit. A longer name precedes one that is its prefix.
const UNITS: [(&str, f64); 8] = [
    ("ns", 1.0),
    ("us", 1e3),
    ("µs", 1e3),
    ("μs", 1e3),
    ("ms", 1e6),
    ("s", 1e9),
    ("m", 60e9),
    ("h", 3600e9),
];

/// Parses a duration. `None` if it is invalid or negative.
pub(super) fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut rest, mut sum) = (text, Duration::ZERO);
    loop {
        let end = rest.find(|it: char| !it.is_ascii_digit() && it != '.')?;
        let (number, after) = rest.split_at(end);
        let (unit, nanoseconds) = UNITS.into_iter().find(|(unit, _)| after.starts_with(unit))?;
        let number: f64 = number.parse().ok()?;
        sum = sum.checked_add(Duration::try_from_secs_f64(number * nanoseconds / 1e9).ok()?)?;
        rest = &after[unit.len()..];
        if rest.is_empty() {
            return Some(sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, expect) in [
            ("1s", Some(1000)),
            ("500ms", Some(500)),
            ("1m30s", Some(90_000)),
            (".5h", Some(1_800_000)),
            ("1.5s", Some(1500)),
            ("0", Some(0)),
            ("2000us", Some(2)),
            ("3000µs", Some(3)),
            ("1h1m1s1ms", Some(3_661_001)),
            ("", None),
            ("1", None),
            ("s", None),
            ("-1s", None),
            ("1..2s", None),
            ("1 s", None),
            ("1d", None),
            ("99999999999999999999h", None),
        ] {
            assert_eq!(parse(text), expect.map(Duration::from_millis), "{text}");
        }
    }
}
