//! Tests pulls and pushes of whole images, with faulty registries.

use std::io::Write as _;
use std::num::NonZeroUsize;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use flate2::Compression as Level;
use flate2::write::GzEncoder;
use quire_transfer as transfer;

use oci::policy::Policies;
use store::{FsckOptions, Seconds};
use transfer::export::{self, Compression, How};
use transfer::import::ImportOptions;
use transfer::progress::Event;
use transfer::pull::{Indexes, Layers, PullError, PullSettings, Pulled, Syncs, default_name, pull};
use transfer::push::{PushError, PushOptions, Pushed, Sent, push};

use super::*;
use crate::home::{Home, NEVER, usual_wishes};
use testing::fake::{Reply, Request, Server, content, reply};

pub(super) const NOW: Seconds = Seconds(1_700_000_000);
pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// The magic number of a zstd frame. Source: RFC 8878, 3.1.1.
const ZSTD: [u8; 4] = 0xfd2f_b528_u32.to_le_bytes();

/// A layer: its tar and its blob.
pub(super) struct Layer {
    pub(super) tar: Vec<u8>,
    pub(super) blob: Vec<u8>,
}

/// Makes a tar with GNU tar. The tar has some small files, and one file of random bytes, so that the blob is about as
/// long as this file.
pub(super) fn layer(name: &str, length: usize) -> Layer {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(name), noise(length)).unwrap();
    std::fs::write(folder.path().join("same"), "the same in all layers\n".repeat(9)).unwrap();
    let mut command = Command::new("tar");
    command.args(["--format=posix", "--sort=name", "-cf", "-", "-C"]).arg(folder.path());
    let output = command.arg(".").output().unwrap();
    assert!(output.status.success());
    let mut encoder = GzEncoder::new(Vec::new(), Level::fast());
    encoder.write_all(&output.stdout).unwrap();
    Layer { tar: output.stdout, blob: encoder.finish().unwrap() }
}

/// An image in a registry.
pub(super) struct Served {
    pub(super) manifest: Vec<u8>,
    pub(super) config: Vec<u8>,
    pub(super) layers: Vec<Layer>,
}

pub(super) fn served(layers: Vec<Layer>) -> Served {
    let list = |of: &dyn Fn(&Layer) -> String| layers.iter().map(of).collect::<Vec<_>>().join(",");
    let diff_ids = list(&|it| format!("\"{}\"", digest(&it.tar)));
    let config = format!(
        r#"{{"os":"linux","architecture":"amd64","rootfs":{{"type":"layers","diff_ids":[{diff_ids}]}}}}"#
    );
    let blobs = list(&|it| {
        let (digest, size) = (digest(&it.blob), it.blob.len());
        let compression = if it.blob.starts_with(&ZSTD) { "zstd" } else { "gzip" };
        format!(r#"{{"mediaType":"{LAYER}+{compression}","digest":"{digest}","size":{size}}}"#)
    });
    let manifest = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST}","config":{{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"{}","size":{}}},"layers":[{blobs}]}}"#,
        digest(config.as_bytes()),
        config.len()
    );
    Served { manifest: manifest.into_bytes(), config: config.into_bytes(), layers }
}

impl Served {
    /// The correct response.
    pub(super) fn answer(&self, request: &Request) -> Reply {
        if request.path.contains("/manifests/") {
            return reply(200).header("content-type", MANIFEST).body(&self.manifest);
        }
        let blobs = self.layers.iter().map(|it| &it.blob).chain([&self.config]);
        let mut blobs = blobs.filter(|blob| request.path.ends_with(&digest(blob).to_string()));
        match blobs.next() {
            Some(blob) => content(request, blob),
            None => reply(404),
        }
    }

    /// Uploads the image to a registry as `app:1`, without a store.
    pub(super) fn put(&self, host: &str) {
        let there = registry(host, &settings());
        let blobs = self.layers.iter().map(|it| &it.blob).chain([&self.config]);
        for blob in blobs {
            there.upload_blob(&digest(blob), blob.len() as u64, &mut &blob[..]).unwrap();
        }
        there.put_manifest("1", MANIFEST, &self.manifest).unwrap();
    }

