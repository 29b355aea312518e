//! Verbs on images and their names.

pub(crate) mod archives;
pub(crate) mod build;
pub(crate) mod cat;
pub(crate) mod convert;
pub(crate) mod diff;
pub(crate) mod dump;
pub(crate) mod export;
pub(crate) mod file_listing;
pub(crate) mod filter;
pub(crate) mod history;
#[expect(clippy::module_inception, reason = "the verb has the name of its group")]
pub(crate) mod images;
pub(crate) mod import;
pub(crate) mod index;
pub(crate) mod ls;
pub(crate) mod merge;
pub(crate) mod names;
pub(crate) mod registry;
pub(crate) mod show;
#[cfg(feature = "signatures")]
pub(crate) mod signing;
pub(crate) mod sources;
pub(crate) mod tree;
