//! Reads composefs images as the root file systems that they represent.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use flate2::read::GzDecoder;
use quire_image::erofs::layout::{
    COMPOSEFS_MAGIC, LAYOUT_CHUNK_BASED, LAYOUT_FLAT_INLINE, LAYOUT_FLAT_PLAIN,
};
use quire_image::erofs::read::{Image, ImageTree, Owners, View, to_tree};
use quire_image::tree::{Content, Inode, InodeId, Location, Node};

use crate::hostile::{Maker, entries, inode};
use crate::small::{icount, xattr, xattrs};
use crate::tools::{environment, folder, newer, not_made, run, skipped};

fn escape(text: &mut String, bytes: &[u8], is_xattr: bool) {
    for byte in bytes {
        match byte {
            b'\\' => text.push_str("\\\\"),
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            b'\t' => text.push_str("\\t"),
            b'=' if is_xattr => text.push_str("\\x3d"),
            0x21..=0x7e => text.push(char::from(*byte)),
            _ => write!(text, "\\x{byte:02x}").unwrap(),
        }
    }
}

/// Escapes a payload or content; `-` means that it is absent, so a single dash is escaped.
fn optional(bytes: Option<&[u8]>) -> String {
    match bytes {
        None | Some([]) => "-".to_owned(),
        Some(b"-") => "\\x2d".to_owned(),
        Some(bytes) => {
            let mut text = String::new();
            escape(&mut text, bytes, false);
            text
        }
    }
}

/// Returns a line of `composefs-info dump`.
fn line(read: &ImageTree, path: &[u8], inode: Inode<'_>, is_owner: bool) -> String {
    let mut text = String::new();
    escape(&mut text, path, false);
    let (mut size, mut number) = (0, 0);
    let (mut payload, mut content, mut digest) = (None, None, None);
    match inode.node() {
        Node::Directory => size = read.sizes[inode.id().index()],
        Node::Symlink(target) => {
            size = target.len() as u64;
            payload = Some(target.to_vec());
        }
        Node::CharDevice(device) | Node::BlockDevice(device) => number = device,
        Node::Fifo | Node::Socket => {}
        Node::Regular(Content::Inline(bytes)) => {
            size = bytes.len() as u64;
            content = Some(bytes);
        }
        Node::Regular(Content::External { size: bytes, object, location }) => {
            size = bytes;
            digest = object.map(|object| object.as_bytes().to_vec());
            payload = match location {
                Location::None => None,
                Location::Object => object.map(|object| object.path().into_bytes()),
                Location::Path(path) => Some(path.to_vec()),
            };
        }
    }
    if !is_owner {
        payload = Some(inode.path());
    }
    let metadata = inode.metadata();
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    write!(
        text,
        " {size} {}{:o} {} {} {} {number} {}.{} {} {} {}",
        if is_owner { "" } else { "@" },
        inode.mode(),
        inode.nlink(),
        metadata.uid,
        metadata.gid,
        metadata.mtime.seconds,
        metadata.mtime.nanoseconds,
        optional(payload.as_deref()),
        optional(content),
        digest.map_or_else(|| "-".to_owned(), hex),
    )
    .unwrap();
    for (name, value) in inode.xattrs() {
        text.push(' ');
        escape(&mut text, name, true);
        text.push('=');
        escape(&mut text, value, true);
    }
    text
}

pub fn dump(read: &ImageTree) -> Vec<String> {
    let mut lines = vec![line(read, b"/", read.tree.root(), true)];
    let mut walk = read.tree.walk();
    while let Some((path, entry)) = walk.next() {
        lines.push(line(read, path, entry.inode, entry.is_owner));
    }
    lines
}

