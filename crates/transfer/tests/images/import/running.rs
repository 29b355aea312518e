//! Tests imports whose layers arrive one at a time, as engines supply them.

use std::io::Read;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Home, chain, usual_wishes};
use crate::build::{Layout, Pack, Tar, pack};
use quire_transfer::import::{
    Document, Durable, ImportContext, ImportError, ImportOptions, IncomingLayer, LayerImport,
    LayersMismatch, Limits,
};
use quire_transfer::progress::Event;
use serde_json::json;
use store::Digest;

const LOWER: &str = "d etc,f etc/a one,f etc/b two";
const UPPER: &str = "w etc/.wh.a,f etc/c three";

fn tars() -> [Vec<u8>; 2] {
    [LOWER, UPPER].map(|text| Tar::from_text(text).bytes())
}

fn incoming<'r>(tar: &[u8], blob: impl Read + Send + 'r, packed: &[u8]) -> IncomingLayer<'r> {
    IncomingLayer {
        name: "a layer".to_owned(),
        blob: Box::new(blob),
        media_type: String::new(),
        digest: Some(Digest::sha256(packed)),
        size: Some(packed.len() as u64),
        diff_id: Some(Digest::sha256(tar)),
    }
}

/// A reader that records whether it was read.
struct Watched<'a>(&'a [u8], &'a AtomicBool);

impl Read for Watched<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.1.store(true, Ordering::Relaxed);
        self.0.read(into)
    }
}

#[test]
fn layers_one_by_one_are_the_image_of_the_layout() {
    let (home, other) = (Home::new(), Home::new());
    let tars = tars();
    let folder = home.path("layout");
    let mut layout = Layout::new(&folder);
    let (image, _) = layout.image(&tars.clone().map(|tar| (tar, Pack::Gzip)));
    layout.add(image, None, None);
    let whole = home.import("oci", "layout").unwrap();

    let name = "one:1".parse().unwrap();
    let options = ImportOptions { name: Some(&name), ..usual_wishes() };
    let import = LayerImport::begin(&other.store, &other.environment(), &options).unwrap();
    let mut running = import.layers();
    for tar in &tars {
        let packed = pack(tar, Pack::Gzip);
        running = running.layer(incoming(tar, &packed[..], &packed)).unwrap();
    }
    let reports: Vec<_> = running.reports().map(|it| (it.diff_id, it.is_reused)).collect();
    assert_eq!(reports, tars.each_ref().map(|tar| (Digest::sha256(tar), false)));
    // The layers are invisible until the import ends.
    assert!(other.store.layers.diff_ids().unwrap().is_empty());
    let made = running.image(None, None).unwrap();
    let report = import.finish(made).unwrap();
    assert_eq!(report.image, whole.image);
    assert_eq!(report.name, Some(name));
    for (layer, tar) in report.layers.iter().zip(&tars) {
        assert!(other.rebuilt(&layer.diff_id) == *tar);
    }
}

#[test]
fn a_layer_that_is_here_is_not_read_if_this_blob_gave_it() {
    let home = Home::new();
    let [tar, _] = tars();
    let packed = [Pack::Gzip, Pack::Zstd].map(|how| pack(&tar, how));
    let options = ImportOptions { durable: Durable::EachLayer, ..usual_wishes() };
    // The blob, and whether it is read, because the store does not know that it contains the layer.
    for (blob, is_read) in [(0, true), (0, false), (1, true), (1, false)] {
        let was_read = AtomicBool::new(false);
        let import = LayerImport::begin(&home.store, &home.environment(), &options).unwrap();
        let layer = incoming(&tar, Watched(&packed[blob], &was_read), &packed[blob]);
        let running = import.layers().layer(layer).unwrap();
        assert_eq!(running.reports().count(), 1);
        assert_eq!(was_read.load(Ordering::Relaxed), is_read, "{blob}");
        // The layer is kept without an image, because each layer becomes durable separately.
        drop(running);
        drop(import);
        assert_eq!(home.store.layers.diff_ids().unwrap(), [Digest::sha256(&tar)]);
    }
}

#[test]
fn what_is_claimed_of_a_layer_is_compared() {
    let home = Home::new();
    let [tar, other] = tars();
    let packed = pack(&tar, Pack::Gzip);
    let few = Limits { entries: 3, ..Limits::default() };
    let check = |change: &dyn Fn(&mut IncomingLayer<'_>), limits: Limits, expected: &str| {
        let options = ImportOptions { limits, ..usual_wishes() };
        let import = LayerImport::begin(&home.store, &home.environment(), &options).unwrap();
        let mut layer = incoming(&tar, &packed[..], &packed);
        change(&mut layer);
        let running = import.layers().layer(layer);
        let ended = running.and_then(|it| it.layer(incoming(&other, &other[..], &other)));
        let error = chain(&ended.unwrap_err());
        assert!(error.contains(expected), "{error}");
        // The import has failed, and accepts no other layer.
        import.layers().layer(incoming(&tar, &packed[..], &packed)).unwrap_err();
        drop(import);
        assert!(home.store.layers.diff_ids().unwrap().is_empty());
    };
    let wrong = Digest::sha256(b"wrong");
    check(&|it| it.diff_id = Some(wrong), Limits::default(), "its uncompressed tar has the digest");
    check(&|it| it.digest = Some(wrong), Limits::default(), "digest");
    check(&|it| it.size = Some(1), Limits::default(), "bytes");
    // Neither layer exceeds the limit on entries by itself.
    check(&|_| {}, few, "entries");
}

fn config_of(diff_ids: &[Digest]) -> Document {
    let diff_ids: Vec<_> = diff_ids.iter().map(ToString::to_string).collect();
    let rootfs = json!({ "type": "layers", "diff_ids": diff_ids });
    document(&json!({ "architecture": "amd64", "os": "linux", "rootfs": rootfs }))
}

