//! Containers that outlive their command. Needs root.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::process::Stdio;

use container::folder::{CODE, CONFIG, FILESTORE, LAYER, LOG, PID, STATE, is_known};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::Place;
use crate::container_life::runs::{all_runtimes, cgroups, place, runtimes, wait_for};

/// Ends a container when a test ends early.
pub(crate) struct Rm<'a>(pub(crate) &'a Place, pub(crate) &'a str);

impl Drop for Rm<'_> {
    fn drop(&mut self) {
        self.0.run_each(&["rm", "--container", "--force", self.1]);
    }
}

/// Returns the entry of a container in the output of `ps`.
pub(crate) fn ps(place: &Place, name: &str) -> Option<Value> {
    let all: Value = serde_json::from_str(&place.out("ps --all --json")).unwrap();
    all.as_array().unwrap().iter().find(|it| it["container"] == name).cloned()
}

pub(crate) fn start(place: &Place, options: &[&str], script: &str) {
    let before = ["run", "--quiet", "--detach", "-u", "0"];
    let after = ["a", "--", "sh", "-c", script];
    let ran = place.run_each(&[&before, options, &after].concat());
    assert_eq!(ran.code, Some(0), "{}", ran.err);
}

#[test]
fn a_directory_has_one_writer() {
    let Some(place) = place() else { return };
    for name in ["kept", "point"] {
        fs::create_dir(place.path(name)).unwrap();
    }
    let written = || fs::read_to_string(place.path("kept/upper/tmp/file")).unwrap_or_default();
    for (name, lines) in [("first", "mine\n"), ("second", "mine\nmine\n")] {
        let _guard = Rm(&place, name);
        start(
            &place,
            &["--name", name, "--writable", "dir=kept"],
            "echo mine >> /tmp/file; sleep 60",
        );
        for line in [
            "run --quiet --writable dir=kept a -- true",
            "mount --quiet --writable dir=kept a point",
        ] {
            let ran = place.run(line);
            let said = "\"kept\" is in use by another container";
            assert!(ran.code != Some(0) && ran.err.contains(said), "{line}: {}", ran.err);
        }
        wait_for("what it writes", || written() == lines);
        place.out(&format!("rm --force {name}"));
    }
    // The directory contains the changes of the last container that wrote to it.
    for name in ["early", "late"] {
        let script = format!("echo 1 > /tmp/{name}");
        start(&place, &["--name", name, "--writable", "dir=kept"], &script);
        place.out(&format!("wait {name}"));
    }
    let _guards = ["early", "late"].map(|name| Rm(&place, name));
    let ran = place.run("diff late");
    assert!(ran.code == Some(1) && ran.out.contains("/tmp/late"), "{} {}", ran.out, ran.err);
    let ran = place.run("diff early");
    assert!(ran.code == Some(2) && ran.err.contains("was written to after"), "{}", ran.err);
}

