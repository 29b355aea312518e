//! The log of a detached container, whose size is limited (decision 7).
//!
//! The log has two files. When the newer one reaches half of the log's limit, it replaces the older one. The writer
//! never gets an error from a full disk, and never waits longer than for a write to the host.
//!
//! A rotation has three steps. A reader may open the log, or the writer may be killed, after each of them:
//!
//! 1. An empty file is created under a separate name, and the newer file gets a second name. Readers use
//!    neither name.
//! 2. The second name replaces the older file: both names now lead to the same file, and the older half is gone.
//! 3. The empty file replaces the newer one.
//!
//! So the newer file always exists, and a reader finds each half once. When the log is opened for writing, an
//! interrupted rotation is completed, and a record that was cut short by the death of the writer becomes a line.

pub mod record;

use std::fs::File;
use std::io::{self, ErrorKind, Write as _};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::folder::{LOG, LOG_NEXT, LOG_OLDER, LOG_TURNING};
use crate::life::log::record::{
    HEAD, LinePiece, LogRecord, LogStream, RecordBatch, pieces, time_text,
};

/// Default limit of a log, in bytes: enough for days of a server's messages, while a thousand logs take at most 64
/// GiB.
pub const SIZE: NonZeroU64 = NonZeroU64::new(64 << 20).expect("not zero");

/// How much of a container's output is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLimit {
    /// Nothing: the log has only sentences of Quire.
    Nothing,
    /// At most this number of bytes.
    Bytes(NonZeroU64),
    Unlimited,
}

/// Maximum content of a record, in bytes. Longer lines have several records, as in Docker, so that readers need little
/// memory.
const CONTENT_MAX: usize = 16 << 10;

/// Length from which records are written, in bytes.
const BATCH: usize = 64 << 10;

/// A log that is open for writing.
#[derive(Debug)]
pub(crate) struct Log {
    folder: PathBuf,
    file: File,
    /// Length of the newer file without notes, in bytes.
    length: u64,
    /// Number of the container's bytes in the newer file.
    content: u64,
    /// Maximum length of each file, in bytes.
    half: u64,
    /// Whether output is dropped.
    is_off: bool,
    /// Number of lost bytes of the container that notes in the log do not count yet.
    lost: u64,
    /// Number of lost bytes that the notes in the newer file count.
    told: u64,
    /// Length of those notes, in bytes.
    notes: u64,
}

impl Log {
    /// Opens or creates the log in a container's folder.
    pub(crate) fn open(folder: &Path, limit: LogLimit) -> io::Result<Self> {
        let mut file = open_end(folder, IfAbsent::Create)?;
        // A full disk must not prevent the start of a container. Then the first record continues the last line.
        drop(end_line(&mut file));
        let length = file.metadata()?.len();
        let half = match limit {
            LogLimit::Bytes(most) => most.get().div_ceil(2),
            LogLimit::Nothing | LogLimit::Unlimited => u64::MAX,
        };
        let is_off = limit == LogLimit::Nothing;
        let (folder, content) = (folder.to_owned(), length);
        let mut log =
            Self { folder, file, length, content, half, is_off, lost: 0, told: 0, notes: 0 };
        // Removes the remains of an interrupted rotation.
        log.remove_names();
        let older = open(&log.folder, LOG_OLDER)?;
        if older.is_some_and(|older| is_same(&older, &log.file).unwrap_or_default()) {
            log.begin()?;
        }
        Ok(log)
    }

    /// Appends output of a stream to the log. Bytes for which a full disk has no space are lost, and a note about this
    /// is added to the log as soon as there is space for it.
    pub(crate) fn write(&mut self, stream: LogStream, bytes: &[u8]) {
        if self.is_off {
            return;
        }
        let time = time_text(kernel::clock::now());
        let space = self.half.saturating_sub(HEAD as u64 + 1);
        let most = usize::try_from(space).map_or(CONTENT_MAX, |space| space.min(CONTENT_MAX));
        let mut batch = RecordBatch::default();
        for piece in pieces(bytes, most) {
            let is_wide = |log: &Self, batch: &RecordBatch| {
                let length = log.length + batch.text.len() as u64;
                piece.record_length() > log.half.saturating_sub(length)
            };
            if batch.text.len() >= BATCH || is_wide(self, &batch) {
                self.put(&mut batch);
            }
            // A record that does not fit into an empty file is written all the same.
            if self.length > 0 && is_wide(self, &batch) && !self.make_room() {
                self.lost += piece.length();
                continue;
            }
            batch.add(&time, stream, &piece);
        }
        self.put(&mut batch);
    }

