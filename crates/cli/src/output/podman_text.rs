//! Values in the words of podman, for `--format`.

use crate::output::report;

/// Formats a duration for people. Source: docker/go-units, `HumanDuration`.
pub(crate) fn human_duration(seconds: i64) -> String {
    const DAY: i64 = 24;
    let (minutes, hours) = (seconds / 60, (seconds + 1800) / 3600);
    match (seconds, minutes, hours) {
        (..1, ..) => "Less than a second".to_owned(),
        (1, ..) => "1 second".to_owned(),
        (..60, ..) => format!("{seconds} seconds"),
        (_, 1, _) => "About a minute".to_owned(),
        (_, ..60, _) => format!("{minutes} minutes"),
        (.., 1) => "About an hour".to_owned(),
        (_, _, hours) if hours < 2 * DAY => format!("{hours} hours"),
        (_, _, hours) if hours < 14 * DAY => format!("{} days", hours / DAY),
        (_, _, hours) if hours < 60 * DAY => format!("{} weeks", hours / DAY / 7),
        (_, _, hours) if hours < 730 * DAY => format!("{} months", hours / DAY / 30),
        (_, _, hours) => format!("{} years", hours / DAY / 365),
    }
}

/// Formats a time as Go's `Time.String`, in UTC.
pub(crate) fn go_time(seconds: i64) -> String {
    format!("{} +0000 UTC", report::time(seconds))
}

/// Formats a size with three digits and decimal units. Source: docker/go-units, `HumanSizeWithPrecision`.
pub(crate) fn human_size(bytes: u64, space: &str) -> String {
    const UNITS: [&str; 7] = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    /// From here on, three digits round to the next unit.
    const NEXT: f64 = 999.5;
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= NEXT && unit + 1 < UNITS.len() {
        size /= 1000.0;
        unit += 1;
    }
    let decimals = if size < 9.995 {
        2
    } else if size < 99.95 {
        1
    } else {
        0
    };
    let mut text = format!("{size:.decimals$}");
    if decimals > 0 {
        text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
    }
    format!("{text}{space}{}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are from the tests of docker/go-units, `duration_test.go`.
    #[test]
    fn durations_are_those_of_docker() {
        const MINUTE: i64 = 60;
        const HOUR: i64 = 60 * MINUTE;
        const DAY: i64 = 24 * HOUR;
        for (seconds, expect) in [
            (0, "Less than a second"),
            (1, "1 second"),
            (45, "45 seconds"),
            (MINUTE, "About a minute"),
            (MINUTE + 40, "About a minute"),
            (3 * MINUTE, "3 minutes"),
            (35 * MINUTE + 40, "35 minutes"),
            (HOUR, "About an hour"),
            (HOUR + 29 * MINUTE, "About an hour"),
            (HOUR + 31 * MINUTE, "2 hours"),
            (HOUR + 59 * MINUTE, "2 hours"),
            (3 * HOUR, "3 hours"),
            (24 * HOUR, "24 hours"),
            (DAY + 12 * HOUR, "36 hours"),
            (2 * DAY, "2 days"),
            (7 * DAY, "7 days"),
            (13 * DAY + 5 * HOUR, "13 days"),
            (2 * 7 * DAY, "2 weeks"),
            (3 * 7 * DAY + 4 * DAY, "3 weeks"),
            (31 * DAY, "4 weeks"),
            (2 * 30 * DAY, "2 months"),
            (2 * 30 * DAY + 7 * DAY, "2 months"),
            (24 * 30 * DAY, "24 months"),
            (2 * 365 * DAY, "2 years"),
            (4 * 365 * DAY, "4 years"),
            (-5, "Less than a second"),
        ] {
            assert_eq!(human_duration(seconds), expect, "{seconds}");
        }
    }

    /// The expected values are those of Go's `%.3g` with docker/go-units' units.
    #[test]
    fn sizes_have_three_digits() {
        for (bytes, expect) in [
            (0, "0B"),
            (5, "5B"),
            (999, "999B"),
            (1000, "1kB"),
            (1024, "1.02kB"),
            (10_000, "10kB"),
            (12_345, "12.3kB"),
            (123_456, "123kB"),
            (7_049_000, "7.05MB"),
            (9_996_000, "10MB"),
            (999_600_000, "1GB"),
            (u64::MAX, "18.4EB"),
        ] {
            assert_eq!(human_size(bytes, ""), expect);
        }
        assert_eq!(human_size(7_049_000, " "), "7.05 MB");
    }

    #[test]
    fn times_are_those_of_go() {
        assert_eq!(go_time(1_633_950_376), "2021-10-11 11:06:16 +0000 UTC");
    }
}
