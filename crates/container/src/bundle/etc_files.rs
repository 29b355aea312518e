//! The files with a container's own name and the means to look up others: `/etc/hosts`, `/etc/hostname` and
//! `/etc/resolv.conf` (decision 15). Also `/etc/localtime`, if the caller chooses a time zone.

use std::io::{Error, ErrorKind, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use store::OperationError;

use crate::bundle::choices::{Access, Network};

/// Paths of these files. A container's root needs a file at each of them to be mounted on.
pub const PLACES: [&str; 3] = [HOSTS, HOSTNAME, RESOLVER];
const HOSTS: &str = "/etc/hosts";
const HOSTNAME: &str = "/etc/hostname";
const RESOLVER: &str = "/etc/resolv.conf";
const LOCALTIME: &str = "/etc/localtime";

/// Directory of the host's time zones. Source: tzset(3).
const ZONES: &str = "/usr/share/zoneinfo";

/// First bytes of a time zone's file. Source: tzfile(5).
const ZONE_MAGIC: &[u8] = b"TZif";

/// File in which systemd-resolved lists the servers that it queries. Source: systemd-resolved.service(8),
/// "/etc/resolv.conf".
const UPSTREAM: &str = "/run/systemd/resolve/resolv.conf";

/// Domain in which aardvark-dns resolves the names of containers. Source: netavark `src/network/constants.rs`.
pub const DOMAIN: &str = "dns.podman";

/// Name servers and addresses of a container in its networks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkNames {
    /// Name servers that resolve the names of other containers.
    pub servers: Vec<IpAddr>,
    /// Addresses of the container.
    pub addresses: Vec<IpAddr>,
}

/// Domain in which the names of containers are searched, for a container with these names.
fn search_domain(names: &NetworkNames) -> Option<&'static str> {
    (!names.servers.is_empty()).then_some(DOMAIN)
}

/// Address at which pasta forwards requests to the host's name server. podman uses the same address. It is link-local,
/// so routers do not forward it.
pub(crate) const FORWARDER: &str = "169.254.1.1";

/// Maximum size in bytes. Even lists of a hundred thousand blocked names are smaller.
const LARGEST: u64 = 16 << 20;

/// A line of `/etc/hosts`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    pub address: IpAddr,
    /// At least one name.
    pub names: Vec<String>,
}

/// Contents of `/etc/resolv.conf`. A field that is `None` is copied from the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolver {
    pub servers: Option<Vec<IpAddr>>,
    /// Domains to append to names without a dot.
    pub search: Option<Vec<String>>,
    /// Options such as `ndots:2`.
    pub options: Option<Vec<String>>,
}

/// Files for looking up names that the caller requests. A field that is `None` keeps the image's file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Names {
    /// Hosts in addition to the default ones.
    pub hosts: Option<Vec<Host>>,
    /// Name servers, which look up all other names.
    pub resolver: Option<Resolver>,
    /// Time zone. Requests of Quire 0.1 lack the field.
    #[serde(default)]
    pub zone: Option<TimeZone>,
}

/// A time zone of the host, which is read at each start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeZone {
    /// The host's own.
    Host,
    /// Its name, such as `Europe/Berlin`.
    Named(String),
}

/// A text that is no name of a time zone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("use local for the host's time zone, or a name such as Europe/Berlin")]
pub struct TimeZoneError;

impl FromStr for TimeZone {
    type Err = TimeZoneError;

    fn from_str(text: &str) -> Result<Self, TimeZoneError> {
        let is_part = |part: &str| {
            let is_good = |it: u8| it.is_ascii_alphanumeric() || b"-_+".contains(&it);
            !part.is_empty() && part.bytes().all(is_good)
        };
        match text {
            "local" => Ok(Self::Host),
            name if name.split('/').all(is_part) => Ok(Self::Named(name.to_owned())),
            _ => Err(TimeZoneError),
        }
    }
}

impl TimeZone {
    /// Reads the zone's file.
    fn read(&self) -> Result<Vec<u8>, OperationError> {
        let path = match self {
            Self::Host => LOCALTIME.to_owned(),
            Self::Named(name) => format!("{ZONES}/{name}"),
        };
        let bytes = read(&path)?;
        if !bytes.starts_with(ZONE_MAGIC) {
            let failed = OperationError::of("use", "the time zone of --tz");
            return Err(failed(format!("the host has no time zone in {path}")));
        }
        Ok(bytes)
    }
}

