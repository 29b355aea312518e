use std::cell::Cell;

use super::model::{self, Op};
use super::{Layer, LayerError, follow};
use crate::tree::{Builder, Content, InodeId, Metadata, Node, Timestamp, Tree, XattrsId};

use proptest::prelude::{Strategy, prop, prop_oneof};

fn metadata(uid: u32) -> Metadata {
    Metadata { permissions: 0o750, uid, gid: 0, mtime: Timestamp { seconds: 7, nanoseconds: 9 } }
}

/// Makes a layer from words: `d PATH`, `f PATH`, `l PATH TARGET` (hard link), `s PATH TARGET` (symlink). The number
/// of the layer is the owner of each entry and the content of each file.
fn gather(layer: u32, text: &str) -> Result<Layer, LayerError> {
    let mut gathered = Layer::new();
    for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let words: Vec<&[u8]> = entry.split(' ').map(str::as_bytes).collect();
        let content = [b'0' + u8::try_from(layer).unwrap()];
        let node = match words[0] {
            b"d" => Node::Directory,
            b"f" => Node::Regular(Content::Inline(&content)),
            b"s" => Node::Symlink(words[2]),
            b"l" => {
                gathered.link(words[1], words[2])?;
                continue;
            }
            other => panic!("{other:?}"),
        };
        gathered.entry(words[1], &metadata(layer), XattrsId::NONE, node)?;
    }
    Ok(gathered)
}

fn lay(layers: &[&str]) -> Result<Tree, LayerError> {
    let mut tree = None;
    for (number, text) in (1..).zip(layers) {
        tree = Some(gather(number, text)?.onto(tree)?);
    }
    Ok(tree.unwrap_or_default().finish())
}

/// Lists every path with its owner, which is the layer that describes it: `path:layer`, `path/:layer`,
/// `path=content:layer` for names that share an inode, `path->target:layer`.
fn show(tree: &Tree) -> String {
    let mut all = Vec::new();
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let path = String::from_utf8(path[1..].to_vec()).unwrap();
        let uid = entry.inode.metadata().uid;
        all.push(match entry.inode.node() {
            Node::Directory => format!("{path}/:{uid}"),
            Node::Symlink(target) => format!("{path}->{}:{uid}", target.escape_ascii()),
            _ if entry.inode.nlink() > 1 && !entry.is_owner => {
                format!("{path}={}", entry.inode.path()[1..].escape_ascii())
            }
            _ => format!("{path}:{uid}"),
        });
    }
    all.join(" ")
}

fn check(layers: &[&str], expect: &str) {
    let got = match lay(layers) {
        Ok(tree) => show(&tree),
        Err(error) => error.to_string(),
    };
    assert_eq!(got, expect, "{layers:?}");
}

#[test]
fn rule_names() {
    check(&["f ./a, f /b, f //c, f ././d/./e"], "a:1 b:1 c:1 d/:0 d/e:1");
    check(&["f ../a"], "the path \"../a\" leads out of the layer");
    check(&["f a/../b"], "the path \"a/../b\" leads out of the layer");
    check(&["f a, l b ../a"], "the path \"../a\" leads out of the layer");
    check(&["f ."], "the root is not a directory");
    check(&["l / a"], "the root is not a directory");
    check(&[&format!("f {}", "n".repeat(256))], &format!("cannot add \"{}\"", "n".repeat(256)));
    check(&["f a\0b"], "cannot add \"a\\x00b\"");
}

