//! `save`, `load` and `history`.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Place, Ran};

/// Makes the images `one` and `two`, which have layers.
fn images(place: &Place) {
    for (name, text) in [("one", "x"), ("two", "y")] {
        let tree = place.tree(name, text);
        place.out(&format!("import --quiet dir:{} {name}-dir", tree.display()));
        place.out(&format!("export {name}-dir tar:{name}.tar"));
        place.out(&format!("import --quiet tar:{name}.tar {name}"));
        place.out(&format!("rmi {name}-dir"));
    }
}

fn ids(place: &Place) -> Vec<(String, String)> {
    let all: Value = serde_json::from_str(&place.out("images --json")).unwrap();
    let text = |it: &Value| it.as_str().unwrap().to_owned();
    let all = all.as_array().unwrap().iter();
    all.map(|it| (text(&it["name"]), text(&it["image"]))).collect()
}

/// Another place, in which nothing is stored.
fn load(from: &Place, arguments: &[&str], input: Option<&str>) -> (Place, Ran) {
    let to = Place::new();
    let mut command = to.command(&[&["load"], arguments].concat());
    command.current_dir(from.folder.path());
    if let Some(input) = input {
        command.stdin(File::open(from.path(input)).unwrap());
    }
    let ran = Ran::from_output(&command.output().unwrap());
    (to, ran)
}