    pub(super) fn path(&self, layer: usize) -> String {
        format!("/v2/app/blobs/{}", digest(&self.layers[layer].blob))
    }
}

pub(super) fn pull_name(
    home: &Home,
    name: &str,
    layers: Layers,
    settings: &Settings,
) -> Result<Pulled, PullError> {
    pull_with(home, name, layers, usual_wishes(), settings)
}

pub(super) fn pull_with(
    home: &Home,
    name: &str,
    layers: Layers,
    import: ImportOptions<'_>,
    settings: &Settings,
) -> Result<Pulled, PullError> {
    let reference: Reference = name.parse().unwrap();
    let name = default_name(&reference).unwrap();
    let import = ImportOptions { name: Some(&name), ..import };
    let policies = Policies::load(&[]).unwrap();
    let options = PullSettings {
        import,
        layers,
        indexes: Indexes::Forget,
        policies: &policies,
        syncs: Syncs::AtOnce,
    };
    let registry = Registry::new(&reference, settings).unwrap();
    pull(&home.store, &registry, &reference, &home.environment(), &options)
}

impl Home {
    pub(super) fn pull_as(&self, host: &str, layers: Layers) -> Result<Pulled, PullError> {
        self.pull_tag(host, "1", layers)
    }

    pub(super) fn pull_tag(
        &self,
        host: &str,
        tag: &str,
        layers: Layers,
    ) -> Result<Pulled, PullError> {
        pull_name(self, &format!("{host}/app:{tag}"), layers, &settings())
    }

    pub(super) fn pull(&self, host: &str) -> Result<Pulled, PullError> {
        self.pull_as(host, Layers::Forget)
    }

    /// Imports the image of the same layers from a layout, without a registry.
    pub(super) fn imported(&self, served: &Served) -> ImageId {
        let layout = self.path("layout");
        let blobs = layout.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        let all = served.layers.iter().map(|it| &it.blob);
        for blob in all.chain([&served.config, &served.manifest]) {
            let name = digest(blob).to_string();
            std::fs::write(blobs.join(name.strip_prefix("sha256:").unwrap()), blob).unwrap();
        }
        std::fs::write(layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let (manifest, size) = (digest(&served.manifest), served.manifest.len());
        let index = format!(
            r#"{{"schemaVersion":2,"manifests":[{{"mediaType":"{MANIFEST}","digest":"{manifest}","size":{size}}}]}}"#
        );
        std::fs::write(layout.join("index.json"), index).unwrap();
        let other = Self::new();
        let source = format!("oci:{}", layout.display());
        let source = oci::source::ImageSource::parse(source.as_ref()).unwrap();
        transfer::import::import(&other.store, &source, &other.environment(), &usual_wishes())
            .unwrap()
            .image
    }

    /// Adds another name to an image.
    pub(super) fn call(&self, name: &str, more: &str) {
        let [name, more] = [name, more].map(|it| default_name(&it.parse().unwrap()).unwrap());
        let reference = self.store.refs.get(&name).unwrap().unwrap();
        self.store.set_ref(&more, &reference).unwrap();
    }

    /// Returns the suffixes of the files in `blobs/`, without digests.
    pub(super) fn blobs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("store/blobs")).unwrap();
        let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
        let kinds = names.map(|it| it.split_at(it.find('.').unwrap_or(it.len())).1.to_owned());
        let mut kinds: Vec<_> = kinds.collect();
        kinds.sort_unstable();
        kinds
    }

    pub(super) fn is_sound(&self) -> bool {
        self.store.fsck_deep(FsckOptions { threads: 2 }).unwrap().is_sound()
    }
}

pub(super) fn image(pulled: Result<Pulled, PullError>) -> ImageId {
    match pulled {
        Ok(Pulled::Image(report)) => report.image,
        Ok(Pulled::UpToDate { .. }) => panic!("nothing was pulled"),
        Err(error) => panic!("{}", chain(&error)),
    }
}

