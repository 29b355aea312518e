//! The definition of a network: the values of its record, checked.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use store::{NetworkRecord, NetworkRecordError, Seconds, Store};

use super::NetworksError;
use super::subnet::{Route, Subnet, free_subnet, routes};
use crate::random::{random_id, random_volume_name};

/// A request for a new network.
#[derive(Debug, Clone, Default)]
pub struct NewNetwork {
    pub labels: BTreeMap<String, String>,
    /// `None` for a free one.
    pub subnet: Option<Subnet>,
    /// Address of the bridge; `None` for the first one of the subnet.
    pub gateway: Option<Ipv4Addr>,
    /// Whether the network leads nowhere else.
    pub internal: bool,
    /// Whether the containers of the network resolve each other's names.
    pub dns: bool,
}

/// A network whose record was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definition {
    pub name: String,
    pub id: String,
    pub bridge: String,
    pub subnet: Subnet,
    pub gateway: Ipv4Addr,
    pub internal: bool,
    pub dns: bool,
}

/// Prefix of the names of bridges, to which random digits are added.
const BRIDGE: &str = "quire-";
const BRIDGE_DIGITS: usize = 8;

/// Names of `--network` that do not name a network of the store. Source: podman-run(1), `--network`.
pub const RESERVED: [&str; 10] = [
    "none",
    "host",
    "pasta",
    "bridge",
    "private",
    "slirp4netns",
    "default",
    "ns",
    "container",
    "podman",
];

impl NewNetwork {
    /// Records the network. `now` is the time of creation.
    ///
    /// # Errors
    /// [`NetworksError`] if the name or the subnet is taken or invalid.
    pub fn create(
        self,
        store: &Store,
        name: &str,
        now: Seconds,
    ) -> Result<NetworkRecord, NetworksError> {
        if RESERVED.contains(&name) {
            return Err(NetworksError::Option(format!(
                "\"{name}\" is a kind of network for --network: choose another name"
            )));
        }
        let lock = store.lock_networks()?;
        let routes = routes();
        let mut used: Vec<(String, Subnet)> = routes
            .into_iter()
            .map(|Route { device, subnet }| (format!("a route of {device}"), subnet))
            .collect();
        for (other, record) in store.networks.all()? {
            if other == name {
                return Err(NetworkRecordError::Exists(other).into());
            }
            // Only `network rm` needs a network whose record is damaged.
            let Ok(subnet) = record.map(|it| Subnet::new(it.address, it.prefix)) else { continue };
            used.extend(subnet.ok().map(|it| (format!("network {other}"), it)));
        }
        let subnet = match self.subnet {
            Some(subnet) => {
                if let Some((other, its)) = used.iter().find(|it| it.1.overlaps(&subnet)) {
                    let other = format!("{other} ({its})");
                    return Err(NetworksError::Taken { subnet: subnet.to_string(), other });
                }
                subnet
            }
            None if self.gateway.is_some() => {
                return Err(NetworksError::Option("--gateway needs --subnet".to_owned()));
            }
            None => {
                let used: Vec<_> = used.iter().map(|it| it.1).collect();
                free_subnet(&used).ok_or(NetworksError::NoSubnet)?
            }
        };
        let gateway = self.gateway.unwrap_or_else(|| subnet.gateway());
        if !subnet.has_host(gateway) {
            return Err(NetworksError::Option(format!(
                "--gateway {gateway} is not an address of a host in {subnet}"
            )));
        }
        let digits = random_id()?;
        let record = NetworkRecord {
            id: random_volume_name()?,
            created: now,
            labels: self.labels,
            bridge: format!("{BRIDGE}{}", &digits[..BRIDGE_DIGITS]),
            address: subnet.address(),
            prefix: subnet.prefix(),
            gateway,
            internal: self.internal,
            dns: self.dns,
        };
        store.networks.publish(&lock, name, &record)?;
        Ok(record)
    }
}

impl Definition {
    /// Reads the record of a network, and checks its values.
    ///
    /// # Errors
    /// [`NetworksError`] if there is no such network, or its record is damaged or invalid.
    pub fn load(store: &Store, name: &str) -> Result<Self, NetworksError> {
        Self::check(name, store.networks.get(name)?)
    }

