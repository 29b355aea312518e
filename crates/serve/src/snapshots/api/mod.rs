//! Messages and services of containerd. `cargo xtask oracle messages` makes `snapshots.rs` and `types.rs` of the files in
//! `proto/`, and compares them.

#[expect(
    missing_docs,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::missing_errors_doc,
    clippy::must_use_candidate,
    reason = "generated"
)]
#[rustfmt::skip]
mod snapshots;
#[expect(missing_docs, reason = "generated")]
#[rustfmt::skip]
pub mod types;

pub use snapshots::*;