/// Path and contents of a file for a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameFile {
    /// Path in the container.
    pub place: &'static str,
    /// Contents of the file.
    pub bytes: Vec<u8>,
}

/// A file for names, and its path on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameMount {
    /// Path in the container.
    pub place: &'static str,
    /// Its path on the host.
    pub source: String,
    /// Whether the container may write the file, if its root is writable.
    pub access: Access,
}

impl Resolver {
    /// Whether the container gets the file: without a network, only if the caller has options for it.
    fn is_needed(&self, network: &Network) -> bool {
        *network != Network::None || *self != Self::default()
    }
}

impl Names {
    /// Returns the paths of the files that [`files`] makes.
    pub(crate) fn places(&self, network: &Network) -> Vec<&'static str> {
        let hosts = self.hosts.as_ref().map(|_| HOSTS);
        let resolver = self.resolver.as_ref().filter(|it| it.is_needed(network));
        let zone = self.zone.as_ref().map(|_| LOCALTIME);
        let others = hosts.into_iter().chain(resolver.map(|_| RESOLVER)).chain(zone);
        others.chain([HOSTNAME]).collect()
    }
}

impl Names {
    /// Adds the container's addresses and name servers in networks of the store. Names of other hosts are asked of the
    /// servers that the caller named by way of aardvark-dns.
    pub(crate) fn add(&mut self, networks: &NetworkNames, hostname: &str, id: &str) {
        if let Some(hosts) = &mut self.hosts {
            let names: Vec<_> = match hostname == id {
                true => vec![id.to_owned()],
                false => vec![hostname.to_owned(), id.to_owned()],
            };
            let is_given = |name: &String| hosts.iter().any(|it| it.names.contains(name));
            let names: Vec<_> = names.into_iter().filter(|it| !is_given(it)).collect();
            if !names.is_empty() {
                let own = networks.addresses.iter();
                hosts.extend(own.map(|it| Host { address: *it, names: names.clone() }));
            }
        }
        if let Some(resolver) = &mut self.resolver
            && let Some(domain) = search_domain(networks)
        {
            resolver.servers = Some(networks.servers.clone());
            if resolver.search.is_none() {
                resolver.search = Some(vec![domain.to_owned()]);
            }
        }
    }
}

impl NameFile {
    /// Returns the file's name without its directory.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.place.rsplit('/').next().unwrap_or(self.place)
    }
}

/// Returns the files for a container with this host name in this network.
pub fn files(
    names: &Names,
    network: &Network,
    hostname: &str,
) -> Result<Vec<NameFile>, OperationError> {
    // If links of the image lead several paths to the same file, the first one is used.
    let mut files = Vec::new();
    if let Some(extra) = &names.hosts {
        // Without a network, the container cannot reach other hosts, so it does not need the host's entries.
        let base = match network {
            Network::None => String::new(),
            Network::Host
            | Network::Joined(_)
            | Network::Container(_)
            | Network::Named
            | Network::Pasta => read_text(HOSTS)?,
        };
        let mut extra = extra.clone();
        if *network == Network::Host {
            extra.extend(own_host(&extra));
        }
        let text = hosts_text(&extra, &base, hostname);
        files.push(NameFile { place: HOSTS, bytes: text.into_bytes() });
    }
    if let Some(resolver) = names.resolver.as_ref().filter(|it| it.is_needed(network)) {
        // Without a network, the host's name servers are unreachable.
        let mut host = if *network == Network::None { String::new() } else { read_text(RESOLVER)? };
        let is_elsewhere = *network != Network::Host;
        if is_elsewhere && *network != Network::None && servers(&host).all(|it| it.is_loopback()) {
            // The host has a stub resolver, which forwards requests to these other servers.
            let upstream = read_text(UPSTREAM)?;
            if !upstream.is_empty() {
                host = upstream;
            }
        }
        let mut text = resolver_text(resolver, &host, is_elsewhere);
        // A container whose network is joined may have it by pasta.
        if matches!(network, Network::Pasta | Network::Container(_))
            && resolver.servers.is_none()
            && servers(&text).next().is_none()
        {
            // pasta forwards this address to the name server at the host's loopback.
            text += &format!("nameserver {FORWARDER}\n");
        }
        files.push(NameFile { place: RESOLVER, bytes: text.into_bytes() });
    }
    if let Some(zone) = &names.zone {
        files.push(NameFile { place: LOCALTIME, bytes: zone.read()? });
    }
    files.push(NameFile { place: HOSTNAME, bytes: format!("{hostname}\n").into_bytes() });
    Ok(files)
}

