//! `kill -9` at each call of `snapshot create` and `fork` that changes something. Needs root.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use crate::container_disk::writable::is_clean;
use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::inherited::frozen;
use crate::container_life::runs::{cgroups, runtimes, wait_for};
use crate::container_life::snapshots::{LISTING, changed, exec, snapshots, with_programs};
use crate::{Place, Ran};

/// Calls that change files, or that belong to the freezer.
const CALLS: [&str; 22] = [
    "mkdirat",
    "mkdir",
    "openat",
    "renameat2",
    "unlinkat",
    "rmdir",
    "linkat",
    "symlinkat",
    "write",
    "pwrite64",
    "copy_file_range",
    "fchmod",
    "fchown",
    "fsetxattr",
    "utimensat",
    "getdents64",
    "flock",
    "fsync",
    "syncfs",
    "clone",
    "clone3",
    "pipe2",
];

/// Time in which a child of a killed command thaws the container.
const THAWED: Duration = Duration::from_secs(5);

/// Runs a command that is killed at the call with this number, counted for each thread. `of` has further options of
/// strace. Returns `None` if it was killed.
fn killed_at(place: &Place, of: &[&str], call: &str, number: u32, words: &[&str]) -> Option<Ran> {
    let quire = place.command(words);
    let mut command = Command::new(testing::find_program("strace").unwrap());
    command.args(["-qq", "-o", "/dev/null", "-e", &format!("trace={call}")]).args(of);
    command.args(["-e", &format!("inject={call}:signal=KILL:when={number}")]);
    command.arg(quire.get_program()).args(quire.get_args());
    for (name, value) in quire.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.current_dir(place.folder.path()).output().unwrap();
    output.status.code().map(|_| Ran::from_output(&output))
}

/// Calls `check` after each killed command with a description, until the command has no further call to be killed at.
fn kill_each(
    place: &Place,
    of: &[&str],
    words: &[&str],
    mut check: impl FnMut(&str, Option<&Ran>),
) -> u32 {
    let mut kills = 0;
    // A plain `cargo test` samples the calls.
    let step = if testing::rounds(1) >= 10 { 1 } else { 3 };
    for call in CALLS {
        let first = kills % step + 1;
        for number in (first..).step_by(step as usize) {
            let ran = killed_at(place, of, call, number, words);
            kills += u32::from(ran.is_none());
            check(&format!("{call} {number}"), ran.as_ref());
            if ran.is_some() {
                break;
            }
        }
    }
    kills
}

#[test]
fn a_snapshot_that_is_killed_is_whole_or_absent() {
    if !testing::long_tests() || !testing::programs(&["strace"]) {
        return;
    }
    let Some(place) = with_programs() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let _guard = Rm(&place, "cut");
    let options = ["--name", "cut", "--runtime", runtime, "--writable", "dir"];
    changed(&place, &options);
    exec(&place, "cut", "rm -r /data/kept /data/renamed");
    let expect = exec(&place, "cut", LISTING);
    let (mut whole, mut absent, mut left_frozen) = (0, 0, 0);
    let words = ["snapshot", "create", "cut", "point"];
    let kills = kill_each(&place, &["-f"], &words, |what, ran| {
        // A child thaws the container if this command is killed while it is frozen. If the child is killed at the same
        // call, the next command does that.
        let since = Instant::now();
        while !frozen("cut").is_empty() && since.elapsed() < THAWED {
            std::thread::sleep(Duration::from_millis(5));
        }
        left_frozen += u32::from(!frozen("cut").is_empty());
        assert_eq!(exec(&place, "cut", LISTING), expect, "{what}");
        assert_eq!(frozen("cut"), Vec::<String>::new(), "{what}");
        let found = snapshots(&place, "--all");
        if let Some(ran) = ran {
            // Only a helper of the command may have been killed.
            assert_eq!(ran.code == Some(0), found.len() == 1, "{what}: {}", ran.err);
        }
        match &found[..] {
            [] => absent += 1,
            [one] => {
                whole += 1;
                assert_eq!(one["name"], "point", "{what}");
                let read = ["run", "--rm", "-u", "0", "--from", "point", "--", "sh", "-c", LISTING];
                let ran = place.run_each(&read);
                assert_eq!((ran.code, &*ran.out), (Some(0), &*expect), "{what}: {}", ran.err);
                // The process that waits for the disk may have been killed, so `gc` waits for it.
                place.out("gc");
                assert_eq!(snapshots(&place, "")[0]["durable"], true, "{what}");
                place.out("snapshot rm point");
            }
            more => panic!("{what}: {more:?}"),
        }
    });
    assert!(kills > 20 && whole > 2 && absent > 10, "{kills} {whole} {absent}");
    assert!(left_frozen <= 3, "{left_frozen}");
    place.out("rm --force cut");
    place.out("gc");
    place.out("fsck");
    assert_eq!(snapshots(&place, "--all"), Vec::<Value>::new());
    wait_for("nothing to be left", || is_clean(&place));
}

