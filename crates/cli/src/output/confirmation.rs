//! Asks on standard input whether to go on, as podman does before it removes things.

use std::io::{BufRead as _, Read as _, Write as _};

use anyhow::Context as _;

use crate::output::report;

/// Maximum length of an answer, in bytes. The rest is not read.
const ANSWER_MAX: u64 = 4096;

/// Prints a warning about the removal of items, and asks on standard input whether to go on, as podman does.
pub(crate) fn is_confirmed(warning: &str, items: &[String]) -> anyhow::Result<bool> {
    report::error_line(&format!("WARNING: {warning}"));
    for item in items {
        report::error_line(item);
    }
    let mut error = std::io::stderr();
    // The answer can also be given without the question.
    let _asked = write!(error, "Continue? [y/N] ").and_then(|()| error.flush());
    let mut line = String::new();
    let read = std::io::stdin().lock().take(ANSWER_MAX).read_line(&mut line);
    if read.context("cannot read standard input")? == 0 {
        report::error_line("\nquire: there is no answer: --force removes without a question");
    }
    Ok(matches!(line.trim(), "y" | "Y" | "yes"))
}
