//! Layers that are EROFS images, as containerd makes them from version 2.3 on.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev, mknodat, setxattr};
use serde_json::{Value, json};
use testing::chunked::sha256;

use crate::{Place, is_root, write};

pub(super) const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const EROFS: &str = "application/vnd.erofs.layer.v1";

/// Writes an OCI layout of an image with these uncompressed layers, given as media type and bytes.
pub(super) fn layout(place: &Place, name: &str, layers: &[(&str, Vec<u8>)]) -> PathBuf {
    let directory = place.path(name);
    let blobs = directory.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let put = |media_type: &str, bytes: &[u8]| {
        let digest = sha256(bytes);
        std::fs::write(blobs.join(digest.strip_prefix("sha256:").unwrap()), bytes).unwrap();
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    };
    let diff_ids: Vec<_> = layers.iter().map(|(_, bytes)| sha256(bytes)).collect();
    let config = json!({
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let config = put("application/vnd.oci.image.config.v1+json", config.to_string().as_bytes());
    let layers: Vec<_> = layers.iter().map(|(kind, bytes)| put(kind, bytes)).collect();
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({
        "schemaVersion": 2, "mediaType": media_type, "config": config, "layers": layers,
    });
    let manifest = put(media_type, manifest.to_string().as_bytes());
    let index = json!({"schemaVersion": 2, "manifests": [manifest]});
    std::fs::write(directory.join("index.json"), index.to_string()).unwrap();
    std::fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    directory
}

fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {err}");
    output.stdout
}

/// Sets one time for all files, because a tar and mkfs.erofs round times differently.
fn settle(tree: &Path) {
    let touch = ["-exec", "touch", "-h", "-d", "@1700000000", "{}", "+"];
    run(Command::new("find").arg(tree).args(touch));
}

fn tar(tree: &Path) -> Vec<u8> {
    settle(tree);
    let mut command = Command::new("tar");
    command.args(["--format=posix", "--sort=name", "--xattrs", "--xattrs-include=*"]);
    run(command.args(["-cf", "-", "-C"]).arg(tree).arg("."))
}

/// Makes an EROFS image of a directory.
fn mkfs(program: &Path, options: &str, tree: &Path) -> Vec<u8> {
    settle(tree);
    let image = tree.with_extension("image");
    let mut command = Command::new(program);
    command.args(options.split_whitespace()).arg(&image).arg(tree);
    run(&mut command);
    std::fs::read(image).unwrap()
}

/// Makes an EROFS image of a tar, as containerd does. Source: containerd `internal/erofsutils/mount.go`,
/// `ConvertTarErofs`.
fn mkfs_of_tar(program: &Path, options: &str, place: &Place, tar: &[u8]) -> Vec<u8> {
    let image = place.path("of-tar.image");
    let _none = std::fs::remove_file(&image);
    let mut command = Command::new(program);
    command.args(["--tar=f", "--aufs", "--quiet", "-Enoinline_data", "-b4096"]);
    command.args(options.split_whitespace()).arg(&image);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), tar).unwrap();
    assert!(child.wait().unwrap().success(), "{options}");
    std::fs::read(image).unwrap()
}

fn set(path: &Path, name: &str, value: &[u8]) {
    setxattr(path, name, value, XattrFlags::empty()).unwrap();
}

fn device(path: &Path, major: u32, minor: u32) {
    let mode = Mode::from_raw_mode(0o600);
    mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, minor)).unwrap();
}

/// Whether this user can set xattrs of overlayfs in this file system. In overlayfs itself, no user can.
fn can_mark(place: &Place) -> bool {
    let probe = place.path("probe");
    std::fs::create_dir(&probe).unwrap();
    let can =
        is_root() && setxattr(&probe, "trusted.overlay.opaque", b"y", XattrFlags::empty()).is_ok();
    if !can {
        testing::skipped("this user or file system has no xattrs of overlayfs");
    }
    can
}

/// The lower tree, the upper one with the marks of overlayfs, and the same one with those of tars.
struct Trees {
    lower: PathBuf,
    upper: PathBuf,
    of_tar: PathBuf,
}

