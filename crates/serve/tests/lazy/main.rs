//! Tests an image whose device is filled while it is read: from a layer made by tar and gzip to files in a kernel
//! mount.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod chunks;
mod descriptors;
mod frames;
mod full;
mod fuse;
mod hot;
mod images;
mod lost;
mod peers;
mod reread;
mod sealed;
mod service;
mod still;
mod succession;
mod urgency;
mod windows;

use std::fs::{self, File};
use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use image::digest::Digest;
use image::lazy::UNIT;
use image::lazy::hot::BLOCK;
use image::verity::DeviceId;
use kernel::fanotify::PrecontentError;
use kernel::mount::{ErofsOptions, erofs};
use oci::blobs::BlobSource;
use oci::source::{ImageSource, Input};
use quire_serve::lazy::{
    Cause, DeviceServer, LayerFiller, Recorder, RecorderError, SourcePatience,
};
use rustix::io::Errno;
use store::{Form, IndexWindows, LazyDeviceFill, OpenOptions, Seconds, Store};
use testing::fake::wait_for;
use testing::{programs, skipped};
use transfer::StoredImage;
use transfer::import::{ImportContext, ImportOptions, import};
use transfer::lazy::{IndexedLayer, LayerIndex};

static NEVER: AtomicBool = AtomicBool::new(false);

/// The only blob. It counts the requested bytes, and may send wrong ones.
struct OneBlob {
    bytes: Vec<u8>,
    asked: AtomicU64,
    lie: Mutex<Lie>,
}

#[derive(Clone, Copy, PartialEq)]
enum Lie {
    None,
    /// Each reply has one wrong byte.
    Always,
    /// Only the next reply has one.
    Once,
    /// Replies are empty.
    Silent,
    /// Calls block until the value is changed, and then return no bytes.
    Hangs,
}

impl OneBlob {
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, asked: AtomicU64::new(0), lie: Mutex::new(Lie::None) }
    }
}

impl BlobSource for OneBlob {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        assert_eq!((*digest, size), (Digest::sha256(&self.bytes), self.bytes.len() as u64));
        let [start, end] = [range.start, range.end].map(|it| usize::try_from(it).unwrap());
        self.asked.fetch_add(range.end - range.start, Ordering::Relaxed);
        while *self.lie.lock().unwrap() == Lie::Hangs {
            thread::sleep(Duration::from_millis(5));
        }
        let mut bytes = self.bytes[start..end].to_vec();
        let mut lie = self.lie.lock().unwrap();
        let now = *lie;
        if now == Lie::Once {
            *lie = Lie::None;
        }
        match now {
            Lie::None => {}
            Lie::Always | Lie::Once => {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
            }
            Lie::Silent | Lie::Hangs => bytes.clear(),
        }
        Box::new(io::Cursor::new(bytes))
    }
}

/// Length of a file in the layer.
const MODULE: usize = 1_500_000;

/// A tree, its layer, its image in a store with all bytes, and the index.
struct Stage {
    folder: tempfile::TempDir,
    tree: PathBuf,
    blob: OneBlob,
    full: Store,
    image: image::verity::ImageId,
    index: LayerIndex,
}

