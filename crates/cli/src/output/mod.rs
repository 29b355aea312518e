//! Everything that is printed.

#[cfg(feature = "serve")]
pub(crate) mod metrics;
pub(crate) mod progress;
pub(crate) mod report;
