//! Tests two users that share a store: neither sees a file without having the blob, named by its digest, that
//! contains the file.

use std::collections::BTreeSet;
use std::fs;

use image::erofs::read::Owners;
use quire_transfer as transfer;
use serde_json::json;

use transfer::import::{ImportOptions, Report};
use transfer::pull::Layers;

use super::pulls::{MANIFEST, pull_name};
use super::*;
use crate::build::{Age, Layout, Pack, Tar, pack};
use crate::home::{Home, usual_wishes};
use testing::fake::{Server, content, reply};

/// A layer as an image describes it, truly or falsely.
#[derive(Debug, Clone)]
struct Told {
    diff_id: Digest,
    blob: Digest,
    size: usize,
    /// Bytes of the blob with this name, if any.
    bytes: Option<Vec<u8>>,
}

impl Told {
    fn honest(tar: &[u8], how: Pack) -> Self {
        let bytes = pack(tar, how);
        let blob = digest(&bytes);
        Self { diff_id: digest(tar), blob, size: bytes.len(), bytes: Some(bytes) }
    }

    /// The garbage blob of the first report: 23 bytes.
    fn garbage(self) -> Self {
        let bytes = b"nothing of that is here".to_vec();
        Self { blob: digest(&bytes), size: bytes.len(), bytes: Some(bytes), ..self }
    }

    /// The right name, with other bytes of the same length.
    fn flipped(self) -> Self {
        let bytes = self.bytes.map(|mut bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            bytes
        });
        Self { bytes, ..self }
    }

    fn absent(self) -> Self {
        Self { bytes: None, ..self }
    }
}

fn config(layers: &[Told]) -> Vec<u8> {
    let diff_ids: Vec<_> = layers.iter().map(|it| it.diff_id.to_string()).collect();
    let rootfs = json!({ "type": "layers", "diff_ids": diff_ids });
    json!({ "os": "linux", "architecture": "amd64", "rootfs": rootfs }).to_string().into_bytes()
}

