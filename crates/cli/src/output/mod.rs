//! Output: reports, tables, templates, filters of lists and progress.

pub(crate) mod confirmation;
pub(crate) mod list_filter;
pub(crate) mod podman_text;
pub(crate) mod progress;
pub(crate) mod report;
pub(crate) mod stream;
pub(crate) mod table;
pub(crate) mod template;
pub(crate) mod version;
pub(crate) mod width;
