//! Tests that this reader, GNU tar, libarchive and Python read a written tar unchanged.

use std::fs;
use std::process::Command;

use image::tar::write::{Member, TarWriteError, Writer};
use image::tar::{Kind, Reader};
use image::tree::{Metadata, Timestamp};

const PLAIN: Metadata = Metadata {
    permissions: 0o644,
    uid: 0,
    gid: 0,
    mtime: Timestamp { seconds: 1_500_000_000, nanoseconds: 0 },
};

fn member<'a>(path: &'a [u8], kind: Kind<'a>) -> Member<'a> {
    Member { path, kind, metadata: PLAIN, size: 0, xattrs: &[] }
}

fn written(members: &[(Member<'_>, &[u8])]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    for (member, content) in members {
        writer.member(member).unwrap();
        writer.content(content).unwrap();
    }
    writer.finish().unwrap()
}

/// Writes a member without content, and compares all values that the reader returns.
#[track_caller]
fn check(member: &Member<'_>) {
    let tar = written(&[(*member, b"")]);
    assert_eq!(tar.len() % 512, 0);
    let mut reader = Reader::new(&tar[..]);
    let entry = reader.next_entry().unwrap().unwrap();
    assert_eq!(entry.path, member.path);
    assert_eq!(entry.kind, member.kind);
    assert_eq!(entry.metadata, member.metadata);
    assert_eq!(entry.xattrs.collect::<Vec<_>>(), member.xattrs);
    assert!(reader.next_entry().unwrap().is_none());
}

#[test]
fn everything_comes_back() {
    let long = [b'p'; 250];
    let (longer, target) = ([&long[..], b"/", &long].concat(), [b't'; 4095]);
    for path in [&b"a"[..], &[b'n'; 100], &[b'n'; 101], b"a b\n=%", b"\xff\xfe", &longer] {
        check(&member(path, Kind::Regular));
        check(&member(path, Kind::Directory));
        check(&member(path, Kind::Hardlink(b"to")));
        check(&member(b"link", Kind::Hardlink(path)));
        check(&member(b"link", Kind::Symlink(path)));
    }
    check(&member(b"", Kind::Directory));
    check(&member(&[&longer[..], b"\xff"].concat(), Kind::Symlink(&target)));
    check(&member(b"pipe", Kind::Fifo));
    // The smallest and largest major and minor numbers. Source: Linux `linux/kdev_t.h`, `new_encode_dev`.
    for device in [0, 0x103, 0xfff0_00ff, 0xffff_ffff] {
        check(&member(b"device", Kind::CharDevice(device)));
        check(&member(b"device", Kind::BlockDevice(device)));
    }
    // The largest number is not an id, because it means "unchanged" in chown(2).
    for id in [0, 0o7_777_777, 0o10_000_000, u32::MAX - 1] {
        let metadata = Metadata { uid: id, gid: id / 2 + 1, permissions: 0o7777, ..PLAIN };
        check(&Member { metadata, ..member(b"a", Kind::Regular) });
    }
    for (seconds, nanoseconds) in [
        (0, 0),
        (0, 1),
        (-1, 999_999_999),
        (-2, 500_000_000),
        (0o77_777_777_777, 0),
        (0o100_000_000_000, 0),
        (i64::MAX, 999_999_999),
        (i64::MIN, 1),
    ] {
        let metadata = Metadata { mtime: Timestamp { seconds, nanoseconds }, ..PLAIN };
        check(&Member { metadata, ..member(b"a", Kind::Regular) });
    }
    let big = vec![0; 65535];
    let xattrs: [(&[u8], &[u8]); 6] = [
        (b"security.capability", b"\x01\0\0\x02\0\x04\n=\0\0\0\0\0\0\0\0\0\0\0\0"),
        (b"security.selinux", b"u:r:t:s0\0"),
        (b"trusted.overlay.opaque", b"y"),
        (b"user.", b""),
        (b"user.a=b%c%3D", b"v"),
        (b"user.big", &big),
    ];
    check(&Member { xattrs: &xattrs, ..member(b"a", Kind::Regular) });
}

/// Tests ACLs in the kernel's format. Source: Linux `linux/posix_acl_xattr.h`. ACLs that the text form cannot
/// represent are stored unchanged.
#[test]
fn acls_come_back_byte_for_byte() {
    let entry = |tag: u16, bits: u16, id: u32| {
        [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let acl = |entries: &[(u16, u16, u32)]| {
        let entries = entries.iter().flat_map(|(tag, bits, id)| entry(*tag, *bits, *id));
        2_u32.to_le_bytes().into_iter().chain(entries).collect::<Vec<_>>()
    };
    let none = u32::MAX;
    let full =
        acl(&[(1, 6, none), (2, 5, 12345), (4, 4, none), (8, 4, 7), (16, 7, none), (32, 0, none)]);
    let minimal = acl(&[(1, 6, none), (4, 4, none), (32, 4, none)]);
    let twice =
        acl(&[(1, 6, none), (2, 5, 7), (2, 4, 7), (4, 4, none), (16, 7, none), (32, 0, none)]);
    let odd_id = acl(&[(1, 6, 5), (4, 4, none), (16, 7, none), (32, 4, none)]);
    let text = |value: &[u8]| {
        let xattrs: [(&[u8], &[u8]); 1] = [(b"system.posix_acl_access", value)];
        let member = Member { xattrs: &xattrs, ..member(b"a", Kind::Regular) };
        check(&member);
        let tar = written(&[(member, b"")]);
        tar.windows(17).any(|it| it == b"SCHILY.acl.access")
    };
    assert!(text(&full));
    for value in [&minimal[..], &twice, &odd_id, b"", b"\x02\0\0\0"] {
        assert!(!text(value), "{value:?}");
    }
    let xattrs: [(&[u8], &[u8]); 1] = [(b"system.posix_acl_default", &minimal)];
    check(&Member { xattrs: &xattrs, ..member(b"d", Kind::Directory) });
}

#[test]
fn what_no_reader_would_take_is_refused() {
    let refused = |member: &Member<'_>| Writer::new(Vec::new()).member(member).unwrap_err();
    let big = vec![0; 65535];
    let names: Vec<_> = (0..17).map(|it| format!("user.{it}")).collect();
    let xattrs: Vec<_> = names.iter().map(|it| (it.as_bytes(), &big[..])).collect();
    let error = refused(&Member { xattrs: &xattrs, ..member(b"a", Kind::Regular) });
    assert!(matches!(error, TarWriteError::Extension { .. }), "{error}");
    for (seconds, nanoseconds) in [(i64::MIN, 0), (0, 1_000_000_000)] {
        let metadata = Metadata { mtime: Timestamp { seconds, nanoseconds }, ..PLAIN };
        let error = refused(&Member { metadata, ..member(b"a", Kind::Regular) });
        assert!(matches!(error, TarWriteError::Time { .. }), "{error}");
    }
    let error = refused(&member(b"a", Kind::CharDevice(1 << 32)));
    assert!(matches!(error, TarWriteError::Device { .. }), "{error}");

    let mut writer = Writer::new(Vec::new());
    writer.member(&Member { size: 3, ..member(b"a", Kind::Regular) }).unwrap();
    assert!(matches!(writer.content(b"four"), Err(TarWriteError::Length(_))));
    let mut writer = Writer::new(Vec::new());
    writer.member(&Member { size: 3, ..member(b"a", Kind::Regular) }).unwrap();
    writer.content(b"ab").unwrap();
    assert!(matches!(writer.finish(), Err(TarWriteError::Length(_))));
}

/// Three other readers must list the same names, sizes and times.
#[test]
fn others_read_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.tar");
    let long = [&b"d/"[..], &[b'x'; 200]].concat();
    let metadata = Metadata {
        uid: 3_000_000,
        mtime: Timestamp { seconds: 1_600_000_000, nanoseconds: 123_456_789 },
        ..PLAIN
    };
    let tar = written(&[
        (member(b"", Kind::Directory), b""),
        (member(b"d", Kind::Directory), b""),
        (Member { size: 5, metadata, ..member(&long, Kind::Regular) }, b"hello"),
        (member(b"e", Kind::Symlink(&long)), b""),
        (member(b"f", Kind::Hardlink(&long)), b""),
    ]);
    fs::write(&file, tar).unwrap();
    let long = String::from_utf8(long).unwrap();
    let python = "import sys,tarfile\nfor m in tarfile.open(sys.argv[1]):\n print(m.name, m.size, m.uid, m.mtime, m.linkname)";
    let lists: [(&str, &[&str], String); 3] = [
        (
            "tar",
            &["--full-time", "--numeric-owner", "-tvf"],
            format!("3000000/0 5 2020-09-13 12:26:40.123456789 {long}\n"),
        ),
        ("bsdtar", &["-tf"], format!("./\nd/\n{long}\ne\nf\n")),
        ("python3", &["-c", python], format!("{long} 5 3000000 1600000000.1234567 \n")),
    ];
    for (program, arguments, expected) in lists {
        let run = Command::new(program).args(arguments).arg(&file).env("TZ", "UTC").output();
        let Ok(output) = run else {
            testing::skipped(&format!("{program} is not installed"));
            continue;
        };
        let text = String::from_utf8(output.stdout).unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && error.is_empty(), "{program}: {error}");
        // GNU tar aligns its columns.
        let text = if program == "tar" {
            text.lines()
                .map(|it| it.split_whitespace().skip(1).collect::<Vec<_>>().join(" ") + "\n")
                .collect()
        } else {
            text
        };
        assert!(text.contains(&expected), "{program}: {text}");
    }
}
