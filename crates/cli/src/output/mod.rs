//! Output: reports, tables and progress.

pub(crate) mod progress;
pub(crate) mod report;
pub(crate) mod table;
pub(crate) mod version;
pub(crate) mod width;