    /// Writes records, and removes one that was only partly written.
    fn put(&mut self, batch: &mut RecordBatch) {
        if batch.text.is_empty() {
            return;
        }
        self.tell();
        match self.file.write_all(&batch.text) {
            Ok(()) => {
                self.length += batch.text.len() as u64;
                self.content += batch.content();
            }
            Err(error) => {
                tracing::debug!(%error, "lost a part of the container's output");
                let written = self.found().saturating_sub(self.length);
                let (whole, content) = batch.whole(written);
                let end = self.length + whole + self.notes;
                let is_cut = whole == written || self.file.set_len(end).is_ok();
                self.length += if is_cut { whole } else { written };
                self.content += content;
                self.lost += batch.content() - content;
            }
        }
        batch.clear();
    }

    /// Starts a new file. Without a second file, the first file is truncated, so that it does not grow. Returns whether
    /// the file has room.
    fn make_room(&mut self) -> bool {
        if self.turn().is_ok() {
            return true;
        }
        let is_empty = self.file.set_len(0).is_ok();
        if is_empty {
            self.lost += self.content + self.told;
            (self.length, self.content, self.told, self.notes) = (0, 0, 0, 0);
        }
        is_empty
    }

    /// Writes a note that counts the lost bytes.
    fn tell(&mut self) {
        if self.lost == 0 {
            return;
        }
        let lost = self.lost;
        let note = sentence(&format!(
            "{lost} bytes of the container's output are lost, because the disk refused them"
        ));
        let before = self.file.metadata().map(|it| it.len());
        match self.file.write_all(&note) {
            Ok(()) => {
                self.notes += note.len() as u64;
                (self.told, self.lost) = (self.told + lost, 0);
            }
            // A part of the note may have been written.
            Err(_) => drop(before.and_then(|length| self.file.set_len(length))),
        }
    }

    /// Returns the length of the newer file. Notes do not count, so that a small log has space for them.
    fn found(&self) -> u64 {
        self.file.metadata().map_or(self.length, |it| it.len().saturating_sub(self.notes))
    }

    /// Starts a new file; the current file becomes the older one.
    fn turn(&mut self) -> io::Result<()> {
        self.remove_names();
        let turned = self.keep().and_then(|()| self.begin());
        if turned.is_err() {
            self.remove_names();
        }
        turned
    }

    /// Makes the current file also the older one. Stores are on file systems with hard links, by which all objects
    /// get their names.
    #[expect(clippy::disallowed_methods, reason = "a log need not survive a crash of the host")]
    fn keep(&self) -> io::Result<()> {
        let [log, older, turning] = [LOG, LOG_OLDER, LOG_TURNING].map(|it| self.folder.join(it));
        // The next file is created first, before any data is removed, because the disk may have no space for it.
        self.make_next()?;
        std::fs::hard_link(log, &turning)?;
        std::fs::rename(&turning, older)?;
        // rename(2) leaves both names if they refer to the same file.
        drop(std::fs::remove_file(turning));
        Ok(())
    }

    /// Replaces the newer file, which is also the older one, by an empty file.
    #[expect(clippy::disallowed_methods, reason = "a log need not survive a crash of the host")]
    fn begin(&mut self) -> io::Result<()> {
        let next = self.folder.join(LOG_NEXT);
        let file = match File::options().append(true).open(&next) {
            Err(error) if error.kind() == ErrorKind::NotFound => self.make_next()?,
            file => file?,
        };
        std::fs::rename(next, self.folder.join(LOG))?;
        (self.file, self.length, self.content) = (file, 0, 0);
        (self.told, self.notes) = (0, 0);
        Ok(())
    }