impl Stage {
    /// Returns `None` with a message where the test cannot run.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skipped("needs root");
            return None;
        }
        if !programs(&["tar", "gzip"]) {
            return None;
        }
        Some(Self::with_layer(|folder| {
            assert!(testing::trees::run("gzip", &["-n", "layer.tar"], folder));
            folder.join("layer.tar.gz")
        }))
    }

    /// Makes the stage. `pack` compresses `layer.tar` in a folder, and returns the path of the blob.
    fn with_layer(pack: impl FnOnce(&Path) -> PathBuf) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let tree = folder.path().join("tree");
        testing::trees::rich_tree(&tree);
        // Native images cannot contain whiteouts.
        let _absent = fs::remove_file(tree.join("whiteout"));
        // Large enough for several spans, most of which have a window.
        let words = testing::noise(2 << 20);
        let text: String = words.iter().map(|it| format!("{} ", it % 199)).collect();
        fs::write(tree.join("words"), &text).unwrap();
        // A file that is prefetched as a whole.
        fs::write(tree.join("module"), &text[text.len() - MODULE..]).unwrap();
        let tar = folder.path().join("layer.tar");
        assert!(testing::trees::run(
            "tar",
            &["--format=pax", "-cf", tar.to_str().unwrap(), "."],
            &tree
        ));
        let path = pack(folder.path());
        let full = store(&folder.path().join("full"));
        let source = ImageSource::Tar(Input::File(path.clone()));
        let options = ImportOptions { form: Form::Tar, ..ImportOptions::default() };
        let environment = ImportContext {
            now: Seconds(1_700_000_000),
            threads: NonZeroUsize::new(2).unwrap(),
            budget: 16 << 20,
            scratch: folder.path(),
            progress: &|_| {},
            cancel: &NEVER,
        };
        let report = import(&full, &source, &environment, &options).unwrap();
        let bytes = fs::read(path).unwrap();
        let blob = OneBlob::new(bytes);
        let documents = StoredImage::load(&full, &report.manifest.unwrap()).unwrap();
        let open = full.open_image(&report.image).unwrap();
        let [device] = &open.devices[..] else { panic!("one layer, one device") };
        let layer = IndexedLayer {
            layer: &documents.manifest.layers[0],
            diff_id: &documents.config.diff_ids()[0],
            device: &device.id,
            file: &device.file,
        };
        let index = LayerIndex::new(&layer, &blob, &NEVER).unwrap();
        assert_eq!(LayerIndex::new(&layer, &blob, &NEVER).unwrap(), index);
        let image = report.image;
        Self { folder, tree, blob, full, image, index }
    }

    fn device(&self) -> DeviceId {
        self.index.head.device
    }

    /// Waits while the source hangs. If the wait fails, the source continues, so that the test ends.
    fn wait_for(&self, what: &str, is_so: impl FnMut() -> bool) {
        let wait = std::panic::AssertUnwindSafe(|| wait_for(what, is_so));
        if let Err(panic) = std::panic::catch_unwind(wait) {
            *self.blob.lie.lock().unwrap() = Lie::None;
            std::panic::resume_unwind(panic);
        }
    }

    /// Opens a device whose filler was dropped. A child process of another test may hold its lock until its `exec`.
    fn device_again<'a>(&self, store: &'a Store) -> LazyDeviceFill<'a> {
        let mut device = None;
        wait_for("its lock", || {
            device = store.fill_lazy_device(&self.device()).unwrap();
            device.is_some()
        });
        device.unwrap()
    }

    /// Returns a filler of a device in another store, which is created empty if it does not exist.
    fn filler<'a>(&'a self, store: &'a Store) -> LayerFiller<'a> {
        let (id, bytes) = (self.device(), self.index.head.device_bytes);
        let there = store.fill_lazy_device(&id).unwrap();
        let device = there.unwrap_or_else(|| store.create_lazy_device(&id, bytes).unwrap());
        LayerFiller::new(self.index.clone(), &self.blob, device)
    }
}

fn store(path: &Path) -> Store {
    Store::open(path, store::Who::this_process(), OpenOptions::create()).unwrap()
}

