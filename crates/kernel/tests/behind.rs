//! Nobody waits for what is done behind. No test harness: its threads would be in the way.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test, without the harness")]

// As the other crates call it.
extern crate quire_kernel as kernel;

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kernel::process::{Done, finish_behind};

/// How long the work takes.
const WORK: Duration = Duration::from_millis(500);

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "alone", file] => print!("{:?}", finish(file)),
        [_, "threads", file] => {
            let other = std::thread::spawn(|| std::thread::sleep(WORK * 2));
            print!("{:?}", finish(file));
            other.join().unwrap();
        }
        _ => {
            nobody_waits();
            with_threads_it_is_done_here();
            println!("behind: ok");
        }
    }
}

fn finish(file: &str) -> Done {
    finish_behind(|| {
        std::thread::sleep(WORK);
        std::fs::write(file, "done").unwrap();
        // Goes nowhere, and ends no parent.
        println!("not to be seen");
        panic!("neither is this");
    })
}

fn start(how: &str, file: &Path) -> (String, Duration) {
    let since = Instant::now();
    let mut command = Command::new("/proc/self/exe");
    // As whoever reads its output waits for it: until the last copy of the pipe is closed.
    let output = command.arg(how).arg(file).stdin(Stdio::null()).output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), since.elapsed())
}

fn nobody_waits() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    let (printed, took) = start("alone", &file);
    assert_eq!(printed, "Behind");
    assert!(took < WORK, "{took:?}");
    let since = Instant::now();
    while !file.exists() {
        assert!(since.elapsed() < Duration::from_secs(20), "the work is not done");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn with_threads_it_is_done_here() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    // Here the panic is the caller's, as it would be without a child.
    let (_, took) = start("threads", &file);
    assert!(took >= WORK, "{took:?}");
    assert!(file.exists());
}
