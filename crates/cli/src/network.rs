//! `run --network pasta` and `--publish`: a container's own network, connected to the host's.

use std::num::NonZeroU16;

use anyhow::{Context as _, bail};
use container::bundle::Network;
use container::network::{Pasta, Ports, free_port};

use crate::args::Run;
use crate::args::ports::Published;
use crate::context::Context;
use crate::helpers;

/// Who connects networks.
const PROGRAM: &str = "pasta";

/// The next step where it is not installed.
const ABSENT: &str = "pasta is not installed (Debian, Fedora: package passt)";

/// How the container's network is connected, if it is. Ports lead into no other network, so they imply one that is.
pub(crate) fn pasta(
    context: &Context,
    args: &Run,
    network: &mut Network,
) -> anyhow::Result<Option<Pasta>> {
    if !args.publish.is_empty() {
        match (&args.wanted.network, &*network) {
            (None, _) => *network = Network::Pasta,
            (_, Network::Pasta) => {}
            // As docker and podman have it.
            (_, Network::Host) => {
                context.remark(
                    "--publish has no effect with --network host: all ports are the host's",
                );
            }
            _ => bail!(
                "--publish: ports lead only into a network that pasta connects: leave --network out"
            ),
        }
    }
    if *network != Network::Pasta {
        return Ok(None);
    }
    let program = helpers::find(PROGRAM).with_context(|| format!("--network pasta: {ABSENT}"))?;
    let mut ports = Vec::new();
    for published in &args.publish {
        add(published, &mut ports)?;
    }
    Ok(Some(Pasta { program, ports }))
}

/// Looks whether the ports can be had, so that the error names the option and not pasta's.
fn add(published: &Published, all: &mut Vec<Ports>) -> anyhow::Result<()> {
    let Published { address, host, container, protocol } = *published;
    let ports = |host, container, count| Ports { address, host, container, count, protocol };
    let earlier = all.len();
    let failed = || format!("--publish {}", container.first);
    match host {
        Some(host) => all.push(ports(host.first, container.first, host.count)),
        None => {
            for port in container.first..=container.last() {
                let host = free_port(address, protocol).with_context(failed)?;
                all.push(ports(host, port, NonZeroU16::MIN));
            }
        }
    }
    all.iter().skip(earlier).try_for_each(Ports::check).with_context(failed)
}

/// Whether containers can have a network of their own that reaches others, for people.
pub(crate) fn describe() -> String {
    match helpers::find(PROGRAM) {
        Some(program) => format!("pasta, by {}", program.display()),
        None => format!("none, the host's, or one that is made by others: {ABSENT}"),
    }
}
