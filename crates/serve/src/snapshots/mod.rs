//! Snapshots for container engines, as a proxy snapshotter of containerd (decision 20).
//!
//! [`Snapshotter`] manages the snapshots of one engine: records in the store, and roots that `container` mounts. At a
//! commit, the changes of a root become a layer of the store. [`serve_snapshots`] is the gRPC service.

mod cancellation;
mod commit;
mod content;
mod counts;
mod diff_service;
mod error;
mod grpc;
mod id_map;
mod labels;
mod layers;
mod lazy;
mod parent_chain;
mod roots;
mod settings;
mod snapshot_lock;
mod snapshotter;
mod space;
mod state;

pub use containerd_api::counts::{CallCounts, GetCountsResponse, OutcomeCount};
pub use content::{ContentError, PATIENCE};
pub use counts::{CALL_TIMES, ask_counts};
pub use error::SnapshotterError;
pub use grpc::filter::{FilterError, Filters};
pub use grpc::service::{ServeSnapshotsError, serve_snapshots};
pub use kernel::usage::Usage;
pub use labels::Labels;
pub use lazy::pull::{EngineChoices, EngineImages, RegistrySettings, with_pull_secrets};
pub use settings::{
    CollectChoices, LazyChoices, LazyError, LazyImages, PullSecret, SkipLayers, SnapshotAccess,
    SnapshotResources,
};
pub use snapshotter::{SnapshotMount, Snapshotter};
pub use state::SnapshotInfo;

/// Largest length of a snapshot's name, in bytes. A name contains the names of a namespace and a container.
pub const NAME_MAX: usize = 4096;
/// Largest length of a label with its value, in bytes. Source: containerd's `snapshots.proto`.
pub const LABEL_MAX: usize = 4096;
/// Largest length of all labels of a snapshot, in bytes.
pub const LABELS_MAX: usize = 128 << 10;