fn read_text(path: &str) -> Result<String, OperationError> {
    Ok(String::from_utf8_lossy(&read(path)?).into_owned())
}

/// Reads a file of the host. A missing file is empty.
fn read(path: &str) -> Result<Vec<u8>, OperationError> {
    let object = format!("{path}, the source of the container's copy");
    let failed = OperationError::of("read", &object);
    let file = match std::fs::File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        file => file.map_err(failed)?,
    };
    let mut bytes = Vec::new();
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LARGEST {
        let text = "it is larger than 16 MiB: --no-hosts and --dns none leave the image's files";
        return Err(failed(Error::new(ErrorKind::FileTooLarge, text)));
    }
    Ok(bytes)
}

/// Returns the contents of `/etc/hosts`. The first line with a name is used, so the caller's entries come first and
/// their names are removed from other lines. Source: hosts(5).
fn hosts_text(extra: &[Host], base: &str, own: &str) -> String {
    let mut hosts = extra.to_vec();
    for mut host in base.lines().filter_map(host) {
        host.names.retain(|name| !extra.iter().any(|it| it.names.contains(name)));
        hosts.push(host);
    }
    let localhost = |hosts: &[Host], v6: bool| {
        let mut named = hosts.iter().filter(|it| it.names.iter().any(|name| name == LOCALHOST));
        // The caller may assign another address to `localhost`.
        named.any(|it| it.address.is_ipv6() == v6 || extra.contains(it))
    };
    let words = |names: &[&str]| names.iter().map(|&it| it.to_owned()).collect();
    let mut first = Vec::new();
    if !localhost(&hosts, false) {
        first.push(Host { address: V4, names: words(&[LOCALHOST]) });
    }
    if !localhost(&hosts, true) {
        let names = words(&[LOCALHOST, "ip6-localhost", "ip6-loopback"]);
        first.push(Host { address: V6, names });
    }
    hosts.splice(0..0, first);
    if !hosts.iter().any(|it| it.names.iter().any(|name| name == own)) {
        hosts.push(Host { address: V4, names: vec![own.to_owned()] });
    }
    let lines = hosts.iter().filter(|it| !it.names.is_empty());
    lines.map(|it| format!("{}\t{}\n", it.address, it.names.join(" "))).collect()
}

/// Names of the host in containers. Source: podman-run(1), `--add-host`, and Docker.
const HOST_NAMES: [&str; 2] = ["host.containers.internal", "host.docker.internal"];

/// Returns the line with the names of the host for a container in its network, without names that `extra` has.
fn own_host(extra: &[Host]) -> Option<Host> {
    let is_given = |name: &str| extra.iter().any(|it| it.names.iter().any(|it| it == name));
    let names = HOST_NAMES.into_iter().filter(|it| !is_given(it)).map(str::to_owned);
    let names: Vec<_> = names.collect();
    (!names.is_empty()).then_some(Host { address: V4, names })
}

const LOCALHOST: &str = "localhost";
const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

/// Parses a line. Returns `None` for a comment and for a line that cannot be used.
fn host(line: &str) -> Option<Host> {
    let mut words = line.split('#').next()?.split_whitespace();
    // An address with an interface, such as `fe80::1%lo0`, is not parsed, because the container has other interfaces.
    let address = words.next()?.parse().ok()?;
    let names: Vec<_> = words.map(str::to_owned).collect();
    (!names.is_empty()).then_some(Host { address, names })
}

