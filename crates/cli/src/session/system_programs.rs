//! Finds programs of the system that help users who are not root.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Directories in which a system has setuid programs. `PATH` is not searched, because it belongs to the user and
/// may name other programs.
const SYSTEM: [&str; 4] = ["/usr/bin", "/bin", "/run/wrappers/bin", "/usr/local/bin"];

/// Returns the path of such a program, if it is installed.
pub(crate) fn program_path(name: &str) -> Option<PathBuf> {
    SYSTEM.iter().map(|it| Path::new(it).join(name)).find(|it| it.is_file())
}

/// Returns the path of the program that mounts and unmounts FUSE for users.
///
/// # Errors
/// If the program is missing; the text says which package to install.
#[cfg(feature = "serve")]
pub(crate) fn fusermount() -> anyhow::Result<PathBuf> {
    use anyhow::Context as _;
    program_path("fusermount3").context(
        "fusermount3 is not installed, without which only root can mount (Debian: package fuse3)",
    )
}

/// Returns the line of `passwd` or `group` for a user or group, which may come from a source other than the files,
/// such as a directory service. Source: getent(1).
pub(crate) fn getent(database: &str, key: &str) -> Option<String> {
    let mut program = Command::new(program_path("getent")?);
    let asked =
        program.args(["--", database, key]).env_clear().stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(asked.stdout).ok().filter(|_| asked.status.success())?;
    text.lines().next().map(ToOwned::to_owned)
}
