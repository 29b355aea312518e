//! How mounts spread, which both mounts and namespaces say.

/// How mounts spread between namespaces that share a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    /// Neither in nor out.
    Private,
    /// In from the original, but not out.
    Downstream,
    /// Both ways.
    Shared,
}
