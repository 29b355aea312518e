//! `--restart`, `start --at-boot`, and the lists of containers by `--all` and `--filter`. Needs root.

use std::fs;
use std::path::Path;
use std::process::Command;

use container::folder::{PID, RUNTIME_STATE, STOPPED};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{all_runtimes, mounts, place, runtimes, wait_for};
use crate::{Place, add_programs};

/// Counts the runs in a file. The third one goes on, and those before it fail.
const COUNTED: &str = "echo run >> /count; n=0; while read x; do n=$((n+1)); done < /count; echo run $n; \
    [ $n -ge 3 ] || exit 3; exec sleep 1000";

fn restarts(place: &Place, name: &str) -> u64 {
    ps(place, name).map_or(0, |it| it["restarts"].as_u64().unwrap())
}

fn status(place: &Place, name: &str) -> Value {
    ps(place, name).unwrap()["status"].clone()
}

fn inspected(place: &Place, name: &str) -> Value {
    let all: Value = serde_json::from_str(&place.out(&format!("inspect {name}"))).unwrap();
    all[0].clone()
}

/// Ends the program of a container without a command of Quire.
fn end_program(place: &Place, name: &str) {
    let pid = ps(place, name).unwrap()["pid"].as_i64().unwrap();
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

fn descriptors(process: u64) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

fn monitor(place: &Place, name: &str) -> u64 {
    let path = place.path("store/containers").join(name).join("state.json");
    let state: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    state["monitor"].as_u64().unwrap()
}

/// Directories of cgroups that belong to a container.
fn cgroups(name: &str) -> usize {
    let beginning = format!("quire-{name}-");
    let roots = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|it| it.path());
    let roots = roots.filter(|it| it.is_dir()).chain([Path::new("/sys/fs/cgroup").to_owned()]);
    let names = roots.flat_map(|root| fs::read_dir(root).into_iter().flatten().flatten());
    names.filter(|it| it.file_name().to_string_lossy().starts_with(&beginning)).count()
}

#[test]
fn a_program_that_fails_is_started_again() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let name = format!("fails-{runtime}");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--runtime", runtime, "--restart", "on-failure"], COUNTED);
        wait_for("the third run", || place.out(&format!("logs {name}")) == "run 1\nrun 2\nrun 3\n");
        wait_for("its state", || status(&place, &name) == "running");
        assert_eq!(restarts(&place, &name), 2, "{runtime}");
        if runtime != "runsc" {
            assert_eq!(place.out(&format!("exec {name} cat /count")), "run\nrun\nrun\n");
        }
        let found = inspected(&place, &name);
        let policy = &found["HostConfig"]["RestartPolicy"];
        assert_eq!(
            (&policy["Name"], &policy["MaximumRetryCount"]),
            (&"on-failure".into(), &0.into())
        );
        assert_eq!(
            (&found["RestartCount"], &found["State"]["Restarting"]),
            (&2.into(), &false.into())
        );
        // A user's stop ends it, whatever its code.
        assert_eq!(place.out(&format!("stop --time 0 {name}")), format!("{name}\n"));
        assert_eq!(status(&place, &name), "exited");
        assert_eq!(inspected(&place, &name)["State"]["StoppedByUser"], true);
        // Another start counts from zero.
        place.out(&format!("start {name}"));
        let state = &inspected(&place, &name)["State"];
        assert_eq!((&state["StoppedByUser"], restarts(&place, &name)), (&false.into(), 0));
    }
}

#[test]
fn a_maximum_ends_the_restarts() {
    let Some(place) = place() else { return };
    let _guards = ["twice", "fine"].map(|it| Rm(&place, it));
    start(&place, &["--name", "twice", "--restart", "on-failure:2"], "echo run; exit 7");
    start(&place, &["--name", "fine", "--restart", "on-failure:2"], "echo run");
    // It waits for the last run.
    assert_eq!(place.out("wait twice fine"), "7\n0\n");
    assert_eq!(place.out("logs twice"), "run\nrun\nrun\n");
    assert_eq!(place.out("logs fine"), "run\n");
    assert_eq!((restarts(&place, "twice"), restarts(&place, "fine")), (2, 0));
    assert_eq!(inspected(&place, "twice")["State"]["StoppedByUser"], false);
}

/// Otherwise, a container whose program is gone would be started for ever.
#[test]
fn starts_that_fail_count_as_restarts() {
    let Some(place) = place() else { return };
    add_programs(&place.path("tree"), &["/bin/rm"]);
    place.out(&format!("import --quiet dir:{} a", place.path("tree").display()));
    let _guard = Rm(&place, "gone");
    start(&place, &["--name", "gone", "--restart", "on-failure:2"], "rm /bin/sh; exit 7");
    wait_for("the end of the last attempt", || status(&place, "gone") == "exited");
    assert_eq!((restarts(&place, "gone"), &*place.out("wait gone")), (2, "125\n"));
}

