//! Commands on snapshots of containers' roots.

pub(crate) mod fork;
pub(crate) mod rollback;
pub(crate) mod snapshot;
