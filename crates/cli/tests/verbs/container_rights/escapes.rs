//! Attempts to escape from a container through its runtime. Needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{all_runtimes, place, runtimes, wait_for};
use crate::{Place, Ran, program, write};

/// A wrapper of a runtime that notes its open files and then executes the real runtime.
fn listing(place: &Place, runtime: &str) -> PathBuf {
    let folder = place.path(&format!("listing-{runtime}"));
    fs::create_dir(&folder).unwrap();
    let path = folder.join(runtime);
    let script = format!(
        // The shell itself opens only the script.
        "#!/bin/sh
        find /proc/$$/fd -type l -fprintf '{folder}/opened-'$$ '%Y:%l\\n'
        exec {real} \"$@\"\n",
        folder = folder.display(),
        real = program(runtime).unwrap().display(),
    );
    testing::script(&path, &script);
    path
}

/// Returns the files that the runtime's calls had open since the last look: types and paths.
fn opened(folder: &Path) -> String {
    let is_note = |path: &PathBuf| path.to_str().unwrap().contains("/opened-");
    let notes = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).filter(is_note);
    let take = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        text
    };
    notes.map(take).collect()
}

/// Runs a command line with open directories of the host that are not close-on-exec.
fn careless(place: &Place, arguments: &[&str]) -> Ran {
    let script = "exec \"$@\" 5</ 7<. 9</etc/passwd";
    let quire = place.command(arguments);
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(quire.get_program()).args(quire.get_args());
    for (name, value) in quire.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).current_dir(place.folder.path());
    Ran::from_output(&command.output().unwrap())
}

#[test]
fn a_runtime_has_no_descriptor_that_leads_to_the_host() {
    let Some(place) = place() else { return };
    fs::create_dir(place.path("kept")).unwrap();
    let modes: [&[&str]; 7] = [
        &[],
        &["--read-only"],
        &["--writable", "memory"],
        &["--writable", "self"],
        &["--writable", "dir=kept"],
        &["--userns", "0:700000:65536"],
        &["--detach", "--name", "kept"],
    ];
    for runtime in all_runtimes() {
        let path = listing(&place, runtime);
        let folder = path.parent().unwrap().to_owned();
        let path = path.to_str().unwrap();
        for mode in modes {
            if runtime == "runsc" && mode.contains(&"--userns") {
                continue;
            }
            let _guard = Rm(&place, "kept");
            let script = if mode.contains(&"--detach") { "sleep 60" } else { "exit 3" };
            let before = ["run", "--quiet", "--runtime", path, "-u", "0"];
            let ran = careless(&place, &[&before, mode, &["a", "--", "sh", "-c", script]].concat());
            let code = if mode.contains(&"--detach") { 0 } else { 3 };
            assert_eq!(ran.code, Some(code), "{runtime} {mode:?}: {}", ran.err);
            // The first call starts the container. The other calls remove it, or belong to `exec`.
            let mut calls = 1;
            if mode.contains(&"--detach") {
                let ran = careless(&place, &["exec", "kept", "sh", "-c", "exit 4"]);
                assert_eq!(ran.code, Some(4), "{runtime}: {}", ran.err);
                place.out("stop --time 0 kept");
                calls = 2;
            }
            let text = opened(&folder);
            let (locks, others): (Vec<_>, Vec<_>) = text
                .lines()
                .map(|line| line.split_once(':').unwrap())
                .filter(|(_, at)| *at != path)
                .partition(|(_, at)| at.contains("/containers/") && at.ends_with("/lock"));
            assert_eq!(locks.len(), 1, "{runtime} {mode:?}: {text}");
            assert_eq!(locks[0].0, "f", "{runtime} {mode:?}: {text}");
            // The runtime has only its standard input, output and error open in each call.
            assert!(
                others.len() >= 3 * calls && others.len() % 3 == 0,
                "{runtime} {mode:?}: {text}"
            );
            let is_stream = |(kind, at): &(&str, &str)| {
                *kind == "p" || *at == "/dev/null" || (*kind == "f" && at.ends_with("/log"))
            };
            assert!(others.iter().all(is_stream), "{runtime} {mode:?}: {text}");
        }
    }
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}

/// Contents of the file that no container may read. The file is in a parent directory of the store, and represents a
/// file of the host.
const SECRET: &str = "the host's secret";

