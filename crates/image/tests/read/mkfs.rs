//! Compares the reader's view of `mkfs.erofs` images with the kernel's mount and with the source.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use quire_image::erofs::read::{
    ByteOffset, FileType, Image, Inode, ReadAt, View, examine, to_tree,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use sha2::{Digest as _, Sha256};

use crate::compressed;
use crate::hostile;
use crate::source::{Fill, Listing, ObservedInode, list, show};
use crate::tools::{environment, find_program, folder, newer, not_made, run, skipped};

/// Environment variable of the process that may mount, because it has its own mount namespace.
const NAMESPACE: &str = "QUIRE_READ_TEST_NAMESPACE";

/// An image to make.
struct Case {
    /// Whether it requires a newer mkfs.erofs than 1.5.
    newer: bool,
    words: &'static str,
    /// Values that may differ from the source.
    lost: &'static [Lost],
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    Mtime,
    Xattrs,
    /// Ids have 16 bits, so the source contains no larger ids. (It also contains a larger directory.)
    WideIds,
}

const fn old(words: &'static str, lost: &'static [Lost]) -> Case {
    Case { newer: false, words, lost }
}

const fn new(words: &'static str) -> Case {
    Case { newer: true, words, lost: &[] }
}

/// With 48-bit addresses, compact inodes store a time of 32 bits in whole seconds. mkfs.erofs 1.9 wraps times before
/// 1970.
const fn wide(words: &'static str) -> Case {
    Case { newer: true, words, lost: &[Lost::Mtime] }
}

/// `BLOB` stands for a new file for data.
const CASES: &[Case] = &[
    old("", &[]),
    old("-T1234567890", &[Lost::Mtime]),
    old("-x-1", &[Lost::Xattrs]),
    old("-x0", &[]),
    old("-x1", &[]),
    old("-x10", &[]),
    old("-Eforce-inode-compact", &[Lost::Mtime, Lost::WideIds]),
    old("-Eforce-inode-extended", &[]),
    old("-Enoinline_data", &[]),
    old("--chunksize=4096", &[]),
    old("--chunksize=65536", &[]),
    old("--chunksize=4096 -Eforce-inode-blockmap", &[]),
    old("--chunksize=4096 -Eforce-chunk-indexes", &[]),
    old("--chunksize=8192 --blobdev=BLOB", &[]),
    old("-Enosbcrc", &[]),
    new(""),
    Case { newer: true, words: "-b512", lost: &[Lost::WideIds] },
    new("-b1024"),
    new("-b2048 -Eforce-inode-extended"),
    new("-b512 --chunksize=512"),
    new("-b512 --chunksize=4096 --blobdev=BLOB"),
    wide("-E48bit"),
    wide("-Edot-omitted"),
    wide("-E48bit,dot-omitted --chunksize=4096 --blobdev=BLOB"),
    new("--xattr-prefix=user.prefixed.by.much. --xattr-prefix=trusted.overlay."),
    new("-Eplain-xattr-prefixes --xattr-prefix=user.prefixed.by.much."),
    new("-Exattr-name-filter"),
    new("-Exattr-name-filter --xattr-prefix=user.prefixed.by. -x1"),
    new("--xattr-inode-digest=trusted.fingerprint"),
    new("--root-xattr-isize=512"),
    new("-Lname -Uc1b9d5a2-f162-11cf-9ece-0020afc76f16"),
    new("--dsunit=8 --fsalignblks=16"),
    new("--MZ=i"),
    new("--MZ=id"),
    new("--mkfs-time -T5"),
    new("-Enoinline_data -b4096 --chunksize=16384"),
];

