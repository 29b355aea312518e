//! `--io loop`: files of images on devices can be read with `O_DIRECT`. Needs root.

use std::path::Path;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use crate::container_disk::writable::loop_devices;
use crate::container_life::containers::Rm;
use crate::container_life::runs::{place, runtimes, wait_for};
use crate::image_verbs::forms::bytes;
use crate::mounting::mounts::Unmount;
use crate::{Place, add_programs, is_before, is_root, write};

/// Returns the store's files that are open in loop devices.
fn loops(place: &Place) -> Vec<String> {
    loop_devices(place.folder.path().to_str().unwrap())
}

/// Makes files with sizes around those of blocks and pieces, and imports them in both forms.
fn import(place: &Place, tree: &Path) -> Vec<String> {
    let sizes = [1_u32, 511, 512, 513, 4095, 4096, 4097, 70_000, 300_000];
    for size in sizes {
        write(&tree.join(format!("etc/{size}")), &bytes(size, size as usize), 0o644);
    }
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(place.path("tree.tar")).arg("-C").arg(tree).arg(".");
    assert!(tar.status().unwrap().success());
    for form in ["packed", "tar", "objects"] {
        place.out(&format!("import --quiet --form {form} tar:tree.tar {form}"));
    }
    sizes.iter().map(|it| format!("etc/{it}")).collect()
}

/// Returns the bytes that `dd` reads past the page cache, or its error.
fn read(file: &Path) -> Result<Vec<u8>, String> {
    let mut dd = testing::command("dd").unwrap();
    dd.arg(format!("if={}", file.display())).args(["bs=64K", "iflag=direct", "status=none"]);
    let output = dd.env("LC_ALL", "C").output().unwrap();
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[test]
fn files_are_read_past_the_page_cache() {
    if !is_root() {
        return;
    }
    if !testing::programs(&["dd"]) {
        return;
    }
    if is_before(6, 4) {
        testing::skipped("Linux 6.4 is needed for devices");
        return;
    }
    let place = Place::new();
    if !place.is_on_disk() {
        return;
    }
    let tree = place.tree("tree", "x");
    let files = import(&place, &tree);
    let point = place.path("point");
    std::fs::create_dir(&point).unwrap();
    for form in ["packed", "tar"] {
        if !is_before(6, 12) {
            place.out(&format!("mount --quiet {form} point"));
            let guard = Unmount(point.clone());
            for file in &files {
                let found = read(&point.join(file));
                assert!(found.as_ref().is_err_and(|it| it.contains("Invalid")), "{file} {found:?}");
            }
            assert_eq!(loops(&place), Vec::<String>::new());
            drop(guard);
        }
        for more in ["", "--writable memory "] {
            place.out(&format!("mount --quiet --io loop {more}{form} point"));
            let guard = Unmount(point.clone());
            for file in &files {
                let expect = std::fs::read(tree.join(file)).unwrap();
                let found = read(&point.join(file));
                assert!(found.as_ref() == Ok(&expect), "{form} {file}: {:?}", found.err());
                assert!(std::fs::read(point.join(file)).unwrap() == expect, "{form} {file}");
            }
            assert!(loops(&place).len() >= 2, "{:?}", loops(&place));
            place.out("umount point");
            drop(guard);
            wait_for("no loop device", || loops(&place).is_empty());
        }
        // This mount fails after its loop devices were made.
        let ran = place.run(&format!("mount --io loop --digest {} {form} point", "00".repeat(32)));
        assert_ne!(ran.code, Some(0));
        wait_for("no loop device", || loops(&place).is_empty());
    }
    // Files of the form `objects` are on the store's disk, so no loop devices are needed.
    place.out("mount --quiet --io loop objects point");
    let _guard = Unmount(point);
    assert_eq!(loops(&place), Vec::<String>::new());
}

#[test]
fn containers_read_past_the_page_cache_and_leave_no_device() {
    let Some(place) = place() else { return };
    if !testing::programs(&["dd", "cmp"]) || !place.is_on_disk() {
        return;
    }
    if is_before(6, 4) {
        testing::skipped("Linux 6.4 is needed for devices");
        return;
    }
    let tree = place.path("tree");
    add_programs(&tree, &["/bin/dd", "/usr/bin/cmp"]);
    let files = import(&place, &tree);
    let reads: Vec<_> = files
        .iter()
        .map(|it| format!("dd if=/{it} iflag=direct bs=64K status=none | cmp - /{it} || exit 9"))
        .collect();
    let reads = reads.join("\n");
    for runtime in runtimes() {
        for form in ["packed", "tar"] {
            for more in [&["--read-only"][..], &["--writable", "memory"], &["--writable", "self"]] {
                let before = ["run", "--quiet", "--runtime", runtime, "-u", "0", "--io", "loop"];
                let all = [&before[..], more, &[form, "--", "sh", "-c", &reads]].concat();
                let ran = place.run_each(&all);
                assert_eq!(ran.code, Some(0), "{runtime} {form} {more:?}: {}", ran.err);
            }
        }
        wait_for("no loop device", || loops(&place).is_empty());
    }
    // Containers of one image share its mount if they read the image in the same way.
    let names = ["first", "second", "third"];
    let _guards = names.map(|name| Rm(&place, name));
    let start = |name: &str, more: &[&str]| {
        let before = ["run", "--quiet", "-d", "--name", name, "-u", "0", "--writable", "memory"];
        let ran = place.run_each(&[&before, more, &["packed", "--", "sleep", "60"]].concat());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        loops(&place).len()
    };
    let alone = start("first", &["--io", "loop"]);
    assert!(alone >= 2, "{:?}", loops(&place));
    if !is_before(6, 15) {
        assert_eq!(start("second", &["--io", "loop"]), alone);
    }
    if !is_before(6, 12) {
        assert_eq!(start("third", &[]), loops(&place).len());
        let ran = place.run_each(&["exec", "third", "sh", "-c", &reads]);
        assert_eq!(ran.code, Some(9), "{}", ran.err);
    }
    let ran = place.run_each(&["exec", "first", "sh", "-c", &reads]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    // The monitor is killed, so that the container is not taken down, as after a crash.
    let state = std::fs::read(place.path("store/containers/first/state.json")).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    let monitor = i32::try_from(state["monitor"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(monitor).unwrap(), Signal::KILL).unwrap();
    for name in names {
        place.run_each(&["rm", "--container", "--force", name]);
    }
    wait_for("no loop device", || loops(&place).is_empty());
}
