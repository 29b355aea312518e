//! Containers in the foreground that stay when they end, and containers of `create --rm`. Needs root.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};

use crate::container_life::containers::{Rm, ps};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};
use crate::{Place, Ran};

/// Returns the words of `run --rm=false` with a shell script.
fn words<'a>(runtime: &'a str, name: &'a str, script: &'a str) -> Vec<&'a str> {
    let before = ["run", "--quiet", "--rm=false", "-u", "0", "--runtime", runtime, "--name", name];
    [&before[..], &["a", "--", "sh", "-c", script]].concat()
}

#[test]
fn a_container_in_the_foreground_stays() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let name = format!("kept-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "cat; echo err >&2; echo more >> /new; exit 3";
        let mut run = place.command(&words(runtime, &name, script));
        run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"typed\n").unwrap();
        let ran = Ran::from_output(&child.wait_with_output().unwrap());
        assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(3), "typed\n", "err\n"), "{runtime}");
        let found = ps(&place, &name).unwrap();
        assert_eq!((&found["status"], &found["code"]), (&"exited".into(), &3.into()), "{runtime}");
        assert!(!found["finished"].is_null(), "{found}");
        let logs = place.run(&format!("logs {name}"));
        assert_eq!((&*logs.out, &*logs.err), ("typed\n", "err\n"), "{runtime}");
        let state = ["inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", &name];
        assert_eq!(place.run_each(&state).out, "exited 3\n");
        place.out(&format!("cp {name}:/new new"));
        assert_eq!(fs::read_to_string(place.path("new")).unwrap(), "more\n");
        assert_eq!(place.out(&format!("wait {name}")), "3\n");
        let again = place.run(&words(runtime, &name, "true").join(" "));
        assert!(again.code == Some(125) && again.err.contains("already exists"), "{}", again.err);
        // It has no input now.
        let ran = place.run(&format!("start --attach {name}"));
        assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(3), "", "err\n"), "{runtime}");
        place.out(&format!("cp {name}:/new new"));
        assert_eq!(fs::read_to_string(place.path("new")).unwrap(), "more\nmore\n");
        place.out(&format!("rm {name}"));
        assert_eq!(ps(&place, &name), None);
        // A program that cannot be started leaves no container.
        let missing = format!("run --rm=false --runtime {runtime} --name {name} a /no/such");
        let ran = place.run(&missing);
        assert_eq!(ran.code, Some(127), "{runtime}: {}", ran.err);
        assert_eq!(ran.err.lines().count(), 1, "{runtime}: {}", ran.err);
        assert_eq!(ps(&place, &name), None);
    }
}

#[test]
fn signals_and_a_closed_pipe_end_a_kept_container() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("signalled-{runtime}");
        let _guard = Rm(&place, &name);
        let start = |script: &str| {
            let mut run = place.command(&words(runtime, &name, script));
            let mut child = run.stdout(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert_eq!(lines.next().unwrap().unwrap(), "up");
            (child, lines)
        };
        let (mut child, lines) = start("trap 'exit 6' USR1; echo up; while :; do sleep 0.02; done");
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        kill_process(pid, Signal::USR1).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(6), "{runtime}");
        drop(lines);
        place.out(&format!("rm {name}"));
        let (mut child, lines) = start("while :; do echo up; sleep 0.02; done");
        drop(lines);
        assert_eq!(child.wait().unwrap().code(), Some(143), "{runtime}");
        assert_eq!(ps(&place, &name).unwrap()["code"], 143);
        place.out(&format!("rm {name}"));
        // A user's `rm --force` removes a container that would stay.
        let (mut child, _lines) = start("echo up; exec sleep 1000");
        place.out(&format!("rm --force {name}"));
        assert_eq!(child.wait().unwrap().code(), Some(137), "{runtime}");
        assert_eq!(ps(&place, &name), None);
    }
}

#[test]
fn a_host_may_keep_containers_by_default() {
    let Some(place) = place() else { return };
    let folder = place.path("config/quire");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("run.toml"), "rm = false\n").unwrap();
    let run = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let mut command = place.command(&words);
        command.env("XDG_CONFIG_HOME", place.path("config"));
        let ran = Ran::from_output(&command.output().unwrap());
        assert_eq!(ran.code, Some(0), "{line}: {}", ran.err);
    };
    let _guards = ["c", "d"].map(|name| Rm(&place, name));
    run("run --quiet --name c a true");
    run("run --quiet --rm --name gone a true");
    run("run --quiet -d --name d a true");
    place.out("wait d");
    assert_eq!(place.out("ps -aq --sort names"), "c\nd\n");
}

fn names(place: &Place) -> String {
    place.out("ps -aq")
}

#[test]
fn a_created_container_may_be_removed_at_its_end() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let create = |script: &str| {
            let before = ["create", "--rm", "--runtime", runtime, "-u", "0", "--name", "c", "a"];
            let ran = place.run_each(&[&before[..], &["--", "sh", "-c", script]].concat());
            assert_eq!(ran.code, Some(0), "{}", ran.err);
            // Later commands do not take it for a container that has ended.
            place.out("run --quiet a true");
            assert_eq!(names(&place), "c\n");
        };
        create("echo out; echo err >&2; exit 5");
        let ran = place.run("start --attach c");
        assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(5), "out\n", "err\n"), "{runtime}");
        assert_eq!(names(&place), "");
        create("exit 5");
        let removed = place.out("inspect --format {{.HostConfig.AutoRemove}} c");
        assert_eq!(removed, "true\n");
        place.out("start c");
        wait_for("the removal", || names(&place).is_empty());
        create("true");
        place.out("rm c");
        assert_eq!(names(&place), "");
    }
    let ran = place.run("create --rm --restart always a true");
    assert!(ran.code == Some(125) && ran.err.contains("and not --rm"), "{}", ran.err);
}

/// Source: podman-run(1), `--attach`.
#[test]
fn only_the_attached_streams_are_connected() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let run = |options: &[&str]| {
            let before = ["run", "--quiet", "-u", "0", "--runtime", runtime, "--name", "c"];
            let script = "cat; echo out; echo err >&2; exit 4";
            let words = [&before[..], options, &["a", "--", "sh", "-c", script]].concat();
            let mut run = place.command(&words);
            run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = run.spawn().unwrap();
            // The program may not have this input.
            let _unread = child.stdin.take().unwrap().write_all(b"in\n");
            Ran::from_output(&child.wait_with_output().unwrap())
        };
        for (options, out, err) in [
            (&["-a", "stdout"][..], "out\n", ""),
            (&["-a", "stderr", "-a", "stdin"], "", "err\n"),
            (&["--attach=STDIN", "--attach=STDOUT"], "in\nout\n", ""),
            (&["-a", "stdin"], "c\n", ""),
            (&["--detach-keys="], "in\nout\n", "err\n"),
        ] {
            let ran = run(options);
            assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(4), out, err), "{options:?}");
            assert_eq!(names(&place), "", "{options:?}");
        }
        let _guard = Rm(&place, "c");
        assert_eq!(run(&["-a", "stdin", "--rm=false"]).out, "c\n");
        let logs = place.run("logs c");
        assert_eq!((&*logs.out, &*logs.err), ("in\nout\n", "err\n"), "{runtime}");
        place.out("rm c");
    }
    let ran = place.run("run -d -a stdout a true");
    assert!(ran.code == Some(125) && ran.err.contains("cannot be used with"), "{}", ran.err);
}
