//! Errors, for tests of this crate and those within it.

use std::error::Error;

/// An error with all of its causes, as people see them.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