/// The table in `docs/format/container.md` must list every file that occurs in a container's folder.
#[test]
fn all_files_of_a_folder_are_in_the_table() {
    let Some(place) = place() else { return };
    let mut found = BTreeSet::new();
    for (runtime, kind) in all_runtimes().flat_map(|it| [(it, "dir"), (it, "self")]) {
        let name = format!("files-{runtime}-{kind}");
        let _guard = Rm(&place, &name);
        let options = ["--runtime", runtime, "--name", &name, "--writable", kind];
        let options = [&options[..], &["--mount", "type=self,dst=/more,size=16m"]].concat();
        start(
            &place,
            &[&options[..], &["--log-size", "4k"]].concat(),
            "yes | head -2000; sleep 60",
        );
        let mut look = || {
            for entry in fs::read_dir(place.path("store/containers").join(&name)).unwrap() {
                found.insert(entry.unwrap().file_name().into_string().unwrap());
            }
        };
        look();
        place.out(&format!("exec {name} -- true"));
        place.run(&format!("diff {name}"));
        look();
        place.out(&format!("stop --time 0 {name}"));
        look();
    }
    let unknown: Vec<_> = found.iter().filter(|it| !is_known(it)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
    for name in [CONFIG, LOG, PID, STATE, CODE, FILESTORE, LAYER, "filestore-0"] {
        assert!(found.contains(name), "{name} is not in {found:?}");
    }
}

#[test]
fn a_container_lives_on_and_is_asked_things() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let name = format!("life-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "echo out; echo err >&2; echo made > /tmp/file; \
                      trap 'echo bye; exit 9' TERM; while :; do sleep 0.02; done";
        start(&place, &["--name", &name, "--runtime", runtime, "-e", "A=1"], script);
        let found = ps(&place, &name).unwrap();
        assert_eq!(found["status"], "running");
        assert_eq!(
            (&found["imageName"], &found["container"]),
            (&"a:latest".into(), &name.as_str().into())
        );
        assert!(place.out("ps").contains(&name));
        let logs = || place.run(&format!("logs {name}"));
        wait_for("what it wrote", || (logs().out + &logs().err) == "out\nerr\n");
        // A second container of the same name does not start, and does not disturb the first one.
        let ran =
            place.run_each(&["run", "--quiet", "-d", "--name", &name, "a", "--", "sleep", "9"]);
        assert_eq!(ran.code, Some(125));
        assert!(ran.err.contains("already exists"), "{}", ran.err);

        let exec = |arguments: &[&str]| place.run_each(&[&["exec"], arguments].concat());
        let ran = exec(&[&name, "cat", "/tmp/file"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "made\n"), "{}", ran.err);
        let ran = exec(&["-e", "B=2", "-w", "/tmp", &name, "sh", "-c", "echo $A$B; pwd; exit 7"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(7), "12\n/tmp\n"), "{}", ran.err);
        let ran = exec(&["-u", "5:6", &name, "id", "-u"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "5\n"), "{}", ran.err);
        assert_ne!(exec(&["-u", "nobody-there", &name, "id"]).code, Some(0));
        assert_ne!(exec(&[&name, "no-such-program"]).code, Some(0));

        let ran = place.run(&format!("rm {name}"));
        assert!(ran.code == Some(2) && ran.err.contains("quire stop"), "{}", ran.err);
        place.out(&format!("stop {name}"));
        let found = ps(&place, &name).unwrap();
        assert_eq!((&found["status"], &found["code"]), (&"exited".into(), &9.into()));
        assert!(!place.out("ps").contains(&name));
        assert_eq!(place.out(&format!("wait {name}")), "9\n");
        assert_eq!(place.out(&format!("logs -n 1 {name}")), "bye\n");
        assert_eq!((logs().out, logs().err), ("out\nbye\n".to_owned(), "err\n".to_owned()));
        let ran = exec(&[&name, "id"]);
        assert!(ran.err.contains("is not running: its status is exited"), "{}", ran.err);
        place.out(&format!("rm {name}"));
        assert_eq!(ps(&place, &name), None);
    }
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn what_ignores_a_stop_is_killed() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "deaf");
    start(&place, &["--name", "deaf"], "trap '' TERM INT; echo up; while :; do sleep 0.02; done");
    wait_for("it to listen", || place.out("logs deaf") == "up\n");
    place.out("stop --time 0 deaf");
    assert_eq!(place.out("wait deaf"), "137\n");
    let ran = place.run("wait none");
    assert!(ran.code == Some(125) && ran.err.contains("ps --all"), "{}", ran.err);
    // Names in `ps` are containers, even if an image has the same name.
    place.out("tag a alive");
    start(&place, &["--name", "alive"], "sleep 60");
    let _alive = Rm(&place, "alive");
    place.out("rm -f alive");
    assert_eq!(ps(&place, "alive"), None);
    assert!(place.out("images").contains("alive:latest"));
    // As with podman, `rm` removes the container of that name, and not the image.
    place.out("tag a deaf");
    place.out("rm deaf");
    assert!(place.out("images").contains("deaf:latest"));
    place.out("rmi deaf");
    assert_eq!(ps(&place, "deaf"), None);
    assert!(place.out("images").contains("a:latest"));
}

