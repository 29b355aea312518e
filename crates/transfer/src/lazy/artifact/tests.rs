use std::io::{Cursor, Write};
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

    /// Returns the parts that the artifact gives: those of the stage, but the windows are only named.
    fn opened(&self) -> LazyParts {
        let mut parts = self.parts.clone();
        for index in &mut parts.indexes {
            index.windows = IndexWindows::Blob(Digest::sha256(index.windows.groups().unwrap()));
        }
        parts
    }

    fn pieces(&self) -> Pieces {
        Pieces::new(&self.artifact())
    }

    /// Asserts that the artifact with a changed manifest is refused.
    #[track_caller]
    fn check_manifest(&self, change: impl FnOnce(&mut Value), expect: &str) {
        let mut artifact = self.artifact();
        let mut manifest = serde_json::from_slice(&artifact.manifest).unwrap();
        change(&mut manifest);
        artifact.manifest = manifest.to_string().into_bytes();
        refused(&self.open(&artifact).map(drop).unwrap_err(), expect);
    }

    /// Asserts that the artifact with a changed first head, which its config names, is refused.
    #[track_caller]
    fn check_head(&self, change: impl FnOnce(&mut Vec<u8>), expect: &str) {
        refused(&self.with_head(change).map(drop).unwrap_err(), expect);
    }

    /// Opens the artifact with a changed first head, which its config names.
    fn with_head(&self, change: impl FnOnce(&mut Vec<u8>)) -> Result<LazyParts, ArtifactError> {
        let mut pieces = self.pieces();
        let before = Digest::sha256(&pieces.heads[0]).to_string();
        change(&mut pieces.heads[0]);
        let after = Digest::sha256(&pieces.heads[0]).to_string();
        let config = pieces.config.to_string().replace(&before, &after);
        pieces.config = serde_json::from_str(&config).unwrap();
        self.open(&pieces.artifact())
    }

    /// Asserts that the artifact with changed pieces is refused.
    #[track_caller]
    fn check(&self, change: impl FnOnce(&mut Pieces), expect: &str) {
        let mut pieces = self.pieces();
        change(&mut pieces);
        refused(&self.open(&pieces.artifact()).map(drop).unwrap_err(), expect);
    }

    /// Asserts that the artifact with a changed config is refused.
    #[track_caller]
    fn check_config(&self, change: impl FnOnce(&mut Value), expect: &str) {
        self.check(|it| change(&mut it.config), expect);
    }

    /// Asserts that the artifact is refused if its config claims other lengths of the parts, and its manifest the
    /// length that they have together.
    #[track_caller]
    fn check_lengths(&self, change: impl FnOnce(&mut Value), expect: &str) {
        let mut artifact = self.artifact();
        let mut config: Value = serde_json::from_slice(&artifact.blobs[0].bytes).unwrap();
        change(&mut config["start"]);
        let start = &config["start"];
        let heads = start["heads"].as_array().unwrap().iter();
        let others = ["image", "hot", "traces"].map(|it| &start[it]);
        let sum = heads.chain(others).filter_map(Value::as_u64).fold(0, u64::wrapping_add);
        let mut manifest: Value = serde_json::from_slice(&artifact.manifest).unwrap();
        manifest["layers"][0]["size"] = json!(sum);
        manifest["config"] = descriptor(&manifest["config"], config.to_string().as_bytes());
        let bytes = config.to_string().into_bytes();
        artifact.blobs[0] = ArtifactBlob { digest: Digest::sha256(&bytes), bytes };
        artifact.manifest = manifest.to_string().into_bytes();
        refused(&self.open(&artifact).map(drop).unwrap_err(), expect);
    }
}

/// The parts of an artifact, which can be changed and put together again.
struct Pieces {
    manifest: Value,
    config: Value,
    image: Vec<u8>,
    heads: Vec<Vec<u8>>,
    hot: Vec<u8>,
    traces: Vec<u8>,
    windows: Vec<Vec<u8>>,
}

