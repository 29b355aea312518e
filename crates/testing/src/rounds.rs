//! Duration of tests: `QUIRE_TEST_ROUNDS`, which `cargo xtask test` sets.

use std::env;

const ROUNDS: &str = "QUIRE_TEST_ROUNDS";

#[expect(clippy::disallowed_methods, reason = "whoever runs tests says how long they may take")]
fn asked_for() -> Option<u64> {
    env::var(ROUNDS).ok()?.parse().ok()
}

/// Returns `few`, the number of rounds of a random test for every change, multiplied by `QUIRE_TEST_ROUNDS`.
pub fn rounds(few: u64) -> u64 {
    few * asked_for().unwrap_or(1).max(1)
}

/// Whether tests that take seconds run. They are skipped if `QUIRE_TEST_ROUNDS` is not set, so that a plain `cargo
/// test` ends soon.
pub fn long_tests() -> bool {
    let wanted = asked_for().is_some();
    if !wanted {
        crate::skipped(
            "it takes seconds: QUIRE_TEST_ROUNDS=1, which `cargo xtask test` sets, runs it",
        );
    }
    wanted
}
