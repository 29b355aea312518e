//! EROFS images in files, and disks with one: every verb that reads them, and the images that imports make of them.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use serde_json::Value;

use crate::mounting::mounts::Unmount;
use crate::{Place, is_root, write};

/// Makes a tree with all types of files that this user may create, and returns whether it has a whiteout.
fn rich(place: &Place) -> bool {
    let missing = testing::trees::rich_tree(&place.path("tree"));
    !missing.contains(&"whiteouts")
}

fn id(text: &str) -> String {
    text.trim().to_owned()
}

fn import(place: &Place, store: &str, line: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    command.args(["--store", store, "--quiet", "import"]).args(line.split(' '));
    let output = command.current_dir(place.folder.path()).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "import {line}: {err}");
    id(&String::from_utf8(output.stdout).unwrap())
}

/// An export that is imported in the same form gives the same image, in the same store and in an empty one.
#[test]
fn an_export_comes_back_as_the_same_image() {
    let place = Place::new();
    rich(&place);
    let image = import(&place, "store", "--form objects dir:tree a");
    place.out("export --quiet a erofs:a.erofs");
    place.out("export --quiet --platform linux/amd64 a disk:a.disk");
    for (store, source) in
        [("store", "erofs:a.erofs"), ("empty", "erofs:a.erofs"), ("other", "disk:a.disk")]
    {
        assert_eq!(import(&place, store, &format!("--form objects {source} b")), image, "{source}");
    }
    // A character device 0:0 and xattrs of overlayfs cannot be in an image over devices.
    let _removed = std::fs::remove_file(place.path("tree/whiteout"));
    let image = import(&place, "store", "--form packed dir:tree p");
    place.out("export --quiet p erofs:p.erofs");
    assert_eq!(import(&place, "store", "--form packed erofs:p.erofs q"), image);
    assert_eq!(import(&place, "new", "--form packed erofs:p.erofs q"), image);
    // A layer's tar has no image of the form `tar` behind the export, but the same tree.
    place.out("export --quiet p tar:p.tar");
    place.out("import --quiet --form tar tar:p.tar t");
    place.out("export --quiet t erofs:t.erofs");
    place.out("import --quiet erofs:t.erofs u");
    assert_eq!(place.out("diff t u"), "");
}

/// The options for trees count for these images as well.
#[test]
fn options_for_trees() {
    let place = Place::new();
    rich(&place);
    place.out("import --quiet --form objects dir:tree a");
    place.out("export --quiet a erofs:a.erofs");
    for options in ["--skip-xattrs", "--whole-seconds", "--user-xattrs"] {
        let import = |source: &str| place.out(&format!("import --quiet {options} {source}"));
        // A whiteout's directory has xattrs of overlayfs in the image.
        let _removed = std::fs::remove_file(place.path("tree/whiteout"));
        place.out("import --quiet --form objects dir:tree a");
        place.out("export --quiet --force a erofs:a.erofs");
        assert_eq!(import("erofs:a.erofs again"), import("dir:tree again"), "{options}");
    }
}

#[test]
fn every_verb_reads_a_file() {
    let place = Place::new();
    rich(&place);
    let image = import(&place, "store", "--form objects dir:tree stored");
    place.out("export --quiet stored erofs:a.erofs");
    place.out("export --quiet stored disk:a.disk");
    let form = serde_json::from_str::<Value>(&place.out("show --json stored")).unwrap();
    for source in ["erofs:a.erofs", "disk:a.disk", "./a.erofs"] {
        for (verb, path) in
            [("ls -l", ":/usr/lib"), ("ls -R", ""), ("tree -L 2", ":/usr"), ("dump", "")]
        {
            let [ours, theirs] = [source, "stored"]
                .map(|it| place.out(&format!("{verb} {it}{path}")).replace(it, "IMAGE"));
            assert_eq!(ours, theirs, "{verb} {source}{path}");
        }
        for file in ["/usr/lib/70000", "/sparse", "/a-b", "/usr/lib/0"] {
            let bytes = |it: &str| {
                let target = format!("{it}:{file}");
                let output = place.command(&["cat", &target]).output().unwrap();
                assert!(output.status.success(), "{target}");
                output.stdout
            };
            assert!(bytes(source) == bytes("stored"), "{source}:{file}");
        }
        assert_eq!(place.run(&format!("diff stored {source}")).code, Some(0), "{source}");
        let shown: Value =
            serde_json::from_str(&place.out(&format!("show --json {source}"))).unwrap();
        assert_eq!((&shown["image"], &shown["inodes"]), (&image.as_str().into(), &form["inodes"]));
    }
    write(&place.path("tree/usr/lib/65"), b"changed", 0o644);
    place.out("import --quiet dir:tree stored");
    let ran = place.run("diff stored erofs:a.erofs:/usr/lib/65");
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    let ran = place.run("diff stored:/usr/lib/65 erofs:a.erofs:/usr/lib/65");
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    assert!(ran.out.contains("size: 7 -> 65"), "{}", ran.out);
}

