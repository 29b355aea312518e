//! Imports layers through the whole pipeline. The tar must be the right one for all tables and stores, and no more
//! may be downloaded than needed.

mod make;
mod real;

use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use store::{OpenOptions, Seconds, Store};

use super::plan::{Costs, plans_for};
use super::toc::Format;
use super::{AssemblyPlan, ChunkedError, KeepError, Ranges, Room, Tar, Toc};
use crate::import::layers::{LayerBlob, LayerProof, LayerSource, SourceImage};
use crate::import::{self, Durable, ImportContext, ImportError, ImportOptions, LayerFailure};
use crate::progress::Event;
use image::digest::Digest;
use oci::manifest::{Descriptor, Platform};

use make::{Habits, MadeLayer, layer, noise};

const BOTH: [Format; 2] = [Format::Estargz, Format::ZstdChunked];

/// A blob in memory that counts requests.
struct Memory {
    blob: Vec<u8>,
    requests: AtomicU64,
    bytes: Arc<AtomicU64>,
    /// Number of requests after which all others fail.
    fails: Option<u64>,
}

impl Memory {
    fn from_blob(blob: &[u8]) -> Self {
        Self { blob: blob.to_vec(), requests: 0.into(), bytes: Arc::default(), fails: None }
    }
}

/// Fetches a layer's table with an unlimited memory budget.
fn fetch(layer: &Descriptor, ranges: &dyn Ranges) -> Result<Option<Toc>, ChunkedError> {
    Toc::fetch(layer, ranges, &Room::new(usize::MAX))
}

struct Counted<'a>(&'a [u8], Arc<AtomicU64>);

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(into)?;
        self.1.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

impl Ranges for Memory {
    fn read(&self, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        if self.fails.is_some_and(|fails| number >= fails) {
            return Box::new(io::empty());
        }
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        Box::new(Counted(&self.blob[start..end], Arc::clone(&self.bytes)))
    }
}

/// A layer as a pull provides it, with its blob and table.
struct Source<'a> {
    memory: &'a Memory,
    store: &'a Store,
    diff_id: Digest,
    toc: Option<Arc<Toc>>,
    plan: Option<AssemblyPlan<'a>>,
    whole: &'a AtomicU64,
}

impl LayerBlob for Source<'_> {
    fn open(&mut self, failure: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>> {
        self.whole.fetch_add(1, Ordering::Relaxed);
        failure.is_none().then(|| Box::new(&self.memory.blob[..]) as Box<dyn Read + Send>)
    }

    fn open_tar(&mut self) -> Result<Option<Tar<'_>>, LayerFailure> {
        Ok(self.plan.as_ref().map(|plan| plan.open(self.memory)))
    }

    fn done(&mut self) {
        if let Some(toc) = &self.toc
            && let Err(error) = toc.keep(self.store, &self.diff_id)
        {
            // The chunks of a false table are not recorded. For correct tables, the next pull shows that the chunks
            // were recorded.
            assert!(matches!(error, KeepError::Different), "{error}");
        }
    }
}

/// Statistics of the pull of one layer.
#[derive(Debug, Default, PartialEq, Eq)]
struct Did {
    /// Number of the blob's bytes that were fetched for the tar, without its table.
    fetched: u64,
    skipped: u64,
    requests: u64,
    /// Number of times that the whole blob was read.
    whole: u64,
}

struct Folder {
    _folder: tempfile::TempDir,
    path: std::path::PathBuf,
    store: Store,
}

fn store() -> Folder {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::open(&path, store::Who::this_process(), OpenOptions::create()).unwrap();
    Folder { _folder: folder, path, store }
}

const SMALL: Costs = Costs { hole: 1, skipped: 1 };

/// Pulls a layer, and asserts that the store rebuilds exactly the same tar.
fn pull(folder: &Folder, made: &MadeLayer, costs: Costs) -> Did {
    let memory = Memory::from_blob(&made.blob);
    pull_from(folder, &memory, &made.descriptor, &made.diff_id(), costs)
}

