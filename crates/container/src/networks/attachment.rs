//! Connections of running containers to networks: addresses, and what to undo at the container's end.

use std::fs::File;
use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use kernel::process::Signals;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use store::{OperationError, Store};

use super::definition::Definition;
use super::place::{ATTACHED, LAST, NetworkPlace, Side, read, remove_file};
use super::programs::NetavarkPrograms;
use super::subnet::{Subnet, routes};
use super::{JoinedNetworks, NetworksError, find_programs};
use crate::bundle::etc_files::NetworkNames;
use crate::folder::NETWORKS;
use crate::network::Ports;
use crate::random::random_volume_name;

/// A container's interface in a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Name of the network in its store.
    pub network: String,
    /// Id of the network.
    pub id: String,
    pub bridge: String,
    /// Name of the interface in the container.
    pub device: String,
    pub address: Ipv4Addr,
    pub subnet: String,
    pub gateway: Ipv4Addr,
    pub internal: bool,
    pub dns: bool,
}

/// A container's connections.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attachment {
    /// Random id, which no other connection of the host has.
    pub id: String,
    pub container: String,
    /// Directory of the container's store.
    pub store: PathBuf,
    pub endpoints: Vec<Endpoint>,
    /// Names of the container besides its own.
    pub aliases: Vec<String>,
    pub ports: Vec<Ports>,
    /// Name servers for names of other hosts; empty for those of the host.
    pub servers: Vec<IpAddr>,
    pub programs: NetavarkPrograms,
}

/// A container that will be connected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guest<'a> {
    pub(crate) id: &'a str,
    pub(crate) networks: &'a JoinedNetworks,
    /// Name servers that the caller wants.
    pub(crate) servers: &'a [IpAddr],
}

/// The addresses of a container that is about to start. If the process that starts it is killed, the next command
/// releases them. A drop does not: the command that waits for a monitor has a copy.
#[derive(Debug)]
pub struct Reservation {
    place: NetworkPlace,
    attachment: Attachment,
    /// The container's network namespace.
    network: OwnedFd,
    /// Locked file of the attachment.
    _file: File,
}

/// A connected container. It is disconnected on drop.
#[derive(Debug)]
pub(crate) struct Connected<'a> {
    reservation: &'a Reservation,
}

impl Reservation {
    /// Chooses addresses for a container, and makes its network namespace.
    pub(crate) fn make(
        place: &NetworkPlace,
        store: &Store,
        guest: Guest<'_>,
    ) -> Result<Self, NetworksError> {
        let programs = find_programs()?;
        let joins = guest.networks.networks.iter();
        let mut defined = Vec::new();
        for join in joins {
            let network = Definition::load(store, &join.name)?;
            if network.dns && programs.aardvark.is_none() {
                return Err(NetworksError::NoAardvark(network.name));
            }
            defined.push((network, join.address));
        }
        let _lock = place.lock()?;
        place.sweep_locked();
        let others = place.attachments()?;
        check_ports(&guest.networks.ports, &others)?;
        match place.side {
            Side::Host => check_routes(&defined)?,
            // The routes are those of the keeper's network, which also has the networks of the user's other stores.
            Side::Keeper => check_others(&defined, &others)?,
        }
        let mut endpoints = Vec::new();
        for (at, (network, wanted)) in defined.into_iter().enumerate() {
            let address = place.choose(&network, wanted, &others)?;
            endpoints.push(Endpoint {
                network: network.name,
                id: network.id,
                bridge: network.bridge,
                device: format!("eth{at}"),
                address,
                subnet: network.subnet.to_string(),
                gateway: network.gateway,
                internal: network.internal,
                dns: network.dns,
            });
        }
        let attachment = Attachment {
            id: random_volume_name()?,
            container: guest.id.to_owned(),
            store: store.path().to_owned(),
            endpoints,
            aliases: guest.networks.aliases.clone(),
            ports: guest.networks.ports.clone(),
            servers: guest.servers.to_vec(),
            programs,
        };
        let network = kernel::process::network_namespace(None)
            .map_err(OperationError::of("make", "a network for the container"))?;
        let file = place.record(&attachment)?;
        Ok(Self { place: place.clone(), attachment, network, _file: file })
    }

    /// Duplicates the descriptor of the network namespace.
    pub(crate) fn namespace(&self) -> Result<OwnedFd, NetworksError> {
        let copied = self.network.try_clone();
        Ok(copied.map_err(OperationError::of("copy", "a descriptor of the container's network"))?)
    }

