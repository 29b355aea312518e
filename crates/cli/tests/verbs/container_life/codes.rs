//! Exit codes of `run` and `exec`: the program's own, or 125, 126 and 127. Needs root.

use std::process::{Command, Stdio};

use crate::container_life::containers::{Rm, start};
use crate::container_life::runs::{all_runtimes, place, wait_for};
use crate::{Place, Ran, add_programs, write};

/// Runs `exec` on a separate terminal, which gets both outputs.
fn on_terminal(place: &Place, arguments: &[&str]) -> Ran {
    let command = place.command(&[&["exec", "-t"], arguments].concat());
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|it| format!("'{}'", it.to_str().unwrap())).collect();
    let mut script = Command::new("script");
    script.args(["-q", "-e", "-c", &words.join(" "), "/dev/null"]).stdin(Stdio::null());
    script.env("PATH", std::env::join_paths(crate::search_path()).unwrap());
    Ran::from_output(&script.output().unwrap())
}

#[test]
fn exec_has_the_codes_of_run() {
    let Some(place) = place() else { return };
    let tree = place.path("tree");
    add_programs(&tree, &["/bin/mv"]);
    write(&tree.join("etc/private"), b"#!/bin/true\n", 0o700);
    write(&tree.join("etc/chained"), b"#!/etc/lost\n", 0o755);
    std::os::unix::fs::symlink("/proc/self/fd/1", tree.join("etc/stream")).unwrap();
    std::os::unix::fs::symlink("etc/round", tree.join("etc/round")).unwrap();
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    for runtime in all_runtimes() {
        let name = format!("codes-{runtime}");
        let _guard = Rm(&place, &name);
        let script = "mv /etc/long /etc/moved; echo up; while :; do sleep 0.02; done";
        start(&place, &["--name", &name, "--runtime", runtime], script);
        wait_for("it to run", || place.out(&format!("logs {name}")) == "up\n");
        let cases: [(&[&str], i32); 22] = [
            (&["true"], 0),
            (&["sh", "-c", "exit 1"], 1),
            (&["sh", "-c", "exit 125"], 125),
            (&["sh", "-c", "exit 126"], 126),
            (&["sh", "-c", "exit 127"], 127),
            (&["sh", "-c", "exit 255"], 255),
            (&["sh", "-c", "kill -KILL $$"], 137),
            (&["no-such-program"], 127),
            (&["/no/such"], 127),
            (&["./no-such"], 127),
            (&["/etc/long"], 127),
            (&["/etc/lost"], 127),
            (&["/etc/chained"], 127),
            (&["/etc/short"], 126),
            (&["/etc"], 126),
            (&["/etc/moved"], 126),
            (&["/etc/garbage"], 126),
            (&["garbage"], 126),
            (&["/etc/private"], 126),
            (&["/etc/round"], 127),
            (&["-w", "/no/such/directory", "true"], 125),
            (&["-w", "/etc/short", "true"], 125),
        ];
        for (arguments, code) in cases {
            if runtime == "runsc" && arguments.contains(&"/etc/short") && arguments.len() > 1 {
                // gVisor starts programs even if their path leads through a file.
                continue;
            }
            let (before, command) = match arguments {
                ["-w", directory, command @ ..] => (vec!["-w", directory], command),
                command => (vec![], command),
            };
            let user = if command == ["/etc/private"] { "5:6" } else { "0" };
            let path = "PATH=/bin:/usr/bin:/etc";
            let all = [&["-u", user, "-e", path], &before[..], &[&name], command].concat();
            let ran = place.run_each(&[&["exec"], &all[..]].concat());
            assert_eq!(ran.code, Some(code), "{runtime} {arguments:?}: {}", ran.err);
            let is_own = ["true", "sh"].contains(&command[0]) && before.is_empty();
            assert_eq!(ran.err.is_empty(), is_own, "{runtime} {arguments:?}: {}", ran.err);
            let ran = on_terminal(&place, &all);
            assert_eq!(ran.code, Some(code), "{runtime} -t {arguments:?}: {}", ran.out);
        }
        // Symlinks are resolved inside the container, so no program of the host is executed.
        let ran = place.run(&format!("exec {name} /etc/stream"));
        assert!(matches!(ran.code, Some(125..=127)), "{runtime}: {ran:?}");
        let folder = place.path("store/containers").join(&name);
        let names = std::fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name());
        let left: Vec<_> = names.filter(|it| it.to_str().unwrap().starts_with("exec-")).collect();
        assert!(left.is_empty(), "{left:?}");
        place.out(&format!("stop --time 0 {name}"));
        let ran = place.run(&format!("exec {name} true"));
        assert_eq!(ran.code, Some(125), "{}", ran.err);
    }
}

#[test]
fn what_the_kernel_refuses_last_is_not_executable() {
    let Some(place) = place() else { return };
    let tree = place.path("tree");
    let mut headers = std::fs::read("/bin/true").unwrap();
    // Offset of the program headers. Source: elf(5), `e_phoff`.
    headers[32..40].copy_from_slice(&[0xff; 8]);
    write(&tree.join("etc/headers"), &headers, 0o755);
    write(&tree.join("etc/itself"), b"#!/etc/itself\n", 0o755);
    write(&tree.join("etc/directory"), b"#!/etc\n", 0o755);
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    for runtime in all_runtimes() {
        for program in ["/etc/headers", "/etc/itself", "/etc/directory"] {
            let ran = place.run(&format!("run -u 0 --runtime {runtime} a {program}"));
            assert_eq!(ran.code, Some(126), "{runtime} {program}: {}", ran.err);
        }
    }
}

#[test]
fn names_that_never_come_are_not_waited_for() {
    let Some(place) = place() else { return };
    add_programs(&place.path("tree"), &["/bin/rm", "/usr/bin/mkfifo"]);
    place.out(&format!("import --quiet dir:{} a", place.path("tree").display()));
    for runtime in all_runtimes() {
        let name = format!("names-{runtime}");
        let _guard = Rm(&place, &name);
        let script =
            "rm -f /etc/passwd; mkfifo /etc/passwd && echo up; while :; do sleep 0.02; done";
        start(&place, &["--name", &name, "--runtime", runtime], script);
        wait_for("it to run", || place.out(&format!("logs {name}")) == "up\n");
        let ran = place.run(&format!("exec {name} true"));
        if runtime == "runc" {
            assert_eq!(ran.code, Some(125), "{runtime}: {}", ran.err);
            assert!(ran.err.contains("etc/passwd"), "{}", ran.err);
        } else {
            assert_eq!(ran.code, Some(0), "{runtime}: {}", ran.err);
        }
    }
}