/// Compares with `composefs-info dump` of the same images.
#[test]
fn as_composefs_info_shows_them() {
    let (Some(mkcomposefs), Some(info)) = (newer("mkcomposefs"), newer("composefs-info")) else {
        return not_made("C's mkcomposefs", "sid");
    };
    let Some(data) = environment("QUIRE_TEST_DATA") else {
        return skipped("QUIRE_TEST_DATA is not set");
    };
    let (data, dir) = (Path::new(&data), folder());
    let (source, image) = (dir.path().join("dump"), dir.path().join("image"));
    for (name, versions) in
        [("special.dump", 2), ("config.dump.gz", 1), ("cs9-developer.dump.gz", 1)]
    {
        let file = fs::File::open(data.join(name)).unwrap();
        let mut text = Vec::new();
        let mut read: Box<dyn std::io::Read> = match name.ends_with(".gz") {
            true => Box::new(GzDecoder::new(file)),
            false => Box::new(file),
        };
        read.read_to_end(&mut text).unwrap();
        fs::write(&source, &text).unwrap();
        for version in 0..versions {
            let version = format!("--min-version={version}");
            let words = [Path::new("--from-file"), Path::new(&version), &source, &image];
            run(&mkcomposefs, words);
            let theirs = run(&info, [Path::new("dump"), &image]);
            let theirs = String::from_utf8(theirs).unwrap();
            let bytes = fs::read(&image).unwrap();
            let opened = Image::open(&bytes[..]).unwrap();
            let ours = dump(&to_tree(&opened, View::Composefs(Owners::FirstMet)).unwrap());
            for (ours, theirs) in ours.iter().zip(theirs.lines()) {
                assert_eq!(ours, theirs, "{name} {version}");
            }
            assert_eq!(ours.len(), theirs.lines().count(), "{name} {version}");
        }
    }
}

/// Makes a composefs image by hand: the superblock's block, then the inodes, then `data`.
fn image(build: impl FnOnce(&mut Maker) -> u64) -> Vec<u8> {
    let mut maker = Maker::new();
    let root = build(&mut maker);
    let mut bytes = maker.finish(root);
    bytes[..4].copy_from_slice(&COMPOSEFS_MAGIC.to_le_bytes());
    bytes[4..8].copy_from_slice(&1_u32.to_le_bytes());
    bytes
}

/// Makes an inode with inline xattrs and the data after it. Its layout is inline if there is such data.
fn node(
    maker: &mut Maker,
    mode: u16,
    own: &[(u8, &str, &[u8])],
    layout: u16,
    size: usize,
    behind: &[u8],
) -> u64 {
    let mut raw = inode(layout, mode, size, 0);
    let inline: Vec<_> =
        own.iter().map(|(index, rest, value)| xattr(*index, rest, value)).collect();
    let own = xattrs(0, &[], &inline);
    if !inline.is_empty() {
        raw.i_xattr_icount = icount(&own).into();
    }
    let own = if inline.is_empty() { &[][..] } else { &own };
    maker.inode(&raw, &[own, behind].concat())
}

fn directory(maker: &mut Maker, own: &[(u8, &str, &[u8])], list: &[(&str, u64, u8)]) -> u64 {
    let list: Vec<_> = list.iter().map(|(name, nid, of)| ((*name).to_owned(), *nid, *of)).collect();
    let list = entries(&list);
    node(maker, 0o40_755, own, LAYOUT_FLAT_INLINE, list.len(), &list)
}

const REGULAR: u16 = 0o100_644;

/// Checks the dump of a regular file of `size` bytes in chunks, with these xattrs (given without `trusted.`).
fn check_file(own: &[(&str, &[u8])], size: usize, expect: &str) {
    let own: Vec<_> = own.iter().map(|(name, value)| (4, *name, *value)).collect();
    let bytes = image(|maker| {
        let file = node(maker, REGULAR, &own, LAYOUT_CHUNK_BASED, size, &[0xff; 4]);
        directory(maker, &[], &[("f", file, 1)])
    });
    let read = to_tree(&Image::open(&bytes[..]).unwrap(), View::Composefs(Owners::FirstMet));
    let answer = match read {
        Err(error) => error.to_string(),
        Ok(read) => dump(&read).remove(1),
    };
    assert_eq!(answer, expect);
}

