//! Compares images with those that independent writers made of the same trees, byte for byte.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which clippy does not see as tests")]

// The name that other crates use for this crate.
extern crate quire_image as image;

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use image::dump::{Strictness, parse};
use image::erofs::{ErofsWriteError, Profile, Summary, Version, Versions, write};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, Tree, XattrsId};
use image::verity::{Algorithm, Hasher, ObjectId, Tee};
use sha2::{Digest as _, Sha256};

fn tree(dump: impl Read) -> Tree {
    parse(BufReader::new(dump), Strictness::Lenient).unwrap()
}

fn hex(bytes: impl IntoIterator<Item = u8>) -> String {
    bytes.into_iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses a range of versions such as `0..1`, as in the lists of images.
fn versions(text: &str) -> Versions {
    let version = |text| match text {
        "0" => Version::V0,
        "1" => Version::V1,
        other => panic!("version {other}"),
    };
    let (min, max) = text.split_once("..").unwrap();
    Versions { min: version(min), max: version(max) }
}

fn sha256_of_image(tree: &Tree, versions: Versions) -> String {
    let mut image = Sha256Writer(Sha256::new());
    write(tree, &Profile::Composefs(versions), &mut image).unwrap();
    hex(image.0.finalize())
}

struct Sha256Writer(Sha256);

impl Write for Sha256Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn trees() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/trees")
}

#[test]
fn every_tree_becomes_the_image_that_mkcomposefs_makes() {
    let list = fs::read_to_string(trees().join("images.txt")).unwrap();
    let mut listed = BTreeSet::new();
    let mut wrong = Vec::new();
    for line in list.lines() {
        let [file, range, expect] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let tree = tree(fs::File::open(trees().join(file)).unwrap());
        if sha256_of_image(&tree, versions(range)) != expect {
            wrong.push((file, range));
        }
        listed.insert(file.to_owned());
    }
    assert!(wrong.is_empty(), "other images than expected: {wrong:?}");

    let names = fs::read_dir(trees()).unwrap().map(|it| it.unwrap().file_name().into_string());
    let dumps: BTreeSet<_> =
        names.map(Result::unwrap).filter(|name| name.ends_with(".dump")).collect();
    assert_eq!(dumps, listed, "each dump is in images.txt");
}

/// Returns the folder of inputs that are too large for the repository, which `QUIRE_TEST_DATA` names.
#[expect(clippy::disallowed_methods, reason = "the environment says where large inputs are")]
fn test_data(test: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("QUIRE_TEST_DATA").map(PathBuf::from);
    if folder.is_none() {
        testing::skipped(&format!("{test}: QUIRE_TEST_DATA is not set"));
    }
    folder
}

fn dump_file(path: &Path) -> Box<dyn Read> {
    let file = fs::File::open(path).unwrap();
    match path.extension().is_some_and(|extension| extension == "gz") {
        true => Box::new(flate2::read::GzDecoder::new(file)),
        false => Box::new(file),
    }
}

#[test]
fn the_images_of_composefs_own_tests() {
    let Some(folder) = test_data("the images of composefs' own tests") else { return };
    let list = fs::read_to_string(folder.join("composefs-golden.txt")).unwrap();
    let mut checked = 0;
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let [file, range, expect] = line.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{line}");
        };
        let tree = match file {
            "root-only" => tree(b"/ 4096 40755 2 0 0 0 0.0 - - -\n".as_slice()),
            file => tree(dump_file(&folder.join(file))),
        };
        assert_eq!(sha256_of_image(&tree, versions(range)), expect, "{file} {range}");
        checked += 1;
    }
    assert!(checked >= 4, "only {checked} images are listed");
}

#[test]
fn the_image_of_a_whole_distribution() {
    let Some(folder) = test_data("the image of a whole distribution") else { return };
    let tree = tree(dump_file(&folder.join("cs9-developer.dump.gz")));
    // Made by C's mkcomposefs 1.0.8, 2026-11-21.
    let expect = "8c61b21852d6abfdd3a7a3da71a5ccb56fae2ad099bebe7d564fcaa842cb9532";
    assert_eq!(sha256_of_image(&tree, Versions::default()), expect);
}

/// Compares with composefs's digest of a dump of one line.
#[test]
fn an_image_is_hashed_while_it_is_written() {
    let tree = tree(b"/ 4096 40755 2 0 0 0 0.0 - - -\n".as_slice());
    let mut tee = Tee::new(Vec::new(), Algorithm::Sha256);
    let summary = write(&tree, &Profile::Composefs(Versions::default()), &mut tee).unwrap();
    let (image, digest) = tee.finish();
    let expect = "8f589e8f57ecb88823736b0d857ddca1e1068a23e264fad164b28f7038eb3682";
    assert_eq!(digest.to_string(), expect);
    assert_eq!(summary, Summary { bytes: 16384, version: Some(Version::V0), inodes: 257 });
    assert_eq!(image.len(), 16384);
}

