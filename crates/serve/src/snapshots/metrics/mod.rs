//! Metrics of a snapshotter and its store for Prometheus.

pub(super) mod engine;
pub(super) mod page;
mod store_use;
