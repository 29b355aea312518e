//! Output: reports, tables, templates, filters of lists, progress and metrics.

pub(crate) mod list_filter;
#[cfg(feature = "serve")]
pub(crate) mod metrics;
pub(crate) mod podman_text;
pub(crate) mod progress;
pub(crate) mod report;
pub(crate) mod table;
pub(crate) mod template;
pub(crate) mod version;
pub(crate) mod width;
