//! Programs that write while they are copied.

use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;

use super::super::entry::settle;
use super::super::stamp::look;
use super::*;

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Does something with a few names, so that programs often meet.
fn act(at: &Path, random: &mut Random) {
    let name = |random: &mut Random| {
        let directories = ["", "a", "a/b", "c", "c/d"];
        let directory = directories[usize::try_from(random.below(5)).unwrap()];
        at.join(directory).join(format!("f{}", random.below(4)))
    };
    let (one, other) = (name(random), name(random));
    let text = vec![
        b'a' + u8::try_from(random.below(26)).unwrap();
        1 + usize::try_from(random.below(9000)).unwrap()
    ];
    // Some fail, because the name does not exist or is another kind of file.
    let _may_fail = match random.below(11) {
        0 | 1 => fs::write(&one, &text),
        2 => File::options().write(true).open(&one).and_then(|it| it.write_all_at(&text, 100)),
        3 => rustix::fs::rename(&one, &other).map_err(Into::into),
        4 => fs::hard_link(&one, &other),
        5 => fs::remove_file(&one),
        6 => fs::create_dir(&one),
        7 => fs::remove_dir_all(&one),
        8 => std::os::unix::fs::symlink("target", &one),
        9 => lsetxattr(&one, "user.x", &text[..1], XattrFlags::empty()).map_err(Into::into),
        _ => rustix::fs::renameat_with(
            rustix::fs::CWD,
            &one,
            rustix::fs::CWD,
            &other,
            rustix::fs::RenameFlags::EXCHANGE,
        )
        .map_err(Into::into),
    };
}

#[test]
fn what_programs_do_during_the_first_copy_is_copied() {
    for round in 0..testing::rounds(40) {
        let pair = Pair::new();
        for directory in ["a/b", "c/d"] {
            fs::create_dir_all(pair.from.join(directory)).unwrap();
        }
        let mut random = Random(round);
        for _ in 0..30 {
            act(&pair.from, &mut random);
        }
        let end = AtomicBool::new(false);
        let first = thread::scope(|scope| {
            for seed in 1..3 {
                let (from, end) = (&pair.from, &end);
                let mut random = Random(round << 8 | seed);
                scope.spawn(move || {
                    while !end.load(Ordering::Relaxed) {
                        act(from, &mut random);
                    }
                });
            }
            let first = copy_of(&pair.from, &pair.to);
            end.store(true, Ordering::Relaxed);
            first.unwrap()
        });
        // The threads have stopped between two system calls, like frozen tasks.
        let report = first.finish().unwrap();
        pair.check(&format!("round {round}"));
        let names = u64::try_from(tree(&pair.from).len()).unwrap() - 1;
        assert_eq!(report.entries, names);
    }
}

