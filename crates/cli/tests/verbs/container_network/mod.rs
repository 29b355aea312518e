//! A container's networks and host names.

pub(super) mod hosts;
pub(super) mod named;
pub(super) mod networks;
pub(super) mod pasta;