/// They were all stopped.
#[test]
fn commands_find_a_container_between_two_runs() {
    let Some(place) = place() else { return };
    // Delays grow: after some restarts, the next one is seconds away.
    let between = |name: &str, count: u64| {
        start(&place, &["--name", name, "--restart", "always"], "echo run; exit 5");
        wait_for("a long delay", || {
            restarts(&place, name) >= count && status(&place, name) == "restarting"
        });
    };
    let names = ["stopped", "killed", "removed", "again"];
    let _guards = names.map(|it| Rm(&place, it));
    between("stopped", 7);
    let found = inspected(&place, "stopped")["State"].clone();
    assert_eq!((&found["Status"], &found["Restarting"]), (&"restarting".into(), &true.into()));
    assert_eq!((&found["ExitCode"], &found["Pid"]), (&5.into(), &0.into()));
    assert!(place.out("ps").contains("restarting (5)"));
    let line = place.run_each(&["ps", "--format", "{{.State}} {{.Status}} {{.ExitCode}}"]).out;
    assert!(line.starts_with("restarting Restarting (5) ") && line.contains(" ago"), "{line}");
    assert_eq!(place.out("ps --quiet --filter status=restarting"), "stopped\n");
    // Its changes are read as those of a running container.
    place.out("export --quiet stopped changes:saved.tar");
    place.out("snapshot create stopped moment");
    for line in ["exec stopped true", "cp stopped:/etc/hostname ."] {
        let ran = place.run(line);
        // It may run for a moment.
        let is_told = ran.err.contains("restarting") || ran.err.contains("not running");
        assert!(ran.code == Some(0) || is_told, "{line}: {}", ran.err);
    }
    let ran = place.run("rm stopped");
    assert!(ran.code == Some(2) && ran.err.contains("is running"), "{}", ran.err);
    assert_eq!(place.out("stop stopped"), "stopped\n");
    assert_eq!(
        (status(&place, "stopped"), place.out("wait stopped")),
        ("exited".into(), "5\n".into())
    );
    between("killed", 3);
    assert_eq!(place.out("kill --signal TERM killed"), "killed\n");
    wait_for("the end", || status(&place, "killed") == "exited");
    between("removed", 3);
    assert_eq!(place.out("rm --force removed"), "removed\n");
    assert!(ps(&place, "removed").is_none());
    between("again", 5);
    assert_eq!(place.out("restart again"), "again\n");
    assert!(restarts(&place, "again") < 5);
}

#[test]
fn a_restart_leaks_nothing_and_keeps_the_mounts() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("leaks-{runtime}");
        let _guard = Rm(&place, &name);
        let volume = format!("data-{runtime}:/data");
        let options = ["--name", name.as_str(), "--runtime", runtime, "--restart", "always"];
        let more = [
            "--writable",
            "memory",
            "-v",
            volume.as_str(),
            "--mount",
            "type=self,dst=/own,size=16m",
        ];
        let script = "for f in /data/x /own/x /x; do echo run >> $f; done; exec sleep 1000";
        start(&place, &[&options[..], &more].concat(), script);
        let is_written = |count: usize, path: &str| {
            place.run(&format!("exec {name} cat {path}")).out == "run\n".repeat(count)
        };
        let runs = |count: u64| {
            // The program must not be killed before it has written.
            let lines = usize::try_from(count).unwrap();
            wait_for("the last line", || is_written(lines, "/x"));
            end_program(&place, &name);
            wait_for("another run", || {
                restarts(&place, &name) == count && status(&place, &name) == "running"
            });
        };
        let all = || {
            let id = monitor(&place, &name);
            (id, descriptors(id), mounts().lines().count(), cgroups(&name))
        };
        runs(1);
        let before = all();
        for count in 2..5 {
            runs(count);
        }
        assert_eq!(all(), before, "{runtime}");
        for path in ["/data/x", "/own/x", "/x"] {
            wait_for("the last line", || is_written(5, path));
        }
        let folder = place.path("store/containers").join(&name);
        assert_eq!(fs::read_dir(folder.join(RUNTIME_STATE)).unwrap().count(), 1);
        assert!(folder.join(PID).exists());
    }
    place.out("volume prune --force --all");
}

