//! Trees at the limits of file systems, and copies that fail.

use std::io::ErrorKind;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;

use rustix::fs::{CWD, OFlags, mkdirat, openat};

use super::*;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn open(path: &Path) -> OwnedFd {
    openat(CWD, path, DIRECTORY, Mode::empty()).unwrap()
}

/// Programs can make directories deeper than any path reaches, and deeper than this process may have descriptors.
#[test]
fn directories_of_any_depth_are_copied() {
    const DEPTH: usize = 1500;
    let name = |level: usize| format!("{level:0200}");
    let pair = Pair::new();
    let mut here = open(&pair.from);
    let file = |here: &OwnedFd, name: &str, text: &[u8]| {
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC | OFlags::CLOEXEC;
        let file = openat(here, name, flags, Mode::from_raw_mode(0o640)).unwrap();
        rustix::io::write(file, text).unwrap();
    };
    for level in 0..DEPTH {
        file(&here, "a", b"before");
        file(&here, "z", b"after");
        mkdirat(&here, name(level), Mode::from_raw_mode(0o750)).unwrap();
        here = openat(&here, name(level), DIRECTORY, Mode::empty()).unwrap();
    }
    rest();
    let first = pair.first();
    // A path from the root to each directory would have a million names.
    assert!(first.index.steps.get() <= 2 * DEPTH as u64, "{}", first.index.steps.get());
    file(&here, "deepest", b"new");
    let report = first.finish().unwrap();
    assert_eq!((report.entries, report.recopied), (3 * DEPTH as u64 + 1, 1));
    let mut here = open(&pair.to);
    let times = |here: &OwnedFd| rustix::fs::fstat(here).unwrap().st_mtime;
    let mut source = open(&pair.from);
    for level in 0..DEPTH {
        assert_eq!(times(&here), times(&source), "{level}");
        for name in ["a", "z"] {
            rustix::fs::statat(&here, name, rustix::fs::AtFlags::empty()).unwrap();
        }
        here = openat(&here, name(level), DIRECTORY, Mode::empty()).unwrap();
        source = openat(&source, name(level), DIRECTORY, Mode::empty()).unwrap();
    }
    let file = File::from(openat(&here, "deepest", OFlags::RDONLY, Mode::empty()).unwrap());
    assert_eq!(std::io::read_to_string(file).unwrap(), "new");
    // A removed tree of this depth is removed from the copy.
    let second = Pair::new();
    let again = copy_of(&pair.from, &second.to).unwrap();
    let top = std::ffi::CString::new(name(0)).unwrap();
    super::super::remove::remove(open(&pair.from).as_fd(), &top).unwrap();
    assert_eq!(again.finish().unwrap().entries, 2);
    super::super::remove::remove(open(&pair.to).as_fd(), &top).unwrap();
}

/// The container is frozen during the second copy, so that also takes a time that is proportional to the number of
/// directories, whichever of them have changed.
#[test]
fn deep_directories_are_opened_from_those_above() {
    use super::super::second_copy::SecondCopy;

    const DEPTH: usize = 1000;
    type IsChanged = fn(usize) -> bool;
    let patterns: [(&str, IsChanged); 4] = [
        ("all", |_| true),
        ("every 70th", |level| level % 70 == 69),
        ("the deepest", |level| level + 1 == DEPTH),
        ("few", |level| [3, 500, 990].contains(&level)),
    ];
    for (what, is_changed) in patterns {
        let pair = Pair::new();
        let mut here = open(&pair.from);
        for _ in 0..DEPTH {
            // The one in the middle leads further down.
            for name in ["a", "m", "z"] {
                mkdirat(&here, name, Mode::from_raw_mode(0o750)).unwrap();
            }
            here = openat(&here, "m", DIRECTORY, Mode::empty()).unwrap();
        }
        rest();
        let first = pair.first();
        let mut here = open(&pair.from);
        for level in 0..DEPTH {
            if is_changed(level) {
                for name in ["a", "z"] {
                    mkdirat(&here, format!("{name}/new"), Mode::from_raw_mode(0o700)).unwrap();
                }
            }
            here = openat(&here, "m", DIRECTORY, Mode::empty()).unwrap();
        }
        let mut second = SecondCopy::new(first).unwrap();
        second.index.steps.set(0);
        second.walk().unwrap();
        let steps = second.index.steps.get();
        assert!(steps > 0 && steps <= 6 * DEPTH as u64, "{what}: {steps}");
        let (mut here, mut copy) = (open(&pair.from), open(&pair.to));
        for level in 0..DEPTH {
            let count = |it: &OwnedFd| rustix::fs::Dir::read_from(it).unwrap().count();
            for name in ["a", "z"] {
                let [one, other] = [&here, &copy]
                    .map(|it| count(&openat(it, name, DIRECTORY, Mode::empty()).unwrap()));
                assert_eq!(one, other, "{what} {level}");
            }
            [here, copy] =
                [here, copy].map(|it| openat(it, "m", DIRECTORY, Mode::empty()).unwrap());
        }
    }
}

/// The path of a file's first name is opened for each further name, so the time for hard links depends on the depth.
#[test]
fn links_between_deep_directories_end() {
    let pair = Pair::new();
    for name in ["a", "b"] {
        fs::create_dir(pair.from.join(name)).unwrap();
    }
    let first = pair.first();
    fs::write(pair.from.join("a/file"), "text").unwrap();
    fs::hard_link(pair.from.join("a/file"), pair.from.join("b/file")).unwrap();
    first.index.steps.set(1 << 40);
    let error = first.finish().unwrap_err();
    assert!(
        matches!(&error, CopyError::Io { source, .. }
        if source.kind() == ErrorKind::InvalidFilename),
        "{error:?}"
    );
}

