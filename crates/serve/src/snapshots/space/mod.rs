//! Limits of roots, and the release of space of removed snapshots.

pub(super) mod collect;
pub(super) mod deferred_delete;
pub(super) mod headrooms;
pub(super) mod quota;
