//! Pages of equal files are in memory once for all images of a domain. fincore(1) gets the kernel's number of
//! pages, through a mount that no program has read.

use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use rustix::fs::XattrFlags;

use crate::container_disk::writable::has;
use crate::image_verbs::forms::{bytes, mounts_native};
use crate::mounting::mounts::Unmount;
use crate::{Place, is_before, is_root, write};

/// Length of a file: longer than one read-ahead, and with a partial last page.
const LENGTH: usize = 300 * 4096 + 100;
const PAGES: usize = LENGTH.div_ceil(4096);

/// Contents that are in both images. In the second image, each content is in another layer, with another name and
/// other metadata.
const SAME: u32 = 1;
const SAME_TOO: u32 = 2;

/// Makes a store with the layers of two images as tars. `lib/own` has the same name and length in both, but other
/// contents.
fn place() -> Option<Place> {
    if !is_root() || !has(&["fincore", "tar"]) {
        return None;
    }
    let place = Place::new();
    if !place.is_on_disk() {
        return None;
    }
    let layer = |name: &str, files: &[(&str, u32)]| {
        let tree = place.path(name);
        fs::create_dir_all(tree.join("lib")).unwrap();
        for (at, (path, seed)) in files.iter().enumerate() {
            let (path, mode) = (tree.join(path), if name.starts_with("1") { 0o644 } else { 0o750 });
            write(&path, &bytes(*seed, LENGTH), mode);
            rustix::fs::setxattr(&path, "user.of", name.as_bytes(), XattrFlags::empty()).unwrap();
            let seconds = Duration::from_secs(u64::from(*seed) * 1000 + at as u64);
            let time = SystemTime::UNIX_EPOCH + seconds;
            File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_times(FileTimes::new().set_modified(time))
                .unwrap();
        }
        let mut tar = Command::new("tar");
        tar.args(["--format=posix", "--xattrs", "--numeric-owner", "--sort=name", "-cf"]);
        tar.arg(place.path(&format!("{name}.tar"))).arg("-C").arg(&tree).arg(".");
        assert!(tar.status().unwrap().success());
    };
    layer("1lower", &[("lib/same", SAME), ("lib/own", 11)]);
    layer("1upper", &[("lib/too", SAME_TOO)]);
    layer("2lower", &[("lib/renamed-too", SAME_TOO)]);
    layer("2upper", &[("same-here", SAME), ("lib/own", 12)]);
    Some(place)
}

/// Imports the images `first` and `second` in these forms.
fn import(place: &Place, forms: [&str; 2]) {
    for (number, (form, name)) in forms.into_iter().zip(["first", "second"]).enumerate() {
        let number = number + 1;
        for layer in ["lower", "upper"] {
            // Each image has a device with all of its data, so that pages are not shared merely because the data is
            // stored only once.
            place.out(&format!("import {form} tar:{number}{layer}.tar {number}{layer}"));
        }
        place.out(&format!("merge {number}lower {number}upper {name}"));
    }
}

/// A mount of one of the images.
struct Mounted {
    point: PathBuf,
    _guard: Unmount,
}

impl Mounted {
    fn new(place: &Place, image: &str, options: &str) -> Self {
        let mut points = (0..).map(|number| place.path(&format!("point{number}")));
        let point = points.find(|it| !it.exists()).unwrap();
        fs::create_dir(&point).unwrap();
        let guard = Unmount(point.clone());
        place.out(&format!("mount{options} {image} {}", point.display()));
        Self { point, _guard: guard }
    }

    /// Returns the number of a file's pages that are in memory.
    fn pages(&self, name: &str) -> usize {
        pages(&self.point.join(name))
    }

    fn read(&self, name: &str, seed: u32) {
        assert!(fs::read(self.point.join(name)).unwrap() == bytes(seed, LENGTH), "{name}");
    }
}

fn pages(file: &Path) -> usize {
    let output = Command::new("fincore").args(["-n", "-o", "PAGES"]).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}

const PACKED: &str = "--form packed";
const TAR: &str = "--form tar";

/// Files that are equal in both images: the name in the first image, the name in the second image, and the content.
const EQUAL: [(&str, &str, u32); 2] =
    [("lib/same", "same-here", SAME), ("lib/too", "lib/renamed-too", SAME_TOO)];

