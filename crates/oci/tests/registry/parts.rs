//! Parts of blobs: no byte beyond a part is requested.

use quire_oci::blobs::{BlobSource, Whole};
use quire_oci::layout::Layout;

use super::*;
use testing::fake::{Server, content, reply};

#[test]
fn a_part_ends_where_it_is_to_end() {
    let bytes = noise(3_000_000);
    let blob = bytes.clone();
    let server = Server::start(move |request, number| match number {
        // The first response breaks off in the middle of the part, so the rest is requested.
        0 => content(request, &blob).cut(700_000),
        _ => content(request, &blob),
    });
    let there = registry(&server.host(), &settings());
    let part = there.blob(&digest(&bytes), Some(3_000_000), 100_000).until(1_100_000);
    assert_same(&read(part).unwrap(), &bytes[100_000..1_100_000]);
    let part = there.blob(&digest(&bytes), Some(3_000_000), 0).until(10);
    assert_same(&read(part).unwrap(), &bytes[..10]);
    let part = there.blob(&digest(&bytes), Some(3_000_000), 10).until(10);
    assert_same(&read(part).unwrap(), &[]);
    let asked: Vec<_> =
        server.seen().into_iter().map(|it| it.header("range").unwrap().to_owned()).collect();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert_eq!((asked[0].as_str(), asked[2].as_str()), ("bytes=100000-1099999", "bytes=0-9"));
    assert!(asked[1].ends_with("-1099999"), "{asked:?}");
}

#[test]
fn a_server_without_ranges_is_left_at_the_end_of_the_part() {
    let bytes = noise(2_000_000);
    let blob = bytes.clone();
    let server = Server::start(move |_, _| reply(200).body(&blob));
    let part = registry(&server.host(), &settings())
        .blob(&digest(&bytes), Some(2_000_000), 500)
        .until(1000);
    assert_same(&read(part).unwrap(), &bytes[500..1000]);
    assert_eq!(server.seen().len(), 1);
}

/// Makes a layout with one blob.
fn layout(bytes: &[u8]) -> (tempfile::TempDir, Layout) {
    let folder = tempfile::tempdir().unwrap();
    let blobs = folder.path().join("blobs/sha256");
    std::fs::create_dir_all(&blobs).unwrap();
    let name = digest(bytes).to_string();
    std::fs::write(blobs.join(name.trim_start_matches("sha256:")), bytes).unwrap();
    std::fs::write(folder.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    std::fs::write(folder.path().join("index.json"), r#"{"schemaVersion":2,"manifests":[]}"#)
        .unwrap();
    let layout = Layout::open(folder.path()).unwrap();
    (folder, layout)
}

#[test]
fn every_source_of_blobs_gives_the_same_bytes() {
    let bytes = noise(300_000);
    let blob = bytes.clone();
    let right = digest(&bytes);
    let server = Server::start(move |request, _| {
        let is_right = request.path.contains(&right.to_string());
        if is_right { content(request, &blob) } else { reply(404) }
    });
    let registry = registry(&server.host(), &Settings { retries: 0, ..settings() });
    let (_folder, layout) = layout(&bytes);
    let sources: [&dyn BlobSource; 2] = [&registry, &layout];
    for source in sources {
        let part = |range: std::ops::Range<u64>| {
            let mut got = Vec::new();
            source.blob(&digest(&bytes), 300_000, range).read_to_end(&mut got).map(|_| got)
        };
        for range in [0..300_000, 0..1, 299_999..300_000, 5000..5000, 70_000..200_000] {
            let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
            assert_same(&part(range).unwrap(), &bytes[start..end]);
        }
        let parts =
            source.ranges(&digest(&bytes), 300_000, &[9..12, 0..3, 100_000..100_001], Whole::Read);
        let expect = [&bytes[9..12], &bytes[..3], &bytes[100_000..100_001]].map(<[u8]>::to_vec);
        assert_eq!(parts.unwrap(), expect);
        // A missing blob and a wrong size are errors of the first read.
        let mut got = Vec::new();
        let mut absent = source.blob(&digest(b"absent"), 6, 0..6);
        absent.read_to_end(&mut got).unwrap_err();
        assert!(got.is_empty());
        absent.read(&mut [0]).unwrap_err();
        source.blob(&digest(&bytes), 300_001, 0..300_001).read_to_end(&mut got).unwrap_err();
        let behind =
            source.ranges(&digest(&bytes), 300_000, &[0..1, 299_999..300_002], Whole::Read);
        assert_eq!(behind.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
        assert_eq!(
            source.ranges(&digest(&bytes), 300_000, &[], Whole::Read).unwrap(),
            Vec::<Vec<u8>>::new()
        );
        assert!(!source.distrust(&digest(&bytes)), "there is no other place");
    }
}

/// Starts a registry that redirects to `storage`. The addresses contain the number of redirects so far.
fn leading_to(storage: &Server) -> Server {
    let host = storage.host();
    Server::start(move |_, number| {
        reply(307).header("location", &format!("http://{host}/signed?number={number}"))
    })
}

#[test]
fn the_registry_is_asked_once_where_a_blob_is() {
    let bytes = noise(100_000);
    let blob = bytes.clone();
    let storage = Server::start(move |request, _| content(request, &blob));
    let server = leading_to(&storage);
    let there = registry(&server.host(), &settings());
    for at in [0_u64, 5000, 70_000] {
        let part = there.range(&digest(&bytes), at..at + 1000).unwrap();
        let at = usize::try_from(at).unwrap();
        assert_same(&part, &bytes[at..at + 1000]);
    }
    assert_same(&read(there.blob(&digest(&bytes), Some(100_000), 0)).unwrap(), &bytes);
    assert_eq!(server.lines().len(), 1, "{:?}", server.lines());
    assert_eq!(storage.lines(), vec!["GET /signed?number=0"; 4]);
    // Another blob needs its own redirect.
    assert!(there.range(&digest(b"other"), 0..10).is_ok());
    assert_eq!(storage.lines().last().unwrap(), "GET /signed?number=1");
}

/// The signature has expired, the storage is briefly unavailable, or its data was wrong.
#[test]
fn a_place_that_fails_is_asked_no_more() {
    let bytes = noise(100_000);
    let part = |there: &Registry| there.range(&digest(&bytes), 10..1010);
    let row = |what: &str, second: fn() -> testing::fake::Reply| {
        let blob = bytes.clone();
        let storage = Server::start(move |request, number| match number {
            1 => second(),
            _ => content(request, &blob),
        });
        let server = leading_to(&storage);
        let there = registry(&server.host(), &Settings { retries: 1, ..settings() });
        for _ in 0..2 {
            assert_same(&part(&there).unwrap(), &bytes[10..1010]);
        }
        assert_eq!(
            storage.lines(),
            ["GET /signed?number=0", "GET /signed?number=0", "GET /signed?number=1"],
            "{what}"
        );
        assert_eq!(server.lines().len(), 2, "{what}");
    };
    row("expired", || reply(403).body("<Error><Code>AccessDenied</Code></Error>"));
    row("gone", || reply(404));
    row("reset", || reply(200).reset(None));
    row("short", || {
        reply(206).header("content-range", "bytes 10-1009/100000").body([1; 1000]).cut(10)
    });

    let blob = bytes.clone();
    let storage = Server::start(move |request, _| content(request, &blob));
    let server = leading_to(&storage);
    let there = registry(&server.host(), &settings());
    part(&there).unwrap();
    let _is_elsewhere = there.distrust(&digest(&bytes));
    part(&there).unwrap();
    assert_eq!(storage.lines(), ["GET /signed?number=0", "GET /signed?number=1"]);
}
