//! Opens images, and reads their data with verification.

pub(crate) mod content;
pub(crate) mod lazy_ranges;
pub(crate) mod open;
pub(crate) mod policy_gate;
pub(crate) mod verified_file;
pub(crate) mod verified_ranges;
pub(crate) mod verified_reader;