/// Lists an image with the reader.
pub fn read(image: &Image<impl ReadAt>, devices: &[&dyn ReadAt]) -> Listing {
    let mut listing = Listing::new();
    let mut walk = image.walk();
    while let Some(step) = walk.next().unwrap() {
        let inode = &step.inode;
        let xattrs = image.xattrs(inode).unwrap();
        let visible = xattrs.iter().filter(|it| it.is_visible);
        let xattrs: BTreeMap<_, _> =
            visible.map(|it| (it.name.to_vec(), it.value.to_vec())).collect();
        for (name, value) in &xattrs {
            assert_eq!(image.xattr(inode, name).unwrap().as_ref(), Some(value));
        }
        assert_eq!(image.xattr(inode, b"user.that.is.not.there").unwrap(), None);
        let content = match inode.file_type() {
            FileType::Symlink => image.read_link(inode).unwrap(),
            FileType::Regular => digest(image, inode, devices),
            _ => Vec::new(),
        };
        let path = step.path.strip_prefix(b"/").unwrap().to_vec();
        let mtime = inode.mtime();
        let seen = ObservedInode {
            mode: inode.mode().into(),
            uid: inode.uid(),
            gid: inode.gid(),
            nlink: inode.nlink().into(),
            device_number: inode.device_number().into(),
            mtime: (mtime.seconds, mtime.nanoseconds),
            size: inode.size(),
            xattrs,
            content,
            number: inode.nid().0,
        };
        listing.insert(path, seen);
    }
    listing
}

fn digest(image: &Image<impl ReadAt>, inode: &Inode, devices: &[&dyn ReadAt]) -> Vec<u8> {
    let mut hash = Sha256::new();
    // The length divides no file's size.
    let mut buffer = vec![0; 100_003];
    let mut reader = image.reader(inode);
    let mut at = 0;
    loop {
        let read = reader.read(ByteOffset(at), &mut buffer, devices);
        match read.unwrap_or_else(|error| panic!("{error} ({inode:?})")) {
            0 => break hash.finalize().to_vec(),
            len => hash.update(&buffer[..len]),
        }
        at += buffer.len() as u64;
    }
}

/// Fails with the first difference, which makes the message readable.
pub fn compare(what: &str, ours: &Listing, theirs: &Listing) {
    for (path, seen) in theirs {
        assert_eq!(ours.get(path), Some(seen), "{what}: {:?}", show(path));
    }
    let more = ours.keys().find(|path| !theirs.contains_key(*path));
    assert_eq!(more.map(|path| show(path)), None, "{what}: only in ours");
}

/// Returns the values of the source that an image must preserve.
fn kept(mut seen: ObservedInode, lost: &[Lost]) -> ObservedInode {
    seen.number = 0;
    if seen.mode & 0o170_000 == 0o40_000 {
        // File systems count the size and the links of directories differently.
        seen.size = 0;
        seen.nlink = 0;
    }
    if lost.contains(&Lost::Mtime) {
        seen.mtime = (0, 0);
    }
    if lost.contains(&Lost::Xattrs) {
        seen.xattrs.clear();
    }
    // `--xattr-inode-digest` adds the first xattr, and newer versions add the second to a directory with a whiteout.
    seen.xattrs.remove(&b"trusted.fingerprint"[..]);
    seen.xattrs.remove(&b"trusted.overlay.origin"[..]);
    seen
}

pub fn compare_source(what: &str, ours: &Listing, source: &Listing, lost: &[Lost]) {
    let kept = |listing: &Listing| {
        listing.iter().map(|(path, seen)| (path.clone(), kept(seen.clone(), lost))).collect()
    };
    compare(what, &kept(ours), &kept(source));
}

/// Lists an image as the kernel mounts it.
pub fn mounted<'a>(
    image: &Path,
    devices: impl IntoIterator<Item = &'a Path>,
    dir: &Path,
) -> Listing {
    let options = devices.into_iter().map(|device| format!("device={}", device.display()));
    let options = options.collect::<Vec<_>>().join(",");
    let options = std::ffi::CString::new(options).unwrap();
    let flags = MountFlags::RDONLY;
    mount(image, dir, "erofs", flags, options.as_c_str())
        .unwrap_or_else(|error| panic!("cannot mount {image:?} {options:?}: {error}"));
    let listing = list(dir);
    unmount(dir, UnmountFlags::empty()).unwrap();
    listing
}

