//! `show --composefs-id`: the ids that other programs seal.

use std::process::Command;

use testing::odd_layouts::odd_layouts;

use crate::Place;

/// The ids of composefs-rs. `testdata/composefs-rs/README.md` says how they were made.
const IDS: &str = include_str!("../../../../../testdata/composefs-rs/ids");

/// Every unusual image has the ids that composefs-rs's `cfsctl` prints, in every form.
#[test]
fn ids_are_those_of_composefs_rs() {
    let mut lines = IDS.lines();
    for layout in odd_layouts() {
        let place = Place::new();
        layout.write(&place.path("layout"));
        let imports = ["objects", "packed", "tar"].map(|form| {
            (form, place.run(&format!("import --form {form} oci:layout:latest {form}")))
        });
        for (algorithm, version) in [("sha256", 1), ("sha512", 1), ("sha512", 2)] {
            for (tree, option) in [("oci", ""), ("bootable", " --bootable")] {
                let line = lines.next().unwrap();
                let start = format!("{} {algorithm} {version} {tree} ", layout.name);
                let expected =
                    line.strip_prefix(&start).unwrap_or_else(|| panic!("{line}, {start}"));
                for (form, imported) in &imports {
                    if imported.code != Some(0) {
                        // Images over devices cannot have a character device with the number 0.
                        let hint = "import the image with --form objects";
                        if *form != "objects" && imported.err.contains(hint) {
                            continue;
                        }
                        assert_eq!(expected, "refused", "{start}: {}", imported.err);
                        continue;
                    }
                    let options =
                        format!("--composefs-id={algorithm} --erofs-version {version}{option}");
                    let ran = place.run(&format!("show {options} {form}"));
                    match expected {
                        "refused" => {
                            assert_eq!((ran.code, &*ran.out), (Some(2), ""), "{start}");
                            let says =
                                ["composefs-rs makes no image", "which composefs-rs requires"];
                            assert!(says.iter().any(|it| ran.err.contains(it)), "{}", ran.err);
                        }
                        id => assert_eq!(ran.out.trim_end(), id, "{start}{form}: {}", ran.err),
                    }
                }
            }
        }
    }
    assert_eq!(lines.next(), None);
}

/// Runs a tool of composefs, and returns its output.
fn composefs(place: &Place, line: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    command.arg("composefs").args(line.split(' ')).current_dir(place.path(""));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Without composefs-rs's changes, the id is that of the file that `mkcomposefs --min-version=1` writes.
#[test]
fn unchanged_ids_are_those_of_mkcomposefs() {
    let place = Place::new();
    for layout in odd_layouts().into_iter().filter(|it| !it.name.starts_with("refused")) {
        let name = &layout.name;
        layout.write(&place.path(name));
        place.out(&format!("import --form objects oci:{name}:latest {name}"));
        std::fs::write(place.path("dump"), place.out(&format!("dump {name}"))).unwrap();
        composefs(&place, "mkcomposefs --min-version=1 --from-file dump image.cfs");
        let measured = composefs(&place, "composefs-info measure-file image.cfs");
        let id = place.out(&format!("show --composefs-id=sha256 --unchanged {name}"));
        assert_eq!(id, measured, "{name}");
    }
}

/// The options, the default algorithm, and the field of `--json`.
#[test]
fn options_of_ids() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("tree/usr")).unwrap();
    std::fs::write(place.path("tree/usr/a"), "a").unwrap();
    place.out("import --form objects dir:tree a");
    let id = place.out("show --composefs-id a");
    assert_eq!(id, place.out("show --composefs-id=sha256 a"));
    let json: serde_json::Value =
        serde_json::from_str(&place.out("show --json --composefs-id a")).unwrap();
    assert_eq!(json["composefsId"], id.trim_end());
    let json: serde_json::Value = serde_json::from_str(&place.out("show --json a")).unwrap();
    assert!(json["composefsId"].is_null());
    place.out("export a erofs:a.erofs");
    for (line, says) in [
        ("show --bootable a", "--composefs-id"),
        ("show --composefs-id --bootable --unchanged a", "cannot be used with"),
        ("show --composefs-id=md5 a", "possible values: sha256, sha512"),
        ("show --composefs-id erofs:a.erofs", "`quire import erofs:a.erofs` first"),
        ("show --composefs-id --bootable a", "the image has no directory /boot"),
    ] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}");
        assert!(ran.err.contains(says), "{line}: {}", ran.err);
    }
}

