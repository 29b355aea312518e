//! `port`: lists the ports of the host that lead to containers.

use anyhow::bail;
use clap::Args;
use container::life::lookup::{KnownContainer, all, find_container};
use container::network::{Ports, Protocol};
use serde::Serialize;
use store::OpenOptions;

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::session::failure::UsageError;
use crate::verbs::VerbArgs;
use crate::verbs::exit_codes::ExitCodes;

#[derive(Debug, Args)]
pub(crate) struct Port {
    /// List the ports of all running containers
    #[arg(short, long, conflicts_with = "container")]
    pub(crate) all: bool,
    /// A container
    #[arg(required_unless_present = "all")]
    pub(crate) container: Option<String>,
    /// Print only where this port of the container is published
    #[arg(value_name = "PORT[/PROTOCOL]")]
    pub(crate) port: Option<String>,
}

impl VerbArgs for Port {
    const NAME: &'static str = "port";
    const ABOUT: &'static str = "List the published ports of a container";
    const EXAMPLES: &'static str = "quire port web\n  quire port web 80/tcp\n  quire port --all";
    const EXIT_CODES: ExitCodes = ExitCodes::Objects;

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        port(context, self)
    }
}

/// Report of `port --json` on a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct PortReport {
    /// Id of the container.
    container: String,
    /// Port of the container.
    port: u16,
    /// `tcp` or `udp`.
    protocol: &'static str,
    /// Address of the host; `0.0.0.0` means all.
    host_address: String,
    /// Port of the host.
    host_port: u16,
}

impl PortReport {
    /// Returns the ports of a container, each by itself.
    pub(crate) fn of(known: &KnownContainer) -> Vec<Self> {
        let ports = if known.is_watched() { Ports::noted(&known.folder) } else { Vec::new() };
        ports.iter().flat_map(|it| Self::of_range(&known.id, it)).collect()
    }

    /// Returns each port of a range.
    pub(crate) fn of_range(id: &str, ports: &Ports) -> Vec<Self> {
        let protocol = match ports.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        let address = ports.address.map_or_else(|| "0.0.0.0".to_owned(), |it| it.to_string());
        let one = |at: u16| Self {
            container: id.to_owned(),
            port: ports.container.saturating_add(at),
            protocol,
            host_address: address.clone(),
            host_port: ports.host.saturating_add(at),
        };
        (0..ports.count.get()).map(one).collect()
    }

    /// Returns the port of the container with its protocol, as in Docker.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}", self.port, self.protocol)
    }

    pub(crate) fn host_address(&self) -> &str {
        &self.host_address
    }

    pub(crate) const fn host_port(&self) -> u16 {
        self.host_port
    }

    /// Returns the address and port of the host.
    fn host(&self) -> String {
        match self.host_address.contains(':') {
            true => format!("[{}]:{}", self.host_address, self.host_port),
            false => format!("{}:{}", self.host_address, self.host_port),
        }
    }
}

/// Parses `PORT[/PROTOCOL]`; the default is TCP.
fn wanted(text: &str) -> anyhow::Result<String> {
    let (port, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    match (port.parse::<u16>(), protocol) {
        (Ok(port @ 1..), "tcp" | "udp") => Ok(format!("{port}/{protocol}")),
        _ => {
            let text = format!("\"{}\" is not a port: write 80 or 80/udp", text.escape_debug());
            Err(UsageError(text).into())
        }
    }
}

fn port(context: &Context, args: &Port) -> anyhow::Result<Answer> {
    let wanted = args.port.as_deref().map(wanted).transpose()?;
    let Some(store) = context.open_for(OpenOptions::read(), args.all)? else {
        return print(context, &[], false);
    };
    let mut found = match &args.container {
        Some(name) => PortReport::of(&find_container(&store, name)?),
        None => all(&store)?.iter().flat_map(PortReport::of).collect(),
    };
    let Some(wanted) = wanted else { return print(context, &found, args.all) };
    found.retain(|it| it.name() == wanted);
    if found.is_empty() {
        bail!("failed to find published port \"{wanted}\"");
    }
    if context.json {
        return print(context, &found, false);
    }
    let hosts: Vec<_> = found.iter().map(PortReport::host).collect();
    report::lines(hosts.iter().map(String::as_str))
}

fn print(context: &Context, all: &[PortReport], has_names: bool) -> anyhow::Result<Answer> {
    report::print(context.json, &all, |all, out| {
        for it in *all {
            if has_names {
                write!(out, "{}\t", it.container)?;
            }
            writeln!(out, "{} -> {}", it.name(), it.host())?;
        }
        Ok(())
    })?;
    Ok(Answer::Yes)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;

    #[test]
    fn ranges_are_single_ports() {
        let ports = Ports {
            address: Some("::1".parse().unwrap()),
            host: 8000,
            container: 80,
            count: NonZeroU16::new(2).unwrap(),
            protocol: Protocol::Udp,
        };
        let found = PortReport::of_range("web", &ports);
        let found: Vec<_> =
            found.iter().map(|it| format!("{} -> {}", it.name(), it.host())).collect();
        assert_eq!(found, ["80/udp -> [::1]:8000", "81/udp -> [::1]:8001"]);
        let all = Ports { address: None, protocol: Protocol::Tcp, ..ports };
        assert_eq!(PortReport::of_range("web", &all)[0].host(), "0.0.0.0:8000");
    }

    #[test]
    fn wanted_ports_have_a_protocol() {
        for (text, expect) in [
            ("80", Some("80/tcp")),
            ("80/tcp", Some("80/tcp")),
            ("53/udp", Some("53/udp")),
            ("0", None),
            ("65536", None),
            ("80/sctp", None),
            ("", None),
            ("a", None),
        ] {
            assert_eq!(wanted(text).ok().as_deref(), expect, "{text}");
        }
    }
}