    fn make_next(&self) -> io::Result<File> {
        File::options().append(true).create_new(true).open(self.folder.join(LOG_NEXT))
    }

    /// Removes the temporary names of an interrupted rotation.
    fn remove_names(&self) {
        for name in [LOG_NEXT, LOG_TURNING] {
            drop(std::fs::remove_file(self.folder.join(name)));
        }
    }
}

/// Appends a sentence to the container's log. Returns whether there was space for it.
pub(crate) fn add_sentence(folder: &Path, text: &str) -> bool {
    let add = |mut file: File| {
        end_line(&mut file)?;
        file.write_all(&sentence(text))
    };
    open_end(folder, IfAbsent::Refuse).and_then(add).is_ok()
}

/// Returns the record of a sentence by Quire, which is part of the container's errors.
fn sentence(text: &str) -> Vec<u8> {
    let text = format!("quire: {}", text.replace('\n', " "));
    let mut batch = RecordBatch::default();
    let piece = LinePiece { content: text.as_bytes(), ends_line: true };
    batch.add(&time_text(kernel::clock::now()), LogStream::Errors, &piece);
    batch.text
}

/// Whether a missing log is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IfAbsent {
    Create,
    Refuse,
}

/// Opens the newer file for appending.
fn open_end(folder: &Path, absent: IfAbsent) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).append(true).create(absent == IfAbsent::Create).open(folder.join(LOG))
}

/// Ends a last line that lacks its newline: a record of a writer that was killed, or output that Quire 0.1 wrote.
fn end_line(file: &mut File) -> io::Result<()> {
    let Some(last) = file.metadata()?.len().checked_sub(1) else { return Ok(()) };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    if byte == *b"\n" { Ok(()) } else { file.write_all(b"\n") }
}

/// Returns the text of the newer file, without the heads of records. Empty if it cannot be read.
#[must_use]
pub fn newer_text(folder: &Path) -> String {
    let bytes = std::fs::read(folder.join(LOG)).unwrap_or_default();
    let mut text = String::new();
    for line in bytes.split_inclusive(|it| *it == b'\n') {
        let record = LogRecord::parse(line.strip_suffix(b"\n").unwrap_or(line));
        text.push_str(&String::from_utf8_lossy(record.content));
        if record.ends_line {
            text.push('\n');
        }
    }
    text
}

impl Drop for Log {
    fn drop(&mut self) {
        self.tell();
    }
}

/// The two files of a log at the same point in time, open for reading.
#[derive(Debug)]
pub struct Halves {
    /// File before the newer one; `None` if there is only one.
    pub older: Option<File>,
    /// File that is being written.
    pub newer: File,
}

/// Maximum number of attempts. Files are rotated only once in many MiB.
const ATTEMPTS: u32 = 1000;

