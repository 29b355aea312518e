//! `--hostname`, `--add-host`, `--dns` and similar options: a container's name, and the names that it can resolve.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::bail;
use container::bundle::etc_files::{Host, NameFile, Names, Resolver, files};
use container::bundle::{BundleOptions, Network};

use crate::args::{AddedHost, Address, Names as Wanted, Server};

/// Returns the files with names, such as `/etc/hosts`, for a container with these options.
pub(crate) fn name_files(
    wanted: &Wanted,
    options: &BundleOptions,
) -> anyhow::Result<Vec<NameFile>> {
    let names = names_wish(wanted, &options.network)?;
    Ok(files(&names, &options.network, &options.hostname)?)
}

/// Returns the names that the options ask for, for a container in this network.
pub(crate) fn names_wish(wanted: &Wanted, network: &Network) -> anyhow::Result<Names> {
    Ok(Names {
        hosts: match wanted.no_hosts {
            true => None,
            false => Some(hosts(wanted, network)?),
        },
        resolver: resolver(wanted)?,
        zone: wanted.tz.clone(),
    })
}

fn hosts(wanted: &Wanted, network: &Network) -> anyhow::Result<Vec<Host>> {
    let host = |it: &AddedHost| {
        let address = match (it.address, network) {
            (Address::Ip(address), _) => address,
            (Address::Gateway, Network::Host) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            (Address::Gateway, Network::None) => {
                bail!("--add-host …:host-gateway: the host is unreachable with --network none")
            }
            (
                Address::Gateway,
                Network::Joined(_) | Network::Container(_) | Network::Named | Network::Pasta,
            ) => {
                bail!(
                    "--add-host …:host-gateway: the host's address in that network is unknown: give \
                an IP address"
                )
            }
        };
        Ok(Host { address, names: it.names.clone() })
    };
    wanted.add_host.iter().map(host).collect()
}

fn resolver(wanted: &Wanted) -> anyhow::Result<Option<Resolver>> {
    if wanted.dns.contains(&Server::None) {
        if wanted.dns.len() > 1 || !wanted.dns_search.is_empty() || !wanted.dns_option.is_empty() {
            bail!(
                "--dns none keeps the image's /etc/resolv.conf, so it takes no other --dns options"
            );
        }
        return Ok(None);
    }
    let servers = wanted.dns.iter().filter_map(|it| match it {
        Server::Ip(address) => Some(*address),
        Server::None => None,
    });
    let said = |words: &[String]| (!words.is_empty()).then(|| words.to_vec());
    let search = said(&wanted.dns_search).map(|mut words| {
        words.retain(|it| it != ".");
        words
    });
    Ok(Some(Resolver {
        servers: (!wanted.dns.is_empty()).then(|| servers.collect()),
        search,
        options: said(&wanted.dns_option),
    }))
}
