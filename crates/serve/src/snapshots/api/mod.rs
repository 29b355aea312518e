//! Messages and services of containerd, and one of our own. `cargo xtask oracle messages` makes all files beside this one of those in `proto/`,
//! and compares them.

macro_rules! generated {
    ($(#[doc = $text:literal] $name:ident,)*) => {$(
        #[doc = $text]
        #[allow(
            missing_docs,
            unreachable_pub,
            clippy::allow_attributes,
            clippy::allow_attributes_without_reason,
            clippy::missing_errors_doc,
            clippy::must_use_candidate,
            reason = "generated"
        )]
        #[rustfmt::skip]
        pub mod $name;
    )*};
}

generated! {
    /// Where an engine keeps blobs.
    content,
    /// What a service has done: our own.
    counts,
    /// Unpacks layers.
    diff,
    /// What keeps blobs from an engine's garbage collector.
    leases,
    /// Roots of containers.
    snapshots,
    /// Mounts and descriptors.
    types,
}
