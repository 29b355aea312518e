//! `create`, `start` and `restart`. Needs root.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;

use container::folder::{REQUEST, STATE_BEFORE};
use rustix::process::{Pid, Signal, kill_process};

use crate::Place;
use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};

/// Prints one line for each run so far.
const COUNTS: &str = "echo run >> /count; cat /count; echo $SECRET";

fn code(place: &Place, name: &str) -> String {
    place.out(&format!("wait {name}"))
}

#[test]
fn an_ended_container_starts_again_with_all_it_had() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("own")).unwrap();
    for runtime in all_runtimes() {
        for (kind, expect) in [
            ("dir", "run\nsaid\nrun\nrun\nsaid\n"),
            ("self,size=64m", "run\nsaid\nrun\nrun\nsaid\n"),
            ("dir=own", "run\nsaid\nrun\nrun\nsaid\n"),
            ("memory", "run\nsaid\nrun\nsaid\n"),
        ] {
            let name = format!("again-{runtime}-{}", &kind[..3]);
            let _guard = Rm(&place, &name);
            let mut run = place.command(&[
                "run",
                "--quiet",
                "-d",
                "--runtime",
                runtime,
                "--name",
                &name,
                "--writable",
                kind,
                "-e",
                "SECRET",
                "--hostname",
                "host.example",
                "a",
                "--",
                "sh",
                "-c",
                COUNTS,
            ]);
            let ran = crate::Ran::from_output(&run.env("SECRET", "said").output().unwrap());
            assert_eq!(ran.code, Some(0), "{}", ran.err);
            assert_eq!(code(&place, &name), "0\n");
            let ran = place.run(&format!("start {name}"));
            assert_eq!((ran.code, ran.out), (Some(0), format!("{name}\n")), "{}", ran.err);
            assert_eq!(ran.err.contains("are lost"), kind == "memory", "{}", ran.err);
            assert_eq!(code(&place, &name), "0\n");
            assert_eq!(place.out(&format!("logs {name}")), expect, "{runtime} {kind}");
            let found = ps(&place, &name).unwrap();
            assert_eq!((&found["status"], &found["code"]), (&"exited".into(), &0.into()));
            // Variables may be passwords.
            let request = place.path("store/containers").join(&name).join(REQUEST);
            assert!(fs::read_to_string(&request).unwrap().contains("SECRET=said"));
            assert_eq!(fs::metadata(&request).unwrap().permissions().mode() & 0o777, 0o600);
        }
        place.run_each(&["rm", "--force", &format!("again-{runtime}-dir")]);
        for name in ["upper", "work"] {
            let _gone = fs::remove_dir_all(place.path("own").join(name));
        }
    }
}

#[test]
fn a_running_container_restarts() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("restart-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "echo up >> /count; cat /count; trap 'echo bye; exit 4' TERM; \
                      while :; do sleep 0.02; done";
        start(&place, &["--name", &name, "--runtime", runtime], script);
        let logs = || place.out(&format!("logs {name}"));
        wait_for("the first run", || logs() == "up\n");
        let first = ps(&place, &name).unwrap();
        let ran = place.run(&format!("start {name}"));
        assert!(ran.code == Some(0) && ran.err.contains("already running"), "{}", ran.err);
        assert_eq!(ps(&place, &name).unwrap()["pid"], first["pid"]);
        let ran = place.run(&format!("restart {name}"));
        assert_eq!((ran.code, ran.out), (Some(0), format!("{name}\n")), "{}", ran.err);
        wait_for("the second run", || logs() == "up\nbye\nup\nup\n");
        let second = ps(&place, &name).unwrap();
        assert_eq!(second["status"], "running");
        assert_ne!(second["pid"], first["pid"]);
        assert_eq!(second["created"], first["created"]);
        assert_eq!(place.out(&format!("exec {name} -- cat /count")), "up\nup\n");
        place.out(&format!("stop {name}"));
        assert_eq!(code(&place, &name), "4\n");
        let ran = place.run(&format!("restart --time 0 {name}"));
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        wait_for("the third run", || logs().ends_with("up\nup\nup\n"));
        let ran = place.run(&format!("rm {name}"));
        assert!(ran.code == Some(2) && ran.err.contains("is running"), "{}", ran.err);
        // A container that is removed at its end cannot be started again, so it is not stopped.
        let other = format!("goes-{runtime}");
        let _other = Rm(&place, &other);
        start(&place, &["--name", &other, "--rm"], "sleep 1000");
        let ran = place.run(&format!("restart --time 0 {other}"));
        assert!(ran.code == Some(125) && ran.err.contains("removed when it ends"), "{}", ran.err);
        assert_eq!(ps(&place, &other).unwrap()["status"], "running");
    }
}