/// Runs this test again as root in its own mount namespace. Returns whether this process is already in that
/// namespace.
fn in_namespace(test: &str) -> bool {
    if environment(NAMESPACE).is_some() {
        return true;
    }
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    if !is_root {
        return false;
    }
    let Some(mut command) = testing::command("unshare") else { return false };
    let program = std::env::current_exe().unwrap();
    command.args(["--mount", "--propagation", "private"]).arg(program);
    command.args(["--exact", test, "--nocapture"]).env(NAMESPACE, "1");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    for line in text.lines().filter_map(|line| line.split_once("SKIPPED: ")) {
        skipped(line.1);
    }
    false
}

pub fn mkfs(newer_one: bool) -> Option<PathBuf> {
    if newer_one { newer("mkfs.erofs") } else { find_program("mkfs.erofs") }
}

fn can_mount() -> bool {
    fs::read_to_string("/proc/filesystems").unwrap().contains("erofs")
}

#[test]
fn images_of_many_options() {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let in_namespace = in_namespace("mkfs::images_of_many_options");
    if is_root && !in_namespace {
        return;
    }
    if !is_root {
        skipped("only root can mount, so images of mkfs.erofs are compared with their source only");
    } else if !can_mount() {
        skipped(
            "this kernel has no EROFS, so images of mkfs.erofs are compared with their source only",
        );
    }
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let mountpoint = at("mountpoint");
    fs::create_dir(&mountpoint).unwrap();
    // mkfs.erofs 1.5 keeps chunks in tmpfile(3), whose folder is fixed, and cannot copy them to another file system.
    let made = tempfile::tempdir_in("/tmp").unwrap();
    let made = made.path().join("made.img");
    // mkfs.erofs 1.5 does not find files whose names have 255 bytes.
    let old = Fill { is_root, narrow: false, name: 254, big: 700 };
    let large = Fill { narrow: true, big: 10_000, ..old };
    let sources = [old, large, Fill { name: 255, ..old }].map(|fill| {
        let folder = at(&format!("source-{fill:?}"));
        fs::create_dir(&folder).unwrap();
        fill.make(&folder);
        let listing = list(&folder);
        (folder, listing)
    });

    let mut missing = [false; 2];
    for (number, case) in CASES.iter().enumerate() {
        let Some(mkfs) = mkfs(case.newer) else {
            missing[usize::from(case.newer)] = true;
            continue;
        };
        let (image, blob) = (at(&format!("{number}.img")), at(&format!("{number}.blob")));
        let words = case.words.replace("BLOB", blob.to_str().unwrap());
        let (source, listing) = &sources[match case.newer {
            _ if case.lost.contains(&Lost::WideIds) => 1,
            false => 0,
            true => 2,
        }];
        let files = [made.to_str().unwrap(), source.to_str().unwrap()];
        run(&mkfs, words.split_whitespace().chain(files));
        fs::copy(&made, &image).unwrap();
        fs::remove_file(&made).unwrap();

        let what = format!("mkfs.erofs {}{}", if case.newer { "(new) " } else { "" }, case.words);
        let bytes = fs::read(&image).unwrap();
        let opened = Image::open(&bytes[..]).unwrap_or_else(|error| panic!("{what}: {error}"));
        let device = blob.exists().then(|| fs::read(&blob).unwrap());
        let device = device.as_deref();
        let devices: Vec<&dyn ReadAt> = device.iter().map(|it| it as &dyn ReadAt).collect();
        let ours = read(&opened, &devices);
        compare_source(&what, &ours, listing, case.lost);
        let tree = to_tree(&opened, View::Plain).unwrap().tree;
        let mut walk = tree.walk();
        let names = std::iter::from_fn(|| walk.next().map(drop)).count();
        assert_eq!(names, ours.len() - 1, "{what}");
        examine(&bytes, 1 << 24).unwrap();
        if is_root && can_mount() {
            let device = blob.exists().then_some(&*blob);
            compare(&what, &ours, &mounted(&image, device, &mountpoint));
        }
        fs::remove_file(&image).unwrap();
    }
    if missing[0] {
        skipped("mkfs.erofs is not installed");
    }
    if missing[1] {
        not_made("a newer mkfs.erofs", "sid");
    }
}

