//! Programs that are workspaces of their own: benches, faults and the oracle. They are built when they are called, into the
//! target folder of Quire's own workspace.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, bail};
use rig::process::{self, repository, target_dir};
use rig::{EXIT_SKIPPED, Failed, Skipped};

/// Folders of the repository, each of which has one program of its name.
pub(crate) const PROGRAMS: [&str; 3] = ["bench", "faults", "oracle"];

/// `cargo WORDS` for the workspace of one of them.
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

/// Builds it and runs it with our terminal.
pub(crate) fn run(name: &str, arguments: &[OsString]) -> Result<ExitStatus> {
    let status = Command::new(build(name)?).args(arguments).status();
    status.with_context(|| format!("cannot start {name}"))
}

/// Builds it, and returns how to call it as a tier of the tests.
pub(crate) fn tier(name: &str, arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(build(name)?);
    command.args(arguments);
    Ok(command)
}

/// Runs a program that ends as `rig` says, or as those of this repository do: its exit code says what came of it, and a line
/// that begins with `SKIPPED` why. All other lines, of errors too, go to `show`. Returns what parts were skipped, with reasons.
pub(crate) fn ended(mut command: Command, mut show: impl FnMut(&str)) -> Result<Vec<String>> {
    let name = process::line(&command);
    let (reader, writer) = std::io::pipe()?;
    let child = command.stdout(writer.try_clone()?).stderr(writer).stdin(Stdio::null()).spawn();
    // With it goes our end for writing.
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