/// Returns the contents of `/etc/resolv.conf`. Source: resolv.conf(5).
fn resolver_text(wanted: &Resolver, host: &str, is_elsewhere: bool) -> String {
    if *wanted == Resolver::default() && !is_elsewhere {
        return host.to_owned();
    }
    let own = || {
        // Servers at the host's loopback cannot be reached from another network namespace.
        servers(host)
            .filter(|it| !is_elsewhere || it.is_elsewhere_too())
            .map(|it| it.text)
            .collect()
    };
    let wanted_servers = |servers: &Vec<IpAddr>| servers.iter().map(IpAddr::to_string).collect();
    let servers: Vec<_> = wanted.servers.as_ref().map_or_else(own, wanted_servers);
    let search = wanted.search.clone().unwrap_or_else(|| {
        // Only the last line is used.
        words(host, &["search", "domain"]).last().unwrap_or_default()
    });
    let options =
        wanted.options.clone().unwrap_or_else(|| words(host, &["options"]).flatten().collect());
    let mut text = String::new();
    if !search.is_empty() {
        text += &format!("search {}\n", search.join(" "));
    }
    text.extend(servers.iter().map(|it| format!("nameserver {it}\n")));
    if !options.is_empty() {
        text += &format!("options {}\n", options.join(" "));
    }
    text
}

/// A name server of the host.
struct HostServer {
    /// Address in the host's file. A link-local address names its interface, as in `fe80::1%eth0`.
    text: String,
    /// `None` if only some programs accept the notation, such as `127.1`.
    address: Option<IpAddr>,
}

impl HostServer {
    fn is_loopback(&self) -> bool {
        self.address.is_none_or(|it| it.is_loopback())
    }

    /// Whether the server can also be reached from another network.
    fn is_elsewhere_too(&self) -> bool {
        if self.address.is_none() {
            tracing::warn!(
                server = self.text,
                "ignoring a name server of the host that is not an address"
            );
        }
        !self.is_loopback()
    }
}

fn servers(text: &str) -> impl Iterator<Item = HostServer> {
    words(text, &["nameserver"]).filter_map(|words| {
        let text = words.into_iter().next()?;
        let address = match text.split_once('%') {
            Some((address, _)) => address.parse().map(IpAddr::V6).ok(),
            None => text.parse().ok(),
        };
        Some(HostServer { text, address })
    })
}

