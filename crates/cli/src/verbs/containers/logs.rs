//! `logs`: prints the output of a container from the two files of its log.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use container::life::log::Halves;
use container::life::log::record::{LogRecord, LogStream, time_text};
use container::life::lookup::{KnownContainer, find_container};
use container::listed_settings::ListedSettings;
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::moment::{self, DurationFrom, LastLines};
use crate::verbs::VerbArgs;
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// Containers. With several of them, each line begins with the name of its container
    #[arg(required = true)]
    pub(crate) containers: Vec<String>,
    /// Follow the output until the containers end
    #[arg(short, long)]
    pub(crate) follow: bool,
    /// Print only this many of the last lines, or all
    #[arg(short = 'n', long, value_name = "LINES", value_parser = moment::last_lines, allow_negative_numbers = true)]
    pub(crate) tail: Option<LastLines>,
    /// Print the time of each line, in UTC
    #[arg(short, long)]
    pub(crate) timestamps: bool,
    /// Print output from this time on: a date and time such as 2026-11-30T12:00:00, seconds since 1970, or a duration
    /// before now such as 10m or 1h30m
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub(crate) since: Option<String>,
    /// Print output up to this time. A duration such as 10m is the time after now, and -10m before now, as in podman;
    /// with --follow, the command ends then
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub(crate) until: Option<String>,
}

impl VerbArgs for Logs {
    const NAME: &'static str = "logs";
    const ABOUT: &'static str = "Print the output of a container";
    const DETAILS: &'static str = "Output of the container's standard error goes to standard error. Output that Quire \
        0.1 recorded has no times: it counts as older than all other output, and all of it goes to standard output.";
    const EXAMPLES: &'static str = "quire logs --tail 20 web\n  quire logs --since 10m --timestamps web\n  quire logs --follow web";
    const PRINTS_JSON: bool = false;
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        logs(context, self)
    }
}

/// Time between two reads of a log.
const GLANCE: Duration = Duration::from_millis(50);

/// Maximum length of a line of Quire 0.1 that is held in memory, in bytes. Records are shorter.
const LINE_MAX: usize = 1 << 20;

pub(crate) fn logs(context: &Context, args: &Logs) -> anyhow::Result<Answer> {
    let now = moment::now();
    let time = |option: &str, text: Option<&str>, from| -> anyhow::Result<Option<String>> {
        let time = text.map(|text| moment::parse(text, now, from)).transpose();
        Ok(time.with_context(|| format!("--{option}"))?.map(time_text))
    };
    let since = time("since", args.since.as_deref(), DurationFrom::Past)?;
    let until = time("until", args.until.as_deref(), DurationFrom::Future)?;
    let store = context.open(OpenOptions::read())?;
    let found = args.containers.iter().map(|name| find_container(&store, name));
    let found = found.collect::<Result<Vec<_>, _>>()?;
    let has_prefix = found.len() > 1;
    let mut logs = Vec::new();
    for it in found {
        let shown = ShownRecords {
            timestamps: args.timestamps,
            since: since.clone(),
            until: until.clone(),
            prefix: if has_prefix { format!("{} ", it.id) } else { String::new() },
            skipped: 0,
        };
        logs.extend(ContainerLog::open(it, args.tail, shown)?);
    }
    while !logs.is_empty() {
        let is_past = until.as_ref().is_some_and(|until| time_text(moment::now()) > *until);
        for log in &mut logs {
            let is_running = || find_container(&store, &log.id).is_ok_and(|it| it.is_running());
            // This is checked before the log is read, so that output from before the end is printed.
            log.is_over = !args.follow || is_past || !is_running();
            log.printer.step(&log.folder, &mut log.newer, log.is_over)?;
        }
        logs.retain(|it| !it.is_over);
        if !logs.is_empty() {
            std::thread::sleep(GLANCE);
        }
    }
    Ok(Answer::Yes)
}

/// The log of a container, whose older half was printed.
struct ContainerLog {
    id: String,
    folder: PathBuf,
    newer: File,
    printer: LogPrinter,
    /// Whether all of it was printed.
    is_over: bool,
}

