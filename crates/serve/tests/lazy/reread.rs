//! Tests that bytes which are present are read again from a file on FUSE as they were verified, or not at all, even if
//! the disk returns other bytes.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use image::lazy::UNIT;
use quire_serve::lazy::{Cause, DeviceServer};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use store::{LazyDeviceState, Store};

use super::service::Served;
use super::{Stage, store};

/// Bytes that are verified together once a unit is present.
const PAGE: u64 = 4096;

/// Serves a device by a file on FUSE.
fn over_fuse(stage: &Stage, lazy: &Store, look: impl FnOnce(&DeviceServer<'_>, &File)) {
    let server = DeviceServer::new().unwrap();
    server.fill(stage.filler(lazy)).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let served = scope.spawn(|| server.serve(&stop));
        let look = || {
            let (_, file) = server.connect(&stage.device()).unwrap();
            look(&server, &file);
        };
        let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(look));
        stop.store(true, Ordering::Relaxed);
        served.join().unwrap().unwrap();
        if let Err(panic) = looked {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Returns the right bytes of the device.
fn right(stage: &Stage) -> Vec<u8> {
    std::fs::read(stage.folder.path().join("full/data").join(stage.device().to_string())).unwrap()
}

fn part<'b>(bytes: &'b [u8], range: &Range<u64>) -> &'b [u8] {
    let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
    &bytes[start..end]
}

fn read(file: &File, range: &Range<u64>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
    file.read_exact_at(&mut bytes, range.start).map(|()| bytes)
}

/// The bytes that a disk returns instead of those that were written.
enum Change {
    /// One bit of this byte is another.
    Bit(u64),
    /// A hole, such as after an allocation was lost.
    Hole(Range<u64>),
    /// The bytes of another place, such as after a write to the wrong sector.
    Moved { from: u64, to: u64 },
}

impl Change {
    fn apply(&self, device: &File) {
        match self {
            Self::Bit(place) => {
                let mut byte = [0];
                device.read_exact_at(&mut byte, *place).unwrap();
                device.write_all_at(&[byte[0] ^ 0x10], *place).unwrap();
            }
            Self::Hole(hole) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(device, flags, hole.start, hole.end - hole.start).unwrap();
            }
            Self::Moved { from, to } => {
                let bytes = read(device, &(*from..from + 512)).unwrap();
                device.write_all_at(&bytes, *to).unwrap();
            }
        }
    }
}

#[test]
fn bytes_that_changed_after_they_were_verified_are_errors() {
    let Some(stage) = Stage::new() else { return };
    let (right, length) = (right(&stage), stage.index.head.device_bytes);
    let last = length - 1;
    // The units of a large file, which is random text.
    let words = std::fs::read(stage.tree.join("words")).unwrap();
    let place = right.windows(4096).position(|it| it == &words[..4096]).unwrap() as u64;
    let unit = |number: u64| (place.div_ceil(UNIT) + number) * UNIT;
    let cases = [
        // The first and the last byte of a read.
        (unit(0)..unit(0) + PAGE, Change::Bit(unit(0))),
        (unit(1) + PAGE..unit(1) + 2 * PAGE, Change::Bit(unit(1) + 2 * PAGE - 1)),
        // Reads that begin and end inside a page, one of them in two units.
        (unit(2) + 512..unit(2) + 1024, Change::Bit(unit(2) + 700)),
        (unit(3) + 7 * PAGE + 3584..unit(3) + 9 * PAGE - 3584, Change::Bit(unit(3) + 8 * PAGE)),
        (unit(5) - 512..unit(5) + 512, Change::Bit(unit(5) - 1)),
        (unit(6) - 512..unit(6) + 512, Change::Bit(unit(6))),
        // A page in the middle of a large read.
        (unit(7) + 100..unit(10) + 100, Change::Bit(unit(8) + 5 * PAGE + 9)),
        (unit(11)..unit(12), Change::Bit(unit(11) + 60_000)),
        // The last page, which is not whole.
        (last / PAGE * PAGE..length, Change::Bit(last)),
        // Zeros, or other bytes of the device.
        (unit(13) + PAGE..unit(13) + 2 * PAGE, Change::Hole(unit(13) + PAGE..unit(13) + 2 * PAGE)),
        (unit(14)..unit(15), Change::Hole(unit(14)..unit(15))),
        (unit(16)..unit(16) + PAGE, Change::Moved { from: unit(16) + PAGE, to: unit(16) + 512 }),
    ];
    for (number, (range, change)) in cases.iter().enumerate() {
        let lazy = store(&stage.folder.path().join(format!("lazy-{number}")));
        over_fuse(&stage, &lazy, |_, file| {
            let expect = part(&right, range);
            // The first time, the bytes are fetched.
            for _ in 0..2 {
                assert!(read(file, range).unwrap() == expect, "case {number}");
            }
            let path = stage.folder.path().join(format!("lazy-{number}/lazy"));
            let path = path.join(stage.device().to_string());
            let device = File::options().read(true).write(true).open(path).unwrap();
            change.apply(&device);
            assert!(read(&device, range).unwrap() != expect, "case {number} changes nothing");
            let error = read(file, range).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()), "case {number}");
        });
        let state = lazy.lazy_devices.stat(&stage.device()).unwrap().unwrap().state;
        assert_eq!(state, LazyDeviceState::Condemned, "case {number}");
    }
}

