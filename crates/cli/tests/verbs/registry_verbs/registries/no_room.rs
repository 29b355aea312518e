//! Pulls into stores on full disks.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::fs::statvfs;

use testing::daemon::Daemon;

use super::{image, kills, start};
use crate::{Place, Ran, is_root};

/// A mounted ext4 disk of 400 MB, in a place whose store is on it and has the image `old:1`. It is unmounted on
/// drop.
struct Small {
    place: Place,
    disk: PathBuf,
}

impl Small {
    fn new() -> Option<Self> {
        let place = Place::new();
        let (file, disk) = (place.path("disk.ext4"), place.path("disk"));
        File::create(&file).unwrap().set_len(400 << 20).unwrap();
        let mut make = Command::new("mkfs.ext4");
        let made = make.args(["-q", "-F", "-m", "0", "-N", "4000"]).arg(&file).status();
        assert!(made.is_ok_and(|it| it.success()), "mkfs.ext4 is part of e2fsprogs");
        fs::create_dir(&disk).unwrap();
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-o", "loop"]).arg(&file).arg(&disk).output().unwrap();
        if !mounted.status.success() {
            testing::skipped(&format!(
                "no loop device: {}",
                String::from_utf8_lossy(&mounted.stderr)
            ));
            return None;
        }
        let this = Self { place, disk };
        fs::create_dir(this.disk.join("store")).unwrap();
        symlink(this.disk.join("store"), this.place.path("store")).unwrap();
        this.place.tree("tree", "x");
        this.place.out("import dir:tree old:1");
        Some(this)
    }

    /// Allocates all space except for this many bytes.
    fn leave_bytes(&self, bytes: u64) {
        let free = statvfs(&self.disk).unwrap();
        let length = (free.f_bavail * free.f_frsize).checked_sub(bytes).unwrap();
        let file = File::create(self.disk.join("filler")).unwrap();
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, length).unwrap();
    }

    /// Returns the result of the work, and the minimum number of free bytes during it. ext4 briefly counts data
    /// twice while it writes it back, so only values that are seen four times in a row count.
    fn watched<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                let mut least = u64::MAX;
                let mut last = [u64::MAX; 4];
                while !done.load(Ordering::Relaxed) {
                    let found = statvfs(&self.disk).unwrap();
                    last.rotate_left(1);
                    last[3] = found.f_bavail * found.f_frsize;
                    least = least.min(last.into_iter().max().unwrap());
                    std::thread::sleep(Duration::from_micros(500));
                }
                least
            });
            let answer = work();
            done.store(true, Ordering::Relaxed);
            let least = watch.join().unwrap();
            assert_ne!(least, u64::MAX, "nothing was seen");
            (answer, least)
        })
    }

    /// Allocates all inodes except for this many.
    fn leave_inodes(&self, inodes: u64) {
        let filler = self.disk.join("fillers");
        fs::create_dir(&filler).unwrap();
        for number in inodes..statvfs(&self.disk).unwrap().f_favail {
            File::create(filler.join(number.to_string())).unwrap();
        }
    }

    fn files(&self) -> BTreeSet<PathBuf> {
        let mut files = BTreeSet::new();
        list(&self.place.path("store"), &mut files);
        files
    }

    /// Checks that a pull fails with these words, and leaves the store unchanged.
    fn check(&self, pull: impl FnOnce(&Place) -> Ran, words: &[&str]) {
        let (before, names) = (self.files(), self.place.out("images --json"));
        let ran = pull(&self.place);
        assert_eq!(ran.code, ran.failure(), "{}", ran.err);
        for word in words {
            assert!(ran.err.contains(word), "{word}: {}", ran.err);
        }
        assert_eq!(self.place.out("images --json"), names);
        assert_eq!(self.place.out("cat old:1:/etc/short"), "short\n");
        let sound = self.place.run("fsck --deep");
        assert_eq!(sound.code, Some(0), "{}{}", sound.out, sound.err);
        if ran.err.contains("gc --unfinished") {
            self.place.out("gc --unfinished");
        }
        assert_eq!(self.files(), before);
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Ignore errors, so that a failing test shows its own error.
        let _unmounted = Command::new("umount").arg(&self.disk).status();
    }
}

/// Adds all files below `path`.
fn list(path: &Path, files: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(path).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => list(&entry.path(), files),
            false => drop(files.insert(entry.path())),
        }
    }
}

