//! `kill`, `attach`, `exec --detach`, `inspect` and `port`. Needs root.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Stdio;

use serde_json::Value;

use crate::Place;
use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{place, wait_for};

fn status(place: &Place, name: &str) -> Value {
    ps(place, name).unwrap()["status"].clone()
}

#[test]
fn kill_sends_one_signal() {
    let Some(place) = place() else { return };
    let _guards = ["web", "other"].map(|it| Rm(&place, it));
    let script = "trap 'echo got' HUP; echo ready; while :; do sleep 0.02; done";
    start(&place, &["--name", "web"], script);
    start(&place, &["--name", "other"], script);
    wait_for("the trap", || place.out("logs web").contains("ready"));
    for signal in ["HUP", "SIGHUP", "1", "-1", "-SIGHUP"] {
        let before = place.out("logs web").matches("got").count();
        assert_eq!(place.out(&format!("kill --signal {signal} web")), "web\n");
        wait_for("the signal", || place.out("logs web").matches("got").count() > before);
    }
    assert_eq!(status(&place, "web"), "running");
    assert_eq!(place.out("kill web"), "web\n");
    assert_eq!((status(&place, "web"), place.out("wait web")), ("exited".into(), "137\n".into()));
    let ran = place.run("kill web");
    assert!(
        ran.code == Some(125) && ran.err.contains("the status of web is exited"),
        "{}",
        ran.err
    );
    // None gets the signal if one of them cannot get it.
    assert_eq!(place.run("kill other web").code, Some(125));
    assert_eq!(status(&place, "other"), "running");
    assert_eq!(place.run("kill --signal NONE other").code, Some(125));
    assert_eq!(place.run("kill absent").code, Some(125));
    assert_eq!(place.out("kill --all"), "other\n");
    assert_eq!(
        (status(&place, "other"), place.out("kill --all")),
        ("exited".into(), String::new())
    );
}

/// The text is podman's.
#[test]
fn stop_warns_before_it_kills() {
    let Some(place) = place() else { return };
    let _guards = ["deaf", "kind"].map(|it| Rm(&place, it));
    start(&place, &["--name", "deaf"], "trap '' TERM; echo ready; while :; do sleep 0.02; done");
    start(&place, &["--name", "kind"], "trap exit TERM; echo ready; while :; do sleep 0.02; done");
    for name in ["deaf", "kind"] {
        wait_for("the trap", || place.out(&format!("logs {name}")).contains("ready"));
    }
    let ran = place.run("stop -t 1 deaf kind");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "deaf\nkind\n"), "{}", ran.err);
    let warning = "quire: StopSignal SIGTERM failed to stop container deaf in 1 seconds, resorting to SIGKILL";
    assert_eq!(ran.err.lines().collect::<Vec<_>>(), [warning]);
    place.out("start deaf");
    assert_eq!(place.run("stop -t 0 deaf").err, "");
}

#[test]
fn a_container_is_stopping_while_a_command_waits_for_its_end() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "deaf");
    start(&place, &["--name", "deaf"], "trap '' TERM; echo ready; while :; do sleep 0.02; done");
    wait_for("the trap", || place.out("logs deaf").contains("ready"));
    let status = || place.out("inspect --format {{.State.Status}} deaf");
    assert_eq!(status(), "running\n");
    let mut stop = place.command(&["stop", "-t", "100", "deaf"]).spawn().unwrap();
    wait_for("the command", || status() == "stopping\n");
    place.out("kill deaf");
    assert_eq!(place.out("wait deaf"), "137\n");
    assert!(stop.wait().unwrap().success());
    assert_eq!(status(), "exited\n");
    // A command that was killed leaves no mark.
    place.out("start deaf");
    let mut stop = place.command(&["stop", "-t", "100", "deaf"]).spawn().unwrap();
    wait_for("the command", || status() == "stopping\n");
    stop.kill().unwrap();
    stop.wait().unwrap();
    assert_eq!(status(), "running\n");
}

