//! Containers from start to end.

mod asked;
mod at_rest;
pub(super) mod codes;
pub(super) mod commit;
pub(super) mod containers;
mod copies;
pub(super) mod deaths;
pub(super) mod ends;
mod fork_crowds;
pub(super) mod inherited;
mod kept;
mod lists;
pub(super) mod logs;
mod options;
mod pauses;
mod restart_policies;
pub(super) mod restarts;
pub(super) mod runs;
mod snapshot_disks;
mod snapshot_ends;
mod snapshots;
pub(super) mod streams;
pub(super) mod terminals;
mod unnamed_images;