#[test]
fn rule_implicit_parents() {
    let tree = lay(&["f a/b/c"]).unwrap();
    assert_eq!(show(&tree), "a/:0 a/b/:0 a/b/c:1");
    for path in ["", "a", "a/b"] {
        assert_eq!(tree.resolve(path.as_bytes()).unwrap().metadata(), Metadata::IMPLICIT);
    }
    assert_eq!(lay(&["d ./"]).unwrap().root().metadata(), metadata(1));
    assert_eq!(lay(&["d ./", "f a", "d /"]).unwrap().root().metadata(), metadata(3));
    assert_eq!(lay(&["d ./", "f a"]).unwrap().root().metadata(), metadata(1));
    check(&["d a", "f a/b"], "a/:1 a/b:2");
    check(&["f a/b, d a"], "a/:1 a/b:1");
    check(&["f a, f a/b"], "a component of the path \"a/b\" is not a directory");
    // containerd's overlayfs snapshotter and umoci 0.5 (opencontainers/umoci#546) also show a directory.
    check(&["f a", "f a/b"], "a/:0 a/b:2");
    check(&["f a, l b a", "f a/c/d"], "a/:0 a/c/:0 a/c/d:2 b:1");
    check(&["d a, f a/b", "f a/b/c/d", "f a/b/c/e"], "a/:1 a/b/:0 a/b/c/:0 a/b/c/d:2 a/b/c/e:3");
    check(&["f a", "f a/b, f a/b"], "a/:0 a/b:2");
    check(&["f a", "f a/b, d a"], "a/:2 a/b:2");
}

#[test]
fn rule_duplicates_in_one_layer() {
    check(&["f a, s a x"], "a->x:1");
    check(&["d a, f a/b, d a"], "a/:1 a/b:1");
    check(&["d a, f a/b, f a"], "a:1");
    check(&["d a, f a/b, f a, d a"], "a/:1");
    check(&["f a, l b a, s a x"], "a->x:1 b:1");
    check(&["f d/x, f d, d d, f d/y"], "d/:1 d/y:1");
}

#[test]
fn rule_across_layers() {
    check(&["f a", "f a"], "a:2");
    check(&["d a, f a/b", "d a"], "a/:2 a/b:1");
    check(&["d a, f a/b", "f a"], "a:2");
    check(&["d a, f a/b", "s a b"], "a->b:2");
    check(&["f a", "d a, f a/b"], "a/:2 a/b:2");
    check(&["f a, l b a", "f a"], "a:2 b:1");
    check(&["d a, d a/b, f a/b/c", "f a/b/d", "d a/b"], "a/:1 a/b/:3 a/b/c:1 a/b/d:2");
    // The last entry of the layer is used. It is a directory, so the files below it stay visible.
    check(&["d a, f a/b", "f a, d a"], "a/:2 a/b:1");
}

#[test]
fn rule_whiteouts() {
    check(&["f a, f b", "f .wh.a"], "b:1");
    check(&["d a, f a/b, f a/c", "f a/.wh.b"], "a/:1 a/c:1");
    check(&["d a, f a/b, f c", "f .wh.a"], "c:1");
    // A whiteout applies at any position in the layer, but never to its own layer.
    check(&["f a", "f a, f .wh.a"], "a:2");
    check(&["f a", "f .wh.a, f a"], "a:2");
    check(&["d a, f a/b", "f a/c, f .wh.a"], "a/:0 a/c:2");
    check(&["f a, f .wh.a"], "a:1");
    // AUFS writes whiteouts as hard links, and some tools as other file types.
    check(&["f a, f b, f c", "l .wh.a .wh..wh.plnk/x, d .wh.b, s .wh.c x"], "");
    // Whiteouts create no directories, and may refer to names that do not exist.
    check(&["f a", "f b/c/.wh.d, f a/.wh.d, f .wh.e"], "a:1");
    // Directories cannot contain these names, so they hide no files.
    check(&["d a, f a/b", "f a/.wh., f a/.wh.., f a/.wh..."], "a/:1 a/b:1");
    check(&["f .wh.a/b"], "\".wh.a/b\" is below a whiteout");
}

#[test]
fn rule_opaque() {
    check(&["d a, f a/b, f c", "f a/.wh..wh..opq"], "a/:1 c:1");
    check(&["d a, f a/b, d a/d, f a/d/e", "d a, f a/c, f a/.wh..wh..opq"], "a/:2 a/c:2");
    check(&["d a, f a/b", "f a/.wh..wh..opq, f a/b/c"], "a/:1 a/b/:0 a/b/c:2");
    check(&["f a, f b", "f .wh..wh..opq, f c"], "c:2");
    check(&["f a", "f a/.wh..wh..opq, f b/.wh..wh..opq"], "a:1");
    check(&["d a, d a/b, f a/b/c", "f a/.wh..wh..opq, f a/b/.wh..wh..opq, d a/b"], "a/:1 a/b/:2");
}

