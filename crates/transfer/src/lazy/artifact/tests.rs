use std::io::{Cursor, Write};
use std::ops::Range;
use std::sync::atomic::AtomicBool;

use flate2::Compression;
use flate2::write::GzEncoder;
use image::erofs::{DeviceFile, Native, Placed, Stored, write_native};
use image::tree::{Builder, Content, Inode, InodeId, Link, Location, Metadata, Node, Timestamp};
use image::verity::{ObjectId, digest};
use oci::blobs::BlobSource;
use oci::manifest::Document;
use serde_json::{Value, json};
use store::{Trace, TraceRun};

use super::super::IndexedLayer;
use super::*;

struct Bytes(Vec<u8>);

impl BlobSource for Bytes {
    fn blob(&self, _: &Digest, _: u64, range: Range<u64>) -> Box<dyn io::Read + Send + '_> {
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        Box::new(Cursor::new(self.0.get(start..end).unwrap()))
    }
}

/// An image of three layers: two with the same tar, and one that has no files left in the image.
struct Stage {
    manifest: Vec<u8>,
    config: Vec<u8>,
    parts: LazyParts,
}

fn gzip(bytes: &[u8], level: u32) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::new(level));
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Makes an image with one file for each head. Each file is at offset 512 of a separate tar.
fn image_of<'a>(files: impl IntoIterator<Item = (&'a Head, &'a [u8])>) -> Vec<u8> {
    let mut builder = Builder::new();
    let mtime = Timestamp { seconds: 1, nanoseconds: 0 };
    let metadata = Metadata { permissions: 0o644, uid: 0, gid: 0, mtime };
    let none = builder.xattrs([]).unwrap();
    let (mut devices, mut objects) = (Vec::new(), Vec::<ObjectId>::new());
    for (head, name) in files {
        devices.push(DeviceFile { id: head.device, bytes: head.device_bytes });
        let object = digest(Algorithm::Sha256, name).into();
        objects.push(object);
        let location = Location::Object;
        let content = Content::External { size: 1000, object: Some(object), location };
        let id = builder.inode(&metadata, none, Node::Regular(content)).unwrap();
        builder.insert(InodeId::ROOT, name, id, Link::Equal).unwrap();
    }
    let find = |object: &ObjectId| {
        let device = objects.iter().position(|it| it == object)?.try_into().ok()?;
        Some(Placed::Whole(Stored { device, offset: 512, fingerprint: [7; 32] }))
    };
    let native = Native { has_tar: true, ..Native::new(&devices, &find) };
    let mut contents = |_: Inode<'_>, _, _: &mut dyn Write| Err(io::ErrorKind::Other.into());
    let mut image = Vec::new();
    write_native(&builder.finish(), &native, &mut contents, &mut image).unwrap();
    image
}

#[track_caller]
fn refused(error: &ArtifactError, expect: &str) {
    let text = testing::chain(error);
    assert!(text.contains(expect), "{text}");
}

/// Makes bytes that represent a tar.
fn tar(blocks: usize, period: usize) -> Vec<u8> {
    (0..512 * blocks).map(|it| u8::try_from(it % period).unwrap()).collect()
}

impl Stage {
    fn new() -> Self {
        let tar = tar(300, 251);
        Self::from_tars([(&tar, 1), (b"nothing", 6), (&tar, 9)], &[(0, b"file")])
    }

    /// Makes an image of two layers with a file in each. Their tars have the same length.
    fn of_two() -> Self {
        let [one, two] = [251, 241].map(|period| tar(300, period));
        Self::from_tars([(&one, 1), (&two, 9)], &[(0, b"one"), (1, b"two")])
    }

