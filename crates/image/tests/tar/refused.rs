//! Tests which tars are refused, and the reasons that the errors state.

use image::tar::{NameError, Reader, TarCorruption, TarError};

use super::build::{Header, end, extended, file, member, padded, pax};
use super::describe::read;

#[track_caller]
fn check(parts: &[Vec<u8>], expected: &str) {
    check_tar(&[parts.concat(), end()].concat(), expected);
}

#[track_caller]
fn check_tar(tar: &[u8], expected: &str) {
    let error = read(tar).unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
}

#[test]
fn truncated() {
    let tar = [file("f", ""), file("g", &"x".repeat(1000))].concat();
    check_tar(&tar[..511], "corrupt at byte 0, entry \"\": the stream ends 1 bytes early");
    check_tar(&tar[..600], "corrupt at byte 512, entry \"\": the stream ends 424 bytes early");
    check_tar(
        &tar[..1024 + 999],
        "corrupt at byte 2023, entry \"g\": the stream ends 1 bytes early",
    );
    let long = member(b"././@LongLink", b'L', b"name");
    check_tar(&long[..514], "entry \"././@LongLink\": the stream ends 2 bytes early");
    let records = pax(&[("path", "g")]);
    check_tar(&records[..514], "entry \"PaxHeaders/x\": the stream ends 7 bytes early");
    let unknown = member(b"f", b'D', &[1; 1000]);
    check_tar(&unknown[..600], "entry \"f\": the stream ends 912 bytes early");
    let sparse = Header::new(b"s", b'S').gnu().with(482, b"\x01").block();
    check_tar(&sparse, "entry \"s\": the stream ends 512 bytes early");
    let link = Header::new(b"l", b'1').link(b"f").size(600).block();
    check_tar(&[link, b"hello".to_vec()].concat(), "entry \"l\": the stream ends 595 bytes early");
}

#[test]
fn checksums() {
    let mut tar = [file("f", ""), file("g", "")].concat();
    tar[512] = b'h';
    check_tar(&tar, "corrupt at byte 512, entry \"\": the header's checksum is ");
    tar[512 + 148..512 + 156].copy_from_slice(b"zzzzzz\0 ");
    check_tar(&tar, "but it states \"zzzzzz\\x00 \"");
    check_tar(&[7; 512], "checksum");
}

#[test]
fn ends() {
    let zeros = vec![0; 512];
    check(
        &[file("f", ""), zeros.clone(), file("g", "")],
        "at byte 512, entry \"\": a single block",
    );
    check_tar(&[zeros, vec![1]].concat(), "a single block of zeros");
    check(&[pax(&[("uid", "1")])], "between an extended header and its entry");
    check_tar(&pax(&[("uid", "1")]), "between an extended header and its entry");
    check(&[member(b"././@LongLink", b'L', b"name")], "between an extended header");
    check(&[member(b"././@LongLink", b'K', b"name")], "between an extended header");
}