#[test]
fn a_fork_that_is_killed_leaves_whole_containers() {
    if !testing::long_tests() || !testing::programs(&["strace"]) {
        return;
    }
    let Some(place) = with_programs() else { return };
    let Some(runtime) = runtimes().next() else { return };
    // Other tests look for the cgroups of their containers at the same time.
    let _guards = ["parted", "parted-child"].map(|it| Rm(&place, it));
    let options = ["--name", "parted", "--runtime", runtime, "--writable", "dir"];
    let expect = changed(&place, &options);
    let (mut running, mut absent) = (0, 0);
    // Only the command's first thread is killed, because the runtime and the container would be traced as well.
    let words = ["fork", "--name", "parted-child", "parted"];
    let kills = kill_each(&place, &[], &words, |what, ran| {
        wait_for("the container to go on", || frozen("parted").is_empty());
        assert_eq!(exec(&place, "parted", LISTING), expect, "{what}");
        if let Some(ran) = ran {
            assert_eq!(ran.code, Some(0), "{what}: {}", ran.err);
        }
        // The monitor may still be starting the child, or find that nothing waits for it.
        let status = || Some(ps(&place, "parted-child")?["status"].as_str()?.to_owned());
        let is_ready = || place.run_each(&["exec", "parted-child", "true"]).code == Some(0);
        match status().as_deref() {
            Some("running") if is_ready() => {
                assert_eq!(exec(&place, "parted-child", LISTING), expect, "{what}");
                running += 1;
            }
            Some("running" | "lost" | "exited" | "created") | None => absent += 1,
            Some(other) => panic!("{what}: {other}"),
        }
        let ran = place.run("rm --force parted-child");
        assert_eq!(ran.code, Some(0), "{what}: {}", ran.err);
        wait_for("the cgroups of the child to be gone", || cgroups("parted-child").is_empty());
        let folder = place.path("store/containers/parted-child");
        wait_for("the child's folder to be gone", || fs::symlink_metadata(&folder).is_err());
        // A process of the killed command may end a moment later.
        wait_for(&format!("the snapshot to be gone: {what}"), || {
            place.out("gc");
            snapshots(&place, "--all").is_empty()
        });
    });
    assert!(kills > 20 && running > 1 && absent > 10, "{kills} {running} {absent}");
    place.out("rm --force parted");
    place.out("gc");
    place.out("fsck");
    wait_for("nothing to be left", || is_clean(&place));
}

/// A layer in memory is another one after a restart. A snapshot must not have the files of the old one.
#[test]
fn a_container_that_is_started_again_during_the_copy_is_found() {
    if !testing::programs(&["strace"]) {
        return;
    }
    let Some(place) = with_programs() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let _guard = Rm(&place, "again");
    let options = ["--name", "again", "--runtime", runtime, "--writable", "memory"];
    start(&place, &options, "sleep 600");
    exec(&place, "again", "echo lost > /file");
    // The copy begins with this call, and stops after it.
    let told = place.path("calls");
    let quire = place.command(&["snapshot", "create", "again"]);
    let mut command = Command::new(testing::find_program("strace").unwrap());
    command.args(["-f", "-qq", "-e", "trace=syncfs", "-e", "inject=syncfs:signal=STOP", "-o"]);
    command.arg(&told).arg(quire.get_program()).args(quire.get_args());
    for (name, value) in quire.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // A group of processes, to which the signal is sent that lets it continue.
    command.process_group(0).current_dir(place.folder.path());
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    wait_for("the copy to begin", || {
        fs::read_to_string(&told).is_ok_and(|calls| calls.contains("syncfs("))
    });
    place.out("restart --time 0 again");
    let group = Pid::from_child(&child);
    wait_for("the end of the command", || {
        kill_process_group(group, Signal::CONT).unwrap();
        child.try_wait().unwrap().is_some()
    });
    let ran = Ran::from_output(&child.wait_with_output().unwrap());
    assert!(ran.code != Some(0) && ran.err.contains("try again"), "{} {}", ran.out, ran.err);
    assert_eq!(snapshots(&place, "--all"), Vec::<Value>::new());
    assert_eq!(frozen("again"), Vec::<String>::new());
    assert!(place.run_each(&["exec", "again", "ls", "/file"]).code != Some(0));
}