/// Like [`pull`], for a damaged store, whose tar is not rebuilt.
fn pull_unchecked(folder: &Folder, made: &MadeLayer, costs: Costs) -> Did {
    let memory = Memory::from_blob(&made.blob);
    import(folder, &memory, &made.descriptor, &made.diff_id(), costs)
}

fn pull_from(
    folder: &Folder,
    memory: &Memory,
    layer: &Descriptor,
    diff_id: &Digest,
    costs: Costs,
) -> Did {
    let did = import(folder, memory, layer, diff_id, costs);
    assert_eq!(Digest::sha256(&rebuilt(&folder.store, diff_id)), *diff_id);
    did
}

fn import(
    folder: &Folder,
    memory: &Memory,
    layer: &Descriptor,
    diff_id: &Digest,
    costs: Costs,
) -> Did {
    let store = &folder.store;
    let toc = fetch(layer, memory).unwrap().map(Arc::new);
    let tocs: Vec<_> = toc.iter().cloned().collect();
    let plan = plans_for(store, &tocs, usize::MAX, costs).into_iter().flatten().next();
    let stats = plan.as_ref().map(AssemblyPlan::stats);
    let whole = AtomicU64::new(0);
    memory.requests.store(0, Ordering::Relaxed);
    memory.bytes.store(0, Ordering::Relaxed);
    let source = Source { memory, store, diff_id: *diff_id, toc, plan, whole: &whole };
    let (skipped, read) = run(store, Box::new(source), layer, diff_id).unwrap();
    let stored = store.layers.open(diff_id).unwrap().unwrap();
    assert_eq!(stored.info().blobs[0].digest, layer.digest);
    assert_eq!(stored.info().blobs[0].size, layer.size);
    let whole = whole.into_inner();
    // A layer that was assembled from parts is not accessible by the blob's digest, because the blob was not
    // verified.
    assert_eq!(stored.info().is_in(&layer.digest), whole > 0);
    let fetched = memory.bytes.load(Ordering::Relaxed);
    assert_eq!(skipped, stats.unwrap_or_default().skip);
    assert_eq!(read, fetched + whole * layer.size);
    Did { fetched, skipped, requests: memory.requests.load(Ordering::Relaxed), whole }
}

/// Imports an image of one layer. Returns the reported numbers of skipped bytes and of read bytes.
fn run<'a>(
    store: &Store,
    source: Box<dyn LayerBlob + 'a>,
    layer: &Descriptor,
    diff_id: &Digest,
) -> Result<(u64, u64), ImportError> {
    let found = SourceImage {
        manifest: None,
        config: None,
        layers: vec![LayerSource {
            name: layer.digest.to_string(),
            source: Mutex::new(source),
            media_type: layer.media_type.clone(),
            digest: Some(layer.digest),
            size: Some(layer.size),
            diff_id: Some(*diff_id),
            title: LayerProof::Blob,
            is_wanted: false,
        }],
        name: None,
    };
    let events = Mutex::new((0, 0));
    let name = "pulled:latest".parse().unwrap();
    let options = ImportOptions {
        name: Some(&name),
        platform: &Platform::linux("x86_64"),
        durable: Durable::EachLayer,
        ..ImportOptions::default()
    };
    let environment = ImportContext {
        now: Seconds(1),
        budget: import::BUDGET,
        threads: 2.try_into().unwrap(),
        scratch: &std::env::temp_dir(),
        progress: &|event| {
            let mut events = events.lock().unwrap();
            match event {
                Event::Skipped { bytes, .. } => events.0 += bytes,
                Event::Read { bytes, .. } => events.1 += bytes,
                _ => {}
            }
        },
        cancel: &AtomicBool::new(false),
    };
    import::import_found(store, &found, import::Origins::Local, &environment, &options)?;
    Ok(events.into_inner().unwrap())
}

fn rebuilt(store: &Store, diff_id: &Digest) -> Vec<u8> {
    let mut tar = Vec::new();
    store.layer_tar(diff_id).unwrap().read_to_end(&mut tar).unwrap();
    tar
}

