//! Makes images of data that the store has.

pub(super) mod complete;
pub(super) mod convert;
pub(super) mod reuse;
pub(crate) mod stacked;
