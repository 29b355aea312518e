//! Disks that are full while containers write: data reads back, or the writer got an error. Needs root.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate, statvfs};

use crate::container_disk::writable::{has, is_clean, plain_ext4, until};
use crate::mounting::mounts::Unmount;
use crate::{Place, Ran, add_programs, is_root, program};
use testing::rounds;

const MIB: u64 = 1 << 20;

/// A store on a separate disk, with an image that has a shell.
struct Small {
    // Dropped before the place, which checks for leftovers.
    _guard: Unmount,
    place: Place,
    disk: PathBuf,
}

impl Small {
    fn new(megabytes: u64) -> Option<Self> {
        if !is_root() || !has(&["mkfs.ext4", "cmp"]) {
            return None;
        }
        if program("crun").is_none() && program("runc").is_none() {
            testing::skipped("crun is not installed");
            return None;
        }
        let place = Place::new();
        if !place.is_on_disk() {
            return None;
        }
        let (disk, _guard) = plain_ext4(&place, "disk", megabytes * MIB, &["-m", "0"]);
        fs::create_dir(disk.join("store")).unwrap();
        symlink(disk.join("store"), place.path("store")).unwrap();
        let tree = place.path("tree");
        for name in ["etc", "tmp", "proc", "sys", "dev", "src"] {
            fs::create_dir_all(tree.join(name)).unwrap();
        }
        let cmp = program("cmp")?;
        let cmp = cmp.to_str().unwrap();
        let programs = [
            "/bin/sh",
            "/bin/cat",
            "/bin/dd",
            "/bin/rm",
            "/bin/df",
            "/bin/sleep",
            "/bin/mkdir",
            cmp,
        ];
        add_programs(&tree, &programs);
        place.out(&format!("import --quiet dir:{} a", tree.display()));
        Some(Self { place, disk, _guard })
    }

    fn spawn(&self, options: &[&str], script: &str, arguments: &[&str]) -> Running {
        let run = ["run", "--quiet", "-u", "0"];
        let program = ["a", "--", "sh", "-c", script, "sh"];
        let mut command = self.place.command(&[&run, options, &program, arguments].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Running { input: child.stdin.take().unwrap(), lines, child }
    }
}

pub(crate) fn free(disk: &Path) -> u64 {
    let numbers = statvfs(disk).unwrap();
    numbers.f_bavail * numbers.f_frsize
}

/// Allocates this amount of a disk, or all free space if there is less.
pub(crate) fn fill(disk: &Path, name: &str, bytes: u64) {
    let file = File::create(disk.join(name)).unwrap();
    let (mut piece, mut position) = (bytes, 0);
    while piece >= 4096 {
        match fallocate(&file, FallocateFlags::empty(), position, piece) {
            Ok(()) => {
                position += piece;
                piece = piece.min(bytes - position);
            }
            Err(_) => piece /= 2,
        }
    }
}

/// Returns the file to which the only container of the disk's store writes.
fn filestore(disk: &Path) -> PathBuf {
    let folders = fs::read_dir(disk.join("store/containers")).unwrap();
    let mut files = folders.map(|it| it.unwrap().path().join("filestore"));
    files.find(|it| it.exists()).unwrap()
}

struct Running {
    child: Child,
    input: ChildStdin,
    lines: BufReader<std::process::ChildStdout>,
}

impl Running {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn go(&mut self) {
        self.input.write_all(b"go\n").unwrap();
    }

    fn end(self) -> Ran {
        drop(self.input);
        Ran::from_output(&self.child.wait_with_output().unwrap())
    }
}

/// Pseudo-random numbers that are the same in each run (Knuth's multiplier).
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }
}

