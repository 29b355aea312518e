//! Tests lazy pulls of images without an index, whose layers have tables of contents.

use std::sync::{Arc, Mutex};

use image::erofs::read::{Image, Located, Objects, native_tree};
use image::lazy::{BlobKind, Head, SpanPlace, WindowGroup};
use image::tree::{Content, Inode, Node};
use image::verity::{Algorithm, ObjectId};
use oci::policy::Policies;
use quire_transfer as transfer;
use serde_json::{Value, json};
use store::{Form, IndexWindows, OpenImageError, RefName};
use testing::chunked::{ChunkedFormat, ChunkedImage, ChunkedLayer, chunked_image, chunked_layer};
use testing::fake::{Reply, Request, Server, content, reply};
use transfer::import::{ImportOptions, Limits};
use transfer::lazy::{LazyFetchError, TrustIndex};
use transfer::pull::{
    Indexes, Layers, LazyPullError, LazyPulled, LazySource, PullSettings, Pulled, Syncs, UseTables,
    pull_lazy,
};

use super::pulls::{MANIFEST, pull_with};
use super::*;
use crate::build::{Pack, Tar, pack};
use crate::home::{Home, usual_wishes};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const BOTH: [ChunkedFormat; 2] = [ChunkedFormat::Estargz, ChunkedFormat::ZstdChunked];
/// Length of a chunk in bytes, which is no multiple of a block.
const CHUNK: usize = 100_001;

/// Serves an image as `app:1`.
fn serve(layers: &[&ChunkedLayer], image: &ChunkedImage) -> Server {
    serve_more(layers, image, |_| None)
}

/// Serves an image as `app:1`, and some other responses, which precede those for the image.
fn serve_more(
    layers: &[&ChunkedLayer],
    image: &ChunkedImage,
    more: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
) -> Server {
    let blobs: Vec<_> = layers.iter().map(|it| it.blob.clone()).collect();
    let ChunkedImage { manifest, config } = image.clone();
    Server::start(move |request, _| {
        if let Some(reply) = more(request) {
            return reply;
        }
        let name = request.path.rsplit('/').next().unwrap();
        if request.path.contains("/manifests/") {
            let is_it = name == "1" || name == digest(&manifest).to_string();
            return match is_it {
                true => reply(200).header("content-type", MANIFEST).body(&manifest),
                false => reply(404),
            };
        }
        let mut all = blobs.iter().chain([&config]);
        match all.find(|it| digest(it).to_string() == name) {
            Some(blob) => content(request, blob),
            None => reply(404),
        }
    })
}

fn pull_lazily(home: &Home, host: &str, trust: TrustIndex) -> Result<LazyPulled, LazyPullError> {
    pull_named(home, &format!("{host}/app:1"), trust)
}

fn pull_named(home: &Home, name: &str, trust: TrustIndex) -> Result<LazyPulled, LazyPullError> {
    pull_within(home, name, trust, usual_wishes().limits)
}

fn pull_within(
    home: &Home,
    name: &str,
    trust: TrustIndex,
    limits: Limits,
) -> Result<LazyPulled, LazyPullError> {
    pull_with_tables(home, name, (trust, UseTables::IfNoIndex), limits)
}

fn pull_with_tables(
    home: &Home,
    name: &str,
    trust: (TrustIndex, UseTables),
    limits: Limits,
) -> Result<LazyPulled, LazyPullError> {
    let reference: Reference = name.parse().unwrap();
    let options = PullSettings {
        import: ImportOptions { form: Form::Tar, limits, ..usual_wishes() },
        layers: Layers::Forget,
        indexes: Indexes::Forget,
        policies: &Policies::load(&[]).unwrap(),
        syncs: Syncs::AtOnce,
    };
    let registry = Registry::new(&reference, &settings()).unwrap();
    let name: RefName = "lazy".parse().unwrap();
    pull_lazy(&home.store, &registry, &reference, &home.environment(), &options, &name, trust)
}