#[test]
fn external_files() {
    let digest: Vec<u8> = (0..32).collect();
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let long: Vec<u8> = (0..64).collect();
    let long_hex: String = long.iter().map(|byte| format!("{byte:02x}")).collect();
    let metacopy = [&[0, 36, 0, 1], &digest[..]].concat();
    let wide = [&[0, 68, 0, 2], &long[..]].concat();
    let (meta, redirect) = ("overlay.metacopy", "overlay.redirect");
    let line = |size: usize, payload: &str, digest: &str, xattrs: &str| {
        format!("/f {size} 100644 1 0 0 0 0.0 {payload} - {digest}{xattrs}")
    };
    check_file(&[], 5, &line(5, "-", "-", ""));
    check_file(&[], 0, &line(0, "-", "-", ""));
    check_file(&[(meta, &metacopy)], 9, &line(9, "-", &hex, ""));
    check_file(&[(meta, &wide)], 9, &line(9, "-", &long_hex, ""));
    check_file(&[(meta, b""), (redirect, b"/x/y")], 9, &line(9, "x/y", "-", ""));
    check_file(&[(redirect, b"x")], 9, &line(9, "x", "-", ""));
    check_file(&[(redirect, b"//x")], 9, &line(9, "/x", "-", ""));
    check_file(&[(redirect, b"/")], 9, &line(9, "/", "-", ""));
    check_file(&[(redirect, b"")], 9, &line(9, "-", "-", ""));
    let own = format!("/{}/{}", &hex[..2], &hex[2..]);
    check_file(&[(meta, &metacopy), (redirect, own.as_bytes())], 9, &line(9, &own[1..], &hex, ""));
    // Overlay's own xattrs are removed, and escaped ones are unescaped by one level.
    check_file(
        &[("overlay.origin", b"1"), ("overlay.overlay.metacopy", b"2"), ("overlayer", b"3")],
        9,
        &line(9, "-", "-", " trusted.overlay.metacopy=2 trusted.overlayer=3"),
    );
    check_file(
        &[("overlay.overlay.overlay.x", b"=")],
        9,
        &line(9, "-", "-", " trusted.overlay.overlay.x=\\x3d"),
    );
    check_file(
        &[("overlay.overlay.whiteout", b""), (meta, &metacopy)],
        0,
        "/f 0 20644 1 0 0 0 0.0 - - -",
    );
    let bad = |value: &[u8]| {
        let text = "the image is corrupt: file 128 has a metacopy xattr of";
        let text = format!("{text} {} bytes that is not an fs-verity digest", value.len());
        check_file(&[(meta, value)], 9, &text);
    };
    bad(&metacopy[..35]);
    bad(&metacopy[..4]);
    bad(&[&[0, 36, 0, 2], &digest[..]].concat());
    bad(&[&[1, 36, 0, 1], &digest[..]].concat());
    bad(&[&[0, 36, 1, 1], &digest[..]].concat());
    bad(&[&[0, 35, 0, 1], &digest[..]].concat());
    check_file(
        &[(redirect, b"/x\0")],
        9,
        "the image is corrupt: cannot add inode 128 to a tree: \"x\\x00\" is not a valid path to a file's bytes",
    );
}

#[test]
fn whiteouts_and_the_rest() {
    let bytes = image(|maker| {
        let hide = maker.inode(&inode(LAYOUT_FLAT_PLAIN, 0o20_644, 0, 0), &[]);
        let own: [(u8, &str, &[u8]); 2] =
            [(4, "overlay.overlay.whiteout", b""), (1, "overlay.whiteout", b"")];
        let gone = node(maker, REGULAR, &own, LAYOUT_FLAT_PLAIN, 0, &[]);
        let marks: [(u8, &str, &[u8]); 4] = [
            (4, "overlay.overlay.whiteouts", b""),
            (1, "overlay.whiteouts", b""),
            (4, "overlay.overlay.opaque", b"x"),
            (1, "overlay.opaque", b"x"),
        ];
        let dir = directory(maker, &marks, &[("gone", gone, 1)]);
        let inline = node(maker, REGULAR, &[], LAYOUT_FLAT_INLINE, 5, b"hello");
        let link = node(maker, 0o120_777, &[], LAYOUT_FLAT_INLINE, 3, b"a b");
        let acl = node(maker, REGULAR, &[(2, "", b"\x02")], LAYOUT_FLAT_PLAIN, 0, &[]);
        let other = node(maker, REGULAR, &[(0, "odd", b"")], LAYOUT_FLAT_PLAIN, 0, &[]);
        let list = [
            ("00", hide, 3),
            ("acl", acl, 1),
            ("dir", dir, 2),
            ("ff", hide, 3),
            ("inline", inline, 1),
            ("link", link, 7),
            ("other", other, 1),
        ];
        directory(maker, &[(4, "overlay.opaque", b"y")], &list)
    });
    let opened = Image::open(&bytes[..]).unwrap();
    let read = to_tree(&opened, View::Composefs(Owners::FirstMet)).unwrap();
    let expect = [
        "/ 109 40755 1 0 0 0 0.0 - - -",
        "/acl 0 100644 1 0 0 0 0.0 - - - system.posix_acl_access=\\x02",
        "/dir 16 40755 1 0 0 0 0.0 - - - trusted.overlay.opaque=x user.overlay.opaque=x",
        "/dir/gone 0 20644 1 0 0 0 0.0 - - -",
        "/inline 5 100644 1 0 0 0 0.0 - hello -",
        "/link 3 120777 1 0 0 0 0.0 a\\x20b - -",
        "/other 0 100644 1 0 0 0 0.0 - - - odd=",
    ];
    let mut expect = expect.map(str::to_owned);
    // A tree computes the link counts of directories.
    expect[0] = expect[0].replace("40755 1", "40755 3");
    expect[2] = expect[2].replace("40755 1", "40755 2");
    assert_eq!(dump(&read), expect);
    let again = to_tree(&opened, View::Composefs(Owners::AsWritten)).unwrap();
    assert_eq!(dump(&again), expect);
    // The kernel's view contains everything except xattrs for which the kernel has no handler.
    let plain = to_tree(&opened, View::Plain).unwrap();
    assert!(matches!(plain.tree.resolve(b"/00").unwrap().node(), Node::CharDevice(0)));
    assert_eq!(plain.tree.resolve(b"/00").unwrap().id(), plain.tree.resolve(b"/ff").unwrap().id());
    assert_eq!(plain.tree.resolve(b"/dir").unwrap().xattrs().len(), 4);
    assert_eq!(plain.tree.resolve(b"/other").unwrap().xattrs().len(), 0);
    assert_eq!(plain.tree.root().id(), InodeId::ROOT);

    let refused = |change: &dyn Fn(&mut [u8]), expect: &str| {
        let mut bytes = bytes.clone();
        change(&mut bytes);
        let opened = Image::open(&bytes[..]).unwrap();
        let error = to_tree(&opened, View::Composefs(Owners::FirstMet)).unwrap_err();
        assert_eq!(error.to_string(), expect);
    };
    let version = "the image uses unsupported composefs header version 2";
    refused(&|bytes| bytes[4] = 2, version);
    refused(&|bytes| bytes[0] = 0, "not a composefs image");
    refused(&|bytes| bytes[4096 + 6] = 2, "the image is corrupt: whiteout 128 has 2 links");
}