fn trees(place: &Place) -> Trees {
    let [lower, upper, of_tar] = ["lower", "upper", "of-tar"].map(|it| place.path(it));
    let noise = testing::noise(700_000);
    for directory in ["usr/lib", "hidden/deep", "merged"] {
        std::fs::create_dir_all(lower.join(directory)).unwrap();
    }
    for size in [0, 1, 64, 65, 4095, 4096, 4097, 70_000, 700_000] {
        write(&lower.join(format!("usr/lib/{size}")), &noise[..size], 0o644);
    }
    write(&lower.join("zeros"), &[0; 300_000], 0o600);
    for name in ["gone", "merged/gone", "merged/kept", "hidden/below", "hidden/deep/below"] {
        write(&lower.join(name), noise[1..999].as_ref(), 0o644);
    }
    std::fs::hard_link(lower.join("usr/lib/70000"), lower.join("a-link")).unwrap();
    // The name that owns the file comes after the other one in a walk, and the lower layer has another file there.
    write(
        &lower.join("owner-of-link"),
        b"a file that is replaced by a hard link to another one",
        0o600,
    );
    std::os::unix::fs::symlink("usr/lib", lower.join("lib")).unwrap();
    device(&lower.join("null"), 1, 3);
    set(&lower.join("usr/lib/65"), "user.note", b"value");
    for tree in [&upper, &of_tar] {
        for directory in ["hidden", "merged", "gone-directory"] {
            std::fs::create_dir_all(tree.join(directory)).unwrap();
        }
        write(&tree.join("hidden/new"), b"new", 0o755);
        write(&tree.join("merged/new"), &noise[7..9000], 0o4755);
        write(&tree.join("usr"), b"a file that replaces a directory", 0o644);
        std::fs::create_dir(tree.join("owner")).unwrap();
        write(&tree.join("owner/x"), &noise[5..5000], 0o644);
        std::fs::hard_link(tree.join("owner/x"), tree.join("owner-of-link")).unwrap();
        set(&tree.join("merged/new"), "user.of-upper", b"");
    }
    device(&upper.join("gone"), 0, 0);
    device(&upper.join("merged/gone"), 0, 0);
    device(&upper.join("gone-directory/nothing"), 0, 0);
    set(&upper.join("hidden"), "trusted.overlay.opaque", b"y");
    set(&upper.join("merged"), "trusted.overlay.origin", b"\0\xfb");
    set(&upper.join("merged"), "trusted.overlay.impure", b"y");
    for name in [".wh.gone", "merged/.wh.gone", "gone-directory/.wh.nothing"] {
        write(&of_tar.join(name), b"", 0o644);
    }
    write(&of_tar.join("hidden/.wh..wh..opq"), b"", 0o644);
    Trees { lower, upper, of_tar }
}

fn import(place: &Place, form: &str, layout: &str) -> String {
    place.out(&format!("import --quiet --form {form} oci:{layout} a")).trim().to_owned()
}