/// Lists the files of an image, with everything that the image has of them except their contents: with their digest if
/// they are in one chunk.
fn listing(home: &Home, image: &ImageId) -> Vec<String> {
    let bytes = std::fs::read(home.path("store/images").join(image.to_string())).unwrap();
    let image = Image::open(&bytes[..]).unwrap();
    let digests = Mutex::new(Vec::new());
    let find = |located: &Located<'_>| {
        let mut digests = digests.lock().unwrap();
        digests.push(located.fingerprint.unwrap());
        ObjectId::from_bytes(&[&[0; 24][..], &(digests.len() as u64).to_le_bytes()].concat()).ok()
    };
    let objects = Objects { algorithm: Algorithm::Sha256, inline_max: 0, find: &find };
    let tree = native_tree(&image, objects).unwrap().tree;
    let digests = digests.into_inner().unwrap();
    let node = |inode: &Inode<'_>| match inode.node() {
        Node::Regular(Content::External { size, object: Some(object), .. }) => {
            let number = u64::from_le_bytes(object.as_bytes()[24..].try_into().unwrap());
            // A file in the image has an object that is not one of those above.
            let known = usize::try_from(number).ok().and_then(|it| digests.get(it.wrapping_sub(1)));
            match known.filter(|_| (65..=CHUNK as u64).contains(&size)) {
                Some(known) => format!("file of {size} bytes {known:?}"),
                None => format!("file of {size} bytes"),
            }
        }
        Node::Regular(Content::External { size, .. }) => format!("file of {size} bytes"),
        Node::Regular(Content::Inline(bytes)) => format!("file of {} bytes", bytes.len()),
        other => format!("{other:?}"),
    };
    let (mut lines, mut walk) = (Vec::new(), tree.walk());
    let line = |path: &[u8], inode: &Inode<'_>| {
        let xattrs: Vec<_> = inode
            .xattrs()
            .map(|(name, value)| {
                (name.escape_ascii().to_string(), value.escape_ascii().to_string())
            })
            .collect();
        format!(
            "{} {} {:?} links {} {xattrs:?} of {}",
            path.escape_ascii(),
            node(inode),
            inode.metadata(),
            inode.nlink(),
            inode.path().escape_ascii(),
        )
    };
    lines.push(line(b"", &tree.root()));
    while let Some((path, entry)) = walk.next() {
        lines.push(line(path, &entry.inode));
    }
    lines
}

/// The listing of an eStargz image that was pulled with its layers also has the file with the table.
fn without_table(lines: Vec<String>) -> Vec<String> {
    lines.into_iter().filter(|it| !it.starts_with("/stargz.index.json ")).collect()
}

fn lower() -> Tar {
    let mut tar = Tar::from_text(
        "d ., d etc, d usr, d usr/bin, f etc/small x, f etc/empty, s etc/link ../usr/bin/tool, d old, f old/one 1, \
        d both, f both/below below",
    );
    tar.entry("usr/bin/tool", b'0', "", &noise(CHUNK * 3 + 17));
    tar.entry("usr/bin/page", b'0', "", &noise(4096));
    tar.entry("usr/bin/same", b'0', "", &noise(70_000));
    tar.entry("usr/bin/exact", b'0', "", &noise(CHUNK * 2));
    for number in 0..40 {
        tar.entry(&format!("etc/file{number}"), b'0', "", &noise(100 + number * 130));
    }
    tar.entry("usr/bin/hard", b'1', "usr/bin/tool", b"");
    tar.entry("etc/fifo", b'6', "", b"");
    tar.pax(&[("mtime", "1600000000.25"), ("SCHILY.xattr.user.name", "value")]);
    tar.entry("etc/with", b'0', "", &noise(300));
    tar.pax(&[("path", "./etc//dots/.")]);
    tar.entry("ignored", b'5', "", b"");
    tar
}

fn upper() -> Tar {
    let mut tar = Tar::from_text(
        "w etc/.wh.small, d old, w old/.wh..wh..opq, f old/two 2, l hard usr/bin/tool, d both, f both/above above, \
        f etc/file3 replaced, f etc/twice first",
    );
    tar.entry("etc/file4", b'0', "", &noise(200_000));
    tar.entry("etc/twice", b'0', "", &noise(900));
    tar
}

/// A layer that needs no other below.
fn simple() -> Vec<u8> {
    Tar::from_text("d old, f old/one 1, f old/two 2").file("noise", &noise(9000)).bytes()
}

fn plain(_: &mut Value) {}

/// Returns the layers of an image of three layers, of which the last one has only directories.
fn layers(format: ChunkedFormat) -> [ChunkedLayer; 3] {
    [lower(), upper(), Tar::from_text("d last, d last/one")]
        .map(|it| chunked_layer(&it.bytes(), format, CHUNK, plain))
}