    /// Makes an image of these tars, each with its compression level. Each file adds the device of one layer.
    fn from_tars<const N: usize>(tars: [(&[u8], u32); N], files: &[(usize, &[u8])]) -> Self {
        let blobs = tars.map(|(tar, level)| gzip(tar, level));
        let diff_ids = tars.map(|(tar, _)| Digest::sha256(tar));
        let layers = blobs.each_ref().map(|blob| {
            json!({
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                "digest": Digest::sha256(blob), "size": blob.len(),
            })
        });
        let rootfs = json!({"type": "layers", "diff_ids": &diff_ids[..]});
        let config = json!({"architecture": "amd64", "os": "linux", "rootfs": rootfs});
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": ARTIFACT_MANIFEST, "layers": &layers[..],
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json",
                       "digest": Digest::sha256(&config), "size": config.len()},
        });
        let manifest = manifest.to_string().into_bytes();
        let Ok(Document::Image(read)) = Document::parse(&manifest) else { panic!("a manifest") };
        let index = |&(at, _): &(usize, &[u8])| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&[tars[at].0, &[1; 512]].concat()).unwrap();
            let byte = 3 + u8::try_from(at).unwrap();
            let layer = IndexedLayer {
                layer: &read.layers[at],
                diff_id: &diff_ids[at],
                device: &DeviceId::from_bytes(&[byte; 32]).unwrap(),
                file: &file,
            };
            let never = AtomicBool::new(false);
            LayerIndex::new(&layer, &Bytes(blobs[at].clone()), &never).unwrap()
        };
        let indexes: Vec<_> = files.iter().map(index).collect();
        let heads = indexes.iter().map(|it| &it.head);
        let image = image_of(heads.zip(files.iter().map(|it| it.1)));
        let id = digest(Algorithm::Sha256, &image).into();
        Self {
            manifest,
            config,
            parts: LazyParts {
                id,
                image,
                indexes,
                hot: None,
                created: None,
                traces: Traces::default(),
                recipes: Vec::new(),
            },
        }
    }

    fn with_subject<T>(&self, with: impl FnOnce(&LazySubject<'_>) -> T) -> T {
        let Ok(Document::Image(manifest)) = Document::parse(&self.manifest) else { panic!() };
        let config = Config::parse(&self.config).unwrap();
        let digest = &Digest::sha256(&self.manifest);
        let bytes = &self.manifest;
        with(&LazySubject { digest, bytes, manifest: &manifest, config: &config })
    }

    fn artifact(&self) -> Artifact {
        self.with_subject(|subject| self.parts.artifact(subject)).unwrap()
    }

    fn open(&self, artifact: &Artifact) -> Result<LazyParts, ArtifactError> {
        self.with_subject(|subject| {
            Artifact::open(&artifact.manifest, subject, |digest, size| {
                let blob = artifact.blobs.iter().find(|it| it.digest == *digest);
                let blob = blob.ok_or(io::ErrorKind::NotFound)?;
                assert_eq!(blob.bytes.len() as u64, size, "only right sizes are asked for");
                Ok(blob.bytes.clone())
            })
        })
    }

    /// Asserts that the artifact with a changed manifest is refused.
    #[track_caller]
    fn check_manifest(&self, change: impl FnOnce(&mut Value), expect: &str) {
        let mut artifact = self.artifact();
        let mut manifest = serde_json::from_slice(&artifact.manifest).unwrap();
        change(&mut manifest);
        artifact.manifest = manifest.to_string().into_bytes();
        let error = self.open(&artifact).map(drop).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }

    /// Asserts that the artifact with a changed first head, which its config names, is refused.
    #[track_caller]
    fn check_head(&self, change: impl FnOnce(&mut Vec<u8>), expect: &str) {
        refused(&self.with_head(change).map(drop).unwrap_err(), expect);
    }

    /// Opens the artifact with a changed first head, which its config names.
    fn with_head(&self, change: impl FnOnce(&mut Vec<u8>)) -> Result<LazyParts, ArtifactError> {
        let mut artifact = self.artifact();
        change(&mut artifact.blobs[2].bytes);
        let renamed = |artifact: &mut Artifact, at: usize| {
            let before = artifact.blobs[at].digest;
            let after = Digest::sha256(&artifact.blobs[at].bytes);
            artifact.blobs[at].digest = after;
            let replaced = |bytes: &[u8]| {
                let text = String::from_utf8(bytes.to_vec()).unwrap();
                text.replace(&before.to_string(), &after.to_string()).into_bytes()
            };
            artifact.manifest = replaced(&artifact.manifest);
            artifact.blobs[0].bytes = replaced(&artifact.blobs[0].bytes);
        };
        renamed(&mut artifact, 2);
        renamed(&mut artifact, 0);
        self.open(&artifact)
    }

    /// Asserts that the artifact with a changed manifest and a changed config, which the manifest names, is refused.
    #[track_caller]
    fn check_both(&self, change: impl FnOnce(&mut Value, &mut Value), expect: &str) {
        let mut artifact = self.artifact();
        let mut manifest = serde_json::from_slice(&artifact.manifest).unwrap();
        let mut config = serde_json::from_slice(&artifact.blobs[0].bytes).unwrap();
        change(&mut manifest, &mut config);
        let config = config.to_string().into_bytes();
        let digest = Digest::sha256(&config);
        manifest["config"]["digest"] = json!(digest);
        manifest["config"]["size"] = json!(config.len());
        artifact.blobs[0] = ArtifactBlob { digest, bytes: config };
        artifact.manifest = manifest.to_string().into_bytes();
        refused(&self.open(&artifact).map(drop).unwrap_err(), expect);
    }

    /// Asserts that the artifact with a changed blob is refused. The positions are: config, image, head, windows.
    #[track_caller]
    fn check_blob(&self, at: usize, change: impl FnOnce(&mut Vec<u8>), expect: &str) {
        let mut artifact = self.artifact();
        let blob = &mut artifact.blobs[at];
        let before = blob.digest;
        change(&mut blob.bytes);
        blob.digest = Digest::sha256(&blob.bytes);
        let (digest, size) = (blob.digest, blob.bytes.len());
        let mut manifest: Value = serde_json::from_slice(&artifact.manifest).unwrap();
        let named = std::iter::once("/config".to_owned());
        for place in named.chain((0..5).map(|it| format!("/layers/{it}"))) {
            if let Some(named) = manifest.pointer_mut(&place)
                && named["digest"] == json!(before)
            {
                (named["digest"], named["size"]) = (json!(digest), json!(size));
            }
        }
        artifact.manifest = manifest.to_string().into_bytes();
        refused(&self.open(&artifact).map(drop).unwrap_err(), expect);
    }

    #[track_caller]
    fn check_config(&self, change: impl FnOnce(&mut Value), expect: &str) {
        let with = |bytes: &mut Vec<u8>| {
            let mut config = serde_json::from_slice(bytes).unwrap();
            change(&mut config);
            *bytes = config.to_string().into_bytes();
        };
        self.check_blob(0, with, expect);
    }
}

