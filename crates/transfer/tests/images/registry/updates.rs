//! Tests pulls of a new version by the recipes in its index: only missing data is downloaded, even if the index is
//! hostile.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use flate2::Compression as Level;
use flate2::write::GzEncoder;
use oci::policy::Policies;
use oci::registry::{PEER_HEADER, PEER_LAYERS};
use quire_transfer as transfer;
use store::{Form, IndexWindows};
use transfer::StoredImage;
use transfer::import::{ImportContext, ImportOptions};
use transfer::lazy::artifact::{Artifact, LazyParts, LazySubject};
use transfer::pull::{Indexes, Layers, PullSettings, Pulled, Syncs, pull};

use super::pulls::{Layer, MANIFEST, Served, image, served};
use super::*;
use crate::build::Tar;
use crate::home::{Home, usual_wishes};
use testing::fake::{Reply, Request, Server, content, reply};

/// Number of files in the layer, and of numbers in each: 6 MB that compress to half.
const FILES: usize = 150;
const NUMBERS: usize = 14_000;

/// The compression of a layer.
#[derive(Debug, Clone, Copy)]
enum Packing {
    Gzip,
    /// Many zstd frames.
    Zstd,
}

/// Makes a layer of files. The files with the numbers in `changed` differ from those of other layers.
fn layer(changed: &[usize], packing: Packing) -> Layer {
    let noise = noise(FILES * NUMBERS);
    let mut tar = Tar::from_text("d files");
    for (number, noise) in noise.chunks_exact(NUMBERS).enumerate() {
        let change = u8::from(changed.contains(&number));
        let text = noise.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{:02} ", (byte ^ change) % 97).unwrap();
            text
        });
        tar = tar.file(&format!("files/{number}"), text.as_bytes());
    }
    let tar = tar.bytes();
    let blob = match packing {
        Packing::Gzip => {
            let mut encoder = GzEncoder::new(Vec::new(), Level::new(6));
            encoder.write_all(&tar).unwrap();
            encoder.finish().unwrap()
        }
        Packing::Zstd => {
            let frames = tar.chunks(100_000).map(|it| zstd::bulk::compress(it, 3).unwrap());
            frames.collect::<Vec<_>>().concat()
        }
    };
    Layer { tar, blob }
}

/// A registry with two versions of an image, and the index of the second.
struct Stage {
    old: Served,
    new: Served,
    index: Artifact,
    /// Number of bytes sent in bodies.
    sent: AtomicU64,
    /// Whether ranges are ignored.
    is_whole: AtomicBool,
}

/// Makes the index of an image from its layers.
pub(super) fn parts(new: &Arc<Served>) -> (LazyParts, StoredImage) {
    let home = Home::new();
    let served = Arc::clone(new);
    let server = Server::start(move |request, _| served.answer(request));
    let import = ImportOptions { form: Form::Tar, index: true, ..usual_wishes() };
    let pulled = pull_with(&home, &server.host(), "2", Layers::Keep, import);
    let Pulled::Image(report) = pulled else { panic!("it was there") };
    let open = home.store.open_image(&report.image).unwrap();
    let documents = StoredImage::load(&home.store, &report.manifest.unwrap()).unwrap();
    (LazyParts::stored(&home.store, &open, &documents.digest).unwrap(), documents)
}

pub(super) fn pull_with(
    home: &Home,
    host: &str,
    tag: &str,
    layers: Layers,
    import: ImportOptions<'_>,
) -> Pulled {
    pull_by(home, host, tag, layers, import, &settings())
}

fn pull_by(
    home: &Home,
    host: &str,
    tag: &str,
    layers: Layers,
    import: ImportOptions<'_>,
    settings: &Settings,
) -> Pulled {
    let reference: Reference = format!("{host}/app:{tag}").parse().unwrap();
    let policies = Policies::load(&[]).unwrap();
    let name = "app".parse().unwrap();
    let import = ImportOptions { name: Some(&name), ..import };
    let options = PullSettings {
        import,
        layers,
        indexes: Indexes::Forget,
        policies: &policies,
        syncs: Syncs::AtOnce,
    };
    let registry = Registry::new(&reference, settings).unwrap();
    let environment = ImportContext { budget: 64 << 20, ..home.environment() };
    pull(&home.store, &registry, &reference, &environment, &options).unwrap()
}

impl Stage {
    fn new(change: impl FnOnce(&mut LazyParts)) -> Arc<Self> {
        Self::of(Packing::Gzip, change)
    }

