//! Layers that come one at a time, as engines hand them over.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};

use super::build::{Layout, Pack, Tar, pack};
use super::{Home, chain, usual_wishes};
use quire_transfer::import::{Durable, ImportWishes, IncomingLayer, LayerImport, Limits};
use store::Digest;

const LOWER: &str = "d etc,f etc/a one,f etc/b two";
const UPPER: &str = "w etc/.wh.a,f etc/c three";

fn tars() -> [Vec<u8>; 2] {
    [LOWER, UPPER].map(|text| Tar::of(text).bytes())
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

/// Tells whether it was read.
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
    let wishes = ImportWishes { name: Some(&name), ..usual_wishes() };
    let import = LayerImport::begin(&other.store, &other.surroundings(), &wishes).unwrap();
    let mut running = import.layers();
    for tar in &tars {
        let packed = pack(tar, Pack::Gzip);
        running = running.layer(incoming(tar, &packed[..], &packed)).unwrap();
    }
    let reports: Vec<_> = running.reports().map(|it| (it.diff_id, it.is_reused)).collect();
    assert_eq!(reports, tars.each_ref().map(|tar| (Digest::sha256(tar), false)));
    // Nothing is visible before the end.
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
    let wishes = ImportWishes { durable: Durable::EachLayer, ..usual_wishes() };
    // Which blob, whether it is read, and whether its layer counts as one that was here.
    for (blob, is_read) in [(0, true), (0, false), (1, true), (1, false)] {
        let was_read = AtomicBool::new(false);
        let import = LayerImport::begin(&home.store, &home.surroundings(), &wishes).unwrap();
        let layer = incoming(&tar, Watched(&packed[blob], &was_read), &packed[blob]);
        let running = import.layers().layer(layer).unwrap();
        assert_eq!(running.reports().count(), 1);
        assert_eq!(was_read.load(Ordering::Relaxed), is_read, "{blob}");
        // It stays without an image, since each layer was to be durable.
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
        let wishes = ImportWishes { limits, ..usual_wishes() };
        let import = LayerImport::begin(&home.store, &home.surroundings(), &wishes).unwrap();
        let mut layer = incoming(&tar, &packed[..], &packed);
        change(&mut layer);
        let running = import.layers().layer(layer);
        let ended = running.and_then(|it| it.layer(incoming(&other, &other[..], &other)));
        let error = chain(&ended.unwrap_err());
        assert!(error.contains(expected), "{error}");
        // It has failed, and takes no other.
        import.layers().layer(incoming(&tar, &packed[..], &packed)).unwrap_err();
        drop(import);
        assert!(home.store.layers.diff_ids().unwrap().is_empty());
    };
    let wrong = Digest::sha256(b"wrong");
    check(&|it| it.diff_id = Some(wrong), Limits::default(), "unpacked it has the digest");
    check(&|it| it.digest = Some(wrong), Limits::default(), "digest");
    check(&|it| it.size = Some(1), Limits::default(), "bytes");
    // Neither layer has as many entries.
    check(&|_| {}, few, "entries");
}

#[test]
fn documents_of_other_layers_are_refused() {
    let home = Home::new();
    let [tar, other] = tars();
    let import = LayerImport::begin(&home.store, &home.surroundings(), &usual_wishes()).unwrap();
    let config = |diff_id: &Digest| {
        let text = format!(
            r#"{{"architecture":"amd64","os":"linux","rootfs":{{"type":"layers","diff_ids":["{diff_id}"]}}}}"#
        );
        (Digest::sha256(text.as_bytes()), text.into_bytes())
    };
    let image = |config| {
        let running = import.layers().layer(incoming(&tar, &tar[..], &tar)).unwrap();
        running.image(None, Some(config))
    };
    let error = image(config(&Digest::sha256(&other))).unwrap_err();
    assert!(error.to_string().contains("names other layers"), "{error}");
    let (_, bytes) = config(&Digest::sha256(&tar));
    let error = image((Digest::sha256(b"another"), bytes)).unwrap_err();
    assert!(chain(&error).contains("digest"), "{}", chain(&error));
    image(config(&Digest::sha256(&tar))).unwrap();
}