/// Returns a folder in a mount namespace of root, which each test needs; `None` if another process ran the test.
pub fn prepare(test: &str) -> Option<tempfile::TempDir> {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let here = in_namespace(test);
    if !is_root {
        skipped("only root can mount");
    } else if here && !can_mount() {
        skipped("this kernel has no EROFS");
    }
    (here && can_mount()).then(folder)
}

/// The layer's tar is the device, in blocks of 512 bytes.
#[test]
fn an_index_of_a_tar() {
    let Some(dir) = prepare("mkfs::an_index_of_a_tar") else { return };
    let (Some(mkfs), Some(tar)) = (newer("mkfs.erofs"), find_program("tar")) else {
        return not_made("a newer mkfs.erofs", "sid");
    };
    let at = |name: &str| dir.path().join(name);
    let (source, mountpoint, archive, image) = (at("s"), at("m"), at("t.tar"), at("i.img"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    Fill { is_root: true, narrow: false, name: 255, big: 700 }.make(&source);
    // tar does not support sockets.
    fs::remove_file(source.join("socket")).unwrap();
    let words = "--sort=name --xattrs --xattrs-include=* --format=pax -C";
    let words = words.split(' ').map(Path::new);
    let files = [&source, Path::new("-cf"), &archive, Path::new(".")];
    run(&tar, words.chain(files));
    run(&mkfs, [Path::new("--tar=i"), &image, &archive]);

    let (bytes, device) = (fs::read(&image).unwrap(), fs::read(&archive).unwrap());
    let opened = Image::open(&bytes[..]).unwrap();
    assert_eq!(opened.superblock().block_bits.get(), 9);
    let ours = read(&opened, &[&&device[..]]);
    compare("a tar", &ours, &mounted(&image, [&*archive], &mountpoint));
    let contents = |listing: &Listing| -> BTreeMap<_, _> {
        let some = listing.iter().filter(|(_, seen)| !seen.content.is_empty());
        some.map(|(path, seen)| (path.clone(), seen.content.clone())).collect()
    };
    assert!(contents(&ours) == contents(&list(&source)), "the tar's contents are the source's");
    // The device follows the image, because the kernel reads these bytes if no device is given.
    let joined = [&bytes[..], &device].concat();
    let behind = read(&Image::open(&joined[..]).unwrap(), &[]);
    compare("a tar behind its index", &behind, &ours);
}

/// Reads damaged images of `mkfs.erofs`.
#[test]
fn damaged() {
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let (source, image, blob) = (at("s"), at("i.img"), at("b"));
    fs::create_dir(&source).unwrap();
    Fill { is_root: false, narrow: false, name: 254, big: 100 }.make(&source);
    fs::write(source.join("words"), compressed::words(200_000)).unwrap();
    let cases = [
        (false, "-Eforce-inode-compact"),
        (false, "--chunksize=4096 --blobdev=BLOB"),
        (true, "-b512 -E48bit --xattr-prefix=user.prefixed. -Exattr-name-filter"),
        (false, "-zlz4 -Eztailpacking -C65536"),
        (true, "-zlz4 -Ededupe"),
        (true, "-zlzma -C16384"),
        (true, "-zdeflate -Eztailpacking"),
        (true, "-zzstd -E48bit -C65536"),
    ];
    for (seed, (is_newer, words)) in (1..).zip(cases) {
        let Some(mkfs) = mkfs(is_newer) else {
            not_made("mkfs.erofs, or a newer one,", "sid");
            continue;
        };
        let words = words.replace("BLOB", blob.to_str().unwrap());
        let files = [image.to_str().unwrap(), source.to_str().unwrap()];
        run(&mkfs, words.split(' ').chain(files));
        hostile::damage(&fs::read(&image).unwrap(), 250, seed);
        fs::remove_file(&image).unwrap();
    }
}