#[test]
fn rule_other_aufs_names() {
    check(
        &["f a", "d .wh..wh.plnk, f .wh..wh.plnk/1.2, f .wh..wh.aufs, f d/.wh..wh.orph/x"],
        "a:1",
    );
    check(
        &["f a, l b .wh..wh.plnk/1"],
        "\"b\" is a hard link to \".wh..wh.plnk/1\", which does not exist",
    );
}

#[test]
fn rule_hardlinks() {
    check(&["f b, l a b"], "a:1 b=a");
    check(&["f d/b, l a ./d//b"], "a:1 d/:0 d/b=a");
    // The target is an earlier entry of the layer, although the lower layers also have the name, with another inode.
    check(&["f a", "f a, l b a"], "a:2 b=a");
    // The lower layers' target is preferred to a later entry.
    check(&["f a", "l b a"], "a:1 b=a");
    check(&["f a", "l b a, f a"], "a:2 b:1");
    check(&["l b a, f a"], "a:1 b=a");
    check(&["f x", "l b a, f a"], "a:2 b=a x:1");
    // A hard link may refer to a file that its layer hides.
    check(&["f a", "l b a, f .wh.a"], "b:1");
    check(&["f a", "f .wh.a, l b a"], "b:1");
    check(&["d d, f d/a", "f d/.wh..wh..opq, l b d/a"], "b:1 d/:1");
    // Links to links, and to the target of a link.
    check(&["l c b, l b a, f a"], "a:1 b=a c=a");
    check(&["l b a, l c b, f a"], "a:1 b=a c=a");
    check(&["f x, f y", "l a x, l c b, l b a"], "a:1 b=a c=a x=a y:1");
    // A link to its own name.
    check(&["f a, l a a"], "a:1");
    check(&["f a", "l a a"], "a:1");
    check(&["l a b, l b a"], "\"a\" is a hard link to \"b\", which does not exist");
    check(&["l a a"], "\"a\" is a hard link to \"a\", which does not exist");
    check(&["f x, l a nowhere"], "\"a\" is a hard link to \"nowhere\", which does not exist");
    check(&["f a/b, l c a/b/d"], "\"c\" is a hard link to \"a/b/d\", which does not exist");
    // A later entry has replaced the link, so its missing target does not matter.
    check(&["l a nowhere, f a"], "a:1");
    check(&["d d, l d/a nowhere, f d"], "d:1");
    for layers in [&["d d, l a d"][..], &["d d", "l a d"], &["l a d, d d"], &["d d/e", "l a d"]] {
        check(layers, "\"a\" is a hard link to \"d\", a directory");
    }
    check(&["l a ."], "\"a\" is a hard link to \".\", a directory");
}

