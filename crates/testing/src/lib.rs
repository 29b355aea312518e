//! What the tests of several crates share. No crate depends on it but for its tests.
#![forbid(unsafe_code)]
#![expect(clippy::missing_errors_doc, reason = "a test that gets an error fails")]

pub mod daemon;
pub mod faults;
mod programs;

pub use self::programs::{command, find, program, programs, skipped};