#[test]
fn inspect_has_the_limits_of_resources() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    place.out("create --name web --ulimit core=5:-1 a true");
    let limits: Value = serde_json::from_str(
        place
            .run_each(&["inspect", "--format", "{{json .HostConfig.Ulimits}}", "web"])
            .out
            .as_str(),
    )
    .unwrap();
    let core = serde_json::json!({"Name": "RLIMIT_CORE", "Soft": 5, "Hard": -1});
    assert!(limits.as_array().unwrap().contains(&core), "{limits}");
}

#[test]
fn start_accepts_an_input_that_is_not_there() {
    let Some(place) = place() else { return };
    let _guards = ["one", "open"].map(|it| Rm(&place, it));
    place.out("create --name one a cat");
    let ran = place.run("start -ai one");
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), ""), "{}", ran.err);
    place.out("create -i --name open a cat");
    let ran = place.run("start -ai open");
    assert!(ran.code == Some(125) && ran.err.contains("leave -i out"), "{}", ran.err);
}

#[test]
fn attach_prints_until_the_end_and_has_its_code() {
    let Some(place) = place() else { return };
    let _guards = ["web", "gone"].map(|it| Rm(&place, it));
    let script = "while [ ! -e /tmp/go ]; do echo tick; sleep 0.02; done; echo bye; exit 7";
    start(&place, &["--name", "web"], script);
    // This one is removed at its end.
    start(&place, &["--name", "gone", "--rm"], script);
    for name in ["web", "gone"] {
        let mut command = place.command(&["attach", name]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "tick\n", "{name}");
        place.out(&format!("exec {name} -- sh -c :>/tmp/go"));
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        assert!(rest.ends_with("bye\n"), "{name}: {rest}");
        assert_eq!(child.wait().unwrap().code(), Some(7), "{name}");
    }
    let ran = place.run("attach web");
    assert!(ran.code == Some(125) && ran.err.contains("only attach to running"), "{}", ran.err);
}

#[test]
fn attach_passes_signals_on_unless_it_must_not() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    let script = "trap 'echo got; exit 9' TERM; while :; do echo tick; sleep 0.02; done";
    start(&place, &["--name", "web"], script);
    for (option, code) in [("--sig-proxy=false", None), ("--sig-proxy=true", Some(9))] {
        let mut command = place.command(&["attach", option, "web"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut String::new()).unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let mut rest = String::new();
        out.read_to_string(&mut rest).unwrap();
        // Without a code, the signal has ended the command.
        assert_eq!(child.wait().unwrap().code(), code, "{option}");
        assert_eq!(rest.contains("got"), code.is_some(), "{option}");
    }
    assert_eq!(place.out("wait web"), "9\n");
}

#[test]
fn exec_in_the_background_holds_nothing() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web"], "sleep 1000");
    let pid = ps(&place, "web").unwrap()["pid"].as_u64().unwrap();
    let made = format!("/proc/{pid}/root/tmp/made");
    // This waits until nothing has the pipes of the command open.
    let script = "echo out; cat >/dev/null; echo >/tmp/made; exec sleep 1000";
    let words = ["exec", "-d", "web", "sh", "-c", script];
    let ran = place.run_each(&words);
    assert_eq!((ran.code, &*ran.out, &*ran.err), (Some(0), "", ""));
    wait_for("the program", || fs::exists(&made).unwrap());
    // `-t` and `-i` have no effect, as for a container in the background.
    assert_eq!(place.run_each(&["exec", "-dit", "web", "true"]).code, Some(0));
    for (program, code) in [("/nosuch", 127), ("/etc", 126), ("/etc/short", 126)] {
        let ran = place.run_each(&["exec", "-d", "web", program]);
        assert_eq!(ran.code, Some(code), "{program}: {}", ran.err);
    }
    assert_eq!(place.out("logs web"), "");
    place.out("stop --time 0 web");
    assert_eq!(place.run("exec -d web true").code, Some(125));
}

