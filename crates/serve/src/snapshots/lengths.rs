//! Largest lengths of what engines name snapshots with.

/// Largest length of a snapshot's name, in bytes. Names contain those of namespaces and containers.
pub const NAME_MAX: usize = 4096;
/// Largest length of a label with its value, in bytes. Source: containerd's `snapshots.proto`.
pub const LABEL_MAX: usize = 4096;
/// Largest length of all labels of a snapshot, in bytes.
pub const LABELS_MAX: usize = 128 << 10;
