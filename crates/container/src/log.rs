//! What a container without a command of its own writes: its log, which has an end (decision 7).
//!
//! It is in two files. When the newer one has half of what the log may have, it becomes the older one, in the place of the
//! one before. Whoever writes is never told of a full disk and never waits for more than a write of the host's takes.

use std::fs::File;
use std::io::{self, Write as _};
use std::num::NonZeroU64;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;

/// The newer file in a container's folder.
pub const LOG: &str = "log";

/// The older one.
pub const OLDER: &str = "log.old";

/// A new one before it has its name.
const NEXT: &str = "log.next";

/// What a log may have if nothing is said: days of what servers say, and a thousand of them are 64 GiB at most.
pub const SIZE: NonZeroU64 = NonZeroU64::new(64 << 20).expect("not zero");

/// A log that is being written.
#[derive(Debug)]
pub(crate) struct Log {
    folder: PathBuf,
    file: File,
    length: u64,
    /// The most that one file may have.
    half: u64,
}

impl Log {
    /// Goes on with the log of a container's folder, or begins it. `most` is what it may have; none is no limit.
    pub(crate) fn open(folder: &Path, most: Option<NonZeroU64>) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(folder.join(LOG))?;
        let length = file.metadata()?.len();
        let half = most.map_or(u64::MAX, |most| most.get().div_ceil(2));
        Ok(Self { folder: folder.to_owned(), file, length, half })
    }

    /// Adds to it. What a full disk has no room for is lost.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.half.saturating_sub(self.length);
            let fits = usize::try_from(room).map_or(bytes.len(), |room| room.min(bytes.len()));
            let (mut now, mut later) = bytes.split_at(fits);
            if !later.is_empty() {
                // At the end of a line, or before one that does not fit, unless it has a file to itself.
                match now.iter().rposition(|it| *it == b'\n') {
                    Some(end) => (now, later) = bytes.split_at(end + 1),
                    None if self.length > 0 => (now, later) = bytes.split_at(0),
                    None => {}
                }
            }
            match self.file.write_all(now) {
                Ok(()) => self.length += now.len() as u64,
                Err(error) => {
                    tracing::debug!(%error, "some of what the container wrote is lost");
                    // Some of it may be there.
                    self.length = self.file.metadata().map_or(self.length, |it| it.len());
                    if now.len() == bytes.len() {
                        return;
                    }
                }
            }
            if !later.is_empty() && self.turn().is_err() {
                // Without a second file the first begins anew, lest it grows.
                match self.file.set_len(0) {
                    Ok(()) => self.length = 0,
                    Err(_) => return,
                }
            }
            bytes = later;
        }
    }

    /// Begins a new file.
    #[expect(
        clippy::disallowed_methods,
        reason = "a log does not outlive a crash of the host whole"
    )]
    fn turn(&mut self) -> io::Result<()> {
        let [log, older, next] = [LOG, OLDER, NEXT].map(|it| self.folder.join(it));
        // First, so that there is always one to write to.
        let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
        let file = File::options().create(true).append(true).custom_flags(flags).open(&next)?;
        file.set_len(0)?;
        // At every moment there is a log, for who reads it and for when this process is killed.
        match renameat_with(CWD, &next, CWD, &log, RenameFlags::EXCHANGE) {
            Ok(()) => std::fs::rename(next, older)?,
            // The file system cannot.
            Err(Errno::INVAL | Errno::NOSYS) => {
                std::fs::rename(&log, older)?;
                std::fs::rename(next, log)?;
            }
            Err(errno) => return Err(errno.into()),
        }
        (self.file, self.length) = (file, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(folder: &Path) -> [String; 2] {
        [OLDER, LOG].map(|it| std::fs::read_to_string(folder.join(it)).unwrap_or_default())
    }

    /// As after a kill between the two names: the one that is left over has what was the older one.
    #[test]
    fn there_is_always_a_log_and_no_link_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::open(folder.path(), NonZeroU64::new(20)).unwrap();
        std::fs::write(folder.path().join(NEXT), "left over").unwrap();
        log.write(b"012345678\nnew\n");
        assert_eq!(texts(folder.path()), ["012345678\n", "new\n"]);
        assert!(!folder.path().join(NEXT).exists());
        let other = folder.path().join("other");
        std::fs::write(&other, "others'").unwrap();
        std::os::unix::fs::symlink(&other, folder.path().join(NEXT)).unwrap();
        log.write(b"012345678\nnew\n");
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "others'");
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
        // Whoever goes on with it knows how much there is.
        let mut log = open(20);
        log.write(b"4\nfive\n");
        check("three\n4\n", "five\n");
        // A line that is longer than that is cut.
        log.write(b"0123456789abcdefghijklmnopqrstuvwxyz\n");
        check("klmnopqrst", "uvwxyz\n");
        let mut log = open(0);
        log.write(&[b'x'; 100]);
        assert_eq!(texts(folder.path())[1].len(), 107);
    }

    #[test]
    fn a_full_disk_loses_what_it_has_no_room_for() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::options().write(true).open("/dev/full").unwrap();
        let gone = folder.path().join("gone");
        let mut log = Log { folder: gone, file, length: 0, half: 10 };
        log.write(b"0123456789\n0123456789\n0123456789\n");
        log.file = File::options().append(true).create(true).open(folder.path().join(LOG)).unwrap();
        log.write(b"back\n");
        assert_eq!(texts(folder.path())[1], "back\n");
    }
}
