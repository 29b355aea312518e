//! Choices that several parts of a bundle depend on.

use serde::{Deserialize, Serialize};

/// A known OCI runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// crun, which refuses hosts that mount both cgroup v1 and v2.
    Crun,
    /// runc, or a program that behaves like it.
    Runc,
    Runsc,
}

/// A container's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Network {
    /// Only a loopback interface.
    None,
    /// The host's network.
    Host,
    /// A separate network, which pasta connects to the host's.
    Pasta,
    /// An existing network namespace, with its absolute path.
    Joined(String),
    /// A separate network that is connected to networks of the store, which the settings of the container list.
    Named,
    /// The network of another container of the store, which runs at each start.
    Container(String),
}

/// Whether a file system or mount can be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Writable, if the underlying file system allows it.
    Writable,
    ReadOnly,
}