#[test]
fn logs_are_followed_to_the_end() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "talks");
    start(&place, &["--name", "talks"], "for i in 1 2 3 4; do echo $i; sleep 0.1; done; exit 4");
    let mut follow = place.command(&["logs", "--follow", "talks"]);
    let mut follow = follow.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    let lines: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(lines, ["1", "2", "3", "4"]);
    assert_eq!(follow.wait().unwrap().code(), Some(0));
    for (tail, expect) in [("0", ""), ("1", "4\n"), ("3", "2\n3\n4\n"), ("9", "1\n2\n3\n4\n")] {
        assert_eq!(place.out(&format!("logs --tail {tail} talks")), expect, "{tail}");
    }
}

#[test]
fn what_does_not_start_says_why_and_leaves_nothing() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let cases = [
            (&["no-such-program"][..], 127, "no-such-program"),
            (&["/etc/short"], 126, "is not an executable file"),
        ];
        for (command, code, expect) in cases {
            let arguments = ["run", "--quiet", "-d", "--runtime", runtime, "a", "--"];
            let ran = place.run_each(&[&arguments, command].concat());
            assert_eq!(ran.code, Some(code), "{runtime}: {}", ran.err);
            assert!(ran.err.contains(expect), "{runtime}: {}", ran.err);
        }
        let volume =
            ["run", "--quiet", "-d", "--runtime", runtime, "--volume", "/no/such:/x", "a", "true"];
        let ran = place.run_each(&volume);
        assert_eq!(ran.code, Some(125), "{runtime}: {}", ran.err);
        let reason = "cannot mount \"/no/such\" on /x: the host has no such file or directory";
        assert!(ran.err.contains(reason), "{runtime}: {}", ran.err);
    }
    for name in ["../x", "", ".hidden", "a/b"] {
        let ran = place.run_each(&["run", "--quiet", "-d", "--name", name, "a", "--", "true"]);
        assert_eq!(ran.code, Some(125), "{name}");
        assert!(ran.err.contains("is not a container name"), "{name}: {}", ran.err);
    }
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
    let all: Value = serde_json::from_str(&place.out("ps --all --json")).unwrap();
    assert_eq!(all, serde_json::json!([]));
}

#[test]
fn a_killed_monitor_takes_its_container_along_and_the_next_command_says_so() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let name = format!("orphan-{runtime}");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--runtime", runtime], "while :; do sleep 0.05; done");
        let state = place.path(&format!("store/containers/{name}/state.json"));
        let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
        let pid = |key: &str| {
            Pid::from_raw(i32::try_from(state[key].as_i64().unwrap()).unwrap()).unwrap()
        };
        kill_process(pid("monitor"), Signal::KILL).unwrap();
        wait_for("its lock to be free", || ps(&place, &name).unwrap()["status"] == "unwatched");
        place.out("gc");
        wait_for("the container to end", || {
            rustix::process::test_kill_process(pid("pid")).is_err()
        });
        let found = ps(&place, &name).unwrap();
        assert!(found["finished"].is_string() && found["code"].is_null(), "{found}");
        let ran = place.run(&format!("wait {name}"));
        assert!(
            ran.code == Some(125) && ran.err.contains("the exit code of container"),
            "{}",
            ran.err
        );
        place.out(&format!("rm {name}"));
    }
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

/// Returns the device number of the image that a container's monitor has mounted.
pub(crate) fn superblock(place: &Place, name: &str) -> u64 {
    let offer = place.path(&format!("store/containers/{name}/superblock"));
    let offer = fs::read_to_string(offer).unwrap();
    let words: Vec<_> = offer.split(' ').collect();
    // The words are the pid, start time and boot id of the process, and the number of its descriptor.
    fs::metadata(format!("/proc/{}/fd/{}", words[0], words[3])).unwrap().dev()
}

