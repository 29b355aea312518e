//! Whether reads of an open file wait for answers. Those of a filler must not.
//!
//! The kernel decides that when a file is opened. One that is opened behind a mark waits for all marks of the file, also for
//! those that come later (Linux `fs/notify/fsnotify.c`, `file_set_fsnotify_mode_from_watchers`). A mark outlives its group by a
//! moment. So a filler could open its device behind the last mark of another service, and then wait for its own.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::thread;
use std::time::{Duration, Instant};

use kernel::fanotify::{Group, PrecontentError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// How long a read may take. It is one byte, which the disk may have.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a file was opened behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpenedBehind {
    /// No mark: it waits for nobody.
    Nothing,
    /// A mark. It may be gone.
    AMark,
    /// A mark that others have, who do not answer.
    OthersMark,
}

/// Finds out what a file was opened behind, by a mark of its own and a read. The mark is gone afterwards.
pub(super) fn opened_behind(file: &File) -> Result<OpenedBehind, PrecontentError> {
    let group = match Group::new() {
        // There are no marks.
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
    // Without the group the reader goes on, if no others keep it. It has the file until then, and its lock.
    drop(group);
    let mut read = [PollFd::from_borrowed_fd(reading.as_fd(), PollFlags::IN)];
    let is_done = ready(&mut read, PATIENCE);
    Ok(if is_done { OpenedBehind::AMark } else { OpenedBehind::OthersMark })
}

/// Whether one of them is ready within this time.
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

/// Has a thread read a byte, and returns what can be read from once it has. The thread may wait for others for ever: nobody
/// waits for it.
fn read(file: &File) -> io::Result<io::PipeReader> {
    let (reader, writer) = io::pipe()?;
    let file = file.try_clone()?;
    thread::Builder::new().spawn(move || {
        let _byte = file.read_at(&mut [0], 0);
        // Before the other end is told: whoever has the file open is looked for then.
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
        // Its own mark goes, too.
        testing::fake::wait_for("a file without marks", || {
            opened_behind(&open()).unwrap() == OpenedBehind::Nothing
        });
    }
}
