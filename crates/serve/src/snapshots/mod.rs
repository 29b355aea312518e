//! Snapshots for container engines, as a proxy snapshotter of containerd (decision 20).
//!
//! [`Snapshotter`] manages the snapshots of one engine: records in the store, and roots that `container` mounts. At a
//! commit, the changes of a root become a layer of the store. [`serve_snapshots`] is the gRPC service.

mod cancellation;
mod content;
mod counts;
mod diff_service;
mod error;
mod grpc;
mod id_map;
mod labels;
mod layers;
mod lazy;
mod lengths;
mod metrics;
mod parent_chain;
mod roots;
mod settings;
mod snapshot_lock;
mod snapshotter;
mod space;
mod state;

pub use containerd_api::counts::GetCountsResponse;
pub use content::{ContentError, PATIENCE};
pub use counts::ask_counts;
pub use error::SnapshotterError;
pub use grpc::filter::{FilterError, Filters};
pub use grpc::service::{ServeSnapshotsError, serve_snapshots};
pub use kernel::usage::Usage;
pub use labels::Labels;
pub use lazy::pull::{
    EngineChoices, EngineImages, LazyError, PullSecret, RegistrySettings, with_pull_secrets,
};
pub use lengths::{LABEL_MAX, LABELS_MAX, NAME_MAX};
pub use metrics::engine::snapshotter_metrics;
pub use settings::{CollectChoices, LazyChoices, SkipLayers, SnapshotAccess, SnapshotResources};
pub use snapshotter::{SnapshotMount, Snapshotter};
pub use state::SnapshotInfo;