/// Returns whether this kernel is too old for shared mounts, and notes a skipped test if it is.
pub(crate) fn is_before_shared_mounts() -> bool {
    let version = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = version.split('.').map(|it| it.parse::<u32>().unwrap_or(0));
    let is_before = (numbers.next(), numbers.next()) < (Some(6), Some(15));
    if is_before {
        testing::skipped("detached mounts are not shared: this kernel is older than Linux 6.15");
    }
    is_before
}

/// Mounts of another domain share other pages, and a file that replaced a damaged one has other bytes than the
/// mounted one.
#[test]
fn only_the_same_files_in_the_same_domain_are_one_superblock() {
    let Some(place) = place() else { return };
    if is_before_shared_mounts() {
        return;
    }
    place.out("import --quiet --form packed dir:tree a");
    let sleep = "while :; do sleep 0.05; done";
    let names = ["one", "two", "three", "four", "five", "six"];
    let _guards = names.map(|name| Rm(&place, name));
    let run = |name: &str, domain: &str| {
        let options = ["--name", name, "--writable", "none", "--domain", domain];
        start(&place, &options, sleep);
        superblock(&place, name)
    };
    let first = run("one", "tenant-a");
    assert_eq!(run("two", "tenant-a"), first);
    let others = [run("three", "tenant-b"), run("four", "none")];
    assert!(!others.contains(&first) && others[0] != others[1]);
    // Replace the file like `fsck --repair` and another import.
    let data = place.path("store/data");
    let blob = fs::read_dir(&data).unwrap().map(|it| it.unwrap().path());
    let blob = blob.into_iter().find(|it| it.extension().is_none()).unwrap();
    fs::copy(&blob, data.join("new")).unwrap();
    fs::rename(data.join("new"), &blob).unwrap();
    let replaced = run("five", "tenant-a");
    assert_ne!(replaced, first);
    assert_eq!(run("six", "tenant-a"), replaced);
}

