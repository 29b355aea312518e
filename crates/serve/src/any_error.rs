//! Errors of any type, for callers that only report them.

pub(crate) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Formats an error with its causes in one line.
pub(crate) fn text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += ": ";
        text += &cause.to_string();
        source = cause.source();
    }
    text
}
