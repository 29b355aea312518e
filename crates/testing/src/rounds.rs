//! How often tests by chance try.

/// `QUIRE_TEST_ROUNDS` times as often as `few`, which is what the tests of every change do.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "whoever runs tests says how long they may take")]
pub fn rounds(few: u64) -> u64 {
    let text = std::env::var("QUIRE_TEST_ROUNDS").unwrap_or_default();
    few * text.parse::<u64>().unwrap_or(1).max(1)
}