/// Returns, for each line that starts with one of the `keys`, the words after it.
fn words(text: &str, keys: &'static [&str]) -> impl Iterator<Item = Vec<String>> {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let is_meant = words.next().is_some_and(|it| keys.contains(&it));
        is_meant.then(|| words.map(str::to_owned).collect())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extra(address: &str, name: &str) -> Host {
        Host { address: address.parse().unwrap(), names: vec![name.to_owned()] }
    }

    /// The rules are those of hosts(5) and podman: names in the caller's entries are removed from the host's lines.
    #[test]
    fn hosts_have_everybody_once() {
        let check = |extra: &[Host], base: &str, expect: &str| {
            assert_eq!(hosts_text(extra, base, "me"), expect, "{base}");
        };
        let v6 = "::1\tlocalhost ip6-localhost ip6-loopback\n";
        check(&[], "", &format!("127.0.0.1\tlocalhost\n{v6}127.0.0.1\tme\n"));
        check(
            &[extra("10.0.0.1", "db"), extra("::2", "web")],
            "127.0.0.1 localhost box # this one\n\n# 1.1.1.1 no\nnot an address\n10.0.0.9 db old\n10.0.0.8 web\n",
            &format!(
                "{v6}10.0.0.1\tdb\n::2\tweb\n127.0.0.1\tlocalhost box\n10.0.0.9\told\n127.0.0.1\tme\n"
            ),
        );
        check(
            &[extra("10.0.0.1", "localhost"), extra("10.0.0.2", "me")],
            "::1 localhost\nfe80::1%lo0 localhost\n",
            "10.0.0.1\tlocalhost\n10.0.0.2\tme\n",
        );
    }

    #[test]
    fn the_host_has_names_in_its_network() {
        let text = |extra: Vec<Host>, network: &Network| {
            let names = Names { hosts: Some(extra), ..Names::default() };
            let file = files(&names, network, "me").unwrap().swap_remove(0);
            String::from_utf8(file.bytes).unwrap()
        };
        let line = "127.0.0.1\thost.containers.internal host.docker.internal\n";
        assert!(text(Vec::new(), &Network::Host).contains(line));
        assert!(!text(Vec::new(), &Network::None).contains("host.containers.internal"));
        let given = text(vec![extra("10.0.0.1", "host.docker.internal")], &Network::Host);
        assert!(given.contains("10.0.0.1\thost.docker.internal\n"), "{given}");
        assert!(given.contains("127.0.0.1\thost.containers.internal\n"), "{given}");
    }

    #[test]
    fn time_zones_have_names_or_are_the_hosts() {
        let named = |name: &str| Ok(TimeZone::Named(name.to_owned()));
        for (text, expect) in [
            ("local", Ok(TimeZone::Host)),
            ("UTC", named("UTC")),
            ("America/Argentina/Buenos_Aires", named("America/Argentina/Buenos_Aires")),
            ("Etc/GMT+1", named("Etc/GMT+1")),
        ] {
            assert_eq!(text.parse(), expect, "{text}");
        }
        for text in ["", "/UTC", "UTC/", "a//b", "../x", "a/../../x", "a b", ".", "a\0b"] {
            assert_eq!(text.parse::<TimeZone>(), Err(TimeZoneError), "{text:?}");
        }
        let error = TimeZone::Named("Nowhere/At_all".to_owned()).read().unwrap_err();
        assert!(
            error.source.to_string().contains("no time zone in /usr/share"),
            "{}",
            error.source
        );
    }

    #[test]
    fn a_container_without_a_network_has_only_the_resolver_of_its_options() {
        let text = |resolver: Resolver| {
            let names = Names { resolver: Some(resolver), ..Names::default() };
            let mut files = files(&names, &Network::None, "me").unwrap().into_iter();
            let file = files.find(|it| it.place == RESOLVER);
            file.map(|it| String::from_utf8(it.bytes).unwrap())
        };
        assert_eq!(text(Resolver::default()), None);
        let options = Some(vec!["ndots:2".to_owned()]);
        let servers = Some(vec!["1.1.1.1".parse().unwrap()]);
        let asked = Resolver { servers, options, ..Resolver::default() };
        assert_eq!(text(asked).as_deref(), Some("nameserver 1.1.1.1\noptions ndots:2\n"));
    }

    #[test]
    fn a_resolver_is_the_hosts_but_for_what_is_asked_for() {
        let host = "# by hand\ndomain a\nsearch b c\nnameserver 127.0.0.1\nnameserver 9.9.9.9\n\
                    options ndots:2 edns0\nsortlist 1.2.3.0\n";
        let check = |wanted: &Resolver, is_elsewhere, expect: &str| {
            assert_eq!(resolver_text(wanted, host, is_elsewhere), expect, "{wanted:?}");
        };
        check(&Resolver::default(), false, host);
        let elsewhere = "search b c\nnameserver 9.9.9.9\noptions ndots:2 edns0\n";
        check(&Resolver::default(), true, elsewhere);
        let servers = Some(vec!["127.0.0.53".parse().unwrap(), "::1".parse().unwrap()]);
        let wanted = Resolver { servers, search: Some(Vec::new()), options: None };
        check(&wanted, true, "nameserver 127.0.0.53\nnameserver ::1\noptions ndots:2 edns0\n");
        let words = |text: &str| Some(vec![text.to_owned()]);
        let wanted = Resolver { servers: None, search: words("x"), options: words("debug") };
        check(
            &wanted,
            false,
            "search x\nnameserver 127.0.0.1\nnameserver 9.9.9.9\noptions debug\n",
        );
    }
    /// Routers that announce themselves as name servers have link-local addresses with an interface.
    #[test]
    fn a_name_server_of_one_link_stays() {
        let host =
            "nameserver fe80::1%eth0\nnameserver ::1%lo\nnameserver 127.1\nnameserver 9.9.9.9\n";
        let wanted = Resolver { options: Some(vec!["debug".to_owned()]), ..Resolver::default() };
        assert_eq!(resolver_text(&wanted, host, false), format!("{host}options debug\n"));
        let elsewhere = "nameserver fe80::1%eth0\nnameserver 9.9.9.9\n";
        assert_eq!(resolver_text(&Resolver::default(), host, true), elsewhere);
        assert!(servers("nameserver 127.0.0.53\nnameserver ::1%lo\n").all(|it| it.is_loopback()));
        assert!(!servers("nameserver fe80::1%eth0\n").all(|it| it.is_loopback()));
    }

    #[test]
    fn a_file_of_the_host_is_never_read_in_part() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        file.as_file().set_len(LARGEST).unwrap();
        assert_eq!(read(path).unwrap().len() as u64, LARGEST);
        file.as_file().set_len(LARGEST + 1).unwrap();
        let error = read(path).unwrap_err();
        assert!(error.source.to_string().contains("larger than 16 MiB"), "{}", error.source);
    }
}
