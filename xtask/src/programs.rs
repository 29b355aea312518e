//! Runs programs in separate workspaces: benches, faults and the oracle. They are built on demand, into the target
//! directory of Quire's workspace.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, bail};
use rig::process::{self, repository, target_dir};
use rig::{EXIT_SKIPPED, Failed, Skipped};

/// Directories of the repository, each with one program of the same name.
pub(crate) const PROGRAMS: [&str; 3] = ["bench", "faults", "oracle"];

/// Returns `cargo WORDS` for the workspace of a program.
pub(crate) fn cargo(name: &str, words: &[&str]) -> Result<Command> {
    let mut cargo = process::cargo();
    cargo.args(words).arg("--manifest-path").arg(repository().join(name).join("Cargo.toml"));
    cargo.arg("--target-dir").arg(target_dir()?);
    Ok(cargo)
}

fn build(name: &str) -> Result<PathBuf> {
    process::shown(&mut cargo(name, &["build", "--quiet"])?)?;
    Ok(target_dir()?.join("debug").join(name))
}

/// Builds a program, and runs it with this terminal.
pub(crate) fn run(name: &str, arguments: &[OsString]) -> Result<ExitStatus> {
    let status = Command::new(build(name)?).args(arguments).status();
    status.with_context(|| format!("cannot start {name}"))
}

/// Builds a program, and returns the command that runs it as a test tier.
pub(crate) fn tier(name: &str, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(build(name)?);
    command.args(arguments);
    Ok(command)
}

/// Runs a program with the exit codes of `rig`. Lines that begin with `SKIPPED` have the reasons of skips. All other
/// lines, including those of stderr, are passed to `show`. Returns the skipped parts with their reasons.
pub(crate) fn ended(mut command: Command, mut show: impl FnMut(&str)) -> Result<Vec<String>> {
    let name = process::line(&command);
    let (reader, writer) = std::io::pipe()?;
    let child = command.stdout(writer.try_clone()?).stderr(writer).stdin(Stdio::null()).spawn();
    // This closes the parent's writing end.
    drop(command);
    let mut child = child.with_context(|| format!("cannot start {name}"))?;
    let mut reasons = Vec::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        match line.strip_prefix("SKIPPED: ") {
            Some(skipped) => reasons.push(skipped.to_owned()),
            None => show(&line),
        }
    }
    let status = child.wait()?;
    match status.code() {
        Some(0) => Ok(reasons),
        Some(code) if code == i32::from(EXIT_SKIPPED) && !reasons.is_empty() => {
            bail!(Skipped(reasons.join("; ")))
        }
        Some(1) => bail!(Failed(format!("{name} says no"))),
        _ => bail!("{name}: {status}"),
    }
}
