//! Process state that a program inherits from its caller, and data of a command that others can see. Needs root.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::container_life::at_rest::monitor;
use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};
use crate::{Place, Ran};

/// Returns the verb as started by another program: `before` is that program's command line up to Quire's.
fn by(place: &Place, before: &[&str], arguments: &[&str]) -> Command {
    let quire = place.command(arguments);
    let mut command = Command::new(before[0]);
    command.args(&before[1..]).arg(quire.get_program()).args(quire.get_args());
    for (name, value) in quire.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).current_dir(place.folder.path());
    command
}

/// Runs the verb by a shell that executes Quire as `"$@"`.
fn by_shell(place: &Place, script: &str, arguments: &[&str]) -> Ran {
    Ran::from_output(&by(place, &["sh", "-c", script, "sh"], arguments).output().unwrap())
}

/// Signals 32 and 33, which the C library reserves. Its posix_spawn(3) sets them to be ignored. Source: nptl(7).
const OF_THE_LIBRARY: u64 = 0b11 << 31;

/// Returns a mask of signals from a process's status, without those of the C library. Source: proc_pid_status(5).
fn mask(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|it| it.strip_prefix(name)).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() & !OF_THE_LIBRARY
}

/// Perl's `$SIG{CHLD} = 'IGNORE'`, C daemons and others ignore or block signals, and exec(2) preserves that.
/// Containers begin with default actions, as in podman and Docker. Source: signal(7).
#[test]
fn signals_that_the_caller_ignores_or_blocks_change_nothing() {
    let Some(place) = place() else { return };
    let ignored = "--ignore-signal=CHLD,TERM,HUP,INT,QUIT,USR1,XFSZ,ALRM,TTOU";
    let blocked = "--block-signal=CHLD,TERM,HUP,USR2,ALRM";
    for runtime in all_runtimes() {
        for how in [[ignored, "--"], [blocked, "--"], [ignored, blocked]] {
            let before = [&["timeout", "-s", "KILL", "60", "env"], &how[..]].concat();
            let call = |arguments: &[&str]| {
                Ran::from_output(&by(&place, &before, arguments).output().unwrap())
            };
            let run = ["run", "--runtime", runtime, "-u", "0"];
            let script = "cat /proc/self/status
                for s in TERM HUP ALRM; do sh -c \"kill -$s \\$\\$\"; echo code $?; done; exit 3";
            let ran = call(&[&run[..], &["--rm", "a", "--", "sh", "-c", script]].concat());
            assert_eq!(ran.code, Some(3), "{runtime} {how:?}: {}", ran.err);
            let codes: Vec<_> = ran.out.lines().filter_map(|it| it.strip_prefix("code ")).collect();
            assert_eq!(codes, ["143", "129", "142"], "{runtime} {how:?}: {}", ran.err);
            // gVisor's kernel does not show the masks.
            if runtime != "runsc" {
                let masks = ["SigBlk:", "SigIgn:"].map(|name| mask(&ran.out, name));
                assert_eq!(masks, [0, 0], "{runtime} {how:?}");
            }
            let name = format!("ignored-{runtime}");
            let _guard = Rm(&place, &name);
            let ran = call(&[&run[..], &["-d", "--name", &name, "a", "sleep", "60"]].concat());
            assert_eq!(ran.code, Some(0), "{runtime} {how:?}: {}", ran.err);
            let ran = call(&["exec", &name, "sh", "-c", "exit 4"]);
            assert_eq!(ran.code, Some(4), "{runtime} {how:?}: {}", ran.err);
            let ran = call(&["rm", "--force", &name]);
            assert_eq!(ran.code, Some(0), "{runtime} {how:?}: {}", ran.err);
        }
    }
}