/// A layer made against `/lib -> usr/lib` may have `lib/x` without `lib`. Runtimes that unpack layers follow the
/// symlink.
#[test]
fn rule_parents_that_are_symlinks() {
    let base = "d usr, d usr/lib, f usr/lib/a, s lib usr/lib";
    check(&[base, "f lib/b"], "lib->usr/lib:1 usr/:1 usr/lib/:1 usr/lib/a:1 usr/lib/b:2");
    check(&[base, "d lib, f lib/b"], "lib/:2 lib/b:2 usr/:1 usr/lib/:1 usr/lib/a:1");
    check(&[base, "f lib/.wh.a"], "lib->usr/lib:1 usr/:1 usr/lib/:1");
    check(&[base, "f lib/.wh..wh..opq"], "lib->usr/lib:1 usr/:1 usr/lib/:1");
    check(&[base, "d lib, f lib/.wh.a"], "lib/:2 usr/:1 usr/lib/:1 usr/lib/a:1");
    check(&[base, "l b lib/a"], "b:1 lib->usr/lib:1 usr/:1 usr/lib/:1 usr/lib/a=b");
    check(&["d x, s a /x, f a/b"], "a->/x:1 x/:1 x/b:1");
    check(&["d x/y, s x/a ../../../x/./y, f x/a/b"], "x/:0 x/a->../../../x/./y:1 x/y/:1 x/y/b:1");
    check(&["s a x, f a/b, d x, f a/c"], "a->x:1 x/:1 x/b:1 x/c:1");
    check(&["s a x, f a/b, d a, f a/c"], "a/:1 a/c:1 x/:0 x/b:1");
    check(&["s a b, s b a, f a/c"], "the path \"a/c\" has more than 40 symlinks");
    check(&["s a b, s b a", "f a/c"], "a/:0 a/c:2 b->a:1");
    // The symlink is replaced like a file: containerd's overlayfs snapshotter also shows a directory.
    check(&["s a gone", "f a/c"], "a/:0 a/c:2");
    check(&["s a f, f f", "f a/c"], "a/:0 a/c:2 f:1");
    check(&["s a gone/x/..", "f a/c"], "a/:0 a/c:2");
    // The same layer may add the symlink's target, before or after the path.
    check(&["s a gone", "f a/c, d gone"], "a->gone:1 gone/:2 gone/c:2");
    check(&["s a gone", "d gone, f a/c"], "a->gone:1 gone/:2 gone/c:2");
    check(
        &["s a gone", "f a/c/d, f gone/c/e"],
        "a->gone:1 gone/:0 gone/c/:0 gone/c/d:2 gone/c/e:2",
    );
    check(&["s a f, f f, f a/c"], "a component of the path \"a/c\" is not a directory");
}

/// Some tools write layers by path and make such entries. umoci 0.4.7 unpacks them in the same way.
#[test]
fn rule_parents_that_are_symlinks_to_the_root() {
    check(&["s x /", "f x/etc/f"], "etc/:0 etc/f:2 x->/:1");
    check(&["s x .", "f x/f"], "f:2 x->.:1");
    check(&["s usr/x ..", "f usr/x/f"], "f:2 usr/:0 usr/x->..:1");
    check(&["s x /, f etc/g", "f x/etc/g"], "etc/:0 etc/g:2 x->/:1");
    check(
        &["s x y, s y /", "d x/d, f x/d/f, s x/l d, l x/h x/d/f"],
        "d/:2 d/f:2 h=d/f l->d:2 x->y:1 y->/:1",
    );
    check(&["s x /", "f x/x/x/f"], "f:2 x->/:1");
    check(&["s x /, d d, f d/f", "f x/d/.wh.f, l g x/d/f"], "d/:1 g:1 x->/:1");
    check(&["s x /, f a, f b", "f x/.wh..wh..opq, f x/c"], "x/:0 x/c:2");
    check(&["s x /", "f x/f, d x"], "x/:2 x/f:2");
    check(&["s x /, f x/a"], "a:1 x->/:1");
}

/// In the lower layers, two paths of a layer are the same place, and applying one of them removes a directory on the
/// other path.
#[test]
fn rule_paths_that_meet_below() {
    check(&["s l /, d a, f a/b", "f a/c, f l/a"], "a:2 l->/:1");
    check(
        &["s l /, d a, f a/b", "f a/c, f l/a, f a/d"],
        "a component of the path \"a/\" is not a directory",
    );
    check(&["s l x, d x", "f l/c, f x/c"], "l->x:1 x/:1 x/c:2");
    check(&["s l x, d x, s k /", "f l/c, d k/l, f l/d"], "k->/:1 l/:2 l/d:2 x/:1 x/c:2");
}