/// The tree is that of an import of the layers, and no layer is fetched.
#[test]
fn an_image_without_an_index_is_made_from_its_layers_tables() {
    for format in BOTH {
        let layers = layers(format);
        let layers: Vec<_> = layers.iter().collect();
        let image = chunked_image(&layers, &["/usr/bin/tool"]);
        let server = serve(&layers, &image);
        let home = Home::new();
        let pulled = pull_lazily(&home, &server.host(), TrustIndex::Default).unwrap();
        let LazyPulled::Image { image: lazy, source, layers: 3, devices: 2, .. } = pulled else {
            panic!("{pulled:?}");
        };
        assert_eq!(source, LazySource::Tables);
        // At most two requests for each layer, and all of them for parts of it.
        for layer in &layers {
            let name = digest(&layer.blob).to_string();
            let seen = server.seen();
            let seen: Vec<_> = seen.iter().filter(|it| it.path.ends_with(&name)).collect();
            assert!((1..=2).contains(&seen.len()), "{seen:?}");
            assert!(seen.iter().all(|it| it.header("range").is_some()));
        }
        // The image is not complete, and no comparison with its layers is claimed.
        let opened = home.store.open_image(&lazy);
        assert!(matches!(opened, Err(OpenImageError::Partial(_))), "{opened:?}");
        assert!(home.store.downloads.is_unproven_for(&lazy, None).unwrap());
        for device in home.store.lazy_devices(&lazy).unwrap() {
            let head =
                home.store.lazy_devices.index_head_for(&device, Some(&digest(&image.manifest)));
            assert!(head.unwrap().unwrap().kind.is_of_chunks());
            assert!(home.store.lazy_devices.index(&device).unwrap().is_none());
        }
        // Another pull and a check change nothing.
        let again = pull_lazily(&home, &server.host(), TrustIndex::Default).unwrap();
        assert!(matches!(again, LazyPulled::UpToDate { image, .. } if image == lazy));
        let report = home.store.fsck(store::FsckOptions::default()).unwrap();
        assert!(report.damage.is_empty(), "{:?}", report.damage);

        // A pull of the layers makes the whole image, whose name it gets.
        let name = format!("{}/app:1", server.host());
        let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
        let whole = pull_with(&home, &name, Layers::Forget, import, &settings()).unwrap();
        let Pulled::Image(whole) = whole else { panic!("{whole:?}") };
        home.store.open_image(&whole.image).unwrap();
        assert_ne!(whole.image, lazy);
        let (lazy, whole) = (listing(&home, &lazy), listing(&home, &whole.image));
        let whole = without_table(whole);
        assert!(lazy.len() > 50 && lazy.len() == whole.len(), "{format:?}");
        lazy.iter().zip(&whole).for_each(|(lazy, whole)| assert_eq!(lazy, whole, "{format:?}"));
    }
}

/// Checks why an image of layers with a changed table is not made.
fn check_lie(format: ChunkedFormat, lie: &dyn Fn(&mut Value), expect: &str) {
    let text = match lied(format, lie) {
        Ok(done) => format!("{done:?}"),
        Err(error) => testing::chain(&error),
    };
    assert!(text.contains(expect), "{format:?}: {text}");
}

fn lied(format: ChunkedFormat, lie: &dyn Fn(&mut Value)) -> Result<LazyPulled, LazyPullError> {
    let mut tar = Tar::from_text("d d, f d/small small");
    tar.entry("big", b'0', "", &noise(CHUNK * 2 + 5));
    tar.entry("next", b'0', "", &noise(5000));
    let layer = chunked_layer(&tar.bytes(), format, CHUNK, lie);
    let layers = [&layer];
    let server = serve(&layers, &chunked_image(&layers, &[]));
    let home = Home::new();
    let pulled = pull_lazily(&home, &server.host(), TrustIndex::Default);
    // A failed pull leaves no name.
    let name = home.store.refs.get(&"lazy".parse().unwrap()).unwrap();
    assert_eq!(name.is_some(), pulled.is_ok());
    pulled
}

/// The number of the entry of a file in the table of the test's layer: directory, small file, first chunk, two chunks,
/// next file.
const SMALL: usize = 1;
const BIG: usize = 2;
const NEXT: usize = 5;