#[test]
fn an_artifact_has_all_and_is_always_the_same() {
    let stage = Stage::new();
    let artifact = stage.artifact();
    assert_eq!(artifact, Stage::new().artifact());
    assert_eq!(artifact.digest, Digest::sha256(&artifact.manifest));
    assert_eq!(artifact.blobs.len(), 4);
    assert!(stage.open(&artifact).unwrap() == stage.parts);
    let manifest: Value = serde_json::from_slice(&artifact.manifest).unwrap();
    assert_eq!(manifest["artifactType"], "application/vnd.quire.lazy.v1");
    assert_eq!(manifest["subject"]["digest"], json!(Digest::sha256(&stage.manifest)));
    let config: Value = serde_json::from_slice(&artifact.blobs[0].bytes).unwrap();
    let device = "03".repeat(32);
    assert_eq!(config["layers"][0]["device"], device);
    assert!(config["layers"][1].get("device").is_none());
    assert_eq!(config["layers"][2]["device"], device);
    // Clients do not treat the artifact as an image.
    Document::parse(&artifact.manifest).unwrap_err();
}

#[test]
fn another_manifest_is_refused() {
    let stage = Stage::new();
    let other = Digest::sha256(b"other").to_string();
    stage.check_manifest(
        |it| it["subject"]["digest"] = json!(other),
        "belongs to manifest sha256:d9",
    );
    stage.check_manifest(|it| it["artifactType"] = json!("a/b"), "is a \"a/b\"");
    stage.check_manifest(|it| it["mediaType"] = json!("a/c"), "is a \"a/c\"");
    stage.check_manifest(|it| it["config"]["mediaType"] = json!("a/d"), "is a \"a/d\", not");
    stage.check_manifest(|it| it["layers"][0]["mediaType"] = json!("a/d"), "is a \"a/d\", not");
    stage.check_manifest(|it| it["layers"] = json!([]), "has 0 blobs");
    stage.check_manifest(|it| drop(it["layers"].as_array_mut().unwrap().pop()), "has 2 blobs");
    stage.check_manifest(
        |it| it["layers"].as_array_mut().unwrap().truncate(1),
        "0 heads for 1 devices",
    );
    stage.check_manifest(|it| it["layers"][1]["size"] = json!(1 << 20), "head of the index has");
    stage.check_manifest(|it| it["layers"][2]["size"] = json!(1 << 20), "windows of the index has");
    stage.check_manifest(|it| it["layers"][0]["size"] = json!(1 << 30), "image of the index has");
    stage.check_manifest(|it| it["layers"][0]["size"] = json!(-1), "is malformed");
    stage.check_manifest(|it| drop(it.as_object_mut().unwrap().remove("subject")), "malformed");
}