impl ContainerLog {
    /// Opens the log, and prints its older half. `None` if the container has never been started.
    fn open(
        known: KnownContainer,
        tail: Option<LastLines>,
        mut shown: ShownRecords,
    ) -> anyhow::Result<Option<Self>> {
        let KnownContainer { id, folder, is_created, .. } = known;
        let failed = || format!("cannot read the log in {}", folder.display());
        if ListedSettings::load(&folder).is_ok_and(|it| it.no_log) {
            bail!("container {id} has no log, because it was made with --log-driver none");
        }
        let halves = Halves::open(&folder).with_context(failed)?;
        if halves.is_none() && is_created {
            return Ok(None);
        }
        let Some(mut halves) = halves else {
            bail!("container {id} was not started with --detach: it has no log")
        };
        if let Some(LastLines::Count(lines)) = tail {
            shown.skipped = seek_tail(&mut halves, lines).with_context(failed)?;
        }
        let mut printer = LogPrinter::new(shown);
        if let Some(older) = &mut halves.older {
            printer.print(older).with_context(failed)?;
            printer.end_file().with_context(failed)?;
        }
        Ok(Some(Self { id, folder, newer: halves.newer, printer, is_over: false }))
    }
}

/// Prints a log from the position of `newer`, which is its newer half, until `is_over`. `is_over` is called again and
/// again.
pub(super) fn follow(
    folder: &Path,
    mut newer: File,
    is_over: &dyn Fn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let failed = || format!("cannot read the log in {}", folder.display());
    // The position is the end of the log at an earlier time. The next writer ends a last line without a newline.
    let skipped = usize::from(is_inside_line(&mut newer).with_context(failed)?);
    let shown = ShownRecords { skipped, ..ShownRecords::default() };
    let mut printer = LogPrinter::new(shown);
    loop {
        // This is checked before the log is read, so that output from before the end is printed.
        let is_over = is_over()?;
        printer.step(folder, &mut newer, is_over)?;
        if is_over {
            return Ok(());
        }
        std::thread::sleep(GLANCE);
    }
}

/// Returns whether the byte before the position is not a newline.
fn is_inside_line(log: &mut File) -> std::io::Result<bool> {
    let Some(before) = log.stream_position()?.checked_sub(1) else { return Ok(false) };
    let mut byte = [0];
    // The file may have been truncated since.
    Ok(log.read_at(&mut byte, before)? == 1 && byte != *b"\n")
}

/// Choice of the records that are printed, and of their form.
#[derive(Debug, Default)]
struct ShownRecords {
    timestamps: bool,
    /// Times of the first and last records, as in records.
    since: Option<String>,
    until: Option<String>,
    /// Text before each line.
    prefix: String,
    /// Number of lines that are left out at the beginning.
    skipped: usize,
}

impl ShownRecords {
    /// Returns whether a record is printed, and counts the lines that are left out.
    fn shows(&mut self, record: &LogRecord<'_>) -> bool {
        if self.skipped > 0 {
            self.skipped -= usize::from(record.ends_line);
            return false;
        }
        let time = record.time.unwrap_or_default();
        let is_early = self.since.as_deref().is_some_and(|since| time < since);
        let is_late = self.until.as_deref().is_some_and(|until| time > until);
        !is_early && !is_late
    }
}

/// Divides a log into records.
#[derive(Debug, Default)]
struct RecordReader {
    /// Bytes after the last newline.
    pending: Vec<u8>,
}