/// Such callers are nohup(1), and shells without job control that start background jobs (POSIX, "Asynchronous
/// Lists").
#[test]
fn what_survives_the_callers_end_survives_here_too() {
    let Some(place) = place() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let script = "echo ready; read end; exit 5";
    let arguments = ["run", "--rm", "--runtime", runtime, "a", "--", "sh", "-c", script];
    let mut command = by(&place, &["env", "--ignore-signal=HUP,INT,QUIT"], &arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 6];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
    for signal in [Signal::HUP, Signal::INT, Signal::QUIT] {
        kill_process(Pid::from_child(&child), signal).unwrap();
    }
    drop(child.stdin.take());
    assert_eq!(child.wait().unwrap().code(), Some(5));
}

#[test]
fn limits_of_the_caller_are_those_of_its_containers() {
    let Some(place) = place() else { return };
    place.out("run --quiet a true");
    // Without CAP_SYS_RESOURCE, a process cannot raise a hard limit. Source: capabilities(7).
    let may_raise =
        mask(&fs::read_to_string("/proc/self/status").unwrap(), "CapEff:") & 1 << 24 != 0;
    for runtime in runtimes() {
        let run = ["run", "--quiet", "--runtime", runtime, "a", "sh", "-c"];
        let ask = |limit: &str, question: &str| {
            let ran = by_shell(
                &place,
                &format!("{limit}; exec \"$@\""),
                &[&run[..], &[question]].concat(),
            );
            assert_eq!(ran.code, Some(0), "{runtime} {limit}: {}", ran.err);
            ran.out
        };
        let both = "ulimit -Ss; ulimit -Hs";
        let own = ask("true", "ulimit -Hs");
        assert_eq!(ask("ulimit -Ss 64", both), format!("64\n{own}"), "{runtime}");
        assert_eq!(ask("ulimit -Sn 200", "ulimit -Sn"), "200\n", "{runtime}");
        if may_raise {
            assert_eq!(ask("ulimit -s 64", both), "64\n64\n", "{runtime}");
        }
        // Limits of the command line take precedence.
        let ask = ["run", "--quiet", "--runtime", runtime, "--ulimit", "stack=131072:262144"];
        let ran = by_shell(
            &place,
            "ulimit -Ss 64; exec \"$@\"",
            &[&ask[..], &["a", "sh", "-c", both]].concat(),
        );
        assert_eq!(ran.out, "128\n256\n", "{runtime}: {}", ran.err);
        // As in docker and podman, the umask does not depend on the caller's.
        let ran = by_shell(&place, "umask 077; exec \"$@\"", &[&run[..], &["umask"]].concat());
        assert_eq!(ran.out, "0022\n", "{runtime}: {}", ran.err);
        // A program that is started later has the same limits as the first program.
        let name = format!("limits-{runtime}");
        let _guard = Rm(&place, &name);
        let detached =
            ["run", "--quiet", "-d", "--runtime", runtime, "--name", &name, "a", "sleep", "60"];
        assert_eq!(by_shell(&place, "ulimit -Ss 64; exec \"$@\"", &detached).code, Some(0));
        let exec = ["exec", name.as_str(), "sh", "-c", both];
        assert_eq!(place.run_each(&exec).out, format!("64\n{own}"), "{runtime}");
    }
}

/// A file that exceeds the limit causes the signal SIGXFSZ, unless the program ignores it. Source: setrlimit(2).
#[test]
fn limits_that_are_too_low_are_errors() {
    let Some(place) = place() else { return };
    let run = ["run", "--quiet", "--writable", "self", "a", "true"];
    let ran = by_shell(&place, "ulimit -f 64; exec \"$@\"", &run);
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains("File too large"), "{}", ran.err);
    let weak = "exec setpriv --bounding-set=-sys_resource --inh-caps=-sys_resource \"$@\"";
    let ran = by_shell(&place, &format!("ulimit -s 256; {weak}"), &["images"]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("the stack is limited to 256 KiB"), "{}", ran.err);
}