#[test]
fn saved_images_are_loaded_with_their_names() {
    let place = Place::new();
    images(&place);
    place.out("tag one registry.example/app:1");
    place.out("save -o docker.tar one two registry.example/app:1");
    place.out("save --format oci-archive -o oci.tar one two registry.example/app:1");
    place.out("save --format oci-dir -o layout one two registry.example/app:1");
    let saved = place.command(&["save", "one", "two", "registry.example/app:1"]).output().unwrap();
    assert_eq!(saved.stdout, fs::read(place.path("docker.tar")).unwrap());
    let file = File::create(place.path("docker.tar.gz")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    gzip.write_all(&saved.stdout).unwrap();
    gzip.finish().unwrap();
    let expect = ids(&place);
    assert_eq!(expect.len(), 3);
    for (arguments, input) in [
        (&["-i", "docker.tar"][..], None),
        (&["--input", "oci.tar"], None),
        (&["-i", "layout"], None),
        (&["-i", "docker.tar.gz"], None),
        (&["-q"], Some("docker.tar")),
        (&[], Some("docker.tar.gz")),
        (&[], Some("oci.tar")),
    ] {
        let (to, ran) = load(&place, arguments, input);
        assert_eq!(ran.code, Some(0), "{arguments:?} {input:?}: {}", ran.err);
        let mut lines: Vec<_> = ran.out.lines().collect();
        lines.sort_unstable();
        let names = ["one:latest", "registry.example/app:1", "two:latest"];
        assert_eq!(lines, names.map(|it| format!("Loaded image: {it}")), "{arguments:?}");
        // Layers of an archive in OCI's form have other manifests, and the same trees.
        assert_eq!(ids(&to), expect, "{arguments:?} {input:?}");
    }
}

#[test]
fn archives_of_others_are_read() {
    let place = Place::new();
    images(&place);
    // As skopeo writes it: the layout has a tag, and no whole name.
    place.out("export one oci:layout:1.0");
    let tar = |name: &str, folder: &str| {
        let mut tar = Command::new("tar");
        tar.arg("-cf").arg(place.path(name)).arg("-C").arg(place.path(folder)).arg(".");
        assert!(tar.status().unwrap().success());
    };
    if !testing::programs(&["tar"]) {
        return;
    }
    tar("app.tar", "layout");
    let (to, ran) = load(&place, &["-i", "app.tar"], None);
    assert_eq!((ran.code, &*ran.out), (Some(0), "Loaded image: app:1.0\n"), "{}", ran.err);
    assert_eq!(ids(&to)[0].1, ids(&place)[0].1);
    // A link in an archive leads to no file of the host.
    let outside = place.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::create_dir(place.path("first")).unwrap();
    symlink(&outside, place.path("first/blobs")).unwrap();
    tar("hostile.tar", "first");
    let append = Command::new("tar")
        .args(["-rf", "hostile.tar", "-C", "layout", "./oci-layout", "./index.json", "./blobs"])
        .current_dir(place.folder.path())
        .status();
    assert!(append.unwrap().success());
    let (_, ran) = load(&place, &["-i", "hostile.tar"], None);
    assert_eq!(ran.code, Some(2), "{}", ran.out);
    assert!(ran.err.contains("in place of this directory"), "{}", ran.err);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    let (_, ran) = load(&place, &["-i", "one.tar"], None);
    assert!(ran.code == Some(2) && ran.err.contains("neither a docker-archive"), "{}", ran.err);
    let (_, ran) = load(&place, &["-i", "absent.tar"], None);
    assert!(ran.code == Some(2) && ran.err.contains("absent.tar"), "{}", ran.err);
}

/// Reads the index of the layout `layout`, lets `change` change its entries, and writes it again.
fn change_index(place: &Place, change: impl FnOnce(&mut Vec<Value>)) {
    let path = place.path("layout/index.json");
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(index["manifests"].as_array_mut().unwrap());
    fs::write(&path, index.to_string()).unwrap();
}

#[test]
fn images_without_a_name_do_not_replace_each_other() {
    let place = Place::new();
    images(&place);
    place.out("save --format oci-dir -o layout one two");
    let check = |code, said: &str| {
        let (to, ran) = load(&place, &["-i", "layout"], None);
        assert_eq!(ran.code, Some(code), "{}{}", ran.out, ran.err);
        let printed = format!("{}{}", ran.out, ran.err);
        assert!(printed.contains(said), "{said}: {printed}");
        to
    };
    let name = "org.opencontainers.image.ref.name";
    // Two names that mean the same.
    change_index(&place, |entries| {
        entries[0]["annotations"][name] = "layout:latest".into();
        entries[1]["annotations"][name] = "latest".into();
    });
    let to = check(2, "two images of the archive would get the name layout:latest");
    assert_eq!(ids(&to).len(), 0);
    // One without a name gets the name of the file.
    change_index(&place, |entries| {
        entries[1].as_object_mut().unwrap().remove("annotations");
        entries[0]["annotations"][name] = "other:1".into();
    });
    let to = check(0, "Loaded image: layout:latest");
    let mut names: Vec<_> = ids(&to).into_iter().map(|it| it.0).collect();
    names.sort_unstable();
    assert_eq!(names, ["layout:latest", "other:1"]);
    change_index(&place, |entries| drop(entries[0].as_object_mut().unwrap().remove("annotations")));
    let to = check(2, "2 images have no name");
    assert_eq!(ids(&to).len(), 0);
    // These are one image, for two processors.
    change_index(&place, |entries| {
        for (entry, processor) in entries.iter_mut().zip([host_processor(), "s390x"]) {
            entry["platform"] = serde_json::json!({ "os": "linux", "architecture": processor });
        }
    });
    let to = check(0, "Loaded image: layout:latest");
    assert_eq!(ids(&to).len(), 1);
}

/// Returns Go's name of this processor.
fn host_processor() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[test]
fn links_of_a_layout_lead_to_no_other_files() {
    let place = Place::new();
    images(&place);
    place.out("save --format oci-dir -o layout one");
    for (file, outside) in [("index.json", "index"), ("oci-layout", "marker")] {
        let (path, outside) = (place.path(&format!("layout/{file}")), place.path(outside));
        fs::rename(&path, &outside).unwrap();
        symlink(&outside, &path).unwrap();
        let (_, ran) = load(&place, &["-i", "layout"], None);
        assert_eq!(ran.code, Some(2), "{file}: {}", ran.out);
        assert!(ran.err.contains("leads out of the directory"), "{file}: {}", ran.err);
        fs::remove_file(&path).unwrap();
        fs::rename(&outside, &path).unwrap();
    }
    let blobs = place.path("layout/blobs/sha256");
    for blob in fs::read_dir(&blobs).unwrap().map(|it| it.unwrap().path()) {
        let outside = place.path("blob");
        fs::rename(&blob, &outside).unwrap();
        symlink(&outside, &blob).unwrap();
        let (_, ran) = load(&place, &["-i", "layout"], None);
        assert_eq!(ran.code, Some(2), "{}: {}", blob.display(), ran.out);
        assert!(ran.err.contains("leads out of the directory"), "{}", ran.err);
        fs::remove_file(&blob).unwrap();
        fs::rename(&outside, &blob).unwrap();
    }
    // A link that stays inside is followed.
    fs::rename(place.path("layout/index.json"), place.path("layout/real.json")).unwrap();
    symlink("real.json", place.path("layout/index.json")).unwrap();
    let (_, ran) = load(&place, &["-i", "layout"], None);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
}

#[test]
fn temporary_files_are_in_the_store() {
    let place = Place::new();
    images(&place);
    let run = |arguments: &[&str]| {
        let mut command = place.command(arguments);
        command.env("TMPDIR", "/dev/null/absent").current_dir(place.folder.path());
        let ran = Ran::from_output(&command.output().unwrap());
        assert_eq!(ran.code, Some(0), "{arguments:?}: {}", ran.err);
    };
    run(&["save", "--format", "oci-archive", "-o", "oci.tar", "one", "two"]);
    run(&["save", "--format", "oci-archive", "--compress", "-o", "small.tar", "one"]);
    run(&["export", "one", "docker-archive:docker.tar"]);
    let file = File::create(place.path("docker.tar.gz")).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(file, flate2::Compression::fast());
    gzip.write_all(&fs::read(place.path("docker.tar")).unwrap()).unwrap();
    gzip.finish().unwrap();
    for archive in ["oci.tar", "small.tar", "docker.tar.gz"] {
        run(&["load", "-i", archive]);
    }
    let left = fs::read_dir(place.path("store/tmp")).unwrap();
    let left: Vec<_> = left.map(|it| it.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn images_without_layers_cannot_be_saved() {
    let place = Place::new();
    let tree = place.tree("tree", "x");
    place.out(&format!("import --quiet dir:{} flat", tree.display()));
    for (line, code, said) in [
        ("save -o a.tar flat", 2, "flat has no layers"),
        ("save -o a.tar absent", 3, "there is no image \"absent\""),
        ("save --format oci-dir flat", 2, "needs --output DIRECTORY"),
        ("save --compress -o a.tar flat", 2, "--compress is for OCI layouts"),
        ("history flat", 2, "flat has no layers"),
        ("history absent", 3, "there is no image \"absent\""),
    ] {
        let ran = place.run(line);
        assert!(ran.code == Some(code) && ran.err.contains(said), "{line}: {}", ran.err);
    }
    assert!(!place.path("a.tar").exists());
}

#[test]
fn history_lists_steps() {
    let place = Place::new();
    images(&place);
    let steps: Value = serde_json::from_str(&place.out("history --json one")).unwrap();
    let steps = steps.as_array().unwrap();
    assert_eq!(steps[0]["tags"], serde_json::json!(["one:latest"]));
    assert_eq!(steps[0]["id"].as_str().unwrap(), ids(&place)[0].1);
    // The tar of the only layer.
    let size: u64 = steps.iter().map(|it| it["size"].as_u64().unwrap()).sum();
    assert_eq!(size, fs::metadata(place.path("one.tar")).unwrap().len());
    let text = place.out("history one");
    assert!(text.starts_with("ID") && text.contains("CREATED BY"), "{text}");
    assert_eq!(place.out("history -q --no-trunc one").lines().next(), steps[0]["id"].as_str());
    let bytes = place.out("history --human=false --format {{.Size}} one");
    assert_eq!(bytes.lines().map(|it| it.parse::<u64>().unwrap()).sum::<u64>(), size);
    let mut child = place.command(&["history", "one"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}
