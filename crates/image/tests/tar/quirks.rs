//! Tests peculiarities of tar writers, one row each.

use image::tar::{Reader, UnusualTar, XattrRecords};

use super::build::{Header, end, extended, file, member, padded, pax};
use super::describe::read;

/// Checks the entries of a tar that consists of these parts and two blocks of zeros.
#[track_caller]
fn check(parts: &[Vec<u8>], expected: &[&str]) {
    check_tar(&[parts.concat(), end()].concat(), expected);
}

#[track_caller]
fn check_tar(tar: &[u8], expected: &[&str]) {
    let records = read(tar).unwrap();
    let lines: Vec<String> = records.iter().map(super::describe::Record::short).collect();
    assert_eq!(lines, expected);
}

#[test]
fn types() {
    let link = |name: &[u8], typeflag| Header::new(name, typeflag).link(b"./a//b").block();
    let device = |name: &[u8], typeflag| {
        let header = Header::new(name, typeflag).with(329, b"0000010\0").with(337, b"0001002\0");
        header.block()
    };
    check(&[file("./a/b", "hello")], &["- a/b \"hello\""]);
    check(&[member(b"old", 0, b"hello")], &["- old \"hello\""]);
    check(&[member(b"contiguous", b'7', b"hello")], &["- contiguous \"hello\""]);
    check(&[link(b"/h", b'1')], &["h h -> a/b"]);
    check(&[link(b"s", b'2')], &["l s -> ./a//b"]);
    check(&[device(b"c", b'3')], &["c c device 0x200802"]);
    check(&[device(b"b", b'4')], &["b b device 0x200802"]);
    check(&[member(b"./", b'5', b"")], &["d "]);
    check(&[member(b"d/", b'5', b"")], &["d d"]);
    check(&[member(b"p", b'6', b"")], &["p p"]);
    check(&[Header::new(b"c", b'3').v7().block()], &["c c"]);
    // In an incremental GNU archive, the data of a directory is a list of its names.
    check(&[member(b"d/", b'D', b"Yf\0\0"), file("f", "x")], &["d d", "- f \"x\""]);
    check(&[member(b"label", b'V', b""), file("f", "x")], &["- f \"x\""]);
}

#[test]
fn a_slash_makes_a_directory_in_old_headers_only() {
    check(&[Header::new(b"d/", 0).block()], &["d d"]);
    check(&[Header::new(b"d/", 0).v7().block()], &["d d"]);
    check(&[Header::new(b"d/", b'0').v7().block()], &["d d"]);
    check(&[Header::new(b"f/", b'0').block()], &["- f"]);
}

/// Exactly those entries are noted that other readers treat differently.
#[test]
fn unusual_entries_are_noted() {
    use UnusualTar as Is;
    let check = |parts: &[Vec<u8>], expect: Option<(&str, UnusualTar)>| {
        let tar = [parts.concat(), file("last", "x"), end()].concat();
        let mut reader = Reader::new(&tar[..]);
        while reader.next_entry().unwrap().is_some() {}
        let found = reader.unusual().map(|(entry, what)| (entry.to_vec(), what));
        let expect = expect.map(|(entry, what)| (entry.as_bytes().to_vec(), what));
        assert_eq!(found, expect);
    };
    let header = |name: &str, typeflag| Header::new(name.as_bytes(), typeflag);
    let global = |key: &str, value: &str| extended(b'g', &[(key.as_bytes(), value.as_bytes())]);
    let long = |name: &str| member(b"././@LongLink", b'L', format!("{name}\0").as_bytes());
    let capability =
        |prefix: &str, value: &str| pax(&[(&format!("{prefix}.xattr.security.capability"), value)]);
    let f = || file("f", "x");

    // git writes such a comment.
    check(&[global("comment", "0123"), f()], None);
    check(&[global("mtime", "1"), f()], Some(("f", Is::GlobalRecords)));
    check(&[global("SCHILY.xattr.user.a", "1"), f()], Some(("f", Is::GlobalRecords)));
    check(&[long("g"), f()], None);
    check(&[pax(&[("path", "g")]), f()], None);
    check(&[pax(&[("path", "g")]), long("g"), f()], None);
    check(&[pax(&[("path", "g")]), long("h"), f()], Some(("h", Is::TwoNames)));
    check(&[header("f", b'0').with(100, b"0100644\0").block()], None);
    check(&[header("d", b'5').with(100, b"0040755\0").block()], None);
    check(&[header("f", b'0').with(100, b"0040644\0").block()], Some(("f", Is::Mode)));
    check(&[header("f", b'0').with(100, b"1000644\0").block()], Some(("f", Is::Mode)));
    check(&[capability("SCHILY", "a"), f()], None);
    check(&[capability("LIBARCHIVE", "YQ"), f()], Some(("f", Is::LibarchiveCapability)));
    let both = |other: &str| {
        let keys = ["LIBARCHIVE.xattr.security.capability", "SCHILY.xattr.security.capability"];
        vec![pax(&[(keys[0], "YQ"), (keys[1], other)]), f()]
    };
    check(&both("a"), None);
    check(&both("b"), Some(("f", Is::LibarchiveCapability)));
    check(&[pax(&[("LIBARCHIVE.xattr.user.a", "YQ")]), f()], None);
    check(&[header("d/", b'5').block()], None);
    check(&[header("d/", 0).block()], Some(("d/", Is::Slash)));
    check(&[header("d/", b'0').v7().block()], Some(("d/", Is::Slash)));
    check(&[header("d", b'5').size(5).block()], Some(("d", Is::Size)));
    check(&[header("h", b'1').link(b"a").size(5).block()], Some(("h", Is::Size)));
    // Content follows the header, as other readers expect.
    let mut linked = header("h", b'1').link(b"a").size(5).block();
    linked.extend(padded(b"hello"));
    check(&[linked], None);
    check(&[header("c", b'3').block()], None);
    check(&[header("c", b'3').v7().block()], Some(("c", Is::OldDevice)));
    check(&[member(b"d/", b'D', b"Yf\0\0")], Some(("d/", Is::Incremental)));
    check(&[member(b"label", b'V', b"")], Some(("label", Is::Label)));
    // The first one counts.
    check(&[member(b"label", b'V', b""), header("d/", 0).block()], Some(("label", Is::Label)));
}

