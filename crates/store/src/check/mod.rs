//! Checks, repairs and measures a store.

pub(crate) mod check_error;
pub(crate) mod du;
pub(crate) mod exposure;
pub(crate) mod fsck;
pub(crate) mod lacks;
pub(crate) mod memory;
pub(crate) mod other_data;
pub(crate) mod repair;