/// A name that the merge loses, or an entry that was never added to the tree, must be an error.
#[test]
fn every_entry_is_accounted_for() {
    let error = |given: u64, lower: Option<&str>| {
        let mut layer =
            gather(2, "d a, f a/b, f a/b, f .wh.c, f .wh..wh.aufs, d a, f d/e, f d").unwrap();
        assert_eq!((layer.tally.given, layer.tally.hide, layer.tally.replaced), (8, 2, 2));
        layer.tally.given = given;
        let lower = lower.map(|text| gather(1, text).unwrap().onto(None).unwrap());
        layer.onto(lower).err().map(|error| error.to_string())
    };
    for lower in [None, Some("f c"), Some("s a /")] {
        assert_eq!(error(8, lower), None, "{lower:?}");
        assert_eq!(
            error(9, lower).unwrap(),
            "9 entries do not add up: 3 are laid out, 2 hide others, and 3 are replaced"
        );
    }
}

/// Makes symlinks, each of which leads to the next one, and the last one to `t`. Each path through `l0` takes 60,838
/// steps.
fn links_in_a_row() -> String {
    let there_and_back = "d/../".repeat(800);
    let links = (0..38).map(|at| match at {
        37 => format!("s l37 {there_and_back}t"),
        _ => format!("s l{at} {there_and_back}l{}", at + 1),
    });
    format!("d d, d t, f t/f, {}", links.collect::<Vec<_>>().join(", "))
}

fn many(entry: impl Fn(u32) -> String) -> String {
    (0..200).map(entry).collect::<Vec<_>>().join(", ")
}

/// A small layer must not keep an import busy for hours. It must fail after a few of its entries, for each kind of
/// entry that resolves paths repeatedly.
#[test]
fn steps_through_symlinks_are_bounded() {
    let links = links_in_a_row();
    let below = format!("{links}, {}", many(|at| format!("s t/n{at} x")));
    let expect = |error: LayerError, path: &str, entries: u64| {
        let limit = follow::STEPS_AT_LEAST + follow::STEPS_PER_ENTRY * entries;
        assert_eq!(error, LayerError::Steps { path: path.as_bytes().to_vec(), limit });
    };
    // The layer is applied to other layers.
    for (above, path) in [
        (many(|at| format!("f l0/n{at}")), "l0/"),
        (many(|at| format!("d l0/n{at}")), "l0/"),
        (many(|at| format!("f l0/.wh.n{at}")), "l0/"),
        (many(|at| format!("f l0/n{at}/.wh..wh..opq")), "l0/n4/"),
        (many(|at| format!("l h{at} l0/f")), "h4"),
    ] {
        let lower = gather(1, &below).unwrap().onto(None).unwrap();
        let layer = gather(2, &above).unwrap();
        let asked = Cell::new(0);
        let is_stopped = || {
            asked.set(asked.get() + 1);
            false
        };
        expect(layer.onto_until(Some(lower), &is_stopped).unwrap_err(), path, 200);
        assert!(asked.get() < 10, "{path}: {}", asked.get());
    }
    // In a single layer, the entry itself fails.
    let own = 3 + 38;
    for (entries, path, before) in [
        (many(|at| format!("l h{at} l0/f")), "h4", 4),
        (many(|at| format!("f l0/n{at}, f d/n{at}")), "l0/n4", 8),
    ] {
        expect(gather(1, &format!("{links}, {entries}")).unwrap_err(), path, own + before);
    }
    // Links whose target is a later entry.
    let layer = gather(1, &format!("{}, {links}", many(|at| format!("l h{at} l0/f")))).unwrap();
    expect(layer.onto(None).unwrap_err(), "h4", 200 + own);
    // Paths are not resolved again unless a directory or symlink was removed.
    lay(&[&links, &many(|at| format!("f l0/n{at}"))]).unwrap();
}

/// Every entry of a layer may lead through symlinks, for any number of entries.
#[test]
fn usual_layers_take_few_steps() {
    let below =
        format!("d usr/lib/x, s lib usr/lib, {}", many(|at| format!("s usr/lib/x/n{at} y")));
    let lower = gather(1, &below).unwrap().onto(None).unwrap();
    let above = many(|at| format!("f lib/x/n{at}, l lib/x/h{at} lib/x/n{at}, f lib/x/.wh.g{at}"));
    let mut layer = gather(2, &above).unwrap();
    // The share of each entry must suffice.
    layer.steps.spare_nothing();
    layer.onto(Some(lower)).unwrap();
}

