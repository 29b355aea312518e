//! Makes images from data in the store.

pub(super) mod complete;
pub(super) mod convert;
pub(super) mod reuse;
pub(crate) mod stacked;