fn files(seeds: &[u64]) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![("etc/".to_owned(), Vec::new()), ("etc/small".to_owned(), b"x".to_vec())];
    for (number, seed) in seeds.iter().enumerate() {
        // All lengths differ, and none is a multiple of a block.
        files.push((format!("f{number}"), noise(*seed, 300_001 + 1000 * number)));
        files.push((format!("empty{number}"), Vec::new()));
    }
    files
}

fn made_of(files: &[(String, Vec<u8>)], habits: &Habits<'_>) -> MadeLayer {
    let files: Vec<_> = files.iter().map(|(name, it)| (name.as_str(), it.clone())).collect();
    layer(&files, habits)
}

fn made(seeds: &[u64], format: Format) -> MadeLayer {
    made_of(&files(seeds), &Habits::for_format(format))
}

/// Pulls a layer with files of the seeds `here`, then one with the seeds `then`, and checks how many files of the
/// second layer are downloaded. The layers differ at least in their last file.
fn check_reuse(here: &[u64], then: &[u64], downloaded: u64) {
    for format in BOTH {
        let folder = store();
        let of = |seeds: &[u64], last: &str| {
            let mut files = files(seeds);
            files.push(("last".to_owned(), last.as_bytes().to_vec()));
            made_of(&files, &Habits::for_format(format))
        };
        let first = pull(&folder, &of(here, "one"), SMALL);
        assert_eq!((first.whole, first.skipped, first.fetched), (1, 0, 0), "nothing was here");
        let second = of(then, "two");
        let did = pull(&folder, &second, SMALL);
        if downloaded == then.len() as u64 {
            // Only a few headers are skipped.
            assert!(did.skipped < 10_000, "{format:?} {did:?}");
            continue;
        }
        assert_eq!(did.whole, 0, "{format:?} {did:?}");
        // Compression adds up to a twentieth to incompressible data.
        let least = downloaded * 300_000;
        assert!((least..least + least / 10 + 2000).contains(&did.fetched), "{format:?} {did:?}");
        assert_eq!(did.fetched + did.skipped + end_of(&second), second.descriptor.size);
        assert!(did.requests <= downloaded + 2, "{format:?} {did:?}");
    }
}

/// Returns the number of bytes after the files of the blob.
fn end_of(made: &MadeLayer) -> u64 {
    let memory = Memory::from_blob(&made.blob);
    let toc = fetch(&made.descriptor, &memory).unwrap().unwrap();
    made.descriptor.size - toc.contents.end
}

#[test]
fn only_what_is_not_here_is_downloaded() {
    if !testing::long_tests() {
        return;
    }
    check_reuse(&[1, 2, 3, 4], &[1, 2, 3, 4], 0);
    check_reuse(&[1, 2, 3, 4], &[1, 9, 3, 4], 1);
    check_reuse(&[1, 2, 3, 4], &[9, 2, 3, 4], 1);
    check_reuse(&[1, 2, 3, 4], &[1, 8, 9, 4], 2);
    check_reuse(&[1, 2, 3, 4], &[5, 6, 7, 8], 4);
}

#[test]
fn what_saves_little_is_downloaded_whole() {
    let costs = Costs { hole: 1, skipped: 500_000 };
    for format in BOTH {
        let folder = store();
        pull(&folder, &made(&[1, 2, 3, 4], format), costs);
        let did = pull(&folder, &made(&[1, 7, 8, 9], format), costs);
        assert_eq!((did.whole, did.skipped), (1, 0), "{format:?}");
        let did = pull(&folder, &made(&[1, 2, 8, 9], format), costs);
        assert_eq!(did.whole, 0, "{format:?}");
        // Holes that are smaller than the cost of a request are downloaded.
        let costs = Costs { hole: 400_000, skipped: 1 };
        let did = pull(&folder, &made(&[1, 6, 8, 2], format), costs);
        assert_eq!((did.whole, did.skipped), (1, 0), "{format:?} {did:?}");
    }
}