#[test]
fn closed_streams_are_empty_ones() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        for closed in ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"] {
            let script = format!("exec \"$@\" {closed}");
            let run = [
                "run",
                "--quiet",
                "--runtime",
                runtime,
                "a",
                "sh",
                "-c",
                "cat; echo out; echo err >&2; exit 6",
            ];
            assert_eq!(by_shell(&place, &script, &run).code, Some(6), "{runtime} {closed}");
            let name = format!("closed-{runtime}");
            let _guard = Rm(&place, &name);
            let run =
                ["run", "--quiet", "-d", "--runtime", runtime, "--name", &name, "a", "sleep", "60"];
            assert_eq!(by_shell(&place, &script, &run).code, Some(0), "{runtime} {closed}");
            place.out(&format!("rm -f {name}"));
        }
    }
}

/// A script that is run again waits for its lock, which flock(1) holds as long as a process has the file open.
#[test]
fn files_that_the_caller_has_open_are_not_kept_open() {
    let Some(place) = place() else { return };
    let name = "keeps-none";
    let _guard = Rm(&place, name);
    let run = ["run", "--quiet", "--detach", "--name", name, "a", "sleep", "1000"];
    let ran = by_shell(&place, "exec 9>of-caller && \"$@\"", &run);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let files = fs::read_dir(monitor(&place, name).join("fd")).unwrap();
    let mut files = files.map(|it| fs::read_link(it.unwrap().path()).unwrap_or_default());
    assert!(!files.any(|it| it.ends_with("of-caller")));
}

/// Returns processes of a program, or of any program, whose `file` below `/proc` contains this text.
pub(crate) fn that_show(file: &str, text: &str, program: Option<&Path>) -> Vec<String> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter(|it| it.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
    let of_program = pids.filter(|it| {
        program.is_none_or(|program| {
            fs::read_link(it.path().join("exe")).is_ok_and(|it| it == program)
        })
    });
    let shows = of_program.filter_map(|it| {
        let found = String::from_utf8_lossy(&fs::read(it.path().join(file)).ok()?).into_owned();
        found.contains(text).then(|| format!("{}: {found:?}", it.path().display()))
    });
    shows.collect()
}

/// Every user of the host can read the command line of a process. Source: proc_pid_cmdline(5).
#[test]
fn nobody_reads_secrets_in_the_list_of_processes() {
    let Some(place) = place() else { return };
    let quire = fs::canonicalize(env!("CARGO_BIN_EXE_quire")).unwrap();
    for runtime in runtimes() {
        let name = format!("secret-{runtime}");
        let secret = format!("rosebud{}{runtime}", std::process::id());
        let assigned = format!("PW={secret}");
        let _guard = Rm(&place, &name);
        let options = ["--name", &name, "--runtime", runtime, "-e", &assigned, "-e", "OF_CALLER"];
        let run = [&["run", "--quiet", "-d"], &options[..], &["a", "sleep", "1000"]].concat();
        let ran =
            Ran::from_output(&place.command(&run).env("OF_CALLER", &secret).output().unwrap());
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let exec = ["exec", "-e", &assigned, &name, "sh", "-c", "echo ready; read end; echo $PW"];
        let mut exec = place.command(&exec);
        exec.env("OF_CALLER", &secret).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut exec = exec.spawn().unwrap();
        let mut said = [0; 6];
        std::io::Read::read_exact(exec.stdout.as_mut().unwrap(), &mut said).unwrap();
        assert_eq!(that_show("cmdline", &secret, None), Vec::<String>::new(), "{runtime}");
        assert_eq!(that_show("environ", &secret, Some(&quire)), Vec::<String>::new(), "{runtime}");
        // The command lines have the container's name, by which an administrator finds them, and little else.
        let monitor = ps(&place, &name).unwrap()["pid"].as_i64().unwrap();
        assert!(monitor > 0);
        let shown = that_show("cmdline", &name, Some(&quire));
        assert_eq!(shown.len(), 2, "{runtime}: {shown:?}");
        for words in [format!("quire\\0run\\0{name}\\0"), format!("quire\\0exec\\0{name}\\0")] {
            assert!(shown.iter().any(|it| it.contains(&words)), "{runtime}: {shown:?}");
        }
        drop(exec.stdin.take());
        let output = exec.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{secret}\n"));
        assert_eq!(
            place.run_each(&["exec", &name, "sh", "-c", "echo $PW $OF_CALLER"]).out,
            format!("{secret} {secret}\n")
        );
    }
}