#[test]
fn holes_take_no_time() {
    let pair = Pair::new();
    let file = File::create(pair.from.join("sparse")).unwrap();
    file.set_len(1 << 40).unwrap();
    for at in [0, 1 << 30, (1 << 40) - 1] {
        file.write_all_at(b"data", at).unwrap();
    }
    let report = pair.first().at_rest().unwrap();
    let copy = File::open(pair.to.join("sparse")).unwrap();
    assert_eq!(copy.metadata().unwrap().len(), (1 << 40) + 3);
    for at in [0, 1 << 30, (1 << 40) - 1] {
        let mut bytes = [0; 5];
        let count = copy.read_at(&mut bytes, at).unwrap().min(4);
        assert_eq!(&bytes[..count], b"data", "{at}");
    }
    assert!(report.bytes < 1 << 20, "{report:?}");
}

/// ext4 allows 65,000 names for a file (Linux fs/ext4/ext4.h, `EXT4_LINK_MAX`), and overlayfs links all whiteouts.
#[test]
fn whiteouts_beyond_the_limit_of_links_are_copied() {
    if !is_root() {
        return;
    }
    const COUNT: usize = 65_010;
    let options =
        kernel::mount::TmpfsOptions { name: "test", bytes: None, inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options).unwrap();
    let from = path_of(&mount);
    device(&from.join("0"), 0);
    for number in 1..COUNT {
        fs::hard_link(from.join("0"), from.join(number.to_string())).unwrap();
    }
    let pair = Pair::new();
    let report = copy_of(&from, &pair.to).unwrap().finish().unwrap();
    assert_eq!(report.entries, COUNT as u64);
    let entries = fs::read_dir(&pair.to).unwrap().map(Result::unwrap);
    assert!(entries.map(|it| it.metadata().unwrap()).all(|it| it.rdev() == 0));
    assert_eq!(fs::read_dir(&pair.to).unwrap().count(), COUNT);
}

#[test]
fn a_full_disk_is_an_error() {
    if !is_root() {
        return;
    }
    let pair = Pair::new();
    fs::write(pair.from.join("large"), testing::noise(3 << 20)).unwrap();
    let options = kernel::mount::TmpfsOptions {
        name: "test",
        bytes: NonZeroU64::new(1 << 20),
        inodes: None,
        mode: 0o755,
    };
    let mount = kernel::mount::tmpfs(&options).unwrap();
    let error = copy_of(&pair.from, &path_of(&mount)).unwrap_err();
    assert!(
        matches!(&error, CopyError::Io { path, source, .. }
        if path == b"/large" && source.kind() == ErrorKind::StorageFull),
        "{error:?}"
    );
    // In the second copy as well.
    rustix::fs::rename(pair.from.join("large"), pair.folder.path().join("large")).unwrap();
    let mount = kernel::mount::tmpfs(&options).unwrap();
    let first = copy_of(&pair.from, &path_of(&mount)).unwrap();
    rustix::fs::rename(pair.folder.path().join("large"), pair.from.join("large")).unwrap();
    let error = first.finish().unwrap_err();
    assert!(error.to_string().contains("\"/large\""), "{error}");
}

/// A container can use up the inodes of a disk with files that have no data.
#[test]
fn some_inodes_stay_free() {
    if !is_root() {
        return;
    }
    const INODES: u64 = 1000;
    type Make = fn(&Path);
    let kinds: [(&str, Make); 3] = [
        ("file", |path| fs::write(path, "").unwrap()),
        ("directory", |path| fs::create_dir(path).unwrap()),
        ("link", |path| symlink("target", path).unwrap()),
    ];
    for (what, make) in kinds {
        let pair = Pair::new();
        for number in 0..INODES {
            make(&pair.from.join(number.to_string()));
        }
        let options = kernel::mount::TmpfsOptions {
            name: "test",
            bytes: None,
            inodes: NonZeroU64::new(INODES),
            mode: 0o755,
        };
        let mount = kernel::mount::tmpfs(&options).unwrap();
        let to = path_of(&mount);
        let error = copy_of(&pair.from, &to).unwrap_err();
        assert!(
            matches!(&error, CopyError::Io { source, .. }
            if source.kind() == ErrorKind::StorageFull),
            "{what}: {error:?}"
        );
        let free = rustix::fs::statvfs(&to).unwrap().f_favail;
        assert!((INODES / 100..INODES / 2).contains(&free), "{what}: {free}");
    }
}

#[test]
fn a_copy_can_be_cancelled() {
    let pair = Pair::new();
    every_kind(&pair.from);
    let cancel = AtomicBool::new(true);
    let [from, to] = [&pair.from, &pair.to].map(|it| File::open(it).unwrap());
    let error = first_copy(from.as_fd(), to.as_fd(), &cancel).unwrap_err();
    assert!(matches!(error, CopyError::Cancelled), "{error}");
    fs::remove_dir(&pair.to).unwrap();
    fs::create_dir(&pair.to).unwrap();
    cancel.store(false, Ordering::Relaxed);
    let first = first_copy(from.as_fd(), File::open(&pair.to).unwrap().as_fd(), &cancel).unwrap();
    cancel.store(true, Ordering::Relaxed);
    let error = first.finish().unwrap_err();
    assert!(matches!(error, CopyError::Cancelled), "{error}");
}
