//! Snapshots for container engines, as a proxy snapshotter of containerd (decision 20).
//!
//! [`Snapshotter`] manages the snapshots of one engine: records in the store, and roots that `container` mounts. At a
//! commit, the changes of a root become a layer of the store. [`serve_snapshots`] is the gRPC service.

mod cancellation;
mod collect;
mod commit;
mod compare;
mod content;
mod counts;
mod cri_proxy;
mod deferred_delete;
mod diff_service;
mod error;
mod filter;
mod headrooms;
mod heal;
mod id_map;
mod known_blobs;
mod labels;
mod layer_from_dir;
mod layers;
mod lazy;
mod lazy_pull;
mod lazy_states;
mod parent_chain;
mod quota;
mod roots;
mod service;
mod settings;
mod snapshot_lock;
mod snapshotter;
mod state;
mod status;

pub use containerd_api::counts::{CallCounts, GetCountsResponse, OutcomeCount};
pub use content::{ContentError, PATIENCE};
pub use counts::{CALL_TIMES, ask_counts};
pub use error::SnapshotterError;
pub use filter::{FilterError, Filters};
pub use kernel::usage::Usage;
pub use labels::Labels;
pub use lazy_pull::{EngineChoices, EngineImages, RegistrySettings, with_pull_secrets};
pub use service::{ServeSnapshotsError, serve_snapshots};
pub use settings::{
    CollectChoices, LazyChoices, LazyError, LazyImages, PullSecret, SkipLayers, SnapshotAccess,
    SnapshotResources,
};
pub use snapshotter::{SnapshotMount, Snapshotter};
pub use state::SnapshotInfo;

/// Largest length of a snapshot's name, in bytes. Names contain those of namespaces and containers.
pub const NAME_MAX: usize = 4096;
/// Largest length of a label with its value, in bytes. Source: containerd's `snapshots.proto`.
pub const LABEL_MAX: usize = 4096;
/// Largest length of all labels of a snapshot, in bytes.
pub const LABELS_MAX: usize = 128 << 10;
