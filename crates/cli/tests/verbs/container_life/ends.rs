//! Containers that are ended by a signal, a timeout or the kernel. Needs root.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};
use crate::{program, write};

#[test]
fn a_container_whose_time_is_over_is_killed() {
    let Some(place) = place() else { return };
    let script = "trap '' TERM INT; while :; do sleep 0.05; done";
    for runtime in all_runtimes() {
        let ran = place.run_each(&[
            "run",
            "--runtime",
            runtime,
            "--timeout",
            "1",
            "a",
            "sh",
            "-c",
            script,
        ]);
        assert_eq!(ran.code, Some(255), "{runtime}: {}", ran.err);
        assert!(ran.err.contains("its time was over"), "{runtime}: {}", ran.err);
        let ran = place.run_each(&[
            "run",
            "--runtime",
            runtime,
            "--timeout",
            "60",
            "a",
            "sh",
            "-c",
            "exit 3",
        ]);
        assert_eq!(
            (ran.code, ran.err.contains("time")),
            (Some(3), false),
            "{runtime}: {}",
            ran.err
        );
        let name = format!("late-{runtime}");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--runtime", runtime, "--timeout", "1"], script);
        let ran = place.run(&format!("wait {name}"));
        assert_eq!((ran.code, ran.out.as_str()), (Some(0), "255\n"), "{runtime}: {}", ran.err);
        assert!(ran.err.contains("its time was over"), "{runtime}: {}", ran.err);
        assert_eq!(ps(&place, &name).unwrap()["reason"], "timeout");
        assert!(place.out("ps --all").contains("exited (255), timed out"));
    }
    // As with podman, 0 means no limit.
    place.out("run --timeout 0 a true");
}

/// If an image's stop signal does not exist, its container can still be stopped.
#[test]
fn a_stop_signal_that_is_none_is_no_reason_to_live() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("odd-{runtime}-{}", std::process::id());
        let _guard = Rm(&place, &name);
        place.out(&format!("run -d --runtime {runtime} --name {name} a -- sleep 60"));
        // Write the state as if the image had recorded such a signal.
        let state = place.path("store/containers").join(&name).join("state.json");
        let text = std::fs::read_to_string(&state).unwrap();
        let odd = text.replace("\"TERM\"", "\"999\"").replace("\"SIGTERM\"", "\"999\"");
        std::fs::write(&state, odd.replace("\"stop_signal\":\"\"", "\"stop_signal\":\"999\""))
            .unwrap();
        let ran = place.run(&format!("stop -t 1 {name}"));
        assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        assert!(
            ran.err.contains(&format!("sending TERM to {name}")),
            "{runtime}: {} {text}",
            ran.err
        );
    }
}

#[test]
fn stop_does_not_wait_for_what_the_kernel_drops() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("deaf-{runtime}");
        let _guard = Rm(&place, &name);
        place.out(&format!("run -d --runtime {runtime} --name {name} a -- sleep 1000000"));
        let mut stop = place.command(&["stop", "--time", "1000000", &name]).spawn().unwrap();
        wait_for("stop to end", || stop.try_wait().unwrap().is_some());
        assert_eq!(place.out(&format!("wait {name}")), "137\n", "{runtime}");
        place.out(&format!("rm {name}"));
        // A program that handles the signal has time to end, even if it has no handler for a second signal.
        for script in
            ["trap 'sleep 0.5; exit 3' TERM", "trap 'trap - TERM; sleep 0.5; exit 3' TERM"]
        {
            let script = format!("{script}; echo up; while :; do sleep 0.02; done");
            start(&place, &["--name", &name, "--runtime", runtime], &script);
            wait_for("it to listen", || place.out(&format!("logs {name}")) == "up\n");
            place.out(&format!("stop {name}"));
            assert_eq!(place.out(&format!("wait {name}")), "3\n", "{runtime}");
            place.out(&format!("rm {name}"));
        }
    }
}

