//! Records of a log, one per line: `TIME STREAM TAG CONTENT`. Kubernetes defines this format for container runtimes, and
//! podman calls it `k8s-file`. Source: Kubernetes, `pkg/kubelet/kuberuntime/logs/logs.go`.
//!
//! `TIME` is RFC 3339 in UTC with nanoseconds, and `STREAM` is `stdout` or `stderr`. `TAG` is `F` if the record ends a
//! line of the stream, or `P` if the stream's next record continues the line.
//!
//! Quire 0.1 wrote the output without records, so any other line is output of an unknown time. A writer that is killed may
//! leave a record without its end; the next writer adds a newline.

/// A stream of a container's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogStream {
    Output,
    Errors,
}

impl LogStream {
    const fn word(self) -> &'static str {
        match self {
            Self::Output => "stdout",
            Self::Errors => "stderr",
        }
    }
}

/// A line of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogRecord<'a> {
    pub stream: LogStream,
    /// Time at which Quire received the content, as [`time_text`] formats it. `None` in a log of Quire 0.1.
    pub time: Option<&'a str>,
    /// Whether a newline follows the content in the stream.
    pub ends_line: bool,
    pub content: &'a [u8],
}

/// Length of the part before the content, in bytes.
pub(super) const HEAD: usize = "2026-11-30T12:00:00.000000000Z stdout F ".len();

/// A time whose digits stand for any digits.
const TIME: &[u8] = b"0000-00-00T00:00:00.000000000Z";

impl<'a> LogRecord<'a> {
    /// Parses a line without its newline. A head that the death of the writer has cut short becomes an empty part of a
    /// line.
    #[must_use]
    pub fn parse(line: &'a [u8]) -> Self {
        let old =
            |content, ends_line| Self { stream: LogStream::Output, time: None, ends_line, content };
        match Self::with_head(line) {
            Some(record) => record,
            None if is_cut_head(line) => old(&[], false),
            None => old(line, true),
        }
    }

    fn with_head(line: &'a [u8]) -> Option<Self> {
        let (head, content) = line.split_at_checked(HEAD)?;
        let head = std::str::from_utf8(head).ok()?;
        let (time, rest) = head.split_once(' ')?;
        let is_time = time.len() == TIME.len() && begins_as_time(time.as_bytes());
        let (stream, ends_line) = match rest {
            "stdout F " => (LogStream::Output, true),
            "stdout P " => (LogStream::Output, false),
            "stderr F " => (LogStream::Errors, true),
            "stderr P " => (LogStream::Errors, false),
            _ => return None,
        };
        is_time.then_some(Self { stream, time: Some(time), ends_line, content })
    }
}

/// Returns whether bytes are like those of a time, as far as both go.
fn begins_as_time(bytes: &[u8]) -> bool {
    let fits = |(byte, expect): (&u8, &u8)| match expect {
        b'0' => byte.is_ascii_digit(),
        mark => byte == mark,
    };
    bytes.iter().zip(TIME).all(fits)
}

/// Returns whether a line is a beginning of a record's head that cannot be a program's own output: it has a date and a
/// time of day.
fn is_cut_head(line: &[u8]) -> bool {
    const LEAST: usize = "2026-11-30T12:00:00.".len();
    let rests: [&[u8]; 4] = [b" stdout F ", b" stdout P ", b" stderr F ", b" stderr P "];
    let rest = line.get(TIME.len()..).unwrap_or_default();
    (LEAST..HEAD).contains(&line.len())
        && begins_as_time(line)
        && rests.iter().any(|it| it.starts_with(rest))
}

/// Records that are written together.
#[derive(Debug, Default)]
pub(super) struct RecordBatch {
    pub(super) text: Vec<u8>,
    /// For each record, the offset of its end, and the number of the container's bytes up to there.
    ends: Vec<RecordEnd>,
}

#[derive(Debug, Clone, Copy, Default)]
struct RecordEnd {
    offset: usize,
    content: u64,
}

