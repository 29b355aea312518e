//! Work in forked children: callers do not wait for it. This program runs without the test harness, because the
//! harness starts threads.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test, without the harness")]

// The name that the other crates use.
extern crate quire_kernel as kernel;

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use kernel::process::{
    Done, Exit, Pid, Process, Resource, Rlimit, finish_behind, set_subreaper, settle, start_behind,
};

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "alone", file] => print!("{:?}", finish(file)),
        [_, "threads", file] => {
            let (sender, receiver) = std::sync::mpsc::channel::<()>();
            let other = std::thread::spawn(move || receiver.recv());
            print!("{:?}", finish(file));
            drop(sender);
            other.join().unwrap().unwrap_err();
        }
        [_, "list", file] => list(file),
        _ => {
            nobody_waits();
            with_threads_it_is_done_here();
            what_the_caller_left_open_is_closed();
            a_child_that_cannot_be_supervised_is_ended();
            who_is_left_to_us_is_waited_for();
            println!("behind: ok");
        }
    }
}

/// Starts work that lasts until the file `gate` exists.
fn finish(file: &str) -> Done {
    finish_behind(|_| {
        until(&Path::new(file).with_file_name("gate"));
        std::fs::write(file, "done").unwrap();
        // The output goes to /dev/null, and the panic does not affect the parent.
        println!("not to be seen");
        panic!("neither is this");
    })
}

/// Waits until a file exists.
fn until(file: &Path) {
    while !file.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn start(how: &str, file: &Path) -> String {
    let mut command = Command::new("/proc/self/exe");
    // Waits until the last copy of the pipe is closed, as a reader of the program's output does.
    let output = command.arg(how).arg(file).stdin(Stdio::null()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn nobody_waits() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    assert_eq!(start("alone", &file), "Behind");
    assert!(!file.exists());
    std::fs::write(folder.path().join("gate"), "").unwrap();
    until(&file);
}

fn with_threads_it_is_done_here() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(folder.path().join("gate"), "").unwrap();
    // With threads, the panic reaches the caller, because there is no child.
    start("threads", &file);
    assert!(file.exists());
}

/// Writes the descriptors of a child to a file, by the files' names, in a child.
fn list(file: &str) {
    settle().unwrap();
    // A descriptor that this program has taken over, as those of a service manager.
    let _taken = kernel::process::given_descriptors(1).unwrap();
    let _own = std::fs::File::open("/dev/zero").unwrap();
    let (report, child) = start_behind(|report| {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let names = all.map(|it| std::fs::read_link(it.unwrap().path()).unwrap_or_default());
        let names: Vec<_> = names.map(|it| it.display().to_string()).collect();
        std::fs::write(file, names.join("\n")).unwrap();
        drop(report);
    })
    .unwrap();
    assert_eq!(child.wait().unwrap(), Exit::Code(0));
    drop(report);
}

/// A lock of flock(1) is held as long as one process has the file open.
fn what_the_caller_left_open_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().canonicalize().unwrap();
    let path = |name: &str| place.join(name);
    let script = "exec 3>\"$2\" 4>\"$3\" 9>\"$4\" && exec \"$0\" list \"$1\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(std::env::current_exe().unwrap());
    let status = shell.args(["list", "taken", "left", "lock"].map(path)).status().unwrap();
    assert!(status.success());
    let listed = std::fs::read_to_string(path("list")).unwrap();
    let has = |name: &str| listed.lines().any(|it| it == path(name).display().to_string());
    assert!(!has("left") && !has("lock"), "{listed}");
    assert!(has("taken") && listed.contains("/dev/zero"), "{listed}");
}

fn a_child_that_cannot_be_supervised_is_ended() {
    use std::os::fd::AsRawFd as _;

    let before = rustix::process::getrlimit(Resource::Nofile);
    let next = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
    // The pipe gets two descriptors, and none is left for that of the child.
    let current = u64::try_from(next + 2).unwrap();
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..before })
        .unwrap();
    let started = start_behind(|_| std::thread::sleep(Duration::from_secs(1000)));
    rustix::process::setrlimit(Resource::Nofile, before).unwrap();
    assert!(started.is_err());
    let left = rustix::process::wait(rustix::process::WaitOptions::NOHANG);
    assert!(matches!(left, Err(rustix::io::Errno::CHILD)), "{left:?}");
}

/// As with crun: the container is started by a child that outlives the program.
fn who_is_left_to_us_is_waited_for() {
    set_subreaper().unwrap();
    // The grandchild exits while its parent still runs but does not wait for it.
    let script = "(sh -c 'sleep 0.2; exit 7' & echo $!; exec sleep 0.5 >/dev/null) &";
    let mut program =
        Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(program.wait().unwrap().success());
    let started = Process::open(Pid::from_raw(line.trim().parse().unwrap()).unwrap()).unwrap();
    assert!(started.wait().is_err(), "it is somebody else's child");
    started.adopt().unwrap();
    assert_eq!(started.wait().unwrap(), Exit::Code(7));
    let nobody_is_left = rustix::process::wait(rustix::process::WaitOptions::NOHANG);
    assert!(matches!(nobody_is_left, Err(rustix::io::Errno::CHILD)), "{nobody_is_left:?}");
}
