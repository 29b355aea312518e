mod changes;
mod concurrent;
mod limits;
mod merge;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use rustix::fs::{FileType, Mode, XattrFlags, lsetxattr, mknodat};

use super::*;

/// A flag that stays unset.
static GO_ON: AtomicBool = AtomicBool::new(false);

/// Everything that can be seen of a file, except its number and the times of access and of the last change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    mode: u32,
    owner: (u32, u32),
    number: u64,
    modified: (i64, i64),
    /// Bytes of a file, target of a link.
    content: Vec<u8>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// First name of the same file.
    first: PathBuf,
    links: u64,
}

/// Describes all files below a directory, by their paths.
pub(super) fn tree(root: &Path) -> BTreeMap<PathBuf, Seen> {
    let mut found = BTreeMap::new();
    let mut files: HashMap<(u64, u64), PathBuf> = HashMap::new();
    let mut left = vec![PathBuf::new()];
    while let Some(name) = left.pop() {
        let path = if name.as_os_str().is_empty() { root.to_owned() } else { root.join(&name) };
        let stat = fs::symlink_metadata(&path).unwrap();
        let kind = stat.file_type();
        let mut content = Vec::new();
        if kind.is_dir() {
            let mut below: Vec<_> =
                fs::read_dir(&path).unwrap().map(|it| name.join(it.unwrap().file_name())).collect();
            below.sort();
            left.extend(below.into_iter().rev());
        } else if kind.is_file() {
            content = fs::read(&path).unwrap();
        } else if kind.is_symlink() {
            content = fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec();
        }
        let first = files.entry((stat.dev(), stat.ino())).or_insert_with(|| name.clone());
        let is_device = kind.is_char_device() || kind.is_block_device();
        // Overlayfs links whiteouts, which has no meaning.
        let is_whiteout = kind.is_char_device() && stat.rdev() == 0;
        let seen = Seen {
            mode: stat.mode(),
            owner: (stat.uid(), stat.gid()),
            number: if is_device { stat.rdev() } else { 0 },
            modified: (stat.mtime(), stat.mtime_nsec()),
            content,
            xattrs: xattrs(&path),
            first: if is_whiteout { name.clone() } else { first.clone() },
            links: if kind.is_dir() || is_whiteout { 0 } else { stat.nlink() },
        };
        found.insert(name, seen);
    }
    found
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = [0; 4096];
    let count = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..count].split(|it| *it == 0).filter(|it| !it.is_empty());
    let pair = |name: &[u8]| {
        let mut value = [0; 4096];
        let count = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
        (name.to_vec(), value[..count].to_vec())
    };
    // Copies and merges leave this one out.
    let names = names.filter(|name| !name.ends_with(b".overlay.uuid"));
    names.map(pair).collect()
}

/// Asserts that two directories have the same files.
#[track_caller]
pub(super) fn assert_same(from: &Path, to: &Path, what: &str) {
    let (mut from, mut to) = (tree(from), tree(to));
    let names: Vec<_> = from.keys().cloned().collect();
    // Only the differences are shown, and not all of a content.
    for name in names {
        if from.get(&name) == to.get(&name) {
            from.remove(&name);
            to.remove(&name);
        }
    }
    for seen in from.values_mut().chain(to.values_mut()) {
        let is_same = |it: &u8| *it == seen.content[0];
        if seen.content.len() > 64 {
            let length = seen.content.iter().take_while(|it| is_same(it)).count();
            seen.content = format!("{length} of {}", seen.content.len()).into_bytes();
        }
    }
    assert_eq!(from, to, "{what}");
}

/// The two directories of a copy, on the disk of the temporary directory.
pub(super) struct Pair {
    pub(super) folder: tempfile::TempDir,
    pub(super) from: PathBuf,
    pub(super) to: PathBuf,
}

impl Pair {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|it| folder.path().join(it));
        for path in [&from, &to] {
            fs::create_dir(path).unwrap();
        }
        Self { folder, from, to }
    }

    pub(super) fn first(&self) -> FirstCopy<'static> {
        copy_of(&self.from, &self.to).unwrap()
    }

    #[track_caller]
    pub(super) fn check(&self, what: &str) {
        assert_same(&self.from, &self.to, what);
    }
}

pub(super) fn copy_of(from: &Path, to: &Path) -> Result<FirstCopy<'static>, CopyError> {
    first_copy(File::open(from).unwrap().as_fd(), File::open(to).unwrap().as_fd(), &GO_ON)
}