#[test]
fn a_pull_gives_the_image_that_an_import_gives() {
    let served = Arc::new(served(vec![layer("a", 3 << 20), layer("b", 10_000)]));
    let truth = Arc::clone(&served);
    let server = Server::start(move |request, _| truth.answer(request));
    let home = Home::new();
    let pulled = image(home.pull(&server.host()));
    assert_eq!(pulled, home.imported(&served));
    assert!(home.is_sound());
    assert_eq!(home.blobs(), [".origins", ".signatures"], "no pin and no parts are left");
    let before = server.lines().len();
    assert!(
        matches!(home.pull(&server.host()), Ok(Pulled::UpToDate { image, .. }) if image == pulled)
    );
    let again = server.lines().split_off(before);
    assert!(again.iter().all(|line| !line.contains(&served.path(0))), "{again:?}");
}

#[test]
fn an_interrupted_pull_goes_on_where_it_stopped() {
    let served = Arc::new(served(vec![layer("a", 3 << 20), layer("b", 5 << 20)]));
    // The first response for the second layer ends after 3 of 5 MiB, and later requests fail.
    let (server, is_mended) = ailing(&served, |request, true_one| match request.header("range") {
        None => true_one.cut(3 << 20),
        Some(_) => reply(500),
    });
    let home = Home::new();
    let error = chain(&home.pull(&server.host()).unwrap_err());
    assert!(error.contains(&digest(&served.layers[1].blob).to_string()), "{error}");
    assert!(home.store.refs.all().unwrap().is_empty(), "nothing is published");
    // The first layer is complete or was interrupted, and a part of the second layer was downloaded.
    assert!(home.blobs().contains(&".partial".to_owned()), "{:?}", home.blobs());
    assert!(home.blobs().contains(&".pull".to_owned()));
    // The second layer is larger, so its download began first.
    home.store.gc(NOW).unwrap();
    assert!(home.blobs().contains(&".partial".to_owned()), "gc leaves an unfinished pull alone");

    is_mended.store(true, Ordering::Relaxed);
    let before = server.seen().len();
    assert_eq!(image(home.pull(&server.host())), home.imported(&served));
    let again = server.seen().split_off(before);
    let asked: Vec<_> = again.iter().filter(|it| it.path == served.path(1)).collect();
    let ranges: Vec<_> = asked.iter().map(|it| it.header("range").unwrap_or("all")).collect();
    let from: Option<u64> =
        ranges[0].strip_prefix("bytes=").and_then(|it| it.strip_suffix('-')?.parse().ok());
    assert!(from.is_some_and(|from| from > 1 << 20 && from <= 3 << 20), "{ranges:?}");
    assert!(home.is_sound());
    assert_eq!(home.blobs(), [".origins", ".signatures"]);
}

#[test]
fn a_layer_that_is_complete_is_not_fetched_twice() {
    let served = Arc::new(served(vec![layer("a", 1 << 20), layer("b", 5 << 20)]));
    // Late enough for the other layer to be complete.
    let late = || reply(404).delay(Duration::from_millis(1200));
    let (server, is_mended) = ailing(&served, move |_, _| late());
    let home = Home::new();
    home.pull(&server.host()).unwrap_err();
    server.settle();
    let first = digest(&served.layers[0].tar);
    assert!(
        home.store.layers.open(&first).unwrap().is_some(),
        "the first layer is durable by itself"
    );
    home.store.gc(NOW).unwrap();
    is_mended.store(true, Ordering::Relaxed);
    let before = server.lines().len();
    assert_eq!(image(home.pull(&server.host())), home.imported(&served));
    let again = server.lines().split_off(before);
    assert!(!again.contains(&format!("GET {}", served.path(0))), "{again:?}");
}

/// A registry that answers requests for its second layer by `fault`, which gets the correct response, until it is
/// mended.
pub(super) fn ailing(
    served: &Arc<Served>,
    fault: impl Fn(&Request, Reply) -> Reply + Send + Sync + 'static,
) -> (Server, Arc<AtomicBool>) {
    let (truth, is_mended) = (Arc::clone(served), Arc::new(AtomicBool::new(false)));
    let mended = Arc::clone(&is_mended);
    let server = Server::start(move |request, _| {
        let true_one = truth.answer(request);
        match request.path == truth.path(1) && !mended.load(Ordering::Relaxed) {
            true => fault(request, true_one),
            false => true_one,
        }
    });
    (server, is_mended)
}