/// Checks that two folders have the same names and files with the same bytes.
fn compare(expect: &Path, actual: &Path) {
    let names = |folder: &Path| {
        let names = fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    assert_eq!(names(expect), names(actual), "{}", expect.display());
    for name in names(expect) {
        let (expect, actual) = (expect.join(&name), actual.join(&name));
        let kind = expect.symlink_metadata().unwrap().file_type();
        assert_eq!(kind, actual.symlink_metadata().unwrap().file_type());
        if kind.is_dir() {
            compare(&expect, &actual);
        } else if kind.is_file() {
            assert!(
                fs::read(&expect).unwrap() == fs::read(&actual).unwrap(),
                "{}",
                expect.display()
            );
        }
    }
}

/// Mounts the image over an empty device, and calls `look` while the server is served.
fn through_the_kernel(stage: &Stage, look: impl Fn(&Path)) {
    // Without pauses, each read is a new attempt.
    let patience = SourcePatience::default().with_pauses(Duration::ZERO, Duration::ZERO);
    with_patience(stage, &patience, look);
}

fn with_patience(stage: &Stage, patience: &SourcePatience, look: impl Fn(&Path)) {
    with_files(stage, patience, Vec::new, |root, _| look(root));
}

/// Does the same, with a function that returns the byte ranges of files.
fn with_files(
    stage: &Stage,
    patience: &SourcePatience,
    find: impl Fn() -> Vec<Range<u64>> + Send + Sync + 'static,
    look: impl Fn(&Path, &DeviceServer<'_>),
) {
    let lazy = lazy_store(stage);
    let filler = stage.filler(&lazy).with_patience(patience).with_files(find);
    let server = DeviceServer::new().unwrap();
    server.fill(filler).unwrap();
    let image = stage.full.open_image(&stage.image).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let served = scope.spawn(|| server.serve(&stop));
        let look = || {
            let (_, lent) = server.connect(&stage.device()).unwrap();
            let devices = [lent.as_fd()];
            let options = ErofsOptions { devices: &devices, ..ErofsOptions::default() };
            let mounted = erofs(image.image.fd(), &options).unwrap();
            let root = format!("/proc/self/fd/{}", mounted.mount.as_fd().as_raw_fd());
            // The mount is dropped before the server.
            look(Path::new(&root), &server);
        };
        let looked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(look));
        stop.store(true, Ordering::Relaxed);
        served.join().unwrap().unwrap();
        if let Err(panic) = looked {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Returns the store that a test fills through a mount. The test may already have written to the store.
fn lazy_store(stage: &Stage) -> Store {
    store(&stage.folder.path().join("lazy-mounted"))
}

#[test]
fn files_are_fetched_when_they_are_read() {
    let Some(stage) = Stage::new() else { return };
    through_the_kernel(&stage, |root| {
        let before = stage.blob.asked.load(Ordering::Relaxed);
        let asked = || stage.blob.asked.load(Ordering::Relaxed) - before;
        // Names and metadata are in the image.
        assert!(root.join("words").metadata().unwrap().is_file());
        assert_eq!(asked(), 0);
        assert_eq!(
            fs::read(root.join("usr/lib/511")).unwrap(),
            fs::read(stage.tree.join("usr/lib/511")).unwrap()
        );
        let one = asked();
        assert!(one > 0 && one < stage.blob.bytes.len() as u64 / 2, "{one} bytes");
        compare(&stage.tree, root);
        // The second time, all bytes are downloaded.
        let all = asked();
        compare(&stage.tree, root);
        assert_eq!(asked(), all);
    });
}

#[test]
fn a_lie_is_an_error_for_the_reader_and_heals() {
    let Some(stage) = Stage::new() else { return };
    through_the_kernel(&stage, |root| {
        let lie = |lie| *stage.blob.lie.lock().unwrap() = lie;
        for wrong in [Lie::Always, Lie::Silent] {
            lie(wrong);
            let read = fs::read(root.join("words")).map(|it| it.len());
            assert_eq!(read.unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
        }
        lie(Lie::Once);
        let read = fs::read(root.join("words")).unwrap();
        assert!(read == fs::read(stage.tree.join("words")).unwrap());
        lie(Lie::None);
        compare(&stage.tree, root);
    });
}

/// An index contains the locations and the digests of bytes. Even with a wrong index, readers get bytes with these
/// digests, or an error.
#[test]
fn an_index_that_lies_costs_errors_and_no_wrong_byte() {
    let Some(stage) = Stage::new() else { return };
    let length = stage.index.head.device_bytes;
    let right: Vec<_> = stage.index.head.units.clone();
    let units = right.len() as u64;
    let check = |what: &str, change: &dyn Fn(&mut LayerIndex), expect: Range<u64>| {
        let mut index = stage.index.clone();
        change(&mut index);
        let folder = tempfile::tempdir_in(stage.folder.path()).unwrap();
        let lazy = store(&folder.path().join("lazy"));
        let device = lazy.create_lazy_device(&stage.device(), length).unwrap();
        let filler = LayerFiller::new(index, &stage.blob, device);
        let file = lazy.lazy_devices.open(&stage.device()).unwrap().unwrap().0;
        let mut had = 0;
        for unit in 0..units {
            let range = unit * UNIT..((unit + 1) * UNIT).min(length);
            if filler.ensure(range.clone(), |_| ()).is_err() {
                continue;
            }
            let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
            file.read_exact_at(&mut bytes, range.start).unwrap();
            assert!(
                stage.index.head.is_unit(usize::try_from(unit).unwrap(), &bytes),
                "{what}: {unit}"
            );
            had += 1;
        }
        assert!(expect.contains(&had), "{what}: {had} of {units} units");
    };
    check("the truth", &|_| {}, units..units + 1);
    // The digests of another layer.
    check("no unit is right", &|it| it.head.units.iter_mut().for_each(|it| it[0] ^= 1), 0..1);
    check("units are exchanged", &|it| it.head.units.reverse(), 0..units / 2);
    // Each location is in another span after this change.
    let moved = |it: &mut LayerIndex| it.head.spans[1..].iter_mut().for_each(|it| it.packed += 3);
    check("spans are elsewhere", &moved, 0..units / 2);
    let exchanged = |it: &mut LayerIndex| {
        let [one, two] = it.head.groups[..2] else { panic!("two groups at least") };
        let (first, rest) = groups(it).split_at(one.bytes as usize);
        let (second, others) = rest.split_at(two.bytes as usize);
        it.windows = IndexWindows::Groups([second, first, others].concat());
        let both = [two.bytes, one.bytes];
        it.head.groups.iter_mut().zip(both).for_each(|(group, bytes)| group.bytes = bytes);
    };
    check("groups of windows are exchanged", &exchanged, 0..units);
    let zeros = |it: &mut LayerIndex| it.windows = IndexWindows::Groups(vec![0; groups(it).len()]);
    check("windows are zeros", &zeros, 0..units);
}

fn groups(index: &LayerIndex) -> &[u8] {
    index.windows.groups().unwrap()
}

fn is_io_error(read: io::Result<usize>) -> bool {
    read.is_err_and(|it| it.raw_os_error() == Some(Errno::IO.raw_os_error()))
}

#[test]
fn a_unit_that_failed_is_not_asked_for_again_at_once() {
    let Some(stage) = Stage::new() else { return };
    let hour = Duration::from_secs(3600);
    let patience = SourcePatience::default().with_pauses(hour, hour);
    with_patience(&stage, &patience, |root| {
        *stage.blob.lie.lock().unwrap() = Lie::Silent;
        let words = File::open(root.join("words")).unwrap();
        let read = || words.read_at(&mut [0; 100], 1 << 20);
        assert!(is_io_error(read()));
        *stage.blob.lie.lock().unwrap() = Lie::None;
        let asked = stage.blob.asked.load(Ordering::Relaxed);
        for _ in 0..5 {
            assert!(is_io_error(read()));
        }
        assert_eq!(stage.blob.asked.load(Ordering::Relaxed), asked);
        // Other units are not affected.
        let other = fs::read(root.join("usr/lib/511")).unwrap();
        assert!(other == fs::read(stage.tree.join("usr/lib/511")).unwrap());
        assert!(stage.blob.asked.load(Ordering::Relaxed) > asked);
    });
    // After a short pause the unit is fetched again, and a success ends the pauses.
    let lazy = store(&stage.folder.path().join("short"));
    let patience = SourcePatience::default().with_pauses(Duration::from_millis(1), hour);
    let filler = stage.filler(&lazy).with_patience(&patience);
    *stage.blob.lie.lock().unwrap() = Lie::Silent;
    filler.ensure(0..1, |_| ()).unwrap_err();
    *stage.blob.lie.lock().unwrap() = Lie::None;
    wait_for("the end of the pause", || filler.ensure(0..1, |_| ()).is_ok());
    assert!(!filler.is_denied(&(0..1)));
}

#[test]
fn a_source_that_stays_silent_does_not_keep_readers() {
    let Some(stage) = Stage::new() else { return };
    let wait = Duration::from_millis(300);
    let patience = SourcePatience::new(Some(wait)).with_pauses(Duration::ZERO, Duration::ZERO);
    // More readers than fetching threads, each of another part.
    let readers = 50;
    let wanted = |number: u64| number * (7 << 12);
    with_patience(&stage, &patience, |root| {
        *stage.blob.lie.lock().unwrap() = Lie::Hangs;
        let words = &File::open(root.join("words")).unwrap();
        let expect = &fs::read(stage.tree.join("words")).unwrap();
        let read = move |number| {
            let mut bytes = [0; 100];
            words.read_exact_at(&mut bytes, wanted(number)).map(|()| bytes)
        };
        thread::scope(|scope| {
            let all: Vec<_> = (0..readers).map(|it| scope.spawn(move || read(it))).collect();
            // The readers end although the source still hangs.
            stage.wait_for("the readers", || all.iter().all(|it| it.is_finished()));
            *stage.blob.lie.lock().unwrap() = Lie::None;
            for reader in all {
                assert!(is_io_error(reader.join().unwrap().map(|it| it.len())));
            }
        });
        // When the source responds again, later readers get the data.
        for number in 0..readers {
            let start = usize::try_from(wanted(number)).unwrap();
            wait_for("the bytes", || match read(number) {
                Ok(bytes) => {
                    assert!(bytes[..] == expect[start..start + 100]);
                    true
                }
                Err(error) => {
                    assert!(is_io_error(Err(error)));
                    false
                }
            });
        }
    });
}

/// After a reboot, only the bytes of a unit show whether it was filled, and a crash may have lost or torn any unit.
#[test]
fn what_an_earlier_boot_has_filled_is_hashed_at_its_first_touch() {
    let Some(stage) = Stage::new() else { return };
    let full = stage.folder.path().join("full/data").join(stage.device().to_string());
    let full = fs::read(full).unwrap();
    let lazy = lazy_store(&stage);
    let device = lazy.create_lazy_device(&stage.device(), full.len() as u64).unwrap();
    let mut right = 0;
    for (number, unit) in (0_u64..).zip(full.chunks(usize::try_from(UNIT).unwrap())) {
        let mut bytes = unit.to_vec();
        match number % 4 {
            0 => right += 1,
            1 => bytes[unit.len() / 3] ^= 4,
            2 => bytes.truncate(unit.len() / 2),
            _ => continue,
        }
        device.write_at(&bytes, number * UNIT).unwrap();
    }
    assert!(right > 5);
    drop(device);
    drop(lazy);
    let before = stage.blob.asked.load(Ordering::Relaxed);
    through_the_kernel(&stage, |root| compare(&stage.tree, root));
    assert!(stage.blob.asked.load(Ordering::Relaxed) > before);

    // Units that are on the disk need no source.
    let lazy = lazy_store(&stage);
    let filler = stage.filler(&lazy);
    *stage.blob.lie.lock().unwrap() = Lie::Silent;
    filler.ensure(0..1, |_| ()).unwrap();
    let counts = filler.counts().now();
    assert!(counts.recalled_units > 0 && counts.requests == 0, "{counts:?}");
}

#[test]
fn a_device_that_was_filled_is_the_device_of_a_full_import() {
    let Some(stage) = Stage::new() else { return };
    let lazy = store(&stage.folder.path().join("lazy"));
    let filler = stage.filler(&lazy);
    let length = stage.index.head.device_bytes;
    // The order is backwards, so that each unit is fetched before its neighbours.
    for unit in (0..length.div_ceil(UNIT)).rev() {
        filler.ensure(unit * UNIT..unit * UNIT + 1, |_| ()).unwrap();
        assert!(filler.has(&(unit * UNIT..(unit + 1) * UNIT)));
    }
    assert_eq!(filler.filled() as u64, length.div_ceil(UNIT));
    // A range behind the end of the device is always present.
    filler.ensure(length..length + 1, |_| ()).unwrap();
    drop(filler);
    stage.device_again(&lazy).seal().unwrap();
}

#[test]
fn a_file_that_is_begun_comes_as_a_whole() {
    let Some(stage) = Stage::new() else { return };
    let places = stage.full.file_places(&stage.image, &stage.device()).unwrap();
    let has_length = |it: &&Range<u64>| it.end - it.start == MODULE as u64;
    let module = places.iter().find(has_length).unwrap().clone();
    // The offset is the file's offset in the tar.
    let device = stage.full.open_image(&stage.image).unwrap().devices.remove(0).file;
    let mut bytes = vec![0; MODULE];
    device.read_exact_at(&mut bytes, module.start).unwrap();
    assert!(bytes == fs::read(stage.tree.join("module")).unwrap());
    let page = |root: &Path, name: &str, at: u64| {
        File::open(root.join(name)).unwrap().read_exact_at(&mut [0; 100], at).unwrap();
    };
    let (patience, is_known) = (SourcePatience::default(), Arc::new(AtomicBool::new(false)));
    let (known, places, all) = (Arc::clone(&is_known), places, module.clone());
    let find = move || {
        known.store(true, Ordering::Relaxed);
        places.clone()
    };
    with_files(&stage, &patience, find, |root, server| {
        is_known.store(false, Ordering::Relaxed);
        // The first read starts the search for the byte ranges of files.
        page(root, "words", 0);
        wait_for("the places", || is_known.load(Ordering::Relaxed));
        thread::sleep(Duration::from_millis(100));
        let filler = server.fillers().remove(0);
        assert!(!filler.has(&all));
        page(root, "module", MODULE as u64 / 2);
        wait_for("the rest of the file", || filler.has(&all));
        let counts = filler.counts().now();
        assert!(counts.fetched_ahead > 0 && !filler.is_full(), "{counts:?}");
    });
}

/// Spans begin in the middle of units. In each order of spans, none is fetched again because of a neighbour.
#[test]
fn a_device_that_is_completed_fetches_its_blob_once() {
    let Some(stage) = Stage::new() else { return };
    let spans = stage.index.head.spans.len();
    assert!(spans > 20, "{spans} spans");
    let forwards = 0..spans;
    let evens_first = (0..spans).step_by(2).chain((1..spans).step_by(2));
    let orders = [forwards.clone().collect(), forwards.rev().collect(), evens_first.collect()];
    for (number, order) in orders.into_iter().enumerate() {
        let order: Vec<usize> = order;
        let lazy = store(&stage.folder.path().join(format!("lazy-{number}")));
        let filler = stage.filler(&lazy);
        let before = stage.blob.asked.load(Ordering::Relaxed);
        for span in order {
            filler.bring_ahead(span..span + 1, Cause::Completion).unwrap();
        }
        assert!(filler.is_full(), "order {number}");
        let asked = stage.blob.asked.load(Ordering::Relaxed) - before;
        // A span that begins within a byte shares that byte with the one before.
        let all = stage.blob.bytes.len() + spans;
        assert!(asked <= all as u64, "{asked} bytes of {all}, order {number}");
        // The device is complete, so this fetches nothing.
        filler.bring_ahead(0..spans, Cause::Completion).unwrap();
        assert_eq!(stage.blob.asked.load(Ordering::Relaxed) - before, asked);
        drop(filler);
        stage.device_again(&lazy).seal().unwrap();
    }
}

#[test]
fn a_device_that_is_read_in_order_fetches_hardly_more_than_its_blob() {
    let Some(stage) = Stage::new() else { return };
    let lazy = store(&stage.folder.path().join("lazy"));
    let filler = stage.filler(&lazy);
    let (length, step) = (stage.index.head.device_bytes, 2 * UNIT);
    let before = stage.blob.asked.load(Ordering::Relaxed);
    for start in (0..length).step_by(usize::try_from(step).unwrap()) {
        let range = start..(start + step).min(length);
        // Prefetching runs at the same time.
        let soon = |all: Vec<Range<usize>>| {
            all.into_iter().for_each(|it| assert!(filler.bring_ahead(it, Cause::Stream).is_ok()));
        };
        filler.ensure(range, soon).unwrap();
    }
    assert!(filler.is_full());
    let asked = stage.blob.asked.load(Ordering::Relaxed) - before;
    let all = stage.blob.bytes.len() as u64;
    assert!(asked * 100 <= all * 102, "{asked} bytes of {all}");
}

#[test]
fn a_trace_has_all_that_was_read() {
    let Some(stage) = Stage::new() else { return };
    // In the store that has all bytes.
    let opened = stage.full.open_image(&stage.image).unwrap();
    let recorder = match Recorder::new(opened.devices.iter().map(|it| (it.id, &it.file))) {
        Err(RecorderError::Kernel(PrecontentError::Unsupported)) => {
            return skipped("pre-content events: this kernel is older than Linux 6.14");
        }
        Err(RecorderError::Kernel(PrecontentError::FileSystem { .. })) => {
            return skipped("the file system of the build has no pre-content events");
        }
        made => made.unwrap(),
    };
    let stop = AtomicBool::new(false);
    let runs = thread::scope(|scope| {
        let noted = scope.spawn(|| recorder.record(&stop));
        let image = stage.full.open_image(&stage.image).unwrap();
        let devices: Vec<_> = image.devices.iter().map(|it| it.file.as_fd()).collect();
        let options = ErofsOptions { devices: &devices, ..ErofsOptions::default() };
        let mount = erofs(image.image.fd(), &options).unwrap().mount;
        let path = format!("/proc/self/fd/{}/words", mount.as_fd().as_raw_fd());
        let half = File::open(path).unwrap();
        let mut bytes = vec![0; 1 << 20];
        half.read_exact_at(&mut bytes, 1 << 20).unwrap();
        stop.store(true, Ordering::Relaxed);
        noted.join().unwrap().unwrap()
    });
    let blocks: u64 = runs.iter().map(|it| u64::from(it.blocks)).sum();
    let all = stage.index.head.device_bytes / BLOCK;
    // One mebibyte was read.
    assert!((64..all / 2).contains(&blocks), "{blocks} of {all}");
    assert!(runs.iter().all(|it| it.device == stage.device()));
    // After the trace was fetched, the same reads need no source.
    let lazy = store(&stage.folder.path().join("traced"));
    let filler = stage.filler(&lazy);
    let bytes = |run: &store::TraceRun| {
        let start = u64::from(run.block) * BLOCK;
        start..start + u64::from(run.blocks) * BLOCK
    };
    for run in &runs {
        let range = bytes(run);
        let [start, end] =
            [range.start / UNIT, range.end.div_ceil(UNIT)].map(|it| usize::try_from(it).unwrap());
        filler.bring_ahead(filler.spans_of(&(start..end)), Cause::Trace).unwrap();
    }
    *stage.blob.lie.lock().unwrap() = Lie::Silent;
    assert!(runs.iter().all(|run| filler.has(&bytes(run))));
}