/// The monitors of new containers are copies of the process that has the hook.
#[test]
fn nobody_reads_secrets_in_the_hook_of_a_fork() {
    let Some(place) = place() else { return };
    let secret = format!("hook{}secret", std::process::id());
    let (parent, child) = ("hooked", "hooked-child");
    let (_guard, _other) = (Rm(&place, parent), Rm(&place, child));
    start(&place, &["--name", parent, "--writable", "dir"], "sleep 1000");
    let hook = format!(": {secret}");
    let ran = place.run_each(&["fork", "--name", child, "--hook", &hook, parent]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    assert_eq!(that_show("cmdline", &secret, None), Vec::<String>::new());
    // This also shows that the list has the child's monitor.
    assert!(monitor(&place, child).exists());
}

/// Source: podman-run(1), `--env-file`.
#[test]
fn variables_come_from_files() {
    let Some(place) = place() else { return };
    fs::write(place.path("env"), "# secrets\n\n  A=of file\nB='quoted' # too\nOWN\nNONE\n")
        .unwrap();
    fs::write(place.path("more"), "B=2\n").unwrap();
    fs::write(place.path("bad"), "A=1\n=hush\n").unwrap();
    let script = "echo \"$A|$B|$OWN|${NONE-none}\"";
    let show = |arguments: &[&str]| {
        let mut command = place.command(arguments);
        Ran::from_output(&command.env("OWN", "caller's").output().unwrap())
    };
    let ran = show(&["run", "--quiet", "--env-file", "env", "a", "sh", "-c", script]);
    assert_eq!(ran.out, "of file|'quoted' # too|caller's|none\n", "{}", ran.err);
    let both = ["--env-file", "env", "--env-file", "more", "-e", "A=mine"];
    let ran = show(&[&["run", "--quiet"], &both[..], &["a", "sh", "-c", script]].concat());
    assert_eq!(ran.out, "mine|2|caller's|none\n", "{}", ran.err);
    let _guard = Rm(&place, "files");
    start(&place, &["--name", "files"], "sleep 60");
    let ran = show(&[&["exec"], &both[..], &["files", "sh", "-c", script]].concat());
    assert_eq!(ran.out, "mine|2|caller's|none\n", "{}", ran.err);
    fs::write(place.path("zero"), "A=1\0B=hush\n").unwrap();
    fs::File::create(place.path("large")).unwrap().set_len(1 << 40).unwrap();
    for (file, text) in [
        ("bad", "line 2 has no name"),
        ("absent", "--env-file absent"),
        ("zero", "--env-file zero: line 1 has a NUL byte"),
        ("large", "--env-file large: it is larger than 4 MiB"),
    ] {
        let ran = show(&["run", "--quiet", "--env-file", file, "a", "true"]);
        assert_eq!(ran.code, Some(125), "{file}: {}", ran.err);
        assert!(ran.err.contains(text) && !ran.err.contains("hush"), "{file}: {}", ran.err);
    }
    let ran = show(&["run", "--quiet", "-e", "=hush", "a", "true"]);
    assert_eq!(ran.code, Some(125), "{}", ran.err);
    assert!(ran.err.contains("no name before the =") && !ran.err.contains("hush"), "{}", ran.err);
    fs::create_dir(place.path("bundle")).unwrap();
    place.out("bundle --quiet --env-file more a bundle -- true");
    let config = fs::read_to_string(place.path("bundle/config.json")).unwrap();
    place.out("umount bundle/rootfs");
    assert!(config.contains("\"B=2\""), "{config}");
}

/// Opening a FIFO waits for a writer (fifo(7)), and SIGTERM ends a process that does not handle it (signal(7)).
#[test]
fn who_waits_for_a_file_of_variables_is_ended_by_a_signal() {
    let Some(place) = place() else { return };
    let made = Command::new("mkfifo").arg(place.path("fifo")).status().unwrap();
    assert!(made.success());
    let _guard = Rm(&place, "piped");
    start(&place, &["--name", "piped"], "sleep 1000");
    for words in [
        &["run", "--quiet", "--env-file", "fifo", "a", "true"][..],
        &["exec", "--env-file", "fifo", "piped", "true"],
        &["run", "--quiet", "--security-opt", "seccomp=fifo", "a", "true"],
    ] {
        for signal in ["TERM", "INT"] {
            let before = ["timeout", "-s", signal, "-k", "10", "2"];
            let ran = Ran::from_output(&by(&place, &before, words).output().unwrap());
            // timeout(1) returns 124 if its signal ended the command, and 137 if only KILL did.
            assert_eq!(ran.code, Some(124), "{words:?} {signal}: {}", ran.err);
        }
    }
}

/// Opening a FIFO waits for a writer (fifo(7)).
#[test]
fn files_of_options_are_bounded_and_no_pipes() {
    let Some(place) = place() else { return };
    for fifo in ["fifo", "settings.toml"] {
        let made = Command::new("mkfifo").arg(place.path(fifo)).status().unwrap();
        assert!(made.success());
    }
    fs::File::create(place.path("large")).unwrap().set_len(1 << 40).unwrap();
    let image = "127.0.0.1:1/none:1";
    let pipe = "it is a FIFO, which can be read only once: use a file";
    for (words, code, why) in [
        (&["run", "--security-opt", "seccomp=large", "a", "true"][..], 125, "larger than 4 MiB"),
        (&["run", "--writable", "dir=fifo", "a", "true"], 125, "\"fifo\" is not a directory"),
        (&["pull", "--authfile", "fifo", image], 2, pipe),
        (&["pull", "--authfile", "large", image], 2, "it has more than 4194304 bytes"),
        (&["run", "--authfile", "fifo", "--pull", "always", image, "true"], 125, pipe),
        (&["serve", "--lazy", "--config", "settings.toml"], 2, pipe),
    ] {
        let before = ["timeout", "-k", "10", "60"];
        let ran = Ran::from_output(&by(&place, &before, words).output().unwrap());
        assert_eq!(ran.code, Some(code), "{words:?}: {}", ran.err);
        assert!(ran.err.contains(why), "{words:?}: {}", ran.err);
    }
}

/// timeout(1) sends its signal to the command and then to its group, so the command gets it twice.
#[test]
fn one_request_that_arrives_twice_is_one() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let script = "trap 'exit 8' TERM; while :; do sleep 0.05; done";
        let run = ["run", "--network", "none", "--runtime", runtime, "a", "sh", "-c", script];
        let ran = Ran::from_output(&by(&place, &["timeout", "2"], &run).output().unwrap());
        assert_eq!((ran.code, ran.err.as_str()), (Some(124), ""), "{runtime}");
    }
}