/// A registry that flips a bit of its second layer in the first `lies` responses.
fn liar(served: &Arc<Served>, lies: u32) -> Server {
    let (truth, count) = (Arc::clone(served), AtomicU32::new(0));
    Server::start(move |request, _| {
        if request.path == truth.path(1) && count.fetch_add(1, Ordering::Relaxed) < lies {
            let mut blob = truth.layers[1].blob.clone();
            let middle = blob.len() / 2;
            blob[middle] ^= 1;
            return content(request, &blob);
        }
        truth.answer(request)
    })
}

#[test]
fn flipped_bits_are_never_published() {
    let served = Arc::new(served(vec![layer("a", 10_000), layer("b", 2 << 20)]));
    let home = Home::new();
    let error = chain(&home.pull(&liar(&served, u32::MAX).host()).unwrap_err());
    let expected = digest(&served.layers[1].blob);
    assert!(error.contains(&format!("not {expected}")), "{error}");
    assert!(home.store.refs.all().unwrap().is_empty());
    assert!(home.store.layers.open(&digest(&served.layers[1].tar)).unwrap().is_none());
    assert!(!home.blobs().contains(&".partial".to_owned()), "wrong bytes are not kept");
    assert!(home.is_sound());
    // Wrong once, and right at the second request.
    assert_eq!(image(home.pull(&liar(&served, 1).host())), home.imported(&served));
}

#[test]
fn a_mirror_that_spoils_a_part_is_found_out() {
    let served = Arc::new(served(vec![layer("a", 2 << 20)]));
    let (truth, same) = (Arc::clone(&served), Arc::clone(&served));
    let server = Server::start(move |request, _| truth.answer(request));
    // The mirror sends wrong bytes and then fails, and the registry sends the rest. So both hosts have supplied a part
    // of a wrong blob.
    let mirror = Server::start(move |request, _| {
        if !request.path.contains(&same.path(0)) {
            return same.answer(request);
        }
        let mut blob = same.layers[0].blob.clone();
        blob[1000] ^= 1;
        content(request, &blob).cut(blob.len() / 2)
    });
    let hosts = Hosts::new(&server.host(), &format!("[host.\"http://{}\"]", mirror.host()));
    let home = Home::new();
    let name = format!("{}/app:1", server.host());
    let pulled = pull_name(&home, &name, Layers::Forget, &hosts.settings());
    assert!(!mirror.seen().is_empty());
    assert_eq!(image(pulled), home.imported(&served));
}

#[test]
fn what_a_crash_made_of_a_part_is_found_out() {
    let served = Arc::new(served(vec![layer("a", 10_000), layer("b", 2 << 20)]));
    let truth = Arc::clone(&served);
    let server = Server::start(move |request, _| truth.answer(request));
    for (length, what) in [(1 << 20, "zeros"), (9 << 20, "too long")] {
        let home = Home::new();
        let blob = digest(&served.layers[1].blob);
        let mut partial = home.store.downloads.partial(&blob).unwrap().unwrap();
        partial.append(&vec![0; length]).unwrap();
        drop(partial);
        assert_eq!(image(home.pull(&server.host())), home.imported(&served), "{what}");
        assert_eq!(home.blobs(), [".origins", ".signatures"], "{what}");
    }
}

#[test]
fn a_manifest_that_lies_is_refused() {
    let served = Arc::new(served(vec![layer("a", 10_000)]));
    let text = String::from_utf8(served.manifest.clone()).unwrap();
    let diff_id = digest(&served.layers[0].tar).to_string();
    let other = String::from_utf8(served.config.clone()).unwrap();
    let other = other.replace(&diff_id, &digest(b"another").to_string()).into_bytes();
    let size = format!("\"size\":{}", served.layers[0].blob.len());
    let cases = [
        (text.replace(&size, "\"size\":77"), "77"),
        (
            text.replace(&digest(&served.config).to_string(), &digest(&other).to_string()),
            "its uncompressed tar has",
        ),
        (text.replace("\"layers\":[", "\"manifests\":[],\"layers\":["), "both"),
        ("{}".to_owned(), "manifest"),
    ];
    for (manifest, reason) in cases {
        let (truth, other) = (Arc::clone(&served), other.clone());
        let server = Server::start(move |request, _| {
            if request.path.contains("/manifests/") {
                return reply(200).header("content-type", MANIFEST).body(&manifest);
            }
            if request.path.ends_with(&digest(&other).to_string()) {
                return content(request, &other);
            }
            truth.answer(request)
        });
        let home = Home::new();
        let error = chain(&home.pull(&server.host()).unwrap_err());
        assert!(error.contains(reason), "{reason}: {error}");
        assert!(home.store.refs.all().unwrap().is_empty(), "{reason}");
    }
}

