//! Prints lines, tables, JSON and errors, and formats values for people and programs.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use serde::Serialize;

use crate::Answer;

/// Returns standard output with a buffer of 64 KiB.
pub(crate) fn standard_output() -> impl Write {
    Output(io::BufWriter::with_capacity(64 << 10, io::stdout().lock()))
}

struct Output(io::BufWriter<io::StdoutLock<'static>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(|it| blame(&it))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(|it| blame(&it))
    }
}

/// Returns standard output with a buffer of 64 KiB. Soon after `cancel` is set, writes fail, even if no program reads
/// the output.
pub(crate) fn cancellable_output(cancel: &AtomicBool) -> impl Write {
    io::BufWriter::with_capacity(64 << 10, CancellableOutput { cancel })
}

struct CancellableOutput<'a> {
    cancel: &'a AtomicBool,
}

impl Write for CancellableOutput<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let out = io::stdout();
        loop {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(io::Error::other("cancelled"));
            }
            let mut fds = [PollFd::new(&out, PollFlags::OUT)];
            match rustix::event::poll(&mut fds, Some(&PATIENCE)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(errno) => return Err(blame(&errno.into())),
            }
        }
        // A pipe that is ready takes this much without blocking. Source: Linux `fs/pipe.c`, pipe_poll.
        let part = bytes.get(..PIPE_BUF).unwrap_or(bytes);
        rustix::io::write(&out, part).map_err(|errno| blame(&errno.into()))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Interval at which a waiting write checks for cancellation.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Bytes that a pipe takes at once. Source: Linux `include/uapi/linux/limits.h`.
const PIPE_BUF: usize = 4096;

/// Returns standard error with a buffer, for output of a container. Other threads can write to it at the same time.
pub(crate) fn standard_error() -> impl Write {
    io::BufWriter::with_capacity(64 << 10, io::stderr())
}

/// Wraps an error of standard output. The cause is in the text, because as `source` it would look like an error of
/// the store.
fn blame(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), OutputError(error.to_string()))
}

/// A failed write to standard output, with the system's error text.
#[derive(Debug)]
struct OutputError(String);

impl std::fmt::Display for OutputError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot write to standard output: {}", self.0)
    }
}

impl std::error::Error for OutputError {}

/// Returns whether writing to standard output failed, which is unrelated to any store.
pub(crate) fn is_of_output(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let cause = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        cause.is_some_and(|it| it.is::<OutputError>())
    })
}

/// Escapes characters that are invisible, but may change how a terminal shows the rest of the text.
pub(crate) fn plain(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unseen) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::new();
    for it in text.chars() {
        match is_unseen(it) {
            // `escape_debug` does not escape a character that it considers printable, so the code point is printed
            // instead.
            true if it.escape_debug().len() == 1 => plain.extend(it.escape_unicode()),
            true => plain.extend(it.escape_debug()),
            false => plain.push(it),
        }
    }
    Cow::Owned(plain)
}

/// Returns whether a character is invisible, and may make a terminal show a different name. Source: Unicode 16,
/// categories Cc, Cf, Zl and Zp.
pub(crate) fn is_unseen(it: char) -> bool {
    it.is_control()
        || matches!(it,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}'..='\u{891}'
            | '\u{8e2}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}'
            | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e007f}')
}

/// Makes each line [`plain`].
fn plain_lines(text: &str) -> String {
    let lines: Vec<_> = text.split('\n').map(plain).collect();
    lines.join("\n")
}

/// Prints one or more lines on standard error. A failure is ignored, because it cannot be reported.
pub(crate) fn error_line(text: &str) {
    let _unheard = writeln!(io::stderr(), "{}", plain_lines(text));
}

/// Like [`error_line`], for a terminal in raw mode, where a newline does not return to the first column.
pub(crate) fn error_line_raw(text: &str) {
    let _unheard = write!(io::stderr(), "\r\n{}\r\n", plain_lines(text).replace('\n', "\r\n"));
}

/// Prints one or more lines.
pub(crate) fn line(text: &str) -> anyhow::Result<()> {
    let mut out = standard_output();
    writeln!(out, "{}", plain_lines(text))?;
    out.flush()?;
    Ok(())
}

/// Prints lines, and returns the answer of a verb that does nothing else.
pub(crate) fn lines<'a>(lines: impl IntoIterator<Item = &'a str>) -> anyhow::Result<Answer> {
    let mut out = standard_output();
    for line in lines {
        writeln!(out, "{line}")?;
    }
    out.flush()?;
    Ok(Answer::Yes)
}

/// A number of bytes in a report. `docs/json.md` takes the unit from this type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(inline, extend("unit" = "bytes")))]
pub(crate) struct Bytes(pub(crate) u64);

/// A time in a report, in seconds since 1970. In JSON it is RFC 3339.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(inline, with = "String"))]
pub(crate) struct Time(pub(crate) i64);

impl Serialize for Time {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&rfc3339(self.0))
    }
}

/// The name of an image's file in a report. In JSON, bytes that are not printable ASCII become `\xHH`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(inline, with = "String"))]
pub(crate) struct FileName(pub(crate) Vec<u8>);

