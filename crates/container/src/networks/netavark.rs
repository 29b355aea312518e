//! Calls netavark, which connects a container to bridges. Source: netavark(1), and `src/network/types.rs` of netavark.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use kernel::mount::Reach;
use kernel::process::{Exit, Namespace, Setup, Signals, spawn};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use store::OperationError;

use super::NetworksError;
use super::attachment::Attachment;
use super::place::TOOLS;
use super::place::{NAMESPACES, NETAVARK, NetworkPlace, Side, remove_file};
use super::programs::SYSTEM;
use crate::network::Protocol;

/// How long to wait for netavark, which asks only the kernel and aardvark-dns.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum length of what netavark prints, in bytes.
const PRINTED: u64 = 64 << 10;

/// A command of netavark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Setup,
    Teardown,
}

impl Action {
    const fn word(self) -> &'static str {
        match self {
            Self::Setup => "setup",
            Self::Teardown => "teardown",
        }
    }
}

/// Input of netavark.
#[derive(Serialize)]
struct NetavarkInput<'a> {
    container_id: &'a str,
    container_name: &'a str,
    port_mappings: Vec<PortMapping>,
    dns_servers: &'a [std::net::IpAddr],
    networks: BTreeMap<&'a str, PerNetwork<'a>>,
    network_info: BTreeMap<&'a str, NetworkInfo<'a>>,
}

#[derive(Serialize)]
struct PortMapping {
    container_port: u16,
    host_port: u16,
    host_ip: String,
    protocol: &'static str,
    range: u16,
}

#[derive(Serialize)]
struct PerNetwork<'a> {
    interface_name: &'a str,
    static_ips: [std::net::Ipv4Addr; 1],
    aliases: &'a [String],
}

#[derive(Serialize)]
struct NetworkInfo<'a> {
    name: &'a str,
    id: &'a str,
    driver: &'static str,
    network_interface: &'a str,
    subnets: [SubnetInfo; 1],
    ipv6_enabled: bool,
    internal: bool,
    dns_enabled: bool,
    ipam_options: BTreeMap<&'static str, &'static str>,
}

#[derive(Serialize)]
struct SubnetInfo {
    subnet: String,
    gateway: std::net::Ipv4Addr,
}

/// Returns the input of netavark for a container. Its networks have the names of their bridges, because netavark makes
/// chains of the firewall and files from the names, and another store may have a network with the same name.
fn input(attachment: &Attachment) -> io::Result<Vec<u8>> {
    let ports = attachment.ports.iter().map(|it| PortMapping {
        container_port: it.container,
        host_port: it.host,
        host_ip: it.address.map_or_else(String::new, |it| it.to_string()),
        protocol: match it.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        },
        range: it.count.get(),
    });
    let networks = attachment.endpoints.iter().map(|it| {
        let aliases = attachment.aliases.as_slice();
        let (interface_name, static_ips) = (it.device.as_str(), [it.address]);
        (it.bridge.as_str(), PerNetwork { interface_name, static_ips, aliases })
    });
    let info = attachment.endpoints.iter().map(|it| {
        let info = NetworkInfo {
            name: &it.bridge,
            id: &it.id,
            driver: "bridge",
            network_interface: &it.bridge,
            subnets: [SubnetInfo { subnet: it.subnet.clone(), gateway: it.gateway }],
            ipv6_enabled: false,
            internal: it.internal,
            dns_enabled: it.dns,
            ipam_options: BTreeMap::from([("driver", "host-local")]),
        };
        (it.bridge.as_str(), info)
    });
    let input = NetavarkInput {
        container_id: &attachment.id,
        container_name: &attachment.container,
        port_mappings: ports.collect(),
        dns_servers: &attachment.servers,
        networks: networks.collect(),
        network_info: info.collect(),
    };
    Ok(serde_json::to_vec(&input)?)
}

/// Error of netavark in its output.
#[derive(Deserialize)]
struct NetavarkError {
    error: String,
}