/// A change of a table.
type Lie = Box<dyn Fn(&mut Value) + Send>;

fn set(at: usize, field: &'static str, value: Value) -> Lie {
    Box::new(move |table| table["entries"][at][field] = value.clone())
}

fn entries(table: &mut Value) -> &mut Vec<Value> {
    table["entries"].as_array_mut().unwrap()
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    std::thread::scope(|scope| {
        let check_in = |format, lie: Lie, expect: &'static str| {
            scope.spawn(move || check_lie(format, &*lie, expect));
        };
        for format in BOTH {
            let check = |lie: Lie, expect| check_in(format, lie, expect);
            check(Box::new(plain), "Tables");
            check(set(BIG, "offset", json!(1_u64 << 40)), "outside");
            check(set(BIG, "offset", json!(0)), "overlap");
            check(set(NEXT, "offset", json!(1)), "overlap");
            check(set(BIG + 1, "chunkOffset", json!(5)), "not consecutive");
            check(set(BIG, "chunkSize", json!(CHUNK * 9)), "more bytes than the file");
            check(set(BIG, "size", json!(u64::MAX)), "a file cannot have");
            check(set(BIG + 1, "chunkDigest", json!("")), "no digest");
            check(set(BIG + 1, "chunkDigest", json!("sha512:00")), "no digest");
            check(set(BIG, "innerOffset", json!(512)), "share");
            check(set(BIG, "type", json!("strange")), "invalid type");
            check(set(SMALL, "name", json!("d/\u{fffd}")), "not UTF-8");
            check(set(SMALL, "name", json!("../small")), "leads out");
            check(set(SMALL, "uid", json!(-1)), "invalid uid");
            check(set(SMALL, "mode", json!(0xffff_ffff_u64)), "Tables");
            check(set(SMALL, "modtime", json!("yesterday")), "invalid modtime");
            check(set(SMALL, "xattrs", json!({"user.a": "?"})), "invalid xattr");
            // Tars have other rules for these.
            let acl = json!({"system.posix_acl_access": "AgAAAA=="});
            check(set(SMALL, "xattrs", acl), "invalid xattr");
            check(set(SMALL, "xattrs", json!({"user.a%3Db": ""})), "invalid xattr");
            let long = format!("user.{}", "a".repeat(251));
            check(set(SMALL, "xattrs", json!({ long: "" })), "invalid xattr");
            let many: serde_json::Map<_, _> =
                (0..300).map(|it| (format!("user.{it:0>245}"), json!(""))).collect();
            check(set(SMALL, "xattrs", many.into()), "invalid xattr");
            // A short table makes many directories, and a long name is not shown.
            check(set(SMALL, "name", json!("a/".repeat(2000) + "b")), "than its size allows");
            check(set(SMALL, "name", json!("a".repeat(5000))), "invalid name");
            // A file below a file, a file without chunks, and a chunk without a file.
            check(set(NEXT, "name", json!("big/next")), "not a directory");
            let drop_chunks = |table: &mut Value| drop(entries(table).drain(BIG + 1..NEXT));
            check(Box::new(drop_chunks), "fewer bytes than the file");
            check(Box::new(|table| drop(entries(table).remove(BIG))), "without a file");
            check(Box::new(|table| table["version"] = json!(2)), "version");
            check(Box::new(|table| table["entries"] = json!([])), "have no files");
            // The same file twice: its chunks would have to be at two places.
            let twice = |table: &mut Value| {
                let next = entries(table)[NEXT].clone();
                entries(table).push(next);
            };
            check(Box::new(twice), "overlap");
        }
        // In zstd:chunked, the end of a file and the length of its last chunk are stated.
        let check = |lie: Lie, expect| check_in(ChunkedFormat::ZstdChunked, lie, expect);
        check(set(BIG, "size", json!(CHUNK * 9)), "fewer bytes than the file");
        check(set(NEXT, "endOffset", json!(1_u64 << 40)), "outside");
        check(set(NEXT, "endOffset", json!(3)), "outside");
    });
}

