//! `run` with the runtimes of this machine. Needs root.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::{Place, add_programs, is_root, program};

/// A store with an image `a` that has a few programs; `None` where no container can run.
fn place() -> Option<Place> {
    if !is_root() {
        return None;
    }
    if program("crun").is_none() && program("runc").is_none() {
        assert!(std::env::var_os("CI").is_none(), "CI has no runtime: install crun or runc");
        eprintln!("SKIPPED: no crun and no runc");
        return None;
    }
    let place = Place::new();
    let tree = place.tree("tree", "x");
    add_programs(&tree, &["/bin/sh", "/bin/true", "/bin/cat", "/bin/sleep", "/bin/id"]);
    place.out(&format!("import -q dir:{} a", tree.display()));
    Some(place)
}

fn runtimes() -> impl Iterator<Item = &'static str> {
    ["crun", "runc"].into_iter().filter(|name| program(name).is_some())
}

fn mounts() -> String {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap()
}

fn containers(place: &Place) -> usize {
    std::fs::read_dir(place.path("store/containers")).unwrap().count()
}

/// Waits for something that must come.
fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what} did not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn codes_and_streams_pass_through() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let cases: [(&[&str], i32, &str); 7] = [
            (&["true"], 0, ""),
            (&["cat", "/etc/short"], 0, "short\n"),
            (&["sh", "-c", "exit 7"], 7, ""),
            (&["sh", "-c", "echo $A; echo > /etc/new && exit 3"], 3, "b\n"),
            (&["no-such-program"], 127, ""),
            (&["/etc/short"], 126, ""),
            (&["id", "-u"], 0, "5\n"),
        ];
        for (command, code, out) in cases {
            let user = if command[0] == "id" { "5:6" } else { "0" };
            let mut arguments =
                vec!["run", "--runtime", runtime, "-u", user, "-e", "A=b", "a", "--"];
            arguments.extend(command);
            let ran = place.run_each(&arguments);
            assert_eq!(ran.code, Some(code), "{runtime} {command:?}: {}", ran.err);
            assert_eq!(ran.out, out, "{runtime} {command:?}");
        }
    }
    let ran = place.run("run none -- true");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    let ran = place.run("run a");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains("has no command"), "{}", ran.err);
    assert_eq!(containers(&place), 0);
}

#[test]
fn signals_reach_the_program() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let script = "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done";
        let mut child = place
            .command(&["run", "--runtime", runtime, "a", "--", "sh", "-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(42), "{runtime}");
    }
}

#[test]
fn after_a_kill_of_everything_only_files_are_left_and_they_go_next() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let before = mounts();
        // A name that no other process has, to find those in the container by.
        let argument = format!("{}.{runtime}", std::process::id());
        let script = format!("echo ready; : {argument}; while :; do sleep 0.05; done");
        let mut child = place
            .command(&["run", "--runtime", runtime, "a", "--", "sh", "-c", &script])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
        // Quire and the runtime have the store's path among their arguments.
        let folder = place.folder.path().to_str().unwrap();
        let everything = || [processes_with(folder), processes_with(&argument)].concat();
        assert!(everything().len() >= 3, "{:?}", everything());
        for pid in everything() {
            // The first may take others along.
            let _gone = rustix::process::kill_process(pid, Signal::KILL);
        }
        child.wait().unwrap();
        wait_for("the end of all", || everything().is_empty());
        assert_eq!(mounts(), before);
        assert_eq!(containers(&place), 1);
        place.out(&format!("run -q --runtime {runtime} a -- true"));
        assert_eq!(containers(&place), 0, "{runtime}");
    }
    let loops = Command::new("losetup").arg("-a").output().unwrap();
    let loops = String::from_utf8_lossy(&loops.stdout).into_owned();
    assert!(!loops.contains(place.folder.path().to_str().unwrap()), "{loops}");
}

#[test]
fn a_container_on_the_hosts_network_can_not_touch_its_cgroups() {
    let Some(place) = place() else { return };
    let script =
        "for d in /sys/fs/cgroup /sys/fs/cgroup/*; do echo > $d/quire-test && exit 9; done; exit 0";
    for access in ["--quiet", "--read-only"] {
        let arguments = ["run", "--network", "host", access, "a", "--", "sh", "-c", script];
        let ran = place.run_each(&arguments);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
    }
    let ran = place.run_each(&["run", "--network", "host", "a", "--", "cat", "/proc/self/mounts"]);
    assert!(!ran.out.contains("/sys/fs/cgroup"), "{}", ran.out);
}

/// Processes whose command line has this text, ours and those of other tests left out.
fn processes_with(text: &str) -> Vec<Pid> {
    let all = std::fs::read_dir("/proc").unwrap();
    let pids = all.filter_map(|it| it.unwrap().file_name().to_str()?.parse::<i32>().ok());
    let own = rustix::process::getpid();
    let pids = pids.filter_map(Pid::from_raw).filter(|pid| *pid != own);
    pids.filter(|pid| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(text)
    })
    .collect()
}

#[test]
fn what_is_written_is_gone() {
    let Some(place) = place() else { return };
    place.out("run -q a -- sh -c echo>/etc/new");
    let ran = place.run("run a -- cat /etc/new");
    assert_ne!(ran.code, Some(0));
    let ran = place.run_each(&["run", "--read-only", "a", "--", "sh", "-c", "echo > /etc/new"]);
    assert_ne!(ran.code, Some(0));
    // About 12 MB of 1 MiB: the writer is told, and nobody else is hurt.
    let fill = "i=0; while [ $i -lt 100 ]; do cat /bin/sh || exit 28; i=$((i+1)); done > /tmp/big";
    let ran = place.run_each(&["run", "--size", "1", "a", "--", "sh", "-c", fill]);
    assert_eq!(ran.code, Some(28), "{}", ran.err);
}
