//! Many forks of a container whose programs write: 64 for every change, a thousand with more rounds. Needs root.

use std::fs;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::container_life::containers::{Rm, ps, start};
use crate::container_life::runs::{runtimes, wait_for};
use crate::container_life::snapshots::{exec, snapshots, with_programs};
use crate::{Place, add_programs};

/// Number of counters in the mapped file, which are in different pages.
const PAGES: usize = 16;

/// Size of a page, in bytes.
const PAGE: usize = 4096;

/// Stores the same number to each page of a mapped file, one page after the other.
const MAPS: &str = "import mmap
with open('/w/mapped', 'w+b') as file:
    file.truncate(16 * 4096)
    pages = mmap.mmap(file.fileno(), 16 * 4096)
    number = 0
    while True:
        number += 1
        for at in range(16):
            pages[at * 4096:at * 4096 + 8] = number.to_bytes(8, 'little')
";

/// Replaces two files by renames, one after the other, and appends to a third one.
const WRITES: &str = "i=0; while :; do i=$((i+1)); echo $i > /w/.new; mv /w/.new /w/first; \
    echo line $i of the log >> /w/log; echo $i > /w/.new; mv /w/.new /w/second; done";

/// Moves a directory with files to another name and back, and changes one of the files between the two.
const MOVES: &str = "i=0; while :; do i=$((i+1)); mv /w/here /w/there; echo $i > /w/there/number; \
    mv /w/there /w/here; done";

/// A program that runs in a container until this value is dropped.
struct Running(Child);

impl Running {
    fn start(place: &Place, name: &str, words: &[&str]) -> Self {
        let mut command = place.command(&[&["exec", "-u", "0", name], words].concat());
        Self(command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The signal is passed on to the program, which may end before.
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ended = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        drop(self.0.wait());
    }
}

/// Everything of the files that no program writes, and of those that one does.
const SEEN: &str = "cd / && find data -type f -exec sha256sum {} + | sort; \
    find data w -printf '%p %y %m %U:%G %s %l\\n' | sort; find w -type f -exec sha256sum {} + | sort";

#[test]
fn each_fork_has_all_files_of_one_moment() {
    if !testing::long_tests() {
        return;
    }
    let count = if testing::rounds(1) >= 10 { 1000 } else { 64 };
    let Some(place) = with_programs() else { return };
    let tree = place.path("tree");
    // A program of the same name in `PATH` may be the script of a version manager.
    let Ok(python) = fs::canonicalize("/usr/bin/python3") else {
        testing::skipped("/usr/bin/python3 is missing");
        return;
    };
    let python = python.to_str().unwrap();
    add_programs(&tree, &[python, "/bin/cat"]);
    place.out(&format!("import --quiet dir:{} a", tree.display()));
    let ask = ["-c", "import os; print(os.path.dirname(os.__file__))"];
    let library = Command::new(python).args(ask).output().unwrap();
    let library = String::from_utf8(library.stdout).unwrap().trim().to_owned();
    let volume = format!("{library}:{library}:ro");
    let Some(runtime) = runtimes().next() else { return };
    let kinds = ["dir", "self,size=64m", "memory"];
    let rounds = 4;
    for (kind, share) in kinds.iter().zip([2, 1, 1]) {
        let _guard = Rm(&place, "busy");
        let options = ["--name", "busy", "--runtime", runtime, "--writable", kind, "-v", &volume];
        start(&place, &options, "sleep 6000");
        let make = "mkdir -p /w/here && echo 0 > /w/here/number && cd /data && rm -r gone && mv old renamed && \
            mkdir many && i=0 && while [ $i -lt 300 ]; do echo $i > many/$i; i=$((i+1)); done";
        exec(&place, "busy", make);
        let statics = "cd / && find data -type f -exec sha256sum {} + | sort";
        let expect = exec(&place, "busy", statics);
        let _writers = [
            Running::start(&place, "busy", &["sh", "-c", WRITES]),
            Running::start(&place, "busy", &["sh", "-c", MOVES]),
            Running::start(&place, "busy", &[python, "-c", MAPS]),
        ];
        wait_for("the writers", || {
            let read = "test -s /w/second && test -s /w/mapped && test -d /w/here";
            place.run_each(&["exec", "busy", "sh", "-c", read]).code == Some(0)
        });
        for round in 0..rounds {
            let number = (count * share / 4 / rounds).to_string();
            let pattern = format!("crowd-{round}-{{}}");
            let ran = place.run_each(&["fork", "-n", &number, "--name", &pattern, "busy"]);
            let names: Vec<_> = ran.out.lines().map(str::to_owned).collect();
            let _guards: Vec<_> = names.iter().map(|it| Rm(&place, it)).collect();
            assert_eq!(ran.code, Some(0), "{}", ran.err);
            assert_eq!(names.len().to_string(), number);
            let first = exec(&place, &names[0], SEEN);
            assert!(first.starts_with(&expect), "{kind} {round}: {first}");
            for name in &names {
                assert_eq!(exec(&place, name, SEEN), first, "{kind} {round} {name}");
            }
            check_moment(&place, &names[0]);
            // A fork's changes are only in that fork.
            exec(&place, &names[0], "echo mine > /w/first; rm -r /data/many");
            if let Some(second) = names.get(1) {
                assert_eq!(exec(&place, second, SEEN), first, "{kind} {round}");
            }
            let words = [&["rm", "--force"], &*names.iter().map(|it| &**it).collect::<Vec<_>>()];
            assert_eq!(place.run_each(&words.concat()).code, Some(0));
        }
        drop(_writers);
    }
    place.out("gc");
    assert_eq!(snapshots(&place, "--all"), Vec::<Value>::new());
    place.out("fsck");
}

/// Checks that the files which programs write belong to one moment.
#[track_caller]
fn check_moment(place: &Place, name: &str) {
    let pid = ps(place, name).unwrap()["pid"].to_string();
    let read = |file: &str| fs::read(format!("/proc/{pid}/root/w/{file}")).unwrap();
    let number = |file: &str| -> u64 {
        String::from_utf8(read(file)).unwrap().trim().parse().unwrap_or_else(|_| panic!("{file}"))
    };
    let (first, second) = (number("first"), number("second"));
    assert!(first == second || first == second + 1, "{first} {second}");
    let log = String::from_utf8(read("log")).unwrap();
    assert!(log.ends_with('\n'));
    let lines = log.lines().count() as u64;
    assert!(lines == first || lines + 1 == first, "{lines} {first}");
    for (line, number) in log.lines().zip(1..) {
        assert_eq!(line, format!("line {number} of the log"));
    }
    let exists = |name: &str| fs::symlink_metadata(format!("/proc/{pid}/root/w/{name}")).is_ok();
    assert_ne!(exists("here"), exists("there"));
    let mapped = read("mapped");
    let counters: Vec<_> = (0..PAGES)
        .map(|at| u64::from_le_bytes(mapped[at * PAGE..][..8].try_into().unwrap()))
        .collect();
    let is_ordered = counters.windows(2).all(|it| it[0] >= it[1]);
    assert!(is_ordered && counters[0] - counters[PAGES - 1] <= 1, "{counters:?}");
}