    fn of(packing: Packing, change: impl FnOnce(&mut LazyParts)) -> Arc<Self> {
        let made = || served(vec![layer(&[20, 21, 70], packing)]);
        let new = Arc::new(made());
        let (mut parts, documents) = parts(&new);
        change(&mut parts);
        let subject = LazySubject {
            digest: &documents.digest,
            bytes: &documents.manifest_bytes,
            manifest: &documents.manifest,
            config: &documents.config,
        };
        let index = parts.artifact(&subject).unwrap();
        let new = Arc::into_inner(new).unwrap_or_else(made);
        let (sent, is_whole) = (AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(Self { old: served(vec![layer(&[], packing)]), new, index, sent, is_whole })
    }

    fn start(self: &Arc<Self>) -> Server {
        let stage = Arc::clone(self);
        Server::start(move |request, _| {
            let reply = stage.answer(request);
            stage.sent.fetch_add(reply.body.len() as u64, Ordering::Relaxed);
            reply
        })
    }

    fn answer(&self, request: &Request) -> Reply {
        let mut request = request.clone();
        if self.is_whole.load(Ordering::Relaxed) {
            request.headers.remove("range");
        }
        if request.header("range").is_some_and(|it| it.contains(',')) {
            return reply(416);
        }
        let path = &request.path;
        if path.contains("/referrers/") {
            let is_new = path.contains(&digest(&self.new.manifest).to_string());
            let (index, size) = (self.index.digest, self.index.manifest.len());
            let entry = format!(
                r#"{{"mediaType":"{MANIFEST}","digest":"{index}","size":{size},"artifactType":"application/vnd.quire.lazy.v1"}}"#
            );
            let entry = if is_new { &entry } else { "" };
            let body = format!(r#"{{"schemaVersion":2,"manifests":[{entry}]}}"#);
            return reply(200).body(body);
        }
        if path.ends_with(&self.index.digest.to_string()) {
            return reply(200).header("content-type", MANIFEST).body(&self.index.manifest);
        }
        let of_index = self.index.blobs.iter().find(|it| path.ends_with(&it.digest.to_string()));
        if let Some(blob) = of_index {
            return content(&request, &blob.bytes);
        }
        let is_old = path.ends_with("/manifests/1")
            || self.old.layers.iter().any(|it| path.ends_with(&digest(&it.blob).to_string()))
            || path.ends_with(&digest(&self.old.config).to_string());
        if is_old { self.old.answer(&request) } else { self.new.answer(&request) }
    }

    /// Pulls the new version into a store with the old one. Returns the number of bytes downloaded, and the number of
    /// requests for the whole layer.
    fn update(self: &Arc<Self>, form: Form) -> (u64, usize) {
        let server = self.start();
        let home = Home::new();
        let options = || ImportOptions { form, ..usual_wishes() };
        pull_with(&home, &server.host(), "1", Layers::Forget, options());
        let (before, seen) = (self.sent.load(Ordering::Relaxed), server.seen().len());
        let pulled = pull_with(&home, &server.host(), "2", Layers::Forget, options());
        let Pulled::Image(report) = pulled else { panic!("it was there") };
        // The expected image is made by an import of the layers, without an index.
        let expected = match form {
            Form::Objects => home.imported(&self.new),
            Form::Packed | Form::Tar => {
                let other = Home::new();
                let is_whole = pull_with(&other, &server.host(), "2", Layers::Forget, options());
                image(Ok(is_whole))
            }
        };
        assert_eq!(report.image, expected);
        assert!(home.is_sound());
        let diff_id = digest(&self.new.layers[0].tar);
        let layer = home.store.layers.open(&diff_id).unwrap().unwrap();
        assert_eq!(layer.info().size, self.new.layers[0].tar.len() as u64);
        let requests = server.seen().split_off(seen);
        let path = self.new.path(0);
        let whole = requests.iter().filter(|it| it.path == path && it.header("range").is_none());
        (self.sent.load(Ordering::Relaxed) - before, whole.count())
    }
}

fn nothing(_: &mut LazyParts) {}

#[test]
fn an_update_fetches_what_is_missing() {
    for packing in [Packing::Gzip, Packing::Zstd] {
        let stage = Stage::of(packing, nothing);
        let blob = stage.new.layers[0].blob.len() as u64;
        let (sent, whole) = stage.update(Form::Objects);
        assert_eq!(whole, 0, "{packing:?}");
        // The pull fetches the index, and one or two spans of 256 KiB for each of the two changes in a layer of 6 MB.
        assert!(sent < blob / 3, "{sent} of {blob}, {packing:?}");
    }
}

#[test]
fn files_of_devices_are_found_too() {
    let stage = Stage::new(nothing);
    let blob = stage.new.layers[0].blob.len() as u64;
    let server = stage.start();
    let home = Home::new();
    let options = || ImportOptions { form: Form::Tar, ..usual_wishes() };
    pull_with(&home, &server.host(), "1", Layers::Forget, options());
    let before = stage.sent.load(Ordering::Relaxed);
    pull_with(&home, &server.host(), "2", Layers::Forget, options());
    let sent = stage.sent.load(Ordering::Relaxed) - before;
    assert!(sent < blob / 3, "{sent} of {blob}");
    assert!(home.is_sound());
}

/// A mirror lists an index that it does not have, or one of another image.
#[test]
fn the_list_of_a_mirror_does_not_hide_that_of_the_registry() {
    for has_other in [false, true] {
        let stage = Stage::new(nothing);
        let blob = stage.new.layers[0].blob.len() as u64;
        let server = stage.start();
        let other = stage.old.manifest.clone();
        let mirror = Server::start(move |request, _| {
            let found = if request.path.contains("/referrers/") {
                let (name, size) = (digest(&other), other.len());
                let entry = format!(
                    r#"{{"mediaType":"{MANIFEST}","digest":"{name}","size":{size},"artifactType":"application/vnd.quire.lazy.v1"}}"#
                );
                reply(200).body(format!(r#"{{"schemaVersion":2,"manifests":[{entry}]}}"#))
            } else if has_other && request.path.contains(&digest(&other).to_string()) {
                reply(200).header("content-type", MANIFEST).body(&other)
            } else {
                reply(404)
            };
            found.header(PEER_HEADER, PEER_LAYERS)
        });
        let text = format!(
            "server = \"http://{}\"\n[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n",
            server.host(),
            mirror.host()
        );
        let hosts = Hosts::new(&server.host(), &text);
        let home = Home::new();
        pull_with(&home, &server.host(), "1", Layers::Forget, usual_wishes());
        let before = stage.sent.load(Ordering::Relaxed);
        let (host, settings) = (server.host(), hosts.settings());
        pull_by(&home, &host, "2", Layers::Forget, usual_wishes(), &settings);
        assert!(mirror.lines().iter().any(|it| it.contains("/referrers/")));
        let sent = stage.sent.load(Ordering::Relaxed) - before;
        assert!(sent < blob / 3, "{sent} of {blob}, {has_other}");
    }
}

#[test]
fn where_nothing_is_here_nothing_is_asked() {
    let stage = Stage::new(nothing);
    let server = stage.start();
    let home = Home::new();
    let asked = || server.seen().iter().filter(|it| it.path.contains("/referrers/")).count();
    pull_with(&home, &server.host(), "1", Layers::Forget, usual_wishes());
    assert_eq!(asked(), 0);
    pull_with(&home, &server.host(), "2", Layers::Keep, usual_wishes());
    assert_eq!(asked(), 0, "the blob itself is wanted");
}

/// Changes the recipe.
fn recipe(parts: &mut LazyParts, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = zstd::decode_all(&parts.recipes[0].bytes[..]).unwrap();
    change(&mut bytes);
    parts.recipes[0].bytes = zstd::encode_all(&bytes[..], 3).unwrap();
}

/// Checks that a false index gives the right image after a download of the whole layer.
#[track_caller]
fn check(what: &str, change: impl FnOnce(&mut LazyParts)) {
    let (_, whole) = Stage::new(change).update(Form::Objects);
    assert_eq!(whole, 1, "{what}");
}

#[test]
fn hostile_recipes_end_in_a_full_pull() {
    check("two files are exchanged", |parts| {
        recipe(parts, |bytes| {
            // Records of type 2, each with an object's id.
            let mut places = Vec::new();
            let mut reader = image::tar::recipe::Reader::new(&bytes[..]).unwrap();
            while let Some(operation) = reader.next_operation().unwrap() {
                if let image::tar::recipe::Operation::Range { object, .. } = operation {
                    let id = object.as_bytes();
                    places.push(bytes.windows(id.len()).position(|it| it == id).unwrap());
                }
            }
            let [one, two] = [places[0], places[1]];
            let (front, back) = bytes.split_at_mut(two);
            front[one..one + 32].swap_with_slice(&mut back[..32]);
        });
    });
    check("a header is another", |parts| recipe(parts, |bytes| bytes[20] ^= 1));
    check("it ends early", |parts| recipe(parts, |bytes| bytes.truncate(bytes.len() / 2)));
    check("it says another length", |parts| {
        recipe(parts, |bytes| {
            let end = bytes.len() - 8;
            bytes[end] ^= 1;
        });
    });
    check("it is no recipe", |parts| recipe(parts, |bytes| bytes.fill(7)));
    check("it is no zstd", |parts| parts.recipes[0].bytes = vec![7; 1000]);
    check("it is too large", |parts| parts.recipes[0].bytes = noise(1 << 20));
    check("it makes more than the tar has", |parts| {
        recipe(parts, |bytes| {
            bytes.truncate(16);
            for _ in 0..200 {
                bytes.extend([1, 128, 128, 4]);
                bytes.resize(bytes.len() + 65_536, 0);
            }
        });
    });
}

#[test]
fn hostile_indexes_end_in_a_full_pull() {
    check("windows are damaged", |parts| {
        let windows = &mut parts.indexes[0].windows;
        *windows = IndexWindows::Groups(vec![0; windows.groups().unwrap().len()]);
    });
    check("spans are elsewhere", |parts| {
        for span in &mut parts.indexes[0].head.spans[1..] {
            span.packed += 3;
        }
    });
    check("spans have other bytes of the tar", |parts| {
        for span in &mut parts.indexes[0].head.spans[1..] {
            span.unpacked += 3;
        }
    });
}

#[test]
fn a_registry_that_sends_the_whole_blob_does_so_once() {
    let stage = Stage::new(nothing);
    stage.is_whole.store(true, Ordering::Relaxed);
    let (sent, whole) = stage.update(Form::Objects);
    let blob = stage.new.layers[0].blob.len() as u64;
    assert_eq!(whole, 1);
    assert!(sent < 4 * blob, "{sent} of {blob}");
}
