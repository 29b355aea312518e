//! Compares self-contained images, as the kernel mounts them, with their sources.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use quire_image::erofs::layout::compat;
use quire_image::erofs::read::{ByteOffset, Image, Nid, ReadAt, RunPlace, View, examine, to_tree};
use quire_image::erofs::{Flavor, Piece, Profile, Standalone, Summary, write_with};
use quire_image::tree::{
    Builder, Content, Inode, InodeId, Link, Location, Metadata, Node, Timestamp, Tree, XattrsId,
};
use quire_image::verity::{Algorithm, ObjectId, digest};
use sha2::{Digest as _, Sha256};

use crate::hostile::{self, Random};
use crate::mkfs::{Lost, compare, compare_source, mounted, prepare, read};
use crate::source::{Fill, Listing, ObservedInode, acl, list};
use crate::tools::{find_program, folder, newer, not_made, run, skipped};

pub const METADATA: Metadata = Metadata {
    permissions: 0o644,
    uid: 0,
    gid: 0,
    mtime: Timestamp { seconds: 1_700_000_000, nanoseconds: 5 },
};

const FLAVORS: [Flavor; 3] = [Flavor::Linux, Flavor::Dax, Flavor::Gvisor];

/// Contents by object.
pub type Objects = BTreeMap<ObjectId, Vec<u8>>;

pub fn profile(flavor: Flavor) -> Profile {
    Profile::Standalone(Standalone { flavor, uuid: *b"sixteen bytes id" })
}

fn make(tree: &Tree, flavor: Flavor, objects: &Objects) -> (Vec<u8>, Summary) {
    let mut image = Vec::new();
    let mut contents = |file: Inode<'_>, piece, out: &mut dyn io::Write| {
        let Node::Regular(Content::External { object: Some(object), .. }) = file.node() else {
            panic!("{:?} has no contents to give", file.node());
        };
        give(&objects[&object], piece, out)
    };
    let summary = write_with(tree, &profile(flavor), &mut contents, &mut image).unwrap();
    assert_eq!((summary.bytes, summary.version), (image.len() as u64, None));
    assert_eq!(summary.inodes, tree.inode_count() as u64);
    (image, summary)
}

pub fn give(bytes: &[u8], piece: Piece, out: &mut dyn io::Write) -> io::Result<()> {
    let bytes = match piece {
        Piece::Whole => bytes,
        Piece::From(start) => &bytes[start as usize..],
    };
    // Write pieces whose length divides no file's size.
    bytes.chunks(70_001).try_for_each(|piece| out.write_all(piece))
}

/// Stores bytes as an object, and returns the content of a file with that object.
pub fn external(objects: &mut Objects, bytes: Vec<u8>) -> Content<'static> {
    let (size, object) = (bytes.len() as u64, digest(Algorithm::Sha256, &bytes));
    objects.insert(object.into(), bytes);
    Content::External { size, object: Some(object.into()), location: Location::Object }
}

/// Makes the tree of a directory from its listing.
pub fn tree_of(folder: &Path, listing: &Listing) -> (Tree, Objects) {
    let mut builder = Builder::new();
    let mut objects = Objects::new();
    let mut inodes = BTreeMap::new();
    for (path, seen) in listing {
        let metadata = Metadata {
            permissions: (seen.mode & 0o7777) as u16,
            uid: seen.uid,
            gid: seen.gid,
            mtime: Timestamp { seconds: seen.mtime.0, nanoseconds: seen.mtime.1 },
        };
        let xattrs =
            builder.xattrs(seen.xattrs.iter().map(|(name, value)| (&name[..], &value[..])));
        let xattrs = xattrs.unwrap();
        if path.is_empty() {
            builder.describe(InodeId::ROOT, &metadata, xattrs).unwrap();
            inodes.insert(seen.number, InodeId::ROOT);
            continue;
        }
        let inode = *inodes.entry(seen.number).or_insert_with(|| {
            let node = match seen.mode & 0o170_000 {
                0o040_000 => Node::Directory,
                0o120_000 => Node::Symlink(&seen.content),
                0o020_000 => Node::CharDevice(seen.device_number),
                0o060_000 => Node::BlockDevice(seen.device_number),
                0o010_000 => Node::Fifo,
                0o140_000 => Node::Socket,
                _ if seen.size == 0 => Node::Regular(Content::Inline(&[])),
                _ => {
                    let file = folder.join(show_path(path));
                    Node::Regular(external(&mut objects, fs::read(file).unwrap()))
                }
            };
            builder.inode(&metadata, xattrs, node).unwrap()
        });
        let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b""[..], &path[..]),
        };
        let parent = inodes[&listing[parent].number];
        builder.insert(parent, name, inode, Link::Equal).unwrap();
    }
    (builder.finish(), objects)
}