/// Returns a descriptor of the same type for other bytes, without embedded content.
fn descriptor(before: &Value, bytes: &[u8]) -> Value {
    json!({
        "mediaType": before["mediaType"], "digest": Digest::sha256(bytes), "size": bytes.len(),
    })
}

impl Pieces {
    /// Takes an artifact apart as the page on the format describes it.
    fn new(artifact: &Artifact) -> Self {
        let manifest: Value = serde_json::from_slice(&artifact.manifest).unwrap();
        let config: Value = serde_json::from_slice(&artifact.blobs[0].bytes).unwrap();
        let blob = |descriptor: &Value| {
            let is_it = |it: &&ArtifactBlob| json!(it.digest) == descriptor["digest"];
            artifact.blobs.iter().find(is_it).unwrap().bytes.clone()
        };
        let [start, windows @ ..] = &manifest["layers"].as_array().unwrap()[..] else { panic!() };
        let start = blob(start);
        let mut rest = &start[..];
        let mut next = |length: &Value| {
            let length = usize::try_from(length.as_u64().unwrap_or(0)).unwrap();
            let (these, behind) = rest.split_at(length);
            rest = behind;
            these.to_vec()
        };
        let lengths = &config["start"];
        let image = next(&lengths["image"]);
        let heads = lengths["heads"].as_array().unwrap().iter().map(&mut next).collect();
        let (hot, traces) = (next(&lengths["hot"]), next(&lengths["traces"]));
        assert!(rest.is_empty());
        let windows = windows.iter().map(blob).collect();
        Self { image, heads, hot, traces, windows, config, manifest }
    }

    fn artifact(self) -> Artifact {
        let Self { mut manifest, mut config, image, heads, hot, traces, windows } = self;
        let mut start = image.clone();
        start.extend(heads.concat());
        start.extend(hot.iter().chain(&traces));
        config["start"] = json!({
            "digest": Digest::sha256(&start), "image": image.len(),
            "heads": heads.iter().map(Vec::len).collect::<Vec<_>>(),
        });
        for (name, bytes) in [("hot", &hot), ("traces", &traces)] {
            if !bytes.is_empty() {
                config["start"][name] = json!(bytes.len());
            }
        }
        let config = config.to_string().into_bytes();
        manifest["config"] = descriptor(&manifest["config"], &config);
        let types = manifest["layers"].clone();
        let mut blobs = vec![start];
        blobs.extend(windows);
        let layers = blobs.iter().zip([0, 1, 1]).map(|(it, of)| descriptor(&types[of], it));
        manifest["layers"] = json!(layers.collect::<Vec<_>>());
        let manifest = manifest.to_string().into_bytes();
        let blobs = std::iter::once(config).chain(blobs);
        let blobs = blobs.map(|bytes| ArtifactBlob { digest: Digest::sha256(&bytes), bytes });
        let blobs: Vec<_> = blobs.collect();
        let (digest, index) = (Digest::sha256(&manifest), blobs[0].digest);
        Artifact { digest, index, manifest, blobs }
    }
}

