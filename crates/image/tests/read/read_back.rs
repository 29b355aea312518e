//! Tests that a written image is read back as the same tree, and that this tree makes the same image.

use std::fs;
use std::io::BufReader;
use std::path::Path;

use quire_image::dump::{Strictness, parse};
use quire_image::erofs::read::{Image, Nid, Owners, View, examine, to_tree};
use quire_image::erofs::{Profile, Version, Versions, write};
use quire_image::tree::{
    Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp, Tree, XattrsId,
};
use quire_image::verity::{Algorithm, digest};

use crate::composefs::dump;
use crate::hostile::Random;

fn image(tree: &Tree, min: Version, max: Version) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(tree, &Profile::Composefs(Versions { min, max }), &mut bytes).unwrap();
    bytes
}

/// Writes `tree`, reads it back and writes the result, and compares the bytes, for each version.
fn check(what: &str, tree: &Tree) {
    for (min, max) in
        [(Version::V0, Version::V0), (Version::V0, Version::V1), (Version::V1, Version::V1)]
    {
        let bytes = image(tree, min, max);
        let opened = Image::open(&bytes[..]).unwrap();
        let read = to_tree(&opened, View::Composefs(Owners::AsWritten)).unwrap();
        let again = image(&read.tree, min, max);
        assert!(again == bytes, "{what} {min:?} {max:?}: another image");
        examine(&bytes, 1 << 20).unwrap_or_else(|error| panic!("{what}: {error}"));
        // Except for the owners of hard links, the trees are equal.
        let first = to_tree(&opened, View::Composefs(Owners::FirstMet)).unwrap();
        assert_eq!(first.tree.inode_count(), tree.inode_count(), "{what}");
        assert_eq!(dump(&first).len(), dump(&read).len(), "{what}");
    }
}

/// Checks which xattrs are inline and which are shared, without using the reader's functions.
#[test]
fn overlay_xattrs_of_several_files_are_shared() {
    // Two files with the same object, and one with another.
    let mut builder = Builder::new();
    let objects = [b"a", b"a", b"b"].map(|text| digest(Algorithm::Sha256, text));
    let mtime = Timestamp { seconds: 1, nanoseconds: 0 };
    let metadata = Metadata { permissions: 0o644, uid: 0, gid: 0, mtime };
    for (name, object) in ["1", "2", "3"].iter().zip(objects) {
        let content =
            Content::External { size: 1, object: Some(object.into()), location: Location::Object };
        let inode = builder.inode(&metadata, XattrsId::NONE, Node::Regular(content)).unwrap();
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Owner).unwrap();
    }
    let tree = builder.finish();
    let mut bytes = Vec::new();
    write(&tree, &Profile::Composefs(Versions::default()), &mut bytes).unwrap();
    // Each name, which is stored without `trusted.`, occurs once for two of the files together, and once for the third
    // file.
    for name in [&b"overlay.redirect"[..], b"overlay.metacopy"] {
        let count = bytes.windows(name.len()).filter(|it| *it == name).count();
        assert_eq!(count, 2);
    }
    let opened = Image::open(&bytes[..]).unwrap();
    let root = opened.root().unwrap();
    let shared = [b"1", b"2", b"3"].map(|name| {
        let Nid(nid) = opened.lookup(&root, name).unwrap().unwrap();
        let at = usize::try_from(nid).unwrap() * 32;
        let header = at + if bytes[at] & 1 == 0 { 32 } else { 64 };
        // `h_shared_count`
        bytes[header + 4]
    });
    assert_eq!(shared, [2, 2, 0]);
}

#[test]
fn golden_trees() {
    let trees = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/trees");
    let mut count = 0;
    for entry in fs::read_dir(trees).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|of| of == "dump") {
            let file = BufReader::new(fs::File::open(&path).unwrap());
            let tree = parse(file, Strictness::Lenient).unwrap();
            check(path.to_str().unwrap(), &tree);
            count += 1;
        }
    }
    assert!(count >= 15, "{count} trees");
}

/// Makes a random tree with many hard links, and with names whose order differs from that of paths.
fn random_tree(random: &mut Random) -> Tree {
    let mut builder = Builder::new();
    let mut directories = vec![InodeId::ROOT];
    let mut files = Vec::new();
    for number in 0..random.next(120) {
        let parent = directories[random.next(directories.len())];
        let alphabet = b"ab-./~!0f\xff";
        let mut name: Vec<u8> =
            (0..=random.next(3)).map(|_| alphabet[random.next(alphabet.len())]).collect();
        name.retain(|byte| *byte != b'/');
        let metadata = Metadata {
            permissions: random.next(0o10_000) as u16,
            uid: random.next(3) as u32 * 40_000,
            gid: random.next(3) as u32 * 40_000,
            mtime: Timestamp { seconds: random.next(3) as i64 - 1, nanoseconds: 5 },
        };
        let xattrs = match random.next(4) {
            0 => XattrsId::NONE,
            kind => {
                let value = [b'v'; 3];
                let own = number.to_string();
                let pairs: [(&[u8], &[u8]); 3] = [
                    (b"user.shared", &value[..kind]),
                    (b"trusted.overlay.x", b"escaped"),
                    (b"security.own", own.as_bytes()),
                ];
                builder.xattrs(pairs.into_iter().take(kind)).unwrap()
            }
        };
        let target = vec![b't'; 1 + random.next(4095)];
        let object = digest(Algorithm::Sha256, number.to_string().as_bytes());
        let node = match random.next(12) {
            0..=2 => Node::Directory,
            3 => Node::Symlink(&target),
            4 => Node::CharDevice(random.next(2) as u64 * 259),
            5 => Node::BlockDevice(0x0010_082c),
            6 => Node::Fifo,
            7 => Node::Socket,
            8 => Node::Regular(Content::Inline(&target[..random.next(target.len())])),
            9 => Node::Regular(Content::External {
                size: 1 + random.next(1 << 40) as u64,
                object: Some(object.into()),
                location: Location::Object,
            }),
            10 => Node::Regular(Content::External {
                size: 7,
                object: None,
                location: Location::Path(b"a/place"),
            }),
            _ => Node::Regular(Content::External {
                size: 1 << 45,
                object: Some(object.into()),
                location: Location::None,
            }),
        };
        let inode = builder.inode(&metadata, xattrs, node).unwrap();
        // The name may be invalid or already exist.
        if builder.insert(parent, &name, inode, Link::Equal).is_err() {
            continue;
        }
        match node {
            Node::Directory => directories.push(inode),
            // composefs does not read a whiteout with several names.
            Node::CharDevice(0) => {}
            _ => files.push(inode),
        }
        for _ in 0..random.next(3) {
            let parent = directories[random.next(directories.len())];
            let link = [Link::Equal, Link::Owner][random.next(2)];
            if let Some(file) = files.get(random.next(files.len() + 3)) {
                let name = format!("l{}", random.next(9));
                drop(builder.insert(parent, name.as_bytes(), *file, link));
            }
        }
    }
    builder.finish()
}

#[test]
fn random_trees() {
    if !testing::long_tests() {
        return;
    }
    let mut random = Random(0x5155_4952_4521);
    for case in 0..400 {
        check(&format!("case {case}"), &random_tree(&mut random));
    }
}
