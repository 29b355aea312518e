//! Images from many tools are imported into a store, and exported again byte for byte. `cargo xtask inputs makers`
//! makes them.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;

use serde_json::Value;

use crate::Place;
use crate::registry_verbs::registries::start;

/// An image in skopeo's `dir` format: a manifest, and blobs named by the hex of their digests.
struct DirImage {
    name: String,
    dir: PathBuf,
}

impl DirImage {
    fn manifest(&self) -> Value {
        json(&self.dir.join("manifest.json"))
    }

    fn blob(&self, digest: &Value) -> PathBuf {
        self.dir.join(hex(digest))
    }

    /// Returns the layers of the manifest, each with its diff id from the config.
    fn layers(&self) -> Vec<(PathBuf, String)> {
        let manifest = self.manifest();
        let config = json(&self.blob(&manifest["config"]["digest"]));
        let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap();
        let layers = manifest["layers"].as_array().unwrap();
        assert_eq!(layers.len(), diff_ids.len());
        let layers = layers.iter().zip(diff_ids);
        layers.map(|(layer, id)| (self.blob(&layer["digest"]), hex(id))).collect()
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn hex(digest: &Value) -> String {
    digest.as_str().unwrap().strip_prefix("sha256:").unwrap().to_owned()
}

/// Returns the available images, and notes a skipped test if there are none.
fn made() -> Vec<DirImage> {
    let folder = std::env::var_os("QUIRE_CACHE").map(|it| PathBuf::from(it).join("makers"));
    let Some(folder) = folder.filter(|it| it.is_dir()) else {
        testing::not_made("an image of another maker", "makers");
        return Vec::new();
    };
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".skipped") {
            testing::skipped(fs::read_to_string(dir).unwrap().trim());
        } else {
            found.push(DirImage { name, dir });
        }
    }
    assert!(found.len() >= 12, "{} images", found.len());
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

fn skopeo(from: &str, to: &str) {
    let mut skopeo = testing::command("skopeo").expect("the test asked for it");
    skopeo.args(["--insecure-policy", "copy", "--quiet", "--preserve-digests"]);
    skopeo.args(["--src-tls-verify=false", "--dest-tls-verify=false", from, to]);
    let output = skopeo.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "skopeo copy {from} {to}: {error}");
}

/// Asserts that two files, one of them perhaps compressed, have the same bytes. gzip and zstd decompress, not
/// Quire.
fn assert_same_tar(made: &Path, ours: &Path, context: &str) {
    let open = |path: &Path| -> (Box<dyn Read>, Option<Child>) {
        let mut start = [0; 4];
        let read = File::open(path).unwrap().read(&mut start).unwrap();
        let unpacker = match start[..read] {
            [0x1f, 0x8b, ..] => "gzip",
            // The file begins with a frame, or with a skippable frame, as zstd:chunked may do.
            [0x28, 0xb5, 0x2f, 0xfd] | [0x50..=0x5f, 0x2a, 0x4d, 0x18] => "zstd",
            _ => return (Box::new(File::open(path).unwrap()), None),
        };
        let mut child = Command::new(unpacker)
            .arg("-dc")
            .stdin(File::open(path).unwrap())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        (Box::new(child.stdout.take().unwrap()), Some(child))
    };
    let ((mut made, one), (mut ours, other)) = (open(made), open(ours));
    let (mut a, mut b) = (Vec::new(), Vec::new());
    let mut at = 0;
    loop {
        a.clear();
        b.clear();
        made.by_ref().take(1 << 20).read_to_end(&mut a).unwrap();
        ours.by_ref().take(1 << 20).read_to_end(&mut b).unwrap();
        let differ = a.iter().zip(&b).position(|(a, b)| a != b);
        assert_eq!(differ.map(|it| at + it), None, "{context}");
        assert_eq!(at + a.len(), at + b.len(), "{context}: lengths");
        at += a.len();
        if a.is_empty() {
            break;
        }
    }
    for mut child in one.into_iter().chain(other) {
        assert!(child.wait().unwrap().success(), "{context}");
    }
    assert!(at > 0, "{context}");
}

