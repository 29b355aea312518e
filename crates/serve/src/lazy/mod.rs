//! Devices that are filled while they are read, from their layers' blobs (decision 18).
//!
//! [`LayerFiller`] brings a part of a device: it fetches, inflates, compares digests and writes. A [`Door`] is where readers
//! wait for it.
//! What nobody waits for yet is brought behind that: for a reader that reads on, and what a trace has. A [`Recorder`] makes
//! traces. [`serve()`] is the service that has a door, lends devices to [clients](LazyService) and gives all to a [keeper](keep)
//! that outlives it.

mod ahead;
mod client;
mod complete;
mod count;
mod deaths;
mod door;
mod failures;
mod fetch;
mod files;
mod fill;
mod folder;
mod journal;
mod keeper;
mod plan;
mod record;
mod seams;
mod service;
mod start;
mod supply;
mod unmarked;
mod watch;
mod wire;

pub use client::{ClientError, LazyService, release};
pub use count::{Counts, FailureCause, LazyCounts, LazyFailures, WAITS};
pub use door::{ConnectionId, Door, DoorError, DoorKind, DoorWish, FuseDoorError, Unread};
pub use failures::{READERS_WAIT, SourcePatience};
pub use fetch::{ImageBlobs, StoreBlobs};
pub use fill::{Cause, FillError, LayerFiller, LayerSource};
pub use folder::{Replace, folder_of};
pub use keeper::{KeeperError, Program, keep};
pub use record::Recorder;
pub use service::{Completion, Left, ServiceError, Supply, Surroundings, serve};
pub use start::{
    NotStarted, STARTED_IDLE, StartError, Starter, leave_group, log_of, remove_empty_log,
};
pub use supply::{ImportResources, NO_TRACE, StoreSupply};
pub use watch::LazyWatch;
pub use wire::DeviceStatus;
