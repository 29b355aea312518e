//! Tests a full disk: data is not fetched if the disk has no space for it.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use image::lazy::UNIT;
use quire_serve::lazy::{Cause, FillError, SourcePatience};
use testing::fake::wait_for;
use testing::skipped;

use super::{Stage, store};

/// A separate file system, which is unmounted at the end.
struct Disk(PathBuf);

impl Disk {
    fn new(folder: &Path) -> Option<Self> {
        let (image, point) = (folder.join("disk.ext4"), folder.join("disk"));
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        fs::create_dir(&point).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(&image).status();
        if !made.is_ok_and(|it| it.success()) {
            skipped("a full disk: no mkfs.ext4");
            return None;
        }
        let mounted = Command::new("mount").args(["-o", "loop"]).args([&image, &point]).output();
        match mounted {
            Ok(done) if done.status.success() => Some(Self(point)),
            done => {
                skipped(&format!("a full disk: no loop device: {done:?}"));
                None
            }
        }
    }

    /// Fills the disk except for this number of bytes.
    fn leave(&self, bytes: u64) {
        let mut file = File::create(self.0.join("filler")).unwrap();
        for piece in [1 << 20, 4096] {
            while file.write_all(&vec![1; piece]).is_ok() {}
        }
        file.sync_all().unwrap();
        file.set_len(file.metadata().unwrap().len() - bytes).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ended = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
fn nothing_is_fetched_that_a_full_disk_would_not_take() {
    let Some(stage) = Stage::new() else { return };
    let Some(disk) = Disk::new(stage.folder.path()) else { return };
    let patience = SourcePatience::default();
    let longest = Duration::from_millis(300);
    let patience = patience.with_pauses(longest / 4, longest);
    let lazy = store(&disk.0.join("lazy"));
    let filler = stage.filler(&lazy).with_patience(&patience);
    let asked = || stage.blob.asked.load(Ordering::Relaxed);
    let read = |unit: u64| filler.ensure(unit * UNIT..(unit + 1) * UNIT, |_| ());
    disk.leave(0);
    assert!(matches!(read(0), Err(FillError::Write(_))));
    let reason = filler.disk_error().unwrap();
    assert!(reason.contains("No space left"), "{reason}");
    // There is one attempt at once and one after each pause, regardless of the number of readers and of the units that
    // they read.
    let (begun, before) = (Instant::now(), asked());
    let mut tries = 0;
    while begun.elapsed() < longest * 4 {
        for unit in 20..40 {
            let failed = read(unit).unwrap_err();
            tries += u64::from(matches!(failed, FillError::Write(_)));
        }
        let ahead = filler.bring_ahead(0..stage.index.head.spans.len(), Cause::Completion);
        assert!(!matches!(ahead, Ok(_) | Err(FillError::Blob { .. })), "{ahead:?}");
        tries += u64::from(matches!(ahead, Err(FillError::Write(_))));
    }
    let pauses = begun.elapsed().as_millis() / longest.as_millis();
    assert!(u128::from(tries) <= 3 + pauses, "{tries} tries");
    assert!(asked() - before <= tries << 20, "{tries} tries");
    // The last free space is reserved for readers.
    fs::remove_file(disk.0.join("filler")).unwrap();
    disk.leave(stage.index.head.device_bytes.min(400 << 10));
    wait_for("the bytes", || read(0).is_ok());
    let all = || filler.bring_ahead(0..stage.index.head.spans.len(), Cause::Completion);
    // The free space is checked only from time to time.
    wait_for("the reserve", || matches!(all(), Err(FillError::Room(_))));
    assert!(filler.disk_error().is_some());
    fs::remove_file(disk.0.join("filler")).unwrap();
    wait_for("room", || all().is_ok_and(|it| it));
    assert!(filler.is_full() && filler.disk_error().is_none());
}
