//! IPv4 subnets, and the choice of a free one.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// Addresses with a common prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet {
    /// First address.
    first: u32,
    /// Number of leading bits that all addresses share.
    prefix: u8,
}

/// The text is not a subnet of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("use an IPv4 subnet with 8 to 30 bits, such as 10.90.0.0/24")]
pub struct SubnetError;

/// Range of prefixes. A subnet of 30 bits has the addresses of the bridge and of one container.
const PREFIXES: std::ops::RangeInclusive<u8> = 8..=30;

impl Subnet {
    /// Returns the subnet with this address.
    ///
    /// # Errors
    /// [`SubnetError`] if it has too few or too many addresses, or addresses of another kind.
    pub fn new(address: Ipv4Addr, prefix: u8) -> Result<Self, SubnetError> {
        let is_special =
            address.is_multicast() || address.is_loopback() || address.octets()[0] == 0;
        if !PREFIXES.contains(&prefix) || is_special {
            return Err(SubnetError);
        }
        Ok(Self::of_route(address.to_bits(), prefix))
    }

    const fn of_route(address: u32, prefix: u8) -> Self {
        Self { first: address & mask(prefix), prefix }
    }

    #[must_use]
    pub const fn prefix(&self) -> u8 {
        self.prefix
    }

    /// Returns the first address, which no host has.
    #[must_use]
    pub const fn address(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first)
    }

    const fn last(&self) -> u32 {
        self.first | !mask(self.prefix)
    }

    /// Returns the address that the bridge has by default.
    #[must_use]
    pub const fn gateway(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.first | 1)
    }

    /// Whether a host of the subnet may have the address.
    #[must_use]
    pub const fn has_host(&self, address: Ipv4Addr) -> bool {
        let address = address.to_bits();
        address > self.first && address < self.last()
    }

    /// Whether both have an address in common.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last() && other.first <= self.last()
    }

    /// Returns the first address of a host after `last` that is not in use. After the last address of the subnet comes
    /// the first one.
    #[must_use]
    pub fn free_host(
        &self,
        last: Option<Ipv4Addr>,
        is_used: impl Fn(Ipv4Addr) -> bool,
    ) -> Option<Ipv4Addr> {
        let last = last.filter(|it| self.has_host(*it)).map_or(self.first, Ipv4Addr::to_bits);
        let after = last.checked_add(1)?..self.last();
        let before = self.first.checked_add(1)?..=last;
        after.chain(before).map(Ipv4Addr::from_bits).find(|it| self.has_host(*it) && !is_used(*it))
    }
}

const fn mask(prefix: u8) -> u32 {
    match prefix {
        0 => 0,
        32.. => u32::MAX,
        _ => u32::MAX << (32 - prefix),
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address(), self.prefix)
    }
}

impl FromStr for Subnet {
    type Err = SubnetError;

    fn from_str(text: &str) -> Result<Self, SubnetError> {
        let (address, prefix) = text.split_once('/').ok_or(SubnetError)?;
        let is_number = !prefix.is_empty() && prefix.bytes().all(|it| it.is_ascii_digit());
        let prefix = prefix.parse().ok().filter(|_| is_number).ok_or(SubnetError)?;
        Self::new(address.parse().map_err(|_error| SubnetError)?, prefix)
    }
}

/// Number of subnets of 24 bits from which a network gets its own. Source: podman, containers.conf(5),
/// `default_subnet_pools`: 10.89.0.0 to 10.255.255.0.
const CHOICES: std::ops::RangeInclusive<u32> = 0x000a_5900..=0x000a_ffff;

/// Returns the first subnet from 10.89.0.0/24 on that overlaps with none of these.
#[must_use]
pub fn free_subnet(used: &[Subnet]) -> Option<Subnet> {
    let mut all = CHOICES.map(|it| Subnet::of_route(it << 8, 24));
    all.find(|it| !used.iter().any(|used| used.overlaps(it)))
}

/// A route of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    pub device: String,
    pub subnet: Subnet,
}

/// Returns the IPv4 routes in this process's network. Without `/proc`, there are none.
#[must_use]
pub fn routes() -> Vec<Route> {
    parse_routes(&std::fs::read_to_string("/proc/self/net/route").unwrap_or_default())
}