impl Serialize for FileName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0.escape_ascii())
    }
}

/// A time span in a report, in seconds.
#[derive(Debug, Clone, Copy, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema), schemars(inline, extend("unit" = "seconds")))]
pub(crate) struct Seconds(pub(crate) f64);

/// Converts values to strings for a report.
pub(crate) fn texts<T: std::fmt::Display>(all: impl IntoIterator<Item = T>) -> Vec<String> {
    all.into_iter().map(|it| it.to_string()).collect()
}

/// Converts an image's file names to strings for a report: bytes that are not printable ASCII become `\xHH`.
pub(crate) fn paths<T: AsRef<[u8]>>(all: impl IntoIterator<Item = T>) -> Vec<String> {
    all.into_iter().map(|it| it.as_ref().escape_ascii().to_string()).collect()
}

/// Prints a value as JSON with a final newline.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut out = standard_output();
    match io::stdout().is_terminal() {
        false => serde_json::to_writer_pretty(&mut out, value)?,
        true => out.write_all(visible(&serde_json::to_string_pretty(value)?).as_bytes())?,
    }
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// Escapes the invisible characters of a JSON text, for terminals. JSON itself requires this only of those below
/// U+0020. Outside of strings, the text has no such characters except newlines.
pub(crate) fn visible(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for it in json.chars() {
        match is_unseen(it) && it != '\n' {
            true => {
                let units = it.encode_utf16(&mut [0; 2]).to_vec();
                out.extend(units.iter().map(|unit| format!("\\u{unit:04x}")));
            }
            false => out.push(it),
        }
    }
    out
}

/// Prints a report as JSON, or as text for people, which `text` formats.
pub(crate) fn print<R: Serialize>(
    is_json: bool,
    report: &R,
    text: impl FnOnce(&R, &mut dyn Write) -> io::Result<()>,
) -> anyhow::Result<()> {
    if is_json {
        return json(report);
    }
    let mut out = standard_output();
    text(report, &mut out)?;
    out.flush()?;
    Ok(())
}

/// Prints a value as one line of JSON, for programs that read a stream of values.
pub(crate) fn json_line(value: &impl Serialize) -> anyhow::Result<()> {
    let mut out = standard_output();
    match io::stdout().is_terminal() {
        false => serde_json::to_writer(&mut out, value)?,
        true => out.write_all(visible(&serde_json::to_string(value)?).as_bytes())?,
    }
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

/// Returns whether the reader of our output closed the pipe.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let json =
            cause.downcast_ref::<serde_json::Error>().and_then(serde_json::Error::io_error_kind);
        io.or(json) == Some(io::ErrorKind::BrokenPipe)
    })
}

/// Formats an error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Returns a verb's answer, and so its exit code, even if the reader of its output closed the pipe.
pub(crate) fn answer(answer: Answer, printed: anyhow::Result<()>) -> anyhow::Result<Answer> {
    match printed {
        Err(error) if !is_broken_pipe(&error) => Err(error),
        _ => Ok(answer),
    }
}

/// Formats a size for people: `5 B`, `1.50 KiB`, `12.00 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

/// Formats a number of things: `1 layer`, `2 layers`, `0 entries`.
pub(crate) fn count<N: Copy + Display + PartialEq + From<u8>>(many: N, one: &str) -> String {
    match one.strip_suffix('y') {
        _ if many == N::from(1) => format!("1 {one}"),
        Some(stem) => format!("{many} {stem}ies"),
        None => format!("{many} {one}s"),
    }
}

/// Parses an RFC 3339 time and returns seconds since 1970, or `None` if the text is invalid.
pub(crate) fn seconds(text: &str) -> Option<i64> {
    let format = &time::format_description::well_known::Rfc3339;
    time::OffsetDateTime::parse(text, format).ok().map(time::OffsetDateTime::unix_timestamp)
}

/// Formats the seconds since an event for people, rounded as Docker and podman do. A future time is `in the
/// future`.
pub(crate) fn ago(seconds: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    const UNITS: [(i64, i64, &str); 6] = [
        (2 * 365 * DAY, 365 * DAY, "years"),
        (60 * DAY, 30 * DAY, "months"),
        (14 * DAY, 7 * DAY, "weeks"),
        (2 * DAY, DAY, "days"),
        (2 * HOUR, HOUR, "hours"),
        (2 * MINUTE, MINUTE, "minutes"),
    ];
    if seconds < 0 {
        return "in the future".to_owned();
    }
    match UNITS.iter().find(|(from, ..)| seconds >= *from) {
        Some((_, unit, name)) => format!("{} {name} ago", seconds / unit),
        None if seconds == 1 => "1 second ago".to_owned(),
        None => format!("{seconds} seconds ago"),
    }
}