#[test]
fn an_artifact_has_all_and_is_always_the_same() {
    let stage = Stage::new();
    let artifact = stage.artifact();
    assert_eq!(artifact, Stage::new().artifact());
    assert_eq!(artifact.digest, Digest::sha256(&artifact.manifest));
    assert_eq!(artifact.blobs.len(), 3, "the config, the blob for starts, and windows");
    assert!(stage.open(&artifact).unwrap() == stage.opened());
    // The manifest contains the config, so that the config needs no request.
    let mut without_config = artifact.clone();
    without_config.blobs.remove(0);
    assert!(stage.open(&without_config).unwrap() == stage.opened());
    assert!(stage.open(&stage.pieces().artifact()).unwrap() == stage.opened());
    // Other embedded content is not used.
    let mut manifest: Value = serde_json::from_slice(&artifact.manifest).unwrap();
    for data in ["e30=", "?"] {
        manifest["config"]["data"] = json!(data);
        let mut other = artifact.clone();
        other.manifest = manifest.to_string().into_bytes();
        assert!(stage.open(&other).unwrap() == stage.opened());
    }
    let manifest: Value = serde_json::from_slice(&artifact.manifest).unwrap();
    assert_eq!(manifest["artifactType"], "application/vnd.quire.lazy.v1");
    assert_eq!(manifest["subject"]["digest"], json!(Digest::sha256(&stage.manifest)));
    let (config, device) = (stage.pieces().config, "03".repeat(32));
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
    let before = json!("application/vnd.quire.lazy.image.v1.erofs+zstd");
    stage.check_manifest(|it| it["layers"][0]["mediaType"] = before, "has version 1");
    stage.check_manifest(|it| it["layers"] = json!([]), "has 0 blobs");
    stage.check_manifest(
        |it| drop(it["layers"].as_array_mut().unwrap().pop()),
        "0 windows for 1 devices",
    );
    stage.check_manifest(|it| it["layers"][0]["size"] = json!(100), "lengths of the index's parts");
    let windows = |it: &mut Value| it["layers"][1]["size"] = json!(1 << 20);
    stage.check_manifest(windows, "windows of the index has");
    stage.check(|it| it.heads.clear(), "0 heads for 1 devices");
    stage.check_lengths(|it| it["heads"] = json!([1, 1, 1, 1]), "4 heads for 3 layers");
    stage.check_lengths(|it| it["heads"][0] = json!(1 << 20), "head of the index has");
    stage.check_lengths(|it| it["image"] = json!(1 << 30), "image of the index has");
    stage.check_lengths(|it| it["hot"] = json!(1 << 30), "hot pack of the index has");
    stage.check_lengths(|it| it["traces"] = json!(1 << 20), "traces of the index has");
    stage.check_lengths(|it| it["image"] = json!(u64::MAX - 10), "lengths of the index's parts");
    let other = json!(Digest::sha256(b"another blob for starts"));
    stage.check_lengths(|it| it["digest"] = other, "lengths of the index's parts");
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
    assert!(stage.open(&with).unwrap() == stage.opened());
    let manifest: Value = serde_json::from_slice(&with.manifest).unwrap();
    let created = json!({"org.opencontainers.image.created": "2026-11-28T12:00:00Z"});
    assert_eq!(manifest["annotations"], created);
    // A pack of a later version is ignored.
    let mut pieces = stage.pieces();
    pieces.hot[3] ^= 1;
    assert_eq!(stage.open(&pieces.artifact()).unwrap().hot, None);
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
        stage.parts.traces.set(Trace { name: name.to_owned(), runs, start: None }).unwrap();
    }
    let with = stage.artifact();
    assert_ne!(with.index, without.index);
    let manifest: Value = serde_json::from_slice(&with.manifest).unwrap();
    assert_eq!(manifest["annotations"], json!({"vnd.quire.lazy.traces": "default,other"}));
    assert!(stage.open(&with).unwrap() == stage.opened());
    let more = |it: &mut Value, what: Value| it["layers"].as_array_mut().unwrap().push(what);
    let other = json!({"mediaType": "a/b", "digest": Digest::sha256(b"x"), "size": 1});
    let mut later = with.clone();
    let mut changed = manifest;
    more(&mut changed, other.clone());
    later.manifest = changed.to_string().into_bytes();
    assert!(stage.open(&later).unwrap() == stage.opened());
    stage.check_manifest(|it| (0..65).for_each(|_| more(it, other.clone())), "has 67 blobs");
    stage.check_manifest(
        |it| {
            let windows = it["layers"][1].clone();
            more(it, other.clone());
            more(it, windows);
        },
        "not a \"application/vnd.quire.lazy.recipe",
    );
    stage.check(|it| it.traces = b"{}".to_vec(), "cannot use the traces of the index");
}

