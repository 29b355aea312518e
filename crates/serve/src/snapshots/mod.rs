//! Snapshots for container engines, as containerd's proxy snapshotters have them (decision 20).
//!
//! [`Snapshotter`] has the snapshots of one engine: records in the store, and roots that `container` mounts. What is written
//! to a root becomes a layer of the store at its commit. [`serve_snapshots`] is the gRPC service over it.

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
mod exclusive;
mod filter;
mod headrooms;
mod heal;
mod id_map;
mod known_blobs;
mod labels;
mod layer_from_dir;
mod layers;
mod lazy;
mod lazy_memory;
mod lazy_pull;
mod parent_chain;
mod quota;
mod roots;
mod service;
mod settings;
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
    SnapshotSurroundings,
};
pub use snapshotter::{SnapshotMount, Snapshotter};
pub use state::SnapshotInfo;

/// The most bytes in the name of a snapshot: names have those of namespaces and containers in them.
pub const NAME_MAX: usize = 4096;
/// The most bytes in a label and its value together. Source: containerd's `snapshots.proto`.
pub const LABEL_MAX: usize = 4096;
/// The most bytes in all labels of a snapshot.
pub const LABELS_MAX: usize = 128 << 10;
