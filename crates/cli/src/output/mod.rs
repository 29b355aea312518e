//! Output: reports, progress and metrics.

#[cfg(feature = "serve")]
pub(crate) mod metrics;
pub(crate) mod progress;
pub(crate) mod report;
pub(crate) mod version;