#[test]
fn numbers() {
    let header = |at, bytes: &[u8]| Header::new(b"f", b'0').with(at, bytes).block();
    check(&[header(100, b"0104755\0")], &["- f 4755"]);
    check(&[header(100, b"\x80\0\0\0\0\0\x01\xff")], &["- f 777"]);
    check(&[header(108, b"7777777\0")], &["- f 2097151:0"]);
    check(&[header(108, b"\x80\0\0\0\x00\x20\0\0")], &["- f 2097152:0"]);
    check(&[header(116, b"\x80\0\0\0\xff\xff\xff\xfe")], &["- f 0:4294967294"]);
    check(&[header(108, b"\0\0\0\0\0\0\0\0")], &["- f"]);
    check(&[header(136, b"14723023000\0")], &["- f 1733043712.000000000"]);
    check(
        &[header(136, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")],
        &["- f -1.000000000"],
    );
}

#[test]
fn prefixes() {
    let prefix = b"some/where";
    let header = |header: Header| header.with(345, prefix).block();
    check(&[header(Header::new(b"f", b'0'))], &["- some/where/f"]);
    check(&[header(Header::new(b"f", b'0').v7())], &["- f"]);
    // Go before 1.8 wrote prefixes into the fields in which GNU tar stores times (golang.org/issues/12594).
    check(&[header(Header::new(b"f", b'0').gnu())], &["- some/where/f"]);
    let times = |times: &[u8]| Header::new(b"f", b'0').gnu().with(345, times).block();
    check(&[times(b"14723023000\x0014723023000\0")], &["- f"]);
    check(&[times(b"\x80\0\0\0\0\0\0\0\0\0\0\x01")], &["- f"]);
    // star's prefix is 24 bytes shorter, to make room for times.
    let long = [b'p'; 131];
    let star = |name: &[u8]| Header::new(name, b'0').with(345, &long).with(508, b"tar\0");
    let expected = format!("- {}/f", "p".repeat(131));
    check(&[star(b"f").with(476, b"14723023000 14723023000 ").block()], &[&expected]);
    // A version other than "00".
    check(&[header(Header::new(b"f", b'0').with(263, b" \0"))], &["- some/where/f"]);
}

#[test]
fn long_names_of_gnu() {
    let long = "n".repeat(200);
    let name = member(b"././@LongLink", b'L', format!("d/{long}\0").as_bytes());
    let link = member(b"././@LongLink", b'K', format!("{long}/../t\0").as_bytes());
    let expected = format!("- d/{long} \"x\"");
    check(&[name.clone(), file("d/nnn", "x")], &[&expected]);
    let expected = format!("l d/{long} -> {long}/../t");
    let symlink = Header::new(b"d/nnn", b'2').link(b"nnn").block();
    check(&[link.clone(), name.clone(), symlink.clone()], &[&expected]);
    check(&[name.clone(), link, symlink], &[&expected]);
    // A long name applies to one entry, and takes precedence over pax.
    let pax = pax(&[("path", "other")]);
    let expected = format!("- d/{long}");
    check(&[pax, name, file("nnn", ""), file("f", "")], &[&expected, "- f"]);
    // A long name without a final NUL.
    check(&[member(b"././@LongLink", b'L', b"abc"), file("f", "x")], &["- abc \"x\""]);
}

#[test]
fn pax_records() {
    let one = |records: &[(&str, &str)]| pax(records);
    let all = [
        ("path", "./x/ü"),
        ("uid", "3000000"),
        ("gid", "4294967294"),
        ("mtime", "-1.25"),
        ("atime", "1"),
        ("hdrcharset", "BINARY"),
        ("SCHILY.xattr.user.a", "b"),
        ("VENDOR.key", "a=b"),
    ];
    let expected = "- x/\\xc3\\xbc 3000000:4294967294 -2.750000000 \"x\" user.a=b";
    check(&[one(&all), file("f", "x"), file("g", "")], &[expected, "- g"]);
    // In one header, the last of equal keys applies. If there are two headers, only the last applies.
    check(&[one(&[("uid", "1"), ("uid", "2")]), file("f", "")], &["- f 2:0"]);
    check(&[one(&[("uid", "1")]), one(&[("gid", "2")]), file("f", "")], &["- f 0:2"]);
    // An empty value means that the key is not set, but an xattr may be empty.
    let empty = [("uid", ""), ("path", ""), ("SCHILY.xattr.user.a", "")];
    check(&[one(&empty), file("f", "")], &["- f user.a="]);
    let name = [(&b"path"[..], &b"\xff\n=\x01"[..])];
    check(&[extended(b'x', &name), file("f", "")], &["- \\xff\\n=\\x01"]);
    check(&[one(&[]), file("f", "")], &["- f"]);
    let link = Header::new(b"l", b'2').link(b"short").block();
    check(&[one(&[("linkpath", "long")]), link], &["l l -> long"]);
    let device = Header::new(b"c", b'3').block();
    let numbers = [("SCHILY.devmajor", "4095"), ("SCHILY.devminor", "1048575")];
    check(&[one(&numbers), device], &["c c device 0xffffffff"]);
    // Solaris uses another type letter.
    check(&[extended(b'X', &[(b"uid", b"5")]), file("f", "")], &["- f 5:0"]);
}

#[test]
fn pax_size_counts() {
    let header = Header::new(b"f", b'0').size(3).block();
    let parts = [pax(&[("size", "5")]), header, padded(b"hello"), file("g", "")];
    check(&parts, &["- f \"hello\"", "- g"]);
}

#[test]
fn global_records() {
    let global =
        extended(b'g', &[(b"uid", b"7"), (b"mtime", b"3"), (b"SCHILY.xattr.user.a", b"1")]);
    let second = extended(b'g', &[(b"uid", b"8"), (b"comment", b"0123")]);
    let local = pax(&[("mtime", ""), ("gid", "9"), ("SCHILY.xattr.user.a", "2")]);
    check(
        &[global, file("f", ""), second, local, file("g", ""), file("h", "")],
        &["- f 7:0 3.000000000 user.a=1", "- g 8:9 user.a=2", "- h 8:0 3.000000000 user.a=1"],
    );
}

#[test]
fn acls() {
    let acl = "user::rw-,user:joe:rw-:1001,group::r--,mask::rw-,other::r--";
    let expected = "- f system.posix_acl_access=\\x02\\x00\\x00\\x00\
        \\x01\\x00\\x06\\x00\\xff\\xff\\xff\\xff\\x02\\x00\\x06\\x00\\xe9\\x03\\x00\\x00\
        \\x04\\x00\\x04\\x00\\xff\\xff\\xff\\xff\\x10\\x00\\x06\\x00\\xff\\xff\\xff\\xff\
        \x20\\x00\\x04\\x00\\xff\\xff\\xff\\xff";
    check(&[pax(&[("SCHILY.acl.access", acl)]), file("f", "")], &[expected]);
}

/// GNU tar writes names without numbers. Go's reader, and so containerd, Docker and podman, ignores all ACL records.
#[test]
fn acls_by_name() {
    let read = |acl: &str| {
        let tar =
            [pax(&[("SCHILY.acl.access", acl)]), file("f", ""), file("g", ""), end()].concat();
        let mut reader = Reader::new(&tar[..]);
        let mut found = Vec::new();
        while let Some(entry) = reader.next_entry().unwrap() {
            let lost = entry.lost_acl.map(|line| String::from_utf8(line.to_vec()).unwrap());
            found.push((entry.xattrs.len(), lost));
        }
        found
    };
    let rest = "group::r--,mask::rw-,other::r--";
    let none = (0, None);
    let lost = |line: &str| (0, Some(line.to_owned()));
    assert_eq!(
        read(&format!("user::rw-,user:lisa:rw-,{rest}")),
        [lost("user:lisa:rw-"), none.clone()]
    );
    assert_eq!(
        read(&format!("user::rw-,group:users:rw-,{rest}")),
        [lost("group:users:rw-"), none.clone()]
    );
    // GNU tar writes the id in place of the name if the user has no name.
    assert_eq!(read(&format!("user::rw-,user:4242:r--,{rest}")), [(1, None), none.clone()]);
    assert_eq!(read(&format!("user::rw-,user:lisa:rw-:1001,{rest}")), [(1, None), none]);
}

#[test]
fn xattrs_that_are_not_wanted_may_be_anything() {
    let records = [
        ("SCHILY.acl.access", "user::rwx,group:rwx"),
        ("SCHILY.acl.default", "user:lisa:rw-"),
        ("LIBARCHIVE.xattr.security.ima", "no base 64"),
        ("SCHILY.xattr.user.a", "1"),
    ];
    let tar = [pax(&records), file("f", ""), end()].concat();
    for (wanted, count) in [(XattrRecords::UserOnly, 1), (XattrRecords::None, 0)] {
        let mut reader = Reader::new(&tar[..]).taking(wanted);
        let entry = reader.next_entry().unwrap().unwrap();
        assert_eq!((entry.xattrs.len(), entry.lost_acl), (count, None), "{wanted:?}");
    }
    assert!(Reader::new(&tar[..]).next_entry().is_err());
}

#[test]
fn hard_links_with_a_size() {
    let link = |size| Header::new(b"l", b'1').link(b"f").size(size).block();
    // The entry has only a size, as in POSIX of 1988. It is before another header, or before the end.
    check(&[link(5), file("g", "")], &["h l -> f", "- g"]);
    check(&[link(5)], &["h l -> f"]);
    check_tar(&link(5), &["h l -> f"]);
    // A size and the file's content, as POSIX of 2001 allows.
    check(&[link(5), padded(b"hello"), file("g", "")], &["h l -> f", "- g"]);
    check(&[link(600), padded(&[b'x'; 600])], &["h l -> f"]);
}

#[test]
fn types_without_content_state_sizes() {
    for (typeflag, expected) in [(b'2', "l f -> t"), (b'5', "d f"), (b'6', "p f"), (b'3', "c f")] {
        let header = Header::new(b"f", typeflag).link(b"t").size(700).block();
        check(&[header, file("g", "x")], &[expected, "- g \"x\""]);
    }
}

#[test]
fn signed_checksums() {
    check(&[Header::new(b"\xff\xfe", b'0').signed_block()], &["- \\xff\\xfe"]);
}

#[test]
fn ends() {
    let two = [file("f", "hello"), file("g", "x")].concat();
    let expected = ["- f \"hello\"", "- g \"x\""];
    check_tar(&[], &[]);
    check_tar(&end(), &[]);
    check_tar(&two, &expected);
    // The end has one block, less than one block, or a record of 10 KiB; or it is followed by text or another tar.
    check_tar(&[&two[..], &[0; 512]].concat(), &expected);
    check_tar(&[&two[..], &[0; 600]].concat(), &expected);
    check_tar(&[&two[..], &[0; 10240]].concat(), &expected);
    check_tar(&[&two[..], &[0; 10241]].concat(), &expected);
    check_tar(&[&two[..], &end(), b"garbage"].concat(), &expected);
    check_tar(&[&two[..], &end(), &two[..], &end()].concat(), &expected);
    // The last padding is cut short, or missing.
    check_tar(&two[..two.len() - 100], &expected);
    check_tar(&two[..two.len() - 511], &expected);
    // The padding is not zero.
    let mut odd = two.clone();
    odd[512 + 5..1024].fill(0xaa);
    check_tar(&[&odd[..], &end()].concat(), &expected);
}

/// Checks a sparse file of 3000 bytes: `parts` contain the map, and precede 600 bytes of data. 88 of these bytes are
/// at offset 512 of the file, and 512 at offset 2048.
fn check_sparse(parts: &[Vec<u8>]) {
    let data: Vec<u8> = (0..600_u32).map(|number| u8::try_from(number % 251).unwrap()).collect();
    let mut content = vec![0; 3000];
    content[512..600].copy_from_slice(&data[..88]);
    content[2048..2560].copy_from_slice(&data[88..]);
    let tar = [parts.concat(), padded(&data), file("g", "x"), end()].concat();
    let records = read(&tar).unwrap();
    assert_eq!(records.len(), 2);
    assert_eq!(records[0].path, b"s");
    assert!(records[0].content == content);
    assert_eq!(records[1].short(), "- g \"x\"");
}

fn old_gnu(regions: &[(u64, u64)], real: u64) -> Header {
    let mut header = Header::new(b"s", b'S').gnu();
    for (number, (offset, length)) in regions.iter().enumerate() {
        header.put(386 + 24 * number, format!("{offset:011o}\0{length:011o}\0").as_bytes());
    }
    header.with(483, format!("{real:011o}\0").as_bytes())
}

#[test]
fn sparse_files() {
    let plain = |size| Header::new(b"GNUSparseFile.1/s", b'0').size(size).block();
    // The old format has a map in the header with GNU's mark of the end, or a map that continues in further blocks.
    check_sparse(&[old_gnu(&[(512, 88), (2048, 512), (3000, 0)], 3000).size(600).block()]);
    let mut more = [0; 512];
    more[..24].copy_from_slice(format!("{:011o}\0{:011o}\0", 2048, 512).as_bytes());
    more[504] = 1;
    let header = old_gnu(&[(512, 88)], 3000).size(600).with(482, b"\x01").block();
    check_sparse(&[header, more.to_vec(), vec![0; 512]]);
    // The pax formats 0.0, 0.1 and 1.0.
    let zero = pax(&[
        ("GNU.sparse.size", "3000"),
        ("GNU.sparse.numblocks", "2"),
        ("GNU.sparse.offset", "512"),
        ("GNU.sparse.numbytes", "88"),
        ("GNU.sparse.offset", "2048"),
        ("GNU.sparse.numbytes", "512"),
        ("path", "s"),
    ]);
    check_sparse(&[zero, plain(600)]);
    let one = pax(&[
        ("GNU.sparse.major", "0"),
        ("GNU.sparse.minor", "1"),
        ("GNU.sparse.name", "s"),
        ("GNU.sparse.size", "3000"),
        ("GNU.sparse.numblocks", "2"),
        ("GNU.sparse.map", "512,88,2048,512"),
    ]);
    check_sparse(&[one, plain(600)]);
    let ten = pax(&[
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "s"),
        ("GNU.sparse.realsize", "3000"),
    ]);
    let map = padded(b"2\n512\n88\n2048\n512\n");
    check_sparse(&[ten, plain(512 + 600), map]);
}

/// A file of 8 EiB takes no resources unless its content is read.
#[test]
fn absurd_sparse_size() {
    let size = i64::MAX.to_string();
    let header =
        pax(&[("GNU.sparse.size", &size), ("GNU.sparse.numblocks", "0"), ("GNU.sparse.map", "")]);
    let tar = [header, file("s", ""), end()].concat();
    let mut reader = image::tar::Reader::new(&tar[..]);
    let entry = reader.next_entry().unwrap().unwrap();
    assert_eq!((entry.size, entry.segments), (i64::MAX.cast_unsigned(), &[][..]));
    assert!(reader.next_entry().unwrap().is_none());
}

/// Sources may return pieces of any size.
#[test]
fn slow_sources() {
    struct Slow<'a>(&'a [u8], usize);
    impl std::io::Read for Slow<'_> {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.1 += 1;
            if self.1.is_multiple_of(3) {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            let count = into.len().min(self.0.len()).min(self.1 % 701 + 1);
            into[..count].copy_from_slice(&self.0[..count]);
            self.0 = &self.0[count..];
            Ok(count)
        }
    }
    let long = "n".repeat(70_000);
    let mut tar = Vec::new();
    for number in 0..300_usize {
        tar.extend(pax(&[("path", &format!("{number}")), ("comment", &long[..number * 200])]));
        tar.extend(file("f", &long[..number * 7]));
    }
    tar.extend(vec![0; 300_000]);
    let fast = super::describe::take_apart(&tar[..], &tar).unwrap();
    let slow = super::describe::take_apart(Slow(&tar, 0), &tar).unwrap();
    assert_eq!(fast.0.len(), 300);
    assert!(fast == slow, "the source's pieces make a difference");
}