#[test]
fn containers_of_one_image_share_its_superblock() {
    let Some(place) = place() else { return };
    if is_before_shared_mounts() {
        return;
    }
    let sleep = "while :; do sleep 0.05; done";
    let guards = ["one", "two", "three"].map(|name| Rm(&place, name));
    start(&place, &["--name", "one"], sleep);
    start(&place, &["--name", "two", "--writable", "memory"], sleep);
    let device = superblock(&place, "one");
    assert_eq!(superblock(&place, "two"), device);
    // The end of the first owner does not affect the others.
    place.out("rm --force one");
    assert_eq!(place.run("exec two -- true").code, Some(0));
    start(&place, &["--name", "three", "--read-only"], sleep);
    assert_eq!(superblock(&place, "three"), device);
    for name in ["two", "three"] {
        let ran = place.run_each(&["exec", name, "cat", "/etc/short"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "short\n"), "{}", ran.err);
    }
    // A wrong note about the superblock is ignored.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let other = format!("{} 1 {} 0 file x\n", std::process::id(), boot.trim());
    for lie in ["", "1", "1 2 3 4 file", "x y z 4 file x\n", &other] {
        for name in ["two", "three"] {
            fs::write(place.path(&format!("store/containers/{name}/superblock")), lie).unwrap();
        }
        let ran = place.run_each(&["run", "--quiet", "a", "--", "cat", "/etc/short"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "short\n"), "{lie}: {}", ran.err);
    }
    drop(guards);
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn a_bundle_is_run_by_a_runtime_alone() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let at = place.path(&format!("bundle-{runtime}"));
        let _guard = crate::mounting::mounts::Unmount(at.join("rootfs"));
        let script = "cat /etc/short; echo new > /etc/new && cat /etc/new; exit 5";
        let folder = at.display().to_string();
        let ran = place.run_each(&["bundle", "-u", "0", "a", &folder, "--", "sh", "-c", script]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        // crun 1.8 refuses hosts with both versions of cgroups. `quire run` hides one of them from crun, so this test
        // does the same.
        let hide =
            "mountpoint -q /sys/fs/cgroup/unified && umount -l /sys/fs/cgroup/unified; exec \"$@\"";
        let state = place.path(&format!("state-{runtime}"));
        let mut command = std::process::Command::new("unshare");
        command.args(["--mount", "--", "sh", "-c", hide, "sh", runtime, "--root"]).arg(state);
        command.args([
            "run",
            "--bundle",
            &folder,
            &format!("quire-{runtime}-{}", std::process::id()),
        ]);
        let ran = crate::Ran::from_output(&command.stdin(Stdio::null()).output().unwrap());
        assert_eq!((ran.code, ran.out.as_str()), (Some(5), "short\nnew\n"), "{}", ran.err);
        let ran = place.run_each(&["bundle", "a", &folder]);
        assert!(ran.code == Some(2) && ran.err.contains("is not empty"), "{}", ran.err);
        place.out(&format!("umount {folder}/rootfs"));
    }
    let ran = place.run_each(&["bundle", "none", &place.path("no").display().to_string()]);
    assert!(ran.code == Some(3) && !place.path("no").exists(), "{}", ran.err);
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn a_damaged_record_is_told_and_can_be_removed() {
    let Some(place) = place() else { return };
    let _guards = ["bad", "good"].map(|name| Rm(&place, name));
    start(&place, &["--name", "bad"], "while :; do sleep 0.05; done");
    start(&place, &["--name", "good"], "exit 0");
    let state = place.path("store/containers/bad/state.json");
    let state: Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
    let record = place.path("store/containers/bad/container.json");
    let mut bytes = fs::read(&record).unwrap();
    bytes[10] ^= 1;
    fs::remove_file(&record).unwrap();
    fs::write(&record, &bytes).unwrap();
    // The other containers are unchanged, and this one is listed.
    assert_eq!(ps(&place, "bad").unwrap()["status"], "damaged");
    place.out("wait good");
    place.out("rm good");
    let ran = place.run("gc");
    assert!(ran.code == Some(2) && ran.err.contains("quire rm --force bad"), "{}", ran.err);
    assert_eq!(place.run("run --quiet a -- true").code, Some(0));
    let ran = place.run("fsck --repair");
    assert!(ran.code == Some(1) && ran.err.contains("0 damaged files removed"), "{}", ran.err);
    assert!(ran.err.contains("`quire rm --force bad` removes it"), "{}", ran.err);
    // The container keeps running, and its writes are not lost.
    assert_eq!(ps(&place, "bad").unwrap()["status"], "damaged");
    assert!(place.path("store/containers/bad/layer").exists());
    place.out("rm --container --force bad");
    assert_eq!(ps(&place, "bad"), None);
    start(&place, &["--name", "bad"], "exit 0");
    place.out("wait bad");
    fs::remove_file(&record).unwrap();
    fs::write(&record, &bytes).unwrap();
    place.out("rm --container --force bad");
    assert_eq!(ps(&place, "bad"), None);
    let pid = i32::try_from(state["pid"].as_i64().unwrap()).unwrap();
    let pid = Pid::from_raw(pid).unwrap();
    wait_for("its program to end", || rustix::process::test_kill_process(pid).is_err());
    place.out("gc");
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn what_is_asked_of_a_container_has_to_make_sense() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "c");
    start(&place, &["--name", "c"], "while :; do sleep 0.05; done");
    for signal in ["FOO", "0", "65", "-9", "", "RTMIN+31", "RTMAX-", "RTMIN3", "RTMAX+1", "RT"] {
        let ran = place.run_each(&["stop", &format!("--signal={signal}"), "c"]);
        assert!(
            ran.code == Some(125) && ran.err.contains("is not a signal"),
            "{signal}: {}",
            ran.err
        );
    }
    assert_eq!(ps(&place, "c").unwrap()["status"], "running");
    place.out("stop --signal sigkill c");
    assert_eq!(place.out("wait c"), "137\n");
    // If a monitor was killed, the next command that looks at the container ends it.
    place.out("rm c");
    start(&place, &["--name", "c"], "while :; do sleep 0.05; done");
    let state = fs::read(place.path("store/containers/c/state.json")).unwrap();
    let state: Value = serde_json::from_slice(&state).unwrap();
    let pid =
        |key: &str| Pid::from_raw(i32::try_from(state[key].as_i64().unwrap()).unwrap()).unwrap();
    kill_process(pid("monitor"), Signal::KILL).unwrap();
    wait_for("its lock to be free", || ps(&place, "c").unwrap()["status"] == "unwatched");
    place.out("stop c");
    wait_for("its end", || rustix::process::test_kill_process(pid("pid")).is_err());
    place.out("rm --force none");
}

