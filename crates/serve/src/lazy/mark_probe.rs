//! Tests whether a fanotify mark intercepts reads of an open file. A filler's own reads must not be intercepted.
//!
//! The kernel decides this when a file is opened. Reads of a file that was opened while it had a mark wait for all
//! marks of the file, even for later ones (Linux `fs/notify/fsnotify.c`, `file_set_fsnotify_mode_from_watchers`). A
//! mark exists for a moment longer than its group. So a filler could open its device while the mark of an earlier
//! service still exists, and would then wait for its own mark.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::{Duration, Instant};

use kernel::fanotify::{Group, PrecontentError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Timeout of a read of one byte, which the disk may have to load.
const PATIENCE: Duration = Duration::from_secs(5);

/// The marks that a file had when it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpenedBehind {
    /// The file had no mark, so its reads never wait.
    Nothing,
    /// The file had a mark, which may be gone.
    AMark,
    /// The file has a mark of another process that does not answer.
    OthersMark,
}

/// Finds out whether a file was opened while it had a mark, by a temporary mark and a read.
pub(super) fn opened_behind(file: &File) -> Result<OpenedBehind, PrecontentError> {
    let group = match Group::new() {
        // The kernel has no such marks.
        Err(PrecontentError::Unsupported) => return Ok(OpenedBehind::Nothing),
        group => group?,
    };
    match group.mark(file.as_fd()) {
        Err(PrecontentError::Unsupported | PrecontentError::FileSystem { .. }) => {
            return Ok(OpenedBehind::Nothing);
        }
        marked => marked?,
    }
    let Ok(reading) = read(file) else { return Ok(OpenedBehind::OthersMark) };
    let mut both =
        [group.as_fd(), reading.as_fd()].map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN));
    ready(&mut both, PATIENCE);
    let [event, read] = both.map(|it| !it.revents().is_empty());
    if read {
        return Ok(OpenedBehind::Nothing);
    }
    if !event {
        return Ok(OpenedBehind::OthersMark);
    }
    // When the group is closed, the read continues unless other marks block it. Until the read ends, the thread holds
    // the file and the file's lock.
    drop(group);
    let mut read = [PollFd::from_borrowed_fd(reading.as_fd(), PollFlags::IN)];
    let is_done = ready(&mut read, PATIENCE);
    Ok(if is_done { OpenedBehind::AMark } else { OpenedBehind::OthersMark })
}

/// Returns whether one of these files gets ready before the timeout.
fn ready(files: &mut [PollFd<'_>], time: Duration) -> bool {
    let begun = Instant::now();
    while let Some(left) = time.checked_sub(begun.elapsed()) {
        let left =
            Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        match poll(files, Some(&left)) {
            Err(Errno::INTR) => {}
            done => return done.is_ok_and(|it| it > 0),
        }
    }
    false
}

/// Reads a byte in a thread, and returns a pipe that becomes readable afterwards. The thread is not joined, because it
/// may block for ever.
fn read(file: &File) -> io::Result<io::PipeReader> {
    let (reader, writer) = io::pipe()?;
    let file = file.try_clone()?;
    thread::Builder::new().spawn(move || {
        let _byte = file.read_at(&mut [0], 0);
        // The file is closed before the pipe, because the caller then checks whether another process has it open.
        drop(file);
        drop(writer);
    })?;
    Ok(reader)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_opened_behind_a_mark_is_found_out_also_when_the_mark_is_gone() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "text").unwrap();
        let group = match Group::new() {
            Ok(group) => group,
            Err(error) => return testing::skipped(&error.to_string()),
        };
        let open = || File::open(&path).unwrap();
        let before = open();
        if let Err(error) = group.mark(before.as_fd()) {
            return testing::skipped(&error.to_string());
        }
        let behind = open();
        assert_eq!(opened_behind(&before).unwrap(), OpenedBehind::Nothing);
        group.unmark(before.as_fd()).unwrap();
        drop(group);
        assert_eq!(opened_behind(&behind).unwrap(), OpenedBehind::AMark);
        assert_eq!(opened_behind(&before).unwrap(), OpenedBehind::Nothing);
        // The mark of the probe is removed as well.
        testing::fake::wait_for("a file without marks", || {
            opened_behind(&open()).unwrap() == OpenedBehind::Nothing
        });
    }
}
