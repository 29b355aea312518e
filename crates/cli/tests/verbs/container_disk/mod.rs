//! A container's writable layer and volumes.

pub(super) mod default_root;
pub(super) mod full;
pub(super) mod named_volumes;
mod volume_archives;
pub(super) mod volumes;
pub(super) mod writable;