impl NetworkPlace {
    /// Calls `work` in the namespaces of the bridges. The caller holds the lock of the place.
    pub(super) fn inside<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T, NetworksError> + Send,
    ) -> Result<T, NetworksError> {
        if self.side == Side::Host {
            return work();
        }
        let keeper = self.keeper().ok_or(NetworksError::NoKeeper)?;
        // Namespaces belong to a thread, and the children of this thread are in them.
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                let all = [Namespace::Mount, Namespace::Network, Namespace::Pid];
                kernel::process::enter(keeper.as_fd(), &all)
                    .map_err(OperationError::of("enter", "the networks of this user"))?;
                work()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Makes a container's network namespace visible to netavark, and connects it.
    pub(super) fn set_up(
        &self,
        attachment: &Attachment,
        network: std::os::fd::BorrowedFd<'_>,
        signals: &Signals,
    ) -> Result<(), NetworksError> {
        self.inside(|| {
            let place = self.namespace(&attachment.id);
            std::fs::File::create(&place).map_err(OperationError::at("write", &place))?;
            kernel::mount::bind(network, Reach::One)
                .and_then(|it| it.attach_at(&place))
                .map_err(OperationError::at("show a container's network to netavark in", &place))?;
            self.call(Action::Setup, attachment, Some(signals))
        })
    }

    /// Disconnects a container.
    pub(super) fn tear_down(&self, attachment: &Attachment) -> Result<(), NetworksError> {
        self.inside(|| {
            let torn = self.call(Action::Teardown, attachment, None);
            let place = self.namespace(&attachment.id);
            // It is not mounted if the setup failed early, or in another mount namespace.
            if let Err(error) = kernel::mount::unmount(&place, kernel::mount::Unmount::Lazy) {
                tracing::debug!(%error, "no mount to unmount");
            }
            remove_file(&place).map_err(OperationError::at("remove", &place))?;
            torn
        })
    }

    fn namespace(&self, id: &str) -> PathBuf {
        self.path(NAMESPACES).join(id)
    }

    fn call(
        &self,
        action: Action,
        attachment: &Attachment,
        signals: Option<&Signals>,
    ) -> Result<(), NetworksError> {
        let programs = &attachment.programs;
        let failed = OperationError::at("run", &programs.netavark);
        let run_failed = OperationError::at("run", &programs.netavark);
        let text = input(attachment).map_err(failed)?;
        let mut command = Command::new(&programs.netavark);
        command.arg("--config").arg(self.path(NETAVARK));
        let is_user = self.side == Side::Keeper;
        command.args(["--rootless", if is_user { "true" } else { "false" }]);
        // A path of no file switches the resolution of names off.
        let aardvark =
            programs.aardvark.as_deref().unwrap_or(Path::new("/nonexistent/aardvark-dns"));
        command.arg("--aardvark-binary").arg(aardvark);
        command.arg(action.word()).arg(self.namespace(&attachment.id));
        command.env_clear();
        match self.side {
            Side::Host => command.env("PATH", SYSTEM.join(":")),
            Side::Keeper => command.env("PATH", self.path(TOOLS)),
        };
        let (mut said, output) = io::pipe().map_err(failed)?;
        let (mut complained, errors) = io::pipe().map_err(failed)?;
        for pipe in [&said, &complained] {
            // aardvark-dns may keep the other end open.
            let set = rustix::fs::fcntl_setfl(pipe, OFlags::NONBLOCK);
            set.map_err(io::Error::from).map_err(failed)?;
        }
        command.stdin(Stdio::piped()).stdout(output).stderr(errors);
        let mut netavark =
            spawn(command, &Setup { signals, ..Setup::default() }).map_err(run_failed)?;
        if let Some(mut stdin) = netavark.stdin.take() {
            // If netavark has exited early, its message is the error.
            let _read = stdin.write_all(&text);
        }
        let exit = netavark.process.wait_at_most(PATIENCE).map_err(run_failed)?;
        if exit == Some(Exit::Code(0)) {
            return Ok(());
        }
        let mut reason = "it did not end".to_owned();
        if exit.is_none() {
            // It may have ended just now.
            let _gone = netavark.process.signal(kernel::process::Signal::KILL);
            let _waited = netavark.process.wait();
        } else {
            let mut printed = Vec::new();
            // The read ends with an error if aardvark-dns keeps the pipe open.
            let _end = said.by_ref().take(PRINTED).read_to_end(&mut printed);
            let mut complaints = Vec::new();
            let _end = complained.by_ref().take(PRINTED).read_to_end(&mut complaints);
            let complaints = String::from_utf8_lossy(&complaints).trim().to_owned();
            let error = serde_json::from_slice::<NetavarkError>(&printed).map(|it| it.error);
            reason = error.unwrap_or(complaints);
        }
        let (name, direction) = match action {
            Action::Setup => ("connect", "to"),
            Action::Teardown => ("disconnect", "from"),
        };
        let container = attachment.container.clone();
        Err(NetworksError::Refused { action: name, direction, container, said: reason })
    }
}
