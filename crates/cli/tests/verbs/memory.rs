//! What is in memory of images: `--warm`, `du --memory`. Needs root.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kernel::cache;

use crate::mounts::Unmount;
use crate::{Place, is_root};

/// Whether pages can go: says so where files are in memory only.
fn is_on_disk(place: &Place) -> bool {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    let is_memory = rustix::fs::statfs(place.folder.path()).unwrap().f_type == TMPFS_MAGIC;
    if is_memory {
        eprintln!("SKIPPED: the temporary directory is in memory");
    }
    !is_memory
}

/// Pages of a file that are in memory.
fn resident(file: &File) -> u64 {
    cache::resident(file.as_fd(), &(0..file.metadata().unwrap().len())).unwrap()
}

/// Has every page of a file leave memory.
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
    if !is_root() || !is_on_disk(&place) {
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
        place.out(&format!("import -q --form {form} dir:tree {form}"));
        let path = image_file(&place, form);
        let file = File::open(&path).unwrap();
        let pages = file.metadata().unwrap().len().div_ceil(4096);
        assert!(pages > 200, "{pages}");
        for (options, is_warm) in [("", false), (" --warm none", false), (" --warm metadata", true)]
        {
            cool(&path);
            let guard = Unmount(point.clone());
            place.out(&format!("mount -q{options} {form} point"));
            let started = Instant::now();
            // What does not come is not there after a while either.
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
