//! Runs the programs that tests need.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

#[expect(
    clippy::disallowed_methods,
    reason = "where tools and inputs are is said by the environment"
)]
pub fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

pub use testing::{find_program, not_made, skipped};

/// Returns a newer program than the host's, from the cache that `cargo xtask inputs sid` fills.
pub fn newer(program: &str) -> Option<PathBuf> {
    let cache = environment("QUIRE_CACHE").map(PathBuf::from).or_else(|| {
        let home = || environment("HOME").map(|home| Path::new(&home).join(".cache"));
        let cache = environment("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(cache.join("quire"))
    })?;
    Some(cache.join("sid/bin").join(program)).filter(|file| file.is_file())
}

/// Runs a program, and returns its standard output.
pub fn run<S: AsRef<OsStr>>(program: &Path, words: impl IntoIterator<Item = S>) -> Vec<u8> {
    let mut command = Command::new(program);
    command.args(words);
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    output.stdout
}

/// Makes a folder on the disk of the build, because a tmpfs cannot back a mounted image.
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}