#[test]
fn chunks_of_one_file() {
    for format in BOTH {
        let folder = store();
        let mut file = noise(3, 5 << 20);
        let of = |file: &[u8]| {
            let files = [("big".to_owned(), file.to_vec()), ("end".to_owned(), vec![7; 200])];
            made_of(&files, &Habits::for_format(format))
        };
        pull(&folder, &of(&file), Costs::default());
        file[2 << 20] ^= 1;
        let did = pull(&folder, &of(&file), Costs::default());
        assert_eq!(did.whole, 0, "{format:?}");
        assert!((1 << 20..1_200_000).contains(&did.fetched), "{format:?} {did:?}");
        // Small chunks do not match the larger chunks of the same file in the store.
        let habits = Habits { chunk: 100_000, ..Habits::for_format(format) };
        let small = made_of(&[("big".to_owned(), file.clone())], &habits);
        assert_eq!(pull(&folder, &small, Costs::default()).skipped, 0, "{format:?}");
    }
}

/// Applies `change` to every object of this length in bytes.
fn damage(folder: &Folder, length: u64, change: &dyn Fn(&std::path::Path)) {
    let mut count = 0;
    for shard in std::fs::read_dir(folder.path.join("objects")).unwrap() {
        for object in std::fs::read_dir(shard.unwrap().path()).unwrap() {
            let object = object.unwrap().path();
            if object.metadata().unwrap().len() == length {
                change(&object);
                count += 1;
            }
        }
    }
    assert_eq!(count, 1);
}

fn check_damage(change: &dyn Fn(&std::path::Path)) {
    for format in BOTH {
        let folder = store();
        pull(&folder, &made(&[1, 2, 3, 4], format), SMALL);
        damage(&folder, 302_001, change);
        let did = pull_unchecked(&folder, &made(&[1, 2, 3, 9], format), SMALL);
        assert_eq!(did.whole, 0, "{format:?} {did:?}");
        // The damaged file and the changed file are downloaded.
        assert!((600_000..700_000).contains(&did.fetched), "{format:?} {did:?}");
    }
}

#[test]
fn files_that_are_not_as_they_were_are_downloaded() {
    // A file with fs-verity cannot be changed, so it is replaced.
    let replace = |path: &std::path::Path, bytes: &[u8]| {
        std::fs::remove_file(path).unwrap();
        std::fs::write(path, bytes).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o444)).unwrap();
    };
    check_damage(&|path| {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[200_000] ^= 0x10;
        replace(path, &bytes);
    });
    check_damage(&|path| {
        let bytes = std::fs::read(path).unwrap();
        replace(path, &bytes[..200_000]);
    });
    check_damage(&|path| std::fs::remove_file(path).unwrap());
}

type Lie<'a> = &'a dyn Fn(&mut Vec<Value>);

/// Pulls a layer with false tables, most of whose files are in the store. The imported layer must be correct, and its
/// whole blob must have been read the given number of times.
fn check_lies(lies: &[(u64, Lie<'_>)]) {
    for format in BOTH {
        let folder = store();
        pull(&folder, &made(&[1, 2, 3, 4], format), SMALL);
        for (number, (whole, lie)) in (100..).zip(lies) {
            let lie = |table: &mut Value| lie(table["entries"].as_array_mut().unwrap());
            let habits = Habits { lie: &lie, ..Habits::for_format(format) };
            let did = pull(&folder, &made_of(&files(&[1, number, 3, 4]), &habits), SMALL);
            assert_eq!(did.whole, *whole, "{format:?} {number} {did:?}");
        }
    }
}

/// Returns the entry of a file.
fn entry<'a>(entries: &'a mut [Value], name: &str) -> &'a mut Value {
    entries.iter_mut().find(|entry| entry["name"] == name).unwrap()
}