/// Returns a path of an open directory, which may be a detached mount.
pub(super) fn path_of(directory: impl AsFd) -> PathBuf {
    format!("/proc/self/fd/{}/.", directory.as_fd().as_raw_fd()).into()
}

/// Waits until changes count as old.
pub(super) fn rest() {
    std::thread::sleep(std::time::Duration::from_millis(50));
}

pub(super) fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        testing::skipped("devices and owners need root");
    }
    is_root
}

pub(super) fn device(path: &Path, number: u64) {
    let mode = Mode::from_raw_mode(0o640);
    mknodat(rustix::fs::CWD, path, FileType::CharacterDevice, mode, number).unwrap();
}

pub(super) fn set(path: &Path, name: &str, value: &[u8]) {
    lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// An ACL for user 7 (linux/posix_acl_xattr.h).
pub(super) const ACL: &[u8] = b"\x02\0\0\0\
    \x01\0\x06\0\xff\xff\xff\xff\
    \x02\0\x07\0\x07\0\0\0\
    \x04\0\x04\0\xff\xff\xff\xff\
    \x10\0\x07\0\xff\xff\xff\xff\
    \x20\0\x04\0\xff\xff\xff\xff";

/// `cap_net_raw` as a file capability (linux/capability.h, version 2).
pub(super) const CAPABILITY: &[u8] = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Makes files of all kinds, with all kinds of metadata.
pub(super) fn every_kind(at: &Path) {
    use std::os::unix::fs::{PermissionsExt as _, chown, lchown};

    let name = |bytes: &[u8]| at.join(std::ffi::OsStr::from_bytes(bytes));
    fs::write(name(b"\xff not UTF-8 \n"), "text").unwrap();
    fs::write(at.join("empty"), "").unwrap();
    fs::write(at.join("large"), testing::noise(3 << 20)).unwrap();
    let sparse = File::create(at.join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &[7; 5000], 1 << 20).unwrap();
    sparse.set_len(5 << 20).unwrap();
    fs::create_dir_all(at.join("d/e/f")).unwrap();
    fs::write(at.join("d/e/f/g"), "g").unwrap();
    fs::set_permissions(at.join("d/e"), fs::Permissions::from_mode(0o3711)).unwrap();
    fs::hard_link(at.join("d/e/f/g"), at.join("linked")).unwrap();
    fs::hard_link(at.join("d/e/f/g"), at.join("d/linked")).unwrap();
    symlink("/etc/passwd", at.join("link")).unwrap();
    fs::hard_link(at.join("link"), at.join("d/same link")).unwrap();
    symlink("x".repeat(4000), at.join("long link")).unwrap();
    set(&at.join("empty"), "user.empty", b"");
    set(&at.join("large"), "user.value", &[0xab; 1000]);
    set(&at.join("d"), "user.value", b"directory");
    let fifo = |path: PathBuf, kind| {
        mknodat(rustix::fs::CWD, &path, kind, Mode::from_raw_mode(0o620), 0).unwrap();
    };
    fifo(at.join("fifo"), FileType::Fifo);
    fifo(at.join("socket"), FileType::Socket);
    let old = rustix::fs::Timespec { tv_sec: -5, tv_nsec: 123_456_789 };
    let times = rustix::fs::Timestamps { last_access: old, last_modification: old };
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, at.join("link"), &times, flags).unwrap();
    if !is_root() {
        return;
    }
    lchown(at.join("link"), Some(1001), Some(1002)).unwrap();
    chown(at.join("fifo"), Some(1001), Some(1002)).unwrap();
    chown(at.join("d"), Some(3), Some(4)).unwrap();
    fs::write(at.join("setuid"), "program").unwrap();
    chown(at.join("setuid"), Some(3), Some(4)).unwrap();
    set(&at.join("setuid"), "security.capability", CAPABILITY);
    fs::set_permissions(at.join("setuid"), fs::Permissions::from_mode(0o6755)).unwrap();
    set(&at.join("empty"), "system.posix_acl_access", ACL);
    set(&at.join("d"), "system.posix_acl_default", ACL);
    // Files that are made later inherit the ACL from this directory, but their copies must not.
    set(&at.join("d/e"), "system.posix_acl_default", ACL);
    set(&at.join("link"), "trusted.link", b"1");
    set(&at.join("fifo"), "trusted.fifo", b"1");
    device(&at.join("device"), rustix::fs::makedev(4, 5));
    device(&at.join("whiteout"), 0);
    fs::hard_link(at.join("whiteout"), at.join("d/whiteout")).unwrap();
    fs::create_dir(at.join("opaque")).unwrap();
    set(&at.join("opaque"), "trusted.overlay.opaque", b"y");
    set(&at.join("d"), "trusted.overlay.redirect", b"/other");
    set(&at.join("empty"), "trusted.overlay.metacopy", b"");
    set(at, "trusted.overlay.opaque", b"y");
}

