//! Devices that are filled while they are read, from their layers' blobs (decision 18).
//!
//! [`LayerFiller`] brings a part of a device: it fetches, inflates, compares digests and writes. A [`Door`] is where readers
//! wait for it.
//! What nobody waits for yet is brought behind that: for a reader that reads on, and what a trace has. A [`Recorder`] makes
//! traces. [`serve()`] is the service that has a door, lends devices to [clients](LazyService) and gives all to a [keeper](keep)
//! that outlives it.

mod client;
mod complete;
mod door;
mod fetch;
mod files;
mod fill;
mod journal;
mod keeper;
mod last_holder;
mod mark_probe;
mod metrics;
mod partial_units;
mod prefetch;
mod readahead;
mod restart_policy;
mod retry;
mod runtime_dir;
mod service;
mod start;
mod supply;
mod trace_recorder;
mod wire;

pub use client::{ClientError, LazyService, release};
pub use door::{ConnectionId, Door, DoorError, DoorKind, DoorWish, FuseDoorError, Unread};
pub use fetch::{ImageBlobs, StoreBlobs};
pub use fill::{Cause, FillError, LayerFiller, LayerSource};
pub use keeper::{KeeperError, Program, keep};
pub use last_holder::LazyWatch;
pub use metrics::{Counts, FailureCause, LazyCounts, LazyFailures, WAITS};
pub use retry::{READERS_WAIT, SourcePatience};
pub use runtime_dir::{Replace, folder_of};
pub use service::{Completion, Left, ServiceError, Supply, Surroundings, serve};
pub use start::{
    NotStarted, STARTED_IDLE, StartError, Starter, leave_group, log_of, remove_empty_log,
};
pub use supply::{ImportResources, NO_TRACE, StoreSupply};
pub use trace_recorder::Recorder;
pub use wire::DeviceStatus;
