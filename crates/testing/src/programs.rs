//! Programs that tests call, and what a test says that cannot run.

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Says that a test, or a part of one, does not run, and why. `cargo xtask test` counts these lines.
pub fn skipped(reason: &str) {
    println!("SKIPPED: {reason}");
}

/// Where `PATH`, or the administrator's folders that it may lack, has this program.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the environment says where programs are")]
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    dirs.map(|dir| dir.join(name)).find(|it| it.is_file())
}

/// `find`; a test that gets none is skipped, by the program's name. In continuous integration, where the program could
/// have been installed, `cargo xtask test` takes that line for a failure.
#[must_use]
pub fn program(name: &str) -> Option<PathBuf> {
    let found = find(name);
    if found.is_none() {
        skipped(&format!("{name} is not installed"));
    }
    found
}

/// A program of a package that `make test-engines` installs. Continuous integration may lack it, as it may lack inputs.
#[must_use]
pub fn package(name: &str) -> Option<PathBuf> {
    let found = find(name);
    if found.is_none() {
        skipped(&format!("{name} is missing: `make test-engines` installs it"));
    }
    found
}

/// Whether all of these programs are there; otherwise the test is skipped, by the name of the first that is not.
#[must_use]
pub fn programs(names: &[&str]) -> bool {
    names.iter().all(|name| program(name).is_some())
}

/// A command to be given arguments; none where the test is skipped, as by `program`.
#[must_use]
pub fn command(name: &str) -> Option<Command> {
    program(name).map(Command::new)
}

/// Makes a program of a shell's script. Another process writes it: a child that another thread forks meanwhile would have a
/// descriptor of this one's for writing, and the kernel executes no file that somebody writes (`ETXTBSY`).
///
/// # Panics
/// If it cannot be written.
#[expect(clippy::expect_used, reason = "tests fail by panicking")]
pub fn script(path: &Path, text: &str) {
    const WRITE: &str = "cat > \"$0\" && chmod 755 \"$0\"";
    let mut shell = Command::new("sh");
    shell.args(["-euc", WRITE]).arg(path).stdin(Stdio::piped());
    let mut child = shell.spawn().expect("there is a shell");
    let mut input = child.stdin.take().expect("it was asked for");
    input.write_all(text.as_bytes()).expect("the shell reads it");
    drop(input);
    assert!(child.wait().is_ok_and(|it| it.success()), "{} is not written", path.display());
}

/// Says that a test does not run for want of an input that takes minutes to make. `cargo xtask test` looks whether the cache
/// has it, and takes the line for a failure then.
pub fn not_made(what: &str, input: &str) {
    skipped(&format!("{what} is not in QUIRE_CACHE: `make test-engines` makes the input {input}"));
}

/// A program that `cargo xtask inputs INPUT` has built: the newest of those whose folder in the cache begins with `folder`.
/// Says so if there is none.
#[expect(clippy::disallowed_methods, reason = "tests are told by the environment where tools are")]
pub fn built(folder: &str, program: &str, input: &str) -> Option<PathBuf> {
    let cache = env::var_os("QUIRE_CACHE").map(PathBuf::from);
    let entries = cache.and_then(|it| it.read_dir().ok()).into_iter().flatten().flatten();
    let named = entries.filter(|it| it.file_name().to_string_lossy().starts_with(folder));
    let programs = named.map(|it| it.path().join("bin").join(program)).filter(|it| it.is_file());
    let found = programs.max_by_key(|it| it.metadata().and_then(|it| it.modified()).ok());
    if found.is_none() {
        not_made(program, input);
    }
    found
}