pub(super) fn push_to(home: &Home, pulled: &str, target: &str) -> Pushed {
    push_over(home, pulled, target, &settings()).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

pub(super) fn push_over(
    home: &Home,
    pulled: &str,
    target: &str,
    settings: &Settings,
) -> Result<Pushed, PushError> {
    let name = default_name(&pulled.parse().unwrap()).unwrap();
    let manifest = home.store.refs.get(&name).unwrap().unwrap().manifest.unwrap();
    let target: Reference = target.parse().unwrap();
    let wish = PushOptions {
        manifest: &manifest,
        target: &target,
        compression: Compression::Usual,
        key: None,
    };
    let options = export::Options {
        threads: NonZeroUsize::new(2).unwrap(),
        scratch: home.folder.path(),
        progress: &|_: Event<'_>| {},
        cancel: &NEVER,
    };
    let there = Registry::new(&target, settings).unwrap();
    push(&home.store, &there, &wish, &options, &|_| {})
}

#[test]
fn what_was_kept_is_pushed_byte_for_byte() {
    let Some(daemon) = real::start("") else { return };
    let served = Arc::new(served(vec![layer("a", 20 << 20), layer("b", 10_000)]));
    let truth = Arc::clone(&served);
    let server = Server::start(move |request, _| truth.answer(request));
    let home = Home::new();
    let first = image(home.pull_as(&server.host(), Layers::Keep));
    assert_eq!(home.blobs(), ["", "", ".origins", ".signatures"]);
    let (from, to) = (format!("{}/app:1", server.host()), format!("{}/one/app:1", daemon.host));
    let pushed = push_to(&home, &from, &to);
    assert_eq!((pushed.digest, pushed.is_unchanged), (digest(&served.manifest), true));
    let sizes: Vec<_> = served.layers.iter().map(|it| it.blob.len() as u64).collect();
    let sent = [(How::Kept, Sent::Bytes(sizes[0])), (How::Kept, Sent::Bytes(sizes[1]))];
    assert_eq!(pushed.layers, sent);
    // A second push sends no blobs. For another repository, the registry mounts the blobs.
    let pushed = push_to(&home, &from, &to);
    assert_eq!(pushed.layers, [(How::There, Sent::Not), (How::There, Sent::Not)]);
    let other = format!("{}/two/app:1", daemon.host);
    home.call(&from, &to);
    let pushed = push_to(&home, &from, &other);
    assert_eq!(pushed.layers, [(How::There, Sent::Mounted), (How::There, Sent::Mounted)]);
    // A store without the blobs pushes the same manifest if the registry has them.
    let forgetful = Home::new();
    assert_eq!(image(pull_name(&forgetful, &other, Layers::Forget, &settings())), first);
    let pushed = push_to(&forgetful, &other, &format!("{}/three/app:1", daemon.host));
    assert!(pushed.is_unchanged);
    assert_eq!(pushed.layers, [(How::There, Sent::Mounted), (How::There, Sent::Mounted)]);
    // If neither the store nor the registry has the blobs, the push reports that its manifest differs, for the same
    // files.
    let stranger = Home::new();
    assert_eq!(image(stranger.pull(&server.host())), first);
    let pushed = push_to(&stranger, &from, &format!("{}/four/app:1", daemon.host));
    assert!(!pushed.is_unchanged);
    assert_eq!(pushed.layers.iter().map(|it| it.0).collect::<Vec<_>>(), [How::Compressed; 2]);
}