/// A write changes the time of the file at its start, and bytes until its end.
#[test]
fn no_write_is_half_copied() {
    const SIZE: usize = 24 << 20;
    let pair = Pair::new();
    let file = File::create(pair.from.join("file")).unwrap();
    let texts = [vec![b'a'; SIZE], vec![b'b'; SIZE]];
    file.write_all_at(&texts[0], 0).unwrap();
    for round in 0..testing::rounds(6) {
        let to = pair.folder.path().join(format!("{round}"));
        fs::create_dir(&to).unwrap();
        let end = AtomicBool::new(false);
        let first = thread::scope(|scope| {
            scope.spawn(|| {
                for text in texts.iter().cycle().skip(1) {
                    // One system call writes everything.
                    assert_eq!(file.write_at(text, 0).unwrap(), SIZE);
                    if end.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            let first = copy_of(&pair.from, &to);
            end.store(true, Ordering::Relaxed);
            first.unwrap()
        });
        first.finish().unwrap();
        assert_same(&pair.from, &to, &format!("round {round}"));
        fs::remove_dir_all(&to).unwrap();
    }
}

/// The time of a write is that of its start, so a reader must wait for its end.
#[test]
fn a_write_in_progress_ends_before_bytes_are_read() {
    const SIZE: usize = 64 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let file = File::create(&path).unwrap();
    file.write_all_at(&vec![b'a'; SIZE], 0).unwrap();
    for _ in 0..testing::rounds(3) {
        let changed = || fs::metadata(&path).map(|it| (it.ctime(), it.ctime_nsec())).unwrap();
        let before = changed();
        rest();
        thread::scope(|scope| {
            let text = vec![b'b'; SIZE];
            let file = &file;
            scope.spawn(move || assert_eq!(file.write_at(&text, 0).unwrap(), SIZE));
            while changed() == before {
                std::hint::spin_loop();
            }
            settle(file.as_fd()).unwrap();
            let mut last = [0];
            let file = File::open(&path).unwrap();
            file.read_exact_at(&mut last, SIZE as u64 - 1).unwrap();
            assert_eq!(last, *b"b");
        });
        file.write_all_at(b"a", SIZE as u64 - 1).unwrap();
    }
}

/// The first store to a page changes the time of a file, and further ones do not, until the page is written back.
#[test]
fn a_store_after_the_look_changes_the_time() {
    const MAPPER: &str = "
import mmap, sys
file = open(sys.argv[1], 'r+b'); pages = mmap.mmap(file.fileno(), 0)
for line in sys.stdin:
    pages[7] = int(line)
    print('stored', flush=True)
";
    if testing::find_program("python3").is_none() {
        testing::skipped("python3 is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, [0; 4096]).unwrap();
    if !super::super::second_copy::shows_stores(File::open(folder.path()).unwrap()).unwrap() {
        testing::skipped("the temporary directory's file system does not show stores");
        return;
    }
    let mut program = Command::new(testing::find_program("python3").unwrap());
    program.args(["-c", MAPPER]).arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Ended(program.spawn().unwrap());
    let program = &mut program.0;
    let (mut input, mut output) = (program.stdin.take().unwrap(), program.stdout.take().unwrap());
    let mut store = |value: u8| {
        std::io::Write::write_all(&mut input, format!("{value}\n").as_bytes()).unwrap();
        std::io::Read::read_exact(&mut output, &mut [0; 7]).unwrap();
    };
    for round in 1..20 {
        // The page is dirty now, so that the next store would leave no trace.
        store(round);
        rest();
        let file = File::open(&path).unwrap();
        let (_, seen) = look(&file).unwrap();
        settle(file.as_fd()).unwrap();
        store(round + 100);
        let now = super::super::stamp::Stamp::of(&look(&file).unwrap().0);
        assert!(!seen.is_unchanged(&now), "round {round}");
    }
}

/// Stores through mappings that last, and through such that end before the second copy. Each page gets two stores, of
/// which the second does not change the time of the file unless the page was written back in between.
const MAPPER: &str = "
import mmap, os, random, sys, time
paths = [sys.argv[1] + '/m%d' % n for n in range(4)]
kept = open(paths[0], 'r+b'); kept = mmap.mmap(kept.fileno(), 0)
print('ready', flush=True)
def store(file, page):
    file[page * 4096 + random.randrange(4096)] = random.randrange(256)
while True:
    fd = os.open(random.choice(paths[1:]), os.O_RDWR)
    short = mmap.mmap(fd, 0); os.close(fd)
    page = random.randrange(16)
    for _ in range(2):
        store(short, page); store(kept, page)
        time.sleep(random.randrange(40) / 1000)
    short.close()
";

/// A program that is killed at the end of the test.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _may_have_ended = self.0.kill();
        let _may_have_ended = self.0.wait();
    }
}

/// Copies a directory while a program stores to files in it, which `at` shows.
fn map_while_copied(from: &Path, at: &Path, what: &str) {
    if testing::find_program("python3").is_none() {
        testing::skipped("python3 is not installed");
        return;
    }
    let pair = Pair::new();
    for number in 0..4 {
        fs::write(at.join(format!("m{number}")), testing::noise(64 << 10)).unwrap();
    }
    // The copy of these takes longer than the ticks in which changes count as recent.
    for number in 0..100 {
        fs::write(at.join(format!("other {number}")), "other").unwrap();
    }
    let mut program = Command::new(testing::find_program("python3").unwrap());
    program.args(["-c", MAPPER]).arg(at).stdout(Stdio::piped());
    let mut program = Ended(program.spawn().unwrap());
    let program = &mut program.0;
    let mut ready = [0; 6];
    std::io::Read::read_exact(program.stdout.as_mut().unwrap(), &mut ready).unwrap();
    let pid = rustix::process::Pid::from_child(program);
    let signal = |signal| rustix::process::kill_process(pid, signal).unwrap();
    for round in 0..testing::rounds(8) {
        let to = pair.folder.path().join(format!("{round}"));
        fs::create_dir(&to).unwrap();
        let first = copy_of(from, &to).unwrap();
        // Some mappings end before the program stops.
        thread::sleep(std::time::Duration::from_millis(round % 5 * 20));
        signal(rustix::process::Signal::STOP);
        let stat = format!("/proc/{}/stat", program.id());
        while !fs::read_to_string(&stat).unwrap().contains(") T ") {
            thread::yield_now();
        }
        let report = first.finish();
        assert_same(from, &to, &format!("{what}, round {round}: {report:?}"));
        report.unwrap();
        signal(rustix::process::Signal::CONT);
        fs::remove_dir_all(&to).unwrap();
    }
}

#[test]
fn stores_through_mappings_are_copied() {
    let pair = Pair::new();
    map_while_copied(&pair.from, &pair.from, "the disk");
}

#[test]
fn stores_through_mappings_of_an_overlay_are_copied() {
    use kernel::mount::{
        Credentials, Durability, OverlayOptions, Upper, Verity, XattrNamespace, overlay,
    };

    if !is_root() {
        return;
    }
    let pair = Pair::new();
    for name in ["lower", "work"] {
        fs::create_dir(pair.folder.path().join(name)).unwrap();
    }
    // Files that are copied up keep the inode number of the lower file in the overlay.
    for number in 0..4 {
        fs::write(pair.folder.path().join(format!("lower/m{number}")), "lower").unwrap();
    }
    let [lower, work, upper] =
        ["lower", "work", "from"].map(|name| File::open(pair.folder.path().join(name)).unwrap());
    let root = overlay(&OverlayOptions {
        name: "test",
        lower: &[lower.as_fd()],
        data: &[],
        upper: Some(Upper {
            upper: upper.as_fd(),
            work: work.as_fd(),
            durability: Durability::Volatile,
        }),
        verity: Verity::Off,
        xattrs: XattrNamespace::Trusted,
        credentials: Credentials::Mounter,
    });
    let root = root.unwrap();
    // The program cannot reach a mount that is not attached by this process's descriptor.
    let path = format!("/proc/{}/fd/{}/.", std::process::id(), root.as_fd().as_raw_fd());
    map_while_copied(&pair.from, Path::new(&path), "an overlay");
}

#[test]
fn stores_through_mappings_of_a_tmpfs_are_copied() {
    if !is_root() {
        return;
    }
    let options =
        kernel::mount::TmpfsOptions { name: "test", bytes: None, inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options).unwrap();
    let path = format!("/proc/{}/fd/{}/.", std::process::id(), mount.as_fd().as_raw_fd());
    map_while_copied(Path::new(&path), Path::new(&path), "tmpfs");
}