#[test]
fn a_created_container_starts_later() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("created-{runtime}");
        let _guard = Rm(&place, &name);
        let create = |script: &str| {
            place.run_each(&[
                "create",
                "--runtime",
                runtime,
                "--name",
                &name,
                "-m",
                "64m",
                "a",
                "--",
                "sh",
                "-c",
                script,
            ])
        };
        let ran = create("echo here; echo x > /new; echo there >&2; exit 3");
        assert_eq!((ran.code, ran.out), (Some(0), format!("{name}\n")), "{}", ran.err);
        let found = ps(&place, &name).unwrap();
        assert_eq!((&found["status"], &found["code"]), (&"created".into(), &().into()));
        assert!(!place.out("ps").contains(&name));
        assert!(place.out("ps --all").contains("sh -c"));
        assert_eq!(place.out(&format!("logs {name}")), "");
        assert_eq!(place.out(&format!("diff {name}")), "");
        place.out(&format!("stop {name}"));
        let ran = place.run(&format!("wait {name}"));
        assert!(ran.code == Some(125) && ran.err.contains("has not been started"), "{}", ran.err);
        let ran = create("true");
        assert!(ran.code == Some(125) && ran.err.contains("already exists"), "{}", ran.err);
        // A later command does not take it for a start that failed.
        place.out("run --quiet a true");
        assert_eq!(ps(&place, &name).unwrap()["status"], "created");
        let ran = place.run(&format!("start --attach {name}"));
        assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(3), "here\n", "there\n"));
        assert_eq!(ps(&place, &name).unwrap()["code"], 3);
        let ran = place.run(&format!("diff {name}"));
        assert!(ran.code == Some(1) && ran.out.contains("/new"), "{}", ran.out);
        // Only the output of this run is printed.
        let ran = place.run(&format!("start -a {name}"));
        assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(3), "here\n", "there\n"));
        place.out(&format!("rm {name}"));
        assert_eq!(create("true").code, Some(0));
        place.out(&format!("rm {name}"));
        assert_eq!(ps(&place, &name), None);
    }
}

#[test]
fn a_start_that_is_attached_passes_signals_on() {
    let Some(place) = place() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let name = "attached";
    let _guard = Rm(&place, name);
    let script = "trap 'echo caught; exit 6' USR1; echo up; while :; do sleep 0.02; done";
    let ran = place.run_each(&[
        "create",
        "--runtime",
        runtime,
        "--name",
        name,
        "a",
        "--",
        "sh",
        "-c",
        script,
    ]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let mut child = place.command(&["start", "--attach", name]);
    let mut child = child.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "up");
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    kill_process(pid, Signal::USR1).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "caught");
    assert_eq!(child.wait().unwrap().code(), Some(6));
}

/// The first failed start after a failure of the host's settings must not cost the container its changes.
#[test]
fn a_start_that_fails_changes_nothing() {
    let Some(place) = place() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let name = "fails";
    let _guard = Rm(&place, name);
    start(&place, &["--name", name, "--runtime", runtime], "echo run >> /count; exit 5");
    assert_eq!(code(&place, name), "5\n");
    let request = place.path("store/containers/fails").join(REQUEST);
    let before = fs::read_to_string(&request).unwrap();
    for (from, to, expect, says) in [
        ("\"sh\"", "\"/none\"", 127, "/none"),
        ("\"user\":\"0\"", "\"user\":\"nobody-here\"", 125, "nobody-here"),
        ("\"version\":2", "\"version\":7", 125, "format 7"),
        ("\"runtime\":\"", "\"runtime\":\"/none", 125, "/none"),
    ] {
        assert!(before.contains(from), "{before}");
        fs::write(&request, before.replacen(from, to, 1)).unwrap();
        let ran = place.run(&format!("start {name}"));
        assert_eq!(ran.code, Some(expect), "{to}: {}", ran.err);
        assert!(ran.err.contains(says), "{to}: {}", ran.err);
        let found = ps(&place, name).unwrap();
        assert_eq!((&found["status"], &found["code"]), (&"exited".into(), &5.into()), "{to}");
    }
    fs::write(&request, before).unwrap();
    place.out(&format!("start {name}"));
    assert_eq!(code(&place, name), "5\n");
    let ran = place.run(&format!("diff {name}"));
    assert!(ran.out.contains("/count"), "{}", ran.out);
    let ran = place.run("start fails no-such-container");
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains("no container \"no-such-container\""), "{}", ran.err);
    assert_eq!(ps(&place, name).unwrap()["status"], "exited");
}