#[test]
fn one_that_is_not_kept_is_gone_when_it_ends() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("gate")).unwrap();
    let gate = format!("{}:/gate", place.path("gate").display());
    let script = "while ! [ -e /gate/open ]; do sleep 0.02; done; exit 3";
    start(&place, &["--name", "brief", "--rm", "--volume", &gate], script);
    assert_eq!(ps(&place, "brief").unwrap()["status"], "running");
    // `wait` prints the exit code even if the container is removed at its end.
    let mut waiting = place.command(&["wait", "brief"]);
    let waiting = waiting.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let code = fs::canonicalize(place.path("store/containers/brief/code")).unwrap();
    wait_for("the wait", || {
        let open = fs::read_dir(format!("/proc/{}/fd", waiting.id())).unwrap();
        open.flatten().any(|it| fs::read_link(it.path()).is_ok_and(|it| it == code))
    });
    fs::write(place.path("gate/open"), "").unwrap();
    let ran = crate::Ran::from_output(&waiting.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "3\n"), "{}", ran.err);
    wait_for("its end", || ps(&place, "brief").is_none());
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

#[test]
fn one_that_is_removed_while_it_runs_leaves_its_name_at_once() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "c");
    for kind in ["memory", "self", "self,durable"] {
        // Run it twice with one name: the end of the first must not affect the second.
        for _ in 0..2 {
            start(&place, &["--name", "c", "--writable", kind], "while :; do sleep 0.05; done");
            let state = fs::read(place.path("store/containers/c/state.json")).unwrap();
            let state: Value = serde_json::from_slice(&state).unwrap();
            let pid = i32::try_from(state["pid"].as_i64().unwrap()).unwrap();
            let program = Pid::from_raw(pid).unwrap();
            place.out("rm --force c");
            assert!(!place.path("store/containers/c").exists(), "{kind}");
            assert!(rustix::process::test_kill_process(program).is_err(), "{kind}");
        }
        wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
    }
    // If a container's own command tears it down, it leaves a note for later commands.
    start(&place, &["--name", "c"], "exit 0");
    place.out("wait c");
    let over = place.path("store/containers/c/over");
    wait_for("its monitor to be done", || over.exists());
    place.out("run --quiet a -- true");
    assert_eq!(ps(&place, "c").unwrap()["status"], "exited");
}

#[test]
fn volumes_and_limits_are_what_was_asked_for() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("host")).unwrap();
    fs::write(place.path("host/file"), "host\n").unwrap();
    let host = place.path("host").display().to_string();
    for runtime in runtimes() {
        let volumes = [format!("{host}:/rw"), format!("{host}:/ro:ro")];
        let script = "cat /rw/file; echo new > /rw/new; echo no > /ro/no && exit 1; cat /ro/new";
        let arguments =
            ["run", "--quiet", "-u", "0", "--runtime", runtime, "--volume", &volumes[0]];
        let more = ["--volume", &volumes[1], "a", "--", "sh", "-c", script];
        let ran = place.run_each(&[&arguments[..], &more].concat());
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "host\nnew\n"), "{}", ran.err);
        assert_eq!(fs::read_to_string(place.path("host/new")).unwrap(), "new\n");
        fs::remove_file(place.path("host/new")).unwrap();

        let forks = FORKS;
        let run = |limit: &[&str]| {
            let before = ["run", "--quiet", "--runtime", runtime];
            place.run_each(&[&before, limit, &["a", "--", "sh", "-c", forks]].concat())
        };
        let (free, limited) = (run(&[]), run(&["--pids-limit", "40"]));
        assert_eq!(free.code, Some(0), "{}", free.err);
        assert!(limited.code != Some(0), "{runtime}: {}", limited.err);
        assert!(limited.err.to_lowercase().contains("fork"), "{runtime}: {}", limited.err);

        // The script is a shell that doubles a string until it has 64 MB.
        let grow =
            "x=0123456789abcdef; i=0; while [ $i -lt 22 ]; do x=$x$x; i=$((i+1)); done; exit 0";
        let run = |limit: &[&str]| {
            let before = ["run", "--quiet", "--runtime", runtime];
            place.run_each(&[&before, limit, &["a", "--", "sh", "-c", grow]].concat())
        };
        let (free, limited) = (run(&[]), run(&["--memory", "32m"]));
        assert_eq!(free.code, Some(0), "{}", free.err);
        assert_eq!(limited.code, Some(137), "{runtime}: {}", limited.err);
    }
    let ran = place.run_each(&["run", "--volume", "/x:y", "a", "--", "true"]);
    assert!(ran.code == Some(125) && ran.err.contains("absolute path"), "{}", ran.err);
}

