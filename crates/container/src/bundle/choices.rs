//! Choices that several parts of a bundle depend on.

/// An OCI runtime, by its habits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// crun: refuses hosts where cgroup v1 and v2 are both mounted.
    Crun,
    /// runc, and whatever else behaves like it.
    Runc,
    /// gVisor's runsc.
    Runsc,
}

/// A container's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Network {
    /// A loopback interface of its own.
    None,
    /// All that the host has.
    Host,
    /// One of its own that pasta connects to the host's.
    Pasta,
    /// An existing network namespace, by its absolute path.
    Joined(String),
}

/// Whether the root can be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// As the mount below allows.
    Writable,
    /// Not at all.
    ReadOnly,
}
