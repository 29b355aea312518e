//! Changes between the two copies.

use std::os::unix::fs::{FileExt as _, PermissionsExt as _};

use super::*;

/// Makes a tree, changes it between the two copies, and compares. Returns the number of names that were copied again.
#[track_caller]
fn check(what: &str, make: impl Fn(&Path), change: impl Fn(&Path)) -> u64 {
    let pair = Pair::new();
    make(&pair.from);
    rest();
    let first = pair.first();
    change(&pair.from);
    let report = first.finish().unwrap();
    pair.check(what);
    // The change must not have been in the first copy, and a fresh copy has the same figures.
    let again = Pair::new();
    let fresh = copy_of(&pair.from, &again.to).unwrap().at_rest().unwrap();
    assert_eq!((report.entries, report.inodes), (fresh.entries, fresh.inodes), "{what}");
    report.recopied
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
}

fn rename(from: &Path, to: &Path) {
    rustix::fs::rename(from, to).unwrap();
}

/// Two directories with files and links.
fn usual(at: &Path) {
    every_kind(at);
    fs::create_dir_all(at.join("a/b/c")).unwrap();
    for name in ["a/1", "a/2", "a/b/3", "a/b/c/4", "a/b/c/5"] {
        write(&at.join(name), name);
    }
    symlink("1", at.join("a/to 1")).unwrap();
    fs::hard_link(at.join("a/1"), at.join("a/b/also 1")).unwrap();
}

#[test]
fn nothing_is_copied_twice() {
    let pair = Pair::new();
    usual(&pair.from);
    rest();
    let first = pair.first();
    let stamps = |path: &Path| -> Vec<_> {
        let stamp = |name| {
            let stat = fs::symlink_metadata(path.join(name)).unwrap();
            (stat.ino(), stat.ctime(), stat.ctime_nsec())
        };
        tree(path).into_keys().map(stamp).collect()
    };
    let before = stamps(&pair.to);
    assert_eq!(first.finish().unwrap().recopied, 0);
    assert_eq!(stamps(&pair.to), before, "the copy was changed");
    pair.check("nothing");
}

#[test]
fn each_change_is_found() {
    type Change = fn(&Path);
    let changes: &[(&str, u64, Change)] = &[
        ("new file", 1, |at| write(&at.join("a/new"), "new")),
        ("removed file", 1, |at| fs::remove_file(at.join("a/2")).unwrap()),
        ("content", 1, |at| write(&at.join("a/2"), "other text")),
        ("content of the same length", 1, |at| write(&at.join("a/2"), "x/2")),
        ("content with the old time", 1, |at| {
            let times = fs::FileTimes::new()
                .set_modified(fs::metadata(at.join("a/2")).unwrap().modified().unwrap());
            write(&at.join("a/2"), "x/2");
            fs::File::options().write(true).open(at.join("a/2")).unwrap().set_times(times).unwrap();
        }),
        ("mode", 1, |at| {
            fs::set_permissions(at.join("a/2"), fs::Permissions::from_mode(0o4711)).unwrap();
        }),
        ("mode of a directory", 0, |at| {
            fs::set_permissions(at.join("a/b"), fs::Permissions::from_mode(0o1711)).unwrap();
        }),
        ("mode of the root", 0, |at| {
            fs::set_permissions(at, fs::Permissions::from_mode(0o711)).unwrap();
        }),
        ("new xattr", 1, |at| set(&at.join("a/2"), "user.new", b"1")),
        ("changed xattr", 1, |at| set(&at.join("large"), "user.value", b"1")),
        ("removed xattr", 1, |at| {
            rustix::fs::removexattr(at.join("large"), "user.value").unwrap();
        }),
        ("xattrs of a directory", 0, |at| {
            rustix::fs::removexattr(at.join("d"), "user.value").unwrap();
            set(&at.join("d"), "user.new", b"1");
        }),
        ("hole", 1, |at| {
            let file = fs::File::options().write(true).open(at.join("large")).unwrap();
            let mode =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(file, mode, 1 << 20, 1 << 20).unwrap();
        }),
        ("data in a hole", 1, |at| {
            let file = fs::File::options().write(true).open(at.join("sparse")).unwrap();
            file.write_all_at(b"data", 3 << 20).unwrap();
        }),
        ("size", 1, |at| {
            fs::File::options().write(true).open(at.join("sparse")).unwrap().set_len(9).unwrap();
        }),
        ("rename", 2, |at| rename(&at.join("a/2"), &at.join("a/b/renamed"))),
        ("rename to a name that exists", 2, |at| rename(&at.join("a/2"), &at.join("a/b/3"))),
        ("exchange", 2, |at| {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            let (one, other) = (at.join("a/2"), at.join("a/b/3"));
            rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, flags).unwrap();
        }),
        ("exchange of a file with a directory", 6, |at| {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            let (one, other) = (at.join("empty"), at.join("a/b"));
            rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, flags).unwrap();
        }),
        ("renamed directory", 6, |at| rename(&at.join("a/b"), &at.join("b"))),
        ("removed directory", 1, |at| {
            fs::remove_dir_all(at.join("a/b/c")).unwrap();
        }),
        ("new directory", 3, |at| {
            fs::create_dir_all(at.join("new/below")).unwrap();
            write(&at.join("new/below/file"), "text");
        }),
        ("another directory with the same name", 3, |at| {
            fs::remove_dir_all(at.join("a/b/c")).unwrap();
            fs::create_dir(at.join("a/b/c")).unwrap();
            write(&at.join("a/b/c/5"), "another");
            write(&at.join("a/b/c/6"), "6");
        }),
        ("file instead of a directory", 1, |at| {
            fs::remove_dir_all(at.join("a/b/c")).unwrap();
            write(&at.join("a/b/c"), "file");
        }),
        ("directory instead of a file", 2, |at| {
            fs::remove_file(at.join("a/2")).unwrap();
            fs::create_dir(at.join("a/2")).unwrap();
            write(&at.join("a/2/file"), "text");
        }),
        ("link instead of a file", 1, |at| {
            fs::remove_file(at.join("a/2")).unwrap();
            symlink("/etc/passwd", at.join("a/2")).unwrap();
        }),
        ("target of a link", 1, |at| {
            fs::remove_file(at.join("a/to 1")).unwrap();
            symlink("2", at.join("a/to 1")).unwrap();
        }),
        ("first hard link", 2, |at| fs::hard_link(at.join("a/2"), at.join("d/2")).unwrap()),
        ("further hard link", 3, |at| fs::hard_link(at.join("a/1"), at.join("d/1")).unwrap()),
        ("hard link in a new directory", 3, |at| {
            fs::create_dir(at.join("0")).unwrap();
            fs::hard_link(at.join("a/2"), at.join("0/2")).unwrap();
        }),
        ("removed hard link", 2, |at| fs::remove_file(at.join("a/1")).unwrap()),
        ("content through a hard link", 2, |at| write(&at.join("a/b/also 1"), "other")),
        ("hard link of another file", 2, |at| {
            // Now `a/1` is no longer a name of the same file.
            fs::remove_file(at.join("a/b/also 1")).unwrap();
            fs::copy(at.join("a/1"), at.join("a/b/also 1")).unwrap();
        }),
        ("copy becomes a hard link", 2, |at| {
            fs::remove_file(at.join("a/b/3")).unwrap();
            fs::hard_link(at.join("a/2"), at.join("a/b/3")).unwrap();
        }),
        ("number of a removed file", 1, |at| {
            // ext4 gives the new file the same inode number.
            let inode = |path: &str| fs::metadata(at.join(path)).unwrap().ino();
            let old = inode("a/b/c/5");
            let size = fs::metadata(at.join("a/b/c/5")).unwrap().len();
            fs::remove_file(at.join("a/b/c/5")).unwrap();
            write(&at.join("a/b/c/5"), &"x".repeat(usize::try_from(size).unwrap()));
            let _usually_the_same = old == inode("a/b/c/5");
        }),
        ("numbers of removed hard links", 2, |at| {
            fs::remove_file(at.join("a/1")).unwrap();
            fs::remove_file(at.join("a/b/also 1")).unwrap();
            write(&at.join("a/1"), "new");
            fs::hard_link(at.join("a/1"), at.join("a/b/also 1")).unwrap();
        }),
    ];
    for (what, expect, change) in changes {
        let recopied = check(what, usual, change);
        // The order of the names decides which name of a hard link is copied.
        assert!((*expect..=expect + 1).contains(&recopied), "{what}: {recopied}");
    }
    let all = |at: &Path| {
        for (what, _, change) in changes {
            // Each needs files that others remove.
            if what.starts_with("new") || what.starts_with("mode") || what.contains("xattr") {
                change(at);
            }
        }
    };
    check("all at once", usual, all);
    check("everything is removed", usual, |at| {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(path).unwrap();
            } else {
                fs::remove_file(path).unwrap();
            }
        }
    });
}