/// A host that shuts down signals all processes. That is not a user's stop.
#[test]
fn a_signal_to_the_monitor_ends_the_container_until_the_next_boot() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "web");
    let script = "trap 'echo bye; exit 1' TERM; echo up; while :; do sleep 0.02; done";
    start(&place, &["--name", "web", "--restart", "unless-stopped"], script);
    wait_for("the trap", || place.out("logs web").contains("up"));
    let pid = Pid::from_raw(i32::try_from(monitor(&place, "web")).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(place.out("wait web"), "1\n");
    assert_eq!(place.out("logs web"), "up\nbye\n");
    assert_eq!(inspected(&place, "web")["State"]["StoppedByUser"], false);
    assert_eq!(place.out("start --at-boot"), "web\n");
    assert_eq!(status(&place, "web"), "running");
}

#[test]
fn a_boot_starts_what_should_run() {
    let Some(place) = place() else { return };
    let names = ["always", "unless", "stopped", "failure", "no"];
    let _guards = names.map(|it| Rm(&place, it));
    let policies = ["always", "unless-stopped", "unless-stopped", "on-failure", "no"];
    for (name, policy) in names.into_iter().zip(policies) {
        start(&place, &["--name", name, "--restart", policy], "exec sleep 1000");
    }
    for (filter, expect) in [
        ("restart-policy=always", "always\n"),
        ("restart-policy=no", "no\n"),
        ("should-start-on-boot=true", "always\nunless\nstopped\n"),
    ] {
        assert_eq!(place.out(&format!("ps --quiet --filter {filter}")), expect);
    }
    place.out("stop --time 0 always stopped");
    assert!(place.path("store/containers/stopped").join(STOPPED).exists());
    assert!(!place.path("store/containers/unless").join(STOPPED).exists());
    // As after a crash of the host, which no monitor survives.
    for name in ["unless", "failure", "no"] {
        let id = i32::try_from(monitor(&place, name)).unwrap();
        kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
        end_program(&place, name);
        wait_for("the end of the monitor", || !Path::new(&format!("/proc/{id}/fd/0")).exists());
    }
    assert_eq!(place.out("start --at-boot"), "always\nunless\n");
    assert_eq!(place.out("start --at-boot"), "");
    let running = place.out("ps --quiet --filter status=running");
    assert_eq!(running, "always\nunless\n");
}

/// A rollback at rest exchanges the folder, which has the note of the user's stop.
#[test]
fn a_container_that_a_user_stopped_stays_stopped_at_boot_after_a_rollback() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "w");
    start(&place, &["--name", "w", "--restart", "unless-stopped"], "exec sleep 1000");
    place.out("stop --time 0 w");
    assert_eq!(place.out("rollback --image w"), "w\n");
    assert_eq!(place.out("ps --all --quiet --filter should-start-on-boot=true"), "");
    assert_eq!(place.out("start --at-boot"), "");
    // A start takes the note away.
    place.out("start w");
    let listed = place.out("ps --quiet --filter should-start-on-boot=true");
    assert_eq!(listed, "w\n");
    // So does a rollback of a running container.
    place.out("rollback --time 0 --image w");
    let listed = place.out("ps --quiet --filter should-start-on-boot=true");
    assert_eq!(listed, "w\n");
}

#[test]
fn lists_of_containers_are_chosen_by_filters() {
    let Some(place) = place() else { return };
    let _guards = ["a1", "a2", "b1"].map(|it| Rm(&place, it));
    for (name, label) in [("a1", "job=a"), ("a2", "job=a"), ("b1", "job=b")] {
        start(&place, &["--name", name, "--label", label], "exec sleep 1000");
    }
    assert_eq!(place.out("stop --time 0 --filter label=job=a"), "a1\na2\n");
    assert_eq!(place.out("ps --quiet"), "b1\n");
    assert_eq!(place.out("start --filter name=a2 a1"), "");
    assert_eq!(place.out("start --filter name=a2 a1 a2"), "a2\n");
    assert_eq!(place.out("start --all"), "a1\n");
    assert_eq!(place.out("restart --time 0 --filter label=job=b"), "b1\n");
    assert_eq!(place.out("restart --time 0 --all"), "a1\na2\nb1\n");
    assert_eq!(place.out("stop --time 0 b1"), "b1\n");
    assert_eq!(place.out("restart --time 0 --running"), "a1\na2\n");
    assert_eq!(place.out("rm --filter status=exited"), "b1\n");
    assert_eq!(place.out("rm --force --filter label=job=a"), "a1\na2\n");
    for line in ["stop --filter x=y", "rm --filter x=y", "start --filter x=y"] {
        let ran = place.run(line);
        assert!(ran.code != Some(0) && ran.err.contains("restart-policy"), "{line}: {}", ran.err);
    }
}