/// Kills `start`, its monitor and the runtime at each call of some kinds.
#[test]
fn a_start_that_is_killed_leaves_a_container() {
    let Some(place) = place() else { return };
    let Some(runtime) = runtimes().next() else { return };
    if !testing::programs(&["strace"]) {
        return;
    }
    let name = "killed";
    let _guard = Rm(&place, name);
    let script = "echo run >> /count; exit 5";
    start(&place, &["--name", name, "--runtime", runtime], script);
    assert_eq!(code(&place, name), "5\n");
    let calls: &[&str] = match testing::long_tests() {
        true => &["rename,renameat,renameat2", "unlink,unlinkat,rmdir", "openat", "write"],
        false => &["rename,renameat,renameat2", "unlink,unlinkat,rmdir"],
    };
    let mut kills = 0;
    for call in calls {
        for number in 1..200 {
            let trace = place.path("trace");
            let mut strace = std::process::Command::new(testing::find_program("strace").unwrap());
            strace.args(["-f", "-q", "-e", "signal=none"]).arg("-o").arg(&trace);
            strace.args(["-e", &format!("trace={call}")]);
            strace.args(["-e", &format!("inject={call}:signal=KILL:when={number}")]);
            let inner = place.command(&["start", name]);
            strace.arg(inner.get_program()).args(inner.get_args());
            strace.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
            strace.current_dir(inner.get_current_dir().unwrap_or(place.folder.path()));
            let output = strace.output().unwrap();
            let is_killed = !output.status.success()
                || fs::read_to_string(&trace).unwrap().contains("killed by SIGKILL");
            kills += u32::from(is_killed);
            let found = ps(&place, name).unwrap_or_else(|| panic!("{call} {number}: it is gone"));
            let status = found["status"].as_str().unwrap();
            let expected = ["exited", "lost", "running", "unwatched"];
            assert!(expected.contains(&status), "{call} {number}: {found}");
            if !is_killed {
                break;
            }
            // In every case, it starts again with its changes.
            place.out(&format!("stop --time 0 {name}"));
            wait_for("the end", || ps(&place, name).unwrap()["status"] != "running");
            let count = place.path("store/containers/killed/layer/upper/count");
            let before = fs::read_to_string(&count).unwrap().lines().count();
            let ran = place.run(&format!("start {name}"));
            assert_eq!(ran.code, Some(0), "{call} {number}: {}", ran.err);
            assert_eq!(code(&place, name), "5\n", "{call} {number}");
            let after = fs::read_to_string(&count).unwrap();
            assert_eq!(after, "run\n".repeat(before + 1), "{call} {number}");
            assert!(!place.path("store/containers/killed").join(STATE_BEFORE).exists());
        }
    }
    assert!(kills > 5, "{kills}");
}

#[test]
fn ports_and_ids_are_those_of_before() {
    let Some(place) = place() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let name = "before";
    let _guard = Rm(&place, name);
    let mut options = vec!["--name", name, "--runtime", runtime, "--userns", "auto,size=1000"];
    if testing::find_program("pasta").is_some() {
        options.extend(["-p", "127.0.0.1::80"]);
    } else {
        testing::skipped("pasta is not installed");
    }
    start(&place, &options, "test -e /mine && ls -ln /mine; echo x > /mine; sleep 1000");
    let request = || {
        let folder = place.path("store/containers").join(name);
        ["userns", "ports.json"].map(|it| fs::read_to_string(folder.join(it)).ok())
    };
    let (before, ports) = (request(), ps(&place, name).unwrap()["ports"].clone());
    assert!(before[0].is_some());
    place.out(&format!("restart --time 0 {name}"));
    assert_eq!((request(), ps(&place, name).unwrap()["ports"].clone()), (before, ports));
    let ran = place.run_each(&["exec", "-u", "0", name, "sh", "-c", "test -O /mine"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
}