/// A pack of blocks of this device, made by hand from the page that describes the format.
fn pack_of(device: DeviceId) -> Vec<u8> {
    let frame = b"frame";
    let mut pack = b"quirehot".to_vec();
    for number in [1_u32, 1, 1, 1, 1, 0] {
        pack.extend(number.to_le_bytes());
    }
    pack.extend(device.as_bytes());
    for number in [0_u32, 1, 5, 3, 1] {
        pack.extend(number.to_le_bytes());
    }
    pack.extend([7; 32]);
    let digest = Digest::sha256(&pack);
    pack.extend(digest.as_bytes());
    pack.extend(frame);
    pack
}

#[test]
fn a_hot_pack_is_named_by_the_config_and_has_devices_of_the_image() {
    let mut stage = Stage::new();
    let without = stage.artifact();
    let pack = pack_of(stage.parts.indexes[0].head.device);
    stage.parts.hot = Some(pack.clone());
    stage.parts.created = Some("2026-11-28T12:00:00Z".to_owned());
    let with = stage.artifact();
    assert_ne!(with.index, without.index);
    assert!(stage.open(&with).unwrap() == stage.parts);
    let manifest: Value = serde_json::from_slice(&with.manifest).unwrap();
    assert_eq!(manifest["layers"][3]["mediaType"], "application/vnd.quire.lazy.hot.v1");
    let created = json!({"org.opencontainers.image.created": "2026-11-28T12:00:00Z"});
    assert_eq!(manifest["annotations"], created);
    // A pack that the config does not name is ignored, because only the config is trusted.
    let mut other = with.clone();
    let mut named = manifest.clone();
    let unnamed = without.blobs.iter().find(|it| it.digest == without.index).unwrap();
    named["config"]["digest"] = json!(unnamed.digest);
    named["config"]["size"] = json!(unnamed.bytes.len());
    other.manifest = named.to_string().into_bytes();
    other.blobs.push(unnamed.clone());
    assert_eq!(stage.open(&other).unwrap().hot, None);
    // Packs of other devices, and packs that are too short or too long.
    let of_another = pack_of(DeviceId::from_bytes(&[77; 32]).unwrap());
    let long = [&pack[..], b"x"].concat();
    for wrong in [of_another, pack[..pack.len() - 1].to_vec(), long, pack[..20].to_vec()] {
        stage.parts.hot = Some(wrong);
        let made = stage.with_subject(|subject| stage.parts.artifact(subject));
        assert!(matches!(made, Err(ArtifactError::Failed(_))), "{made:?}");
    }
}