#[test]
fn inspect_describes_containers_and_images() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("data")).unwrap();
    let _guard = Rm(&place, "web");
    let options = ["--name", "web", "-e", "A=b", "-v", "./data:/data:ro", "--hostname", "other"];
    let more = ["--memory", "64m", "--stop-timeout", "3", "--workdir", "/etc", "--read-only"];
    start(&place, &[&options[..], &more].concat(), "exit 4");
    place.out("wait web");
    let all: Value = serde_json::from_str(&place.out("inspect web")).unwrap();
    let it = &all[0];
    assert_eq!(all.as_array().unwrap().len(), 1);
    for (path, expect) in [
        ("/Id", "web".into()),
        ("/Name", "web".into()),
        ("/Path", "sh".into()),
        ("/Args", serde_json::json!(["-c", "exit 4"])),
        ("/ImageName", "a:latest".into()),
        ("/State/Status", "exited".into()),
        ("/State/Running", false.into()),
        ("/State/ExitCode", 4.into()),
        ("/State/Pid", 0.into()),
        ("/Config/Hostname", "other".into()),
        ("/Config/WorkingDir", "/etc".into()),
        ("/Config/User", "0".into()),
        ("/Config/StopTimeout", 3.into()),
        ("/HostConfig/Memory", (64 << 20).into()),
        ("/HostConfig/NetworkMode", "none".into()),
        ("/HostConfig/ReadonlyRootfs", true.into()),
        ("/HostConfig/AutoRemove", false.into()),
        ("/Mounts/0/Destination", "/data".into()),
        ("/Mounts/0/RW", false.into()),
        ("/NetworkSettings/Ports", serde_json::json!({})),
    ] {
        let expect: Value = expect;
        assert_eq!(it.pointer(path), Some(&expect), "{path}: {it:#}");
    }
    let env = it["Config"]["Env"].as_array().unwrap();
    assert!(env.contains(&"A=b".into()), "{env:?}");
    let format = |template: &str, name: &str| {
        let ran = place.run_each(&["inspect", "--format", template, name]);
        assert_eq!(ran.code, Some(0), "{template}: {}", ran.err);
        ran.out
    };
    assert_eq!(format("{{.State.Status}} {{.State.ExitCode}}", "web"), "exited 4\n");
    // A container comes first, and a type chooses.
    place.out("tag a web");
    assert_eq!(format("{{.State.Status}}", "web"), "exited\n");
    let image: Value = serde_json::from_str(&place.out("inspect --type image web")).unwrap();
    let tags: Vec<_> = image[0]["RepoTags"].as_array().unwrap().iter().collect();
    assert_eq!(tags, ["a:latest", "web:latest"]);
    assert_eq!(it["Image"], image[0]["Id"]);
    // The others are printed.
    let ran = place.run("inspect web nosuch");
    let found: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((ran.code, found.as_array().unwrap().len()), (Some(125), 1));
    assert!(ran.err.contains("there is no container or image \"nosuch\""), "{}", ran.err);
    assert_eq!(place.run("inspect --type container a").code, Some(125));
    for (line, code) in [
        ("container exists web", 0),
        ("container exists a", 1),
        ("image exists a", 0),
        ("image exists nosuch", 1),
    ] {
        let ran = place.run(line);
        assert_eq!((ran.code, &*ran.out), (Some(code), ""), "{line}: {}", ran.err);
    }
}

#[test]
fn a_container_without_ports_has_none() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    start(&place, &["--name", "web"], "sleep 1000");
    assert_eq!(place.out("port web"), "");
    assert_eq!(place.out("port --json web"), "[]\n");
    assert_eq!(place.out("port --all"), "");
    let ran = place.run("port web 80");
    let said = "failed to find published port \"80/tcp\"";
    assert!(ran.code == Some(125) && ran.err.contains(said), "{}", ran.err);
    assert_eq!(place.run("port web 80/none").code, Some(125));
    assert_eq!(place.run("port absent").code, Some(125));
}