/// Writes files in several ways, until the disk is full or there are enough files. Then compares the files that were
/// written without an error, after their pages were dropped from memory.
const WRITER: &str = "echo up; mkdir /w; i=0; bad=0; ok=
    while [ $i -lt 60 ] && [ $bad -lt 6 ]; do
        k=$(( (i * 5 + $1) % 6 ))
        case $(( i % 3 )) in
            0) dd if=/src/$k of=/w/$i bs=64k oflag=direct ;;
            1) cat /src/$k > /w/$i ;;
            *) dd if=/src/$k of=/w/$i bs=4k ;;
        esac && ok=\"$ok $i:$k\" || { bad=$((bad+1)); rm -f /w/$i; }
        i=$((i+1))
    done 2>/dev/null
    echo $bad; read go
    for it in $ok; do
        dd if=/w/${it%:*} iflag=nocache count=0 2>/dev/null
        cmp /src/${it#*:} /w/${it%:*} || exit 1
    done
    echo same";

/// The kinds of writable layers that fail if the store's disk is full.
const KINDS: [&str; 5] = ["dir", "self", "self,size=100m", "dir,durable", "self,durable"];

#[test]
fn a_full_disk_never_becomes_zeros() {
    let Some(small) = Small::new(128) else { return };
    let source = small.place.path("src");
    fs::create_dir(&source).unwrap();
    let mut chance = Chance(6);
    for (name, kilobytes) in [4, 20, 300, 1 << 10, 3 << 10, 8 << 10].into_iter().enumerate() {
        let bytes: Vec<u8> =
            (0..kilobytes << 10).map(|_| u8::try_from(chance.below(256)).unwrap()).collect();
        fs::write(source.join(name.to_string()), bytes).unwrap();
    }
    let volume = format!("--volume={}:/src:ro", source.display());
    let (mut refused, count) = (0, rounds(KINDS.len() as u64));
    for round in 0..count {
        let kind = KINDS[usize::try_from(round).unwrap() % KINDS.len()];
        let mut running =
            small.spawn(&[&volume, "--writable", kind], WRITER, &[&chance.below(100).to_string()]);
        assert_eq!(running.line(), "up");
        // Meanwhile, another thread fills the disk and frees it again, at random moments.
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let bad = std::thread::scope(|scope| {
            let (small, chance) = (&small, &mut chance);
            scope.spawn(move || {
                for number in 0.. {
                    let pause = Duration::from_millis(chance.below(200));
                    if is_done.recv_timeout(pause).is_ok() {
                        break;
                    }
                    let name = format!("filler-{}", number % 4);
                    fill(&small.disk, &name, free(&small.disk) / (1 << chance.below(3)));
                    if chance.below(3) == 0 {
                        drop(fs::remove_file(small.disk.join(name)));
                    }
                }
            });
            let bad = running.line();
            done.send(()).unwrap();
            bad
        });
        refused += bad.parse::<u32>().unwrap_or_else(|_| panic!("{round}: {:?}", running.line()));
        rustix::fs::sync();
        running.go();
        assert_eq!(running.line(), "same", "{round}: {kind}");
        let ran = running.end();
        assert_eq!((ran.code, &*ran.err), (Some(0), ""), "{round}: {kind}");
        for number in 0..4 {
            drop(fs::remove_file(small.disk.join(format!("filler-{number}"))));
        }
        until("something stays", || is_clean(&small.place));
    }
    assert!(refused > 0, "the disk was never full");
    small.place.out("fsck");
}

#[test]
fn a_burst_is_not_refused_as_long_as_the_disk_has_room() {
    let Some(small) = Small::new(2 << 10) else { return };
    // The script writes more than the initial headroom, as fast as memory allows. On a busy host, the process that
    // makes headroom may not be scheduled in time, so the burst is retried. If bursts got no headroom at all, none
    // would succeed.
    let script = "tries=0; until dd if=/dev/zero of=/big bs=1M count=1200 2>/dev/null; do \
                  rm /big; tries=$((tries + 1)); test $tries -lt 20 || break; sleep 0.2; done; \
                  test $tries -lt 20; echo $?";
    let mut running = small.spawn(&["--writable", "self"], script, &[]);
    assert_eq!(running.line(), "0");
    assert_eq!(running.end().code, Some(0));
}

#[test]
fn what_is_freed_inside_goes_back_to_the_disk() {
    let Some(small) = Small::new(512) else { return };
    // The script writes in parts, because on a busy host, headroom for a burst may come too late, and this test is not
    // about bursts. Each part is retried for the same reason.
    let script = "for part in 0 1 2 3 4 5 6 7 8 9; do tries=0; \
                  until dd if=/dev/zero of=/big bs=1M count=20 seek=$((part * 20)) conv=notrunc,fsync 2>/dev/null; do \
                  tries=$((tries + 1)); test $tries -lt 50 || exit 1; sleep 0.1; done; \
                  done; echo wrote; read go; rm /big; echo gone; read go";
    let mut running = small.spawn(&["--writable", "self"], script, &[]);
    assert_eq!(running.line(), "wrote");
    let allocated = || fs::metadata(filestore(&small.disk)).unwrap().blocks() * 512;
    assert!(allocated() >= 200 * MIB, "{}", allocated());
    running.go();
    assert_eq!(running.line(), "gone");
    until("what was freed stays allocated", || allocated() < 100 * MIB);
    running.go();
    assert_eq!(running.end().code, Some(0));
}

/// Simulates a failing disk, or a file system that loses allocated space: the free blocks of a filestore are no longer
/// allocated on the disk, and the disk is full.
pub(crate) fn break_promise(disk: &Path) {
    let file = File::options().write(true).open(filestore(disk)).unwrap();
    let length = file.metadata().unwrap().len();
    // The released range begins after the metadata of an ext4 of the usual size.
    kernel::allocation::release(file.as_fd(), &(256 * MIB..length)).unwrap();
    fill(disk, "filler", free(disk));
}

#[test]
fn what_a_disk_loses_is_told() {
    let Some(small) = Small::new(128) else { return };
    let script = "echo up; read go; dd if=/dev/zero of=/big bs=1M count=8 oflag=direct 2>/dev/null; \
                  dd if=/dev/zero of=/more bs=1M count=4 2>/dev/null; echo wrote; read go; exit 3";
    let mut running = small.spawn(&["--writable", "self"], script, &[]);
    assert_eq!(running.line(), "up");
    break_promise(&small.disk);
    running.go();
    // The loss may be detected, and the container ended, before the program has written everything.
    let line = running.line();
    if line == "wrote" {
        rustix::fs::sync();
        running.go();
    } else {
        assert_eq!(line, "");
    }
    let ran = running.end();
    // The error is printed even with --quiet.
    assert!(ran.code == Some(125) && ran.err.contains("was lost"), "{ran:?}");
    fs::remove_file(small.disk.join("filler")).unwrap();
    until("something stays", || is_clean(&small.place));

    // The flags are on another disk.
    let flags = small.place.path("flags");
    fs::create_dir(&flags).unwrap();
    let script = "while ! [ -e /src/go ]; do sleep 0.1; done; dd if=/dev/zero of=/more bs=1M count=4; \
                  echo > /src/gone; while ! [ -e /src/on ]; do sleep 0.1; done; exit 3";
    let volume = format!("--volume={}:/src", flags.display());
    let options = ["run", "-d", "--name", "c", "--writable", "self", "-u", "0", &volume, "a", "--"];
    let arguments = [&options[..], &["sh", "-c", script]].concat();
    assert_eq!(small.place.run_each(&arguments).code, Some(0));
    break_promise(&small.disk);
    fs::write(flags.join("go"), "").unwrap();
    until("nothing is written", || flags.join("gone").exists());
    rustix::fs::sync();
    fs::write(flags.join("on"), "").unwrap();
    let ran = small.place.run("wait c");
    assert!(ran.out == "125\n" && ran.err.contains("was lost"), "{ran:?}");
    let shown = small.place.out("ps --all");
    assert!(shown.contains("exited (125), writes lost"), "{shown}");
    small.place.out("rm c");
}

#[test]
fn what_was_written_is_told_at_once() {
    let Some(small) = Small::new(512) else { return };
    for kind in ["dir", "self", "memory"] {
        let script = "dd if=/dev/zero of=/big bs=1M count=20 2>/dev/null; echo up; sleep 60";
        let arguments =
            ["run", "-d", "--rm", "--name", "c", "--writable", kind, "-u", "0", "a", "--"];
        let ran = small.place.run_each(&[&arguments[..], &["sh", "-c", script]].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        until("nothing is written", || small.place.run("logs c").out == "up\n");
        let rows: serde_json::Value =
            serde_json::from_str(&small.place.out("--json ps --size")).unwrap();
        let written = rows[0]["written"].as_u64().unwrap();
        assert!((20 * MIB..21 * MIB).contains(&written), "{kind}: {written}");
        let all: serde_json::Value = serde_json::from_str(&small.place.out("--json du")).unwrap();
        assert_eq!(all["written"], rows[0]["written"]);
        let shown = small.place.out("ps -s");
        assert!(shown.contains("SIZE") && shown.contains("20."), "{shown}");
        small.place.out("rm -f c");
    }
}

#[test]
fn memory_to_write_to_is_half_of_what_may_be_used() {
    let Some(small) = Small::new(128) else { return };
    let arguments =
        ["run", "-m", "64m", "--writable", "memory", "-u", "0", "a", "--", "df", "-k", "/"];
    let ran = small.place.run_each(&arguments);
    if ran.code == Some(125) && ran.err.contains("memory") {
        testing::skipped(&format!("no memory cgroup: {}", ran.err));
        return;
    }
    assert!(ran.out.contains(" 32768 "), "{ran:?}");
}

#[test]
fn what_no_process_watches_has_all_its_room_at_once() {
    let Some(small) = Small::new(256) else { return };
    let point = small.place.path("point");
    fs::create_dir(&point).unwrap();
    let before = free(&small.disk);
    {
        let _guard = Unmount(point.clone());
        small.place.out("mount --writable self,size=100m a point");
        let taken = before - free(&small.disk);
        assert!(taken >= 100 * MIB, "{taken}");
        fill(&small.disk, "filler", free(&small.disk));
        // The free space in the filestore can be written although the disk is full.
        let free = statvfs(&point).unwrap();
        let bytes = vec![7; usize::try_from(free.f_bavail * free.f_frsize).unwrap() / 2];
        fs::write(point.join("big"), &bytes).unwrap();
        rustix::fs::sync();
        drop_from_memory(&point.join("big"));
        assert!(fs::read(point.join("big")).unwrap() == bytes);
        fs::remove_file(small.disk.join("filler")).unwrap();
        small.place.out("umount point");
    }
    let ran = small.place.run("mount --writable self,size=2g a point");
    assert!(ran.code == Some(6) && ran.err.contains("No space left on device"), "{}", ran.err);
    // Without a size, the limit is a part of the free space.
    let _guard = Unmount(point.clone());
    small.place.out("mount --writable self a point");
    let numbers = statvfs(&point).unwrap();
    assert!(numbers.f_blocks * numbers.f_frsize < 64 * MIB);
    small.place.out("umount point");
}

fn drop_from_memory(path: &Path) {
    let file = File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}