#[test]
fn traces_and_blobs_of_later_versions_need_not_be_there() {
    let mut stage = Stage::new();
    let without = stage.artifact();
    let device = stage.parts.indexes[0].head.device;
    let runs = vec![TraceRun { device, block: 1, blocks: 2 }];
    for name in ["default", "other"] {
        let runs = runs.clone();
        stage.parts.traces.set(Trace { name: name.to_owned(), runs }).unwrap();
    }
    let with = stage.artifact();
    assert_eq!((with.blobs.len(), with.index), (5, without.index));
    let manifest: Value = serde_json::from_slice(&with.manifest).unwrap();
    assert_eq!(manifest["annotations"], json!({"vnd.quire.lazy.traces": "default,other"}));
    assert!(stage.open(&with).unwrap() == stage.parts);
    let more = |it: &mut Value, what: Value| it["layers"].as_array_mut().unwrap().push(what);
    let other = json!({"mediaType": "a/b", "digest": Digest::sha256(b"x"), "size": 1});
    let mut later = with.clone();
    let mut changed = manifest;
    more(&mut changed, other.clone());
    later.manifest = changed.to_string().into_bytes();
    assert!(stage.open(&later).unwrap() == stage.parts);
    stage.check_manifest(|it| (0..64).for_each(|_| more(it, other.clone())), "has 68 blobs");
    let head = |it: &mut Value| it["layers"][1].clone();
    stage.check_manifest(
        |it| {
            let head = head(it);
            more(it, head);
        },
        "not a \"application/vnd.quire.lazy.traces",
    );
    let large = |it: &mut Value| it["layers"][3]["size"] = json!(1 << 20);
    stage.check_manifest(large, "traces of the index has");
    let mut damaged = stage.artifact();
    damaged.blobs[4].bytes[20] ^= 1;
    assert!(matches!(stage.open(&damaged), Err(ArtifactError::Blob { .. })));
    let bytes = b"{}".to_vec();
    let digest = Digest::sha256(&bytes);
    let mut manifest: Value = serde_json::from_slice(&with.manifest).unwrap();
    (manifest["layers"][3]["digest"], manifest["layers"][3]["size"]) = (json!(digest), json!(2));
    damaged.manifest = manifest.to_string().into_bytes();
    damaged.blobs[4] = ArtifactBlob { digest, bytes };
    let error = stage.open(&damaged).unwrap_err();
    assert_eq!(error.to_string(), "cannot use the traces of the index");
}

#[test]
fn another_config_is_refused() {
    let stage = Stage::new();
    let other = Digest::sha256(b"other").to_string();
    stage.check_config(|it| it["version"] = json!(2), "has version 2");
    stage.check_config(|it| it["layers"][1]["digest"] = json!(other), "layer 2 is sha256");
    stage.check_config(|it| it["layers"][1]["size"] = json!(1), "layer 2 is sha256");
    stage.check_config(|it| it["layers"][0]["diffId"] = json!(other), "layer 1 is sha256");
    stage.check_config(
        |it| drop(it["layers"].as_array_mut().unwrap().pop()),
        "it has 2 layers, but the image has 3",
    );
    stage.check_config(|it| it["layers"][0]["device"] = json!("0A".repeat(32)), "lower-case");
    let device = json!("0a".repeat(32));
    stage.check_config(|it| it["layers"][0]["device"] = device.clone(), "1 heads for 2 devices");
    stage.check_config(|it| it["layers"][2]["head"] = json!(other), "has another head than");
    stage.check_config(
        |it| {
            it["layers"][0]["device"] = device.clone();
            it["layers"][2]["device"] = device.clone();
        },
        "another device than the config",
    );
    // A layer with the device of another layer.
    let with = |it: &mut Value| {
        it["layers"][1]["device"] = it["layers"][0]["device"].clone();
        it["layers"][1]["head"] = it["layers"][0]["head"].clone();
    };
    stage.check_config(with, "another diff id");
    stage.check_config(|it| it["layers"][1]["device"] = device.clone(), "layer 2 has only one of");
    stage.check_config(
        |it| drop(it["layers"][0].as_object_mut().unwrap().remove("device")),
        "layer 1 has only one of",
    );
    stage.check_config(|it| it["image"] = device.clone(), "the image of the index is");
    stage.check_config(|it| it["imageBytes"] = json!(1_u64 << 40), "more than 536870912");
    stage.check_config(|it| it["imageBytes"] = json!(100), "its length is wrong");
}