impl RecordBatch {
    pub(super) fn add(&mut self, time: &str, stream: LogStream, piece: &LinePiece<'_>) {
        let tag = if piece.ends_line { "F" } else { "P" };
        for part in [time, " ", stream.word(), " ", tag, " "] {
            self.text.extend_from_slice(part.as_bytes());
        }
        self.text.extend_from_slice(piece.content);
        self.text.push(b'\n');
        let content = self.content() + piece.length();
        self.ends.push(RecordEnd { offset: self.text.len(), content });
    }

    /// Returns the number of the container's bytes in all records.
    pub(super) fn content(&self) -> u64 {
        self.ends.last().map_or(0, |it| it.content)
    }

    /// Returns the length of the records that are whole in the first `written` bytes, and the number of the container's
    /// bytes in them.
    pub(super) fn whole(&self, written: u64) -> (u64, u64) {
        let whole = self.ends.iter().rev().find(|it| it.offset as u64 <= written);
        whole.map_or((0, 0), |it| (it.offset as u64, it.content))
    }

    pub(super) fn clear(&mut self) {
        self.text.clear();
        self.ends.clear();
    }
}

/// A line of a stream, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LinePiece<'a> {
    /// Without the newline.
    pub(super) content: &'a [u8],
    pub(super) ends_line: bool,
}

impl LinePiece<'_> {
    /// Returns the number of the container's bytes.
    pub(super) fn length(&self) -> u64 {
        self.content.len() as u64 + u64::from(self.ends_line)
    }

    /// Returns the length of the record, in bytes.
    pub(super) fn record_length(&self) -> u64 {
        HEAD as u64 + self.content.len() as u64 + 1
    }
}

/// Divides the output of a stream into lines, and longer lines into parts of at most `most` bytes.
pub(super) fn pieces(bytes: &[u8], most: usize) -> impl Iterator<Item = LinePiece<'_>> {
    let most = most.max(1);
    bytes.split_inclusive(|it| *it == b'\n').flat_map(move |line| {
        let (text, has_end) = match line.strip_suffix(b"\n") {
            Some(text) => (text, true),
            None => (line, false),
        };
        // An empty line has a record.
        let count = text.len().div_ceil(most).max(1);
        (0..count).map(move |at| {
            let end = text.len().min((at + 1) * most);
            LinePiece { content: &text[at * most..end], ends_line: has_end && at + 1 == count }
        })
    })
}