/// An image of mkfs.erofs becomes the image that its source becomes.
#[test]
fn images_of_mkfs() {
    let place = Place::new();
    rich(&place);
    // mkfs.erofs adds an xattr to a directory with a whiteout. Some versions do not find the longest names.
    let _removed = std::fs::remove_file(place.path("tree/whiteout"));
    let image = import(&place, "store", "--form objects dir:tree a");
    let newer = testing::built("sid", "mkfs.erofs", "sid");
    let older = testing::program("mkfs.erofs");
    let all: [(_, &[&str]); 2] = [
        (older, &["", "-zlz4hc -Eztailpacking", "--chunksize=4096", "-Eforce-inode-extended"]),
        (
            newer,
            &[
                "--sort=path -Eforce-inode-extended",
                "-zlz4 -b512 -Eforce-inode-extended",
                "-zlzma -Eforce-inode-extended",
                "-zdeflate -C65536 -Eforce-inode-extended",
                "-zzstd -E48bit -Eforce-inode-extended",
                "-zzstd --zD=1 -Ededupe -Eforce-inode-extended",
            ],
        ),
    ];
    for (mkfs, lines) in all {
        let Some(mkfs) = mkfs else { continue };
        for line in lines {
            let mut command = Command::new(&mkfs);
            command.args(line.split_whitespace()).args(["m.erofs", "tree"]);
            let output = command.current_dir(place.folder.path()).output().unwrap();
            let err = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{mkfs:?} {line}: {err}");
            assert_eq!(place.run("diff a erofs:m.erofs").out, "", "{mkfs:?} {line}");
            let made = import(&place, "other", "--form objects erofs:m.erofs m");
            assert_eq!(made, image, "{mkfs:?} {line}");
        }
    }
}

#[test]
fn a_composefs_image_needs_its_objects() {
    let place = Place::new();
    rich(&place);
    let image = import(&place, "store", "--form objects dir:tree a");
    place.out("build --digest-store objects dir:tree a.cfs");
    // The store has the objects, and an empty one needs them.
    assert_eq!(import(&place, "store", "erofs:a.cfs b"), image);
    place.out("rmi a b");
    place.out("gc");
    let ran = place.run("import erofs:a.cfs b");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("name a directory that has it with --objects"), "{}", ran.err);
    assert_eq!(import(&place, "store", "--objects objects erofs:a.cfs a"), image);
    assert_eq!(place.out("dump a"), place.out("dump erofs:a.cfs"));
    assert_eq!(place.out("cat erofs:a.cfs:/usr/lib/63"), place.out("cat a:/usr/lib/63"));
    let ran = place.run("cat erofs:a.cfs:/usr/lib/70000");
    assert!(ran.err.contains("`quire import --objects DIR` imports it"), "{}", ran.err);
}

/// `show` prints the id that an import gives, although the import moves the data of files.
#[test]
fn the_id_of_a_composefs_image_with_other_paths() {
    let place = Place::new();
    rich(&place);
    let image = import(&place, "store", "--form objects dir:tree a");
    // Makes an image of the dump after a change to the fields of each file whose data is external.
    let make = |change: &dyn Fn(&mut [String]), name: &str| {
        let mut dump = String::new();
        for line in place.out("dump a").lines() {
            let mut fields: Vec<String> = line.split(' ').map(str::to_owned).collect();
            // The payload of a hard link is the path of its target.
            if fields[10] != "-" && !fields[8].starts_with('/') {
                change(&mut fields);
            }
            dump += &fields.join(" ");
            dump.push('\n');
        }
        std::fs::write(place.path("dump"), dump).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        command.arg0("mkcomposefs").args(["--from-file", "dump", name]);
        assert!(command.current_dir(place.folder.path()).status().unwrap().success());
        let shown = place.out(&format!("show --json erofs:{name}"));
        serde_json::from_str::<Value>(&shown).unwrap()["image"].clone()
    };
    assert_eq!(make(&|_| (), "same.cfs"), image);
    assert_eq!(make(&|it| it[8] = format!("else/{}", it[8]), "else.cfs"), image);
    assert_eq!(import(&place, "store", "--form objects erofs:else.cfs b"), image);
    // The ids of the objects are not known.
    assert_eq!(make(&|it| it[10] = "-".to_owned(), "none.cfs"), Value::Null);
    assert!(place.out("show erofs:none.cfs").starts_with("files "));
}

/// A text that begins like a source may be a name, such as the one that `import dir:disk` gives.
#[test]
fn an_image_may_have_the_name_of_a_kind() {
    let place = Place::new();
    place.tree("disk", "x");
    place.out("import --quiet --form objects dir:disk");
    place.out("tag disk:latest erofs:v1");
    let listing = place.out("ls -R disk:latest");
    assert!(listing.contains("short"), "{listing}");
    assert_eq!(place.out("ls -R erofs:v1"), listing);
    assert_eq!(place.out("cat disk:latest:/etc/short"), "short\n");
    let file = |name: &str| {
        let shown = place.out(&format!("show --json {name}"));
        serde_json::from_str::<Value>(&shown).unwrap()["file"].clone()
    };
    assert_eq!([file("disk:latest"), file("erofs:v1")], [Value::Null, Value::Null]);
    let ran = place.run("mount --specification disk:latest");
    assert!(!ran.err.contains("needs an image of the store"), "{}", ran.err);
    // A file takes precedence.
    place.out("export --quiet disk:latest erofs:v1");
    assert!(file("erofs:v1").is_object());
    // No image gets such a name from a file.
    std::fs::copy(place.path("v1"), place.path("disk.img")).unwrap();
    let done: Value = serde_json::from_str(&place.out("import --json erofs:disk.img")).unwrap();
    assert_eq!(done["name"], Value::Null);
}