/// A store whose objects have SHA-512 names holds images of the form `objects`, which work as others do.
#[test]
fn a_store_with_sha512() {
    let place = Place::new();
    let layouts = odd_layouts();
    let layout = layouts.iter().find(|it| it.name == "links").unwrap();
    layout.write(&place.path("layout"));
    place.out("import --object-hash sha512 oci:layout:latest a");
    let show: serde_json::Value = serde_json::from_str(&place.out("show --json a")).unwrap();
    assert_eq!(show["form"], "objects");
    let image = show["image"].as_str().unwrap().to_owned();
    assert_eq!(image.len(), 128);
    // The store keeps its hash, and its own is the default.
    place.out("import oci:layout:latest b");
    let line = IDS.lines().find(|it| it.starts_with("links sha512 1 oci ")).unwrap();
    assert_eq!(place.out("show --composefs-id b").trim_end(), line.rsplit(' ').next().unwrap());
    let line = IDS.lines().find(|it| it.starts_with("links sha256 1 oci ")).unwrap();
    assert_eq!(
        place.out("show --composefs-id=sha256 b").trim_end(),
        line.rsplit(' ').next().unwrap()
    );

    let object = testing::noise(5000);
    let ran = place.command(&["cat", "a:/usr/one"]).output().unwrap();
    assert_eq!(ran.stdout, object);
    assert!(place.out("ls a:/z").contains("deep"));
    place.out("verify a");
    place.out("fsck");
    place.out("export a erofs:a.erofs");
    place.out("export a oci:again:latest");
    place.out("import erofs:a.erofs c");
    std::fs::create_dir_all(place.path("tree/usr")).unwrap();
    std::fs::write(place.path("tree/usr/one"), &object).unwrap();
    place.out("import dir:tree d");
    place.out("merge a d e");
    place.out("filter --exclude /z a f");
    place.out("diff a c");
    place.out("dump a");
    place.out("du");

    for (line, says) in [
        ("import --form packed oci:layout:latest x", "use --form objects"),
        ("import --form tar oci:layout:latest x", "use --form objects"),
        ("convert --form packed a x", "use --form objects"),
        ("import --object-hash sha256 dir:tree x", "leave out --object-hash"),
    ] {
        let ran = place.run(line);
        assert_eq!(ran.code, Some(2), "{line}");
        assert!(ran.err.contains(says), "{line}: {}", ran.err);
    }
    for name in ["a", "b", "c", "d", "e", "f"] {
        place.out(&format!("rmi {name}"));
    }
    place.out("gc");
    let left = std::fs::read_dir(place.path("store/objects")).unwrap();
    let left = left.flat_map(|it| std::fs::read_dir(it.unwrap().path()).into_iter().flatten());
    assert_eq!(left.count(), 0);
}

/// The kernel reads and verifies the objects of such a store.
#[test]
fn the_kernel_mounts_images_of_a_store_with_sha512() {
    if !crate::is_root() {
        testing::skipped("mounts need root");
        return;
    }
    let place = Place::new();
    std::fs::create_dir_all(place.path("tree/usr")).unwrap();
    let object = testing::noise(5000);
    std::fs::write(place.path("tree/usr/one"), &object).unwrap();
    place.out("import --object-hash sha512 dir:tree a");
    let point = place.path("point");
    std::fs::create_dir_all(&point).unwrap();
    let _guard = crate::mounting::mounts::Unmount(point.clone());
    place.out("mount a point");
    assert_eq!(std::fs::read(point.join("usr/one")).unwrap(), object);
}

/// A tar that composefs-rs reads differently has no id, rather than a wrong one. `mtime` without a colon is a record
/// for all entries. Source: GNU tar, manual, "Controlling Extended Headers".
#[test]
fn an_unusual_tar_has_no_id() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("tree/usr")).unwrap();
    for (options, is_usual) in [
        (&["--format=pax", "--pax-option=comment=a"][..], true),
        (&["--format=pax", "--pax-option=mtime=1"], false),
    ] {
        let Some(mut tar) = testing::command("tar") else { return };
        tar.args(options).args(["-C", "tree", "-cf", "a.tar", "usr"]);
        assert!(tar.current_dir(place.path("")).status().unwrap().success());
        place.out("import --quiet tar:a.tar a");
        let ran = place.run("show --composefs-id a");
        assert_eq!(ran.code, Some(if is_usual { 0 } else { 2 }), "{options:?}: {}", ran.err);
        if !is_usual {
            assert_eq!(ran.out, "");
            let says = "\"usr/\" has a pax header for all following entries";
            assert!(ran.err.contains(says), "{}", ran.err);
        }
    }
}

/// Without a store, the image has the hash that a new store would have.
#[test]
fn a_build_names_objects_by_the_hash_of_the_option() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("tree/usr")).unwrap();
    let object = testing::noise(5000);
    std::fs::write(place.path("tree/usr/one"), &object).unwrap();
    for hash in ["sha256", "sha512"] {
        let store = Place::new();
        let tree = place.path("tree").display().to_string();
        let id =
            store.out(&format!("--object-hash {hash} import --quiet --form objects dir:{tree} a"));
        let folder = format!("objects-{hash}");
        let build = format!("--object-hash {hash} build --digest-store {folder}");
        assert_eq!(place.out(&format!("{build} dir:tree {hash}.erofs")), id, "{hash}");
        // The file of the object has the name that other programs compute.
        let digits = if hash == "sha256" { 64 } else { 128 };
        let shards = std::fs::read_dir(place.path(&folder)).unwrap();
        let files = shards.flat_map(|it| {
            let shard = it.unwrap();
            let files = std::fs::read_dir(shard.path()).unwrap();
            files.map(move |it| {
                let rest = it.unwrap().file_name().into_string().unwrap();
                shard.file_name().into_string().unwrap() + &rest
            })
        });
        let files: Vec<_> = files.collect();
        assert_eq!(files.len(), 1, "{files:?}");
        assert_eq!(files[0].len(), digits);
        if let Some(mut fsverity) = testing::command("fsverity") {
            fsverity.args(["digest", "--compact", "--hash-alg", hash, "tree/usr/one"]);
            let out = fsverity.current_dir(place.path("")).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), files[0], "{hash}");
        }
    }
}