#[track_caller]
fn check_version(dump: &str, range: &str, expect: Version) {
    let profile = Profile::Composefs(versions(range));
    let mut hasher = Hasher::new(Algorithm::Sha256);
    let tree = tree(dump.as_bytes());
    assert_eq!(write(&tree, &profile, &mut hasher).unwrap().version, Some(expect));
}

#[test]
fn whiteouts_need_version_1_if_it_may_be() {
    let plain = "/ 0 40755 2 0 0 0 0.0 - - -\n/a 0 100644 1 0 0 0 0.0 - - -\n";
    let whiteout = "/ 0 40755 2 0 0 0 0.0 - - -\n/a 0 20644 1 0 0 0 0.0 - - -\n";
    check_version(plain, "0..1", Version::V0);
    check_version(plain, "1..1", Version::V1);
    check_version(whiteout, "0..1", Version::V1);
    check_version(whiteout, "0..0", Version::V0);
    check_version(whiteout, "1..0", Version::V1);
}

/// Makes a tree with one file in a directory; `make` returns its xattrs and node.
fn one(make: impl FnOnce(&mut Builder) -> (XattrsId, Node<'static>)) -> Tree {
    let mut builder = Builder::new();
    let directory = builder.subdirectory(InodeId::ROOT, b"dir").unwrap();
    let (xattrs, node) = make(&mut builder);
    let inode = builder.inode(&Metadata::IMPLICIT, xattrs, node).unwrap();
    builder.insert(directory, b"fi\nle", inode, Link::Owner).unwrap();
    builder.finish()
}

#[track_caller]
fn check_refused(tree: &Tree, expect: &str) {
    let mut out = Vec::new();
    let error = write(tree, &Profile::Composefs(Versions::default()), &mut out).unwrap_err();
    assert_eq!(error.to_string(), expect);
    assert!(out.is_empty(), "nothing is written of an image that cannot be");
}

#[track_caller]
fn check_taken(tree: &Tree) {
    write(tree, &Profile::Composefs(Versions::default()), &mut io::sink()).unwrap();
}

fn external(size: u64, location: Location<'static>) -> Node<'static> {
    Node::Regular(Content::External { size, object: None, location })
}

static ZEROS: [u8; 65535] = [0; 65535];

/// The limits were found by trying C's `mkcomposefs` 1.0.8, except where a line says otherwise.
#[test]
fn what_c_refuses_is_refused() {
    let xattr = |name: &'static [u8], len: usize| {
        move |builder: &mut Builder| {
            let set = builder.xattrs([(name, &ZEROS[..len])]).unwrap();
            (set, Node::Regular(Content::Inline(b"")))
        }
    };
    check_taken(&one(xattr(b"user.a", 32742)));
    check_refused(
        &one(xattr(b"user.a", 32743)),
        r#""/dir/fi\nle" has 32768 bytes of xattrs, more than the 32767 of an inode"#,
    );
    // Escaping makes the name longer, which is not counted.
    check_taken(&one(xattr(b"trusted.overlay.a", 32731)));
    check_refused(
        &one(xattr(b"trusted.overlay.a", 32732)),
        r#""/dir/fi\nle" has 32768 bytes of xattrs, more than the 32767 of an inode"#,
    );

    let size = |size| move |_: &mut Builder| (XattrsId::NONE, external(size, Location::None));
    check_taken(&one(size(1 << 53)));
    check_refused(
        &one(size((1 << 53) + 1)),
        r#""/dir/fi\nle" has 9007199254740993 bytes, more than the 8 PiB of a file"#,
    );

    let inline = |len: usize| {
        move |_: &mut Builder| (XattrsId::NONE, Node::Regular(Content::Inline(&ZEROS[..len])))
    };
    check_taken(&one(inline(5000)));
    check_refused(&one(inline(5001)), r#""/dir/fi\nle" has 5001 bytes inline, more than 5000"#);

    // C writes no such images; `testdata/composefs-rs` has ids of those of composefs-rs.
    let object = Some(ObjectId::from_bytes(&[7; 64]).unwrap());
    let sha512 = Node::Regular(Content::External { size: 1, object, location: Location::Object });
    check_taken(&one(move |_| (XattrsId::NONE, sha512)));

    // A dump cannot contain such a long path. C would refuse it when it counts the xattrs that C itself adds.
    static PATH: [u8; 32725] = [b'p'; 32725];
    let path = |len: usize| {
        move |_: &mut Builder| (XattrsId::NONE, external(1, Location::Path(&PATH[..len])))
    };
    check_taken(&one(path(32692)));
    check_refused(
        &one(path(32693)),
        r#""/dir/fi\nle" has 32768 bytes of xattrs, more than the 32767 of an inode"#,
    );
}

/// C counts the size of the xattrs that it adds to an inode in an unsigned number, and refuses a negative result.
#[test]
fn an_xattr_in_the_way_of_a_whiteout_is_refused_where_c_does() {
    let whiteout = |xattrs: &'static [(&'static [u8], usize)]| {
        one(move |builder| {
            let pairs = xattrs.iter().map(|(name, len)| (*name, &ZEROS[..*len]));
            (builder.xattrs(pairs).unwrap(), Node::CharDevice(0))
        })
    };
    check_taken(&whiteout(&[(b"user.overlay.whiteout", 39)]));
    check_refused(
        &whiteout(&[(b"user.overlay.whiteout", 40)]),
        r#""/dir/fi\nle" has its own xattr "user.overlay.whiteout", which the image needs for a whiteout"#,
    );
    check_taken(&whiteout(&[(b"trusted.overlay.whiteout", 32724)]));
    check_taken(&whiteout(&[(b"trusted.overlay.whiteout", 0), (b"user.a", 1)]));
    check_refused(
        &whiteout(&[(b"trusted.overlay.whiteout", 1), (b"user.a", 1)]),
        r#""/dir/fi\nle" has its own xattr "trusted.overlay.overlay.whiteout", which the image needs for a whiteout"#,
    );

    let parent = |name: &'static [u8], len: usize| {
        let mut builder = Builder::new();
        let set = builder.xattrs([(name, &ZEROS[..len])]).unwrap();
        builder.describe(InodeId::ROOT, &Metadata::IMPLICIT, set).unwrap();
        let inode =
            builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::CharDevice(0)).unwrap();
        builder.insert(InodeId::ROOT, b"gone", inode, Link::Owner).unwrap();
        builder.finish()
    };
    check_taken(&parent(b"user.overlay.whiteouts", 40));
    check_refused(
        &parent(b"user.overlay.whiteouts", 41),
        r#""/" has its own xattr "user.overlay.whiteouts", which the image needs for a whiteout"#,
    );
    check_taken(&parent(b"user.overlay.opaque", 108));
    check_refused(
        &parent(b"user.overlay.opaque", 109),
        r#""/" has its own xattr "user.overlay.opaque", which the image needs for a whiteout"#,
    );
    check_taken(&parent(b"trusted.overlay.opaque", 70));
    check_refused(
        &parent(b"trusted.overlay.opaque", 71),
        r#""/" has its own xattr "trusted.overlay.overlay.opaque", which the image needs for a whiteout"#,
    );
}