#[test]
fn all_kinds_of_files_are_copied() {
    let pair = Pair::new();
    every_kind(&pair.from);
    let report = pair.first().at_rest().unwrap();
    pair.check("at rest");
    let names = u64::try_from(tree(&pair.from).len()).unwrap() - 1;
    assert_eq!((report.entries, report.recopied), (names, 0));
    let inode = |name| fs::symlink_metadata(pair.from.join(name)).unwrap().ino();
    let inodes: HashSet<u64> = tree(&pair.from).into_keys().map(inode).collect();
    assert_eq!(report.inodes, u64::try_from(inodes.len()).unwrap());
    let blocks = |path: &Path| fs::metadata(path).unwrap().blocks();
    for name in ["sparse", "large"] {
        assert_eq!(blocks(&pair.to.join(name)), blocks(&pair.from.join(name)), "holes of {name}");
    }
    assert!(report.bytes >= 3 << 20, "{report:?}");
    assert!(report.bytes < 5 << 20, "{report:?}");
}

/// Overlayfs records the identity of a layer's file system, which the copy must not have.
#[test]
fn the_identity_of_the_layer_is_not_copied() {
    if !is_root() {
        return;
    }
    let pair = Pair::new();
    set(&pair.from, "trusted.overlay.uuid", &[1; 16]);
    set(&pair.from, "user.overlay.uuid", &[1; 16]);
    set(&pair.from, "trusted.overlay.impure", b"y");
    pair.first().at_rest().unwrap();
    let mut names = [0; 4096];
    let count = rustix::fs::llistxattr(&pair.to, &mut names[..]).unwrap();
    assert_eq!(&names[..count], b"trusted.overlay.impure\0");
}

/// Files of a directory with a default ACL would inherit it.
#[test]
fn the_copy_inherits_nothing() {
    if !is_root() {
        return;
    }
    let pair = Pair::new();
    every_kind(&pair.from);
    set(&pair.to, "system.posix_acl_default", ACL);
    rest();
    let first = pair.first();
    fs::write(pair.from.join("d/e/new"), "").unwrap();
    rustix::fs::removexattr(pair.from.join("d/e/new"), "system.posix_acl_access").unwrap();
    fs::create_dir(pair.from.join("d/e/new directory")).unwrap();
    for kind in ["access", "default"] {
        let name = format!("system.posix_acl_{kind}");
        rustix::fs::removexattr(pair.from.join("d/e/new directory"), name).unwrap();
    }
    first.finish().unwrap();
    pair.check("inherited ACL");
}

/// On a tmpfs, the second copy reads files of a directory before it adds others.
#[test]
fn a_directory_that_was_read_passes_on_nothing() {
    if !is_root() {
        return;
    }
    let options =
        kernel::mount::TmpfsOptions { name: "test", bytes: None, inodes: None, mode: 0o755 };
    let mount = kernel::mount::tmpfs(&options).unwrap();
    let (pair, from) = (Pair::new(), path_of(&mount));
    for directory in ["new", "changed"] {
        fs::create_dir(from.join(directory)).unwrap();
        for file in ["0", "1"] {
            fs::write(from.join(directory).join(file), "old").unwrap();
        }
        set(&from.join(directory), "system.posix_acl_default", ACL);
    }
    fs::write(from.join("moved"), "moved").unwrap();
    rest();
    let first = copy_of(&from, &pair.to).unwrap();
    // Some kernels list the oldest file first, and others the newest. In one of these directories, a file that is only
    // read precedes the one that is copied.
    rustix::fs::rename(from.join("moved"), from.join("new/moved")).unwrap();
    fs::write(from.join("changed/0"), "other").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    fs::set_permissions(from.join("changed"), mode).unwrap();
    first.finish().unwrap();
    assert_same(&from, &pair.to, "inherited ACL");
}
