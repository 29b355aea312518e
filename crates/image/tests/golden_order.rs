//! Tests that an image does not depend on the order in which a source lists files.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which clippy does not see as tests")]

// The name that other crates use for this crate.
extern crate quire_image as image;

use image::erofs::{Profile, Versions, write};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp};
use image::verity::ObjectId;
use proptest::prelude::{Just, Strategy, any, prop, prop_assert_eq, proptest};
use proptest::test_runner::Config;

#[derive(Debug, Clone)]
enum Kind {
    Directory,
    Symlink(usize),
    Inline(usize),
    External { size: u64, object: Option<u8>, path: Option<u8> },
    Device(u64),
    Fifo,
}

/// An inode with its names. Each name has the number of its directory: 0 is the root, and larger numbers are earlier
/// directories.
#[derive(Debug, Clone)]
struct Spec {
    names: Vec<(usize, Vec<u8>)>,
    kind: Kind,
    permissions: u16,
    uid: u32,
    seconds: i64,
    xattrs: Vec<(usize, u8)>,
}

const XATTRS: [&[u8]; 6] = [
    b"user.a",
    b"user.b",
    b"security.selinux",
    b"trusted.overlay.opaque",
    b"system.posix_acl_access",
    b"user.overlay.whiteouts",
];

fn kind() -> impl Strategy<Value = Kind> {
    proptest::prop_oneof![
        4 => Just(Kind::Directory),
        2 => (1_usize..4096).prop_map(Kind::Symlink),
        2 => (0_usize..5001).prop_map(Kind::Inline),
        4 => (1_u64..1 << 53, any::<Option<bool>>(), any::<Option<bool>>()).prop_map(
            |(size, object, path)| Kind::External {
                size,
                object: object.map(u8::from),
                path: path.map(u8::from),
            }
        ),
        1 => (0_u64..3).prop_map(Kind::Device),
        1 => Just(Kind::Fifo),
    ]
}

fn spec() -> impl Strategy<Value = Spec> {
    let name = prop::collection::vec(proptest::sample::select(b"ab0-.".as_slice()), 1..4);
    (
        prop::collection::vec((any::<usize>(), name), 1..4),
        kind(),
        0_u16..0o10000,
        proptest::sample::select([0, 1000, 70_000].as_slice()),
        -1_i64..2,
        prop::collection::vec((0..XATTRS.len(), 0_u8..2), 0..4),
    )
        .prop_map(|(names, kind, permissions, uid, seconds, xattrs)| Spec {
            names,
            kind,
            permissions,
            uid,
            seconds,
            xattrs,
        })
}

/// Keeps one name of each directory, and the first of equal names in a directory.
fn sound(mut specs: Vec<Spec>) -> Vec<Spec> {
    let mut taken = std::collections::BTreeSet::new();
    let mut directories = 1;
    for spec in &mut specs {
        for (directory, _) in &mut spec.names {
            *directory %= directories;
        }
        if matches!(spec.kind, Kind::Directory) {
            spec.names.truncate(1);
        }
        spec.names.retain(|name| name.1 != b"." && name.1 != b".." && taken.insert(name.clone()));
        if matches!(spec.kind, Kind::Directory) && !spec.names.is_empty() {
            directories += 1;
        }
        let mut seen = [false; XATTRS.len()];
        spec.xattrs.retain(|(name, _)| !std::mem::replace(&mut seen[*name], true));
    }
    specs.retain(|spec| !spec.names.is_empty());
    specs
}

fn image(specs: &[Spec], inode_order: &[usize], name_order: &[usize], reverse: bool) -> Vec<u8> {
    let mut builder = Builder::new();
    let mut inodes = vec![InodeId::ROOT; specs.len()];
    for at in inode_order {
        let spec = &specs[*at];
        let values: [&[u8]; 2] = [b"", b"value"];
        let mut pairs: Vec<_> = spec
            .xattrs
            .iter()
            .map(|(name, value)| (XATTRS[*name], values[usize::from(*value)]))
            .collect();
        // A directory with whiteouts and a long value of this xattr would be refused.
        pairs.retain(|(name, _)| *name != XATTRS[5] || matches!(spec.kind, Kind::Directory));
        if reverse {
            pairs.reverse();
        }
        let xattrs = builder.xattrs(pairs).unwrap();
        let mtime = Timestamp { seconds: spec.seconds, nanoseconds: 0 };
        let metadata = Metadata { permissions: spec.permissions, uid: spec.uid, gid: 0, mtime };
        let bytes = vec![b'x'; 5000];
        let object = |number: u8| ObjectId::from_bytes(&[number; 32]).unwrap();
        let path = match spec.kind {
            Kind::External { path: Some(number), .. } => object(number).path().into_bytes(),
            _ => Vec::new(),
        };
        let node = match spec.kind {
            Kind::Directory => Node::Directory,
            Kind::Symlink(length) => Node::Symlink(&bytes[..length]),
            Kind::Inline(length) => Node::Regular(Content::Inline(&bytes[..length])),
            Kind::External { size, object: of, path: at } => {
                let location = at.map_or(Location::None, |_| Location::Path(&path));
                Node::Regular(Content::External { size, object: of.map(object), location })
            }
            Kind::Device(number) => Node::CharDevice(number),
            Kind::Fifo => Node::Fifo,
        };
        inodes[*at] = builder.inode(&metadata, xattrs, node).unwrap();
    }
    let mut directories = vec![InodeId::ROOT];
    for (spec, inode) in specs.iter().zip(&inodes) {
        if matches!(spec.kind, Kind::Directory) {
            directories.push(*inode);
        }
    }
    for at in name_order {
        for (directory, name) in &specs[*at].names {
            builder.insert(directories[*directory], name, inodes[*at], Link::Equal).unwrap();
        }
    }
    let mut out = Vec::new();
    write(&builder.finish(), &Profile::Composefs(Versions::default()), &mut out).unwrap();
    out
}

fn orders() -> impl Strategy<Value = (Vec<Spec>, Vec<usize>, Vec<usize>)> {
    prop::collection::vec(spec(), 0..60).prop_map(sound).prop_flat_map(|specs| {
        let order = || Just((0..specs.len()).collect::<Vec<_>>()).prop_shuffle();
        (Just(specs.clone()), order(), order())
    })
}

proptest! {
    #![proptest_config(Config { cases: 256, failure_persistence: None, ..Config::default() })]

    #[test]
    fn the_image_does_not_depend_on_the_order_of_the_source((specs, inodes, names) in orders()) {
        let sorted: Vec<_> = (0..specs.len()).collect();
        let expect = image(&specs, &sorted, &sorted, false);
        prop_assert_eq!(image(&specs, &inodes, &names, true), expect);
    }
}
