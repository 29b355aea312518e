//! Snapshots on full disks, and on file systems that share blocks. Needs root.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::Place;
use crate::container_disk::full::{fill, free};
use crate::container_disk::writable::{is_clean, plain_ext4};
use crate::container_life::containers::{Rm, ps};
use crate::container_life::inherited::frozen;
use crate::container_life::runs::{runtimes, wait_for};
use crate::container_life::snapshots::{LISTING, changed, exec, snapshots, with_programs};
use crate::mounting::mounts::Unmount;

/// Returns a place whose store is on this disk, and has the image of `base`.
fn on(disk: &Path, base: &Place) -> Place {
    let place = Place::new();
    fs::create_dir(disk.join("store")).unwrap();
    symlink(disk.join("store"), place.path("store")).unwrap();
    place.out(&format!("import --quiet dir:{} a", base.path("tree").display()));
    place
}

/// Returns the names of unfinished work in the store.
fn work(place: &Place) -> Vec<String> {
    let entries = fs::read_dir(place.path("store/tmp")).unwrap();
    let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
    names.filter(|it| it.starts_with("work-")).collect()
}

#[test]
fn a_full_disk_is_named_and_leaves_nothing() {
    let Some(base) = with_programs() else { return };
    if !base.is_on_disk() {
        return;
    }
    let (disk, _unmount) = plain_ext4(&base, "small", 128 << 20, &["-m", "0"]);
    let place = on(&disk, &base);
    for (runtime, kind) in runtimes().flat_map(|it| [(it, "memory"), (it, "dir")]) {
        let _guards = ["full", "child"].map(|it| Rm(&place, it));
        let options = ["--name", "full", "--runtime", runtime, "--writable", kind];
        let expect = changed(&place, &options);
        let pid = ps(&place, "full").unwrap()["pid"].to_string();
        let large = Path::new("/proc").join(pid).join("root/large");
        fs::write(&large, testing::noise(16 << 20)).unwrap();
        rustix::fs::sync();
        for left in [8 << 20, 0] {
            fill(&disk, "filler", free(&disk).saturating_sub(left));
            for words in [
                &["snapshot", "create", "full"][..],
                &["fork", "-n", "2", "--name", "child", "full"],
            ] {
                let ran = place.run_each(words);
                let what = format!("{runtime} {kind} {left} {words:?}");
                assert!(ran.code != Some(0), "{what}");
                assert!(ran.err.contains("No space left on device"), "{what}: {}", ran.err);
                // The disk stays usable for the container.
                if left > 0 {
                    assert!(ran.err.contains("large"), "{what}: {}", ran.err);
                    assert!(free(&disk) > 0, "{what}");
                    assert_eq!(exec(&place, "full", LISTING), expect, "{what}");
                }
                assert_eq!(frozen("full"), Vec::<String>::new(), "{what}");
                assert_eq!(snapshots(&place, "--all"), Vec::<Value>::new(), "{what}");
                assert_eq!(work(&place), Vec::<String>::new(), "{what}");
                for name in ["child", "child-1", "child-2"] {
                    assert_eq!(ps(&place, name), None, "{what}");
                }
            }
            fs::remove_file(disk.join("filler")).unwrap();
            rustix::fs::sync();
        }
        fs::remove_file(large).unwrap();
        place.out("snapshot create full now");
        place.out("fork --name child --from now full");
        assert_eq!(exec(&place, "child", LISTING), expect, "{runtime} {kind}");
        place.out("rm --force child full");
        place.out("snapshot rm now");
    }
    place.out("fsck");
    wait_for("nothing to be left", || is_clean(&place));
}

/// Makes a file system in a file of `place`, and mounts it. Returns `None` if the kernel or the program is missing.
fn mounted(place: &Place, kind: &str, options: &[&str]) -> Option<Unmount> {
    let (file, point) = (place.path(&format!("{kind}.disk")), place.path(kind));
    File::create(&file).unwrap().set_len(512 << 20).unwrap();
    fs::create_dir(&point).unwrap();
    let made = testing::command(&format!("mkfs.{kind}"))?.args(options).arg(&file).status();
    assert!(made.unwrap().success());
    let mounted = Command::new("mount").args(["-o", "loop"]).args([&file, &point]).status();
    if !mounted.unwrap().success() {
        testing::skipped(&format!("this machine mounts no {kind}"));
        return None;
    }
    Some(Unmount(point))
}

#[test]
fn copies_share_blocks_on_xfs_and_btrfs() {
    let Some(base) = with_programs() else { return };
    let free = |disk: &Path| {
        let file = File::open(disk).unwrap();
        rustix::fs::syncfs(&file).unwrap();
        free(disk)
    };
    for (kind, options) in [("xfs", &["-q", "-m", "reflink=1"][..]), ("btrfs", &["-q"])] {
        let Some(_unmount) = mounted(&base, kind, options) else { continue };
        let disk = base.path(kind);
        let place = on(&disk, &base);
        for runtime in runtimes() {
            let _guards = ["parent", "child-1", "child-2"].map(|it| Rm(&place, it));
            let options = ["--name", "parent", "--runtime", runtime, "--writable", "dir"];
            let expect = changed(&place, &options);
            let pid = ps(&place, "parent").unwrap()["pid"].to_string();
            let large = Path::new("/proc").join(pid).join("root/data/large");
            fs::write(&large, testing::noise(64 << 20)).unwrap();
            let before = free(&disk);
            place.out("snapshot create parent point");
            let taken = before.saturating_sub(free(&disk));
            assert!(taken < 16 << 20, "{kind} {runtime}: {taken} bytes were taken");
            // The copy keeps its bytes when the original is changed, in place and by a new file.
            let whole = exec(&place, "parent", LISTING);
            exec(&place, "parent", "echo changed > /data/large; echo more >> /data/plain");
            place.out("fork -n 2 --name child --from point parent");
            for child in ["child-1", "child-2"] {
                assert_eq!(exec(&place, child, LISTING), whole, "{kind} {runtime}");
            }
            place.out("rollback --time 0 parent point");
            assert_eq!(exec(&place, "parent", LISTING), whole, "{kind} {runtime}");
            assert_ne!(whole, expect);
            place.out("rm --force parent child-1 child-2");
            place.out("snapshot rm point");
            assert_eq!(snapshots(&place, "--all"), Vec::<Value>::new());
        }
        place.out("fsck");
        wait_for("nothing to be left", || is_clean(&place));
        drop(place);
    }
}