#[test]
fn other_blobs_are_refused() {
    let stage = Stage::new();
    // A changed blob whose descriptor is unchanged.
    let mut artifact = stage.artifact();
    artifact.blobs[2].bytes[100] ^= 1;
    let error = stage.open(&artifact).map(drop).unwrap_err();
    assert!(matches!(error, ArtifactError::Blob { .. }), "{error}");
    // A changed head needs another config.
    stage.check_blob(2, |it| it[100] ^= 1, "another head than the config");
    stage.check_head(|it| it[100] ^= 1, "its digest is wrong");
    stage.check_blob(3, |it| it.push(0), "another length of windows");
    let image = &stage.parts.image;
    let with = |image: &[u8]| zstd::bulk::compress(image, 1).unwrap();
    let longer = with(&[&image[..], &[0; 512]].concat());
    stage.check_blob(1, |it| *it = longer, "its length is wrong");
    let mut flipped = image.clone();
    flipped[500] ^= 1;
    stage.check_blob(1, |it| *it = with(&flipped), "not as Quire writes it: byte 500");
    stage.check_blob(1, |it| *it = image.clone(), "cannot decompress");
    // This is another image that Quire wrote, with the id of the first image.
    let mut head = stage.parts.indexes[0].head.clone();
    let other = head.blob;
    let renamed = image_of([(&head, &b"evil"[..])]);
    stage.check_blob(1, |it| *it = with(&renamed), "the image of the index is");
    // An index of a blob that is not a layer of the image.
    head.blob = Digest::sha256(b"other");
    assert_ne!(head.blob, other);
    stage.check_head(|it| *it = head.encode().unwrap(), "another blob");
}

fn swap(document: &mut Value, one: &str, two: &str) {
    let first = document.pointer_mut(one).unwrap().take();
    let second = std::mem::replace(document.pointer_mut(two).unwrap(), first);
    *document.pointer_mut(one).unwrap() = second;
}

#[test]
fn what_belongs_to_one_layer_is_not_taken_for_another() {
    let stage = Stage::of_two();
    assert!(stage.open(&stage.artifact()).unwrap() == stage.parts);
    let swap_pairs = |it: &mut Value| {
        swap(it, "/layers/1", "/layers/3");
        swap(it, "/layers/2", "/layers/4");
    };
    let swap_fields = |it: &mut Value, name: &str| {
        swap(it, &format!("/layers/0/{name}"), &format!("/layers/1/{name}"));
    };
    stage.check_manifest(swap_pairs, "another head than the config");
    stage.check_both(
        |manifest, config| {
            swap_pairs(manifest);
            swap_fields(config, "head");
        },
        "another device than the config",
    );
    stage.check_both(
        |manifest, config| {
            swap_pairs(manifest);
            swap_fields(config, "head");
            swap_fields(config, "device");
        },
        "another diff id than the config",
    );
    stage.check_config(|it| swap_fields(it, "digest"), "layer 1 is sha256");
    stage.check_config(|it| swap_fields(it, "diffId"), "layer 1 is sha256");
    stage.check_config(|it| swap(it, "/layers/0", "/layers/1"), "layer 1 is sha256");
}

#[test]
fn a_device_is_of_one_layer() {
    let stage = Stage::of_two();
    let same = |it: &mut Value, name: &str| it["layers"][1][name] = it["layers"][0][name].clone();
    stage.check_config(|it| same(it, "device"), "another head than the config");
    stage.check_config(|it| same(it, "head"), "another head than the config");
    let both = |it: &mut Value| {
        same(it, "device");
        same(it, "head");
    };
    stage.check_config(both, "2 heads for 1 devices");
    // Without the second head, the layers share a device, but their tars differ.
    let drop_pair = |it: &mut Value| it["layers"].as_array_mut().unwrap().truncate(3);
    stage.check_both(
        |manifest, config| {
            drop_pair(manifest);
            both(config);
        },
        "another diff id than the config",
    );
    // The same head for two devices.
    stage.check_both(
        |manifest, config| {
            manifest["layers"][3] = manifest["layers"][1].clone();
            manifest["layers"][4] = manifest["layers"][2].clone();
            same(config, "head");
        },
        "another device than the config",
    );
    // The image has a device that belongs to no layer.
    stage.check_both(
        |manifest, config| {
            drop_pair(manifest);
            for name in ["device", "head"] {
                config["layers"][1].as_object_mut().unwrap().remove(name).unwrap();
            }
        },
        "needs device number 2, but the index has no head of it",
    );
}