/// A page that is read does not depend on the other pages of its unit.
#[test]
fn a_change_in_another_page_is_found_when_that_page_is_read() {
    let Some(stage) = Stage::new() else { return };
    let right = right(&stage);
    let lazy = store(&stage.folder.path().join("lazy"));
    over_fuse(&stage, &lazy, |_, file| {
        let [one, other] = [30 * UNIT..30 * UNIT + PAGE, 30 * UNIT + PAGE..30 * UNIT + 2 * PAGE];
        assert!(read(file, &one).unwrap() == part(&right, &one));
        let path = stage.folder.path().join("lazy/lazy").join(stage.device().to_string());
        let device = File::options().read(true).write(true).open(path).unwrap();
        Change::Bit(other.start).apply(&device);
        assert!(read(file, &one).unwrap() == part(&right, &one));
        assert!(read(file, &other).is_err());
        // The disk is not trusted any more.
        assert!(read(file, &one).is_err());
    });
}

/// The threads of the service reply to reads of all sizes, while others fill the device.
#[test]
fn many_readers_of_several_files_get_the_right_bytes() {
    let Some(stage) = Stage::new() else { return };
    let right = right(&stage);
    let lazy = store(&stage.folder.path().join("lazy"));
    over_fuse(&stage, &lazy, |server, file| {
        let others = [(); 3].map(|()| server.connect(&stage.device()).unwrap().1);
        let files: Vec<_> = others.iter().chain([file]).collect();
        let length = stage.index.head.device_bytes;
        thread::scope(|scope| {
            let filler = server.fillers().remove(0);
            scope.spawn(move || {
                let spans = filler.index().head.spans.len();
                (0..spans).rev().for_each(|it| drop(filler.bring_ahead(it..it + 1, Cause::Trace)));
            });
            for reader in 0..12_u64 {
                let (file, right) = (files[usize::try_from(reader).unwrap() % 4], &right);
                scope.spawn(move || {
                    let mut state = reader;
                    let mut next = |most: u64| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        (state >> 33) % most
                    };
                    for round in 0..100 {
                        let start = next(length);
                        let end = start + 1 + next([600, 5000, 200_000][round % 3]);
                        let end = end.min(length);
                        assert!(read(file, &(start..end)).unwrap() == part(right, &(start..end)));
                    }
                });
            }
        });
        // The kernel ends three connections, and the fourth one goes on.
        drop(others);
        assert!(read(file, &(0..length)).unwrap() == right);
    });
}

/// A service that finds units on the disk compares each with its digest before it returns bytes of it.
#[test]
fn what_an_earlier_service_left_is_compared_again() {
    let Some(served) = Served::new() else { return };
    let mut service = served.start();
    let device = served.lend();
    assert_eq!(served.read_device(&device, 64), 0);
    let path = served.path("lazy/lazy").join(served.stage.device().to_string());
    // The page that the first reader reads, and a page of the same unit that no reader reads.
    for place in [100, 60_000] {
        let before = std::fs::metadata(&path).unwrap().len();
        let file = File::options().write(true).open(&path).unwrap();
        served.signal("service.pid", rustix::process::Signal::KILL);
        file.write_all_at(b"other bytes", place).unwrap();
        drop(file);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), before);
        served.wait_for_service();
        service.wait().ok();
        // The unit is fetched again, because it does not have its digest.
        assert_eq!(served.read_device(&device, 64), 0);
        let right = right(&served.stage);
        let written = std::fs::read(&path).unwrap();
        let at = usize::try_from(place).unwrap();
        assert!(written[at..at + 11] == right[at..at + 11], "the unit was repaired");
    }
    assert_eq!(served.state(), Some(LazyDeviceState::Partial));
    drop(device);
    served.leave();
    served.is_over();
}