/// All are stopped before the first one starts again.
#[test]
fn a_container_that_does_not_restart_leaves_none_of_the_others_stopped() {
    let Some(place) = place() else { return };
    let _guards = ["r1", "r2", "r3"].map(|it| Rm(&place, it));
    let gone = place.path("gone");
    fs::create_dir(&gone).unwrap();
    let mount = format!("type=bind,src={},dst=/mnt", gone.display());
    start(&place, &["--name", "r1", "--mount", &mount], "exec sleep 1000");
    for name in ["r2", "r3"] {
        start(&place, &["--name", name], "exec sleep 1000");
    }
    fs::remove_dir(&gone).unwrap();
    let ran = place.run("restart --time 0 r1 r2 r3");
    assert!(ran.code != Some(0) && ran.out == "r2\nr3\n", "{} {}", ran.out, ran.err);
    assert!(ran.err.contains("cannot start container r1"), "{}", ran.err);
    assert!(ran.err.contains("1 of 3 containers did not start"), "{}", ran.err);
    assert_eq!(place.out("ps --quiet --filter status=running"), "r2\nr3\n");
}

#[test]
fn a_container_that_does_not_stay_has_no_restart_policy() {
    let Some(place) = place() else { return };
    for options in ["--rm --detach", "--read-only"] {
        let ran = place.run(&format!("run --quiet --restart always {options} a true"));
        assert!(ran.code == Some(125) && ran.err.contains("--detach"), "{}", ran.err);
    }
    assert_eq!(place.out("run --quiet --restart no a cat /etc/short"), "short\n");
    let ran = place.run("run --quiet -d --restart sometimes a true");
    assert!(ran.err.contains("unless-stopped"), "{}", ran.err);
}

#[test]
fn a_log_driver_keeps_or_drops_the_output() {
    let Some(place) = place() else { return };
    let _guards = ["mute", "small", "terminal"].map(|it| Rm(&place, it));
    start(&place, &["--name", "mute", "--log-driver", "none"], "echo said; echo told >&2");
    start(&place, &["--name", "terminal", "-t", "--log-driver", "none"], "echo said");
    let small = ["--log-driver", "json-file", "--log-opt", "max-size=4k"];
    let lines = "n=0; while [ $n -lt 1000 ]; do n=$((n+1)); echo line $n; done";
    start(&place, &[&["--name", "small"][..], &small].concat(), lines);
    assert_eq!(place.out("wait mute small terminal"), "0\n0\n0\n");
    for name in ["mute", "terminal"] {
        let ran = place.run(&format!("logs {name}"));
        assert!(ran.code == Some(125) && ran.err.contains("--log-driver none"), "{}", ran.err);
        let log = place.path("store/containers").join(name).join("log");
        assert_eq!(fs::read_to_string(log).unwrap(), "");
    }
    let inspected = |name: &str, field: &str| {
        let template = format!("{{{{.HostConfig.LogConfig.{field}}}}}");
        place.run_each(&["inspect", "--format", &template, name]).out
    };
    assert_eq!(
        (inspected("mute", "Type"), inspected("mute", "Path")),
        ("none\n".into(), "\n".into())
    );
    assert_eq!(inspected("small", "Type"), "k8s-file\n");
    let records = fs::read_to_string(inspected("small", "Path").trim_end()).unwrap();
    assert!(records.ends_with(" stdout F line 1000\n"), "{records}");
    let log = place.out("logs small");
    assert!(log.ends_with("line 1000\n") && !log.contains("line 1\n"), "{log}");
    for (options, expect) in [
        ("--log-driver journald", "systemd-run"),
        ("--log-driver passthrough", "leave out --detach"),
        ("--log-opt tag=x", "max-size=SIZE"),
    ] {
        let ran = place.run(&format!("run -d {options} a true"));
        assert!(ran.code == Some(125) && ran.err.contains(expect), "{}", ran.err);
    }
}

#[test]
fn the_printed_unit_is_one_that_systemd_knows() {
    let place = Place::new();
    let ran = place.run("start --print-unit");
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert!(ran.err.contains("systemctl"), "{}", ran.err);
    assert!(ran.out.contains(" start --at-boot\n"), "{}", ran.out);
    let Some(analyze) = crate::program("systemd-analyze") else { return };
    let path = place.path("quire-restart.service");
    let verified = |text: &str| {
        fs::write(&path, text).unwrap();
        let mut command = Command::new(&analyze);
        let ran = command.args(["--man=no", "verify"]).arg(&path).output().unwrap();
        assert!(ran.status.success(), "{ran:?}");
        String::from_utf8(ran.stderr).unwrap()
    };
    assert_eq!(verified(&ran.out), "");
    // systemd only warns about an unknown setting.
    assert!(verified(&ran.out.replace("KillMode", "KilMode")).contains("KilMode"));
}