/// C's tools take the first name as the owner of an inode; the order of inodes shows the owner at the time of
/// writing.
#[test]
fn owners_of_hard_links() {
    // `/a/x` and `/a-b` are one file. `/b` is another file, which comes before or after it.
    let make = |first_is_link: bool| {
        image(|maker| {
            // The root takes 5 slots, `a` takes 2, and each file takes 1.
            let root = 128;
            let (a, one, two) = (root + 4, root + 6, root + 7);
            let (linked, other) = if first_is_link { (one, two) } else { (two, one) };
            let list = [("a", a, 2), ("a-b", linked, 1), ("b", other, 1)];
            assert_eq!(directory(maker, &[], &list), root);
            maker.bytes.resize(a as usize * 32, 0);
            assert_eq!(directory(maker, &[], &[("x", linked, 1)]), a);
            for nid in [one, two] {
                assert_eq!(node(maker, REGULAR, &[], LAYOUT_FLAT_PLAIN, 0, &[]), nid);
            }
            root
        })
    };
    let check = |first_is_link, owners, expect: &str| {
        let bytes = make(first_is_link);
        let opened = Image::open(&bytes[..]).unwrap();
        let read = to_tree(&opened, View::Composefs(owners)).unwrap();
        assert_eq!(read.tree.resolve(b"/a-b").unwrap().path(), expect.as_bytes());
    };
    check(true, Owners::FirstMet, "/a/x");
    check(false, Owners::FirstMet, "/a/x");
    check(true, Owners::AsWritten, "/a-b");
    check(false, Owners::AsWritten, "/a/x");
}

#[test]
fn much_inline_content() {
    let make = |size: usize| {
        image(|maker| {
            let block = maker.block(&vec![b'x'; size]);
            let file = maker.inode(&inode(LAYOUT_FLAT_PLAIN, REGULAR, size, block), &[]);
            directory(maker, &[], &[("f", file, 1)])
        })
    };
    let answer = |size| {
        let bytes = make(size);
        let opened = Image::open(&bytes[..]).unwrap();
        let read = to_tree(&opened, View::Composefs(Owners::FirstMet));
        read.map_or_else(|error| error.to_string(), |read| dump(&read)[1].len().to_string())
    };
    assert_eq!(answer(5000), (5000 + "/f 5000 100644 1 0 0 0 0.0 -  -".len()).to_string());
    let expect = "the image is corrupt: file 384 has 5001 bytes inside the image, more than the \
                  5000 of composefs";
    assert_eq!(answer(5001), expect);
}