#[test]
fn stop_asks_and_waits_as_run_was_told() {
    let Some(place) = place() else { return };
    for runtime in all_runtimes() {
        let name = format!("asked-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "trap 'exit 3' USR1; trap 'exit 4' 37; trap 'exit 5' 63; trap '' TERM; echo up; \
                      while :; do sleep 0.02; done";
        let options = ["--name", &name, "--runtime", runtime];
        // The second signal is the stop signal of systemd as a first process. Source: systemd(1), "SIGRTMIN+3".
        for (signal, code) in [("SIGUSR1", "3\n"), ("SIGRTMIN+3", "4\n"), ("rtmax-1", "5\n")] {
            if runtime == "runsc" && code != "3\n" {
                // gVisor's `kill` has no real-time signals, so `stop` prints a remark and sends TERM.
                continue;
            }
            start(&place, &[&options[..], &["--stop-signal", signal]].concat(), script);
            wait_for("it to listen", || place.out(&format!("logs {name}")) == "up\n");
            place.out(&format!("stop {name}"));
            assert_eq!(place.out(&format!("wait {name}")), code, "{runtime} {signal}");
            place.out(&format!("rm {name}"));
        }
        start(&place, &[&options[..], &["--stop-timeout", "0"]].concat(), script);
        wait_for("it to listen", || place.out(&format!("logs {name}")) == "up\n");
        place.out(&format!("stop {name}"));
        assert_eq!(place.out(&format!("wait {name}")), "137\n", "{runtime}");
    }
    let ran = place.run("run --stop-signal NONE a true");
    assert!(ran.code == Some(125) && ran.err.contains("is not a signal"), "{}", ran.err);
}

#[test]
fn a_first_process_waits_for_orphans_and_passes_signals_on() {
    let Some(place) = place() else { return };
    let own = place.path("no-init");
    write(&own, b"#!/bin/sh\nexec \"$@\"\n", 0o755);
    let ran = place.run("run --init-path ./no-init a true");
    assert!(ran.code == Some(125) && ran.err.contains("not a static program"), "{}", ran.err);
    let ran = place.run("run --init-path ./nothing a true");
    assert!(ran.code == Some(125) && ran.err.contains("No such file"), "{}", ran.err);
    if ["catatonit", "tini-static", "docker-init"].iter().all(|name| program(name).is_none()) {
        testing::skipped("none of catatonit, tini-static and docker-init is here");
        return;
    }
    for runtime in all_runtimes() {
        for more in [&[][..], &["--read-only"], &["--userns", "auto"]] {
            // The script makes a child that leaves an orphan behind, and waits until no zombie is left.
            let script = "(sleep 0.05 &); while :; do found=; for stat in /proc/[0-9]*/stat; do \
                          read -r line < $stat 2>&- && case \"$line\" in *') Z '*) found=1;; esac; done; \
                          for comm in /proc/[0-9]*/comm; do read -r line < $comm 2>&-; \
                          test \"$line\" = sleep && found=1; done; \
                          test -z \"$found\" && break; done; test $$ != 1 && cat /proc/1/cmdline && exit 5";
            let options = ["run", "--quiet", "--runtime", runtime, "--init"];
            let command = ["a", "--", "sh", "-c", script];
            let ran = place.run_each(&[&options[..], more, &command].concat());
            assert_eq!(ran.code, Some(5), "{runtime} {more:?}: {}", ran.err);
            assert!(ran.out.starts_with("/dev/init\0--\0sh\0"), "{runtime} {more:?}: {}", ran.out);
        }
        let name = format!("init-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "trap 'exit 42' TERM; echo up; while :; do sleep 0.02; done";
        start(&place, &["--name", &name, "--runtime", runtime, "--init"], script);
        wait_for("it to listen", || place.out(&format!("logs {name}")) == "up\n");
        place.out(&format!("stop {name}"));
        assert_eq!(place.out(&format!("wait {name}")), "42\n", "{runtime}");
        // The command is looked up in the image before the container starts.
        let ran = place.run_each(&["run", "--runtime", runtime, "--init", "a", "no-such"]);
        assert_eq!(ran.code, Some(127), "{runtime}: {}", ran.err);
    }
}

#[test]
fn what_the_kernel_kills_for_memory_says_so() {
    let Some(place) = place() else { return };
    // The script doubles a string forever.
    let hog = "a=xxxxxxxxxxxxxxxx; while :; do a=$a$a; done";
    let said = "ran out of memory";
    for runtime in runtimes() {
        let options = ["--runtime", runtime, "-m", "24m"];
        for _ in 0..3 {
            let ran =
                place.run_each(&[&["run"], &options[..], &["a", "--", "sh", "-c", hog]].concat());
            assert!(ran.code == Some(137) && ran.err.contains(said), "{runtime}: {ran:?}");
        }
        // A process that was killed by another process is not reported as out of memory.
        let kill = ["a", "--", "sh", "-c", "sh -c 'kill -KILL $$'"];
        let ran = place.run_each(&[&["run"], &options[..], &kill].concat());
        assert!(ran.code == Some(137) && !ran.err.contains(said), "{runtime}: {ran:?}");
        let name = format!("hog-{runtime}");
        let _guard = Rm(&place, &name);
        start(&place, &[&options[..], &["--name", &name]].concat(), &format!("sleep 0.1; {hog}"));
        let ran = place.run(&format!("wait {name}"));
        assert!(ran.out == "137\n" && ran.err.contains(said), "{runtime}: {ran:?}");
        assert_eq!(ps(&place, &name).unwrap()["reason"], "memory");
        assert!(place.out("ps --all").contains("exited (137), out of memory"));
        place.out(&format!("rm {name}"));
        start(&place, &[&options[..], &["--name", &name]].concat(), "sleep 60");
        let ran = place.run_each(&["exec", &name, "sh", "-c", hog]);
        assert!(ran.code == Some(137) && ran.err.contains(said), "{runtime}: {ran:?}");
        let ran = place.run_each(&["exec", &name, "sh", "-c", "kill -KILL $$"]);
        assert!(ran.code == Some(137) && !ran.err.contains(said), "{runtime}: {ran:?}");
    }
}

/// The script is a shell that continues after the kernel killed its child.
#[test]
fn what_quire_kills_was_not_killed_for_memory() {
    let Some(place) = place() else { return };
    let script = "trap : INT TERM; sh -c 'a=xxxxxxxxxxxxxxxx; while :; do a=$a$a; done'; echo killed $?; \
                  while :; do sleep 0.02; done";
    let said = "ran out of memory";
    for runtime in runtimes() {
        let options = ["--runtime", runtime, "-m", "24m"];
        let name = format!("survivor-{runtime}");
        let _guard = Rm(&place, &name);
        for how in [&["stop", "-t", "1"][..], &["stop", "--signal", "KILL"]] {
            start(&place, &[&options[..], &["--name", &name]].concat(), script);
            let log = || place.out(&format!("logs {name}"));
            wait_for("the child to be killed", || log().contains("killed 137\n"));
            place.run_each(&[how, &[name.as_str()]].concat());
            let ran = place.run(&format!("wait {name}"));
            assert!(ran.out == "137\n" && !ran.err.contains(said), "{runtime} {how:?}: {ran:?}");
            assert!(ps(&place, &name).unwrap()["reason"].is_null(), "{runtime} {how:?}");
            place.out(&format!("rm {name}"));
        }
        // The third request kills a container without a terminal.
        let run = [&["run"], &options[..], &["a", "--", "sh", "-c", script]].concat();
        let mut run = place.command(&run);
        let mut run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "killed 137", "{runtime}");
        let pid = rustix::process::Pid::from_child(&run);
        while run.try_wait().unwrap().is_none() {
            rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let ran = crate::Ran::from_output(&run.wait_with_output().unwrap());
        assert!(ran.code == Some(137) && !ran.err.contains(said), "{runtime}: {ran:?}");
    }
}

/// Source: podman-rm(1), podman-stop(1).
#[test]
fn all_containers_are_stopped_and_removed() {
    let Some(place) = place() else { return };
    assert_eq!(place.out("rm --all"), "");
    let _guards = [Rm(&place, "one"), Rm(&place, "two")];
    let script =
        "trap 'echo asked >> /said/asked; exit 0' TERM; echo up; while :; do sleep 0.05; done";
    let said = place.path("said");
    std::fs::create_dir(&said).unwrap();
    let begin = |name: &str| {
        start(&place, &["--name", name, "-v", "./said:/said"], script);
        wait_for("the trap", || place.out(&format!("logs {name}")) == "up\n");
    };
    let asked = || std::fs::read_to_string(said.join("asked")).unwrap_or_default().lines().count();
    begin("one");
    begin("two");
    let ran = place.run("rm --all");
    assert_ne!(ran.code, Some(0), "they run");
    let mut stopped: Vec<_> = place.out("stop --all").lines().map(str::to_owned).collect();
    stopped.sort();
    assert_eq!(stopped, ["one", "two"]);
    assert_eq!((asked(), place.out("ps --quiet")), (2, String::new()));
    assert_eq!(place.run("stop nobody").code, Some(125));
    place.out("stop --ignore nobody");
    assert_eq!(place.run("rm nobody").code, Some(1));
    assert_eq!(place.out("rm --ignore nobody one"), "one\n");
    assert_eq!(place.out("ps --all --quiet"), "two\n");
    place.out("rm --all");
    // It is asked before it is killed.
    begin("one");
    place.out("rm --all --force --time 10");
    assert_eq!((asked(), place.out("ps --all --quiet")), (3, String::new()));
}
