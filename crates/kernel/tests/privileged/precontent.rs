//! Reads of marked files.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::thread;

use kernel::fanotify::{EventBuffer, Group, PrecontentError, ReadEvent};
use rustix::event::{PollFd, PollFlags, poll};
use testing::skipped;

const SIZE: usize = 1 << 20;

/// Makes a sparse file, which is opened for writing before it is marked, and the group that marks it.
fn marked(folder: &Path) -> Option<(Group, File)> {
    marked_by(folder, Group::new)
}

fn marked_by(
    folder: &Path,
    make: impl FnOnce() -> Result<Group, PrecontentError>,
) -> Option<(Group, File)> {
    let path = folder.join("device");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(SIZE as u64).unwrap();
    let group = match make() {
        Err(PrecontentError::Forbidden) => {
            skipped("this is not root of the host");
            return None;
        }
        group => group.unwrap(),
    };
    match group.mark(file.as_fd()) {
        Err(PrecontentError::Unsupported) => {
            skipped("pre-content events: this kernel is older than Linux 6.14");
            None
        }
        Err(PrecontentError::FileSystem { .. }) => {
            skipped("the file system of temporary files has no pre-content events");
            None
        }
        marked => {
            marked.unwrap();
            Some((group, file))
        }
    }
}

/// Waits for events, and returns them.
fn events(group: &Group) -> Vec<ReadEvent> {
    poll(&mut [PollFd::new(group, PollFlags::IN)], None).unwrap();
    group.read(&mut EventBuffer::default()).unwrap()
}

fn read(path: &Path, from: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4096];
    File::open(path)?.read_exact_at(&mut bytes, from)?;
    Ok(bytes)
}

#[test]
fn readers_get_what_was_written_while_they_waited() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some((group, file)) = marked(folder.path()) else { return };
    let path = folder.path().join("device");
    thread::scope(|scope| {
        let readers: Vec<_> = (0..4_u64)
            .map(|number| {
                let path = &path;
                scope.spawn(move || read(path, number * 65_536))
            })
            .collect();
        let mut answered = 0;
        while answered < 4 {
            for event in events(&group) {
                assert!(event.range.start % 4096 == 0 && !event.range.is_empty(), "{event:?}");
                assert_eq!(event.pid, i32::try_from(std::process::id()).unwrap());
                let length = usize::try_from(event.range.end - event.range.start).unwrap();
                // The descriptor was opened before the mark, so the write causes no event.
                file.write_all_at(&vec![7; length], event.range.start).unwrap();
                group.allow(event).unwrap();
                answered += 1;
            }
        }
        for reader in readers {
            assert_eq!(reader.join().unwrap().unwrap(), [7; 4096]);
        }
    });
    // Without the mark, reads do not block.
    group.unmark(file.as_fd()).unwrap();
    assert_eq!(read(&path, 512 << 10).unwrap(), [0; 4096]);
    assert!(group.read(&mut EventBuffer::default()).unwrap().is_empty());
}

#[test]
fn who_is_denied_gets_an_error_and_may_try_again() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some((group, file)) = marked(folder.path()) else { return };
    let path = folder.path().join("device");
    for fills in [false, true] {
        thread::scope(|scope| {
            let reader = scope.spawn(|| read(&path, 0));
            while !reader.is_finished() {
                if poll(
                    &mut [PollFd::new(&group, PollFlags::IN)],
                    Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 }),
                )
                .unwrap()
                    == 0
                {
                    continue;
                }
                for event in group.read(&mut EventBuffer::default()).unwrap() {
                    if fills {
                        file.write_all_at(&[9; 4096], 0).unwrap();
                        group.allow(event).unwrap();
                    } else {
                        group.deny(event).unwrap();
                    }
                }
            }
            let got = reader.join().unwrap();
            if fills {
                assert_eq!(got.unwrap(), [9; 4096]);
            } else {
                let errno = rustix::io::Errno::IO.raw_os_error();
                assert_eq!(got.unwrap_err().raw_os_error(), Some(errno));
            }
        });
    }
}

/// The design relies on this: all readers block, even if there are more of them than a bounded queue can hold.
#[test]
fn no_reader_passes_a_group_that_does_not_answer() {
    const READERS: usize = 200;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some((group, file)) = marked(folder.path()) else { return };
    let path = folder.path().join("device");
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS as u64)
            .map(|number| {
                scope.spawn({
                    let path = &path;
                    move || read(path, number * 4096)
                })
            })
            .collect();
        // Collects the events of all readers before any is answered.
        let mut waiting = Vec::new();
        while waiting.len() < READERS {
            waiting.extend(events(&group));
        }
        assert!(readers.iter().all(|it| !it.is_finished()), "somebody read what is not there");
        file.write_all_at(&vec![5; SIZE], 0).unwrap();
        for event in waiting {
            group.allow(event).unwrap();
        }
        for reader in readers {
            assert_eq!(reader.join().unwrap().unwrap(), [5; 4096]);
        }
    });
}

/// A canary for the reason why queues must be unlimited. If a kernel blocks these readers, decision 18 can be
/// reconsidered.
#[test]
fn a_bounded_queue_lets_readers_pass() {
    const BOUND: &str = "/proc/sys/fs/fanotify/max_queued_events";
    const READERS: u64 = 12;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let few = || {
        // A group uses the limit that is set when the group is made.
        let before = std::fs::read(BOUND).unwrap();
        std::fs::write(BOUND, "4").unwrap();
        let group = Group::bounded();
        std::fs::write(BOUND, before).unwrap();
        group
    };
    if !rustix::process::geteuid().is_root() {
        skipped("this is not root of the host");
        return;
    }
    let Some((group, _file)) = marked_by(folder.path(), few) else { return };
    let path = folder.path().join("device");
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|number| {
                scope.spawn({
                    let path = &path;
                    move || read(path, number * 4096)
                })
            })
            .collect();
        // Some readers finish although no event is answered, and get zeros.
        testing::fake::wait_for("readers that pass", || readers.iter().any(|it| it.is_finished()));
        // Releases the blocked readers.
        drop(group);
        for reader in readers {
            assert_eq!(reader.join().unwrap().unwrap(), [0; 4096]);
        }
    });
}