/// Compares every layer of an image with the same layer after it went through a store.
fn assert_same_layers(image: &DirImage, other: &DirImage) {
    assert_eq!(other.manifest()["config"]["digest"], image.manifest()["config"]["digest"]);
    let pairs = image.layers().into_iter().zip(other.layers());
    for (number, ((made, id), (ours, other_id))) in pairs.enumerate() {
        assert_eq!(id, other_id);
        assert_same_tar(&made, &ours, &format!("{}, layer {number}", image.name));
    }
}

/// Compares an image with the one that a store rebuilds from its recipes and objects.
fn assert_rebuilt(place: &Place, image: &DirImage, reference: &str) {
    place.out(&format!("export --compression none {reference} oci:{}:1", image.name));
    for (number, (blob, diff_id)) in image.layers().iter().enumerate() {
        let tar = place.path(&format!("{}/blobs/sha256/{diff_id}", image.name));
        assert_same_tar(blob, &tar, &format!("{}, layer {number}, rebuilt", image.name));
    }
}

fn check(image: &DirImage, first: &str, second: &str) {
    let name = &image.name;
    let (origin, target) = (format!("{first}/{name}:1"), format!("{second}/{name}:1"));
    skopeo(&format!("dir:{}", image.dir.display()), &format!("docker://{origin}"));

    // A store that keeps only recipes and objects rebuilds each tar.
    let rebuilt = Place::new();
    rebuilt.out(&format!("pull {origin}"));
    assert_rebuilt(&rebuilt, image, &origin);
    assert!(rebuilt.out("fsck --deep").starts_with("sound"));

    // In a registry without these blobs, the manifest and compressed layers change, but the tars and the config do
    // not.
    rebuilt.out(&format!("push {origin} {target}"));
    let again = DirImage { name: name.clone(), dir: rebuilt.path("again") };
    skopeo(&format!("docker://{target}"), &format!("dir:{}", again.dir.display()));
    assert_same_layers(image, &again);

    // With the layers kept, every blob is unchanged.
    let kept = Place::new();
    kept.out(&format!("pull --keep-layers {origin}"));
    let target = format!("{second}/{name}-kept:1");
    kept.out(&format!("push {origin} {target}"));
    let again = kept.path("again");
    skopeo(&format!("docker://{target}"), &format!("dir:{}", again.display()));
    let files = |dir: &Path| {
        let files = fs::read_dir(dir).unwrap().map(|it| it.unwrap().file_name());
        files.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(files(&again), files(&image.dir), "{name}");
    for file in files(&again) {
        let same = fs::read(image.dir.join(&file)).unwrap() == fs::read(again.join(&file)).unwrap();
        assert!(same, "{name}: {} differs", file.display());
    }
}

#[test]
fn every_layer_of_every_maker_comes_back() {
    let place = Place::new();
    let made = made();
    if made.is_empty() || !testing::programs(&["skopeo", "gzip", "zstd"]) {
        return;
    }
    let (Some(first), Some(second)) = (start(&place), start(&place)) else { return };
    let next = Mutex::new(made.iter());
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while let Some(image) = { next.lock().unwrap().next() } {
                    check(image, &first.host, &second.host);
                }
            });
        }
    });
}

#[test]
fn a_difference_between_tars_is_seen() {
    if !testing::programs(&["gzip", "zstd"]) {
        return;
    }
    let place = Place::new();
    let long: Vec<u8> = (0..3_000_000_u32).map(|it| it.to_le_bytes()[1]).collect();
    let mut other = long.clone();
    other[2_999_998] ^= 1;
    let write = |name: &str, bytes: &[u8]| {
        fs::write(place.path(name), bytes).unwrap();
        for packer in ["gzip -kf", "zstd -qkf"] {
            let mut packer = packer.split(' ');
            let mut command = Command::new(packer.next().unwrap());
            command.args(packer).arg(place.path(name));
            assert!(command.status().unwrap().success());
        }
    };
    write("a", &long);
    write("b", &other);
    write("c", &long[..2_999_999]);
    for end in ["", ".gz", ".zst"] {
        let path = |name: &str| place.path(&format!("{name}{end}"));
        assert_same_tar(&place.path("a"), &path("a"), "the same");
        for name in ["b", "c"] {
            let differ = || assert_same_tar(&place.path("a"), &path(name), "differs");
            assert!(std::panic::catch_unwind(differ).is_err(), "{name}{end}");
        }
    }
}