/// The files of a layout's blobs.
fn blobs(layout: &Path) -> Vec<String> {
    let files = std::fs::read_dir(layout.join("blobs/sha256")).unwrap();
    let mut names: Vec<_> =
        files.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The image of EROFS layers is that of tars with the same files. Exports rebuild the layers byte for byte.
#[test]
fn an_image_of_erofs_layers_is_that_of_tars() {
    let place = Place::new();
    if !can_mark(&place) || !testing::programs(&["tar", "find", "touch"]) {
        return;
    }
    let Trees { lower, upper, of_tar } = trees(&place);
    let tars = [tar(&lower), tar(&of_tar)];
    layout(&place, "tars", &tars.clone().map(|it| (TAR, it)));
    let expected_id = import(&place, "objects", "tars");
    let mut all = Vec::new();
    if let Some(program) = testing::program("mkfs.erofs") {
        for options in ["", "-zlz4hc", "--chunksize=4096", "-Eforce-inode-extended"] {
            let images = [&lower, &upper].map(|it| mkfs(&program, options, it));
            all.push((format!("old {options}"), images));
        }
    }
    if let Some(program) = testing::built("sid", "mkfs.erofs", "sid") {
        for options in ["", "-zzstd -C65536", "-zzstd -Eall-fragments"] {
            let images = [0, 1].map(|at| mkfs_of_tar(&program, options, &place, &tars[at]));
            all.push((format!("tar {options}"), images));
        }
    }
    for (number, (name, images)) in all.into_iter().enumerate() {
        let directory = format!("layout-{number}");
        let path = layout(&place, &directory, &images.map(|it| (EROFS, it)));
        if name.contains("fragments") {
            let ran = place.run(&format!("import oci:{directory} a"));
            assert_eq!(ran.code, Some(2));
            assert!(ran.err.contains("unsupported fragments"), "{}", ran.err);
            continue;
        }
        for form in ["objects", "packed"] {
            // The files of a packed image have the order of the layer.
            let made = import(&place, form, &directory);
            assert_eq!(made == expected_id, form == "objects", "{name}, {form}");
            let again = place.run(&format!("import --json --form {form} oci:{directory} a"));
            let again: Value = serde_json::from_str(&again.out).unwrap();
            let reused: Vec<_> = (0..2).map(|at| again["layers"][at]["reused"].clone()).collect();
            assert_eq!(reused, [true, true], "{name}, {form}");
            let out = format!("out-{number}-{form}");
            place.out(&format!("export --quiet a oci:{out}"));
            assert_eq!(blobs(&place.path(&out)), blobs(&path), "{name}, {form}");
        }
        let id = import(&place, "tar", &directory);
        place.out("import --quiet --form objects oci:tars b");
        assert_eq!(place.out("diff a b"), "", "{name}");
        let converted = place.out("convert --quiet --form objects a").trim().to_owned();
        assert_eq!(converted, expected_id, "{name}");
        let ran = place.run("export a docker-archive:a.tar");
        assert!(ran.code == Some(2) && ran.err.contains("cannot have EROFS layers"), "{}", ran.err);
        place.out("fsck --deep");
        // In an empty store, all bytes come from the layers.
        for form in ["objects", "packed", "tar"] {
            let store = format!("store-{number}-{form}");
            let quire = |arguments: &[&str]| {
                let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
                command.args(["--store", &store]).args(arguments);
                String::from_utf8(run(command.current_dir(place.folder.path()))).unwrap()
            };
            let source = format!("oci:{directory}");
            let made = quire(&["import", "--quiet", "--form", form, &source, "a"]);
            match form {
                "objects" => assert_eq!(made.trim(), expected_id, "{name}, {form}"),
                "tar" => assert_eq!(made.trim(), id, "{name}, {form}"),
                _ => {}
            }
            quire(&["import", "--quiet", "--form", "objects", "oci:tars", "b"]);
            assert_eq!(quire(&["diff", "a", "b"]), "", "{name}, {form}");
        }
    }
}

/// The same bytes can be a tar and an EROFS image. They are read as what the image says, also if the store has read them
/// otherwise before.
#[test]
fn bytes_that_are_a_tar_and_an_image() {
    let place = Place::new();
    let Some(program) = testing::program("mkfs.erofs") else { return };
    if !testing::programs(&["tar", "find", "touch"]) {
        return;
    }
    let tree = place.tree("tree", "x");
    let mut bytes = mkfs(&program, "", &tree);
    // The first kilobyte of an EROFS image has no meaning. Here it is the header of a file that has all other bytes.
    let length = bytes.len() - 512;
    std::fs::write(place.path("rest"), &bytes[512..]).unwrap();
    let mut command = Command::new("tar");
    command.args(["--format=ustar", "-cf", "-", "-C"]).arg(place.folder.path()).arg("rest");
    bytes = [&run(&mut command)[..512], &bytes[512..], &[0; 1024]].concat();
    assert!(length.is_multiple_of(512));
    layout(&place, "as-tar", &[(TAR, bytes.clone())]);
    layout(&place, "as-erofs", &[(EROFS, bytes)]);
    for order in [["as-tar", "as-erofs"], ["as-erofs", "as-tar"]] {
        for form in ["objects", "packed", "tar"] {
            for kind in order.into_iter().chain(order) {
                import(&place, form, kind);
                let listed = place.out("ls a:/");
                let expected = if kind == "as-tar" { "rest" } else { "etc" };
                assert_eq!(listed.trim(), expected, "{order:?} {form} {kind}");
                place.out("convert --quiet --form objects a");
                assert_eq!(place.out("ls a:/").trim(), expected, "{order:?} {form} {kind}");
            }
        }
        place.out("rmi a");
        place.out("gc");
    }
}

/// Exports compress with zstd, which containerd unpacks, and not with gzip.
#[test]
fn compression_of_erofs_layers() {
    let place = Place::new();
    let Some(program) = testing::program("mkfs.erofs").filter(|_| can_mark(&place)) else { return };
    let Trees { lower, upper, .. } = trees(&place);
    layout(&place, "layout", &[&lower, &upper].map(|it| (EROFS, mkfs(&program, "", it))));
    let id = import(&place, "objects", "layout");
    let ran = place.run("export --compression gzip a oci:gzip");
    assert_eq!(ran.code, Some(2));
    assert!(ran.err.contains("cannot be compressed with gzip"), "{}", ran.err);
    place.out("export --quiet --compression zstd a oci:zstd");
    let index = std::fs::read(place.path("zstd/index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let digest = index["manifests"][0]["digest"].as_str().unwrap().replace("sha256:", "");
    let manifest = std::fs::read(place.path("zstd/blobs/sha256").join(digest)).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    for layer in manifest["layers"].as_array().unwrap() {
        assert_eq!(layer["mediaType"], format!("{EROFS}+zstd"));
    }
    place.out("rmi a");
    place.out("gc");
    assert_eq!(import(&place, "objects", "zstd"), id);
}

/// Files whose contents overlayfs would take from elsewhere are refused, and names that are whiteouts in tars only.
#[test]
fn marks_that_layers_cannot_have() {
    let place = Place::new();
    let Some(program) = testing::program("mkfs.erofs").filter(|_| can_mark(&place)) else { return };
    let check = |change: &dyn Fn(&Path), expected: &str| {
        let place = Place::new();
        let tree = place.tree("tree", "x");
        change(&tree);
        layout(&place, "layout", &[(EROFS, mkfs(&program, "", &tree))]);
        let ran = place.run("import oci:layout a");
        assert_eq!(ran.code, Some(2), "{expected}");
        assert!(ran.err.contains(expected), "{expected}: {}", ran.err);
        assert_eq!(place.out("images --quiet"), "");
    };
    check(&|it| write(&it.join(".wh.x"), b"", 0o644), "\"/.wh.x\"");
    check(&|it| write(&it.join("etc/.wh..wh..opq"), b"", 0o644), "begins with \".wh.\"");
    let marks: [(&str, &[u8]); 4] = [
        ("trusted.overlay.metacopy", b""),
        ("trusted.overlay.redirect", b"/elsewhere"),
        ("trusted.overlay.whiteout", b""),
        ("trusted.overlay.opaque", b"y"),
    ];
    for (name, value) in marks {
        check(&|it| set(&it.join("etc/long"), name, value), "\"/etc/long\"");
    }
    check(&|it| set(&it.join("etc"), "trusted.overlay.opaque", b"x"), "xattr of overlayfs");
    check(&|it| set(it, "trusted.overlay.opaque", b"y"), "its root is marked as opaque");
    place.tree("tree", "x");
    place.out("build --digest-store objects dir:tree image.cfs");
    layout(&place, "layout", &[(EROFS, std::fs::read(place.path("image.cfs")).unwrap())]);
    let ran = place.run("import oci:layout a");
    assert!(ran.code == Some(2) && ran.err.contains("composefs image"), "{}", ran.err);
}

/// A layer with a changed byte and right digests gives an image or an error.
#[test]
fn damaged_erofs_layers() {
    let Some(program) = testing::program("mkfs.erofs") else { return };
    let place = Place::new();
    let tree = place.tree("tree", "x");
    for options in ["", "-zlz4hc"] {
        let good = mkfs(&program, options, &tree);
        let count = usize::try_from(testing::rounds(50)).unwrap();
        let noise = testing::noise(8 * count);
        let mut read = 0;
        for (number, piece) in noise.chunks(8).enumerate() {
            let at = u64::from_le_bytes(piece.try_into().unwrap());
            let mut image = good.clone();
            // Most bytes of the superblock and the inodes are in the first blocks.
            let most = if number % 2 == 0 { 2048 } else { image.len() };
            let place_of = usize::try_from(at).unwrap() % most;
            image[place_of] ^= 1 << (at % 8);
            let directory = format!("damaged{}-{number}", options.len());
            layout(&place, &directory, &[(EROFS, image)]);
            let ran = place.run(&format!("import --quiet oci:{directory} a"));
            assert!(matches!(ran.code, Some(0 | 2)), "{number}: {:?} {}", ran.code, ran.err);
            read += usize::from(ran.code == Some(0));
        }
        assert!(read > 5, "{read}");
        place.out("fsck --deep");
    }
}
