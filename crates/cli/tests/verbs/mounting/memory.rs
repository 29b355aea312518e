//! Memory that images use: `--warm` and `du --memory`. Needs root.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use kernel::cache;
use kernel::mount::{ErofsOptions, Io};
use kernel::process::Who;

use crate::mounting::mounts::Unmount;
use crate::{Place, is_root};

/// Returns the number of a file's pages that are in memory.
fn resident(file: &File) -> u64 {
    cache::resident(file.as_fd(), &(0..file.metadata().unwrap().len()), Who::this_process())
        .unwrap()
}

/// Drops every page of a file from memory.
fn cool(path: &std::path::Path) {
    let file = File::open(path).unwrap();
    file.sync_all().unwrap();
    cache::drop_pages(file.as_fd(), &(0..1 << 40)).unwrap();
    assert_eq!(resident(&file), 0, "{}", path.display());
}

fn json(place: &Place, line: &str) -> serde_json::Value {
    serde_json::from_str(&place.out(line)).unwrap()
}

fn image_file(place: &Place, name: &str) -> PathBuf {
    let shown = json(place, &format!("show --json {name}"));
    place.path("store/images").join(shown["image"].as_str().unwrap())
}

#[test]
fn warm_metadata_is_in_memory_soon() {
    let place = Place::new();
    if !is_root() || !place.is_on_disk() {
        return;
    }
    let tree = place.path("tree");
    std::fs::create_dir(&tree).unwrap();
    for at in 0..8000 {
        File::create(tree.join(format!("{at:0120}"))).unwrap();
    }
    let point = place.path("point");
    std::fs::create_dir(&point).unwrap();
    for form in ["objects", "packed"] {
        place.out(&format!("import --quiet --form {form} dir:tree {form}"));
        let path = image_file(&place, form);
        let file = File::open(&path).unwrap();
        let pages = file.metadata().unwrap().len().div_ceil(4096);
        assert!(pages > 200, "{pages}");
        let all = [
            ("", true),
            (" --warm auto", true),
            (" --warm none", false),
            (" --warm metadata", true),
        ];
        for (options, is_warm) in all {
            cool(&path);
            let guard = Unmount(point.clone());
            place.out(&format!("mount --quiet{options} {form} point"));
            let started = Instant::now();
            // Without read-ahead, the pages must not appear later either.
            let patience = Duration::from_millis(if is_warm { 10_000 } else { 200 });
            while resident(&file) < pages && started.elapsed() < patience {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(resident(&file) == pages, is_warm, "{form}{options}");
            place.out("umount --lazy point");
            drop(guard);
        }
    }
}

const PAGE: u64 = 4096;

/// Two images of a form, with files that no other image has: `same` of 40 pages in both, `a` of 10 pages in one, and
/// `b` of 20 pages and 5 bytes in the other. The images are mounted on `on-a` and `on-b`, and only pages that the
/// mounts need are in memory.
struct Pair {
    // The guards are dropped before the place, because dropping the place checks for leftovers.
    _guards: Vec<Unmount>,
    place: Place,
}

impl Pair {
    fn new(form: &str) -> Option<Self> {
        let place = Place::new();
        if !is_root() || !place.is_on_disk() {
            return None;
        }
        let bytes = |seed: u8, length: u64| -> Vec<u8> {
            let low = |number: u64| number.to_le_bytes()[0];
            (0..length).map(|at| low(at / PAGE) ^ low(at % 251) ^ seed).collect()
        };
        for (name, seed, length) in [("a", 100, 10 * PAGE), ("b", 200, 20 * PAGE + 5)] {
            let tree = place.path(name);
            std::fs::create_dir(&tree).unwrap();
            std::fs::write(tree.join("same"), bytes(0, 40 * PAGE)).unwrap();
            std::fs::write(tree.join(name), bytes(seed, length)).unwrap();
            let mut command = Command::new("tar");
            command.args(["--format=posix", "--numeric-owner", "--sort=name", "-cf"]);
            let command = command.arg(place.path("tree.tar")).arg("-C").arg(&tree).arg(".");
            assert!(command.status().unwrap().success());
            place.out(&format!("import --quiet --form {form} tar:tree.tar {name}"));
        }
        let mut pair = Self { place, _guards: Vec::new() };
        pair.cool();
        for name in ["a", "b"] {
            let point = pair.place.path(&format!("on-{name}"));
            std::fs::create_dir(&point).unwrap();
            pair._guards.push(Unmount(point.clone()));
            pair.place.out(&format!("mount --quiet --domain none {name} {}", point.display()));
        }
        Some(pair)
    }

    /// Returns the files of the store: images, objects, devices.
    fn files(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut open: Vec<_> =
            ["images", "objects", "data"].map(|it| self.place.path("store").join(it)).into();
        while let Some(directory) = open.pop() {
            let Ok(entries) = std::fs::read_dir(directory) else { continue };
            for path in entries.map(|it| it.unwrap().path()) {
                if path.is_dir() { open.push(path) } else { found.push(path) }
            }
        }
        found
    }

    fn cool(&self) {
        self.files().iter().for_each(|path| cool(path));
    }

    fn device(&self) -> PathBuf {
        let is_device =
            |path: &PathBuf| path.parent().unwrap().ends_with("data") && path.extension().is_none();
        // The device of `a` is the largest, because it also has `same`.
        let devices = self.files().into_iter().filter(is_device);
        devices.max_by_key(|path| path.metadata().unwrap().len()).unwrap()
    }

    fn read(&self, path: &str) {
        assert!(!std::fs::read(self.place.path(path)).unwrap().is_empty());
    }

    /// Returns the numbers of an image's pages of file data in memory: all pages, shared pages, and pages that are in
    /// memory twice.
    fn pages(&self, name: &str) -> [u64; 3] {
        let file = File::open(image_file(&self.place, name)).unwrap();
        let all = json(&self.place, "du --memory --json");
        let images = all["images"].as_array().unwrap();
        let of_name = |it: &&serde_json::Value| it["names"][0] == format!("{name}:latest");
        let image = images.iter().find(of_name).unwrap();
        let number = |field: &str| image[field].as_u64().unwrap();
        let point = File::open(self.place.path(&format!("on-{name}"))).unwrap();
        // The root directory of EROFS has pages in the page cache; the root directory of overlayfs has none.
        let others = number("metadata") + resident(&point) * PAGE;
        assert_eq!(number("metadata"), resident(&file) * PAGE);
        [number("inMemory") - others, number("shared"), number("twice")].map(|it| it / PAGE)
    }

    /// Returns the pages of all images: file data, shared, twice.
    fn total(&self) -> [u64; 3] {
        let all = json(&self.place, "du --memory --json");
        let number = |value: &serde_json::Value| value.as_u64().unwrap() / PAGE;
        let metadata: u64 =
            all["images"].as_array().unwrap().iter().map(|it| number(&it["metadata"])).sum();
        let roots = ["on-a", "on-b"].map(|it| resident(&File::open(self.place.path(it)).unwrap()));
        let others = metadata + roots.iter().sum::<u64>();
        [number(&all["inMemory"]) - others, number(&all["shared"]), number(&all["twice"])]
    }
}

#[test]
fn an_object_of_two_images_is_in_memory_once() {
    let Some(pair) = Pair::new("objects") else { return };
    assert_eq!(pair.total(), [0, 0, 0]);
    pair.read("on-a/same");
    assert_eq!((pair.pages("a"), pair.pages("b")), ([40, 40, 0], [40, 40, 0]));
    pair.read("on-b/same");
    pair.read("on-b/b");
    assert_eq!((pair.pages("a"), pair.pages("b")), ([40, 40, 0], [61, 40, 0]));
    assert_eq!(pair.total(), [61, 40, 0]);
    let table = pair.place.out("du --memory --bytes");
    let line = table.lines().find(|line| line.starts_with("b:latest")).unwrap();
    assert!(line.ends_with(" 0") && line.contains(" 163840 "), "{table}");
    assert!(table.contains("163840 of it in several images, 0 of it twice"), "{table}");
}

#[test]
fn pages_of_mounts_and_of_devices_are_told_apart() {
    for form in ["packed", "tar"] {
        let Some(pair) = Pair::new(form) else { return };
        assert_eq!(pair.total(), [0, 0, 0], "{form}");
        for point in ["on-a", "on-b"] {
            // The examined directory has no pages in memory either.
            assert_eq!(resident(&File::open(pair.place.path(point)).unwrap()), 0, "{form}");
        }
        // EROFS reads past the device's page cache.
        pair.read("on-a/same");
        assert_eq!((pair.pages("a"), pair.pages("b")), ([40, 0, 0], [0, 0, 0]), "{form}");
        // Each mount has separate pages.
        pair.read("on-b/same");
        pair.read("on-b/b");
        assert_eq!((pair.pages("a"), pair.pages("b")), ([40, 0, 0], [61, 0, 0]), "{form}");
        assert_eq!(pair.total(), [101, 0, 40], "{form}");
        if form == "tar" {
            continue;
        }
        // This reads the device: `same` is in a device that both images use.
        std::fs::read(pair.device()).unwrap();
        assert_eq!((pair.pages("a"), pair.pages("b")), ([90, 40, 40], [101, 40, 40]));
        assert_eq!(pair.total(), [151, 40, 80]);
        // An image that is not mounted has only the device's pages.
        pair.place.out("umount --lazy on-b");
        assert_eq!((pair.pages("a"), pair.pages("b")), ([90, 40, 40], [40, 40, 0]));
        pair.cool();
        assert_eq!(pair.pages("b"), [0, 0, 0]);
    }
}

#[test]
fn looking_brings_nothing_into_memory() {
    for form in ["objects", "packed", "tar"] {
        let Some(pair) = Pair::new(form) else { return };
        pair.place.out("umount --lazy on-a");
        pair.place.out("umount --lazy on-b");
        pair.cool();
        pair.place.out("du --memory");
        for path in pair.files() {
            assert_eq!(resident(&File::open(&path).unwrap()), 0, "{}", path.display());
        }
    }
}

/// Some kernels cannot read past the device's page cache, so all data is in memory twice.
#[test]
fn a_mount_that_reads_through_the_device_has_data_twice() {
    let Some(pair) = Pair::new("packed") else { return };
    let (image, device) = (File::open(image_file(&pair.place, "a")).unwrap(), pair.device());
    let device = File::open(device).unwrap();
    let options =
        ErofsOptions { devices: &[device.as_fd()], io: Io::Buffered, ..Default::default() };
    let mount = kernel::mount::erofs(image.as_fd(), &options).unwrap();
    pair.place.out("umount --lazy on-a");
    mount.mount.attach_at(&pair.place.path("on-a")).unwrap();
    pair.read("on-a/a");
    let [all, shared, twice] = pair.pages("a");
    assert_eq!(twice, 10);
    // The kernel reads ahead in the device, in which `same` is before or after `a`.
    assert_eq!(all, 20 + shared);
}

#[test]
fn what_cannot_be_looked_at_is_said() {
    let Some(pair) = Pair::new("packed") else { return };
    pair.place.out("umount --lazy on-a");
    pair.place.out("mount --quiet --writable memory a on-a");
    pair.read("on-a/same");
    let ran = pair.place.run("du --memory");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.out.contains("not counted: 1 mounts below a writable layer"), "{}", ran.out);
    // This user may read the store, but owns no file in it.
    crate::open_to_all(&pair.place);
    let mut command = Command::new("chmod");
    assert!(command.args(["-R", "a+rX"]).arg(pair.place.path("store")).status().unwrap().success());
    let program = pair.place.path("quire");
    testing::copy_program(env!("CARGO_BIN_EXE_quire"), &program);
    let mut command = Command::new(&program);
    command.arg("--store").arg(pair.place.path("store")).args(["du", "--memory", "--json"]);
    let ran = crate::Ran::from_output(
        &command.uid(54_321).gid(54_321).current_dir("/").output().unwrap(),
    );
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let all: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
    assert!(all["notSeen"]["files"].as_u64().unwrap() > 2, "{}", ran.out);
    assert_eq!(all["inMemory"], 0);
}
