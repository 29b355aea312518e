//! Programs that tests call, and messages of tests that cannot run.

use std::env;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Prints that a test, or a part of one, is skipped, and why. `cargo xtask test` counts these lines.
pub fn skipped(reason: &str) {
    println!("SKIPPED: {reason}");
}

/// Finds a program in `PATH`, or in the administrator's folders, which `PATH` may lack.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "the environment says where programs are")]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    dirs.map(|dir| dir.join(name)).find(|it| it.is_file())
}

/// Like [`find_program`], but prints that the test is skipped if the program is missing. In continuous integration,
/// where the program could have been installed, `cargo xtask test` counts that line as a failure.
#[must_use]
pub fn program(name: &str) -> Option<PathBuf> {
    let found = find_program(name);
    if found.is_none() {
        skipped(&format!("{name} is not installed"));
    }
    found
}

/// Finds a program of a package that `make test-engines` installs. In continuous integration, the package may be
/// missing, as inputs may be.
#[must_use]
pub fn package(name: &str) -> Option<PathBuf> {
    let found = find_program(name);
    if found.is_none() {
        skipped(&format!("{name} is missing: `make test-engines` installs it"));
    }
    found
}

/// Whether all of these programs exist. Otherwise prints that the test is skipped because of the first missing one.
#[must_use]
pub fn programs(names: &[&str]) -> bool {
    names.iter().all(|name| program(name).is_some())
}

/// Returns a command for a program; `None` if the test is skipped, as by [`program`].
#[must_use]
pub fn command(name: &str) -> Option<Command> {
    program(name).map(Command::new)
}

/// Creates an executable shell script. Another process writes it, because a child that another thread forks at the
/// same time would inherit this process's descriptor, and the kernel does not execute a file that is open for writing
/// (`ETXTBSY`).
///
/// # Panics
/// If the script cannot be written.
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

/// Copies a program, with its mode, by another process, for the reason that [`script`] names.
///
/// # Panics
/// If the program cannot be copied.
pub fn copy_program(from: impl AsRef<Path>, to: &Path) {
    let copied = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(copied.is_ok_and(|it| it.success()), "{} is not copied", to.display());
}

/// Prints that a test is skipped because an input is missing that takes minutes to build. If the cache has the input,
/// `cargo xtask test` counts the line as a failure.
pub fn not_made(what: &str, input: &str) {
    skipped(&format!("{what} is not in QUIRE_CACHE: `make test-engines` makes the input {input}"));
}

/// Returns a program that `cargo xtask inputs INPUT` has built: the newest one whose folder in the cache starts with
/// `folder`. Prints a message if there is none.
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