#[test]
fn equal_files_of_native_images_are_in_memory_once() {
    for forms in [[PACKED, PACKED], [PACKED, TAR], [TAR, PACKED]] {
        let Some(place) = place() else { return };
        import(&place, forms);
        if !mounts_native(&place, "first") {
            return;
        }
        let first = Mounted::new(&place, "first", "");
        let second = Mounted::new(&place, "second", "");
        // A writable root is an overlay with the same image as its lower layer.
        let writable = Mounted::new(&place, "second", " --writable memory");
        let apart: Vec<_> = [" --domain none", " --domain another"]
            .map(|options| Mounted::new(&place, "second", options))
            .into();
        let shares = !is_before(7, 0);
        let shared = if shares { PAGES } else { 0 };
        for (name, name_there, seed) in EQUAL {
            assert_eq!(second.pages(name_there), 0);
            first.read(name, seed);
            assert_eq!(first.pages(name), PAGES, "{forms:?}: {name}");
            assert_eq!(second.pages(name_there), shared, "{forms:?}: {name_there}");
            assert_eq!(writable.pages(name_there), shared, "{forms:?}: {name_there}, writable");
            for other in &apart {
                assert_eq!(other.pages(name_there), 0, "{forms:?}: {name_there} is shared too far");
                other.read(name_there, seed);
            }
            second.read(name_there, seed);
            writable.read(name_there, seed);
        }
        // The files have the same name and length, but other contents.
        first.read("lib/own", 11);
        assert_eq!(second.pages("lib/own"), 0, "{forms:?}");
        second.read("lib/own", 12);
        first.read("lib/own", 11);
        metadata(&first, &second);
        // Unmount the image that was read first.
        drop(first);
        second.read("same-here", SAME);
        if !shares {
            testing::skipped("pages of native images: this kernel is older than Linux 7.0");
        }
    }
}

/// Only pages are shared: each image has separate modes, times and xattrs.
fn metadata(first: &Mounted, second: &Mounted) {
    use std::os::unix::fs::MetadataExt as _;
    let seen = |mounted: &Mounted, name: &str| {
        let path = mounted.point.join(name);
        let stat = fs::metadata(&path).unwrap();
        let mut value = [0; 16];
        let length = rustix::fs::getxattr(&path, "user.of", &mut value[..]).unwrap();
        let value = String::from_utf8(value[..length].to_vec()).unwrap();
        (stat.mode() & 0o7777, stat.mtime(), value)
    };
    assert_eq!(seen(first, "lib/same"), (0o644, 1000, "1lower".into()));
    assert_eq!(seen(second, "same-here"), (0o750, 1000, "2upper".into()));
    assert_eq!(seen(first, "lib/too"), (0o644, 2000, "1upper".into()));
    assert_eq!(seen(second, "lib/renamed-too"), (0o750, 2000, "2lower".into()));
    assert_eq!(seen(first, "lib/own"), (0o644, 11_001, "1lower".into()));
    assert_eq!(seen(second, "lib/own"), (0o750, 12_001, "2upper".into()));
}

/// Objects are files, and the pages of a file are in memory once on any kernel and for any domain.
#[test]
fn equal_files_of_composefs_images_are_in_memory_once() {
    let Some(place) = place() else { return };
    import(&place, ["--form objects"; 2]);
    let first = Mounted::new(&place, "first", "");
    let others = ["", " --domain none"].map(|options| Mounted::new(&place, "second", options));
    for (name, name_there, seed) in EQUAL {
        // The import wrote the file a moment ago.
        evict(&place);
        assert_eq!(first.pages(name), 0, "{name}");
        for other in &others {
            // Under memory pressure, the kernel may drop a page in between, so there are several attempts.
            let has_all = (0..20).any(|_| {
                first.read(name, seed);
                other.pages(name_there) == PAGES
            });
            assert!(has_all, "{name_there}: {}", other.pages(name_there));
            other.read(name_there, seed);
        }
    }
    evict(&place);
    first.read("lib/own", 11);
    assert_eq!(others[0].pages("lib/own"), 0);
    others[0].read("lib/own", 12);
    metadata(&first, &others[0]);
}

/// Drops the pages of all objects from memory.
fn evict(place: &Place) {
    for folder in fs::read_dir(place.path("store/objects")).unwrap() {
        for file in fs::read_dir(folder.unwrap().path()).unwrap() {
            let file = File::open(file.unwrap().path()).unwrap();
            rustix::fs::fsync(&file).unwrap();
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
    }
}
