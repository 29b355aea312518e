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

impl OperationError {
    /// Returns an adapter for `map_err`. Formats the object only if the operation failed.
    pub fn of<O: Display + Copy, E: Into<Box<dyn Error + Send + Sync>>>(
        operation: &'static str,
        object: O,
    ) -> impl Fn(E) -> Self + Copy {
        move |source| Self { operation, object: object.to_string(), source: source.into() }
    }

    /// As [`of`](Self::of), for a file or directory.
    pub fn at<E: Into<Box<dyn Error + Send + Sync>>>(
        operation: &'static str,
        path: &Path,
    ) -> impl Fn(E) -> Self + Copy {
        move |source| Self::of(operation, &path.display())(source)
    }
}
