//! Standard streams that a caller shares with other programs. Needs root.

use std::process::{Command, Stdio};

use crate::Place;
use crate::container_life::runs::{place, runtimes};

/// Returns a command line of Quire, quoted for a shell.
fn words(place: &Place, runtime: &str, user: &str, script: &str) -> String {
    let arguments =
        ["run", "--quiet", "--runtime", runtime, "-u", user, "a", "--", "sh", "-c", script];
    let command = place.command(&arguments);
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|it| format!("'{}'", it.to_str().unwrap())).collect();
    words.join(" ")
}

fn path() -> std::ffi::OsString {
    std::env::join_paths(crate::search_path()).unwrap()
}

#[test]
fn what_a_program_leaves_of_a_file_is_for_the_next_one() {
    let Some(place) = place() else { return };
    let lines: Vec<_> = (0..2000).map(|it| format!("line {it}\n")).collect();
    std::fs::write(place.path("list"), lines.concat()).unwrap();
    // runc reads ahead for the program, as much as fits in a pipe.
    for runtime in runtimes().filter(|it| *it == "crun") {
        for user in ["0", "5:6"] {
            // The shell reads a line, and its container reads the next one.
            let inner = words(&place, runtime, user, "read -r line; echo \"inside $line\"");
            let script = format!(
                "for round in 1 2 3; do read -r line; echo \"outside $line\"; {inner} || exit 9; done < list"
            );
            let mut shell = Command::new("sh");
            shell.args(["-c", &script]).current_dir(place.folder.path()).env("PATH", path());
            let output = shell.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            let expect: String = (0..6)
                .map(|it| format!("{} line {it}\n", if it % 2 == 0 { "outside" } else { "inside" }))
                .collect();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(said, expect, "{runtime} {user}: {errors}");
        }
    }
}

#[test]
fn a_container_in_the_background_of_a_terminal_runs() {
    let Some(place) = place() else { return };
    if !testing::programs(&["script"]) {
        return;
    }
    for runtime in runtimes() {
        for user in ["0", "5:6"] {
            // If a background job reads the terminal, the kernel stops it. This job only writes.
            let inner = words(&place, runtime, user, "echo from the background");
            let text = format!(
                "set -m; rm -f log; {inner} > log & for i in $(seq 300); do grep -q background log && break; \
                 sleep 0.1; done; cat log; kill -KILL %1 2>&-"
            );
            let mut script = Command::new("script");
            script.args(["-qc", &text, "/dev/null"]).stdin(Stdio::piped()).env("SHELL", "/bin/sh");
            let script = script.current_dir(place.folder.path()).env("PATH", path());
            let mut child = script.stdout(Stdio::piped()).spawn().unwrap();
            // Standard input stays open while the script runs, like a person's terminal.
            let input = child.stdin.take();
            let output = child.wait_with_output().unwrap();
            drop(input);
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("from the background"), "{runtime} {user}: {said}");
        }
    }
}
