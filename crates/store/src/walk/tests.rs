use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::sync::Mutex;

use image::dump::{self, Links};
use image::verity::Algorithm;
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};

use super::*;

/// fs-verity digest of 100 zero bytes, as printed by `composefs-info measure-file`.
const ZEROS: &str = "b0fb44a8078cc2d7d91ede6d16dfe63943613e6286bd7c49efd0223940d51229";

const AS_MKCOMPOSEFS: Options = Options {
    hardlinks: Hardlinks::Split,
    xattrs: KeptXattrs::All,
    times: Times::Exact,
    devices: Devices::Keep,
    inline_max: COMPOSEFS_INLINE_MAX,
    threads: NonZeroUsize::new(2).unwrap(),
};

fn digest(source: &mut FileReader<'_>) -> Result<ObjectId, PutError> {
    Ok(source.digest(Algorithm::Sha256)?)
}

fn walk(root: &Path, options: &Options) -> Result<Tree, WalkError> {
    tree(fs::File::open(root).unwrap().as_fd(), root, options, digest)
}

/// Returns the lines of a dump without owners, which depend on the user who runs the test, and without the root's
/// line.
fn lines(tree: &Tree) -> Vec<String> {
    let mut text = Vec::new();
    dump::write(tree, Links::ToOwner, |_| 0, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let cut = |line: &str| {
        let mut fields: Vec<&str> = line.split(' ').collect();
        fields.drain(4..6);
        fields.join(" ")
    };
    text.lines().skip(1).map(cut).collect()
}

fn set_time(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Makes one file of each kind that any user can create.
fn sample() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    fs::create_dir(at("d")).unwrap();
    fs::write(at("d/big"), [0; 100]).unwrap();
    fs::write(at("edge"), "e".repeat(64)).unwrap();
    fs::write(at("small"), "hi\n").unwrap();
    fs::write(at("empty"), "").unwrap();
    fs::hard_link(at("small"), at("d/again")).unwrap();
    symlink("nowhere/at all", at("link")).unwrap();
    rustix::fs::mknodat(CWD, at("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    drop(UnixListener::bind(at("socket")).unwrap());
    for (name, mode) in [("d", 0o2755), ("d/big", 0o4711), ("edge", 0o600), ("small", 0o644)] {
        fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    for name in ["empty", "pipe", "socket"] {
        fs::set_permissions(at(name), fs::Permissions::from_mode(0o640)).unwrap();
    }
    for name in ["d/big", "d/again", "edge", "empty", "link", "pipe", "socket", "d"] {
        set_time(&at(name), 1_000_000_000, 123_456_789);
    }
    set_time(&at("edge"), -5, 7);
    root
}

#[test]
fn every_kind_of_file() {
    let root = sample();
    let time = "1000000000.123456789";
    let path = format!("{}/{}", &ZEROS[..2], &ZEROS[2..]);
    let expect = [
        format!("/d 0 42755 2 0 {time} - - -"),
        format!("/d/again 3 100644 1 0 {time} - hi\\n -"),
        format!("/d/big 100 104711 1 0 {time} {path} - {ZEROS}"),
        format!("/edge 64 100600 1 0 -5.7 - {} -", "e".repeat(64)),
        format!("/empty 0 100640 1 0 {time} - - -"),
        format!("/link 14 120777 1 0 {time} nowhere/at\\x20all - -"),
        format!("/pipe 0 10640 1 0 {time} - - -"),
        format!("/small 3 100644 1 0 {time} - hi\\n -"),
        format!("/socket 0 140640 1 0 {time} - - -"),
    ];
    assert_eq!(lines(&walk(root.path(), &AS_MKCOMPOSEFS).unwrap()), expect);
}

#[test]
fn hard_links_are_kept_when_asked_for() {
    let root = sample();
    let options = Options { hardlinks: Hardlinks::Keep, ..AS_MKCOMPOSEFS };
    fs::hard_link(root.path().join("d/big"), root.path().join("big")).unwrap();
    fs::hard_link(root.path().join("pipe"), root.path().join("d/pipe")).unwrap();
    let calls = Mutex::new(0);
    let directory = fs::File::open(root.path()).unwrap();
    let tree = tree(directory.as_fd(), root.path(), &options, |source| {
        *calls.lock().unwrap() += 1;
        digest(source)
    });
    let lines = lines(&tree.unwrap());
    let find = |path: &str| lines.iter().find(|line| line.starts_with(path)).unwrap();
    assert!(find("/big ").contains(" 104711 2 "), "{lines:#?}");
    assert!(find("/d/big ").contains(" @104711 2 "), "{lines:#?}");
    assert!(find("/d/pipe ").contains(" 10640 2 "), "{lines:#?}");
    assert!(find("/pipe ").contains(" @10640 2 "), "{lines:#?}");
    assert!(find("/small ").contains(" @100644 2 "), "{lines:#?}");
    assert_eq!(calls.into_inner().unwrap(), 1, "a file is put once, whatever its names");
}

fn check_time(times: Times, expect: &str) {
    let root = sample();
    let lines = lines(&walk(root.path(), &Options { times, ..AS_MKCOMPOSEFS }).unwrap());
    let edge = lines.iter().find(|line| line.starts_with("/edge ")).unwrap();
    assert_eq!(edge.split(' ').nth(5), Some(expect), "{times:?}");
}

#[test]
fn times() {
    check_time(Times::Exact, "-5.7");
    check_time(Times::WholeSeconds, "-5.0");
    check_time(Times::Epoch, "0.0");
}

#[test]
fn xattrs() {
    let root = sample();
    let set = |name: &str, xattr: &str, value: &str| {
        let path = root.path().join(name);
        rustix::fs::lsetxattr(path, xattr, value.as_bytes(), XattrFlags::empty())
    };
    if let Err(error) = set("d", "user.b", "in a directory") {
        testing::skipped(&format!("no user xattrs in the temporary directory: {error}"));
        return;
    }
    set("d", "user.a", "").unwrap();
    set("small", "user.x", "y").unwrap();
    // Only root may set these xattrs, and symlinks can have no others.
    let is_root = set("link", "trusted.q", "t").is_ok() && set("small", "trusted.q", "u").is_ok();
    let found = |xattrs| {
        let options = Options { xattrs, ..AS_MKCOMPOSEFS };
        let tree = walk(root.path(), &options).unwrap();
        let mut found = Vec::new();
        let mut walk = tree.walk();
        while let Some((path, entry)) = walk.next() {
            for (name, value) in entry.inode.xattrs() {
                if name.starts_with(b"user.") || name == b"trusted.q" {
                    let text = [path, b" ", name, b"=", value].concat();
                    found.push(String::from_utf8(text).unwrap());
                }
            }
        }
        found
    };
    let (b, x) = ("/d user.b=in a directory", "/small user.x=y");
    let user = ["/d user.a=", b, "/d/again user.x=y", x];
    let all = [
        "/d user.a=",
        b,
        "/d/again trusted.q=u",
        "/d/again user.x=y",
        "/link trusted.q=t",
        "/small trusted.q=u",
        x,
    ];
    if is_root {
        assert_eq!(found(KeptXattrs::All), all);
    } else {
        testing::skipped("trusted xattrs, which only root may set");
        assert_eq!(found(KeptXattrs::All), user);
    }
    assert_eq!(found(KeptXattrs::UserOnly), user);
    assert_eq!(found(KeptXattrs::None), [""; 0]);
}

#[test]
fn devices() {
    let root = tempfile::tempdir().unwrap();
    let make = |name: &str, kind, major, minor| {
        let number = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(CWD, root.path().join(name), kind, Mode::from_raw_mode(0o600), number)
    };
    // Any user may create a whiteout; other devices need a privilege.
    make("whiteout", FileType::CharacterDevice, 0, 0).unwrap();
    let may = make("char", FileType::CharacterDevice, 5, 1).is_ok()
        && make("block", FileType::BlockDevice, 259, 300).is_ok();
    let numbers = |devices| -> Vec<String> {
        let options = Options { devices, ..AS_MKCOMPOSEFS };
        let lines = lines(&walk(root.path(), &options).unwrap());
        let number = |line: &String| line.split(' ').take(5).collect::<Vec<_>>().join(" ");
        lines.iter().map(number).collect()
    };
    assert_eq!(numbers(Devices::Skip), [""; 0]);
    if may {
        // The expected numbers are 259 << 8 combined with (300 & 255) and (300 & !255) << 12, as the kernel's
        // `new_encode_dev` computes them.
        let expect = ["/block 0 60600 1 1114924", "/char 0 20600 1 1281", "/whiteout 0 20600 1 0"];
        assert_eq!(numbers(Devices::Keep), expect);
    } else {
        testing::skipped("device nodes, which this user may not make");
        assert_eq!(numbers(Devices::Keep), ["/whiteout 0 20600 1 0"]);
    }
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let root = tempfile::tempdir().unwrap();
    for number in 0..300_u32 {
        let directory = root.path().join(format!("{}", number % 7));
        fs::create_dir_all(&directory).unwrap();
        let bytes = number.to_le_bytes().repeat(100 + number as usize * 3 % 5000);
        fs::write(directory.join(number.to_string()), bytes).unwrap();
    }
    let with = |threads| {
        let threads = NonZeroUsize::new(threads).unwrap();
        lines(&walk(root.path(), &Options { threads, ..AS_MKCOMPOSEFS }).unwrap())
    };
    let one = with(1);
    assert_eq!(one.len(), 307);
    assert!(one.iter().all(|line| line.contains(" 40755 ") || !line.ends_with(" -")), "{one:?}");
    assert_eq!(with(2), one);
    assert_eq!(with(16), one);
}

fn check_error(put: impl Fn(&Path) -> Result<ObjectId, PutError> + Sync, expect: &str) {
    let root = sample();
    let directory = fs::File::open(root.path()).unwrap();
    let error = tree(directory.as_fd(), Path::new("ROOT"), &AS_MKCOMPOSEFS, |source| {
        assert_eq!(source.size(), 100);
        put(&root.path().join("d/big"))
    });
    assert_eq!(error.unwrap_err().to_string(), expect);
}

#[test]
fn errors_name_the_file() {
    check_error(|_| Err("no space".into()), "cannot store ROOT/d/big");
    check_error(
        |path| {
            fs::write(path, "another length").unwrap();
            Err("whatever comes of that".into())
        },
        "ROOT/d/big changed while it was read",
    );
    check_error(
        |path| {
            fs::write(path, [1; 100]).unwrap();
            Ok(image::verity::digest(Algorithm::Sha256, &[1; 100]).into())
        },
        "ROOT/d/big changed while it was read",
    );
}

#[test]
fn a_file_is_read_as_long_as_it_was() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("f"), [7; 1000]).unwrap();
    let read = Mutex::new(Vec::new());
    let directory = fs::File::open(root.path()).unwrap();
    let outcome = tree(directory.as_fd(), root.path(), &AS_MKCOMPOSEFS, |source| {
        fs::write(root.path().join("f"), [7; 2000])?;
        let answer = source.read(|bytes| {
            read.lock().unwrap().push(bytes.len());
            Ok(())
        });
        assert_eq!(answer.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
        Err("changed".into())
    });
    assert!(matches!(outcome, Err(WalkError::Changed(_))), "{outcome:?}");
    assert_eq!(read.into_inner().unwrap(), [1001], "no more than needed to see that it grew");
}

#[test]
fn a_symlink_is_no_directory_to_walk_into() {
    let root = tempfile::tempdir().unwrap();
    symlink("/", root.path().join("everything")).unwrap();
    let tree = walk(root.path(), &AS_MKCOMPOSEFS).unwrap();
    assert_eq!(tree.inode_count(), 2);
}
