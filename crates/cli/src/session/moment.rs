//! Times on the command line, in the forms of docker and podman.

use anyhow::{Context as _, bail};

/// A second, in nanoseconds.
const SECOND: i128 = 1_000_000_000;

/// Units of durations, in nanoseconds, the longer names first. Source: Go, `time.ParseDuration`.
const UNITS: [(&str, i128); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("\u{b5}s", 1_000),
    ("\u{3bc}s", 1_000),
    ("ms", 1_000_000),
    ("s", SECOND),
    ("m", 60 * SECOND),
    ("h", 3600 * SECOND),
];

/// Maximum number of digits in a number.
const DIGITS_MAX: usize = 18;

/// Returns the time of day, in nanoseconds since 1970.
pub(crate) fn now() -> i128 {
    let store::Moment { seconds, nanoseconds } = crate::session::context::moment();
    i128::from(seconds) * SECOND + i128::from(nanoseconds)
}

/// Meaning of a duration as a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DurationFrom {
    /// A time before now, as for `--since`.
    Past,
    /// A time after now, as podman has it for `--until`.
    Future,
}

/// Parses a time into nanoseconds since 1970. It is a duration from `now`, such as `10m` or `1h30m`; seconds since 1970,
/// such as `1767225600.5`; or a date, such as `2026-01-01`, `2026-01-01T10:00` or `2026-01-01T10:00:00.5+01:00`, in UTC
/// unless it has an offset.
pub(crate) fn parse(text: &str, now: i128, from: DurationFrom) -> anyhow::Result<i128> {
    let wrong = || {
        format!(
            "\"{text}\" is no time: write a date such as 2026-11-30T12:00:00, seconds since 1970, or a \
             duration such as 10m or 1h30m"
        )
    };
    if let Some(duration) = duration(text) {
        return match from {
            DurationFrom::Past => now.checked_sub(duration).with_context(wrong),
            DurationFrom::Future => now.checked_add(duration).with_context(wrong),
        };
    }
    seconds(text).or_else(|| date(text)).with_context(wrong)
}

/// Parses a duration into nanoseconds: numbers, each with a unit. `None` if the text is none.
fn duration(text: &str) -> Option<i128> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest.is_empty() {
        return None;
    }
    let mut sum: i128 = 0;
    while !rest.is_empty() {
        let end = rest.find(|it: char| !it.is_ascii_digit() && it != '.')?;
        let (number, after) = rest.split_at(end);
        let end = after.find(|it: char| it.is_ascii_digit() || it == '.').unwrap_or(after.len());
        let (unit, next) = after.split_at(end);
        let (_, unit) = UNITS.iter().find(|(name, _)| *name == unit)?;
        sum = sum.checked_add(decimal(number, *unit)?)?;
        rest = next;
    }
    Some(sign * sum)
}

/// Parses seconds since 1970, in nanoseconds.
fn seconds(text: &str) -> Option<i128> {
    let (sign, number) = match text.strip_prefix('-') {
        Some(number) => (-1, number),
        None => (1, text),
    };
    Some(sign * decimal(number, SECOND)?)
}

/// Parses a decimal number and multiplies it with `unit`. A part of one is dropped.
pub(crate) fn decimal(number: &str, unit: i128) -> Option<i128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_number =
        |text: &str| text.len() <= DIGITS_MAX && text.bytes().all(|it| it.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let digits = |text: &str| if text.is_empty() { Some(0) } else { text.parse::<i128>().ok() };
    let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let part = digits(fraction)?.checked_mul(unit)?.checked_div(scale)?;
    digits(whole)?.checked_mul(unit)?.checked_add(part)
}

/// Parses a date, whose time of day and offset may be missing.
fn date(text: &str) -> Option<i128> {
    let (day, rest) = text.split_at_checked("2026-11-30".len())?;
    let is_offset = |it: &str| {
        let bytes = it.as_bytes();
        bytes.len() == 6 && matches!(bytes[0], b'+' | b'-') && bytes[3] == b':'
    };
    let at = rest.len().checked_sub(6).filter(|at| rest.get(*at..).is_some_and(is_offset));
    let (time, offset) = match (rest.strip_suffix(['Z', 'z']), at) {
        (Some(time), _) => (time, "Z"),
        (None, Some(at)) => rest.split_at(at),
        (None, None) => (rest, "Z"),
    };
    let time = match time.strip_prefix(['T', 't', ' ']) {
        Some(time) => match time.len() {
            2 => format!("{time}:00:00"),
            5 => format!("{time}:00"),
            _ => time.to_owned(),
        },
        None if time.is_empty() => "00:00:00".to_owned(),
        None => return None,
    };
    // `date --iso-8601=ns` writes a comma.
    let time = time.replacen(',', ".", 1);
    let format = &time::format_description::well_known::Rfc3339;
    let date = time::OffsetDateTime::parse(&format!("{day}T{time}{offset}"), format).ok()?;
    Some(date.unix_timestamp_nanos())
}

