//! Tests of the core without a kernel.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    reason = "a wrong place fails the test"
)]

use std::collections::BTreeMap;

use image::erofs::read::Image;
use image::erofs::{Profile, Versions};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, XattrsId};
use image::verity::{Algorithm, digest};
use zerocopy::FromBytes as _;
use zerocopy::little_endian::{U32, U64};

use super::*;

/// Objects in which each byte is its offset modulo 251. Only the object with this id can be read.
#[derive(Debug)]
struct Offsets(ObjectId);

impl FileData for Offsets {
    fn object(&self, object: &ObjectId, _: u64, offset: u64, to: &mut [u8]) -> io::Result<()> {
        if *object != self.0 {
            return Err(io::Error::other("it is damaged"));
        }
        for (at, byte) in (offset..).zip(to) {
            *byte = u8::try_from(at % 251).unwrap();
        }
        Ok(())
    }

    fn devices(&self) -> Vec<&dyn ReadAt> {
        Vec::new()
    }
}

const NAMES: usize = 300;

/// Returns a composefs image, and the id of its readable object. The image has a directory with many names, a file
/// with a readable object, a file with a damaged object, small files, and optionally a whiteout.
fn image(xattrs: &[(&[u8], &[u8])], has_whiteout: bool) -> (Vec<u8>, ObjectId) {
    let whole = ObjectId::new(digest(Algorithm::Sha256, b"whole"));
    let damaged = ObjectId::new(digest(Algorithm::Sha256, b"damaged"));
    let mut builder = Builder::new();
    let file = |object| {
        let (object, location) = (Some(object), Location::Object);
        Node::Regular(Content::External { size: 1000, object, location })
    };
    let set = builder.xattrs(xattrs.iter().copied()).unwrap();
    let many = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Directory).unwrap();
    builder.insert(InodeId::ROOT, b"many", many, Link::Equal).unwrap();
    let nodes = [
        (&b"whole"[..], file(whole), set),
        (b"damaged", file(damaged), XattrsId::NONE),
        (b"small", Node::Regular(Content::Inline(b"small")), XattrsId::NONE),
        (b"empty", Node::Regular(Content::Inline(b"")), XattrsId::NONE),
        (b"gone", Node::CharDevice(0), XattrsId::NONE),
        (b"link", Node::Symlink(b"target"), XattrsId::NONE),
    ];
    // The whiteout is optional because its directory gets an xattr.
    let some = nodes.into_iter().filter(|it| has_whiteout || it.0 != b"gone");
    for (name, node, set) in some {
        let inode = builder.inode(&Metadata::IMPLICIT, set, node).unwrap();
        builder.insert(InodeId::ROOT, name, inode, Link::Equal).unwrap();
    }
    for number in 0..NAMES {
        let node = Node::Regular(Content::Inline(b"x"));
        let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, node).unwrap();
        let name = format!("a name of some length, so that there are blocks, {number}");
        builder.insert(many, name.as_bytes(), inode, Link::Equal).unwrap();
    }
    let mut bytes = Vec::new();
    let profile = Profile::Composefs(Versions::default());
    image::erofs::write(&builder.finish(), &profile, &mut bytes).unwrap();
    (bytes, whole)
}

type Tree<'i> = FileTree<&'i [u8], Offsets>;

fn tree(bytes: &[u8], whole: ObjectId, view: FuseView) -> Tree<'_> {
    let shown = ShownImage::new(Image::open(bytes).unwrap()).unwrap();
    FileTree::new(shown, Offsets(whole), view, None)
}