#[test]
fn another_config_is_refused() {
    let stage = Stage::new();
    let other = Digest::sha256(b"other").to_string();
    stage.check_config(|it| it["version"] = json!(3), "has version 3");
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
    artifact.blobs[1].bytes[100] ^= 1;
    let error = stage.open(&artifact).map(drop).unwrap_err();
    assert!(matches!(error, ArtifactError::Blob { .. }), "{error}");
    // A changed head needs another config.
    stage.check(|it| it.heads[0][100] ^= 1, "another head than the config");
    stage.check_head(|it| it[100] ^= 1, "its digest is wrong");
    stage.check(|it| it.windows[0].push(0), "another length of windows");
    let image = &stage.parts.image;
    let with = |image: &[u8]| zstd::bulk::compress(image, 1).unwrap();
    let longer = with(&[&image[..], &[0; 512]].concat());
    stage.check(|it| it.image = longer, "its length is wrong");
    let mut flipped = image.clone();
    flipped[500] ^= 1;
    stage.check(|it| it.image = with(&flipped), "not as Quire writes it: byte 500");
    stage.check(|it| it.image = image.clone(), "cannot decompress");
    // This is another image that Quire wrote, with the id of the first image.
    let mut head = stage.parts.indexes[0].head.clone();
    let other = head.blob;
    let renamed = image_of([(&head, &b"evil"[..])]);
    stage.check(|it| it.image = with(&renamed), "the image of the index is");
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
    assert!(stage.open(&stage.artifact()).unwrap() == stage.opened());
    let swap_pairs = |it: &mut Pieces| {
        it.heads.swap(0, 1);
        it.windows.swap(0, 1);
    };
    let swap_fields = |it: &mut Value, name: &str| {
        swap(it, &format!("/layers/0/{name}"), &format!("/layers/1/{name}"));
    };
    stage.check(swap_pairs, "another head than the config");
    stage.check(
        |it| {
            swap_pairs(it);
            swap_fields(&mut it.config, "head");
        },
        "another device than the config",
    );
    stage.check(
        |it| {
            swap_pairs(it);
            swap_fields(&mut it.config, "head");
            swap_fields(&mut it.config, "device");
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
    let drop_pair = |it: &mut Pieces| {
        it.heads.truncate(1);
        it.windows.truncate(1);
    };
    stage.check(
        |it| {
            drop_pair(it);
            both(&mut it.config);
        },
        "another diff id than the config",
    );
    // The same head for two devices.
    stage.check(
        |it| {
            it.heads[1] = it.heads[0].clone();
            it.windows[1] = it.windows[0].clone();
            same(&mut it.config, "head");
        },
        "another device than the config",
    );
    // The image has a device that belongs to no layer.
    stage.check(
        |it| {
            drop_pair(it);
            for name in ["device", "head"] {
                it.config["layers"][1].as_object_mut().unwrap().remove(name).unwrap();
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
    let longer = [parts.indexes[0].windows.groups().unwrap(), b"0"].concat();
    parts.indexes[0].windows = IndexWindows::Groups(longer);
    assert!(made(&parts).contains("length of windows"));
    parts.indexes[0].windows = stage.opened().indexes[0].windows.clone();
    assert!(made(&parts).contains("not in the store: `quire index`"));
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
    let manifest = Manifest { config: claimed(1), layers: vec![claimed(1_u64 << 40); 2] };
    let start =
        RawStart { digest, image: 1, heads: vec![128 << 20, 128 << 20], hot: None, traces: None };
    let part = |size| RawDescriptor::new(String::new(), digest, size);
    check_sizes(&manifest, &start, &[part(128 << 20), part(128 << 20)]).unwrap();
    let more = [part(128 << 20), part((128 << 20) + 1)];
    let refused = check_sizes(&manifest, &start, &more).unwrap_err();
    assert!(matches!(refused, ArtifactError::TooLarge { what: "heads and windows", .. }));
}
