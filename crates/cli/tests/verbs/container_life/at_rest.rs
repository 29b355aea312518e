//! Resources that a container in the background needs while nothing happens. Needs root.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::Place;
use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{in_own_mounts, place, runtimes, wait_for};

/// Returns the directory in `/proc` of the process that watches a container.
pub(super) fn monitor(place: &Place, name: &str) -> PathBuf {
    let state = fs::read(place.path(&format!("store/containers/{name}/state.json"))).unwrap();
    let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
    format!("/proc/{}", state["monitor"]).into()
}

#[test]
fn a_monitor_has_one_thread_and_no_mounts_of_its_own() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        for writable in ["memory", "dir", "self", "none"] {
            let name = format!("rests-{runtime}-{writable}");
            let _guard = Rm(&place, &name);
            let options = ["--name", &name, "--runtime", runtime, "--writable", writable];
            start(&place, &options, "echo said; exec sleep 1000");
            let monitor = monitor(&place, &name);
            let namespace = |of: &str| fs::read_link(format!("{of}/ns/mnt")).unwrap();
            let ours = namespace("/proc/self");
            let its = monitor.display().to_string();
            // It reports the start before.
            wait_for("its return to its caller's mounts", || namespace(&its) == ours);
            assert_eq!(fs::read_link(monitor.join("root")).unwrap(), PathBuf::from("/"));
            let threads = || fs::read_dir(monitor.join("task")).unwrap().count();
            wait_for("the output", || place.out(&format!("logs {name}")) == "said\n");
            wait_for("the end of the thread for the output", || threads() == 1);
            // Without these mounts, the container has its root, and other commands find its changes.
            assert_eq!(place.out(&format!("exec {name} cat /etc/short")), "short\n", "{name}");
            if writable != "none" {
                place.out(&format!("exec {name} sh -c :>/tmp/new"));
                let diff = place.run(&format!("diff {name}"));
                assert!(diff.out.contains("/tmp/new"), "{name}: {} {}", diff.out, diff.err);
            }
            place.out(&format!("stop --time 0 {name}"));
            assert_eq!(place.run(&format!("wait {name}")).out, "137\n", "{name}");
        }
    }
}

/// Returns the changed memory of a process in mappings of this name, in kB. Source: proc_pid_smaps(5).
fn changed(process: &Path, name: &str) -> u64 {
    let smaps = fs::read_to_string(process.join("smaps")).unwrap();
    let mut is_named = false;
    let mut sum = 0;
    for line in smaps.lines() {
        // The first line of a mapping ends with its name, and its other lines with numbers.
        if line.split(' ').next().is_some_and(|it| it.contains('-')) {
            is_named = line.ends_with(name);
        } else if let Some(size) = line.strip_prefix("Anonymous:")
            && is_named
        {
            sum += size.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        }
    }
    sum
}

/// More than the variables of the program have, and less than they and its constants, in kB.
const CHANGED_MAX: u64 = 400;

/// Waits until a monitor has given back the memory that it does not need at rest.
fn wait_for_rest(monitor: &Path) {
    let program = fs::read_link(monitor.join("exe")).unwrap().display().to_string();
    wait_for("the end of the constants", || changed(monitor, &program) < CHANGED_MAX);
}

#[test]
fn a_monitor_that_gave_back_its_constants_works() {
    let Some(place) = place() else { return };
    let name = "gives-back";
    let _guard = Rm(&place, name);
    let handler = "n=$((n+1)); echo signal $n; [ $n != 3 ] || exit 7";
    let script = format!("trap '{handler}' USR1; while :; do sleep 1000 & wait; done");
    start(&place, &["--name", name], &script);
    let monitor = monitor(&place, name);
    for number in 1..=3 {
        wait_for_rest(&monitor);
        // The last signal ends the container, and this program with it.
        place.run(&format!("exec {name} sh -c kill${{IFS}}-USR1${{IFS}}1"));
        if number < 3 {
            // The monitor writes the log.
            let line = format!("signal {number}\n");
            wait_for("the output", || place.out(&format!("logs {name}")).ends_with(&line));
        }
    }
    assert_eq!(place.run(&format!("wait {name}")).out, "7\n");
}

