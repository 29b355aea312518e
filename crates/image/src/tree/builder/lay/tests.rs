//! Tests of the rules T32 to T35 of `docs/format/tree.md`.

use proptest::prelude::*;

use super::*;
use crate::layer::Layer;
use crate::tree::{Content, Metadata, Node, Timestamp};

const NODES: [Node<'_>; 5] = [
    Node::Regular(Content::Inline(b"bytes")),
    Node::Symlink(b"a"),
    Node::CharDevice(0),
    Node::Fifo,
    Node::Directory,
];

fn metadata(source: u16) -> Metadata {
    let mtime = Timestamp { seconds: source.into(), nanoseconds: source.into() };
    Metadata { permissions: source, uid: source.into(), gid: source.into(), mtime }
}

/// Makes a tree from words `KINDSOURCE:PATH`: a letter for the type, and a number for the source of the metadata, as
/// in `d1:a f1:a/b`. `=a/b:a/c` is a hard link `a/c` to `a/b`, and `d2:` the root.
fn tree(words: &str) -> Tree {
    let mut builder = Builder::new();
    for word in words.split_whitespace() {
        let (what, path) = word.split_once(':').unwrap();
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let above = builder.resolve(above.as_bytes()).unwrap();
        if let Some(target) = what.strip_prefix('=') {
            let target = builder.resolve(target.as_bytes()).unwrap();
            builder.insert(above, name.as_bytes(), target, Link::Equal).unwrap();
            continue;
        }
        let (kind, source) = what.split_at(1);
        let metadata = metadata(source.parse().unwrap());
        let pairs = [(&b"user.source"[..], source.as_bytes())];
        let xattrs = builder.xattrs(pairs).unwrap();
        if path.is_empty() {
            builder.describe(InodeId::ROOT, &metadata, xattrs).unwrap();
            continue;
        }
        let node = NODES["flcpd".find(kind).unwrap()];
        let inode = builder.inode(&metadata, xattrs, node).unwrap();
        builder.insert(above, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    builder.finish()
}

/// Writes a tree as the words of [`tree`], with links: `+` before a further name, `N*` before an inode with N names.
fn words(tree: &Tree) -> String {
    let mut words = vec![word(b"", &tree.root())];
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let mut word = word(&path[1..], &entry.inode);
        if !entry.is_owner {
            word = format!("+{word}");
        }
        if !entry.inode.is_directory() && entry.inode.nlink() != 1 {
            word = format!("{}*{word}", entry.inode.nlink());
        }
        words.push(word);
    }
    words.join(" ")
}

fn word(path: &[u8], inode: &Inode<'_>) -> String {
    let kind = NODES.iter().position(|it| *it == inode.node()).unwrap();
    let found = inode.metadata();
    let source = u16::try_from(found.uid).unwrap();
    // In layers, every symlink gets the same mode.
    let is_symlink = matches!(inode.node(), Node::Symlink(_));
    let permissions = if is_symlink { found.permissions } else { metadata(source).permissions };
    assert_eq!(found, Metadata { permissions, ..metadata(source) }, "all of one source");
    let xattrs: Vec<_> = inode.xattrs().collect();
    let expected = [(&b"user.source"[..], source.to_string())];
    if source != 0 {
        assert_eq!(xattrs, expected.each_ref().map(|(name, value)| (*name, value.as_bytes())));
    }
    format!("{}{source}:{}", &"flcpd"[kind..=kind], path.escape_ascii())
}

#[track_caller]
fn check(trees: &[&str], expect: &str) {
    let mut builder = Builder::new();
    for words in trees {
        builder.lay(&tree(words)).unwrap();
    }
    assert_eq!(words(&builder.finish()), expect, "{trees:?}");
}

#[test]
fn a_later_tree_decides_paths_and_directories_merge() {
    check(&["d1: f1:a d1:d f1:d/x", "d2: f2:a d2:d f2:d/y"], "d2: f2:a d2:d f1:d/x f2:d/y");
    check(&["d1: f1:a", "d2: f2:b", "d3: l3:a"], "d3: l3:a f2:b");
    check(&["d1: f1:b f1:a", "d2:"], "d2: f1:a f1:b");
    check(&["d1: d1:d f1:d/x", "d2: f2:d"], "d2: f2:d");
    check(&["d1: f1:d", "d2: d2:d f2:d/x"], "d2: d2:d f2:d/x");
    // The second tree has replaced the directory before the third tree is applied.
    check(&["d1: d1:d f1:d/x", "d2: f2:d", "d3: d3:d"], "d3: d3:d");
    // Symlinks are not followed, and character devices are not whiteouts.
    check(&["d1: d1:a l1:l", "d2: d2:l f2:l/x"], "d2: d1:a d2:l f2:l/x");
    check(&["d1: f1:x d1:d f1:d/x", "d2: c2:x c2:d"], "d2: c2:d c2:x");
}

#[test]
fn hard_links_stay_within_their_tree() {
    check(&["d1: f1:a =a:b", "d2: f2:a =a:c"], "d2: 2*f2:a f1:b 2*+f2:c");
    check(&["d1: f1:a =a:b =a:c", "d2: f2:a"], "d2: f2:a 2*f1:b 2*+f1:c");
    check(&["d1: d1:d f1:d/a =d/a:e", "d2: f2:d"], "d2: f2:d f1:e");
    // The same tree twice makes two inodes, and the names of the second tree replace both names of the first.
    check(&["d1: f1:a =a:b", "d1: f1:a =a:b"], "d1: 2*f1:a 2*+f1:b");
}

#[track_caller]
fn check_some(all: &str, choose: impl Fn(&str) -> Choice, expect: &str) {
    let mut builder = Builder::new();
    let laid = builder.lay_some(&tree(all), |path, entry| {
        assert!(path.ends_with(entry.name));
        choose(std::str::from_utf8(path).unwrap())
    });
    laid.unwrap();
    assert_eq!(words(&builder.finish()), expect);
}

#[test]
fn what_is_kept_brings_the_directories_above() {
    const ALL: &str = "d1: d1:a d1:a/b f1:a/b/x f1:a/b/y d1:c f1:c/x";
    let only = |wanted: &'static str| {
        move |path: &str| if path == wanted { Choice::Keep } else { Choice::Above }
    };
    check_some(ALL, only("/a/b/y"), "d1: d1:a d1:a/b f1:a/b/y");
    check_some(ALL, only("/a"), "d1: d1:a d1:a/b f1:a/b/x f1:a/b/y");
    check_some(ALL, only("/nowhere"), "d1:");
    let but = |path: &str| if path == "/a/b" { Choice::Leave } else { Choice::Keep };
    check_some(ALL, but, "d1: d1:a d1:c f1:c/x");
    let but_below = |path: &str| match path {
        "/a" => Choice::Keep,
        "/a/b/x" => Choice::Leave,
        _ => Choice::Above,
    };
    check_some(ALL, but_below, "d1: d1:a d1:a/b f1:a/b/y");
}