/// Parses a number of lines: `all` and `-1` are all lines.
pub(crate) fn last_lines(text: &str) -> anyhow::Result<LastLines> {
    if text == "all" || text == "-1" {
        return Ok(LastLines::All);
    }
    match text.parse() {
        Ok(count) => Ok(LastLines::Count(count)),
        Err(_) => bail!("write a number of lines, or \"all\""),
    }
}

/// How many of the last lines are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LastLines {
    All,
    Count(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are the output of `date -u -d TEXT +%s.%N`, and Go's durations.
    #[test]
    fn times_are_dates_numbers_or_durations() {
        let now = 2_000_000_000 * SECOND;
        let before = |nanoseconds: i128| Some(now - nanoseconds);
        for (text, expect) in [
            ("2021-10-11T11:06:16Z", Some(1_633_950_376 * SECOND)),
            ("2021-10-11T13:06:16.123456789+02:00", Some(1_633_950_376_123_456_789)),
            ("2021-10-11T11:06:16.5", Some(1_633_950_376_500_000_000)),
            ("2021-10-11 11:06:16", Some(1_633_950_376 * SECOND)),
            ("2021-10-11T11:06:16,5+00:00", Some(1_633_950_376_500_000_000)),
            ("2021-10-11T11:06", Some(1_633_950_360 * SECOND)),
            ("2021-10-11T11", Some(1_633_950_000 * SECOND)),
            ("2021-10-11T11-01:00", Some(1_633_953_600 * SECOND)),
            ("2021-10-11", Some(1_633_910_400 * SECOND)),
            ("2021-10-11Z", Some(1_633_910_400 * SECOND)),
            ("0", Some(0)),
            ("1633950376", Some(1_633_950_376 * SECOND)),
            ("1633950376.000000001", Some(1_633_950_376_000_000_001)),
            ("-1", Some(-SECOND)),
            ("10m", before(600 * SECOND)),
            ("1h30m", before(5400 * SECOND)),
            ("1.5h", before(5400 * SECOND)),
            ("1h1m1s1ms1us1ns", before(3661 * SECOND + 1_001_001)),
            ("-10s", before(-10 * SECOND)),
            ("0s", before(0)),
            ("", None),
            ("-", None),
            ("now", None),
            ("10", Some(10 * SECOND)),
            ("10x", None),
            ("m", None),
            ("1.2.3s", None),
            (".s", None),
            ("10m5", None),
            ("9999999999999999999h", None),
            ("2021-13-11", None),
            ("2021-10-11T25:00:00", None),
            ("2021-10-11x", None),
            ("2021-10-11+02:00", Some(1_633_903_200 * SECOND)),
            ("\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}\u{e4}", None),
            ("2021-10-11T\u{e4}\u{e4}\u{e4}", None),
        ] {
            assert_eq!(parse(text, now, DurationFrom::Past).ok(), expect, "{text}");
        }
        for (text, expect) in
            [("3s", now + 3 * SECOND), ("-1m", now - 60 * SECOND), ("5", 5 * SECOND)]
        {
            assert_eq!(parse(text, now, DurationFrom::Future).unwrap(), expect, "{text}");
        }
        let error = parse("soon", now, DurationFrom::Past).unwrap_err().to_string();
        assert!(error.starts_with("\"soon\" is no time: "), "{error}");
    }

    #[test]
    fn lines_are_counted_or_all() {
        for (text, expect) in [
            ("all", Some(LastLines::All)),
            ("-1", Some(LastLines::All)),
            ("0", Some(LastLines::Count(0))),
            ("20", Some(LastLines::Count(20))),
            ("-2", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(last_lines(text).ok(), expect, "{text}");
        }
    }
}