#[test]
fn laying_stops_at_any_entry() {
    let below = "d d, s x d, f d/a, f d/b, f d/c, s gone nowhere";
    // `is_stopped` is called before each hard link to a later entry, each whiteout and each name, also of implicit
    // directories. It is called again for names that are applied after all others.
    for (above, times) in [
        ("f x/a, f x/b, f x/c", 4),
        ("f x/.wh.a, f x/.wh.b, f x/.wh.c", 3),
        ("l e x/a, l f x/b, l g x/c", 6),
        ("f gone/a, f gone/b", 6),
    ] {
        for after in 0..=times {
            let lower = gather(1, below).unwrap().onto(None).unwrap();
            let asked = Cell::new(0);
            let is_stopped = || asked.replace(asked.get() + 1) == after;
            let laid = gather(2, above).unwrap().onto_until(Some(lower), &is_stopped);
            let expect = if after < times { Some(LayerError::Stopped) } else { None };
            assert_eq!(laid.err(), expect, "{above} {after}");
        }
    }
    let links = gather(1, "l a c, l b c, f c").unwrap();
    assert_eq!(links.onto_until(None, &|| true).unwrap_err(), LayerError::Stopped);
}

#[test]
fn symlinks_have_the_mode_of_symlinks() {
    let tree = lay(&["s a x, f b", "s c x"]).unwrap();
    let mode = |path: &str| tree.resolve(path.as_bytes()).unwrap().metadata().permissions;
    assert_eq!([mode("a"), mode("b"), mode("c")], [0o777, 0o750, 0o777]);
}

#[test]
fn objects_come_later() {
    let object = crate::verity::digest(crate::verity::Algorithm::Sha256, b"x").into();
    let content =
        Content::External { size: 1, object: None, location: crate::tree::Location::None };
    let mut layer = Layer::new();
    let entry = layer.entry(b"a", &metadata(1), XattrsId::NONE, Node::Regular(content));
    let inode = entry.unwrap().unwrap();
    layer.set_object(inode, &object).unwrap();
    let lower = gather(2, "f b").unwrap().onto(None).unwrap();
    let tree = layer.onto(Some(lower)).unwrap().finish();
    let place = crate::tree::Location::Object;
    let expect = Content::External { size: 1, object: Some(object), location: place };
    assert_eq!(tree.resolve(b"a").unwrap().node(), Node::Regular(expect));
}

#[test]
fn xattrs_and_contents_survive_the_move() {
    let mut upper = gather(2, "d d, s d/s target, f d/f").unwrap();
    let xattrs = upper.xattrs([(b"user.a".as_slice(), b"1".as_slice()), (b"user.b", b"")]).unwrap();
    let device = Node::CharDevice(0);
    upper.entry(b"d/c", &metadata(2), xattrs, device).unwrap();
    upper.entry(b"d", &metadata(2), xattrs, Node::Directory).unwrap();
    let lower = gather(1, "d d, f zero, f x").unwrap().onto(None).unwrap();
    let tree = upper.onto(Some(lower)).unwrap().finish();
    for path in ["d", "d/c"] {
        let inode = tree.resolve(path.as_bytes()).unwrap();
        let xattrs: Vec<_> = inode.xattrs().collect();
        assert_eq!(xattrs, [(b"user.a".as_slice(), b"1".as_slice()), (b"user.b", b"")], "{path}");
    }
    assert_eq!(tree.resolve(b"d/c").unwrap().node(), device);
    assert_eq!(tree.resolve(b"d/f").unwrap().node(), Node::Regular(Content::Inline(b"2")));
    assert_eq!(tree.resolve(b"d/s").unwrap().node(), Node::Symlink(b"target"));
}

fn paths() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    prop::collection::vec(name, 1..4).prop_map(|names| names.join("/"))
}

