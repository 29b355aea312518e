//! Helpers for the tests of several crates, which depend on this crate only for their tests.
#![forbid(unsafe_code)]
#![expect(clippy::must_use_candidate, reason = "tests use what they ask for")]
#![expect(clippy::print_stdout, reason = "the harness keeps it, and shows it where a test fails")]
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod chain;
pub mod chunked;
mod crane;
pub mod daemon;
pub mod documents;
pub mod fake;
// It changes registers of x86-64.
#[cfg(target_arch = "x86_64")]
pub mod faults;
pub mod images;
pub mod odd_layouts;
mod programs;
mod rounds;
pub mod trees;

pub use self::chain::chain;
pub use self::crane::{crane, ukify};
pub use self::programs::{
    built, command, copy_program, find_program, not_made, package, program, programs, script,
    skipped,
};
pub use self::rounds::{long_tests, rounds};

/// Returns pseudo-random bytes without repetition.
#[must_use]
pub fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    std::iter::repeat_with(next).take(length).collect()
}
