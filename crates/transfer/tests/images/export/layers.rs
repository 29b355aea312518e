//! Tests that the tar of a layer is rebuilt byte for byte, regardless of its writer, or not at all.

use std::fs;

use super::{Home, all, chain, damage};
use crate::build::Tar;
use testing::trees::{rich_tree, run};

/// Imports a tar, and compares it with the rebuilt one.
#[track_caller]
fn check(home: &Home, writer: &str, bytes: &[u8]) {
    let path = home.path("check.tar");
    fs::write(&path, bytes).unwrap();
    let report = home.import_path("tar", &path);
    let tar = home.store.layer_tar(&report.layers[0].diff_id).unwrap();
    assert_eq!(tar.size(), bytes.len() as u64, "{writer}");
    assert!(all(tar) == bytes, "{writer}: another tar came back");
}

#[test]
fn tars_of_every_writer_come_back() {
    let home = Home::new();
    let root = home.path("root");
    rich_tree(&root);
    let out = home.path("out.tar");
    let file = out.to_str().unwrap();
    let python = |format: &str| {
        format!(
            "import tarfile\nwith tarfile.open('{file}', 'w', format=tarfile.{format}) as t: t.add('.')"
        )
    };
    let (gnu, pax) = (python("GNU_FORMAT"), python("PAX_FORMAT"));
    let writers: [(&str, &[&str]); 9] = [
        ("tar", &["--format=gnu", "-cf", file, "."]),
        ("tar", &["--format=gnu", "-S", "-b", "7", "-cf", file, "."]),
        ("tar", &["--format=posix", "--xattrs", "--acls", "-S", "-cf", file, "."]),
        ("tar", &["--format=posix", "--sparse-version=0.1", "-S", "-cf", file, "."]),
        ("tar", &["--format=v7", "-cf", file, "usr/lib/513", "usr/lib/1048579", "a"]),
        ("bsdtar", &["--format=pax", "-cf", file, "."]),
        ("bsdtar", &["--format=gnutar", "-cf", file, "."]),
        ("python3", &["-c", &gnu]),
        ("python3", &["-c", &pax]),
    ];
    for (program, arguments) in writers {
        if run(program, arguments, &root) {
            check(&home, &format!("{program} {arguments:?}"), &fs::read(&out).unwrap());
        } else {
            testing::skipped(&format!("a tar by {program} {arguments:?}"));
        }
    }
}

#[test]
fn odd_tars_come_back() {
    let home = Home::new();
    let content = vec![b'x'; 1000];
    // These extended headers have only the required records, as Go writes them.
    let mut go = Tar::default();
    go.pax(&[("path", "a/long/\u{fc}"), ("mtime", "1.000000001"), ("SCHILY.xattr.user.a", "b")]);
    go.entry("a/long", b'0', "", &content);
    check(&home, "Go", &go.bytes());
    // There are bytes after the end marker, including the very last byte, and an end marker of only one block.
    let tar = Tar::from_text("d a,f a/b short,l a/c a/b").file("a/d", &content);
    check(&home, "trailing bytes", &[tar.bytes(), vec![0; 9000], b"rubbish".to_vec()].concat());
    let bytes = tar.bytes();
    check(&home, "one block of zeros", &bytes[..bytes.len() - 512]);
    check(
        &home,
        "the same file twice",
        &tar.clone().file("a/e", &content).file("a/d", &content).bytes(),
    );
    check(&home, "nothing", &Tar::default().bytes());
}

#[test]
fn damage_is_an_error_and_never_other_bytes() {
    let home = Home::new();
    let content: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    let bytes = Tar::default().file("a", &content).file("b", &[1; 100]).bytes();
    let path = home.path("a.tar");
    fs::write(&path, &bytes).unwrap();
    let diff_id = home.import_path("tar", &path).layers[0].diff_id;
    let read = || {
        let mut got = Vec::new();
        let result = home
            .store
            .layer_tar(&diff_id)
            .map_err(std::io::Error::other)
            .and_then(|mut tar| std::io::Read::read_to_end(&mut tar, &mut got));
        result.map(|_| got).map_err(|error| chain(&error))
    };
    assert!(read().is_ok_and(|it| it == bytes));
    let object = home.objects()[0].clone();
    let sound = fs::read(&object).unwrap();
    damage(&object);
    assert!(read().is_err_and(|it| it.contains("the bytes have the digest")));
    fs::write(&object, &sound[..sound.len() - 1]).unwrap();
    assert!(read().is_err_and(|it| it.contains("cannot read object")));
    fs::remove_file(&object).unwrap();
    assert!(read().is_err_and(|it| it.contains("not in the store")));
    fs::write(&object, &sound).unwrap();
    assert!(read().is_ok());
    let layer = fs::read_dir(home.path("store/layers")).unwrap().next().unwrap().unwrap().path();
    damage(&layer);
    assert!(read().is_err_and(|it| it.contains("damaged")));
    fs::remove_file(&layer).unwrap();
    assert!(read().is_err_and(|it| it.contains("the store has no layer")));
}