    pub(crate) fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    /// Connects the container. The caller is in the mount namespace of the host, which aardvark-dns keeps in use.
    pub(crate) fn connect(&self, signals: &Signals) -> Result<Connected<'_>, NetworksError> {
        let connected = Connected { reservation: self };
        let lock = self.place.lock()?;
        let set_up = self.place.set_up(&self.attachment, self.network.as_fd(), signals);
        // After an error, the drop removes what netavark has left. It takes the lock.
        drop(lock);
        set_up.map(|()| connected)
    }

    /// Releases the addresses at the end of the container, or if it does not start.
    pub(crate) fn release(self) {
        let path = self.place.path(ATTACHED).join(&self.attachment.id);
        // The container was connected, and is disconnected.
        if !path.exists() {
            return;
        }
        if let Err(error) =
            self.place.lock().and_then(|_lock| self.place.forget(&self.attachment.id))
        {
            tracing::debug!(%error, "the next command releases the container's addresses");
        }
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        let Reservation { place, attachment, .. } = self.reservation;
        let disconnected = place.lock().and_then(|_lock| {
            let torn = place.tear_down(attachment);
            place.forget(&attachment.id).and(torn)
        });
        if let Err(error) = disconnected {
            let error = crate::error_chain::chain(&error);
            tracing::warn!(
                container = attachment.container,
                error,
                "cannot disconnect a container"
            );
        }
    }
}

impl Attachment {
    /// Returns the names and addresses for the container's files such as `/etc/hosts`.
    #[must_use]
    pub fn names(&self) -> NetworkNames {
        let servers = self.endpoints.iter().filter(|it| it.dns).map(|it| IpAddr::V4(it.gateway));
        let addresses = self.endpoints.iter().map(|it| IpAddr::V4(it.address));
        NetworkNames { servers: servers.collect(), addresses: addresses.collect() }
    }

    /// Writes the container's interfaces into its folder.
    pub(crate) fn note(&self, folder: &Path) -> io::Result<()> {
        std::fs::write(folder.join(NETWORKS), serde_json::to_vec(&self.endpoints)?)
    }
}