#[test]
fn the_head_of_a_layer_of_another_image_is_refused() {
    let (stage, other) = (Stage::of_two(), Stage::from_tars([(&tar(300, 239), 1)], &[(0, b"one")]));
    let foreign = &other.parts.indexes[0];
    assert_eq!(foreign.head.device, stage.parts.indexes[0].head.device);
    let encoded = || foreign.head.encode().unwrap();
    stage.check_head(|it| *it = encoded(), "another diff id than the config");
    let head = Head { diff_id: stage.parts.indexes[0].head.diff_id, ..foreign.head.clone() };
    stage.check_head(|it| *it = head.encode().unwrap(), "another blob than the config");
    // The head names the blob of the other layer.
    let second = &stage.parts.indexes[1].head;
    let (blob, blob_bytes) = (second.blob, second.blob_bytes);
    let head = Head { blob, blob_bytes, ..stage.parts.indexes[0].head.clone() };
    stage.check_head(|it| *it = head.encode().unwrap(), "another blob than the config");
    // The head names the right blob with another length.
    let first = &stage.parts.indexes[0].head;
    let head = Head { blob_bytes: first.blob_bytes + 1, ..first.clone() };
    stage.check_head(|it| *it = head.encode().unwrap(), "another blob than the config");
}

#[test]
fn units_and_windows_of_another_layer_fill_nothing() {
    let stage = Stage::of_two();
    let [one, two] = &stage.parts.indexes[..] else { unreachable!() };
    // The head has fewer units than the device.
    let mut head = one.head.clone();
    head.units.pop();
    head.encode().unwrap_err();
    // A head with the right number of units is accepted, although the layer's bytes have other digests.
    let head = Head { units: two.head.units.clone(), ..one.head.clone() };
    let opened = stage.with_head(|it| *it = head.encode().unwrap()).unwrap();
    let bytes = tar(300, 251);
    let unit = &bytes[..64 << 10];
    assert!(stage.parts.indexes[0].head.is_unit(0, unit));
    assert!(!opened.indexes[0].head.is_unit(0, unit));
    // The group is longer or shorter than its windows, as if it belonged to another layer's index.
    for change in [-1, 1] {
        let mut head = one.head.clone();
        head.groups[0].bytes = head.groups[0].bytes.checked_add_signed(change).unwrap();
        let encoded = head.encode().unwrap();
        stage.check_head(|it| *it = encoded, "another length of windows than the config");
    }
    let mut head = one.head.clone();
    head.groups[0].first = 1;
    head.encode().unwrap_err();
}

#[test]
fn parts_that_do_not_fit_make_no_artifact() {
    let stage = Stage::new();
    let made = |parts: &LazyParts| {
        let made = stage.with_subject(|subject| parts.artifact(subject));
        made.unwrap_err().to_string()
    };
    let mut parts = stage.parts.clone();
    parts.indexes[0].head.diff_id = Digest::sha256(b"other");
    assert!(made(&parts).contains("1 indexes for 0 devices"), "{}", made(&parts));
    let mut parts = stage.parts.clone();
    parts.indexes[0].windows.push(0);
    assert!(made(&parts).contains("length of windows"));
    let mut parts = stage.parts.clone();
    parts.indexes.clear();
    assert!(made(&parts).contains("needs device number 1"));
    let mut parts = stage.parts.clone();
    parts.id = ImageId::from_bytes(&[1; 32]).unwrap();
    assert!(made(&parts).contains("the image of the index is"));
}

/// Tests the limit for layers that were not fetched, whose size is only a claim of the manifest.
#[test]
fn large_layers_that_are_claimed_allow_no_large_index() {
    let digest = Digest::sha256(b"");
    let claimed = |size| {
        let layer = json!({"mediaType": "", "digest": digest.to_string(), "size": size});
        serde_json::from_value::<Descriptor>(layer).unwrap()
    };
    let (large, diff_id) = (claimed(1_u64 << 40), digest);
    let layers = [0, 1].map(|_| SubjectLayer { layer: &large, diff_id: &diff_id });
    let part = |size| RawDescriptor { media_type: String::new(), digest, size };
    let (most, more) = (part(128 << 20), part((128 << 20) + 1));
    check_sizes(&layers, &[[&most, &most], [&most, &most]]).unwrap();
    let refused = check_sizes(&layers, &[[&most, &most], [&most, &more]]).unwrap_err();
    assert!(matches!(refused, ArtifactError::TooLarge { what: "heads and windows", .. }));
}