/// A command that reads the secret from any directory between the host's root and the container's folder.
fn reading(place: &Place) -> String {
    let secret = place.path("secret");
    fs::write(&secret, SECRET).unwrap();
    let ways: Vec<_> = (1..12).map(|it| format!("{}{}", "../".repeat(it), "secret")).collect();
    format!("cat secret {} ../../../../../../..{}", ways.join(" "), secret.display())
}

#[test]
fn no_working_directory_is_outside() {
    let Some(place) = place() else { return };
    let script = reading(&place);
    let tree = place.path("tree");
    for number in 0..40 {
        let link = tree.join(format!("escape{number}"));
        std::os::unix::fs::symlink(format!("/proc/self/fd/{number}"), link).unwrap();
    }
    std::os::unix::fs::symlink("/escape5", tree.join("chain")).unwrap();
    let archive = place.path("linked.tar");
    let mut tar = Command::new("tar");
    assert!(tar.arg("-cf").arg(archive).arg("-C").arg(&tree).arg(".").status().unwrap().success());
    place.out("import --quiet tar:linked.tar linked");
    let refused = |arguments: &[&str], what: &str| {
        let ran = careless(&place, arguments);
        assert!(!ran.out.contains(SECRET), "{what}: got out");
        assert_eq!(ran.code, Some(125), "{what}: {} {}", ran.out, ran.err);
        assert!(ran.err.contains("/proc"), "{what}: {}", ran.err);
    };
    let names = (0..40).flat_map(|it| [format!("/proc/self/fd/{it}"), format!("/escape{it}")]);
    let others = ["/chain", "/proc/self/cwd", "/proc/self/root", "/dev/fd/3"].map(str::to_owned);
    let paths: Vec<_> = names.chain(others).collect();
    for (runtime, path) in runtimes().flat_map(|it| paths.iter().map(move |path| (it, path))) {
        let command = ["run", "--quiet", "--runtime", runtime, "-w", path, "linked", "--"];
        refused(&[&command[..], &["sh", "-c", &script]].concat(), path);
    }
    for runtime in runtimes() {
        let _guard = Rm(&place, "base");
        start(&place, &["--name", "base", "--runtime", runtime], "while :; do sleep 1; done");
        for path in &paths {
            let ran = careless(&place, &["exec", "-w", path, "base", "sh", "-c", &script]);
            assert!(!ran.out.contains(SECRET), "exec in {path} got out");
            assert_eq!(ran.code, Some(125), "{path}: {} {}", ran.out, ran.err);
        }
    }
    // The test does the same with images, which determine the working directory.
    let _guard = Rm(&place, "step");
    place.out("run --quiet -d --name step linked -- true");
    place.out("wait step");
    let names: Vec<_> = runtimes().collect();
    for (at, path) in paths.iter().enumerate() {
        let change = format!("WORKDIR {path}");
        let ran = place.run_each(&["commit", "--quiet", "step", "says", "--change", &change]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        let runtime = names[at % names.len()];
        let mode = ["--writable=self", "--read-only", "--writable=memory"][at % 3];
        let command =
            ["run", "--quiet", "--runtime", runtime, mode, "says", "--", "sh", "-c", &script];
        refused(&command, path);
    }
}

#[test]
fn a_working_directory_is_made_where_something_can_be_written() {
    let Some(place) = place() else { return };
    let host = place.path("host");
    fs::create_dir_all(host.join("inner")).unwrap();
    let volumes = [":/etc/deep", ":/tmp:ro"].map(|it| format!("{}{it}", host.display()));
    for runtime in all_runtimes() {
        for (options, path, expect) in [
            (&[][..], "/new/deep", Ok(())),
            (&["-u", "5:6"], "/new", Ok(())),
            (&[], "/etc/deep/inner", Ok(())),
            (&["--read-only"], "/etc/deep/made", Ok(())),
            (&["--read-only"], "/etc", Ok(())),
            (&["--read-only"], "/new/deep", Ok(())),
            (&[], "/tmp/new", Err("cannot be made in a read-only file system")),
            (&[], "/etc/short", Err("is not a directory")),
        ] {
            let before = ["run", "--quiet", "--runtime", runtime, "--volume", &volumes[0]];
            let after = ["--volume", &volumes[1], "-w", path, "a", "--", "sh", "-c", "pwd"];
            let ran = place.run_each(&[&before, options, &after].concat());
            match expect {
                Ok(()) => assert_eq!(ran.out, format!("{path}\n"), "{runtime} {path}: {}", ran.err),
                Err(expect) => {
                    assert_eq!(ran.code, Some(125), "{runtime} {path}: {}", ran.err);
                    assert!(ran.err.contains(expect), "{runtime} {path}: {}", ran.err);
                }
            }
        }
    }
    let _guard = Rm(&place, "other");
    start(&place, &["--name", "other"], "while :; do sleep 1; done");
    for (path, expect) in [
        ("/none", "the working directory \"/none\" does not exist in the container"),
        ("/etc/short", "is not a directory"),
        ("etc", "is not an absolute path"),
    ] {
        let ran = place.run_each(&["exec", "-w", path, "other", "true"]);
        assert_eq!(ran.code, Some(125), "{path}: {}", ran.err);
        assert!(ran.err.contains(expect), "{path}: {}", ran.err);
    }
}

#[test]
fn a_directory_is_no_stream_of_a_container() {
    let Some(place) = place() else { return };
    let _guard = Rm(&place, "other");
    start(&place, &["--name", "other"], "while :; do sleep 1; done");
    for arguments in [&["run", "--quiet", "a", "--", "true"][..], &["exec", "other", "true"]] {
        let mut command = place.command(arguments);
        command.stdin(fs::File::open("/").unwrap());
        let ran = Ran::from_output(&command.output().unwrap());
        assert_eq!(ran.code, Some(125), "{}", ran.err);
        assert!(ran.err.contains("standard input is a directory of the host"), "{}", ran.err);
    }
}

#[test]
fn a_command_may_lie_on_a_volume() {
    let Some(place) = place() else { return };
    let folder = place.path("probes");
    fs::create_dir(&folder).unwrap();
    testing::script(&place.path("probe"), "#!/bin/sh\necho found\n");
    testing::script(&folder.join("tool"), "#!/bin/sh\necho found\n");
    write(&folder.join("text"), b"", 0o644);
    let volumes = [
        format!("{}:/opt/probe:ro", place.path("probe").display()),
        format!("{}:/etc/bin", folder.display()),
    ];
    for runtime in all_runtimes() {
        for (command, code, out) in [
            ("/opt/probe", 0, "found\n"),
            ("/etc/bin/tool", 0, "found\n"),
            ("tool", 0, "found\n"),
            ("/etc/bin/text", 126, ""),
            ("/etc/bin/none", 127, ""),
            // The volume covers this path.
            ("/opt/probe/x", 127, ""),
        ] {
            let before = ["run", "--quiet", "--runtime", runtime, "-e", "PATH=/bin:/etc/bin"];
            let volumes = ["--volume", &volumes[0], "--volume", &volumes[1]];
            let ran = place.run_each(&[&before[..], &volumes, &["a", "--", command]].concat());
            assert_eq!((ran.code, &ran.out[..]), (Some(code), out), "{command}: {}", ran.err);
        }
    }
}

/// Decision 4: the lock of a container is held as long as Quire or its runtime lives.
#[test]
fn a_container_outlives_a_quire_that_is_killed() {
    let Some(place) = place() else { return };
    for runtime in runtimes() {
        let name = format!("orphan-{runtime}");
        let before =
            ["run", "--quiet", "--name", &name, "--runtime", runtime, "a", "--", "sh", "-c"];
        let mut quire = place.command(&before);
        let mut child = quire.arg("echo up; sleep 60").stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let out = child.stdout.take().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
        assert_eq!(line, "up\n");
        child.kill().unwrap();
        child.wait().unwrap();
        // Every command that writes to the store looks for dead containers.
        for _ in 0..3 {
            place.out("gc");
            assert!(place.path(&format!("store/containers/{name}")).exists(), "{runtime}");
            assert_eq!(
                crate::container_life::containers::ps(&place, &name).unwrap()["status"],
                "running"
            );
        }
        let folder = place.path(&format!("store/containers/{name}"));
        let found = crate::container_life::runs::processes_with(folder.to_str().unwrap());
        assert!(!found.is_empty(), "{runtime}: the runtime has ended");
        for pid in found {
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        wait_for("its end", || {
            place.out("gc");
            !place.path(&format!("store/containers/{name}")).exists()
        });
    }
    wait_for("nothing to be left", || crate::container_disk::writable::is_clean(&place));
}
