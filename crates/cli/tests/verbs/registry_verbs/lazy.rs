//! `index`, on images whose original layers the store keeps.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use image::digest::Digest;
use serde_json::{Value, json};

use crate::image_verbs::forms::bytes;
use crate::{Place, Ran, write};

/// Makes a tar of one file, `NAME/file`, of this many bytes; for 0, of an empty directory.
fn tar(place: &Place, name: &str, length: usize) -> PathBuf {
    let tree = place.path(&format!("{name}-tree"));
    fs::create_dir_all(tree.join(name)).unwrap();
    if length > 0 {
        let seed = u32::try_from(length).unwrap();
        // gzip can compress this text.
        let text = bytes(seed, length).iter().map(|it| b'a' + it % 16).collect::<Vec<u8>>();
        write(&tree.join(name).join("file"), &text, 0o644);
    }
    let tar = place.path(&format!("{name}.tar"));
    let mut command = Command::new("tar");
    command.args(["--format=posix", "--numeric-owner", "--mtime=@0", "--sort=name", "-cf"]);
    assert!(command.arg(&tar).arg("-C").arg(&tree).arg(".").status().unwrap().success());
    tar
}

/// Makes a layout of one image with these layers: name, length of the file in it, and compression.
pub(super) fn layout(place: &Place, to: &str, layers: &[(&str, usize, &str)]) -> Vec<Digest> {
    let whole = place.path(to);
    fs::create_dir_all(whole.join("blobs/sha256")).unwrap();
    let blob = |digest: &str| format!("blobs/{}", digest.replace(':', "/"));
    let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    let (mut descriptors, mut diff_ids, mut digests) = (Vec::new(), Vec::new(), Vec::new());
    for (name, length, compression) in layers {
        let path = tar(place, name, *length);
        let maker = Place::new();
        maker.out(&format!("import tar:{} x", path.display()));
        maker.out(&format!("export --compression {compression} x oci:one"));
        let read = |name: &str| fs::read(maker.path("one").join(name)).unwrap();
        let index = parse(&read("index.json"));
        let manifest = parse(&read(&blob(index["manifests"][0]["digest"].as_str().unwrap())));
        let config = parse(&read(&blob(manifest["config"]["digest"].as_str().unwrap())));
        let layer = &manifest["layers"][0];
        let digest = layer["digest"].as_str().unwrap();
        fs::write(whole.join(blob(digest)), read(&blob(digest))).unwrap();
        digests.push(digest.parse().unwrap());
        descriptors.push(layer.clone());
        diff_ids.push(config["rootfs"]["diff_ids"][0].clone());
    }
    let document = |value: &Value| {
        let bytes = serde_json::to_vec(value).unwrap();
        let digest = Digest::sha256(&bytes).to_string();
        fs::write(whole.join(blob(&digest)), &bytes).unwrap();
        json!({ "digest": digest, "size": bytes.len() })
    };
    let mut config = document(&json!({
        "architecture": "amd64", "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": diff_ids },
    }));
    config["mediaType"] = json!("application/vnd.oci.image.config.v1+json");
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    let mut manifest = document(&json!({
        "schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": descriptors,
    }));
    manifest["mediaType"] = json!(manifest_type);
    fs::write(whole.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(whole.join("index.json"), index.to_string()).unwrap();
    digests
}

/// Returns the path of a blob that the store keeps.
fn kept(place: &Place, blob: &Digest) -> PathBuf {
    place.path("store").join("blobs").join(blob.to_string().replace(':', "-"))
}

/// Keeps blobs of a layout like a pull with `--keep-layers`.
fn keep(place: &Place, layout: &str, blobs: &[Digest]) {
    for blob in blobs {
        let from = place.path(layout).join("blobs").join(blob.to_string().replace(':', "/"));
        fs::copy(from, kept(place, blob)).unwrap();
        fs::set_permissions(kept(place, blob), fs::Permissions::from_mode(0o444)).unwrap();
    }
}