/// Sends a request and returns the error's number or the bytes of the reply.
fn ask(tree: &Tree<'_>, node: u64, operation: FuseOperation<'_>) -> Result<Vec<u8>, Errno> {
    let from = kernel::fuse::Requester { user: 0, group: 0, thread: 1 };
    let (unique, node) = (kernel::fuse::Unique(1), NodeNumber(node));
    let request = FuseRequest { unique, node, from, operation };
    match tree.answer(&request, &mut AnswerMemory::default()) {
        FuseAnswer::None => panic!("somebody waits"),
        FuseAnswer::Error(errno) => Err(errno),
        FuseAnswer::Body(body) => Ok(body.as_bytes().to_vec()),
        FuseAnswer::Bytes(bytes) => Ok(bytes.to_vec()),
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    U64::read_from_prefix(&bytes[at..]).unwrap().0.get()
}

fn node(tree: &Tree<'_>, name: &std::ffi::CStr) -> u64 {
    number(&ask(tree, 1, FuseOperation::Lookup(name)).unwrap(), 0)
}

fn read(tree: &Tree<'_>, node: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
    let handle = kernel::fuse::FileHandle(0);
    ask(tree, node, FuseOperation::Read { handle, offset, size })
}

/// Returns all names of a directory with their nodes, from replies of `size` bytes.
fn list(tree: &Tree<'_>, node: u64, size: u32) -> BTreeMap<Vec<u8>, u64> {
    let (mut names, mut offset) = (BTreeMap::new(), 0);
    loop {
        let operation = FuseOperation::ReadDirectory { offset, size, attributes: true };
        let bytes = ask(tree, node, operation).unwrap();
        assert!(bytes.len() <= size as usize);
        if bytes.is_empty() {
            return names;
        }
        let mut at = 0;
        while at < bytes.len() {
            let length = U32::read_from_prefix(&bytes[at + 144..]).unwrap().0.get() as usize;
            offset = number(&bytes, at + 136);
            // glibc's readdir(3) for programs of 32 bits without large files fails with EOVERFLOW for larger numbers.
            assert!(number(&bytes, at + 128) < 1 << 32 && offset < 1 << 31, "{offset:#x}");
            let name = bytes[at + 152..][..length].to_vec();
            assert_eq!(names.insert(name, number(&bytes, at)), None, "a name came twice");
            at += (152 + length).next_multiple_of(8);
        }
    }
}

#[test]
fn names_are_listed_once_whatever_the_room() {
    let (bytes, whole) = image(&[], true);
    let tree = tree(&bytes, whole, FuseView::Owner);
    let root = list(&tree, 1, 4096);
    let names: Vec<_> = root.keys().map(|it| String::from_utf8_lossy(it).into_owned()).collect();
    let expect = [".", "..", "damaged", "empty", "gone", "link", "many", "small", "whole"];
    assert_eq!(names, expect, "no directories that hide objects");
    assert_eq!((root[&b"."[..]], root[&b".."[..]]), (0, 0));
    let many = root[&b"many"[..]];
    for size in [256, 300, 1000, 4096, 1 << 20] {
        let names = list(&tree, many, size);
        assert_eq!(names.len(), NAMES + 2, "{size}");
        for (name, listed) in names.iter().filter(|it| *it.1 != 0) {
            let name = std::ffi::CString::new(name.clone()).unwrap();
            let found = ask(&tree, many, FuseOperation::Lookup(&name)).unwrap();
            assert_eq!(number(&found, 0), *listed);
        }
    }
}

#[test]
fn bytes_are_those_that_were_asked_for() {
    let (bytes, whole) = image(&[], true);
    let tree = tree(&bytes, whole, FuseView::Owner);
    let it = node(&tree, c"whole");
    let offsets = |range: std::ops::Range<u64>| -> Vec<u8> {
        range.map(|at| u8::try_from(at % 251).unwrap()).collect()
    };
    assert_eq!(read(&tree, it, 0, 4096).unwrap(), offsets(0..1000));
    assert_eq!(read(&tree, it, 700, 200).unwrap(), offsets(700..900));
    assert_eq!(read(&tree, it, 1000, 5), Ok(Vec::new()));
    assert_eq!(read(&tree, it, u64::MAX, 5), Ok(Vec::new()));
    assert_eq!(read(&tree, node(&tree, c"small"), 1, 3).unwrap(), b"mal");
    assert_eq!(read(&tree, node(&tree, c"empty"), 0, 3), Ok(Vec::new()));
    assert_eq!(read(&tree, node(&tree, c"damaged"), 0, 1), Err(Errno::IO));
    assert_eq!(ask(&tree, node(&tree, c"link"), FuseOperation::ReadLink).unwrap(), b"target");
    // Only regular files can be read, and only symbolic links have a target.
    for name in [c"many", c"link", c"gone"] {
        assert_eq!(read(&tree, node(&tree, name), 0, 1), Err(Errno::INVAL), "{name:?}");
    }
    assert_eq!(ask(&tree, it, FuseOperation::ReadLink), Err(Errno::INVAL));
    // A missing name gives node 0, and an escaped whiteout is shown as a device.
    assert_eq!(node(&tree, c"nothing"), 0);
    let gone = ask(&tree, node(&tree, c"gone"), FuseOperation::GetAttributes(None)).unwrap();
    assert_eq!(U32::read_from_prefix(&gone[76..]).unwrap().0.get() >> 12, 2, "a device");
}

#[test]
fn an_image_without_xattrs_is_not_asked_again() {
    let (bytes, whole) = image(&[], false);
    let tree = tree(&bytes, whole, FuseView::Owner);
    let name = c"security.selinux";
    let asked = FuseOperation::GetXattr { name, size: 0 };
    assert_eq!(ask(&tree, 1, asked), Err(Errno::NOSYS));
    assert_eq!(ask(&tree, 1, FuseOperation::ListXattrs(0)), Err(Errno::NOSYS));
}

#[test]
fn xattrs_are_those_of_the_image() {
    let given: [(&[u8], &[u8]); 3] =
        [(b"user.a", b"value"), (b"user.overlay.redirect", b"/x"), (b"trusted.b", b"no")];
    let (bytes, whole) = image(&given, true);
    let views = [
        (FuseView::Owner, &b"user.a\0user.overlay.redirect\0"[..]),
        (FuseView::Namespace, b"user.a\0user.overlay.overlay.redirect\0"),
    ];
    for (view, names) in views {
        let tree = tree(&bytes, whole, view);
        let it = node(&tree, c"whole");
        let value = |node, name, size| ask(&tree, node, FuseOperation::GetXattr { name, size });
        assert_eq!(value(it, c"user.a", 5).unwrap(), b"value");
        assert_eq!(value(it, c"user.a", 0).unwrap()[..4], 5_u32.to_le_bytes());
        assert_eq!(value(it, c"user.a", 4), Err(Errno::RANGE));
        assert_eq!(value(it, c"user.b", 4), Err(Errno::NODATA));
        assert_eq!(value(it, c"trusted.b", 4), Err(Errno::NODATA));
        assert_eq!(value(1, c"user.a", 5), Err(Errno::NODATA));
        assert_eq!(ask(&tree, it, FuseOperation::ListXattrs(4096)).unwrap(), names, "{view:?}");
    }
}

/// The values have the layout of Linux `fs/overlayfs/overlayfs.h`, `struct ovl_metacopy`: version, length, flags, kind
/// of digest, digest.
#[test]
fn an_overlay_is_led_to_objects_and_to_nothing_else() {
    let given: [(&[u8], &[u8]); 2] =
        [(b"user.overlay.redirect", b"/x"), (b"security.capability", b"c")];
    let (bytes, whole) = image(&given, true);
    let tree = tree(&bytes, whole, FuseView::Objects);
    let value = |node, name| ask(&tree, node, FuseOperation::GetXattr { name, size: 4096 });
    let it = node(&tree, c"whole");
    let path = format!("/{}", whole.path()).into_bytes();
    assert_eq!(value(it, c"user.overlay.redirect"), Ok(path));
    let digest = whole.as_bytes();
    let head = [0, 36, 0, 1];
    assert_eq!(value(it, c"user.overlay.metacopy"), Ok([&head[..], digest].concat()));
    assert_eq!(value(it, c"user.overlay.overlay.redirect").unwrap(), b"/x");
    for name in [c"small", c"empty", c"link", c"many"] {
        for mark in [c"user.overlay.redirect", c"user.overlay.metacopy", c"user.overlay.opaque"] {
            assert_eq!(value(node(&tree, name), mark), Err(Errno::NODATA), "{name:?} {mark:?}");
        }
    }
    assert_eq!(value(it, c"security.capability").unwrap(), b"c");
    assert_eq!(value(1, c"security.capability"), Err(Errno::NODATA));
    assert_eq!(value(1, c"security.selinux"), Err(Errno::OPNOTSUPP));
    assert_eq!(value(1, c"user.a"), Err(Errno::NODATA));
    // The marks are those of the overlay, and not of the image.
    let names = ask(&tree, it, FuseOperation::ListXattrs(4096)).unwrap();
    assert_eq!(names, b"security.capability\0user.overlay.overlay.redirect\0");
}

/// An overlay copies the xattrs of a file that is changed, and only root of the host may set labels.
#[test]
fn labels_are_not_shown_below_an_overlay() {
    let given: [(&[u8], &[u8]); 2] = [(b"security.selinux", b"label"), (b"user.a", b"value")];
    let (bytes, whole) = image(&given, true);
    let all = &b"security.selinux\0user.a\0"[..];
    let views = [
        (FuseView::Objects, &b"user.a\0"[..], Err(Errno::OPNOTSUPP)),
        (FuseView::Namespace, b"user.a\0", Err(Errno::OPNOTSUPP)),
        (FuseView::Alone, all, Ok(b"label".to_vec())),
        (FuseView::Owner, all, Ok(b"label".to_vec())),
    ];
    for (view, names, label) in views {
        let tree = tree(&bytes, whole, view);
        let it = node(&tree, c"whole");
        let asked = FuseOperation::GetXattr { name: c"security.selinux", size: 4096 };
        assert_eq!(ask(&tree, it, asked), label, "{view:?}");
        assert_eq!(ask(&tree, it, FuseOperation::ListXattrs(4096)).unwrap(), names, "{view:?}");
    }
    // If labels are the only xattrs, the kernel need not ask at all.
    let (bytes, whole) = image(&given[..1], false);
    let tree = tree(&bytes, whole, FuseView::Namespace);
    assert_eq!(ask(&tree, 1, FuseOperation::ListXattrs(0)), Err(Errno::NOSYS));
}

/// An overlay shows no device with the number 0, but lists it if the directory has one layer. Source: Linux
/// `fs/overlayfs/readdir.c`, `ovl_iterate_real`.
#[test]
fn an_overlay_gets_no_whiteouts() {
    let (bytes, whole) = image(&[], true);
    for (view, is_shown) in [
        (FuseView::Objects, false),
        (FuseView::Namespace, false),
        (FuseView::Alone, true),
        (FuseView::Owner, true),
    ] {
        let mut tree = tree(&bytes, whole, view);
        assert_eq!(node(&tree, c"gone") != 0, is_shown, "{view:?}");
        assert_eq!(list(&tree, 1, 4096).contains_key(&b"gone"[..]), is_shown, "{view:?}");
        if !is_shown {
            tree.add_places(&["/gone/x"]).unwrap();
            let gone = node(&tree, c"gone");
            assert_eq!(list(&tree, 1, 4096)[&b"gone"[..]], gone);
            assert_ne!(number(&ask(&tree, gone, FuseOperation::Lookup(c"x")).unwrap(), 0), 0);
        }
    }
}

#[test]
fn places_are_shown_where_the_image_has_none() {
    let (bytes, whole) = image(&[], true);
    let mut tree = tree(&bytes, whole, FuseView::Objects);
    let before = list(&tree, 1, 4096);
    let paths = ["/many/x", "/many/x", "/new/deep/x", "/new/dir/", "/many/", "/small", "/link/x"];
    tree.add_places(&paths).unwrap();
    let names = |node| list(&tree, node, 300).into_keys().collect::<Vec<_>>();
    let mut expect: Vec<_> = before.keys().cloned().collect();
    expect.push(b"new".to_vec());
    expect.sort();
    // Neither the link nor the file of the image is changed.
    assert_eq!(names(1), expect);
    let many = node(&tree, c"many");
    assert_eq!(list(&tree, many, 300).len(), NAMES + 3);
    let in_new =
        |name| number(&ask(&tree, node(&tree, c"new"), FuseOperation::Lookup(name)).unwrap(), 0);
    assert_eq!(names(node(&tree, c"new")), [b"deep".to_vec(), b"dir".to_vec()]);
    assert_eq!(names(in_new(c"deep")), [b"x".to_vec()]);
    assert_eq!(names(in_new(c"dir")), Vec::<Vec<u8>>::new());
    let x = number(&ask(&tree, many, FuseOperation::Lookup(c"x")).unwrap(), 0);
    assert_eq!(read(&tree, x, 0, 10), Ok(Vec::new()));
    let mode = |node| {
        let bytes = ask(&tree, node, FuseOperation::GetAttributes(None)).unwrap();
        U32::read_from_prefix(&bytes[76..]).unwrap().0.get()
    };
    assert_eq!((mode(x), mode(in_new(c"dir"))), (0o100_644, 0o40_755));
    let inode = |node| number(&ask(&tree, node, FuseOperation::GetAttributes(None)).unwrap(), 16);
    assert!(inode(x) < 1 << 32 && inode(x) != inode(in_new(c"dir")));
    let asked = FuseOperation::GetXattr { name: c"user.overlay.metacopy", size: 0 };
    assert_eq!(ask(&tree, x, asked), Err(Errno::NODATA));
    assert_eq!(ask(&tree, x, FuseOperation::Lookup(c"x")), Err(Errno::NOTDIR));
    assert_eq!(ask(&tree, x, FuseOperation::ReadLink), Err(Errno::INVAL));
    assert_eq!(read(&tree, in_new(c"dir"), 0, 1), Err(Errno::INVAL));
}

#[test]
fn numbers_that_nobody_gave_are_errors() {
    let (bytes, whole) = image(&[], true);
    let tree = tree(&bytes, whole, FuseView::Owner);
    for number in [0, 2, 3, 1 << 40, u64::MAX] {
        let asked = ask(&tree, number, FuseOperation::GetAttributes(None));
        assert!(matches!(asked, Err(Errno::STALE | Errno::IO | Errno::NOENT)), "{asked:?}");
    }
    let file = node(&tree, c"small");
    assert_eq!(ask(&tree, file, FuseOperation::Lookup(c"x")), Err(Errno::NOTDIR));
    let operation = FuseOperation::ReadDirectory { offset: 0, size: 99, attributes: false };
    assert_eq!(ask(&tree, file, operation), Err(Errno::NOTDIR));
    // The kernel handles opens itself.
    assert_eq!(ask(&tree, file, FuseOperation::Open(0)), Err(Errno::NOSYS));
}
