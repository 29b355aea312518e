//! Property tests with random trees and lines.

use proptest::prelude::*;

use super::*;
use crate::verity::ObjectId;

/// Generates a tree that a dump can represent, from a list of random choices.
fn any_tree() -> impl Strategy<Value = Tree> {
    let name =
        prop_oneof!["[a-c]{1,2}", "\\PC{1,9}", "[ =\\\\\n\t\r-]{1,4}", Just("0".repeat(255))];
    let metadata = (0..=0o7777u16, any::<u32>(), any::<u32>(), any::<i64>(), any::<u32>());
    let bytes = prop::collection::vec(any::<u8>(), 0..40);
    let xattrs = prop::collection::vec(("[a-z.=\\\\ ]{1,9}", bytes.clone()), 0..4);
    let inode = (metadata, xattrs, 0..12u8, bytes, any::<u64>());
    let entry = (name, inode, any::<prop::sample::Index>(), 0..8u8);
    prop::collection::vec(entry, 0..30).prop_map(|entries| {
        let mut builder = Builder::new();
        let mut directories = vec![InodeId::ROOT];
        let mut files = Vec::new();
        let root = Metadata { permissions: 0o555, ..Metadata::IMPLICIT };
        let none = builder.xattrs([]).unwrap();
        builder.describe(InodeId::ROOT, &root, none).unwrap();
        for (name, (metadata, xattrs, kind, bytes, number), at, link) in entries {
            let name = name.replace(['/', '\0'], "_");
            let parent = directories[at.index(directories.len())];
            if link == 0 && !files.is_empty() {
                let file = files[at.index(files.len())];
                builder.insert(parent, name.as_bytes(), file, Link::Equal).ok();
                continue;
            }
            let (permissions, uid, gid, seconds, nanoseconds) = metadata;
            let mtime = Timestamp { seconds, nanoseconds };
            let metadata = Metadata { permissions, uid, gid, mtime };
            let pairs = xattrs.iter().map(|(name, value)| (name.as_bytes(), &value[..]));
            let xattrs = builder.xattrs(pairs).unwrap();
            let size = number >> 1 | 1;
            let mut text = bytes.clone();
            text.retain(|byte| *byte != 0);
            text.push(b'-');
            let some = Some(digest(Algorithm::Sha256, &bytes).into());
            let external = |object: Option<ObjectId>, location| {
                Node::Regular(Content::External { size, object, location })
            };
            let node = match kind {
                0..=2 => Node::Directory,
                3 => Node::Regular(Content::Inline(&bytes)),
                4 => external(some, Location::Object),
                5 => external(some, Location::Path(&text)),
                6 => external(None, Location::None),
                7 => external(Some(digest(Algorithm::Sha512, &bytes).into()), Location::None),
                8 => Node::Symlink(&text),
                9 => Node::CharDevice(number >> 32),
                10 => Node::BlockDevice(number >> 32),
                _ => Node::Fifo,
            };
            let inode = builder.inode(&metadata, xattrs, node).unwrap();
            builder.state_nlink(inode, gid);
            if builder.insert(parent, name.as_bytes(), inode, Link::Owner).is_ok() {
                match node {
                    Node::Directory => directories.push(inode),
                    _ => files.push(inode),
                }
            }
        }
        builder.finish()
    })
}

/// Lists all facts of a tree, in the order of a walk, so that trees can be compared.
fn facts(tree: &Tree) -> Vec<String> {
    let mut facts = Vec::new();
    let mut say = |path: &[u8], inode: crate::tree::Inode<'_>| {
        let xattrs: Vec<_> = inode.xattrs().collect();
        facts.push(format!(
            "{path:?} {:?} {} {:?} {:?} {xattrs:?}",
            inode.metadata(),
            inode.nlink(),
            inode.node(),
            inode.path(),
        ));
    };
    say(b"/", tree.root());
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        say(path, entry.inode);
    }
    facts
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read_back(tree in any_tree()) {
        let dump = text(&tree, Links::ToOwner);
        let read = parse(dump.as_bytes(), Strictness::Strict).unwrap();
        prop_assert_eq!(facts(&read), facts(&tree));
        prop_assert_eq!(text(&read, Links::ToOwner), dump);
    }

    #[test]
    fn garbage_is_refused_and_never_a_panic(lines in prop::collection::vec("[ -~]{0,60}", 0..4), bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut dump = ROOT.as_bytes().to_vec();
        for line in lines {
            dump.extend(line.bytes());
            dump.push(b'\n');
        }
        dump.extend(bytes);
        parse(&dump[..], Strictness::Lenient).ok();
        parse(&dump[..], Strictness::Strict).ok();
    }
}
