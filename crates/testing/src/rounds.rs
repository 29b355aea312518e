//! How long tests go on: `QUIRE_TEST_ROUNDS`, which `cargo xtask test` sets.

use std::env;

const ROUNDS: &str = "QUIRE_TEST_ROUNDS";

#[expect(clippy::disallowed_methods, reason = "whoever runs tests says how long they may take")]
fn asked_for() -> Option<u64> {
    env::var(ROUNDS).ok()?.parse().ok()
}

/// `QUIRE_TEST_ROUNDS` times as often as `few`, which is how often tests by chance try for every change.
pub fn rounds(few: u64) -> u64 {
    few * asked_for().unwrap_or(1).max(1)
}

/// Whether tests run that take seconds each. Where nobody asked for rounds they are skipped, so that `cargo test` alone
/// ends soon.
pub fn long_tests() -> bool {
    let wanted = asked_for().is_some();
    if !wanted {
        crate::skipped(
            "it takes seconds: QUIRE_TEST_ROUNDS=1, which `cargo xtask test` sets, runs it",
        );
    }
    wanted
}
