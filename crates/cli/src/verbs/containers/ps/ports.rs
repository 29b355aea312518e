//! Published ports in lists of containers.

use container::network::{Ports, Protocol};
use serde::Serialize;

/// A range of ports of the host that lead to the same number of ports of a container, in order.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct PortsReport {
    /// Address of the host. Null means all addresses.
    pub(super) address: Option<String>,
    /// The first port of the host.
    pub(super) host: u16,
    /// The first port of the container.
    pub(super) container: u16,
    /// Number of ports.
    pub(super) count: u16,
    /// `tcp` or `udp`.
    pub(super) protocol: &'static str,
}

impl PortsReport {
    pub(super) fn from_ports(ports: &Ports) -> Self {
        Self {
            address: ports.address.map(|it| it.to_string()),
            host: ports.host,
            container: ports.container,
            count: ports.count.get(),
            protocol: match ports.protocol {
                Protocol::Tcp => "tcp",
                Protocol::Udp => "udp",
            },
        }
    }

    /// Formats the ports for people, like docker and podman.
    pub(super) fn text(&self) -> String {
        let address = match &self.address {
            None => "0.0.0.0".to_owned(),
            Some(address) if address.contains(':') => format!("[{address}]"),
            Some(address) => address.clone(),
        };
        let range = |first: u16| match self.count {
            1 => first.to_string(),
            count => format!("{first}-{}", first.saturating_add(count - 1)),
        };
        format!("{address}:{}->{}/{}", range(self.host), range(self.container), self.protocol)
    }
}