/// A runtime that waits as long as a file exists before it does anything.
fn slow(place: &Place, runtime: &str) -> std::path::PathBuf {
    let folder = place.path(&format!("slow-{runtime}"));
    fs::create_dir(&folder).unwrap();
    let script = "#!/bin/sh
        case \" $* \" in *' run '*) echo > FOLDER/waits; while test -e FOLDER/hold; do sleep 0.05; done;; esac
        exec REAL \"$@\"\n";
    let script = script.replace("FOLDER", folder.to_str().unwrap());
    let script = script.replace("REAL", crate::program(runtime).unwrap().to_str().unwrap());
    testing::script(&folder.join(runtime), &script);
    fs::write(folder.join("hold"), "").unwrap();
    folder
}

#[test]
fn a_start_that_is_interrupted_is_undone() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let folder = slow(&place, runtime);
        for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
            let path = folder.join(runtime).display().to_string();
            let arguments = ["run", "--quiet", "-d", "--name", "never", "--runtime", &path];
            let mut command = place.command(&[&arguments[..], &["a", "--", "sleep", "9"]].concat());
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            wait_for("the runtime", || folder.join("waits").exists());
            fs::remove_file(folder.join("waits")).unwrap();
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
            kill_process(pid, signal).unwrap();
            wait_for("the end", || child.try_wait().unwrap().is_some());
            let ran = crate::Ran::from_output(&child.wait_with_output().unwrap());
            assert_eq!((ran.code, ran.out.as_str()), (Some(code), ""), "{}", ran.err);
            wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
            assert_eq!(ps(&place, "never"), None);
        }
    }
}

#[test]
fn one_whose_name_cannot_be_told_is_removed_again() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let words = ["run", "--quiet", "-d", "--name", "untold", "--runtime", runtime, "a", "--"];
        let run = |program: &[&str]| {
            let mut command = place.command(&[&words[..], program].concat());
            let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
            let ran = crate::Ran::from_output(&command.stdout(full).output().unwrap());
            let said = "cannot write to standard output: No space left";
            assert!(ran.code == Some(125) && ran.err.contains(said), "{:?} {}", ran.code, ran.err);
            ran.err
        };
        let said = run(&["sleep", "60"]);
        assert!(said.contains("container untold was removed again: "), "{said}");
        wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
        assert_eq!(ps(&place, "untold"), None);
        // The container may have ended before it can be stopped. The message says whether it is kept, or that this
        // is unknown.
        let _guard = Rm(&place, "untold");
        let said = run(&["true"]);
        let is_kept =
            said.contains("container untold stays: `quire rm --force untold` removes it: ");
        let is_open = said
            .contains("container untold may still exist: `quire rm --force untold` removes it: ");
        let is_gone = said.contains("container untold was removed again: ");
        assert!(is_kept || is_open || is_gone, "{said}");
        assert!(is_open || ps(&place, "untold").is_some() == is_kept, "{said}");
    }
}