/// A chunk is in memory as a whole.
#[test]
fn a_chunk_that_is_too_long_is_refused() {
    let length = (16 << 20) + 1;
    let bytes = Tar::default().file("long", &vec![7; length]).bytes();
    for (chunk, expect) in [(length, "16777217 bytes"), (length - 1, "Tables")] {
        let layer = chunked_layer(&bytes, ChunkedFormat::Estargz, chunk, plain);
        let layers = [&layer];
        let server = serve(&layers, &chunked_image(&layers, &[]));
        let pulled = pull_lazily(&Home::new(), &server.host(), TrustIndex::Default);
        let text = pulled.map_or_else(|it| testing::chain(&it), |it| format!("{it:?}"));
        assert!(text.contains(expect), "{text}");
    }
}

/// The images of engines share snapshots of equal layers, so a false table would affect other images.
#[test]
fn engines_use_no_tables() {
    let layer = chunked_layer(&simple(), ChunkedFormat::Estargz, CHUNK, plain);
    let layers = [&layer];
    let server = serve(&layers, &chunked_image(&layers, &[]));
    let name = format!("{}/app:1", server.host());
    for trust in [TrustIndex::Default, TrustIndex::Repository] {
        let trust = (trust, UseTables::Never);
        let pulled = pull_with_tables(&Home::new(), &name, trust, usual_wishes().limits);
        assert!(matches!(pulled, Err(LazyPullError::Index(_))), "{pulled:?}");
    }
}

/// A table of a few bytes can claim any contents, for which the service would need memory.
#[test]
fn tables_have_the_limits_of_imports() {
    let bytes = Tar::default().file("zeros", &vec![0; 3_000_000]).bytes();
    for format in BOTH {
        let layer = chunked_layer(&bytes, format, 1 << 20, plain);
        let layers = [&layer, &layer];
        let server = serve(&layers, &chunked_image(&layers, &[]));
        let name = format!("{}/app:1", server.host());
        let usual = usual_wishes().limits;
        let check = |limits: Limits, expect: &str| {
            let pulled = pull_within(&Home::new(), &name, TrustIndex::Default, limits);
            let text = pulled.map_or_else(|it| testing::chain(&it), |it| format!("{it:?}"));
            assert!(text.contains(expect), "{format:?}: {text}");
        };
        check(usual, "Tables");
        // The device is a bit longer than the file, and the sum of both layers is longer than each.
        check(Limits { content_bytes: 5_000_000, ..usual }, "more than 5000000 bytes");
        check(Limits { layer_bytes: 2_900_000, ..usual }, "more than 2900000 bytes");
        let ratio = Limits { ratio: 50, ratio_from: 2_900_000, ..usual };
        check(ratio, "more than 50 times its size");
        check(Limits { ratio_from: 3_100_000, ..ratio }, "more than 50 times their size");
        check(Limits { ratio_from: 6_200_000, ..ratio }, "Tables");
    }
}

/// The manifest names the digest of the table.
#[test]
fn a_table_with_another_digest_is_refused() {
    for format in BOTH {
        let other = "sha256:".to_owned() + &"7".repeat(64);
        let mut layer = chunked_layer(&simple(), format, CHUNK, plain);
        for (name, value) in layer.annotations.as_object_mut().unwrap() {
            if name.ends_with("digest") || name.ends_with("checksum") {
                *value = other.clone().into();
            }
        }
        let layers = [&layer];
        let server = serve(&layers, &chunked_image(&layers, &[]));
        let error = pull_lazily(&Home::new(), &server.host(), TrustIndex::Default).unwrap_err();
        let text = testing::chain(&error);
        assert!(matches!(error, LazyPullError::Tables { .. }), "{text}");
        assert!(text.contains(&other) && text.contains(&digest(&layer.blob).to_string()), "{text}");
    }
}

/// If a layer has no table, no table is fetched, and the message is that about the index.
#[test]
fn all_layers_must_have_a_table() {
    let blob = pack(&simple(), Pack::Gzip);
    let usual = ChunkedLayer {
        tar: simple(),
        blob,
        media_type: "application/vnd.oci.image.layer.v1.tar+gzip",
        annotations: json!({}),
    };
    let chunked = chunked_layer(&simple(), ChunkedFormat::Estargz, CHUNK, plain);
    for layers in [&[&chunked, &usual][..], &[&usual]] {
        let server = serve(layers, &chunked_image(layers, &[]));
        let error = pull_lazily(&Home::new(), &server.host(), TrustIndex::Default).unwrap_err();
        assert!(matches!(error, LazyPullError::Index(LazyFetchError::None(_))), "{error}");
        assert!(!server.lines().iter().any(|it| it.contains(&digest(&chunked.blob).to_string())));
        // An index that cannot be used is named.
        let server = serve_with_bad_index(layers, &chunked_image(layers, &[]));
        let error = pull_lazily(&Home::new(), &server.host(), TrustIndex::Default).unwrap_err();
        let text = testing::chain(&error);
        assert!(text.contains(&digest(BAD_INDEX).to_string()), "{text}");
    }
}