#[test]
fn whiteouts_are_found() {
    if !is_root() {
        return;
    }
    let add = |at: &Path| {
        fs::hard_link(at.join("whiteout"), at.join("a/whiteout")).unwrap();
    };
    // The old whiteouts are links to the same file, and are not copied again.
    assert_eq!(check("further whiteout", usual, add), 1);
    let remove = |at: &Path| fs::remove_file(at.join("whiteout")).unwrap();
    let pair = Pair::new();
    usual(&pair.from);
    rest();
    let first = pair.first();
    remove(&pair.from);
    device(&pair.from.join("a/2 gone"), 0);
    first.finish().unwrap();
    assert!(!pair.to.join("whiteout").exists());
    for name in ["d/whiteout", "a/2 gone"] {
        let stat = fs::symlink_metadata(pair.to.join(name)).unwrap();
        assert!(stat.file_type().is_char_device(), "{name}");
        assert_eq!(stat.rdev(), 0, "{name}");
    }
}

/// A second change in the tick of the first copy does not change the time.
#[test]
fn changes_of_the_same_tick_are_found() {
    for round in 0..200_u32 {
        let pair = Pair::new();
        let path = pair.from.join("file");
        write(&path, &format!("{round:8}"));
        let first = pair.first();
        write(&path, &format!("{:8}", round + 1));
        first.finish().unwrap();
        pair.check("same tick");
    }
}

/// A tmpfs shows no stores through mappings, so its files are compared.
#[test]
fn on_other_file_systems_bytes_are_compared() {
    if !is_root() {
        return;
    }
    let options =
        kernel::mount::TmpfsOptions { name: "test", bytes: None, inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options).unwrap();
    let pair = Pair::new();
    let from = path_of(&mount);
    usual(&from);
    fs::write(from.join("mapped"), testing::noise(1 << 20)).unwrap();
    rest();
    let first = copy_of(&from, &pair.to).unwrap();
    // The same as if the source had changed without a trace.
    let copy = fs::File::options().write(true).open(pair.to.join("mapped")).unwrap();
    copy.write_all_at(b"x", 700_000).unwrap();
    assert_eq!(first.finish().unwrap().recopied, 1);
    assert_same(&from, &pair.to, "tmpfs");
}
