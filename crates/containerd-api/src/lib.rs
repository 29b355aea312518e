//! Messages and gRPC services of containerd, and the service that counts calls of Quire's snapshotter.
//!
//! `cargo xtask oracle messages` generates every other file of this crate from `proto/` and compares it with the one in
//! the tree.
#![forbid(unsafe_code)]

macro_rules! generated {
    ($(#[doc = $text:literal] $name:ident,)*) => {$(
        #[doc = $text]
        #[allow(
            unreachable_pub,
            clippy::allow_attributes,
            clippy::allow_attributes_without_reason,
            clippy::must_use_candidate,
            reason = "generated"
        )]
        #[rustfmt::skip]
        pub mod $name;
    )*};
}

generated! {
    /// containerd's content store, which holds blobs.
    content,
    /// Calls and outcomes of Quire's snapshotter.
    counts,
    /// Application of layers to mounts, and their comparison.
    diff,
    /// Leases, which keep resources from containerd's garbage collector.
    leases,
    /// Snapshots: root filesystems of containers and their parents.
    snapshots,
    /// Mounts and descriptors, which the other services share.
    types,
}
