//! What the tests of several crates share. No crate depends on it but for its tests.
#![forbid(unsafe_code)]

pub mod faults;
mod programs;

pub use self::programs::{command, find, program, programs, skipped};
