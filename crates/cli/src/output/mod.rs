//! Output: reports, tables, progress and metrics.

#[cfg(feature = "serve")]
pub(crate) mod metrics;
pub(crate) mod progress;
pub(crate) mod report;
pub(crate) mod table;
pub(crate) mod template;
pub(crate) mod version;
pub(crate) mod width;