/// Parses the kernel's table. Routes to everything are left out, also if they come in halves, as of VPNs. Source: Linux
/// `net/ipv4/fib_trie.c`, `fib_route_seq_show`.
fn parse_routes(text: &str) -> Vec<Route> {
    let route = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        // The kernel prints the address in the byte order of the network as a number of the processor.
        let number = |at: usize| {
            let text = words.get(at)?;
            u32::from_str_radix(text, 16).ok().map(u32::from_be)
        };
        let prefix = u8::try_from(number(7)?.count_ones()).ok().filter(|it| *it > 1)?;
        let device = (*words.first()?).to_owned();
        Some(Route { device, subnet: Subnet::of_route(number(1)?, prefix) })
    };
    text.lines().skip(1).filter_map(route).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    #[test]
    fn subnets_are_parsed_strictly() {
        for (text, expect) in [
            ("10.90.0.0/24", "10.90.0.0/24"),
            ("10.90.0.77/24", "10.90.0.0/24"),
            ("192.168.1.200/30", "192.168.1.200/30"),
            ("172.16.0.0/12", "172.16.0.0/12"),
        ] {
            assert_eq!(subnet(text).to_string(), expect);
        }
        for text in [
            "",
            "10.90.0.0",
            "10.90.0.0/",
            "10.90.0.0/31",
            "10.90.0.0/7",
            "10.90.0.0/+24",
            "10.90.0/24",
            "fd00::/64",
            "224.0.0.0/24",
            "127.0.0.0/24",
            "0.0.0.0/8",
            "10.90.0.0/24 ",
            "10.90.0.0/24/24",
        ] {
            assert_eq!(text.parse::<Subnet>(), Err(SubnetError), "{text}");
        }
    }

    #[test]
    fn hosts_of_a_subnet() {
        let it = subnet("10.90.3.0/24");
        let host = |text: &str| it.has_host(text.parse().unwrap());
        assert_eq!(it.gateway().to_string(), "10.90.3.1");
        assert!(host("10.90.3.1") && host("10.90.3.254"));
        assert!(!host("10.90.3.0") && !host("10.90.3.255") && !host("10.90.4.1"));
        let small = subnet("10.90.3.4/30");
        let free = |last: Option<&str>, used: &[&str]| {
            let last = last.map(|it| it.parse().unwrap());
            let found = small.free_host(last, |it| used.contains(&&*it.to_string()));
            found.map(|it| it.to_string())
        };
        assert_eq!(free(None, &["10.90.3.5"]).as_deref(), Some("10.90.3.6"));
        assert_eq!(free(None, &["10.90.3.5", "10.90.3.6"]), None);
        // Addresses are not used again at once.
        assert_eq!(free(Some("10.90.3.5"), &[]).as_deref(), Some("10.90.3.6"));
        assert_eq!(free(Some("10.90.3.6"), &[]).as_deref(), Some("10.90.3.5"));
        assert_eq!(free(Some("9.9.9.9"), &[]).as_deref(), Some("10.90.3.5"));
    }

    /// The pool is podman's.
    #[test]
    fn free_subnets_come_from_podmans_pool() {
        let free = |used: &[&str]| {
            let used: Vec<_> = used.iter().map(|it| subnet(it)).collect();
            free_subnet(&used).map(|it| it.to_string())
        };
        assert_eq!(free(&[]).as_deref(), Some("10.89.0.0/24"));
        assert_eq!(free(&["10.89.0.0/24", "10.89.1.128/25"]).as_deref(), Some("10.89.2.0/24"));
        assert_eq!(free(&["10.64.0.0/10", "10.0.0.0/9"]).as_deref(), Some("10.128.0.0/24"));
        assert_eq!(free(&["10.0.0.0/8"]), None);
    }

    /// Two lines of a host, and those of a VPN.
    #[test]
    #[cfg(target_endian = "little")]
    fn routes_of_a_host() {
        let text = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
            eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
            eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
            tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n\
            tun0\t0700590A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n\
            odd\n";
        let found = parse_routes(text);
        let found: Vec<_> = found.iter().map(|it| format!("{} {}", it.device, it.subnet)).collect();
        assert_eq!(found, ["eth0 192.0.2.0/24", "tun0 10.89.0.7/32"]);
    }
}
