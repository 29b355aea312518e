//! The default writable layer of a container: a directory on the store's disk. Needs root.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{all_runtimes, place, wait_for};
use crate::{Place, add_programs};

/// Programs that check the disk before they write see the store's disk, and their files remain after the
/// container's end.
#[test]
fn the_default_root_is_on_the_disk_of_the_store() {
    let Some(place) = place() else { return };
    if !place.is_on_disk() {
        return;
    }
    with_programs(&place, &["/bin/df", "/bin/mkdir"]);
    let store = place.path("store");
    for runtime in all_runtimes() {
        let name = format!("disk-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "df -kP /; mkdir /closed && > /closed/file; echo made > /made; sleep 60";
        start(&place, &["--name", &name, "--runtime", runtime], script);
        let shown = || place.out(&format!("logs {name}"));
        let layer = store.join("containers").join(&name).join("layer");
        wait_for("what it writes", || {
            fs::read(layer.join("upper/made")).is_ok_and(|it| it == b"made\n")
        });
        // The monitor writes the log.
        wait_for("the log", || shown().contains('%'));
        let shown = shown();
        // The fourth column is the free space. Source: POSIX df, -P.
        let last = shown.lines().last().unwrap_or_default();
        let available = last.split_whitespace().nth(3).and_then(|it| it.parse::<u64>().ok());
        let numbers = rustix::fs::statvfs(&store).unwrap();
        let free = numbers.f_bavail * numbers.f_frsize;
        // Other programs write at the same time.
        let told = available.unwrap() << 10;
        assert!(told.abs_diff(free) < free / 4 + (64 << 20), "{shown}: {free} are free");
        // Only the owner of the store can enter the layer, even if the container makes it accessible.
        assert_eq!(fs::metadata(&layer).unwrap().mode() & 0o7777, 0o700);
        place.out(&format!("stop --time 0 {name}"));
        // The layer is synced to the disk, so that it also survives a restart of the host.
        let mark = layer.join("work").join("work/incompat/volatile");
        wait_for("the mark to be off", || !mark.exists());
        fs::write(layer.join("boot_id"), "of another start\n").unwrap();
        let changes = place.run(&format!("diff {name}")).out;
        assert!(changes.contains("+ /closed") && changes.contains("+ /made"), "{changes}");
        place.out(&format!("rm {name}"));
        assert!(!layer.parent().unwrap().exists());
        // A background process removes the files.
        let left = || fs::read_dir(store.join("tmp")).unwrap().count() == 0;
        wait_for("the files to be removed", left);
    }
    place.out("fsck");
}

/// `rm` does not wait until the files are removed. `rm` itself may be slow, so leftovers are not visible each time.
#[test]
fn nobody_waits_for_files_to_be_removed() {
    let Some(place) = place() else { return };
    if !place.is_on_disk() {
        return;
    }
    let containers = place.path("store/containers");
    let removals = || fs::read_dir(place.path("store/tmp")).unwrap().count();
    let _guard = Rm(&place, "many");
    let is_seen = (0..5).any(|_| {
        start(&place, &["--name", "many"], "sleep 60");
        let upper = containers.join("many/layer/upper");
        for number in 0..20_000 {
            fs::write(upper.join(number.to_string()), "").unwrap();
        }
        place.out("stop --time 0 many");
        place.out("rm many");
        let is_seen = removals() > 0;
        assert!(!containers.join("many").exists());
        wait_for("the files to be removed", || removals() == 0);
        is_seen
    });
    assert!(is_seen, "rm waits for the removal of the files");
    place.out("fsck");
}

/// Adds programs to the image of `place`.
fn with_programs(place: &Place, programs: &[&str]) {
    let tree = place.path("tree");
    add_programs(&tree, programs);
    place.out(&format!("import --quiet dir:{} a", tree.display()));
}