fn manifest_of(config: &Document, blobs: &[&[u8]]) -> Document {
    let descriptor = |media_type: &str, digest: Digest, size: usize| json!({ "mediaType": media_type, "digest": digest.to_string(), "size": size });
    let layer = "application/vnd.oci.image.layer.v1.tar+gzip";
    let layers = blobs.iter().map(|blob| descriptor(layer, Digest::sha256(blob), blob.len()));
    let layers: Vec<_> = layers.collect();
    let of_config = "application/vnd.oci.image.config.v1+json";
    let config = descriptor(of_config, config.0, config.1.len());
    document(&json!({ "schemaVersion": 2, "config": config, "layers": layers }))
}

fn document(value: &serde_json::Value) -> Document {
    let bytes = value.to_string().into_bytes();
    (Digest::sha256(&bytes), bytes)
}

#[test]
fn documents_of_other_layers_are_refused() {
    let home = Home::new();
    let tars = tars();
    let [lower, upper] = tars.each_ref().map(|tar| pack(tar, Pack::Gzip));
    let [lower_tar, upper_tar] = tars.each_ref().map(|tar| Digest::sha256(tar));
    let import = LayerImport::begin(&home.store, &home.environment(), &usual_wishes()).unwrap();
    let image = |manifest, config| {
        let running = import.layers().layer(incoming(&tars[0], &lower[..], &lower)).unwrap();
        let running = running.layer(incoming(&tars[1], &upper[..], &upper)).unwrap();
        running.image(manifest, config)
    };
    let check = |manifest: Option<Document>, config: Option<Document>, expect: LayersMismatch| {
        let of = manifest.as_ref().or(config.as_ref()).unwrap().0;
        match image(manifest, config).unwrap_err() {
            ImportError::OtherLayers { document, source } => {
                assert_eq!((*document, *source), (of, expect));
            }
            error => panic!("{}", chain(&error)),
        }
    };
    let config = config_of(&[lower_tar, upper_tar]);
    let other = LayersMismatch::Layer { number: 2, expected: lower_tar, actual: upper_tar };
    check(None, Some(config_of(&[lower_tar, lower_tar])), other);
    let fewer = LayersMismatch::Count { expected: 1, actual: 2 };
    check(None, Some(config_of(&[lower_tar])), fewer);
    check(Some(manifest_of(&config, &[&lower])), Some(config.clone()), fewer);
    // A manifest names blobs, not tars.
    let (expected, actual) = (Digest::sha256(&tars[1]), Digest::sha256(&upper));
    let other = LayersMismatch::Layer { number: 2, expected, actual };
    check(Some(manifest_of(&config, &[&lower, &tars[1]])), Some(config.clone()), other);
    let another = config_of(&[upper_tar]);
    let other = LayersMismatch::Config { expected: another.0, actual: config.0 };
    check(Some(manifest_of(&another, &[&lower, &upper])), Some(config.clone()), other);
    // A config that was made by the import does not match the manifest either.
    let error = image(Some(manifest_of(&another, &[&lower, &upper])), None).unwrap_err();
    assert!(chain(&error).contains(&format!("its config is {}, but ", another.0)));

    let error = image(None, Some((Digest::sha256(b"another"), config.1.clone()))).unwrap_err();
    assert!(chain(&error).contains("digest"), "{}", chain(&error));
    let manifest = manifest_of(&config, &[&lower, &upper]);
    let of = manifest.0;
    let made = image(Some(manifest), Some(config)).unwrap();
    assert_eq!(import.finish(made).unwrap().manifest, Some(of));
}

#[test]
fn layers_are_counted_from_the_first() {
    let home = Home::new();
    let [lower, upper] = tars();
    let layers = Mutex::new(Vec::new());
    let progress = |event: Event<'_>| {
        if let Event::Started { layer } = event {
            layers.lock().unwrap().push(layer);
        }
    };
    let environment = ImportContext { progress: &progress, ..home.environment() };
    let import = LayerImport::begin(&home.store, &environment, &usual_wishes()).unwrap();
    let running = import.layers().layer(incoming(&lower, &lower[..], &lower)).unwrap();
    let mut wrong = incoming(&upper, &upper[..], &upper);
    wrong.diff_id = Some(Digest::sha256(b"wrong"));
    let error = running.layer(wrong).unwrap_err();
    assert!(error.to_string().contains("layer 2 of 2 (a layer)"), "{error}");
    assert_eq!(*layers.lock().unwrap(), [0, 1]);
}

/// Applying layers with many entries takes a while, and begins after all layers were read.
#[test]
fn cancelled_layers_are_not_laid() {
    let home = Home::new();
    let before = home.files();
    let [lower, _] = tars();
    // This layer cannot be applied to the other layer, so the result shows whether the import tried.
    let upper = Tar::from_text("l a nowhere").bytes();
    for is_cancelled in [false, true] {
        let cancel = AtomicBool::new(false);
        let environment = ImportContext { cancel: &cancel, ..home.environment() };
        let import = LayerImport::begin(&home.store, &environment, &usual_wishes()).unwrap();
        let running = import.layers().layer(incoming(&lower, &lower[..], &lower)).unwrap();
        let running = running.layer(incoming(&upper, &upper[..], &upper)).unwrap();
        cancel.store(is_cancelled, Ordering::Relaxed);
        match running.image(None, None).unwrap_err() {
            ImportError::Cancelled => assert!(is_cancelled),
            error => assert!(!is_cancelled, "{}", chain(&error)),
        }
    }
    assert_eq!(home.files(), before);
}