/// `mount` checks a file and the options before it makes a store.
#[test]
fn mounts_that_are_refused_early() {
    let place = Place::new();
    rich(&place);
    place.out("build --digest-store objects dir:tree a.cfs");
    std::fs::create_dir(place.path("point")).unwrap();
    let mut refused = vec![("mount erofs:typo point", "No such file")];
    if cfg!(feature = "serve") {
        refused.push(("mount --lazy erofs:a.cfs point", "--lazy and --pull need an image of a"));
        refused.push(("mount --pull always erofs:a.cfs point", "--lazy and --pull need an image"));
    }
    for (line, expect) in refused {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains(expect), "{line}: {}", ran.err);
        assert!(!place.path("store").exists(), "{line}");
    }
    let ran = place.run("mount erofs:a.cfs point");
    assert!(ran.err.contains("`quire import --objects DIR erofs:a.cfs NAME`"), "{}", ran.err);
}

/// `mount` imports the file without a name, so the image disappears after it is unmounted.
#[test]
fn a_file_is_mounted_through_the_store() {
    if !is_root() {
        return testing::skipped("only root can mount");
    }
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --quiet dir:tree a");
    place.out("export --quiet a erofs:a.erofs");
    place.out("rmi a");
    std::fs::create_dir(place.path("point")).unwrap();
    let guard = Unmount(place.path("point"));
    place.out("mount erofs:a.erofs point");
    let expected = std::fs::read(place.path("tree/etc/long")).unwrap();
    assert!(std::fs::read(place.path("point/etc/long")).unwrap() == expected);
    // The kernel reads Quire's own image and objects, not the file.
    std::fs::write(place.path("a.erofs"), b"").unwrap();
    place.out("gc");
    assert!(std::fs::read(place.path("point/etc/long")).unwrap() == expected);
    drop(guard);
    place.out("gc");
    assert_eq!(std::fs::read_dir(place.path("store/images")).unwrap().count(), 0);
    let ran = place.run("mount --specification erofs:a.erofs");
    assert!(ran.err.contains("`quire import erofs:a.erofs NAME`"), "{}", ran.err);
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let place = Place::new();
    place.tree("tree", "x");
    place.out("import --quiet dir:tree a");
    place.out("export --quiet a erofs:a.erofs");
    std::fs::write(place.path("empty"), b"").unwrap();
    let mut rafs = std::fs::read(place.path("a.erofs")).unwrap();
    rafs[1024 + 8] &= !1;
    rafs[1024 + 11] |= 0x40;
    std::fs::write(place.path("rafs"), rafs).unwrap();
    for (line, expect) in [
        ("import erofs:-", "cannot be read from standard input"),
        ("ls erofs:", "names no file"),
        ("ls erofs:nothing", "No such file"),
        ("ls erofs:tree", "it is a directory, not a regular file"),
        ("tree erofs:empty", "not an EROFS image"),
        ("import disk:a.erofs", "it has no valid GUID partition table"),
        ("import --form tar erofs:a.erofs", "the form `tar` needs layers"),
        ("show erofs:rafs", "data of RAFS, the format of Nydus"),
        ("show erofs:rafs", "`nydus-image unpack` writes a tar of it"),
        ("cat erofs:a.erofs:/etc", "is not a regular file"),
        ("cat erofs:a.erofs:/nothing", "has no \"/nothing\""),
    ] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}: {}", ran.err);
        assert!(ran.err.contains(expect), "{line}: {}", ran.err);
    }
    let Some(mkfs) = testing::built("sid", "mkfs.erofs", "sid") else { return };
    write(&place.path("tree/words"), "many words, ".repeat(5_000).as_bytes(), 0o644);
    for (line, verb, expect) in [
        ("-zlz4 -Eall-fragments", "import", "unsupported fragments"),
        ("-m4096", "ls", "unsupported metadata compression"),
        ("--chunksize=4096 --blobdev=blob", "import", "the data is on device 1"),
    ] {
        let mut command = Command::new(&mkfs);
        command.args(line.split(' ')).args(["m.erofs", "tree"]);
        assert!(command.current_dir(place.folder.path()).output().unwrap().status.success());
        let ran = place.run(&format!("{verb} erofs:m.erofs"));
        assert_eq!(ran.code, Some(2), "{line}");
        assert!(ran.err.contains(expect), "{line}: {}", ran.err);
        assert!(ran.err.contains("import dir:DIRECTORY"), "{line}: {}", ran.err);
    }
}