/// The monitor checks the free space of the filestore while it rests. The script writes in parts, and repeats them,
/// because on a busy host, the reserve may grow too late.
#[test]
fn a_monitor_that_gave_back_its_constants_reserves_disk_space() {
    const MIB: u64 = 1 << 20;
    let Some(place) = place() else { return };
    let name = "gives-back-self";
    let _guard = Rm(&place, name);
    let script = "printf %1048576s x >/m; until [ -e /go ]; do sleep 0.2; done; part=0; while [ $part -lt 50 ]; do \
                  cat /m /m /m /m /m /m /m /m >>/big 2>/dev/null && part=$((part + 1)) || sleep 0.1; done; \
                  echo wrote; exec sleep 1000";
    start(&place, &["--name", name, "--writable", "self"], script);
    let monitor = monitor(&place, name);
    wait_for_rest(&monitor);
    let filestore = place.path(&format!("store/containers/{name}/filestore"));
    let allocated = || fs::metadata(&filestore).unwrap().blocks() * 512;
    let before = allocated();
    place.out(&format!("exec {name} sh -c :>/go"));
    wait_for("the end of the writes", || place.out(&format!("logs {name}")) == "wrote\n");
    // The written blocks are no longer free, so the earlier reserve is allocated again.
    wait_for("more space", || allocated() > before + 200 * MIB);
    wait_for_rest(&monitor);
}

/// A monitor is a copy of the command that starts the container, which has the descriptions of all options in memory.
#[test]
fn monitors_of_run_and_start_take_the_same_memory() {
    let Some(place) = place() else { return };
    let name = "small-again";
    let _guard = Rm(&place, name);
    start(&place, &["--name", name, "--writable", "dir"], "sleep 1000");
    let heap = || {
        let monitor = monitor(&place, name);
        wait_for_rest(&monitor);
        changed(&monitor, "[heap]")
    };
    let of_run = heap();
    place.out(&format!("stop --time 0 {name}"));
    place.out(&format!("start {name}"));
    let of_start = heap();
    assert!(of_start < of_run + 200, "{of_start} kB, and {of_run} kB by run");
}

/// The mount is private, so that an unmount does not reach copies of the namespace.
#[test]
fn a_disk_that_the_caller_unmounts_is_free() {
    let Some(place) = place() else { return };
    let (name, source) = ("frees", format!("quire-frees-{}", std::process::id()));
    let _guard = Rm(&place, name);
    let script = format!("mkdir disk && mount -t tmpfs {source} disk && \"$@\" && umount disk");
    let run = ["run", "--quiet", "--detach", "--name", name, "a", "sleep", "1000"];
    let Some(ran) = in_own_mounts(&place, &script, &run) else { return };
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let is_busy = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let mut mounts =
            processes.filter_map(|it| fs::read_to_string(it.path().join("mountinfo")).ok());
        mounts.any(|it| it.contains(&source))
    };
    wait_for("the end of the last copy", || !is_busy());
    assert!(monitor(&place, name).exists());
}

/// Each would be an inode and a block of the disk, for each container.
#[test]
fn mount_points_are_not_on_the_disk() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "small");
    start(&place, &["--name", "small", "--writable", "memory"], "sleep 1000");
    let folder = place.path("store/containers/small");
    let entries = fs::read_dir(&folder).unwrap().map(Result::unwrap);
    let directories = entries.filter(|it| it.file_type().unwrap().is_dir());
    let names = directories.map(|it| it.file_name().into_string().unwrap());
    // crun makes the other directory where it would make a cgroup.
    let names: Vec<_> = names.filter(|it| !it.starts_with("quire-small-")).collect();
    assert_eq!(names, ["runtime"]);
    // The files with names are on a file system with one size for all of them.
    let device = |path: &str| {
        let pid = fs::read_to_string(folder.join("container.pid")).unwrap();
        fs::metadata(format!("/proc/{}/root{path}", pid.trim())).unwrap().dev()
    };
    assert_eq!(device("/etc/hosts"), device("/etc/hostname"));
    assert_ne!(device("/etc/hosts"), device("/"));
}
