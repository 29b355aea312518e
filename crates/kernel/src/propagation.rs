//! Mount propagation, which mounts and namespaces share.

/// The propagation of mount events between peers of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// Events propagate in neither direction (`MS_PRIVATE`).
    Private,
    /// Events propagate from the original mount, but not back to it (`MS_SLAVE`).
    Downstream,
    /// Events propagate in both directions (`MS_SHARED`).
    Shared,
}
