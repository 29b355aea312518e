//! Tests exports of a root file system as one tar.

use std::fs;
use std::os::unix::net::UnixListener;

use super::{Home, chain, damage};
use crate::build::Tar;
use quire_transfer::export::{ExportError, TarReport, to_tar};
use quire_transfer::import::{Report, Unsupported};
use testing::trees::{rich_tree, run};

fn flat(
    home: &Home,
    image: &Report,
    unsupported: Unsupported,
) -> Result<(Vec<u8>, TarReport), ExportError> {
    let mut bytes = Vec::new();
    let report = to_tar(&home.store, &image.image, &mut bytes, unsupported, &home.options())?;
    assert_eq!(report.bytes, bytes.len() as u64);
    Ok((bytes, report))
}

#[test]
fn a_flat_tar_is_the_same_image() {
    let home = Home::new();
    let root = home.path("root");
    let missing = rich_tree(&root);
    let image = home.import_path("dir", &root);
    let (bytes, report) = flat(&home, &image, Unsupported::Refuse).unwrap();
    assert_eq!(flat(&home, &image, Unsupported::Refuse).unwrap().0, bytes);
    // One inode has three names.
    assert_eq!(report.entries, image.inodes as u64 + 2);
    let path = home.path("flat.tar");
    fs::write(&path, bytes).unwrap();
    assert_eq!(Home::new().import_path("tar", &path).image, image.image);

    // GNU tar and libarchive unpack the same tree. libarchive (3.6.2) has three exceptions: the time of the directory
    // that it unpacks into, fractions of seconds before 1970, and escapes in names of xattrs.
    for (program, arguments, own_mind) in [
        (
            "tar",
            &["--numeric-owner", "--xattrs", "--xattrs-include=*", "--acls", "-xpf"][..],
            &[][..],
        ),
        (
            "bsdtar",
            &["--numeric-owner", "--xattrs", "--acls", "-xpf"],
            &["/", "/usr/lib/1", "/usr/lib/64"],
        ),
    ] {
        let to = home.path(program);
        fs::create_dir(&to).unwrap();
        let arguments = [arguments, &[path.to_str().unwrap()]].concat();
        if !missing.is_empty() || !run(program, &arguments, &to) {
            testing::skipped(&format!("unpacking a flat tar by {program}"));
            continue;
        }
        let unpacked = home.import_path("dir", &to).image;
        let [was, is] = [&image.image, &unpacked].map(|id| home.tree(id));
        image::diff::diff(&was, &is, |it| {
            let path = it.path.escape_ascii().to_string();
            assert!(own_mind.contains(&&*path), "{program}: {path} {:?}", it.change);
        });
        if own_mind.is_empty() {
            assert_eq!(unpacked, image.image, "{program} unpacked something else");
        }
    }
}

#[test]
fn whiteouts_and_layers_are_gone_in_it() {
    let home = Home::new();
    let path = home.path("a.tar");
    let long = vec![5; 1000];
    let tar = Tar::from_text("d d,f d/a 1,w d/.wh.gone,l z d/a").file("d/long", &long).bytes();
    fs::write(&path, tar).unwrap();
    let image = home.import_path("tar", &path);
    let (bytes, _) = flat(&home, &image, Unsupported::Refuse).unwrap();
    assert!(!bytes.windows(4).any(|it| it == b".wh."));
    fs::write(&path, bytes).unwrap();
    assert_eq!(home.import_path("tar", &path).image, image.image);
}

#[test]
fn what_no_tar_holds_is_named() {
    let home = Home::new();
    let root = home.path("root");
    fs::create_dir_all(root.join("d/.wh.x/y")).unwrap();
    fs::write(root.join("d/.wh.x/y/z"), "z").unwrap();
    fs::write(root.join("d/.wh.xx"), "z").unwrap();
    let image = home.import_path("dir", &root);
    let error = flat(&home, &image, Unsupported::Refuse).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a tar cannot contain \"d/.wh.x\": its name would hide another file"
    );
    let skipped = flat(&home, &image, Unsupported::Skip).unwrap().1.skipped;
    assert_eq!(skipped, [&b"d/.wh.x"[..], b"d/.wh.xx"]);

    let root = home.path("other");
    fs::create_dir(&root).unwrap();
    drop(UnixListener::bind(root.join("socket")).unwrap());
    let image = home.import_path("dir", &root);
    let error = flat(&home, &image, Unsupported::Refuse).unwrap_err();
    assert_eq!(error.to_string(), "a tar cannot contain \"socket\": it is a socket");
    assert_eq!(flat(&home, &image, Unsupported::Skip).unwrap().1.entries, 1);
}

#[test]
fn damage_is_an_error() {
    let home = Home::new();
    let path = home.path("a.tar");
    fs::write(&path, Tar::default().file("a", &vec![1; 3_000_000]).bytes()).unwrap();
    let image = home.import_path("tar", &path);
    let failed = || {
        let error = flat(&home, &image, Unsupported::Refuse).unwrap_err();
        assert!(error.is_damage(), "{}", chain(&error));
        chain(&error)
    };
    let object = home.objects()[0].clone();
    let sound = fs::read(&object).unwrap();
    damage(&object);
    assert!(failed().contains("is damaged: its digest is"), "{}", failed());
    fs::write(&object, [&sound[..], b"x"].concat()).unwrap();
    assert!(failed().contains("its length is 3000001 bytes, not 3000000"), "{}", failed());
    fs::write(&object, &sound[1..]).unwrap();
    assert!(failed().contains("its length is 2999999 bytes, not 3000000"), "{}", failed());
    fs::remove_file(&object).unwrap();
    assert!(failed().contains("not in the store"), "{}", failed());
    fs::write(&object, &sound).unwrap();
    flat(&home, &image, Unsupported::Refuse).unwrap();
    damage(&home.path("store/images").join(image.image.to_string()));
    assert!(failed().contains(&image.image.to_string()), "{}", failed());
}