#[test]
fn numbers() {
    let header = |at, bytes: &[u8]| Header::new(b"f", b'0').with(at, bytes).block();
    check(
        &[header(100, b"000644x\0")],
        "entry \"f\": field mode has the invalid value \"000644x\\x00\"",
    );
    check(&[header(108, b"00000-1\0")], "field uid has the invalid value");
    check(&[header(108, b"\xff\xff\xff\xff\xff\xff\xff\xfe")], "field uid has the invalid value");
    check(&[header(116, b"\x80\0\0\x01\0\0\0\0")], "field gid has the invalid value");
    // Linux has no user with this id, because -1 means "unchanged" in chown(2).
    check(&[header(108, b"\x80\0\0\0\xff\xff\xff\xff")], "field uid has the invalid value");
    check(&[header(116, b"\x80\0\0\0\xff\xff\xff\xff")], "field gid has the invalid value");
    for key in ["uid", "gid"] {
        let wrong = pax(&[(key, "4294967295")]);
        check(&[wrong, file("f", "")], &format!("extended header {key}=4294967295 is invalid"));
    }
    check(&[header(124, b"00000000009\0")], "field size has the invalid value");
    check(
        &[header(124, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")],
        "field size has the invalid value",
    );
    check(&[header(124, b"\x80\0\0\0\x80\0\0\0\0\0\0\0")], "field size has the invalid value");
    check(&[header(136, b"\x80\x01\0\0\0\0\0\0\0\0\0\0")], "field mtime has the invalid value");
    let device = |at, bytes: &[u8]| Header::new(b"c", b'3').with(at, bytes).block();
    check(&[device(329, b"0010000\0")], "field devmajor has the invalid value");
    check(&[device(337, b"4000000\0")], "field devminor has the invalid value");
    check(
        &[pax(&[("SCHILY.devmajor", "4096")]), device(0, b"c")],
        "field devmajor has the invalid value",
    );
}

#[test]
fn names() {
    check(
        &[file("../etc/passwd", "")],
        "entry \"../etc/passwd\" has an invalid name: it contains \"..\"",
    );
    check(&[file("a/../b", "")], "it contains \"..\"");
    check(&[Header::new(b"l", b'1').link(b"../f").block()], "entry \"../f\" has an invalid name");
    check(&[pax(&[("path", &"n".repeat(256))]), file("f", "")], "256 bytes, more than 255");
    check(&[file("./", "")], "it is the root");
    check(&[Header::new(b"", b'2').link(b"/").block()], "it is the root");
    check(&[Header::new(b"l", b'1').block()], "entry \"l\": the link has no target");
    check(&[Header::new(b"l", b'2').block()], "entry \"l\": the link has no target");
}

#[test]
fn extended_headers() {
    check(
        &[extended(b'x', &[(b"path", b"a\0b")]), file("f", "")],
        "the extended header path=a\\x00b",
    );
    check(
        &[member(b"x", b'x', b"9 path=a"), file("f", "")],
        "entry \"f\": the extended header's record at byte 0",
    );
    check(&[extended(b'g', &[(b"mtime", b"soon")])], "the extended header mtime=soon is invalid");
    let acl = pax(&[("SCHILY.acl.access", "user::rwx,group:rwx")]);
    check(&[acl, file("f", "")], "the ACL has \"group:rwx\": it has no permissions");
    // setxattr(2) refuses these values. In an image, they would deny access to the file to all users except the owner.
    let short = "the ACL has \"\\x02\": it is shorter than an ACL's version";
    let version = "the ACL has \"\\x01\\x00\\x00\\x00\": its version is not 2";
    for (key, value, expected) in [
        ("SCHILY.xattr.system.posix_acl_access", "\x02", short),
        ("SCHILY.xattr.system.posix_acl_default", "\x01\0\0\0", version),
        ("LIBARCHIVE.xattr.system.posix_acl_access", "AQAAAA", version),
        ("LIBARCHIVE.xattr.system.posix%5facl_access", "Ag", short),
    ] {
        check(&[pax(&[(key, value)]), file("f", "")], &format!("entry \"f\": {expected}"));
    }
}

/// Python names all extended headers `././@PaxHeader`.
#[test]
fn extended_headers_belong_to_entries() {
    let python = |records: &[u8]| member(b"././@PaxHeader", b'x', records);
    let wrong = b"8 uid=x\n";
    check(
        &[python(wrong), file("f", "")],
        "corrupt at byte 0, entry \"f\": the extended header uid=x",
    );
    let prefix = Header::new(b"f", b'0').with(345, b"usr/bin").block();
    check(&[python(wrong), prefix], "entry \"usr/bin/f\": the extended header uid=x");
    let path = [b"10 path=g\n", &wrong[..]].concat();
    check(&[python(&path), file("f", "")], "entry \"g\": the extended header uid=x");
    let long = member(b"././@LongLink", b'L', b"long");
    check(
        &[long.clone(), python(wrong), file("f", "")],
        "entry \"long\": the extended header uid=x",
    );
    check(&[python(wrong), long, file("f", "")], "entry \"././@PaxHeader\": the extended header");
    check_tar(&python(wrong), "at byte 0, entry \"././@PaxHeader\": the extended header uid=x");
    check_tar(&[python(wrong), vec![7; 512]].concat(), "entry \"././@PaxHeader\": the extended");
    let value = "v".repeat(65536);
    let large = extended(b'x', &[(b"SCHILY.xattr.user.a", value.as_bytes())]);
    check(&[large, file("f", "")], "entry \"f\" has an xattr value of 65536 bytes");
}

#[test]
fn limits() {
    let long = vec![b'n'; (1 << 20) + 1];
    let extension = |typeflag| Header::new(b"e", typeflag).size(long.len()).block();
    check(
        &[extension(b'x')],
        "entry \"e\" has an extended header of 1048577 bytes at byte 0 of the tar, more than 1 MiB",
    );
    check(
        &[file("f", "x"), extension(b'L')],
        "a long name of 1048577 bytes at byte 1024 of the tar",
    );
    check(&[extension(b'K')], "entry \"e\" has a long link target of 1048577 bytes");
    let global = extended(b'g', &[(b"comment", &long[..10_000])]);
    check(
        &[global.clone(), global],
        "entry \"PaxHeaders/x\" has global extended headers of 20030 bytes, more than 16 KiB",
    );
    let value = "v".repeat(65536);
    let xattr = pax(&[("SCHILY.xattr.user.a", &value)]);
    check(&[xattr, file("f", "")], "has an xattr value of 65536 bytes, more than 65535");
    let xattr = pax(&[(&format!("SCHILY.xattr.{}", &value[..256]), "")]);
    check(&[xattr, file("f", "")], "has an xattr name of 256 bytes, more than 255");
    let names: Vec<String> =
        (0..257).map(|number| format!("SCHILY.xattr.{number:05}{}", &value[..250])).collect();
    let xattrs: Vec<_> = names.iter().map(|name| (&name[..], "")).collect();
    check(
        &[pax(&xattrs), file("f", "")],
        "entry \"f\" has 65792 bytes of xattr names, more than 65536",
    );
    let map = format!("0{}", ",0".repeat(2 * 65537 - 1));
    let sparse = pax(&[("GNU.sparse.map", &map)]);
    check(&[sparse, file("f", "")], "has a sparse map of 65537 regions, more than 65536");
    // 2049 blocks of the old map, all without a region.
    let mut block = [0; 512];
    block[504] = 1;
    let header = Header::new(b"s", b'S').gnu().with(482, b"\x01").block();
    check(
        &[header, block.repeat(2049)],
        "entry \"s\" has a sparse map of 1049088 bytes at byte 0 of the tar, more than 1 MiB",
    );
}

#[test]
fn sparse_maps() {
    let sparse = |records: &[(&str, &str)]| [pax(records), file("s", "hello")].concat();
    let wrong = "entry \"s\": the sparse map ";
    check(
        &[sparse(&[("GNU.sparse.map", "0,5"), ("GNU.sparse.numblocks", "1")])],
        &format!("{wrong}comes without the file's size"),
    );
    let size = ("GNU.sparse.size", "10");
    let one = ("GNU.sparse.numblocks", "1");
    check(
        &[sparse(&[size, ("GNU.sparse.numblocks", "2"), ("GNU.sparse.map", "0,5")])],
        &format!("{wrong}does not have the stated number of regions: 1 and 2"),
    );
    check(
        &[sparse(&[size, one, ("GNU.sparse.map", "0,4")])],
        &format!("{wrong}has regions that do not add up to the data: 4 and 5"),
    );
    check(
        &[sparse(&[size, one, ("GNU.sparse.map", "6,5")])],
        &format!("{wrong}has data after the end of the file: 6 and 10"),
    );
    check(
        &[sparse(&[size, one, ("GNU.sparse.map", "0,5,6")])],
        &format!("{wrong}has an offset without a length: 6 and 1"),
    );
    let version = [("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), size];
    check(
        &[sparse(&version)],
        &format!("{wrong}is longer than the data that contains it: 512 and 5"),
    );
    let header = Header::new(b"s", b'0').size(512).block();
    check(
        &[pax(&version), header.clone(), padded(b"1\nx\n")],
        &format!("{wrong}has a value that is not a number, after this many regions: 120 and 0"),
    );
    check(&[pax(&version), header, padded(b"65537\n")], "a sparse map of 65537 regions");
    check(
        &[pax(&[size, one, ("GNU.sparse.map", "0,5")]), member(b"d", b'5', b"")],
        "entry \"d\": a file of type '5' cannot have a sparse map",
    );
    let old = Header::new(b"s", b'S').gnu().with(386, b"0000000000x\0").with(483, b"00000000012\0");
    check(&[old.block()], "entry \"s\": field offset has the invalid value");
    let old = Header::new(b"s", b'S').gnu().with(483, b"0000000001x\0");
    check(&[old.block()], "entry \"s\": field realsize has the invalid value");
}

/// Checks that the error states the entry's name and its type, and that the reader continues with a file `next`.
#[track_caller]
fn check_unsupported(parts: &[Vec<u8>], expected: &str) {
    let tar = [file("before", "x"), parts.concat(), file("next", "y"), end()].concat();
    let error = read(&tar).unwrap_err().to_string();
    assert_eq!(error, expected);
    let mut reader = Reader::new(&tar[..]);
    assert_eq!(reader.next_entry().unwrap().unwrap().path, b"before");
    assert!(matches!(reader.next_entry(), Err(TarError::Unsupported { .. })));
    let next = reader.next_entry().unwrap().unwrap();
    assert_eq!((next.path, next.metadata.uid), (&b"next"[..], 0));
    assert!(reader.next_entry().unwrap().is_none());
    // Skipped bytes must be in the recipe; `exercise` panics otherwise.
    image::tar::exercise(&tar);
}

#[test]
fn unsupported() {
    let big = vec![b'x'; 1_000_000];
    check_unsupported(
        &[member(b"./run/socket", b's', b"")],
        "entry \"./run/socket\" is of type 's', which is not supported",
    );
    check_unsupported(
        &[pax(&[("uid", "7")]), member(b"m", b'M', &big)],
        "entry \"m\" is of type 'M', which is not supported",
    );
    check_unsupported(
        &[member(b"s", b'S', b"hello")],
        "entry \"s\" is a sparse file in the format of star, which is not supported",
    );
    check_unsupported(
        &[pax(&[("SCHILY.realsize", "100")]), file("s", "hello")],
        "entry \"s\" is a sparse file in the format of star, which is not supported",
    );
    check_unsupported(
        &[pax(&[("SUN.holesdata", " 0 5 ")]), file("s", "hello")],
        "entry \"s\" is a sparse file in the format of Solaris, which is not supported",
    );
    check_unsupported(
        &[pax(&[("GNU.sparse.major", "2"), ("GNU.sparse.minor", "0")]), file("s", "hello")],
        "entry \"s\" is a sparse file in the format of a later GNU tar, which is not supported",
    );
}

/// After any other error, the reader returns neither further events nor the end.
#[test]
fn errors_last() {
    let tar = [file("../f", ""), file("g", ""), end()].concat();
    let mut reader = Reader::new(&tar[..]);
    let error = reader.next_entry().unwrap_err();
    assert!(matches!(error, TarError::Name { reason: NameError::Parent, .. }), "{error}");
    assert!(matches!(reader.next_entry(), Err(TarError::Stopped)));
    assert!(matches!(reader.next_event(), Err(TarError::Stopped)));
}

#[test]
fn failing_sources() {
    #[derive(Debug)]
    struct Failing(usize);
    impl std::io::Read for Failing {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let count = into.len().min(100).min(self.0);
            if count == 0 {
                return Err(std::io::Error::other("the network is gone"));
            }
            self.0 -= count;
            into[..count].fill(0);
            Ok(count)
        }
    }
    let error = Reader::new(Failing(450)).next_entry().unwrap_err();
    assert_eq!(error.to_string(), "cannot read the tar at byte 450");
    let source = std::error::Error::source(&error).unwrap();
    assert_eq!(source.to_string(), "the network is gone");
}

#[test]
fn kinds_carry_their_values() {
    let tar = [file("f", "hello")].concat();
    let error = read(&tar[..515]).unwrap_err();
    let TarError::Corrupt { offset: 515, entry, kind: TarCorruption::Truncated { missing: 2 } } =
        error
    else {
        panic!("{error}")
    };
    assert_eq!(entry, b"f");
}