#[test]
fn exec_waits_for_a_container_that_is_being_started() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let folder = slow(&place, runtime);
        let path = folder.join(runtime).display().to_string();
        let name = format!("late-{runtime}");
        let _guard = Rm(&place, &name);
        for detach in [true, false] {
            let more: &[&str] = if detach { &["-d"] } else { &[] };
            let arguments = ["run", "--quiet", "--name", &name, "--runtime", &path];
            let script = "trap 'exit 0' TERM; while :; do sleep 0.05; done";
            let arguments = [&arguments[..], more, &["a", "--", "sh", "-c", script]].concat();
            let mut run = place.command(&arguments).stdout(Stdio::null()).spawn().unwrap();
            wait_for("the runtime", || folder.join("waits").exists());
            fs::remove_file(folder.join("waits")).unwrap();
            let exec = ["exec", "-u", "5:6", &name, "id", "-u"];
            let exec = place.command(&exec).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
            fs::remove_file(folder.join("hold")).unwrap();
            let ran = crate::Ran::from_output(&exec.unwrap().wait_with_output().unwrap());
            assert_eq!((ran.code, ran.out.as_str()), (Some(0), "5\n"), "{runtime}: {}", ran.err);
            place.out(&format!("stop {name}"));
            run.wait().unwrap();
            place.run(&format!("rm --force {name}"));
            fs::write(folder.join("hold"), "").unwrap();
        }
    }
}

#[test]
fn what_a_detached_container_cannot_have_is_said() {
    let Some(place) = place() else { return };
    let ran = place.run("rm nobody");
    assert!(ran.code == Some(1), "{}", ran.err);
    assert!(ran.err.contains("no container \"nobody\""), "{}", ran.err);
    let ran = place.run("rm --container nobody");
    assert!(ran.code == Some(1) && ran.err.contains("ps --all"), "{}", ran.err);
    start(&place, &["--name", "twice"], "exit 0");
    place.out("wait twice");
    place.out("tag a twoce");
    let ran = place.run("rm twxce");
    let said = "quire: there is no container \"twxce\"\n  did you mean twice?\n";
    assert!(ran.code == Some(1) && ran.err == said, "{}", ran.err);
    let ran = place.run("rm Twice");
    assert!(ran.code == Some(1) && ran.err.contains("did you mean twice"), "{}", ran.err);
    let ran = place.run("rm twice twice");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "twice\n"), "{}", ran.err);
}

/// Fifty sleepers and a shell, for a limit of 40. runc itself has up to a dozen threads in the container's cgroup
/// before the program starts, more on a busy machine, so it could not start with a much lower limit. Source: Go
/// `src/runtime/proc.go`, `startm`.
pub(crate) const FORKS: &str = "i=0; p=; while [ $i -lt 50 ]; do sleep 1000 & p=\"$p $!\"; i=$((i + 1)); done; \
    kill $p; exit 0";

/// Runtimes kill and freeze all processes in a container's cgroup, so two containers must not share one.
#[test]
fn containers_of_one_name_in_two_stores_are_two() {
    let (Some(one), Some(other)) = (place(), place()) else { return };
    for runtime in runtimes() {
        let name = format!("both-{runtime}-{}", std::process::id());
        let _guards = (Rm(&one, &name), Rm(&other, &name));
        let options = ["--name", &name, "--runtime", runtime];
        start(&one, &options, "sleep 60");
        start(&other, &[&options[..], &["--pids-limit", "90"]].concat(), "sleep 60");
        let limit = |cgroup: &String| fs::read_to_string(format!("{cgroup}/pids.max")).ok();
        let mut limits: Vec<_> = cgroups(&name).iter().filter_map(limit).collect();
        limits.sort_unstable();
        // Without --pids-limit, the limit is podman's default.
        assert_eq!(limits, ["2048\n", "90\n"], "{runtime}");
        other.out(&format!("rm --force {name}"));
        assert_eq!(ps(&one, &name).unwrap()["status"], "running", "{runtime}");
        one.out(&format!("rm --force {name}"));
        assert_eq!(cgroups(&name), Vec::<String>::new(), "{runtime}");
    }
}