/// Starts a registry with the image `app:1`, and returns it with the place of the original.
fn registry() -> Option<(Place, Daemon, String)> {
    if !is_root() {
        return None;
    }
    let (from, _) = kills::place();
    let daemon = start(&from)?;
    let target = format!("{}/app:1", daemon.host);
    from.out(&format!("push a:1 {target}"));
    Some((from, daemon, target))
}

#[test]
fn a_full_disk() {
    let Some((from, _daemon, target)) = registry() else { return };
    let Some(small) = Small::new() else { return };
    let full = format!("the file system at {} was full", small.disk.display());
    for free in [40 << 10, 1 << 20, 9 << 20] {
        small.leave_bytes(free);
        let words = ["would leave less than", "bytes are free", &full, "`quire gc` frees"];
        let mut least = 0;
        let pull = |place: &Place| {
            let ran;
            (ran, least) = small.watched(|| place.run(&format!("pull {target}")));
            ran
        };
        small.check(pull, &words);
        // Other programs had free space all the time. One hundredth (4 MB) is reserved, but the file system needs a
        // part of it, and several threads may write between two checks.
        assert!(least >= free.min(2 << 20) - (32 << 10), "{least} of {free}");
        fs::remove_file(small.disk.join("filler")).unwrap();
    }
    small.place.out(&format!("pull {target}"));
    assert_eq!(image(&small.place, &target), image(&from, "a:1"));
}

#[test]
fn a_full_disk_outside_of_the_store() {
    let Some(small) = Small::new() else { return };
    let place = Place::new();
    let tree = place.tree("tree", "x");
    fs::write(tree.join("large"), vec![b'x'; 4 << 20]).unwrap();
    place.out("import dir:tree a");
    small.leave_bytes(1 << 20);
    let target = small.disk.join("a.erofs");
    let ran = place.run(&format!("export a erofs:{}", target.display()));
    let hint = format!("the file system at {} was full: use a file", small.disk.display());
    assert!(ran.code == Some(6) && ran.err.contains(&hint), "{}", ran.err);
    // A hint about the store would not help.
    assert!(!ran.err.contains("quire gc") && !target.exists(), "{}", ran.err);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let ran = Ran::from_output(
        &place.command(&["export", "a", "erofs:-"]).stdout(full).output().unwrap(),
    );
    assert!(ran.code == Some(6) && ran.err.contains("standard output"), "{}", ran.err);
    assert!(!ran.err.contains("file system at"), "{}", ran.err);
}

#[test]
fn a_full_table_of_inodes() {
    let Some((from, _daemon, target)) = registry() else { return };
    let Some(small) = Small::new() else { return };
    let full = format!("the file system at {} was full (", small.disk.display());
    let none = "No space left on device";
    // Devices need few inodes: with 300 they fit. Objects are added while one hundredth of 4,000 stays free.
    let left = "another file would leave less than 40 inodes free";
    for (form, free, reason) in [("packed", 3, none), ("objects", 3, none), ("objects", 300, left)]
    {
        small.leave_inodes(free);
        let words = [reason, &full, " inodes are free"];
        small.check(|place| place.run(&format!("pull --form {form} {target}")), &words);
        fs::remove_dir_all(small.disk.join("fillers")).unwrap();
    }
    small.place.out(&format!("pull {target}"));
    assert_eq!(image(&small.place, &target), image(&from, "a:1"));
}

#[test]
fn a_store_that_cannot_be_written() {
    let Some((_from, _daemon, target)) = registry() else { return };
    let Some(small) = Small::new() else { return };
    // Another user may read the whole store.
    let place = &small.place;
    fs::set_permissions(place.folder.path(), Permissions::from_mode(0o755)).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_quire"), place.path("quire")).unwrap();
    let as_nobody = |place: &Place| {
        let mut command = Command::new(place.path("quire"));
        command.arg("--store").arg(place.path("store")).args(["pull", &target]);
        command.env_clear().env("HOME", place.folder.path()).current_dir("/");
        Ran::from_output(&command.uid(65_534).gid(65_534).output().unwrap())
    };
    small.check(
        as_nobody,
        &["Permission denied", "belongs to another user: use sudo, or --store DIR"],
    );

    let remount = |how: &str| {
        let mut mount = Command::new("mount");
        assert!(mount.args(["-o", how]).arg(&small.disk).status().unwrap().success());
    };
    remount("remount,ro");
    let read_only = format!("the file system at {} is read-only", small.disk.display());
    let words = ["Read-only file system", &read_only, "--store DIR"];
    small.check(|place| place.run(&format!("pull {target}")), &words);
    remount("remount,rw");
    small.place.out(&format!("pull {target}"));
}