fn manifest(layers: &[Told]) -> Vec<u8> {
    let config = config(layers);
    let layers = layers.iter().map(|it| {
        let media_type = "application/vnd.oci.image.layer.v1.tar+gzip";
        json!({ "mediaType": media_type, "digest": it.blob.to_string(), "size": it.size })
    });
    let config = json!({
        "mediaType": "application/vnd.oci.image.config.v1+json",
        "digest": digest(&config).to_string(), "size": config.len(),
    });
    let layers: Vec<_> = layers.collect();
    json!({ "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers })
        .to_string()
        .into_bytes()
}

/// The result of an import: the names of all files of the image, or the error.
type Outcome = Result<Vec<String>, String>;

struct Tenants {
    home: Home,
    count: usize,
}

impl Tenants {
    fn new() -> Self {
        Self { home: Home::new(), count: 0 }
    }

    fn import(&mut self, source: &str, form: store::Form) -> Outcome {
        let name = format!("image{}:latest", self.count).parse().unwrap();
        let options = ImportOptions { name: Some(&name), form, ..usual_wishes() };
        let source = oci::source::ImageSource::parse(source.as_ref()).unwrap();
        let outcome =
            transfer::import::import(&self.home.store, &source, &self.home.environment(), &options);
        self.outcome(outcome.map_err(|error| chain(&error)), &name)
    }

    fn outcome(&self, outcome: Result<Report, String>, name: &store::RefName) -> Outcome {
        let reference = self.home.store.refs.get(name).unwrap();
        match outcome {
            Ok(report) => {
                assert_eq!(reference.unwrap().image, report.image);
                Ok(self.files(&report.image))
            }
            Err(error) => {
                assert_eq!(reference, None, "a refused image has a name");
                Err(error)
            }
        }
    }

    fn files(&self, id: &ImageId) -> Vec<String> {
        let opened = self.home.store.open_image(id).unwrap();
        let tree = self.home.store.tree(&opened, Owners::AsWritten).unwrap().tree;
        let mut names = Vec::new();
        let mut walk = tree.walk();
        while let Some((path, _)) = walk.next() {
            names.push(String::from_utf8_lossy(&path[1..]).into_owned());
        }
        names.retain(|it| !it.is_empty());
        names
    }

    fn layout(&mut self, layers: &[Told], form: store::Form) -> Outcome {
        self.count += 1;
        let path = self.home.path(&format!("layout{}", self.count));
        let mut layout = Layout::new(&path);
        for layer in layers {
            if let Some(bytes) = &layer.bytes {
                fs::write(layout.blob_path(&layer.blob), bytes).unwrap();
            }
        }
        layout.blob(&config(layers));
        let descriptor = layout.descriptor(MANIFEST, &manifest(layers));
        layout.add(descriptor, None, None);
        self.import(&format!("oci:{}", path.display()), form)
    }

    /// Imports an archive in which the bytes of layers may differ from their names or the config.
    fn archive(&mut self, layers: &[Told], age: Age, form: store::Form) -> Outcome {
        self.count += 1;
        let path = self.home.path(&format!("archive{}", self.count));
        fs::write(&path, archive_of(layers, age)).unwrap();
        self.import(&format!("docker-archive:{}", path.display()), form)
    }

    fn pull(&mut self, layers: &[Told], kept: Layers) -> Outcome {
        self.count += 1;
        let (manifest, config) = (manifest(layers), config(layers));
        let blobs = layers.to_vec();
        let server = Server::start(move |request, _| {
            if request.path.contains("/manifests/") {
                return reply(200).header("content-type", MANIFEST).body(&manifest);
            }
            let is = |digest: &Digest| request.path.ends_with(&digest.to_string());
            let blob = blobs.iter().find(|it| is(&it.blob)).and_then(|it| it.bytes.as_ref());
            match blob {
                Some(bytes) => content(request, bytes),
                None if is(&digest(&config)) => content(request, &config),
                None => reply(404),
            }
        });
        let name = format!("{}/app:{}", server.host(), self.count);
        let name_here = name.parse().unwrap();
        match pull_name(&self.home, &name, kept, &settings()) {
            Ok(transfer::pull::Pulled::Image(report)) => self.outcome(Ok(report), &name_here),
            Ok(other) => panic!("{other:?}"),
            Err(error) => self.outcome(Err(chain(&error)), &name_here),
        }
    }
}

/// Makes an archive like `docker save`. Newer archives name a layer's file by the digest that its bytes should have.
fn archive_of(layers: &[Told], age: Age) -> Vec<u8> {
    let config = config(layers);
    let in_devices = |digest: Digest| digest.to_string().replace("sha256:", "blobs/sha256/");
    let config_name = match age {
        Age::Old => "config.json".to_owned(),
        Age::New => in_devices(digest(&config)),
    };
    let mut archive = Tar::default();
    archive.entry(&config_name, b'0', "", &config);
    let mut names: Vec<String> = Vec::new();
    for (at, layer) in layers.iter().enumerate() {
        let name = match age {
            Age::Old => format!("layer{at}/layer.tar"),
            Age::New => in_devices(layer.diff_id),
        };
        if !names.contains(&name) {
            archive.entry(&name, b'0', "", layer.bytes.as_deref().unwrap_or_default());
        }
        names.push(name);
    }
    let manifest = json!([{ "Config": config_name, "RepoTags": ["x:1"], "Layers": names }]);
    archive.entry("manifest.json", b'0', "", manifest.to_string().as_bytes());
    archive.bytes()
}

fn secret() -> Vec<u8> {
    Tar::from_text("d etc").file("etc/private-key", &[b'S'; 100]).bytes()
}

/// A user who knows only the diff id of a secret layer.
#[test]
fn a_diff_id_gives_nobody_a_layer() {
    for form in [store::Form::Objects, store::Form::Packed, store::Form::Tar] {
        let mut both = Tenants::new();
        let told = Told::honest(&secret(), Pack::Gzip);
        let shown = both.layout(std::slice::from_ref(&told), form).unwrap();
        assert_eq!(shown, ["etc", "etc/private-key"]);
        let images = both.home.store.images.ids().unwrap();
        let check = |what: &str, outcome: Outcome, reason: &str| match outcome {
            Ok(files) => panic!("{form:?}: {what} was shown {files:?}"),
            // A layer that the store has in another form is unpacked, not only compared.
            Err(error) if reason == "as in the config" && error.contains("the tar is corrupt") => {}
            Err(error) => assert!(error.contains(reason), "{form:?}: {what}: {error}"),
        };
        check("a garbage blob", both.layout(&[told.clone().garbage()], form), "as in the config");
        check(
            "a garbage blob",
            both.pull(&[told.clone().garbage()], Layers::Forget),
            "as in the config",
        );
        check("a kept one", both.pull(&[told.clone().garbage()], Layers::Keep), "as in the config");
        let nowhere = told.clone().garbage().absent();
        check("a blob that is not there", both.pull(&[nowhere], Layers::Forget), "404");
        let other = Told { bytes: Some(Tar::from_text("f x y").bytes()), ..told.clone() };
        check(
            "an old archive",
            both.archive(std::slice::from_ref(&other), Age::Old, form),
            "as in the config",
        );
        check("an archive whose names lie", both.archive(&[other], Age::New, form), "the digest");
        let plain = Told::honest(&secret(), Pack::Plain);
        let flipped = plain.clone().flipped();
        check(
            "flipped bytes",
            both.archive(std::slice::from_ref(&flipped), Age::New, form),
            "the digest",
        );
        check("flipped bytes", both.layout(&[flipped], form), "the digest");
        check(
            "an empty archive",
            both.archive(&[plain.absent()], Age::Old, form),
            "as in the config",
        );
        assert_eq!(both.home.store.images.ids().unwrap(), images, "{form:?}: an image was added");
        // A user who has the bytes of a layer, or knows the digest of a blob that contains them, may use its files.
        let zstd = Told::honest(&secret(), Pack::Zstd);
        let was_here = |told: &Told| {
            let layer = both.home.store.layers.open(&told.diff_id).unwrap().unwrap();
            layer.info().is_in(&told.blob)
        };
        assert!(was_here(&told) && !was_here(&zstd));
        check("another blob's name", both.layout(&[zstd.clone().flipped()], form), "the digest");
        assert_eq!(both.layout(std::slice::from_ref(&zstd), form).unwrap(), shown);
        let layer = both.home.store.layers.open(&told.diff_id).unwrap().unwrap();
        assert!(layer.info().is_in(&told.blob) && layer.info().is_in(&zstd.blob));
        assert_eq!(both.pull(&[zstd.absent()], Layers::Forget).unwrap(), shown);
        assert_eq!(both.layout(&[told.flipped()], form).unwrap(), shown);
        assert!(both.home.is_sound());
    }
}

/// Predicts the result from the manifests: an image is allowed if each of its layers is in the blob that its manifest
/// names, and the bytes of that blob were hashed during this import or before.
#[test]
fn whatever_two_tenants_tell_no_file_is_shown_without_a_blob() {
    if !testing::long_tests() {
        return;
    }
    let rounds = testing::rounds(10);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for round in 0..rounds {
        let mut both = Tenants::new();
        let tars: Vec<_> = (0..3_u8)
            .map(|at| Tar::default().file(&format!("file{at}"), &[at; 100]).bytes())
            .collect();
        let mut known = BTreeSet::new();
        let mut log = Vec::new();
        for _ in 0..12 {
            let form = [store::Form::Objects, store::Form::Packed, store::Form::Tar];
            let form = form[random.below(3)];
            let pull = random.below(3) == 0;
            // A failed pull may have added some of its layers, which the model does not predict, so a pull has only
            // one layer.
            let count = if pull { 1 } else { 1 + random.below(2) };
            let layers: Vec<_> = (0..count)
                .map(|_| {
                    let tar = random.below(tars.len());
                    let how = [Pack::Plain, Pack::Gzip, Pack::Zstd][random.below(3)];
                    let honest = Told::honest(&tars[tar], how);
                    let other = Told::honest(&tars[random.below(tars.len())], how);
                    let told = match random.below(9) {
                        0 => honest.garbage(),
                        1 => honest.flipped(),
                        2 if pull => honest.absent(),
                        3 if pull => honest.garbage().absent(),
                        // The name and bytes of one layer, and the diff id of another.
                        4 => Told { diff_id: honest.diff_id, ..other },
                        // The name of one layer, and the bytes of another.
                        5 => Told { bytes: other.bytes, size: other.size, ..honest },
                        _ => honest,
                    };
                    (format!("file{tar}"), told)
                })
                .collect();
            let mut told: Vec<_> = layers.iter().map(|it| it.1.clone()).collect();
            let is_archive = !pull && random.below(3) == 0;
            let age = [Age::Old, Age::New][random.below(2)];
            // Equal names have equal bytes.
            let key = |it: &Told| if is_archive { it.diff_id } else { it.blob };
            let is_shared = age == Age::New || !is_archive;
            if let [first, second] = &mut told[..]
                && is_shared
                && key(first) == key(second)
            {
                (second.bytes, second.size) = (first.bytes.clone(), first.size);
            }
            let outcome = match (pull, is_archive) {
                (true, _) => both.pull(&told, [Layers::Forget, Layers::Keep][random.below(2)]),
                (false, true) => both.archive(&told, age, form),
                (false, false) => both.layout(&told, form),
            };
            log.push(format!("{form:?} pull {pull} archive {is_archive} {age:?} {outcome:?}"));
            let gives = |it: &Told| {
                let unpacked = it.bytes.as_ref().and_then(|bytes| {
                    tars.iter().find(|tar| {
                        [Pack::Plain, Pack::Gzip, Pack::Zstd]
                            .map(|how| pack(tar, how))
                            .contains(bytes)
                    })
                });
                unpacked.is_some_and(|tar| digest(tar) == it.diff_id)
            };
            let is_right = |it: &Told| {
                let is_named = it.bytes.as_ref().is_some_and(|bytes| digest(bytes) == it.blob);
                if is_archive {
                    // In newer archives, a name is the digest of the tar, which must be uncompressed.
                    let is_plain = it.bytes.as_ref().is_some_and(|it2| digest(it2) == it.diff_id);
                    return gives(it) && (age == Age::Old || is_plain);
                }
                gives(it) && is_named
            };
            let is_known = |it: &Told| !is_archive && known.contains(&(it.diff_id, it.blob));
            match &outcome {
                Ok(files) => {
                    assert!(
                        told.iter().all(|it| is_right(it) || is_known(it)),
                        "{round}: {log:#?}"
                    );
                    let expect: BTreeSet<_> = layers.iter().map(|it| it.0.clone()).collect();
                    assert_eq!(files.iter().cloned().collect::<BTreeSet<_>>(), expect, "{log:#?}");
                    for it in told.iter().filter(|it| is_right(it)) {
                        let bytes = it.bytes.as_ref().unwrap();
                        known.insert((it.diff_id, digest(bytes)));
                    }
                }
                Err(_) => {
                    assert!(!told.iter().all(is_right), "{round}: an honest image: {log:#?}");
                }
            }
        }
        assert!(both.home.is_sound(), "{log:#?}");
    }
}

/// A pseudo-random number generator: xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let value = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        usize::try_from(value).unwrap() % bound
    }
}