/// As in podman, `rm --force` removes a container even if its runtime does not respond.
#[test]
fn a_container_whose_runtime_is_stuck_is_removed() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        for is_alone in [true, false] {
            let name = format!("stuck-{runtime}-{is_alone}");
            let script = "echo ready; while :; do sleep 0.05; done";
            let run = ["run", "--runtime", runtime, "--name", &name, "a", "sh", "-c", script];
            let mut child = place.command(&run).stdout(Stdio::piped()).spawn().unwrap();
            let mut said = [0; 6];
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
            let folder = place.path(&format!("store/containers/{name}"));
            let lock = fs::File::open(folder.join("lock")).unwrap();
            let holders = kernel::process::holders(std::os::fd::AsFd::as_fd(&lock)).unwrap();
            let quire = Pid::from_child(&child);
            let mut stopped: Vec<_> =
                holders.iter().map(|it| it.process.pid()).filter(|it| *it != quire).collect();
            assert_eq!(stopped.len(), 1, "{runtime}: {holders:?}");
            if is_alone {
                child.kill().unwrap();
            } else {
                stopped.push(quire);
            }
            for pid in &stopped {
                kill_process(*pid, Signal::STOP).unwrap();
            }
            place.out(&format!("rm --force {name}"));
            child.wait().unwrap();
            assert!(!folder.exists(), "{runtime}");
            wait_for("nothing to be left", || {
                crate::container_life::runs::processes_with(&name).is_empty()
            });
            assert_eq!(
                crate::container_life::runs::cgroups(&name),
                Vec::<String>::new(),
                "{runtime}"
            );
        }
    }
}