    /// Checks the values of a record, which become names of files and devices, and rules of the firewall.
    ///
    /// # Errors
    /// [`NetworksError::Invalid`].
    pub fn check(name: &str, record: NetworkRecord) -> Result<Self, NetworksError> {
        let invalid =
            |why: &str| NetworksError::Invalid { name: name.to_owned(), why: why.to_owned() };
        let is_hex = |text: &str, digits| {
            text.len() == digits && text.bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
        };
        let NetworkRecord { id, bridge, address, prefix, gateway, internal, dns, .. } = record;
        if !is_hex(&id, 64) {
            return Err(invalid("its id is not 64 hexadecimal digits"));
        }
        if !bridge.strip_prefix(BRIDGE).is_some_and(|it| is_hex(it, BRIDGE_DIGITS)) {
            return Err(invalid("its bridge has another name than those of Quire"));
        }
        let subnet =
            Subnet::new(address, prefix).map_err(|_error| invalid("its subnet is none"))?;
        if subnet.address() != address || !subnet.has_host(gateway) {
            return Err(invalid("its addresses do not belong to its subnet"));
        }
        Ok(Self { name: name.to_owned(), id, bridge, subnet, gateway, internal, dns })
    }
}

#[cfg(test)]
mod tests {
    use store::OpenOptions;

    use super::*;

    fn new() -> NewNetwork {
        NewNetwork { dns: true, ..NewNetwork::default() }
    }

    #[test]
    fn networks_get_subnets_that_nothing_else_has() {
        let folder = tempfile::tempdir().unwrap();
        let who = kernel::process::Who::this_process();
        let store = Store::open(&folder.path().join("s"), who, OpenOptions::create()).unwrap();
        let make = |name: &str, new: NewNetwork| new.create(&store, name, Seconds(5));
        let one = make("one", new()).unwrap();
        let two = make("two", new()).unwrap();
        let subnet = |it: &NetworkRecord| Subnet::new(it.address, it.prefix).unwrap();
        assert!(!subnet(&one).overlaps(&subnet(&two)), "{one:?} {two:?}");
        assert!(one.bridge != two.bridge && one.bridge.len() < 16);
        assert_eq!(store.networks.get("one").unwrap(), one);
        let refused = |name: &str, new: NewNetwork, expect: &str| {
            let error = make(name, new).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        refused("one", new(), "already exists");
        refused("host", new(), "a kind of network");
        refused("../x", new(), "not a name of a network");
        let taken = NewNetwork { subnet: Some(subnet(&one)), ..new() };
        refused("three", taken, "overlaps with network one");
        let gateway = Some("10.1.2.3".parse().unwrap());
        refused("three", NewNetwork { gateway, ..new() }, "--gateway needs --subnet");
        let outside =
            NewNetwork { subnet: Some("198.51.100.0/24".parse().unwrap()), gateway, ..new() };
        refused("three", outside, "10.1.2.3 is not an address");
        assert_eq!(Definition::load(&store, "two").unwrap().gateway, two.gateway);
        assert!(matches!(
            Definition::load(&store, "three"),
            Err(NetworksError::Record(NetworkRecordError::Absent(_)))
        ));
    }

    #[test]
    fn hostile_records_are_refused() {
        let good = NetworkRecord {
            id: "0a".repeat(32),
            created: Seconds(0),
            labels: BTreeMap::new(),
            bridge: "quire-0123abcd".to_owned(),
            address: "10.90.0.0".parse().unwrap(),
            prefix: 24,
            gateway: "10.90.0.1".parse().unwrap(),
            internal: false,
            dns: true,
        };
        Definition::check("n", good.clone()).unwrap();
        let check = |change: &dyn Fn(&mut NetworkRecord), expect: &str| {
            let mut record = good.clone();
            change(&mut record);
            let error = Definition::check("n", record).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        check(&|it| it.id = "../../x".to_owned(), "its id");
        check(&|it| it.id = "0A".repeat(32), "its id");
        check(&|it| it.bridge = "eth0".to_owned(), "its bridge");
        check(&|it| it.bridge = "quire-../../x".to_owned(), "its bridge");
        check(&|it| it.prefix = 0, "its subnet");
        check(&|it| it.prefix = 33, "its subnet");
        check(&|it| it.address = "10.90.0.9".parse().unwrap(), "its addresses");
        check(&|it| it.gateway = "10.91.0.1".parse().unwrap(), "its addresses");
        check(&|it| it.gateway = "10.90.0.255".parse().unwrap(), "its addresses");
    }
}