impl RecordReader {
    /// Reads a file from its position to its end.
    fn read(
        &mut self,
        log: &mut File,
        each: &mut dyn FnMut(&LogRecord<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        if log.metadata()?.len() < log.stream_position()? {
            // The log was truncated, because there was no space for another file.
            log.rewind()?;
            self.pending.clear();
        }
        let mut bytes = vec![0; 64 << 10];
        loop {
            let count = match log.read(&mut bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                count => count?,
            };
            if count == 0 {
                return Ok(());
            }
            self.pending.extend_from_slice(&bytes[..count]);
            if let Some(end) = self.pending.iter().rposition(|it| *it == b'\n') {
                let rest = self.pending.split_off(end + 1);
                let lines = std::mem::replace(&mut self.pending, rest);
                for line in lines.split_inclusive(|it| *it == b'\n') {
                    each(&LogRecord::parse(line.strip_suffix(b"\n").unwrap_or(line)))?;
                }
            }
            if self.pending.len() > LINE_MAX {
                self.end(each)?;
            }
        }
    }

    /// Handles a last line without a newline, which is a part of a line.
    fn end(
        &mut self,
        each: &mut dyn FnMut(&LogRecord<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let line = std::mem::take(&mut self.pending);
        if line.is_empty() {
            return Ok(());
        }
        each(&LogRecord { ends_line: false, ..LogRecord::parse(&line) })
    }
}

/// Prints records: those of standard error to standard error.
struct LogPrinter {
    reader: RecordReader,
    lines: LinePrinter,
}

struct LinePrinter {
    shown: ShownRecords,
    /// Stream of the last record, whose buffer may have data.
    last: LogStream,
    output: PrintedStream,
    errors: PrintedStream,
}

struct PrintedStream {
    file: Box<dyn Write>,
    /// Whether the last record has not ended its line.
    is_inside_line: bool,
}

impl PrintedStream {
    fn new(file: impl Write + 'static) -> Self {
        Self { file: Box::new(file), is_inside_line: false }
    }
}

impl LogPrinter {
    fn new(shown: ShownRecords) -> Self {
        let lines = LinePrinter {
            shown,
            last: LogStream::Output,
            output: PrintedStream::new(report::standard_output()),
            errors: PrintedStream::new(report::standard_error()),
        };
        Self { reader: RecordReader::default(), lines }
    }

    fn print(&mut self, log: &mut File) -> anyhow::Result<()> {
        let lines = &mut self.lines;
        self.reader.read(log, &mut |record| lines.print(record))?;
        lines.flush()
    }

    /// Prints the rest of a file that will not be longer.
    fn end_file(&mut self) -> anyhow::Result<()> {
        let lines = &mut self.lines;
        self.reader.end(&mut |record| lines.print(record))?;
        lines.flush()
    }

    /// Prints the output of a container since the last step. `newer` is the newer half of its log. If the container
    /// `is_over`, its last line need not have an end.
    fn step(&mut self, folder: &Path, newer: &mut File, is_over: bool) -> anyhow::Result<()> {
        let failed = || format!("cannot read the log in {}", folder.display());
        self.print(newer).with_context(failed)?;
        // The log of a removed container does not exist any more, but all of it was printed.
        while let Some(after) = Halves::after(folder, newer).with_context(failed)? {
            // Prints the output that was written before this file became the older one.
            self.print(newer).with_context(failed)?;
            self.end_file().with_context(failed)?;
            if let Some(mut between) = after.older {
                self.print(&mut between).with_context(failed)?;
                self.end_file().with_context(failed)?;
            }
            *newer = after.newer;
            self.print(newer).with_context(failed)?;
        }
        if is_over { self.end_file().with_context(failed) } else { Ok(()) }
    }
}

impl LinePrinter {
    fn print(&mut self, record: &LogRecord<'_>) -> anyhow::Result<()> {
        if !self.shown.shows(record) {
            return Ok(());
        }
        // Both streams may be the same file, in which the order must be that of the log.
        if self.last != record.stream {
            self.flush()?;
            self.last = record.stream;
        }
        let stream = match record.stream {
            LogStream::Output => &mut self.output,
            LogStream::Errors => &mut self.errors,
        };
        if !stream.is_inside_line {
            stream.file.write_all(self.shown.prefix.as_bytes())?;
            if let Some(time) = record.time.filter(|_| self.shown.timestamps) {
                write!(stream.file, "{time} ")?;
            }
        }
        stream.file.write_all(record.content)?;
        if record.ends_line {
            stream.file.write_all(b"\n")?;
        }
        stream.is_inside_line = !record.ends_line;
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        match self.last {
            LogStream::Output => self.output.file.flush()?,
            LogStream::Errors => self.errors.file.flush()?,
        }
        Ok(())
    }
}

/// Moves the positions to records that have the last `lines` lines. Returns how many lines before them to leave out.
fn seek_tail(halves: &mut Halves, lines: usize) -> anyhow::Result<usize> {
    // The first record may be the end of a line, which is left out.
    let mut records = lines.saturating_add(1);
    loop {
        let newer = last_lines(&mut halves.newer, records)?;
        let mut is_everything = newer.at == 0;
        if let Some(older) = &mut halves.older {
            let start = last_lines(older, records.saturating_sub(newer.lines))?;
            is_everything = is_everything && start.at == 0;
            older.seek(SeekFrom::Start(start.at))?;
        }
        halves.newer.seek(SeekFrom::Start(newer.at))?;
        let found = count_lines(halves)?;
        if found > lines || is_everything {
            return Ok(found.saturating_sub(lines));
        }
        // Some of the records are parts of lines.
        records = records.saturating_mul(2);
    }
}

/// Counts the lines from the positions of both halves to their ends, and restores the positions. A last line without an
/// end counts.
fn count_lines(halves: &mut Halves) -> anyhow::Result<usize> {
    let (mut count, mut has_rest) = (0_usize, false);
    for log in halves.older.iter_mut().chain([&mut halves.newer]) {
        let mut each = |record: &LogRecord<'_>| {
            count = count.saturating_add(usize::from(record.ends_line));
            has_rest = !record.ends_line;
            Ok(())
        };
        let start = log.stream_position()?;
        let mut reader = RecordReader::default();
        reader.read(log, &mut each)?;
        reader.end(&mut each)?;
        log.seek(SeekFrom::Start(start))?;
    }
    Ok(count.saturating_add(usize::from(has_rest)))
}

/// Offset of the last lines in a file, and their number.
struct Start {
    at: u64,
    lines: usize,
}

fn last_lines(log: &mut File, lines: usize) -> anyhow::Result<Start> {
    let length = log.metadata()?.len();
    let mut end = length;
    if lines == 0 {
        return Ok(Start { at: length, lines: 0 });
    }
    let mut seen = 0;
    let mut buffer = vec![0; 64 << 10];
    let mut is_last = true;
    while end > 0 {
        let length = usize::try_from(end).map_or(buffer.len(), |end| end.min(buffer.len()));
        let start = end - length as u64;
        log.seek(SeekFrom::Start(start))?;
        log.read_exact(&mut buffer[..length])?;
        for (at, byte) in buffer[..length].iter().enumerate().rev() {
            // The newline at the very end ends the last line, but does not begin another one.
            if *byte == b'\n' && !std::mem::take(&mut is_last) {
                seen += 1;
                if seen == lines {
                    return Ok(Start { at: start + at as u64 + 1, lines });
                }
            }
            is_last = false;
        }
        end = start;
    }
    Ok(Start { at: 0, lines: if length == 0 { 0 } else { seen + 1 } })
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: &str = "2026-11-30T12:00:0";

    /// Returns a file with these lines.
    fn file(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        file
    }

    /// Returns a record. `time` is a digit for the second.
    fn record(time: u8, rest: &str) -> String {
        format!("{T}{time}.000000000Z {rest}\n")
    }

    /// Returns the printed parts of a log, in order, with `!` before each write to standard error.
    fn printed(halves: [&str; 2], tail: Option<usize>, shown: ShownRecords) -> String {
        #[derive(Clone, Default)]
        struct Sink(std::rc::Rc<std::cell::RefCell<Vec<u8>>>, &'static [u8]);
        impl Write for Sink {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                let mut all = self.0.borrow_mut();
                all.extend_from_slice(self.1);
                all.extend_from_slice(bytes);
                Ok(bytes.len())
            }

            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let older = (!halves[0].is_empty()).then(|| file(halves[0]));
        let mut halves = Halves { older, newer: file(halves[1]) };
        let skipped = tail.map_or(0, |lines| seek_tail(&mut halves, lines).unwrap());
        let output = Sink::default();
        let errors = Sink(std::rc::Rc::clone(&output.0), b"!");
        let mut printer = LogPrinter::new(ShownRecords { skipped, ..shown });
        printer.lines.output = PrintedStream::new(output.clone());
        printer.lines.errors = PrintedStream::new(errors);
        for log in halves.older.iter_mut().chain([&mut halves.newer]) {
            printer.print(log).unwrap();
            printer.end_file().unwrap();
        }
        let bytes = output.0.borrow().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn streams_are_kept_apart_and_lines_joined() {
        let newer = [
            record(1, "stdout F one"),
            record(1, "stderr F two"),
            record(2, "stdout P th"),
            record(2, "stderr P fo"),
            record(3, "stdout F ree"),
            record(3, "stdout F "),
            record(4, "stderr F ur"),
        ]
        .concat();
        let check = |shown, expect: &str| {
            // Each write to standard error has a mark.
            let found = printed(["", &newer], None, shown).replace("!\n", "\n");
            assert_eq!(found, expect);
        };
        check(ShownRecords::default(), "one\n!two\nth!foree\n\n!ur\n");
        let timestamps = ShownRecords { timestamps: true, ..ShownRecords::default() };
        let time = |second| format!("{T}{second}.000000000Z ");
        let expect = format!(
            "{}one\n!{}!two\n{}th!{}!foree\n{}\n!ur\n",
            time(1),
            time(1),
            time(2),
            time(2),
            time(3)
        );
        // `write!` writes the time and the space behind it separately.
        let found = printed(["", &newer], None, timestamps);
        let plain = |text: &str| text.replace('!', "");
        assert_eq!(plain(&found), plain(&expect));
    }

    #[test]
    fn times_limit_what_is_printed() {
        let newer = [
            "old\n".to_owned(),
            record(1, "stdout F a"),
            record(2, "stdout F b"),
            record(3, "stdout F c"),
        ]
        .concat();
        let check = |since: Option<u8>, until: Option<u8>, expect: &str| {
            let time = |second| format!("{T}{second}.000000000Z");
            let shown = ShownRecords {
                since: since.map(time),
                until: until.map(time),
                ..ShownRecords::default()
            };
            assert_eq!(printed(["", &newer], None, shown), expect);
        };
        check(None, None, "old\na\nb\nc\n");
        check(Some(2), None, "b\nc\n");
        check(None, Some(2), "old\na\nb\n");
        check(Some(2), Some(2), "b\n");
        check(Some(4), None, "");
    }

    #[test]
    fn the_last_lines_are_found() {
        let older =
            [record(1, "stdout F 1"), record(1, "stdout P 2"), record(1, "stdout P 2")].concat();
        let newer =
            [record(2, "stdout F 2"), record(2, "stderr F 3"), record(2, "stdout P 4")].concat();
        let check = |halves: [&str; 2], lines, expect: &str| {
            let found = printed(halves, Some(lines), ShownRecords::default());
            assert_eq!(found.replace('!', ""), expect, "{lines}");
        };
        check([&older, &newer], 0, "");
        check([&older, &newer], 1, "4");
        check([&older, &newer], 2, "3\n4");
        check([&older, &newer], 3, "222\n3\n4");
        check([&older, &newer], 4, "1\n222\n3\n4");
        check([&older, &newer], usize::MAX, "1\n222\n3\n4");
        check(["", &newer], 9, "2\n3\n4");
        // Logs of Quire 0.1, and one that continues.
        check(["a\nb\n", "c\nd"], 3, "b\nc\nd");
        check(["a\nb\n", ""], 1, "b\n");
        check(["", &format!("a\n{}", record(1, "stdout F b"))], 2, "a\nb\n");
        check(["", ""], 2, "");
    }

    /// The position of a follower is the end of an earlier run's log.
    #[test]
    fn a_follower_skips_the_end_of_a_line() {
        let mut log = file("a\nb");
        for (position, expect) in [(0, false), (1, true), (2, false), (3, true), (9, false)] {
            log.seek(SeekFrom::Start(position)).unwrap();
            assert_eq!(is_inside_line(&mut log).unwrap(), expect, "{position}");
        }
    }
}
