//! `quire --version`.

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

use super::report;
use crate::session::failure::FailureKind;

/// The version, and the commit in parentheses if it was known at build time. `build.rs` sets it.
pub(crate) const VERSION: &str = env!("QUIRE_VERSION");

/// Prints the version if that is the only argument. clap would first create all verbs, which takes longer than the rest
/// of the process. Returns `None` otherwise.
pub(crate) fn main(arguments: impl IntoIterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.into_iter().skip(1);
    let first = arguments.next()?;
    let is_asked = ["--version", "-V"].map(OsStr::new).contains(&&*first);
    if !is_asked || arguments.next().is_some() {
        return None;
    }
    Some(match report::line(&format!("quire {VERSION}")) {
        Err(error) if !report::is_broken_pipe(&error) => {
            report::error_line(&format!("quire: {error:#}"));
            ExitCode::from(FailureKind::from_error(&error).exit_code())
        }
        _ => ExitCode::SUCCESS,
    })
}
