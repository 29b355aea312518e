//! Programs of the system that help users who are not root.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where a system has programs that ordinary users may call with more rights. `PATH` is the user's, who may not even know it.
const SYSTEM: [&str; 4] = ["/usr/bin", "/bin", "/run/wrappers/bin", "/usr/local/bin"];

/// The path of such a program, if it is installed.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    SYSTEM.iter().map(|it| Path::new(it).join(name)).find(|it| it.is_file())
}

/// The path of the program that mounts and unmounts by FUSE for users.
///
/// # Errors
/// What to install.
#[cfg(feature = "serve")]
pub(crate) fn fusermount() -> Result<PathBuf, &'static str> {
    find("fusermount3").ok_or(
        "fusermount3 is not installed, without which only root can mount (Debian: package fuse3)",
    )
}

/// What the system knows of a user or group that no file of its own has, as one of a directory service: a line of `passwd` or
/// `group`. Source: getent(1).
pub(crate) fn getent(database: &str, key: &str) -> Option<String> {
    let mut program = Command::new(find("getent")?);
    let asked =
        program.args(["--", database, key]).env_clear().stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8(asked.stdout).ok().filter(|_| asked.status.success())?;
    text.lines().next().map(ToOwned::to_owned)
}