/// Returns the interfaces of the container with this folder in its last run; empty if unknown.
#[must_use]
pub fn noted_endpoints(folder: &Path) -> Vec<Endpoint> {
    let text = std::fs::read(folder.join(NETWORKS)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// File of a record that is being written.
const NEW: &str = "new";

fn check_ports(ports: &[Ports], others: &[Attachment]) -> Result<(), NetworksError> {
    for other in others {
        let overlap = ports.iter().find(|it| other.ports.iter().any(|its| its.overlaps(it)));
        if let Some(port) = overlap {
            let container = other.container.clone();
            return Err(NetworksError::Port { port: port.host, container });
        }
    }
    Ok(())
}

/// Refuses networks whose addresses belong to other interfaces of the host by now.
fn check_routes(defined: &[(Definition, Option<Ipv4Addr>)]) -> Result<(), NetworksError> {
    let routes = routes();
    for (network, _) in defined {
        let overlaps = routes
            .iter()
            .find(|it| it.device != network.bridge && it.subnet.overlaps(&network.subnet));
        if let Some(route) = overlaps {
            return Err(NetworksError::Route {
                name: network.name.clone(),
                subnet: network.subnet.to_string(),
                device: route.device.clone(),
            });
        }
    }
    Ok(())
}

/// Refuses networks whose addresses belong to networks of other stores in which containers run.
fn check_others(
    defined: &[(Definition, Option<Ipv4Addr>)],
    others: &[Attachment],
) -> Result<(), NetworksError> {
    for (network, _) in defined {
        let overlaps = |it: &Endpoint| {
            let subnet = it.subnet.parse::<Subnet>();
            it.bridge != network.bridge && subnet.is_ok_and(|it| it.overlaps(&network.subnet))
        };
        if let Some(other) = others.iter().find(|it| it.endpoints.iter().any(overlaps)) {
            return Err(NetworksError::Overlap {
                name: network.name.clone(),
                subnet: network.subnet.to_string(),
                container: other.container.clone(),
                store: other.store.display().to_string(),
            });
        }
    }
    Ok(())
}

impl NetworkPlace {
    /// Returns the connections of containers that run or start.
    fn attachments(&self) -> Result<Vec<Attachment>, NetworksError> {
        let path = self.path(ATTACHED);
        let entries = std::fs::read_dir(&path).map_err(OperationError::at("list", &path))?;
        let read = |entry: io::Result<std::fs::DirEntry>| {
            let bytes = read(&entry.ok()?.path()).ok()?;
            serde_json::from_slice(&bytes).ok()
        };
        Ok(entries.filter_map(read).collect())
    }

    /// Chooses an address in a network, and notes it.
    fn choose(
        &self,
        network: &Definition,
        wanted: Option<Ipv4Addr>,
        others: &[Attachment],
    ) -> Result<Ipv4Addr, NetworksError> {
        let user = |address: Ipv4Addr| {
            let is_it = |it: &Endpoint| it.id == network.id && it.address == address;
            others.iter().find(|other| other.endpoints.iter().any(is_it))
        };
        if let Some(address) = wanted {
            if !network.subnet.has_host(address) || address == network.gateway {
                return Err(NetworksError::Option(format!(
                    "--ip {address} is not an address for a container in {}, the subnet of network {}",
                    network.subnet, network.name
                )));
            }
            if let Some(other) = user(address) {
                let (network, container) = (network.name.clone(), other.container.clone());
                return Err(NetworksError::InUse { network, address, container });
            }
            return Ok(address);
        }
        let path = self.path(LAST).join(&network.bridge);
        let last = read(&path).ok().and_then(|it| String::from_utf8(it).ok()?.trim().parse().ok());
        let is_used = |it: Ipv4Addr| it == network.gateway || user(it).is_some();
        let address =
            network.subnet.free_host(last, is_used).ok_or_else(|| NetworksError::Full {
                network: network.name.clone(),
                subnet: network.subnet.to_string(),
            })?;
        std::fs::write(&path, address.to_string()).map_err(OperationError::at("write", &path))?;
        Ok(address)
    }

    /// Writes the record of a connection, and locks it.
    fn record(&self, attachment: &Attachment) -> Result<File, NetworksError> {
        // Commands that look for dead monitors without the lock of the place find only a locked file.
        let (path, new) = (self.path(ATTACHED).join(&attachment.id), self.path(NEW));
        let failed = OperationError::at("write", &path);
        let mut file = File::create(&new).map_err(failed)?;
        let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
        locked.map_err(io::Error::from).map_err(failed)?;
        let bytes = serde_json::to_vec(attachment).map_err(io::Error::from).map_err(failed)?;
        file.write_all(&bytes).map_err(failed)?;
        rustix::fs::rename(&new, &path).map_err(io::Error::from).map_err(failed)?;
        Ok(file)
    }

    fn forget(&self, id: &str) -> Result<(), NetworksError> {
        let path = self.path(ATTACHED).join(id);
        Ok(remove_file(&path).map_err(OperationError::at("remove", &path))?)
    }

    /// Disconnects containers whose monitor was killed. Failures are logged, because a later command tries again.
    pub fn sweep(&self) {
        // Most commands find no such containers, and must not wait for others.
        if !self.is_used() || !self.has_dead() {
            return;
        }
        // The next container of the user that joins a network does it.
        if self.side == Side::Keeper && !self.is_within() {
            return;
        }
        match self.lock() {
            Ok(_lock) => self.sweep_locked(),
            Err(error) => tracing::warn!(%error, "cannot disconnect dead containers"),
        }
    }

    fn has_dead(&self) -> bool {
        let entries = std::fs::read_dir(self.path(ATTACHED)).into_iter().flatten().flatten();
        entries.map(|it| it.path()).any(|path| lock_dead(&path).is_some())
    }

    pub(super) fn sweep_locked(&self) {
        let entries = std::fs::read_dir(self.path(ATTACHED)).into_iter().flatten().flatten();
        for path in entries.map(|it| it.path()) {
            let Some(_file) = lock_dead(&path) else { continue };
            let attachment =
                read(&path).ok().and_then(|it| serde_json::from_slice::<Attachment>(&it).ok());
            // A record that cannot be read was cut short before the container was connected.
            if let Some(attachment) = attachment
                && let Err(error) = self.tear_down(&attachment)
            {
                let error = crate::error_chain::chain(&error);
                tracing::debug!(
                    container = attachment.container,
                    error,
                    "cannot disconnect a dead container"
                );
            }
            if let Err(error) = remove_file(&path) {
                tracing::warn!(%error, "cannot remove {}", path.display());
            }
        }
    }
}

/// Opens and locks the record of a connection whose monitor is gone.
fn lock_dead(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok().map(|()| file)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use kernel::process::{UserNamespace, Who};
    use store::NetworkRecord;

    use super::*;
    use crate::network::Protocol;

    const ROOT: Who = Who { user: 0, group: 0, namespace: UserNamespace::Initial };

    fn definition(subnet: &str) -> Definition {
        let (address, prefix) = subnet.split_once('/').unwrap();
        let address: Ipv4Addr = address.parse().unwrap();
        let record = NetworkRecord {
            id: "0a".repeat(32),
            created: store::Seconds(0),
            labels: std::collections::BTreeMap::new(),
            bridge: "quire-0123abcd".to_owned(),
            address,
            prefix: prefix.parse().unwrap(),
            gateway: Ipv4Addr::from_bits(address.to_bits() + 1),
            internal: false,
            dns: true,
        };
        Definition::check("n", record).unwrap()
    }

    fn attachment(container: &str, address: Ipv4Addr) -> Attachment {
        let network = definition("10.90.0.0/29");
        Attachment {
            id: container.to_owned(),
            container: container.to_owned(),
            store: "/s".into(),
            endpoints: vec![Endpoint {
                network: network.name,
                id: network.id,
                bridge: network.bridge,
                device: "eth0".to_owned(),
                address,
                subnet: network.subnet.to_string(),
                gateway: network.gateway,
                internal: false,
                dns: true,
            }],
            aliases: Vec::new(),
            ports: vec![Ports {
                address: None,
                host: 8080,
                container: 80,
                count: NonZeroU16::MIN,
                protocol: Protocol::Tcp,
            }],
            servers: Vec::new(),
            programs: NetavarkPrograms { netavark: "/n".into(), aardvark: None },
        }
    }

    #[test]
    fn addresses_are_given_once() {
        let folder = tempfile::tempdir().unwrap();
        let place = NetworkPlace::new(folder.path().join("a/networks"), ROOT);
        std::fs::create_dir(folder.path().join("a")).unwrap();
        let _lock = place.lock().unwrap();
        let network = definition("10.90.0.0/29");
        let mut others = Vec::new();
        let mut files = Vec::new();
        for expect in ["10.90.0.2", "10.90.0.3", "10.90.0.4", "10.90.0.5", "10.90.0.6"] {
            let address = place.choose(&network, None, &others).unwrap();
            assert_eq!(address.to_string(), expect);
            others.push(attachment(&format!("c{expect}"), address));
            files.push(place.record(others.last().unwrap()).unwrap());
        }
        let full = place.choose(&network, None, &others).unwrap_err().to_string();
        assert!(full.contains("no free address in 10.90.0.0/29"), "{full}");
        let wanted = |address: &str| place.choose(&network, address.parse().ok(), &others[1..]);
        assert_eq!(wanted("10.90.0.2").unwrap().to_string(), "10.90.0.2");
        let taken = wanted("10.90.0.3").unwrap_err().to_string();
        assert!(taken.contains("in use by container c10.90.0.3"), "{taken}");
        for address in ["10.90.0.0", "10.90.0.1", "10.90.0.7", "10.91.0.2"] {
            assert!(wanted(address).is_err(), "{address}");
        }
        let found = place.attachments().unwrap();
        assert_eq!(found.len(), 5);
        assert!(found.contains(&others[0]));
        let port = check_ports(&others[0].ports, &found).unwrap_err().to_string();
        assert!(port.contains("port 8080"), "{port}");
        // Those of living monitors stay.
        assert!(!place.has_dead());
        files.remove(0);
        assert!(place.has_dead());
    }

    /// All stores of a user without root have their bridges in one network.
    #[test]
    fn networks_of_several_stores_do_not_overlap() {
        let others = [attachment("c", Ipv4Addr::new(10, 90, 0, 2))];
        let same = definition("10.90.0.0/29");
        let bridge = || "quire-89abcdef".to_owned();
        let other = |subnet| Definition { bridge: bridge(), ..definition(subnet) };
        assert!(check_others(&[(same, None), (other("10.90.0.8/29"), None)], &others).is_ok());
        let error = check_others(&[(other("10.90.0.0/24"), None)], &others).unwrap_err();
        assert!(error.to_string().contains("container c of the store /s"), "{error}");
    }

    #[test]
    fn other_users_cannot_prepare_the_place() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let parent = folder.path().join("a");
        std::fs::create_dir(&parent).unwrap();
        std::fs::set_permissions(&parent, std::fs::Permissions::from_mode(0o777)).unwrap();
        let place = NetworkPlace::new(parent.join("networks"), ROOT);
        let error = place.lock().unwrap_err();
        assert!(crate::error_chain::chain(&error).contains("only this user"), "{error}");
        std::fs::remove_dir(&parent).unwrap();
        std::os::unix::fs::symlink("/tmp", &parent).unwrap();
        assert!(place.lock().is_err());
    }
}