fn show_path(path: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt as _;
    PathBuf::from(std::ffi::OsStr::from_bytes(path))
}

/// Groups paths by inode.
pub fn links(listing: &Listing) -> Vec<Vec<&Vec<u8>>> {
    let mut groups = BTreeMap::<u64, Vec<_>>::new();
    for (path, seen) in listing {
        groups.entry(seen.number).or_default().push(path);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort();
    groups
}

/// Returns the part of a listing that a flavor preserves, in a form that is comparable between file systems.
fn kept(listing: &Listing, flavor: Flavor) -> Listing {
    let kept = |seen: &ObservedInode| {
        let mut seen = seen.clone();
        seen.number = 0;
        if flavor == Flavor::Gvisor {
            seen.xattrs.clear();
        }
        seen
    };
    listing.iter().map(|(path, seen)| (path.clone(), kept(seen))).collect()
}

fn check_with_fsck(image: &Path) {
    match find_program("fsck.erofs") {
        Some(fsck) => drop(run(&fsck, [Path::new("-d1"), image])),
        None => skipped("fsck.erofs is not installed"),
    }
    match newer("fsck.erofs") {
        Some(fsck) => drop(run(&fsck, [Path::new("-d1"), image])),
        None => not_made("a newer fsck.erofs", "sid"),
    }
}

/// The image is made from a directory with files of every kind. When the kernel mounts the image, it shows that
/// directory.
#[test]
fn the_kernel_shows_the_source() {
    let Some(dir) = prepare("standalone::the_kernel_shows_the_source") else { return };
    let at = |name: &str| dir.path().join(name);
    let (source, mountpoint, image) = (at("s"), at("m"), at("i.img"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&mountpoint).unwrap();
    // mkfs.erofs 1.5 does not find files whose names have 255 bytes.
    Fill { is_root: true, narrow: false, name: 254, big: 700 }.make(&source);
    let listing = list(&source);
    let (tree, objects) = tree_of(&source, &listing);
    let mut sizes = Vec::new();
    for flavor in FLAVORS {
        let (bytes, _) = make(&tree, flavor, &objects);
        fs::write(&image, &bytes).unwrap();
        check_with_fsck(&image);
        let shown = mounted(&image, None, &mountpoint);
        let lost: &[Lost] = if flavor == Flavor::Gvisor { &[Lost::Xattrs] } else { &[] };
        compare_source("mounted", &shown, &kept(&listing, flavor), lost);
        assert_eq!(links(&shown), links(&listing));
        compare("read", &read(&Image::open(&bytes[..]).unwrap(), &[]), &shown);
        sizes.push(bytes.len());
    }
    let Some(mkfs) = find_program("mkfs.erofs") else {
        return skipped("mkfs.erofs is not installed");
    };
    let theirs = at("theirs.img");
    run(&mkfs, [theirs.as_path(), &source]);
    let theirs = fs::metadata(&theirs).unwrap().len() as usize;
    assert!(sizes[0] <= theirs, "ours {sizes:?}, theirs {theirs}");
}

/// Reads an image, and compares it with the tree that it was made from.
fn check(what: &str, tree: &Tree, flavor: Flavor, objects: &Objects) -> Vec<u8> {
    let (bytes, _) = make(tree, flavor, objects);
    examine(&bytes, 1 << 20).unwrap_or_else(|error| panic!("{what}: {error}"));
    let image = Image::open(&bytes[..]).unwrap();
    let superblock = image.superblock();
    assert_eq!((superblock.incompat, superblock.uuid), (0, *b"sixteen bytes id"));
    assert_ne!(superblock.compat & compat::SB_CHKSUM, 0);
    let found = to_tree(&image, View::Plain).unwrap();
    assert_eq!(found.tree.inode_count(), tree.inode_count(), "{what}");
    one(&image, &found.tree.root(), &found.nids, &tree.root(), flavor, objects);
    let (mut expected, mut got) = (tree.walk(), found.tree.walk());
    let mut same = BTreeMap::new();
    while let Some((path, entry)) = expected.next() {
        let (other_path, other) = got.next().unwrap_or_else(|| panic!("{what}: no {path:?}"));
        assert_eq!(path, other_path, "{what}");
        let twin = *same.entry(entry.inode.id()).or_insert(other.inode.id());
        assert_eq!(twin, other.inode.id(), "{what}: links of {path:?}");
        one(&image, &other.inode, &found.nids, &entry.inode, flavor, objects);
    }
    assert!(got.next().is_none(), "{what}: more names");
    bytes
}

fn one<S: ReadAt>(
    image: &Image<S>,
    got: &Inode<'_>,
    nids: &[Nid],
    expected: &Inode<'_>,
    flavor: Flavor,
    objects: &Objects,
) {
    let path = expected.path();
    let path = path.escape_ascii();
    assert_eq!(
        (got.mode(), got.metadata(), got.nlink()),
        (expected.mode(), expected.metadata(), expected.nlink()),
        "{path}"
    );
    let pairs = |inode: &Inode<'_>| -> BTreeMap<Vec<u8>, Vec<u8>> {
        inode.xattrs().map(|(name, value)| (name.to_vec(), value.to_vec())).collect()
    };
    match flavor {
        Flavor::Linux | Flavor::Dax => assert!(pairs(got) == pairs(expected), "{path}: xattrs"),
        Flavor::Gvisor => assert_eq!(pairs(got).len(), 0, "{path}"),
    }
    let content = match expected.node() {
        Node::Regular(Content::Inline(bytes)) => bytes,
        Node::Regular(Content::External { object, .. }) => &objects[&object.unwrap()],
        node => return assert_eq!(got.node(), node, "{path}"),
    };
    let inode = image.inode(nids[got.id().index()]).unwrap();
    let mut bytes = vec![0; content.len() + 1];
    let len = image.read(&inode, ByteOffset(0), &mut bytes, &[]).unwrap();
    assert!(bytes[..len] == *content, "{path}: other bytes");
    for extent in image.extents(&inode) {
        match extent.unwrap().place {
            RunPlace::Data(_, at) => assert_eq!(at.0 % 4096, 0, "{path}"),
            RunPlace::Inline(_) => assert_eq!(flavor, Flavor::Linux, "{path}"),
            RunPlace::Hole | RunPlace::Packed => panic!("{path}: a hole, or compressed"),
        }
    }
}

pub fn random_tree(random: &mut Random) -> (Tree, Objects) {
    let mut builder = Builder::new();
    let mut objects = Objects::new();
    let mut directories = vec![InodeId::ROOT];
    let mut files = Vec::new();
    let times = [0, 1_700_000_000, -5];
    let acl = acl();
    for number in 0..random.next(150) {
        let parent = directories[random.next(directories.len())];
        let name = match random.next(3) {
            0 => format!("{number}"),
            1 => format!("{}", random.next(1000)),
            _ => "n".repeat(1 + random.next(255)),
        };
        let metadata = Metadata {
            permissions: random.next(0o10_000) as u16,
            uid: random.next(3) as u32 * 40_000,
            gid: random.next(3) as u32 * 40_000,
            mtime: Timestamp {
                seconds: times[random.next(times.len())],
                nanoseconds: random.next(2) as u32 * 999_999_999,
            },
        };
        let own = vec![b'o'; random.next(5000)];
        let pairs: [(&[u8], &[u8]); 5] = [
            (b"security.selinux", b"system_u:object_r:usr_t:s0\0"),
            (b"trusted.own", &own),
            (b"trusted.overlay.opaque", b"y"),
            (b"user.shared", b"value"),
            (b"system.posix_acl_access", &acl),
        ];
        let kind = random.next(12);
        // Only files and directories can have the other xattrs.
        let most = if (3..8).contains(&kind) { 3 } else { 5 };
        let xattrs = builder.xattrs(pairs.into_iter().take(random.next(most + 1))).unwrap();
        let lengths = [1, 40, 2047, 2048, 2049, 4095, 4096, 4097, 6144, 9000, 70_000, 300_000];
        let target = vec![b't'; 1 + random.next(4095)];
        // Use few contents, so that some are equal.
        let content = vec![random.next(3) as u8; lengths[random.next(lengths.len())]];
        let node = match kind {
            0..=2 => Node::Directory,
            3 => Node::Symlink(&target),
            4 => Node::CharDevice(random.next(2) as u64 * 259),
            5 => Node::BlockDevice(0xffff_ffff),
            6 => Node::Fifo,
            7 => Node::Socket,
            8 => Node::Regular(Content::Inline(&target[..random.next(target.len())])),
            _ => Node::Regular(external(&mut objects, content)),
        };
        let inode = builder.inode(&metadata, xattrs, node).unwrap();
        if builder.insert(parent, name.as_bytes(), inode, Link::Equal).is_err() {
            continue;
        }
        match node {
            Node::Directory => directories.push(inode),
            _ => files.push(inode),
        }
        if let Some(file) = files.get(random.next(files.len() + 3)) {
            let parent = directories[random.next(directories.len())];
            let name = format!("l{}", random.next(9));
            drop(builder.insert(parent, name.as_bytes(), *file, Link::Equal));
        }
    }
    (builder.finish(), objects)
}

#[test]
fn random_trees() {
    let mut random = Random(0x4552_4f46_5331);
    let dir = folder();
    let image = dir.path().join("i.img");
    for case in 0..150 {
        let (tree, objects) = random_tree(&mut random);
        for flavor in FLAVORS {
            let bytes = check(&format!("case {case}"), &tree, flavor, &objects);
            if case % 30 == 0 {
                fs::write(&image, &bytes).unwrap();
                check_with_fsck(&image);
            }
        }
    }
}

/// Makes a tree that reaches every limit.
pub fn largest() -> (Tree, Objects) {
    let mut objects = Objects::new();
    let mut builder = Builder::new();
    let directory = |builder: &mut Builder, name: &str| {
        let inode = builder.inode(&METADATA, XattrsId::NONE, Node::Directory).unwrap();
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
        inode
    };
    let many = directory(&mut builder, "many");
    let empty = Node::Regular(Content::Inline(&[]));
    let one = builder.inode(&METADATA, XattrsId::NONE, empty).unwrap();
    // More links than the compact form can count.
    for number in 0..100_000 {
        builder.insert(many, format!("{number}").as_bytes(), one, Link::Equal).unwrap();
    }
    let long = directory(&mut builder, "long");
    for number in 0..1000 {
        let name = format!("{number:0255}");
        let inode = builder.inode(&METADATA, XattrsId::NONE, empty).unwrap();
        builder.insert(long, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    for length in 1..=4095_usize {
        if length > 200 && length < 3900 && length % 97 != 0 {
            continue;
        }
        let target = vec![b'x'; length];
        let inode = builder.inode(&METADATA, XattrsId::NONE, Node::Symlink(&target)).unwrap();
        let name = format!("link-{length}");
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    for length in [0, 1, 2048, 2049, 4063, 4064, 4095, 4096, 4097, 6143, 6144, 6145, 8192] {
        let node = match length {
            0 => empty,
            _ => Node::Regular(external(&mut objects, vec![b'f'; length])),
        };
        let inode = builder.inode(&METADATA, XattrsId::NONE, node).unwrap();
        let name = format!("file-{length}");
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    let value = vec![b'v'; 65_535];
    for count in 1..=3_usize {
        let names: Vec<_> = (0..count).map(|at| format!("user.{count}.{at}")).collect();
        let pairs = names.iter().map(|name| (name.as_bytes(), &value[..]));
        let xattrs = builder.xattrs(pairs).unwrap();
        let node = Node::Regular(external(&mut objects, vec![b'x'; 100 + count]));
        let inode = builder.inode(&METADATA, xattrs, node).unwrap();
        let name = format!("xattrs-{count}");
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    (builder.finish(), objects)
}

#[test]
fn limits() {
    let (tree, objects) = largest();
    let dir = folder();
    for flavor in FLAVORS {
        let bytes = check("limits", &tree, flavor, &objects);
        let image = dir.path().join("i.img");
        fs::write(&image, &bytes).unwrap();
        check_with_fsck(&image);
    }
}

/// The kernel and the reader show the same for trees that are not made from a disk.
#[test]
fn the_kernel_shows_what_we_read() {
    let Some(dir) = prepare("standalone::the_kernel_shows_what_we_read") else { return };
    let (image, mountpoint) = (dir.path().join("i.img"), dir.path().join("m"));
    fs::create_dir(&mountpoint).unwrap();
    let mut random = Random(0x4c69_6e75_7801);
    let trees = (0..20).map(|_| random_tree(&mut random));
    for (case, (tree, objects)) in trees.chain([largest()]).enumerate() {
        for flavor in FLAVORS {
            let (bytes, _) = make(&tree, flavor, &objects);
            fs::write(&image, &bytes).unwrap();
            let ours = read(&Image::open(&bytes[..]).unwrap(), &[]);
            let theirs = mounted(&image, None, &mountpoint);
            compare(&format!("case {case}, {flavor:?}"), &ours, &theirs);
        }
    }
}

/// Equal contents are stored once, and the image does not depend on the order of insertion.
#[test]
fn equal_contents_are_stored_once() {
    let image = |names: &[&str], sizes: &[usize]| {
        let mut objects = Objects::new();
        let mut builder = Builder::new();
        for (name, size) in names.iter().zip(sizes) {
            let node = Node::Regular(external(&mut objects, vec![b'c'; *size]));
            let inode = builder.inode(&METADATA, XattrsId::NONE, node).unwrap();
            builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Equal).unwrap();
        }
        check("equal", &builder.finish(), Flavor::Linux, &objects)
    };
    // One file takes 24 blocks, and 1696 bytes after the inode. Three such files share 25 blocks.
    assert_eq!(image(&["a"], &[100_000]).len(), 25 * 4096);
    assert_eq!(image(&["a", "b", "c"], &[100_000; 3]).len(), 26 * 4096);
    // Small contents that together fit in a block stay after their inodes.
    assert_eq!(image(&["a", "b"], &[1000; 2]).len(), 4096);
    let names: Vec<_> = (b'a'..=b'z').map(|byte| (byte as char).to_string()).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    assert_eq!(image(&names, &[1000; 26]).len(), 8192);
    let sizes: Vec<_> = (0..26).map(|at| at * 300 + 1).collect();
    let reversed: Vec<_> = sizes.iter().rev().copied().collect();
    let backwards: Vec<_> = names.iter().rev().copied().collect();
    assert!(image(&names, &sizes) == image(&backwards, &reversed));
}

/// In a walk that reads a directory, then its inodes, and then enters its subdirectories, the positions of inodes
/// ascend, except for the few inodes that fill a gap in the last blocks.
#[test]
fn inodes_are_in_the_order_of_a_listing() {
    let mut objects = Objects::new();
    let mut builder = Builder::new();
    let mut random = Random(7);
    for number in 0..3000_usize {
        let path = format!("{}/{}/{number}", number % 7, number % 13);
        let node = Node::Regular(external(&mut objects, vec![b'x'; 1 + random.next(3000)]));
        let inode = builder.inode(&METADATA, XattrsId::NONE, node).unwrap();
        let mut parent = InodeId::ROOT;
        let mut parts: Vec<_> = path.split('/').collect();
        let name = parts.pop().unwrap();
        for part in parts {
            parent = builder.subdirectory(parent, part.as_bytes()).unwrap();
        }
        builder.insert(parent, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    let tree = builder.finish();
    let (bytes, _) = make(&tree, Flavor::Linux, &objects);
    let image = Image::open(&bytes[..]).unwrap();
    let found = to_tree(&image, View::Plain).unwrap();
    let mut pending = vec![found.tree.root()];
    let (mut last, mut order) = (0, Vec::new());
    while let Some(directory) = pending.pop() {
        let first = pending.len();
        for entry in directory.children() {
            order.push(found.nids[entry.inode.id().index()].0 * 32 / 4096);
            if entry.inode.is_directory() {
                pending.push(entry.inode);
            }
        }
        pending[first..].reverse();
    }
    for block in order {
        assert!(block + 40 > last, "block {block} after block {last}");
        last = last.max(block);
    }
    assert!(last > 300, "{last} blocks");
}

/// Damaged images cause errors, never a panic.
#[test]
fn damaged() {
    let (tree, objects) = random_tree(&mut Random(99));
    let (bytes, _) = make(&tree, Flavor::Linux, &objects);
    hostile::damage(&bytes, 250, 5);
    let sum = |bytes: &[u8]| Sha256::digest(bytes);
    assert_eq!(sum(&bytes), sum(&make(&tree, Flavor::Linux, &objects).0));
}
