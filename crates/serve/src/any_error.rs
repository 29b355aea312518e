//! Errors of any type, for callers that only report them.

pub(crate) type AnyError = Box<dyn std::error::Error + Send + Sync>;