/// The manifest of an index that cannot be used.
const BAD_INDEX: &[u8] = b"{}";

/// As [`serve`], but the registry lists an index that cannot be used.
fn serve_with_bad_index(layers: &[&ChunkedLayer], image: &ChunkedImage) -> Server {
    let listed = json!({
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [{
            "mediaType": MANIFEST,
            "artifactType": transfer::lazy::artifact::LAZY_ARTIFACT,
            "digest": digest(BAD_INDEX).to_string(),
            "size": BAD_INDEX.len(),
        }],
    });
    let (listed, bad) = (listed.to_string(), digest(BAD_INDEX).to_string());
    serve_more(layers, image, move |request| {
        if request.path.contains("/referrers/") {
            return Some(reply(200).header("content-type", INDEX).body(listed.as_bytes()));
        }
        let is_bad = request.path.ends_with(&bad);
        is_bad.then(|| reply(200).header("content-type", MANIFEST).body(BAD_INDEX))
    })
}

/// The user learns why an index is not used, also if tables replace it.
#[test]
fn an_index_that_cannot_be_used_is_not_hidden() {
    let right = chunked_layer(&simple(), ChunkedFormat::ZstdChunked, CHUNK, plain);
    let image = chunked_image(&[&right], &[]);
    let of = |server: &Server| pull_lazily(&Home::new(), &server.host(), TrustIndex::Default);
    let server = serve_with_bad_index(&[&right], &image);
    let LazyPulled::Image { source: LazySource::Tables, unusable_index: Some(error), .. } =
        of(&server).unwrap()
    else {
        panic!()
    };
    let bad = digest(BAD_INDEX).to_string();
    assert!(testing::chain(&error).contains(&bad), "{error}");
    // An image without an index has no such error.
    let pulled = of(&serve(&[&right], &image)).unwrap();
    assert!(matches!(pulled, LazyPulled::Image { unusable_index: None, .. }), "{pulled:?}");

    // If the tables cannot be used either, the error has both reasons.
    let wrong = chunked_layer(&simple(), ChunkedFormat::ZstdChunked, CHUNK, |table| {
        table["version"] = json!(2);
    });
    let image = chunked_image(&[&wrong], &[]);
    let text = testing::chain(&of(&serve_with_bad_index(&[&wrong], &image)).unwrap_err());
    assert!(text.contains(&bad) && text.contains("version"), "{text}");
    let text = testing::chain(&of(&serve(&[&wrong], &image)).unwrap_err());
    let start = "has no index for lazy loading, and cannot be made from its layers' tables of contents: layer";
    assert!(text.contains(start), "{text}");
}

/// A user who names an index gets no image from tables.
#[test]
fn no_table_replaces_an_index_that_is_named() {
    let layer = chunked_layer(&simple(), ChunkedFormat::Estargz, CHUNK, plain);
    let layers = [&layer];
    let server = serve(&layers, &chunked_image(&layers, &[]));
    let trust = TrustIndex::Digest(digest(b"another"));
    let error = pull_lazily(&Home::new(), &server.host(), trust).unwrap_err();
    assert!(matches!(error, LazyPullError::Index(_)), "{error}");
}