#[test]
fn tables_that_lie() {
    // The digest of another file that is in the store.
    let other = |entries: &mut Vec<Value>| {
        let digest = Digest::sha256(&noise(2, 301_001)).to_string();
        let entry = entry(entries, "f1");
        entry["digest"] = digest.clone().into();
        if entry.get("chunkDigest").is_some() {
            entry["chunkDigest"] = digest.into();
        }
    };
    // The offsets are outside, backwards, duplicate or inside a chunk, and the sizes are too large or zero.
    let one = |name: &'static str, field: &'static str, value: Value| {
        move |entries: &mut Vec<Value>| entry(entries, name)[field] = value.clone()
    };
    // A duplicate entry.
    let twice = |entries: &mut Vec<Value>| {
        let at = entries.iter().position(|entry| entry["name"] == "f1").unwrap();
        let twice = entries[at].clone();
        entries.insert(at, twice);
    };
    check_lies(&[
        (0, &|_| ()),
        (1, &other),
        (1, &twice),
        (1, &one("f1", "offset", json!(0))),
        (1, &one("f1", "offset", json!(1))),
        (1, &one("f1", "offset", json!(u64::MAX))),
        (1, &one("f1", "offset", json!(-1))),
        (1, &one("f1", "offset", json!(1_000_000))),
        (1, &one("f1", "chunkSize", json!(u64::MAX))),
        (1, &one("f1", "chunkSize", json!(1))),
        (1, &one("f1", "chunkOffset", json!(1))),
        (1, &one("f1", "type", json!("chunk"))),
        (1, &one("f1", "type", json!("door"))),
        (1, &one("f1", "innerOffset", json!(512))),
        // Wrong names and sizes are harmless: the store has no chunks with these keys, so the parts are downloaded.
        (0, &one("f1", "size", json!(u64::MAX))),
        (0, &one("f1", "name", json!("../../etc/passwd"))),
    ]);
}

#[test]
fn headers_that_the_table_does_not_tell() {
    for format in BOTH {
        let folder = store();
        pull(&folder, &made(&[1, 2, 3, 4], format), SMALL);
        // The table has the same times as before, but the tar has other times.
        let habits = Habits { mtime: 5, ..Habits::for_format(format) };
        let other = made_of(&files(&[1, 2, 3, 4]), &habits);
        let did = pull(&folder, &other, SMALL);
        assert_eq!(did.whole, 1, "{format:?} {did:?}");
    }
}

#[test]
fn a_tar_that_looks_like_gzip() {
    for format in BOTH {
        let folder = store();
        let of = |last: &str| {
            let mut all = vec![("\u{1f}\u{8b}".to_owned(), noise(1, 900_000))];
            all.extend(files(&[1, 2]));
            all.push(("last".to_owned(), last.as_bytes().to_vec()));
            made_of(&all, &Habits::for_format(format))
        };
        pull(&folder, &of("one"), SMALL);
        let did = pull(&folder, &of("two"), SMALL);
        assert_eq!(did.whole, 0, "{format:?} {did:?}");
    }
}

#[test]
fn downloads_that_break() {
    if !testing::long_tests() {
        return;
    }
    for format in BOTH {
        let folder = store();
        pull(&folder, &made(&[1, 2, 3, 4], format), SMALL);
        let second = made(&[1, 8, 3, 9], format);
        // The first request is for the table, the next ones for the parts. If any request fails, the whole layer is
        // read.
        for fails in 0..3 {
            let memory = Memory { fails: Some(fails), ..Memory::from_blob(&second.blob) };
            let toc = fetch(&second.descriptor, &memory).unwrap();
            assert_eq!(toc.is_some(), fails > 0);
            let folder = store();
            pull(&folder, &made(&[1, 2, 3, 4], format), SMALL);
            memory.requests.store(0, Ordering::Relaxed);
            let diff_id = second.diff_id();
            let did = pull_from(&folder, &memory, &second.descriptor, &diff_id, SMALL);
            // The request counter restarts after the table was fetched.
            assert_eq!(did.whole, u64::from(fails < 2), "{format:?} {fails} {did:?}");
        }
    }
}

