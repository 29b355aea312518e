//! Metrics for Prometheus: their text, and an HTTP service that only this host reaches by default.
//!
//! Metrics have no names or digests of images, because other users of the host can read them.

mod address;
mod service;
pub mod text;

pub use address::MetricsAddress;
pub use service::MetricsListener;
pub(crate) use service::{MetricsPages, serve_metrics};
