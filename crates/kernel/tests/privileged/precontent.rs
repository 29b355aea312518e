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
    let path = folder.join("device");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(SIZE as u64).unwrap();
    let group = match Group::new() {
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
    assert!(group.read(&mut EventBuffer::default()).unwrap().is_empty());
    // Without the group, reads do not block.
    drop(group);
    assert_eq!(read(&path, 512 << 10).unwrap(), [0; 4096]);
}

/// Each read is reported, even if there are more of them than a bounded queue can hold.
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
