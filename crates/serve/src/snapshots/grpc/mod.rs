//! The services of containerd's gRPC interfaces, and their statuses.

pub(super) mod cri_proxy;
pub(super) mod filter;
pub(super) mod service;
pub(super) mod status;
