//! Crashes, full disks and killed processes.

pub(super) mod container_snapshots;
pub(super) mod crash;
pub(super) mod disk_full;
pub(super) mod kill;
pub(super) mod model;
mod replacement;