impl Halves {
    /// Opens the log in a container's folder; `None` if there is none.
    pub fn open(folder: &Path) -> io::Result<Option<Self>> {
        // Repeated until no rotation happens between the two opens.
        for _ in 0..ATTEMPTS {
            let (newer, older, again) =
                (open(folder, LOG)?, open(folder, LOG_OLDER)?, open(folder, LOG)?);
            match (newer, again) {
                (None, None) => return Ok(None),
                (Some(newer), Some(again)) if is_same(&newer, &again)? => {
                    // During a rotation, both names refer to the same file.
                    let is_half = |older: &File| is_same(older, &newer).map(|it| !it);
                    let older = match older {
                        Some(older) if is_half(&older)? => Some(older),
                        _ => None,
                    };
                    return Ok(Some(Self { older, newer }));
                }
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Err(io::Error::other("it changes too fast to be read"))
    }

    /// Opens the files that follow `file`, which was the newer file. `None` if it still is the newer file, or if there
    /// is no log any more.
    pub fn after(folder: &Path, file: &File) -> io::Result<Option<Self>> {
        let Some(Self { older, newer }) = Self::open(folder)? else { return Ok(None) };
        if is_same(file, &newer)? {
            return Ok(None);
        }
        let older = match older {
            Some(older) if !is_same(file, &older)? => Some(older),
            _ => None,
        };
        Ok(Some(Self { older, newer }))
    }
}

/// Opens one of the files; `None` if it does not exist or is not a regular file.
fn open(folder: &Path, name: &str) -> io::Result<Option<File>> {
    match File::open(folder.join(name)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Ok(file) if !file.metadata()?.is_file() => Ok(None),
        file => file.map(Some),
    }
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Length of a record with nine bytes.
    const NINE: u64 = 50;

    /// Returns the contents of records, which are whole.
    fn plain(text: &str) -> String {
        assert!(text.is_empty() || text.ends_with('\n'), "{text:?}");
        let mut plain = String::new();
        for line in text.lines() {
            let record = LogRecord::parse(line.as_bytes());
            assert!(record.time.is_some(), "{line}");
            plain.push_str(std::str::from_utf8(record.content).unwrap());
            plain.push_str(if record.ends_line { "\n" } else { "" });
        }
        plain
    }

    /// Returns the contents of the older and the newer half, as a reader finds them.
    fn found(folder: &Path) -> [String; 2] {
        let text = |file: File| plain(&io::read_to_string(file).unwrap());
        let Halves { older, newer } = Halves::open(folder).unwrap().unwrap();
        [older.map(text).unwrap_or_default(), text(newer)]
    }

    fn texts(folder: &Path) -> [String; 2] {
        [LOG_OLDER, LOG]
            .map(|it| plain(&std::fs::read_to_string(folder.join(it)).unwrap_or_default()))
    }

    /// Returns a log with a full newer half.
    fn full() -> (tempfile::TempDir, Log) {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::open(folder.path(), limit(2 * NINE)).unwrap();
        log.write(LogStream::Output, b"older 678\nnewer 678\n");
        assert_eq!(texts(folder.path()), ["older 678\n", "newer 678\n"]);
        (folder, log)
    }

    fn limit(bytes: u64) -> LogLimit {
        NonZeroU64::new(bytes).map_or(LogLimit::Unlimited, LogLimit::Bytes)
    }

    #[test]
    fn a_log_that_is_off_has_only_our_sentences() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::open(folder.path(), LogLimit::Nothing).unwrap();
        log.write(LogStream::Output, b"said\n");
        assert!(add_sentence(folder.path(), "why"));
        assert_eq!(newer_text(folder.path()).trim(), "quire: why");
    }

    #[test]
    fn a_turn_that_was_not_finished_loses_nothing_and_repeats_nothing() {
        let both = ["older 678\n", "newer 678\n"];
        type Step = fn(&Log);
        let make: Step = |log| drop(log.make_next().unwrap());
        let link: Step = |log| {
            let [from, to] = [LOG, LOG_TURNING].map(|it| log.folder.join(it));
            std::fs::hard_link(from, to).unwrap();
        };
        let keep: Step = |log| log.keep().unwrap();
        // In each row, the writer is killed after the last step.
        for (steps, expect) in [
            (&[make][..], both),
            (&[make, link], both),
            (&[link], both),
            // The older half is gone, and the newer one appears once.
            (&[keep], ["", both[1]]),
            (&[keep, link], ["", both[1]]),
        ] {
            let (folder, log) = full();
            let following = Halves::open(folder.path()).unwrap().unwrap();
            steps.iter().for_each(|step| step(&log));
            drop(log);
            assert_eq!(found(folder.path()), expect);
            assert!(Halves::after(folder.path(), &following.newer).unwrap().is_none());
            // The next writer completes the rotation.
            let mut log = Log::open(folder.path(), limit(2 * NINE)).unwrap();
            let finished = found(folder.path());
            assert_eq!(finished.concat(), expect.concat());
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
            log.write(LogStream::Output, b"next\n");
            assert_eq!(found(folder.path()), ["newer 678\n", "next\n"]);
            let after = Halves::after(folder.path(), &following.newer).unwrap().unwrap();
            assert!(after.older.is_none(), "it was read");
            assert_eq!(plain(&io::read_to_string(after.newer).unwrap()), "next\n");
        }
    }

    /// The file cannot be rotated, so it is truncated, and readers read it.
    #[test]
    fn what_stands_in_the_way_costs_no_more_than_a_half() {
        for name in [LOG_OLDER, LOG_NEXT, LOG_TURNING] {
            let folder = tempfile::tempdir().unwrap();
            let mut log = Log::open(folder.path(), limit(2 * NINE)).unwrap();
            std::fs::create_dir(folder.path().join(name)).unwrap();
            let mut newer = String::new();
            for lost in [10, 30, 50] {
                log.write(LogStream::Output, b"first 678\nnewer 678\n");
                newer = format!(
                    "quire: {lost} bytes of the container's output are lost, because the disk \
                     refused them\nnewer 678\n"
                );
                assert_eq!(found(folder.path()), ["", &newer], "{name}");
            }
            std::fs::remove_dir(folder.path().join(name)).unwrap();
            log.write(LogStream::Output, b"last\n");
            assert_eq!(found(folder.path()), [&newer, "last\n"], "{name}");
        }
    }

    /// A reader finds at any time all data of the last two halves, and each line only once.
    #[test]
    fn who_reads_meanwhile_misses_no_half_and_sees_none_twice() {
        const LINES: u64 = 10_000;
        let folder = tempfile::tempdir().unwrap();
        // A half holds ten records.
        let mut log = Log::open(folder.path(), limit(20 * NINE)).unwrap();
        let written = AtomicU64::new(0);
        let numbers = |text: &str| -> Vec<u64> {
            plain(text).lines().map(|it| it.parse().unwrap()).collect()
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=LINES {
                    log.write(LogStream::Output, format!("{number:09}\n").as_bytes());
                    written.store(number, Ordering::SeqCst);
                }
            });
            let mut at = 0;
            while at < LINES {
                let before = written.load(Ordering::SeqCst);
                let Halves { older, mut newer } = Halves::open(folder.path()).unwrap().unwrap();
                let mut text = older.map(|it| io::read_to_string(it).unwrap()).unwrap_or_default();
                newer.read_to_string(&mut text).unwrap();
                let seen = numbers(&text);
                let (first, last) = (seen.first().copied(), seen.last().copied().unwrap_or(0));
                assert!(last >= before, "{last} {before}");
                assert!(seen.iter().copied().eq(first.unwrap_or(1)..=last), "{seen:?}");
                at = last;
                // The reader follows the log for a while. It misses halves that were created and removed between two
                // reads.
                if let Some(Halves { older, newer }) = Halves::after(folder.path(), &newer).unwrap()
                {
                    let rest = io::read_to_string(older.unwrap_or(newer)).unwrap();
                    let next = numbers(&rest).first().copied();
                    assert!(next.is_none_or(|next| next > last), "{next:?} after {last}");
                }
            }
        });
    }

    #[test]
    fn no_link_is_written_to() {
        let (folder, mut log) = full();
        let other = folder.path().join("other");
        std::fs::write(&other, "others'").unwrap();
        std::os::unix::fs::symlink(&other, folder.path().join(LOG_NEXT)).unwrap();
        log.write(LogStream::Output, b"012345678\nnew\n");
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "others'");
        assert_eq!(texts(folder.path()), ["012345678\n", "new\n"]);
        assert!(!folder.path().join(LOG_NEXT).exists());
    }

    #[test]
    fn the_older_half_goes_at_the_end_of_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let open = |most| Log::open(folder.path(), limit(most)).unwrap();
        let check = |older: &str, newer: &str| assert_eq!(texts(folder.path()), [older, newer]);
        let mut log = open(200);
        log.write(LogStream::Output, b"one\ntwo\n");
        check("", "one\ntwo\n");
        log.write(LogStream::Output, b"three\n");
        check("one\ntwo\n", "three\n");
        // The next writer determines the current length.
        let mut log = open(200);
        log.write(LogStream::Output, b"4\nfive\n");
        check("three\n4\n", "five\n");
        // A line that is longer than a half is split.
        let part = 100 - HEAD - 1;
        let (second, rest) = ("b".repeat(part), "c".repeat(10));
        let line = format!("{}{second}{rest}\n", "a".repeat(part));
        log.write(LogStream::Output, line.as_bytes());
        check(&second, &format!("{rest}\n"));
        let mut log = open(0);
        log.write(LogStream::Output, &[b'x'; 100]);
        check(&second, &format!("{rest}\n{}", "x".repeat(100)));
    }

    #[test]
    fn a_long_line_has_several_records() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::open(folder.path(), LogLimit::Bytes(SIZE)).unwrap();
        let line = "x".repeat(3 * CONTENT_MAX) + "\n";
        log.write(LogStream::Output, line.as_bytes());
        let text = std::fs::read_to_string(folder.path().join(LOG)).unwrap();
        assert_eq!((text.lines().count(), plain(&text)), (3, line));
    }

    #[test]
    fn records_have_their_stream_and_time() {
        let folder = tempfile::tempdir().unwrap();
        let before = time_text(kernel::clock::now());
        let mut log = Log::open(folder.path(), LogLimit::Bytes(SIZE)).unwrap();
        log.write(LogStream::Output, b"out");
        log.write(LogStream::Errors, b"err\n");
        log.write(LogStream::Output, b"put\n");
        assert!(add_sentence(folder.path(), "said\nin two lines"));
        let after = time_text(kernel::clock::now());
        let text = std::fs::read_to_string(folder.path().join(LOG)).unwrap();
        let records: Vec<_> = text.lines().map(|it| LogRecord::parse(it.as_bytes())).collect();
        let found: Vec<_> =
            records.iter().map(|it| (it.stream, it.ends_line, it.content)).collect();
        let (output, errors) = (LogStream::Output, LogStream::Errors);
        let expect: [(_, _, &[u8]); 4] = [
            (output, false, b"out"),
            (errors, true, b"err"),
            (output, true, b"put"),
            (errors, true, b"quire: said in two lines"),
        ];
        assert_eq!(found, expect);
        let times: Vec<_> = records.iter().map(|it| it.time.unwrap()).collect();
        assert!(
            times.is_sorted()
                && times.iter().all(|it| (before.as_str()..=after.as_str()).contains(it))
        );
    }

    /// A writer that was killed, and Quire 0.1, leave a last line without a newline.
    #[test]
    fn a_line_without_end_is_not_continued_by_a_record() {
        for rest in ["2026-11-30", "output without records", "x\ny"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(LOG);
            std::fs::write(&path, rest).unwrap();
            let mut log = Log::open(folder.path(), LogLimit::Bytes(SIZE)).unwrap();
            log.write(LogStream::Output, b"next\n");
            drop(log);
            let text = std::fs::read_to_string(&path).unwrap();
            let (old, last) = text.trim_end().rsplit_once('\n').unwrap();
            assert_eq!((old, plain(&format!("{last}\n"))), (rest, "next\n".to_owned()));
            assert_eq!(newer_text(folder.path()), format!("{rest}\nnext\n"));
            std::fs::write(&path, rest).unwrap();
            assert!(add_sentence(folder.path(), "end"));
            assert_eq!(newer_text(folder.path()), format!("{rest}\nquire: end\n"));
        }
        let folder = tempfile::tempdir().unwrap();
        assert!(!add_sentence(folder.path(), "end"));
        assert!(!folder.path().join(LOG).exists());
    }

    #[test]
    fn a_full_disk_loses_what_it_has_no_room_for_and_the_log_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::options().write(true).open("/dev/full").unwrap();
        let gone = folder.path().join("gone");
        let mut log = Log {
            folder: gone,
            file,
            length: 0,
            content: 0,
            is_off: false,
            half: 100,
            lost: 0,
            told: 0,
            notes: 0,
        };
        log.write(LogStream::Output, b"0123456789\n0123456789\n0123456789\n");
        log.file = File::options().append(true).create(true).open(folder.path().join(LOG)).unwrap();
        log.half = 1000;
        log.write(LogStream::Output, b"back\n");
        log.write(LogStream::Output, b"again\n");
        let note =
            "quire: 33 bytes of the container's output are lost, because the disk refused them\n";
        assert_eq!(texts(folder.path())[1], format!("{note}back\nagain\n"));
        // The note is also written if the container writes no further data.
        log.lost = 33;
        drop(log);
        assert_eq!(texts(folder.path())[1], format!("{note}back\nagain\n{note}"));
    }
}