/// A writer that fails after some bytes, and counts its calls.
struct Narrow {
    left: usize,
    calls: usize,
}

impl Write for Narrow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.calls += 1;
        match self.left.min(bytes.len()) {
            0 => Err(io::ErrorKind::StorageFull.into()),
            taken => {
                self.left -= taken;
                Ok(taken)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes a tree with more than a megabyte of directory blocks.
fn large_tree() -> Tree {
    let mut builder = Builder::new();
    for number in 0..20_000 {
        let inode = builder.inode(&Metadata::IMPLICIT, XattrsId::NONE, Node::Fifo).unwrap();
        let name = format!("{number:060}");
        builder.insert(InodeId::ROOT, name.as_bytes(), inode, Link::Owner).unwrap();
    }
    builder.finish()
}

#[test]
fn an_image_goes_out_in_large_pieces() {
    let mut out = Narrow { left: usize::MAX, calls: 0 };
    let profile = Profile::Composefs(Versions::default());
    let summary = write(&large_tree(), &profile, &mut out).unwrap();
    assert!(summary.bytes > 2_000_000, "{} bytes", summary.bytes);
    assert!(out.calls < 10, "{} calls for {} bytes", out.calls, summary.bytes);
}

#[test]
fn an_error_of_the_output_is_handed_on() {
    let profile = Profile::Composefs(Versions::default());
    for left in [0, 1_000, 500_000] {
        let error = write(&large_tree(), &profile, &mut Narrow { left, calls: 0 }).unwrap_err();
        match error {
            ErofsWriteError::Output(cause) => assert_eq!(cause.kind(), io::ErrorKind::StorageFull),
            other => panic!("{other}"),
        }
    }
}