/// Returns all files of `lazy/`, with their bytes.
fn indexes(place: &Place) -> Vec<(String, Vec<u8>)> {
    let files = fs::read_dir(place.path("store/lazy")).unwrap().map(|it| it.unwrap());
    let mut files: Vec<_> = files
        .map(|it| (it.file_name().into_string().unwrap(), fs::read(it.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[test]
fn each_layer_gets_an_index_or_is_told_why_not() {
    let place = Place::new();
    let blobs = layout(
        &place,
        "layout",
        &[
            ("one", 3_000_000, "gzip"),
            ("plain", 100_000, "none"),
            ("absent", 110_000, "gzip"),
            ("empty", 0, "gzip"),
            ("two", 700_000, "gzip"),
            ("zstd", 5_000_000, "zstd"),
        ],
    );
    place.out("import --form tar oci:layout app");
    keep(&place, "layout", &[blobs[0], blobs[1], blobs[3], blobs[4], blobs[5]]);
    let text = place.out("index app");
    let lines: Vec<&str> = text.lines().collect();
    for ((line, blob), expect) in lines.iter().zip(&blobs).zip([
        ": index ",
        "no index: only layers compressed with gzip or zstd can have one",
        "no index: the store does not have its blob: pull the image from a registry with \
         --keep-layers",
        "no index: it needs none",
        ": index ",
        ": index ",
    ]) {
        assert!(line.starts_with(&format!("layer {blob}, ")) && line.contains(expect), "{line}");
    }
    assert_eq!(lines.len(), 6);
    let first = indexes(&place);
    assert_eq!(first.len(), 6);
    assert!(place.out("fsck").starts_with("sound"));

    // Indexing again makes the same bytes. Check the JSON report as well.
    let report: Value = serde_json::from_str(&place.out("index --json app")).unwrap();
    assert!(indexes(&place) == first, "the same bytes");
    let layers = report["layers"].as_array().unwrap();
    let of = |at: usize, field: &str| layers[at][field].clone();
    for (at, blob) in blobs.iter().enumerate() {
        assert_eq!(of(at, "digest"), json!(blob.to_string()));
        let size = fs::metadata(
            place.path("layout").join("blobs").join(blob.to_string().replace(':', "/")),
        );
        assert_eq!(of(at, "bytes"), json!(size.unwrap().len()));
    }
    for at in [0, 4, 5] {
        let device = of(at, "device");
        let device = device.as_str().unwrap();
        let size = |name: &str| fs::metadata(place.path("store/lazy").join(name)).unwrap().len();
        let both = size(&format!("{device}.index")) + size(&format!("{device}.windows"));
        assert_eq!(of(at, "indexBytes"), json!(both));
        assert!(of(at, "spans").as_u64().unwrap() >= 1 && of(at, "reason").is_null());
        assert_eq!(of(at, "made"), json!(true));
        assert!(place.path("store/data").join(device).exists());
    }
    // Frames of 2 MiB.
    assert_eq!(of(5, "spans"), json!(3));
    assert!(of(1, "device").is_null() && of(1, "reason").is_string());

    // The indexes are removed with the image.
    place.out("gc");
    assert!(indexes(&place) == first);
    place.out("rmi app");
    place.out("gc");
    assert_eq!(indexes(&place), []);
}

#[test]
fn a_damaged_blob_has_no_index() {
    let place = Place::new();
    let layers = [("one", 500_000, "gzip")];
    let blobs = layout(&place, "layout", &layers);
    place.out("import --form tar oci:layout app");
    keep(&place, "layout", &blobs);
    let file = kept(&place, &blobs[0]);
    let sound = fs::read(&file).unwrap();
    let refused = |ran: &Ran| {
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.err.contains("cannot make an index of app"), "{ran:?}");
        assert!(ran.out.contains("damaged") && ran.out.contains("quire fsck --repair"), "{ran:?}");
        assert!(ran.out.contains(&blobs[0].to_string()), "{ran:?}");
        assert!(!place.path("store/lazy").exists());
    };
    let middle = sound.len() / 2;
    let mut flipped = sound.clone();
    flipped[middle] ^= 1;
    // This byte of the header, the operating system, does not affect the contents.
    let mut other = sound.clone();
    other[9] ^= 1;
    let mut no_gzip = sound.clone();
    no_gzip[0] ^= 1;
    for bytes in [&flipped, &other, &no_gzip, &sound[..middle].to_vec(), &Vec::new()] {
        fs::remove_file(&file).unwrap();
        write(&file, bytes, 0o444);
        refused(&place.run("index app"));
        refused(&place.run("index --json app"));
    }
    assert_eq!(place.run("fsck --repair").code, Some(1));
    let gone = place.run("index app");
    assert!(gone.code == Some(2) && gone.out.contains("--keep-layers"), "{gone:?}");
    keep(&place, "layout", &blobs);
    place.out("index app");
    assert_eq!(indexes(&place).len(), 2);
}

#[test]
fn a_damaged_index_is_found_and_made_again() {
    let place = Place::new();
    let blobs = layout(&place, "layout", &[("one", 500_000, "gzip")]);
    place.out("import --form tar oci:layout app");
    keep(&place, "layout", &blobs);
    place.out("index app");
    let good = indexes(&place);
    for (name, bytes) in &good {
        let path = place.path("store/lazy").join(name);
        fs::remove_file(&path).unwrap();
        write(&path, &bytes[..bytes.len() - 1], 0o444);
        let found = place.run("fsck");
        assert!(found.code == Some(1) && found.out.contains("index of a lazy device"), "{found:?}");
        assert!(found.out.contains("quire index NAME"), "{found:?}");
        place.out("index app");
        assert!(indexes(&place) == good);
        assert!(place.out("fsck").starts_with("sound"));
    }
}

#[test]
fn an_image_that_can_have_none_is_refused() {
    let place = Place::new();
    let blobs = layout(&place, "layout", &[("one", 50_000, "gzip")]);
    place.out("import --form packed oci:layout app");
    keep(&place, "layout", &blobs);
    let refused = place.run("index app");
    assert_eq!((refused.code, refused.out.as_str()), (Some(2), ""));
    assert!(refused.err.contains("app has the form packed"), "{refused:?}");
    assert!(
        refused.err.contains("import the image again, with `--form tar --index`"),
        "{refused:?}"
    );
    place.out("convert --form tar app");
    place.out("index app");

    let tree = place.tree("tree", "x");
    place.out(&format!("import --form objects dir:{} plain", tree.display()));
    assert!(place.run("index plain").err.contains("plain has no layers"));
    assert_eq!(place.run("index nowhere").code, Some(3));
}

/// One pass over the blobs during an import makes the same indexes as `index`.
#[test]
fn an_import_makes_the_same_indexes() {
    let place = Place::new();
    let blobs = layout(
        &place,
        "layout",
        &[
            ("one", 3_000_000, "gzip"),
            ("zstd", 5_000_000, "zstd"),
            ("plain", 100_000, "none"),
            ("empty", 0, "gzip"),
            ("two", 700_000, "gzip"),
        ],
    );
    place.out("import --form tar oci:layout app");
    keep(&place, "layout", &blobs);
    place.out("index app");
    let expect = indexes(&place);
    assert_eq!(expect.len(), 6);

    let other = Place::new();
    fs::rename(place.path("layout"), other.path("layout")).unwrap();
    let ran = other.run("import --form tar --index oci:layout app");
    assert!(ran.code == Some(0) && ran.out.contains("3 layers indexed"), "{ran:?}");
    assert!(
        ran.err.contains("layer 3 has no index: only layers compressed with gzip or zstd"),
        "{ran:?}"
    );
    assert!(ran.err.contains("layer 4 has no index: it needs none"), "{ran:?}");
    assert!(indexes(&other) == expect);
    assert!(other.out("fsck --deep").starts_with("sound"));

    // The store does not have the original blobs of the layers, so `index` does not change the indexes.
    let present = other.run("index app");
    let counted = present.out.matches(": has an index already, ").count();
    assert!(present.code == Some(0) && counted == 3, "{present:?}");
    let report: Value = serde_json::from_str(&other.out("index --json app")).unwrap();
    let layer = &report["layers"][0];
    assert!(layer["made"] == json!(false) && layer["indexBytes"].is_u64(), "{report}");
    assert!(layer["reason"].is_null() && report["layers"][2]["reason"].is_string(), "{report}");
    assert!(indexes(&other) == expect);

    // Nor can it make a damaged index again.
    let (name, bytes) = expect.iter().find(|it| it.0.ends_with(".index")).unwrap();
    let (file, mut bytes) = (other.path("store/lazy").join(name), bytes.clone());
    bytes[100] ^= 1;
    fs::remove_file(&file).unwrap();
    fs::write(&file, &bytes).unwrap();
    let damaged = other.run("index app");
    assert_eq!(damaged.code, Some(2), "{damaged:?}");
    assert!(damaged.out.contains("no index: its index in the store is damaged"), "{damaged:?}");
    let remedy =
        "run `quire fsck --repair`, then import the image again, with `--form tar --index`";
    assert!(damaged.err.contains(remedy), "{damaged:?}");
    other.run("fsck --repair");
    other.out("import --form tar --index oci:layout app");
    assert!(indexes(&other) == expect);

    // Existing indexes are not made again; missing ones are, even if the layers are stored.
    let again = other.run("import --form tar --index oci:layout app");
    assert!(again.code == Some(0) && again.out.contains("already in the store"), "{again:?}");
    assert!(!again.out.contains("indexed"), "{again:?}");
    for (name, _) in &expect {
        fs::remove_file(other.path("store/lazy").join(name)).unwrap();
    }
    assert_eq!(other.run("index app").code, Some(2));
    let report = other.out("import --json --form tar --index oci:layout app");
    let report: Value = serde_json::from_str(&report).unwrap();
    let sizes: Vec<_> = (0..5).map(|at| report["layers"][at]["indexBytes"].is_u64()).collect();
    assert_eq!(sizes, [true, true, false, false, true]);
    assert!(report["layers"][0]["reused"] == json!(true), "{report}");
    assert!(indexes(&other) == expect);

    // The same holds after an import without indexes.
    let third = Place::new();
    fs::rename(other.path("layout"), third.path("layout")).unwrap();
    third.out("import --form packed oci:layout packed");
    third.out("import --form tar --index oci:layout app");
    assert!(indexes(&third) == expect);

    for form in ["packed", "objects"] {
        let refused = third.run(&format!("import --form {form} --index oci:layout x"));
        assert!(refused.code == Some(2) && refused.err.contains("--form tar"), "{refused:?}");
    }
}

/// A stored layer is fetched again if its index or its blob is needed and missing, and not if both exist.
#[cfg(feature = "registry")]
#[test]
fn a_pull_makes_the_indexes() {
    let from = Place::new();
    layout(&from, "layout", &[("one", 1_500_000, "gzip"), ("two", 300_000, "gzip")]);
    from.out("import --form tar oci:layout a:1");
    let Some(daemon) = crate::registry_verbs::registries::start(&from) else { return };
    let target = format!("{}/app:1", daemon.host);
    from.out(&format!("push a:1 {target}"));
    let made = Place::new();
    let pulled = made.run(&format!("pull --form tar --index {target} app"));
    assert!(pulled.code == Some(0) && pulled.out.contains("2 layers indexed"), "{pulled:?}");
    let again = made.run(&format!("pull --form tar --index {target} app"));
    assert!(again.code == Some(0) && !again.out.contains("indexed"), "{again:?}");

    let later = Place::new();
    later.out(&format!("pull --form tar {target} app"));
    let told = later.run("index app");
    assert!(told.code == Some(2) && told.out.contains("--keep-layers"), "{told:?}");
    later.out(&format!("pull --form tar --keep-layers {target} app"));
    later.out("index app");
    assert!(indexes(&later) == indexes(&made));

    let third = Place::new();
    third.out(&format!("pull --form tar {target} app"));
    let pulled = third.out(&format!("pull --form tar --index {target} app"));
    assert!(pulled.contains("2 layers indexed"), "{pulled}");
    assert!(indexes(&third) == indexes(&made));
}