#[test]
fn another_table_than_the_manifest_names_is_refused() {
    for format in BOTH {
        let made = made(&[1, 2, 3, 4], format);
        let mut descriptor = made.descriptor.clone();
        for (name, value) in &mut descriptor.annotations {
            if name.ends_with("digest") || name.ends_with("checksum") {
                *value = Digest::sha256(b"another").to_string();
            }
        }
        let blob = made.blob.clone();
        let memory = Memory::from_blob(&blob);
        let error = fetch(&descriptor, &memory).unwrap_err().to_string();
        assert!(error.contains("table of contents has the digest sha256:"), "{error}");
        // A table without a digest in the manifest is not used.
        descriptor.annotations.clear();
        assert!(fetch(&descriptor, &memory).unwrap().is_none());
        // A damaged table has the wrong digest, or is not found.
        let mut blob = made.blob.clone();
        let middle = blob.len() - usize::try_from(end_of(&made)).unwrap() / 2;
        blob[middle] ^= 1;
        let memory = Memory::from_blob(&blob);
        assert!(!matches!(fetch(&made.descriptor, &memory), Ok(Some(_))));
    }
}

/// A layer whose table has the wrong digest.
struct Liar(Option<ChunkedError>);

impl LayerBlob for Liar {
    fn open(&mut self, _: Option<&LayerFailure>) -> Option<Box<dyn Read + Send + '_>> {
        panic!("the layer is not read")
    }

    fn open_tar(&mut self) -> Result<Option<Tar<'_>>, LayerFailure> {
        Err(self.0.take().unwrap().into())
    }
}

#[test]
fn nothing_is_imported_where_the_table_is_another_one() {
    let folder = store();
    let made = made(&[1, 2, 3, 4], Format::Estargz);
    let expected = Box::new(Digest::sha256(b"table"));
    let actual = Box::new(Digest::sha256(b"another"));
    let liar = Liar(Some(ChunkedError::Mismatch { expected, actual }));
    let error = run(&folder.store, Box::new(liar), &made.descriptor, &made.diff_id()).unwrap_err();
    let ImportError::Layer { source, .. } = error else { panic!("{error}") };
    assert!(matches!(*source, LayerFailure::Contents(_)), "{source}");
    assert!(folder.store.layers.diff_ids().unwrap().is_empty());
}

#[test]
fn tables_have_so_much_memory_and_no_more() {
    for format in BOTH {
        let made = made(&[1, 2, 3, 4], format);
        let memory = Memory::from_blob(&made.blob);
        let room = Room::new(1 << 20);
        let one = Toc::fetch(&made.descriptor, &memory, &room).unwrap().unwrap();
        let used = room.used();
        assert!(used >= one.bytes.len() + one.contents.memory(), "{format:?} {used}");
        // Another table does not fit, so its layer is pulled as usual.
        let room = Room::new(used / 2);
        assert!(Toc::fetch(&made.descriptor, &memory, &room).unwrap().is_none(), "{format:?}");
        assert_eq!(room.used(), 0);
    }
}

#[test]
fn all_layers_are_looked_for_at_once() {
    for format in BOTH {
        let folder = store();
        pull(&folder, &made(&[1, 2, 3, 4], format), SMALL);
        let layers = [&[1, 9, 3, 4], &[5, 6, 7, 8], &[1, 2, 9, 9]].map(|it| made(it, format));
        let tocs = layers.iter().map(|it| {
            Arc::new(fetch(&it.descriptor, &Memory::from_blob(&it.blob)).unwrap().unwrap())
        });
        let tocs: Vec<_> = tocs.collect();
        let alone = |toc: &Arc<Toc>| {
            let plans = plans_for(&folder.store, std::slice::from_ref(toc), usize::MAX, SMALL);
            plans.into_iter().next().unwrap().map(|it| it.stats())
        };
        let together = plans_for(&folder.store, &tocs, usize::MAX, SMALL);
        let together: Vec<_> =
            together.iter().map(|it| it.as_ref().map(AssemblyPlan::stats)).collect();
        assert_eq!(together, tocs.iter().map(alone).collect::<Vec<_>>(), "{format:?}");
        assert!(together[0].is_some_and(|it| it.skip > 600_000), "{together:?}");
        assert!(together[2].is_some_and(|it| it.skip > 600_000), "{together:?}");
    }
}