/// A wrapper of the runtime that hangs in these calls, as if it waited for a dead disk. A file with the same name
/// and `.called` shows that it hangs.
fn hanging(place: &Place, runtime: &str, calls: &str) -> String {
    let real = crate::program(runtime).unwrap();
    let script = format!(
        "#!/bin/sh\nfor word; do case $word in {calls}) : >\"$0.called\"; exec sleep 1000;; esac; done\nexec {} \"$@\"\n",
        real.display()
    );
    let folder = place.path(&format!("hanging-{}", calls.replace('|', "-")));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(runtime);
    testing::script(&path, &script);
    path.display().to_string()
}

/// As in podman, `rm --force` removes a container even if its runtime does not respond.
#[test]
fn a_container_whose_runtime_hangs_when_it_is_called_is_removed() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        for (calls, has_monitor) in [
            ("kill", true),
            ("kill", false),
            ("delete", true),
            ("kill|delete|state", true),
            ("kill|delete|state", false),
        ] {
            let what = format!("{runtime} {calls} {has_monitor}");
            let name = format!("hangs-{runtime}-{}-{has_monitor}", calls.len());
            let path = hanging(&place, runtime, calls);
            let _guard = Rm(&place, &name);
            start(&place, &["--name", &name, "--runtime", &path], "sleep 1000");
            if !has_monitor {
                let state = place.path(&format!("store/containers/{name}/state.json"));
                let state: serde_json::Value =
                    serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
                let monitor = i32::try_from(state["monitor"].as_i64().unwrap()).unwrap();
                kill_process(Pid::from_raw(monitor).unwrap(), Signal::KILL).unwrap();
                wait_for("its end", || ps(&place, &name).unwrap()["status"] == "unwatched");
            }
            let ran = place.run_each(&["rm", "--force", &name]);
            assert_eq!(ran.code, Some(0), "{what}: {}", ran.err);
            assert!(!place.path(&format!("store/containers/{name}")).exists(), "{what}");
            wait_for("nothing to be left", || {
                crate::container_life::runs::processes_with(&name).is_empty()
            });
            assert_eq!(crate::container_life::runs::cgroups(&name), Vec::<String>::new(), "{what}");
        }
    }
}

#[test]
fn what_a_runtime_that_hangs_does_not_do_is_an_error() {
    let Some(place) = place() else { return };
    let Some(runtime) = runtimes().next() else { return };
    let path = hanging(&place, runtime, "kill|pause");
    let _guard = Rm(&place, "late");
    start(&place, &["--name", "late", "--runtime", &path], "sleep 1000");
    does_not_finish(&place, &["stop", "late"], &path, "kill");
    // The kernel freezes the container without its runtime.
    let ran = place.run_each(&["diff", "late"]);
    assert!(matches!(ran.code, Some(0 | 1)), "{}", ran.err);
    // gVisor's programs are no processes of the host, so only gVisor can pause them.
    if crate::program("runsc").is_some() {
        let path = hanging(&place, "runsc", "pause");
        let _guard = Rm(&place, "inner");
        start(&place, &["--name", "inner", "--runtime", &path], "sleep 1000");
        does_not_finish(&place, &["diff", "inner"], &path, "pause");
    }
}

