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
//! interrupted rotation is completed.

use std::fs::File;
use std::io::{self, ErrorKind, Write as _};
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::folder::{LOG, LOG_NEXT, LOG_OLDER, LOG_TURNING};

/// Default limit of a log, in bytes: enough for days of a server's messages, while a thousand logs take at most 64
/// GiB.
pub const SIZE: NonZeroU64 = NonZeroU64::new(64 << 20).expect("not zero");

/// A log that is open for writing.
#[derive(Debug)]
pub(crate) struct Log {
    folder: PathBuf,
    file: File,
    length: u64,
    /// Maximum length of each file, in bytes.
    half: u64,
    /// Number of lost bytes of the container that notes in the log do not count yet.
    lost: u64,
    /// Number of lost bytes that the notes in the newer file count.
    told: u64,
    /// Length of those notes, in bytes.
    notes: u64,
}

impl Log {
    /// Opens or creates the log in a container's folder. `most` is the size limit in bytes; `None` means no limit.
    pub(crate) fn open(folder: &Path, most: Option<NonZeroU64>) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(folder.join(LOG))?;
        let length = file.metadata()?.len();
        let half = most.map_or(u64::MAX, |most| most.get().div_ceil(2));
        let mut log =
            Self { folder: folder.to_owned(), file, length, half, lost: 0, told: 0, notes: 0 };
        // Removes the remains of an interrupted rotation.
        log.remove_names();
        let older = open(folder, LOG_OLDER)?;
        if older.is_some_and(|older| is_same(&older, &log.file).unwrap_or_default()) {
            log.begin()?;
        }
        Ok(log)
    }

    /// Appends to the log. Bytes for which a full disk has no space are lost, and a note about this is added to the
    /// log as soon as there is space for it.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.tell();
            let room = self.half.saturating_sub(self.length);
            let fits = usize::try_from(room).map_or(bytes.len(), |room| room.min(bytes.len()));
            let (mut now, mut later) = bytes.split_at(fits);
            if !later.is_empty() {
                // Splits the data at the end of a line. If a line does not fit, splits before it, unless the line
                // would be the first in its file.
                match now.iter().rposition(|it| *it == b'\n') {
                    Some(end) => (now, later) = bytes.split_at(end + 1),
                    None if self.length > 0 => (now, later) = bytes.split_at(0),
                    None => {}
                }
            }
            match self.file.write_all(now) {
                Ok(()) => self.length += now.len() as u64,
                Err(error) => {
                    tracing::debug!(%error, "lost a part of the container's output");
                    // A part may have been written.
                    let length = self.found();
                    self.lost +=
                        (now.len() as u64).saturating_sub(length.saturating_sub(self.length));
                    self.length = length;
                    if now.len() == bytes.len() {
                        return;
                    }
                }
            }
            if !later.is_empty() && self.turn().is_err() {
                // Without a second file, the first file is truncated, so that it does not grow.
                match self.file.set_len(0) {
                    Ok(()) => {
                        self.lost += self.length + self.told;
                        (self.length, self.told, self.notes) = (0, 0, 0);
                    }
                    Err(_) => return self.lost += later.len() as u64,
                }
            }
            bytes = later;
        }
    }

    /// Writes a note that counts the lost bytes. The note may be inside a line whose rest is lost.
    fn tell(&mut self) {
        if self.lost == 0 {
            return;
        }
        let lost = self.lost;
        let note = format!(
            "\nquire: {lost} bytes of the container's output are lost, because the disk refused \
            them\n"
        );
        match self.file.write_all(note.as_bytes()) {
            Ok(()) => {
                self.notes += note.len() as u64;
                (self.told, self.lost) = (self.told + lost, 0);
            }
            // A note that was only partly written counts as data of the container.
            Err(_) => self.length = self.found(),
        }
    }

    /// Returns the number of the container's bytes in the newer file. Notes do not count, so that a small log has
    /// space for them.
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
        (self.file, self.length, self.told, self.notes) = (file, 0, 0, 0);
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
    let log = File::options().append(true).open(folder.join(LOG));
    log.and_then(|mut log| log.write_all(format!("quire: {text}\n").as_bytes())).is_ok()
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

    /// Returns the contents of the older and the newer half, as a reader finds them.
    fn found(folder: &Path) -> [String; 2] {
        let text = |file: File| io::read_to_string(file).unwrap();
        let Halves { older, newer } = Halves::open(folder).unwrap().unwrap();
        [older.map(text).unwrap_or_default(), text(newer)]
    }

    fn texts(folder: &Path) -> [String; 2] {
        [LOG_OLDER, LOG].map(|it| std::fs::read_to_string(folder.join(it)).unwrap_or_default())
    }

    /// Returns a log with a full newer half.
    fn full() -> (tempfile::TempDir, Log) {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::open(folder.path(), NonZeroU64::new(20)).unwrap();
        log.write(b"older 678\nnewer 678\n");
        assert_eq!(texts(folder.path()), ["older 678\n", "newer 678\n"]);
        (folder, log)
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
            let mut log = Log::open(folder.path(), NonZeroU64::new(20)).unwrap();
            let finished = found(folder.path());
            assert_eq!(finished.concat(), expect.concat());
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
            log.write(b"next\n");
            assert_eq!(found(folder.path()), ["newer 678\n", "next\n"]);
            let after = Halves::after(folder.path(), &following.newer).unwrap().unwrap();
            assert!(after.older.is_none(), "it was read");
            assert_eq!(io::read_to_string(after.newer).unwrap(), "next\n");
        }
    }

    /// The file cannot be rotated, so it is truncated, and readers read it.
    #[test]
    fn what_stands_in_the_way_costs_no_more_than_a_half() {
        for name in [LOG_OLDER, LOG_NEXT, LOG_TURNING] {
            let folder = tempfile::tempdir().unwrap();
            let mut log = Log::open(folder.path(), NonZeroU64::new(20)).unwrap();
            std::fs::create_dir(folder.path().join(name)).unwrap();
            let mut newer = String::new();
            for lost in [10, 30, 50] {
                log.write(b"first 678\nnewer 678\n");
                newer = format!(
                    "\nquire: {lost} bytes of the container's output are lost, because the disk \
                     refused them\nnewer 678\n"
                );
                assert_eq!(found(folder.path()), ["", &newer], "{name}");
            }
            std::fs::remove_dir(folder.path().join(name)).unwrap();
            log.write(b"last\n");
            assert_eq!(found(folder.path()), [&newer, "last\n"], "{name}");
        }
    }

    /// A reader finds at any time all data of the last two halves, and each line only once.
    #[test]
    fn who_reads_meanwhile_misses_no_half_and_sees_none_twice() {
        const LINES: u64 = 10_000;
        let folder = tempfile::tempdir().unwrap();
        // A half holds ten lines of ten bytes.
        let mut log = Log::open(folder.path(), NonZeroU64::new(200)).unwrap();
        let written = AtomicU64::new(0);
        let numbers =
            |text: &str| -> Vec<u64> { text.lines().map(|it| it.parse().unwrap()).collect() };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=LINES {
                    log.write(format!("{number:09}\n").as_bytes());
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
        log.write(b"012345678\nnew\n");
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "others'");
        assert_eq!(texts(folder.path()), ["012345678\n", "new\n"]);
        assert!(!folder.path().join(LOG_NEXT).exists());
    }

    #[test]
    fn the_older_half_goes_at_the_end_of_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let open = |most| Log::open(folder.path(), NonZeroU64::new(most)).unwrap();
        let check = |older: &str, newer: &str| assert_eq!(texts(folder.path()), [older, newer]);
        let mut log = open(20);
        log.write(b"one\ntwo\n");
        check("", "one\ntwo\n");
        log.write(b"three\n");
        check("one\ntwo\n", "three\n");
        // The next writer determines the current length.
        let mut log = open(20);
        log.write(b"4\nfive\n");
        check("three\n4\n", "five\n");
        // A line that is longer than a half is split.
        log.write(b"0123456789abcdefghijklmnopqrstuvwxyz\n");
        check("klmnopqrst", "uvwxyz\n");
        let mut log = open(0);
        log.write(&[b'x'; 100]);
        assert_eq!(texts(folder.path())[1].len(), 107);
    }

    #[test]
    fn a_full_disk_loses_what_it_has_no_room_for_and_the_log_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::options().write(true).open("/dev/full").unwrap();
        let gone = folder.path().join("gone");
        let mut log = Log { folder: gone, file, length: 0, half: 10, lost: 0, told: 0, notes: 0 };
        log.write(b"0123456789\n0123456789\n0123456789\n");
        log.file = File::options().append(true).create(true).open(folder.path().join(LOG)).unwrap();
        log.half = 1000;
        log.write(b"back\n");
        log.write(b"again\n");
        let note =
            "\nquire: 33 bytes of the container's output are lost, because the disk refused them\n";
        assert_eq!(texts(folder.path())[1], format!("{note}back\nagain\n"));
        // The note is also written if the container writes no further data.
        log.lost = 33;
        drop(log);
        assert_eq!(texts(folder.path())[1], format!("{note}back\nagain\n{note}"));
    }
}