/// Formats a UTC time as `YYYY-MM-DD HH:MM:SS`, or as `@SECONDS` if it is before year -9999 or after 9999.
pub(crate) fn time(seconds: i64) -> String {
    let format = time::macros::format_description!("[year]-[month]-[day] [hour]:[minute]:[second]");
    let date = time::UtcDateTime::from_unix_timestamp(seconds).ok();
    date.and_then(|date| date.format(format).ok()).unwrap_or_else(|| format!("@{seconds}"))
}

/// Formats a UTC time for programs as RFC 3339: `YYYY-MM-DDTHH:MM:SSZ`.
pub(crate) fn rfc3339(seconds: i64) -> String {
    let text = time(seconds);
    if text.starts_with('@') { text } else { text.replace(' ', "T") + "Z" }
}

/// Returns the first 12 digits of an id, which are enough to distinguish images and to name one.
pub(crate) fn short(id: &dyn std::fmt::Display) -> String {
    id.to_string().chars().take(12).collect()
}

/// Shortens a command for a table. Source of the length: podman, `cmd/podman/containers/ps.go`.
pub(crate) fn truncated(command: &str) -> String {
    const MOST: usize = 17;
    match command.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &command[..end]),
        None => command.to_owned(),
    }
}

/// Returns an image's names, or the beginning of its id if it has none.
pub(crate) fn label(names: &[String], id: &dyn std::fmt::Display) -> String {
    if names.is_empty() { short(id) } else { names.join(" ") }
}

/// Formats a size for programs.
pub(crate) fn bytes_alone(bytes: u64) -> String {
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_on_a_terminal_has_no_invisible_characters() {
        let value =
            serde_json::json!({ "a\u{9b}": ["\u{1b}[2J\n\t\u{7f}", "\u{202e}\u{e0001}\u{e4}"] });
        let shown = visible(&serde_json::to_string_pretty(&value).unwrap());
        assert!(!shown.chars().any(|it| is_unseen(it) && it != '\n'), "{shown}");
        assert!(shown.contains(r"\u{9b}".replace("{9b}", "009b").as_str()), "{shown}");
        assert!(shown.contains('\u{e4}'));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }

    #[test]
    fn long_commands_are_shortened() {
        assert_eq!(truncated("sh -c 12345678901"), "sh -c 12345678901");
        assert_eq!(truncated("sh -c 123456789012"), "sh -c 12345678901...");
        // Characters, not bytes.
        assert_eq!(truncated(&"ä".repeat(18)), format!("{}...", "ä".repeat(17)));
    }

    /// The expected values are the output of `date -u -d @N +%FT%TZ`.
    #[test]
    fn times_for_programs_are_dates_too() {
        let cases = [
            (0, "1970-01-01T00:00:00Z"),
            (1_633_950_376, "2021-10-11T11:06:16Z"),
            (i64::MAX, "@9223372036854775807"),
        ];
        for (seconds, expect) in cases {
            assert_eq!(rfc3339(seconds), expect);
        }
    }

    /// The expected values are the output of `date -u -d TEXT +%s`.
    #[test]
    fn times_are_read_and_rounded() {
        let cases = [
            ("2021-10-11T11:06:16Z", Some(1_633_950_376)),
            ("2021-10-11T13:06:16.123456789+02:00", Some(1_633_950_376)),
            ("0001-01-01T00:00:00Z", Some(-62_135_596_800)),
            ("2021-10-11", None),
            ("", None),
        ];
        for (text, expect) in cases {
            assert_eq!(seconds(text), expect, "{text}");
        }
        let cases = [
            (-1, "in the future"),
            (0, "0 seconds ago"),
            (1, "1 second ago"),
            (119, "119 seconds ago"),
            (120, "2 minutes ago"),
            (7_200, "2 hours ago"),
            (172_799, "47 hours ago"),
            (172_800, "2 days ago"),
            (14 * 86_400, "2 weeks ago"),
            (60 * 86_400, "2 months ago"),
            (730 * 86_400, "2 years ago"),
            (i64::MAX, "292471208677 years ago"),
        ];
        for (seconds, expect) in cases {
            assert_eq!(ago(seconds), expect);
        }
    }

    #[test]
    fn what_steers_a_terminal_is_escaped() {
        let cases = [
            ("plain \u{fc} \u{65e5}", "plain \u{fc} \u{65e5}"),
            ("\x1b]0;title\x07", "\\u{1b}]0;title\\u{7}"),
            ("a\r\nb\tc", "a\\r\\nb\\tc"),
            ("\u{202e}txt.exe\u{9b}2J", "\\u{202e}txt.exe\\u{9b}2J"),
        ];
        for (text, expect) in cases {
            assert_eq!(plain(text), expect);
        }
        assert_eq!(plain_lines("a\nb\x1b"), "a\nb\\u{1b}");
    }

    /// The expected values are the output of `date -u -d @N`.
    #[test]
    fn times_are_dates() {
        let cases = [
            (0, "1970-01-01 00:00:00"),
            (-1, "1969-12-31 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_633_950_376, "2021-10-11 11:06:16"),
            (i64::MAX, "@9223372036854775807"),
        ];
        for (seconds, expect) in cases {
            assert_eq!(time(seconds), expect);
        }
    }
}