/// A table whose files differ from those of the tar is not noticed before the layers are compared. Then the image of the
/// layers gets the name.
#[test]
fn a_table_of_other_files_is_replaced_by_the_layers() {
    let layer = chunked_layer(&simple(), ChunkedFormat::ZstdChunked, CHUNK, |table| {
        table["entries"][2]["name"] = json!("old/forged");
    });
    let layers = [&layer];
    let image = chunked_image(&layers, &[]);
    let server = serve(&layers, &image);
    let home = Home::new();
    let lazy = pull_lazily(&home, &server.host(), TrustIndex::Default).unwrap();
    let LazyPulled::Image { image: lazy, .. } = lazy else { panic!("{lazy:?}") };
    assert!(listing(&home, &lazy).iter().any(|it| it.starts_with("/old/forged ")));
    let manifest = digest(&image.manifest);
    let reference: Reference = format!("{}/app:1", server.host()).parse().unwrap();
    let registry = Arc::new(Registry::new(&reference, &settings()).unwrap());
    // It cannot be proven by its devices.
    let environment = home.environment();
    let proven =
        transfer::import::prove(&home.store, &lazy, Some(&manifest), &*registry, &environment);
    assert_eq!(proven.unwrap(), transfer::import::Completed::NotYet);
    let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let name = format!("{}/app:1", server.host());
    let whole = pull_with(&home, &name, Layers::Forget, import, &settings()).unwrap();
    let Pulled::Image(whole) = whole else { panic!("{whole:?}") };
    assert!(!listing(&home, &whole.image).iter().any(|it| it.starts_with("/old/forged ")));
    assert!(home.store.downloads.is_unproven_for(&lazy, None).unwrap());
}

/// The index of another image claims the device before the image is pulled. The claim of the device's name can only be
/// refuted by the bytes of a tar, so the layers are pulled.
#[test]
fn a_device_that_an_index_claims_first_is_not_used() {
    let layer = chunked_layer(
        &Tar::default().file("noise", &noise(9000)).bytes(),
        ChunkedFormat::Estargz,
        CHUNK,
        plain,
    );
    let layers = [&layer];
    let image = chunked_image(&layers, &[]);
    let server = serve(&layers, &image);
    let (home, other) = (Home::new(), Home::new());
    let pulled = pull_lazily(&other, &server.host(), TrustIndex::Default).unwrap();
    let LazyPulled::Image { image: lazy, .. } = pulled else { panic!("{pulled:?}") };
    let device = other.store.lazy_devices(&lazy).unwrap()[0];
    let manifest = digest(&image.manifest);
    let head = other.store.lazy_devices.index_head_for(&device, Some(&manifest)).unwrap().unwrap();
    // All fields that two indexes of one tar have in common are equal.
    let groups = vec![WindowGroup { first: 0, bytes: 7 }];
    let spans = vec![SpanPlace { packed: 0, padding: 0, ..head.spans[0] }];
    let head = Head { kind: BlobKind::Gzip, spans, groups, ..head };
    let claim = home.store.begin().unwrap();
    let windows = IndexWindows::Groups(b"windows".to_vec());
    claim.lazy_device(head, windows, digest(b"attacker")).unwrap();
    claim.commit().unwrap();

    let error = pull_lazily(&home, &server.host(), TrustIndex::Default).unwrap_err();
    assert!(matches!(error, LazyPullError::Contradiction { .. }), "{error:?}");
    let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let name = format!("{}/app:1", server.host());
    let whole = pull_with(&home, &name, Layers::Forget, import, &settings()).unwrap();
    let Pulled::Image(whole) = whole else { panic!("{whole:?}") };
    home.store.open_image(&whole.image).unwrap();
}

/// crane makes eStargz by the code of stargz-snapshotter.
#[test]
fn the_tables_of_crane_make_the_same_tree() {
    let Some(daemon) = real::start("") else { return };
    if faults::estargz(&daemon).is_none() {
        return;
    }
    let home = Home::new();
    let name = format!("{}/app:2", daemon.host);
    let pulled = pull_named(&home, &name, TrustIndex::Default).unwrap();
    let LazyPulled::Image { image: lazy, source, .. } = pulled else { panic!("{pulled:?}") };
    assert_eq!(source, LazySource::Tables);
    let import = ImportOptions { form: Form::Tar, ..usual_wishes() };
    let whole = pull_with(&home, &name, Layers::Forget, import, &settings()).unwrap();
    let Pulled::Image(whole) = whole else { panic!("{whole:?}") };
    let (lazy, whole) = (listing(&home, &lazy), without_table(listing(&home, &whole.image)));
    assert!(lazy.len() > 40 && lazy.len() == whole.len(), "{lazy:?} {whole:?}");
    // The tar has fractions of seconds, and the table rounds them.
    let without_time = |line: &String| {
        let (before, after) = line.split_once("mtime").unwrap();
        format!("{before}{}", after.split_once(" links ").unwrap().1)
    };
    for (lazy, whole) in lazy.iter().zip(&whole) {
        assert_eq!(without_time(lazy), without_time(whole));
    }
}