#[track_caller]
fn does_not_finish(place: &Place, words: &[&str], path: &str, call: &str) {
    let ran = place.run_each(words);
    let code = if words[0] == "diff" { 2 } else { 125 };
    assert_eq!(ran.code, Some(code), "{words:?}: {}", ran.err);
    let why = format!("{path} did not finish its call `{call}` within 10 seconds");
    assert!(ran.err.contains(&why), "{words:?}: {}", ran.err);
}

/// Returns the cgroups of a container that are frozen or being frozen. Source: Linux
/// Documentation/admin-guide/cgroup-v2.rst, `cgroup.freeze`, and cgroup-v1/freezer-subsystem.rst.
pub(super) fn frozen(name: &str) -> Vec<String> {
    let has = |path: String, texts: &[&str]| {
        fs::read_to_string(path).is_ok_and(|it| texts.contains(&it.trim()))
    };
    let is_frozen = |it: &String| {
        has(format!("{it}/cgroup.freeze"), &["1"])
            || has(format!("{it}/freezer.state"), &["FROZEN", "FREEZING"])
    };
    crate::container_life::runs::cgroups(name).into_iter().filter(is_frozen).collect()
}

#[test]
fn a_container_goes_on_whatever_its_runtime_does() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("thaws-{runtime}");
        let path = hanging(&place, runtime, "resume");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--runtime", &path], "sleep 1000");
        let ran = place.run_each(&["diff", &name]);
        assert!(matches!(ran.code, Some(0 | 1)), "{runtime}: {}", ran.err);
        assert_eq!(frozen(&name), Vec::<String>::new(), "{runtime}");
        assert_eq!(place.out(&format!("exec {name} sh -c echo")), "\n", "{runtime}");
    }
}

/// Only gVisor can pause its programs, so Quire waits for it. After an interrupt, the container goes on.
#[test]
fn an_interrupt_ends_a_diff_and_the_container_goes_on() {
    let Some(place) = place() else { return };
    if crate::program("runsc").is_none() {
        return;
    }
    let name = "interrupted";
    let path = hanging(&place, "runsc", "pause");
    let _guard = Rm(&place, name);
    start(&place, &["--name", name, "--runtime", &path], "sleep 1000");
    let mut child = place.command(&["diff", name]).stderr(Stdio::null()).spawn().unwrap();
    wait_for("the call of the runtime", || Path::new(&format!("{path}.called")).exists());
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2));
    assert_eq!(place.out(&format!("exec {name} sh -c echo")), "\n");
}

#[test]
fn a_container_without_a_monitor_is_listed() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("alone-{runtime}");
        let _guard = Rm(&place, &name);
        start(&place, &["--name", &name, "--runtime", runtime], "sleep 1000");
        let state = fs::read(place.path(&format!("store/containers/{name}/state.json"))).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        let monitor = Pid::from_raw(i32::try_from(state["monitor"].as_i64().unwrap()).unwrap());
        kill_process(monitor.unwrap(), Signal::KILL).unwrap();
        wait_for("its end", || ps(&place, &name).unwrap()["status"] == "unwatched");
        assert!(place.out("ps").contains("unwatched"), "{runtime}");
        assert_eq!(ps(&place, &name).unwrap()["pid"], state["pid"], "{runtime}");
        assert_eq!(place.out(&format!("exec {name} sh -c echo")), "\n", "{runtime}");
        let ran = place.run(&format!("rm {name}"));
        assert!(ran.code == Some(2) && ran.err.contains("is running"), "{runtime}: {}", ran.err);
        place.out(&format!("rm --force {name}"));
        wait_for("its program's end", || crate::container_life::runs::cgroups(&name).is_empty());
        assert_eq!(ps(&place, &name), None, "{runtime}");
    }
}
