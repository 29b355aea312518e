//! Failed operations that no code handles in different ways.

use std::error::Error;
use std::fmt::Display;
use std::path::Path;

/// A failed operation on an object of the host, of a container or of a store.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {object}")]
pub struct OperationError {
    operation: &'static str,
    object: String,
    pub source: Box<dyn Error + Send + Sync>,
}

/// Escapes control characters, so that a name cannot begin another line of an error.
fn one_line(object: &impl Display) -> String {
    let mut text = String::new();
    for it in object.to_string().chars() {
        if it.is_control() {
            text.extend(it.escape_debug());
        } else {
            text.push(it);
        }
    }
    text
}

impl OperationError {
    /// Returns an adapter for `map_err`. Formats the object only if the operation failed.
    pub fn of<O: Display + Copy, E: Into<Box<dyn Error + Send + Sync>>>(
        operation: &'static str,
        object: O,
    ) -> impl Fn(E) -> Self + Copy {
        move |source| Self { operation, object: one_line(&object), source: source.into() }
    }

    /// As [`of`](Self::of), for a file or directory.
    pub fn at<E: Into<Box<dyn Error + Send + Sync>>>(
        operation: &'static str,
        path: &Path,
    ) -> impl Fn(E) -> Self + Copy {
        move |source| Self::of(operation, &path.display())(source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_on_its_line() {
        let source = || std::io::Error::other("full");
        let check = |error: OperationError, expect: &str| assert_eq!(error.to_string(), expect);
        check(
            OperationError::of("read", "a \u{e9}\n\u{1b}[0m")(source()),
            "cannot read a \u{e9}\\n\\u{1b}[0m",
        );
        let path = Path::new("/a\nquire: all is well");
        check(OperationError::at("read", path)(source()), r"cannot read /a\nquire: all is well");
    }
}
