//! `run --network pasta` and `--publish`: connect a container's private network to the host's.

use std::num::NonZeroU16;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use container::bundle::Network;
use container::network::{Pasta, PastaOptions, Ports, TUN, can_make_interfaces, free_port};

use crate::args::NetworkKind;
use crate::args::ports::Published;
use crate::session::context::Context;
use crate::session::system_programs;

/// The program that connects networks.
const PROGRAM: &str = "pasta";

/// Error and hint if the program is not installed.
const ABSENT: &str = "pasta is not installed (Debian, Fedora: package passt)";

/// Returns how pasta connects the container's network, or `None` if it is not used. Published ports imply pasta,
/// because other networks cannot have published ports.
pub(crate) fn pasta(
    context: &Context,
    publish: &[&Published],
    wanted: Option<&NetworkKind>,
    network: &mut Network,
) -> anyhow::Result<Option<Pasta>> {
    if !publish.is_empty() {
        match (wanted, &*network) {
            (None, _) => *network = Network::Pasta,
            (_, Network::Pasta | Network::Named) => {}
            // docker and podman also accept published ports with these networks.
            (_, other) => context.remark(no_ports(other)),
        }
    }
    if *network != Network::Pasta {
        return Ok(None);
    }
    let options = match wanted {
        Some(NetworkKind::PastaWith(options)) => options.clone(),
        _ => PastaOptions::default(),
    };
    let program = program()?;
    Ok(Some(Pasta { program, ports: ports(publish)?, options }))
}

/// Returns the remark on published ports in a network that cannot have any.
const fn no_ports(network: &Network) -> &'static str {
    match network {
        Network::Host => {
            "--publish has no effect with --network host: the container shares the host's ports"
        }
        Network::Container(_) => {
            "--publish has no effect with --network container:NAME: publish the ports with that container"
        }
        Network::Joined(_) => {
            "--publish has no effect with --network ns:PATH: the program that made the network forwards ports"
        }
        Network::None | Network::Pasta | Network::Named => {
            "--publish has no effect with --network none: leave --network out"
        }
    }
}

/// Returns the path of pasta.
pub(crate) fn program() -> anyhow::Result<PathBuf> {
    system_programs::program_path(PROGRAM).with_context(|| format!("--network pasta: {ABSENT}"))
}

/// Chooses the ports of the host that options publish, and checks that they are free.
pub(crate) fn ports(publish: &[&Published]) -> anyhow::Result<Vec<Ports>> {
    let mut ports = Vec::new();
    // The options that name ports come first, so that none of these ports is chosen as a free port.
    let (named, any): (Vec<_>, Vec<_>) = publish.iter().partition(|it| it.host.is_some());
    for published in named.into_iter().chain(any) {
        add(published, &mut ports).with_context(|| format!("--publish {}", published.text))?;
    }
    Ok(ports)
}

/// Checks that the ports are available, so that the error names the option instead of coming from pasta.
fn add(published: &Published, all: &mut Vec<Ports>) -> anyhow::Result<()> {
    let Published { address, host, container, protocol, .. } = *published;
    let ports = |host, container, count| Ports { address, host, container, count, protocol };
    let Some(host) = host else {
        for port in container.first..=container.last() {
            all.push(any_port(&ports(1, port, NonZeroU16::MIN), all)?);
        }
        return Ok(());
    };
    let new = ports(host.first, container.first, host.count);
    if let Some(earlier) = all.iter().find(|it| it.overlaps(&new)) {
        let port = earlier.host.max(new.host);
        bail!(
            "port {port} of the host is already published: pasta forwards it to one port, \
            regardless of the address"
        );
    }
    new.check()?;
    all.push(new);
    Ok(())
}

/// Returns the ports with a port of the host that is free, and that `others` do not use.
fn any_port(wanted: &Ports, others: &[Ports]) -> anyhow::Result<Ports> {
    const ATTEMPTS: u32 = 1000;
    for _ in 0..ATTEMPTS {
        let found = Ports { host: free_port(wanted.address, wanted.protocol)?, ..*wanted };
        if !others.iter().any(|it| it.overlaps(&found)) {
            return Ok(found);
        }
    }
    bail!("the host has no free port")
}

/// Returns the hint for a program that failed in a container without a network, whose user did not choose that.
pub(crate) fn lack() -> String {
    let install = match system_programs::program_path(PROGRAM) {
        Some(_) => "",
        None => " (install passt first)",
    };
    format!(
        "the container had no network: if the program needs one, use `--network pasta`{install}, or set `network` in \
        run.toml"
    )
}

/// Describes, for people, the networks that containers can have.
pub(crate) fn describe() -> String {
    match system_programs::program_path(PROGRAM) {
        Some(program) if can_make_interfaces() => format!("pasta, by {}", program.display()),
        Some(_) => {
            format!("none, the host's, or one made by other programs: this user may not open {TUN}")
        }
        None => format!("none, the host's, or one made by other programs: {ABSENT}"),
    }
}
