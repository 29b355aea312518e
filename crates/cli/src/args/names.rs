//! Options for the names of a container and of other hosts.

use std::net::IpAddr;
use std::str::FromStr;

use clap::Args;
use container::bundle::etc_files::TimeZone;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Address {
    Ip(IpAddr),
    /// Address by which the container reaches the host.
    Gateway,
}

/// A value of `--add-host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AddedHost {
    pub(crate) names: Vec<String>,
    pub(crate) address: Address,
}

impl FromStr for AddedHost {
    type Err = String;

    /// Parses `NAME[;NAME…]:IP`, podman's form. Docker also allows `=` instead of `:`.
    fn from_str(text: &str) -> Result<Self, String> {
        let split = text.split_once(['=', ':']);
        let (names, address) = split.ok_or("write NAME:IP, for example db:10.0.0.7")?;
        let names: Vec<_> = names.split(';').map(str::to_owned).collect();
        let is_name = |it: &String| {
            !it.is_empty() && it.bytes().all(|it| it.is_ascii_graphic() && it != b'#')
        };
        if let Some(name) = names.iter().find(|it| !is_name(it)) {
            return Err(format!("\"{name}\" is not a host name"));
        }
        if address == "host-gateway" {
            return Ok(Self { names, address: Address::Gateway });
        }
        let bare = address.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        let ip = bare.unwrap_or(address).parse();
        let ip = ip.map_err(|_error| format!("\"{address}\" is not an IP address"))?;
        Ok(Self { names, address: Address::Ip(ip) })
    }
}

/// A value of `--dns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Server {
    Ip(IpAddr),
    /// Keeps the image's `/etc/resolv.conf`.
    None,
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            _ => {
                text.parse().map(Self::Ip).map_err(|_error| "use an IP address, or none".to_owned())
            }
        }
    }
}

/// Parses a word of `/etc/resolv.conf`.
fn word(text: &str) -> Result<String, String> {
    match !text.is_empty() && text.bytes().all(|it| it.is_ascii_graphic()) {
        true => Ok(text.to_owned()),
        false => Err("use one word, without spaces".to_owned()),
    }
}

/// Parses a name of a host.
fn host_name(text: &str) -> Result<String, String> {
    let is_good = |it: u8| it.is_ascii_alphanumeric() || b"-._".contains(&it);
    match (1..=64).contains(&text.len()) && text.bytes().all(is_good) {
        true => Ok(text.to_owned()),
        false => Err("use 1 to 64 letters, digits, `-`, `_` and `.`".to_owned()),
    }
}

// Name and address of the container in networks of the store.
#[derive(Debug, Args)]
pub(crate) struct JoinOptions {
    /// With --network NAME: give the container another name in its networks
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    pub(crate) network_alias: Vec<String>,
    /// With --network NAME: give the container this address, by default a free one
    #[arg(long, value_name = "IP")]
    pub(crate) ip: Option<std::net::Ipv4Addr>,
}

// Host name of the container, and how it resolves names of other hosts.
#[derive(Debug, Args)]
pub(crate) struct Names {
    /// Set the container's host name; `run` uses the container's name by default
    #[arg(short = 'h', long, value_name = "NAME")]
    pub(crate) hostname: Option<String>,
    /// Print help
    // As in podman and docker, `-h` is the host name.
    #[arg(long, action = clap::ArgAction::Help, display_order = 1000)]
    pub(crate) help: Option<bool>,
    /// Add a line to /etc/hosts; IP may be host-gateway with --network host
    #[arg(long, value_name = "NAME:IP")]
    pub(crate) add_host: Vec<AddedHost>,
    /// Keep the image's /etc/hosts
    #[arg(long, conflicts_with = "add_host")]
    pub(crate) no_hosts: bool,
    /// Use this DNS server instead of the host's; none keeps the image's /etc/resolv.conf
    #[arg(long, value_name = "IP")]
    pub(crate) dns: Vec<Server>,
    /// Search names without a dot in this domain; . for none
    #[arg(long, value_name = "DOMAIN", value_parser = word)]
    pub(crate) dns_search: Vec<String>,
    /// Give the container this time zone of the host, such as Europe/Berlin, or `local` for the host's own, as
    /// /etc/localtime
    #[arg(long, value_name = "ZONE", overrides_with = "tz")]
    pub(crate) tz: Option<TimeZone>,
    /// Set an option of the DNS resolver, such as ndots:2
    #[arg(long, alias = "dns-opt", value_name = "OPTION", value_parser = word)]
    pub(crate) dns_option: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_a_name_and_an_address() {
        let check = |text: &str, names: &[&str], address: Option<&str>| {
            let address = match address {
                Some(it) => Address::Ip(it.parse().unwrap()),
                None => Address::Gateway,
            };
            let names = names.iter().map(|&it| it.to_owned()).collect();
            assert_eq!(text.parse(), Ok(AddedHost { names, address }), "{text}");
        };
        check("db:10.0.0.7", &["db"], Some("10.0.0.7"));
        check("a;b:::1", &["a", "b"], Some("::1"));
        check("a:[fd00::1]", &["a"], Some("fd00::1"));
        check("a=fd00::1", &["a"], Some("fd00::1"));
        check("a:host-gateway", &["a"], None);
        for text in [
            "",
            "a",
            ":1.2.3.4",
            "a:",
            "a:b",
            "a;:1.2.3.4",
            "a b:1.2.3.4",
            "#:1.2.3.4",
            "a:1.2.3.4:5",
            "é:1.1.1.1",
            "a\n:1.1.1.1",
        ] {
            assert!(text.parse::<AddedHost>().is_err(), "{text}");
        }
    }
}