/// Formats a time in nanoseconds since 1970 as in records. Texts of later times are greater. Times before the year 0 and
/// after the year 9999 become the first and last ones of this range.
#[must_use]
pub fn time_text(nanoseconds: i128) -> String {
    const SECOND: i128 = 1_000_000_000;
    const FIRST: i128 = -62_167_219_200 * SECOND;
    const LAST: i128 = 253_402_300_800 * SECOND - 1;
    let time = nanoseconds.clamp(FIRST, LAST);
    let (seconds, fraction) = (time.div_euclid(SECOND), time.rem_euclid(SECOND));
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = date(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{fraction:09}Z")
}

/// Returns year, month and day of a number of days since 1970. Source: Howard Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", `civil_from_days`.
fn date(days: i128) -> (i128, i128, i128) {
    // Days since 0000-03-01, in eras of 400 years.
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    // Months from March.
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + i128::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are the output of `date -u -d @N +%FT%T.%NZ`.
    #[test]
    fn times_are_dates() {
        for (nanoseconds, expect) in [
            (0, "1970-01-01T00:00:00.000000000Z"),
            (-1, "1969-12-31T23:59:59.999999999Z"),
            (951_782_400_000_000_001, "2000-02-29T00:00:00.000000001Z"),
            (951_868_800_000_000_000, "2000-03-01T00:00:00.000000000Z"),
            (1_633_950_376_123_456_789, "2021-10-11T11:06:16.123456789Z"),
            (4_107_542_399_000_000_000, "2100-02-28T23:59:59.000000000Z"),
            (4_107_542_400_000_000_000, "2100-03-01T00:00:00.000000000Z"),
            (i128::MIN, "0000-01-01T00:00:00.000000000Z"),
            (i128::MAX, "9999-12-31T23:59:59.999999999Z"),
        ] {
            assert_eq!(time_text(nanoseconds), expect);
        }
    }

    /// The first three lines are from the documents of Kubernetes and of fluent-bit's parser `cri`, with a time of nine
    /// digits.
    #[test]
    fn lines_are_records_or_old_output() {
        let time = "2016-10-06T00:17:09.669794202Z";
        let check = |line: &str, stream, is_timed: bool, ends_line, content: &str| {
            let content = content.as_bytes();
            let expect = LogRecord { stream, time: is_timed.then_some(time), ends_line, content };
            assert_eq!(LogRecord::parse(line.as_bytes()), expect, "{line}");
        };
        let (output, errors) = (LogStream::Output, LogStream::Errors);
        check(&format!("{time} stdout P log content 1"), output, true, false, "log content 1");
        check(&format!("{time} stderr F log content 2"), errors, true, true, "log content 2");
        check(&format!("{time} stdout F "), output, true, true, "");
        check(&format!("{time} stdout F  F \u{e4}"), output, true, true, " F \u{e4}");
        for other in [
            String::new(),
            "output of a program".to_owned(),
            time[..19].to_owned(),
            format!("{time} stdin"),
            format!("{time} stdout X text"),
            format!("{time} stdin  F text"),
            format!("{} stdout F text", time.replace('T', " ")),
            format!("{} stdout F text", time.replace('2', "x")),
            format!(" {time} stdout F text"),
            "\u{e4}".repeat(30),
        ] {
            check(&other, output, false, true, &other);
        }
        // A writer that was killed.
        let head = format!("{time} stdout F ");
        for length in 20..head.len() {
            check(&head[..length], output, false, false, "");
        }
    }

    #[test]
    fn output_is_divided_at_lines() {
        let check = |text: &str, most, expect: &[(&str, bool)]| {
            let found: Vec<_> = pieces(text.as_bytes(), most)
                .map(|it| (std::str::from_utf8(it.content).unwrap(), it.ends_line))
                .collect();
            assert_eq!(found, expect, "{text:?}");
            let length: u64 = pieces(text.as_bytes(), most).map(|it| it.length()).sum();
            assert_eq!(length, text.len() as u64, "{text:?}");
        };
        check("", 4, &[]);
        check("\n", 4, &[("", true)]);
        check("ab\n\ncd", 4, &[("ab", true), ("", true), ("cd", false)]);
        check("abcd\n", 4, &[("abcd", true)]);
        check("abcdefghi\n", 4, &[("abcd", false), ("efgh", false), ("i", true)]);
        check("abcdefgh", 4, &[("abcd", false), ("efgh", false)]);
        check("ab\n", 0, &[("a", false), ("b", true)]);
    }

    #[test]
    fn a_batch_knows_its_whole_records() {
        let mut batch = RecordBatch::default();
        let time = time_text(0);
        assert_eq!(batch.whole(100), (0, 0));
        for piece in pieces(b"one\ntwo", 100) {
            batch.add(&time, LogStream::Errors, &piece);
        }
        let expect = format!("{time} stderr F one\n{time} stderr P two\n");
        assert_eq!(String::from_utf8(batch.text.clone()).unwrap(), expect);
        let one = HEAD as u64 + 4;
        for (written, expect) in [
            (0, (0, 0)),
            (one - 1, (0, 0)),
            (one, (one, 4)),
            (2 * one - 1, (one, 4)),
            (2 * one, (2 * one, 7)),
        ] {
            assert_eq!(batch.whole(written), expect, "{written}");
        }
        assert_eq!(batch.content(), 7);
        batch.clear();
        assert_eq!((batch.text.len(), batch.content()), (0, 0));
    }
}