#[test]
fn links_are_counted_anew_and_files_belong_to_names_that_are_there() {
    let but = |left: &'static str| {
        move |path: &str| if path == left { Choice::Leave } else { Choice::Keep }
    };
    const ALL: &str = "d1: d1:d f1:a =a:b =a:d/c";
    check_some(ALL, but("/nothing"), "d1: 3*f1:a 3*+f1:b d1:d 3*+f1:d/c");
    check_some(ALL, but("/a"), "d1: 2*f1:b d1:d 2*+f1:d/c");
    check_some(ALL, but("/d"), "d1: 2*f1:a 2*+f1:b");
    // A dump states a number of links, which is wrong after a tree was applied.
    let mut builder = Builder::new();
    let file = builder.inode(&metadata(0), XattrsId::NONE, Node::Fifo).unwrap();
    builder.state_nlink(file, 7);
    builder.insert(InodeId::ROOT, b"b", file, Link::Owner).unwrap();
    builder.insert(InodeId::ROOT, b"a", file, Link::Equal).unwrap();
    let mut laid = Builder::new();
    laid.lay(&builder.finish()).unwrap();
    let laid = laid.finish();
    assert_eq!(laid.resolve(b"a").map(|it| (it.nlink(), it.path())), Some((2, b"/a".to_vec())));
}

/// Generates valid words for [`tree`].
fn random(source: u16) -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    let path = prop::collection::vec(name, 1..4).prop_map(|it| it.join("/"));
    let link = path.clone();
    let entry = (path, prop::sample::select(vec!["f", "l", "c", "p", "d", "="]), link);
    prop::collection::vec(entry, 0..12).prop_map(move |entries| {
        let mut kinds = std::collections::BTreeMap::from([(String::new(), "d")]);
        let mut words = vec![format!("d{source}:")];
        for (path, kind, link) in entries {
            let above = path.rsplit_once('/').map_or("", |it| it.0);
            let fits = kinds.get(above) == Some(&"d") && !kinds.contains_key(&path);
            if !fits || kind == "=" && kinds.get(&link).is_none_or(|it| *it == "d") {
                continue;
            }
            words.push(match kind {
                "=" => format!("={link}:{path}"),
                kind => format!("{kind}{source}:{path}"),
            });
            kinds.insert(path, kind);
        }
        words.join(" ")
    })
}

/// Makes a layer with all entries of the tree.
fn layer(tree: &Tree) -> Layer {
    let mut layer = Layer::new();
    let mut add = |path: &[u8], inode: &Inode<'_>| {
        let xattrs = layer.xattrs(inode.xattrs()).unwrap();
        layer.entry(path, &inode.metadata(), xattrs, inode.node()).unwrap();
    };
    add(b"/", &tree.root());
    let mut walk = tree.walk();
    let mut links = Vec::new();
    while let Some((path, entry)) = walk.next() {
        match entry.is_owner {
            true => add(path, &entry.inode),
            false => links.push((path.to_vec(), entry.inode.path())),
        }
    }
    for (path, target) in links {
        layer.link(&path, &target).unwrap();
    }
    layer
}

proptest! {
    /// Compares with another implementation: layers without whiteouts in which every directory is described.
    #[test]
    fn trees_are_laid_as_layers_are(one in random(1), two in random(2), three in random(3)) {
        let mut builder = Builder::new();
        let mut below = None;
        for words in [&one, &two, &three] {
            let tree = tree(words);
            builder.lay(&tree).unwrap();
            below = Some(layer(&tree).onto(below).unwrap());
        }
        prop_assert_eq!(words(&builder.finish()), words(&below.unwrap().finish()));
    }
}