fn targets() -> impl Strategy<Value = String> {
    let name = prop::sample::select(vec!["a", "b", "c", "..", ".", "gone"]);
    let names = prop::collection::vec(name, 1..3).prop_map(|names| names.join("/"));
    (names, 0..4).prop_map(|(names, kind)| match kind {
        0 => "/".to_owned(),
        1 => format!("/{names}"),
        _ => names,
    })
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let symlink =
        (paths(), targets()).prop_map(|(path, target)| Op::Symlink { path, target }).boxed();
    let op = (0..10, 1..5_u32, paths(), paths()).prop_map(|(kind, uid, path, other)| match kind {
        0..=2 => Op::Directory { path, uid },
        3..=5 => Op::File { path, uid },
        6..=7 => Op::Link { path, target: other },
        8 => Op::Whiteout { path },
        _ => Op::Opaque { directory: path },
    });
    prop::collection::vec(prop_oneof![5 => op, 1 => symlink], 0..12)
}

/// Adds an operation to a layer. The number is the content of a file and the owner of a symlink.
fn add(layer: &mut Layer, op: &Op, number: usize) -> Result<(), LayerError> {
    let content = number.to_string();
    let content = content.as_bytes();
    let (path, uid, node) = match op {
        Op::Symlink { path, target } => {
            (path.clone(), u32::try_from(number).unwrap(), Node::Symlink(target.as_bytes()))
        }
        Op::Directory { path, uid } => (path.clone(), *uid, Node::Directory),
        Op::File { path, uid } => (path.clone(), *uid, Node::Regular(Content::Inline(content))),
        Op::Link { path, target } => return layer.link(path.as_bytes(), target.as_bytes()),
        Op::Whiteout { path } => {
            let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
            (format!("{directory}/.wh.{name}"), 0, Node::Fifo)
        }
        Op::Opaque { directory } => (format!("{directory}/.wh..wh..opq"), 0, Node::Fifo),
    };
    layer.entry(path.as_bytes(), &metadata(uid), XattrsId::NONE, node).map(|_| ())
}

/// Converts a tree to the model's form, in which the number of an inode is its content.
fn as_model(tree: &Tree) -> model::Tree {
    let mut all = model::empty();
    let mut walk = tree.walk();
    while let Some((path, entry)) = walk.next() {
        let uid = entry.inode.metadata().uid;
        let node = match entry.inode.node() {
            Node::Directory => model::Node::Directory((!entry.inode.is_implicit()).then_some(uid)),
            Node::Regular(Content::Inline(content)) => {
                let inode = str::from_utf8(content).unwrap().parse().unwrap();
                model::Node::File { uid, inode }
            }
            Node::Symlink(target) => {
                let target = str::from_utf8(target).unwrap().to_owned();
                model::Node::Symlink { target, inode: uid.try_into().unwrap() }
            }
            other => panic!("{other:?}"),
        };
        all.insert(String::from_utf8(path[1..].to_vec()).unwrap(), node);
    }
    all
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config { cases: 3000, ..Default::default() })]
    #[test]
    fn layers_equal_the_model(layers in prop::collection::vec(ops(), 1..5)) {
        let mut expected = model::empty();
        let mut tree: Option<Builder> = None;
        let mut inode = 0;
        for ops in &layers {
            let mut layer = Layer::new();
            let mut model = model::ModelLayer::new();
            for op in ops {
                inode += 1;
                let result = add(&mut layer, op, inode);
                assert_eq!(result.is_err(), model.add(op, inode).is_err(), "{op:?}: {result:?}");
            }
            let (next, laid) = (model.onto(&expected), layer.onto(tree));
            assert_eq!(laid.is_err(), next.is_err(), "{laid:?} {next:?}");
            let (Ok(laid), Ok(next)) = (laid, next) else { return Ok(()) };
            (tree, expected) = (Some(laid), next);
        }
        let tree = tree.unwrap().finish();
        assert_eq!(as_model(&tree), expected);
        // Two names must share an inode if and only if they do in the model.
        let mut walk = tree.walk();
        let mut ids = std::collections::BTreeMap::<InodeId, model::Node>::new();
        while let Some((path, entry)) = walk.next() {
            let node = &expected[str::from_utf8(&path[1..]).unwrap()];
            assert_eq!(ids.entry(entry.inode.id()).or_insert_with(|| node.clone()), node);
        }
    }
}
