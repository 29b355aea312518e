//! Runs other programs. Errors contain the command, its exit status and the last lines of its output.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::Skipped;

/// Returns the command as one line, for messages.
pub fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

/// Runs a command without showing its output. Any exit code except 0 is an error with the last lines of the output.
pub fn quiet(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {}", line(command)))?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let last = lines[lines.len().saturating_sub(12)..].join("\n");
        bail!("{}: {}\n{last}", line(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns a command for this cargo in the repository. Variables of the cargo that started this program are removed,
/// because some packages would be rebuilt otherwise.
pub fn cargo() -> Command {
    let mut command = Command::new(env!("CARGO"));
    let ours = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
    for (name, _) in env::vars_os() {
        if ours.iter().any(|it| name.as_encoded_bytes().starts_with(it.as_bytes())) {
            command.env_remove(name);
        }
    }
    command.current_dir(repository());
    command
}

/// Runs a command with the terminal of this program. Any exit code except 0 is an error.
pub fn shown(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", line(command)))?;
    if !status.success() {
        bail!("{}: {status}", line(command));
    }
    Ok(())
}

/// Finds a program in `PATH`, or in the administrator's directories that `PATH` may lack.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    dirs.map(|dir| dir.join(program)).find(|it| it.is_file())
}

/// Finds a program as [`find_program`] does; if it is missing, the error is [`Skipped`].
pub fn need(program: &str) -> Result<PathBuf> {
    find_program(program).ok_or_else(|| Skipped(format!("{program} is not installed")).into())
}

/// Whether this process is root, so that it can make device nodes and mounts.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns the repository's top directory, independent of the working directory.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("rig is a folder of the repository")
}

/// Returns cargo's target directory, from the path of this program: `TARGET/PROFILE/PROGRAM`.
pub fn target_dir() -> Result<PathBuf> {
    let program = env::current_exe()?;
    let target = program.ancestors().nth(2);
    target.map(PathBuf::from).context("this program does not stand in a target folder")
}

/// Returns cargo's own directory, which contains downloaded crates: `CARGO_HOME`, else `~/.cargo`.
pub fn cargo_home() -> PathBuf {
    let home = || env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    env::var_os("CARGO_HOME").map_or_else(|| home().join(".cargo"), PathBuf::from)
}

/// Returns the `quire` that was built last. It is not built here, so that a bench measures the existing build.
pub fn quire() -> Result<PathBuf> {
    let target = target_dir()?;
    let built = ["release", "debug"].map(|it| target.join(it).join("quire"));
    let newest =
        built.into_iter().max_by_key(|it| fs::metadata(it).and_then(|it| it.modified()).ok());
    newest.filter(|it| it.is_file()).context("quire is not built: cargo build --release")
}
