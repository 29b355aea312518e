//! Networks of several containers (decision 44).
//!
//! A network is a bridge. netavark connects containers to it, and aardvark-dns resolves their names; both are podman's
//! programs. For root, bridges are in the host's network. Users have one network namespace for all their bridges, which
//! pasta connects to the host's network (see `keeper`).
//!
//! Networks have records in the store ([`definition`]). The connections of running containers have records in a
//! directory that is removed at the next boot ([`attachment`]). Their files are locked by the monitors, so that a
//! command finds the remains of a monitor that was killed.

pub mod attachment;
pub mod definition;
mod keeper;
mod netavark;
mod place;
mod programs;
pub mod subnet;

pub use place::NetworkPlace;
pub use programs::{NetavarkPrograms, find_programs};

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use store::{NetworkRecordError, OperationError};

use crate::network::{NetworkError, Ports};

/// A network that a container joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkJoin {
    pub name: String,
    /// Address of the container; `None` for a free one.
    pub address: Option<Ipv4Addr>,
}

/// The networks of the store that a container joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinedNetworks {
    pub networks: Vec<NetworkJoin>,
    /// Names of the container besides its own.
    pub aliases: Vec<String>,
    /// Ports that are forwarded to the container.
    pub ports: Vec<Ports>,
}

/// Error of a network of containers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworksError {
    #[error(
        "netavark is not installed, which connects containers to networks (Debian, Fedora: packages netavark and \
        aardvark-dns): install it, or use --network pasta"
    )]
    NoNetavark,
    #[error(
        "aardvark-dns is not installed, which resolves the names of containers (Debian, Fedora: package \
        aardvark-dns): install it, or create network {0} with --disable-dns"
    )]
    NoAardvark(String),
    #[error(
        "networks of several containers need a directory of this user that ends with the session: set XDG_RUNTIME_DIR"
    )]
    NoPlace,
    #[error(transparent)]
    Record(#[from] NetworkRecordError),
    /// The record has values that this version of Quire does not write.
    #[error("the record of network {name} is invalid: {why}; `quire network rm {name}` removes it")]
    Invalid { name: String, why: String },
    #[error("no subnet is free from 10.89.0.0/24 to 10.255.255.0/24: use --subnet")]
    NoSubnet,
    #[error("subnet {subnet} overlaps with {other}: choose another one, or leave --subnet out")]
    Taken { subnet: String, other: String },
    #[error(
        "subnet {subnet} of network {name} overlaps with a route of {device} on this host: `quire network rm {name}` \
        and `quire network create {name}` choose another one"
    )]
    Route { name: String, subnet: String, device: String },
    #[error(
        "subnet {subnet} of network {name} overlaps with a network of container {container} of the store {store}: stop \
        that container, or `quire network rm {name}` and `quire network create --subnet SUBNET {name}`"
    )]
    Overlap { name: String, subnet: String, container: String, store: String },
    #[error("{0}")]
    Option(String),
    #[error("network {network} has no free address in {subnet}")]
    Full { network: String, subnet: String },
    #[error("address {address} of network {network} is in use by container {container}")]
    InUse { network: String, address: Ipv4Addr, container: String },
    #[error(
        "port {port} of the host: address already in use by container {container}: choose another port"
    )]
    Port { port: u16, container: String },
    #[error("cannot {action} container {container} {direction} its networks: netavark: {said}")]
    Refused { action: &'static str, direction: &'static str, container: String, said: String },
    #[error("cannot start the network of this user: {0}")]
    Keeper(String),
    #[error(
        "the process that keeps this user's networks has ended: stop the containers on them, and start them again"
    )]
    NoKeeper,
    #[error(transparent)]
    Pasta(#[from] NetworkError),
    #[error(transparent)]
    Failed(#[from] OperationError),
}
