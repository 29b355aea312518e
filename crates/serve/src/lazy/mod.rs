//! Fills lazy devices from their layers' blobs while programs read them (decision 18).
//!
//! A [`LayerFiller`] fetches, inflates, verifies and writes parts of a device. A [`DeviceServer`] blocks readers until
//! then. With lower priority, bytes are prefetched for sequential readers and by traces, which a [`Recorder`] makes.
//! [`serve()`] is the service: it hands out devices to [clients](LazyService), and passes all descriptors to a
//! [keeper](keep) that outlives it.

mod blob_sources;
mod client;
mod complete;
mod end_guard;
mod exposition;
mod fill;
mod fuse;
mod keeper;
mod metrics;
mod partial_units;
mod prefetch;
mod restart_policy;
mod retry;
mod runtime_dir;
mod service;
mod start;
mod supply;
mod wire;

pub use blob_sources::{BlobsOfImage, ImageBlobs, OtherBlobs, StoreBlobs};
pub use client::{Brought, ClientError, LazyService};
pub use exposition::{LazyTotals, device_metrics};
pub use fill::{Cause, FillError, LayerFiller, LayerSource, PartOutcome};
pub use fuse::{ConnectionId, DeviceServer, DeviceServerError, FuseDeviceError, Unread};
pub use keeper::{Program, keep};
pub use metrics::{Counts, FailureCause, LastFailure, LazyCounts, LazyFailures, WAITS};
pub use prefetch::trace_recorder::{Recorder, RecorderError};
pub use retry::{READERS_WAIT, SourcePatience};
pub use runtime_dir::{FolderError, Replace, folder_of, release};
pub use service::{Completion, LazyResources, Left, ServiceError, serve};
pub use start::{
    NotStarted, STARTED_IDLE, StartError, Starter, leave_group, log_of, remove_empty_log,
};
pub use supply::{ImportResources, NO_TRACE, Supply};
pub use wire::DeviceStatus;
