//! Common parts of the programs for developers: `xtask`, and the workspaces of the benches, the oracle and the
//! faults.
//!
//! Their exit codes: 0 success, 1 a negative result (a test failed, an oracle differs), 2 an error, 77 not possible
//! on this machine (no root, no network, a missing tool), which is printed as `SKIPPED`.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "for programs of a terminal")]
#![expect(clippy::must_use_candidate, reason = "for programs of this repository")]
#![expect(missing_debug_implementations, reason = "for programs of this repository")]

pub mod cache;
pub mod dump;
pub mod figures;
pub mod inputs;
pub mod process;
pub mod random;
pub mod summary;
pub mod tools;
pub mod vm;

use std::fmt;
use std::process::ExitCode;

/// An operation that this machine cannot do, which is not a failure of the tested code.
#[derive(Debug)]
pub struct Skipped(pub String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SKIPPED: {}", self.0)
    }
}

impl std::error::Error for Skipped {}

/// A negative result: a test failed, or a comparison found a difference.
#[derive(Debug)]
pub struct Failed(pub String);

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

/// The exit code for "skipped" in automake and many test harnesses.
pub const EXIT_SKIPPED: u8 = 77;

/// Prints how `program` ended, and returns its exit code.
pub fn exit(program: &str, result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else {
        return ExitCode::SUCCESS;
    };
    if let Some(skipped) = error.downcast_ref::<Skipped>() {
        println!("{skipped}");
        return ExitCode::from(EXIT_SKIPPED);
    }
    eprintln!("{program}: {error:#}");
    ExitCode::from(if error.is::<Failed>() { 1 } else { 2 })
}
