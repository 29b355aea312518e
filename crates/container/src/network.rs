//! Container networks that pasta connects to the host's. Source: pasta(1), package passt.
//!
//! pasta opens a connection on the host for each connection of the container, so users need no rights over the host's
//! network. pasta is a child of the monitor, and is killed with the monitor. For root's containers, pasta runs as an
//! unprivileged user in a user namespace that owns only the container's network, unless it needs rights that only root
//! has.

mod options;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::num::NonZeroU16;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kernel::mount::Reach;
use kernel::process::{IdRange, Process, Setup, Signal, Signals, UNUSED_IDS, Who, spawn};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Gid, OFlags, Uid};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use store::OperationError;

use crate::backoff::GLANCE;
use crate::bundle::etc_files::FORWARDER;
use crate::folder::{NETWORK, PORTS};

pub use options::{PastaOptions, PastaOptionsError};

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// For connections.
    Tcp,
    /// For datagrams.
    Udp,
}

/// Consecutive ports of the host that are forwarded to ports of a container, in the same order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ports {
    /// Address of the host at which to listen; `None` for all addresses.
    pub address: Option<IpAddr>,
    /// First port of the host, not 0.
    pub host: u16,
    /// First port of the container, not 0.
    pub container: u16,
    /// Number of ports; the last ones are at most 65535.
    pub count: NonZeroU16,
    /// Protocol of the forwarded packets.
    pub protocol: Protocol,
}

/// A container's connection to the host's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pasta {
    pub program: PathBuf,
    /// Ports that are forwarded to the container.
    pub ports: Vec<Ports>,
    /// Options that the user chose.
    #[serde(default, skip_serializing_if = "PastaOptions::is_empty")]
    pub options: PastaOptions,
}

/// Reason why a network cannot be connected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A signal arrived during the start.
    #[error("interrupted while pasta connected the container to the host's network")]
    Interrupted,
    /// pasta exited, or did not become ready before the timeout.
    #[error(
        "{program} cannot connect the container to the host's network: {said}; use --network none \
        to run without one"
    )]
    Refused {
        program: String,
        /// Message of pasta.
        said: String,
    },
}

/// Error of listening at a port of the host.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on port {port} of the host{at}: {why}")]
pub struct PortError {
    port: u16,
    at: String,
    why: String,
    /// Whether another program listens there.
    pub is_in_use: bool,
}

/// Timeout of pasta's start. pasta asks only the kernel, for addresses and routes.
const PATIENCE: Duration = Duration::from_secs(20);

/// User and group id of root's pasta on the host.
const NOBODY: u32 = *UNUSED_IDS.start();

/// Device with which network interfaces are created. Source: Linux `Documentation/networking/tuntap.rst`.
pub const TUN: &str = "/dev/net/tun";

/// File with the lowest port at which every user may listen. Source: Linux `Documentation/networking/ip-sysctl.rst`.
const LOWEST: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";

impl Ports {
    /// Returns the last port of the host.
    #[must_use]
    pub const fn last(&self) -> u16 {
        self.host.saturating_add(self.count.get() - 1)
    }

    /// Returns the last port of the container.
    #[must_use]
    pub const fn last_inside(&self) -> u16 {
        self.container.saturating_add(self.count.get() - 1)
    }

    /// Whether both contain the same port of the host, at any address, because pasta does not distinguish addresses.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (own, its) = (self.host..=self.last(), other.host..=other.last());
        self.protocol == other.protocol && own.start() <= its.end() && its.start() <= own.end()
    }

    /// Checks that this process can listen at the ports now.
    ///
    /// # Errors
    /// [`PortError`] with the first port at which it cannot listen.
    pub fn check(&self) -> Result<(), PortError> {
        (self.host..=self.last()).try_for_each(|port| {
            let listened = listen(self.address, port, self.protocol);
            listened.map(drop).map_err(|error| self.refused(port, &error))
        })
    }

    fn refused(&self, port: u16, error: &io::Error) -> PortError {
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => "address already in use: choose another port".to_owned(),
            io::ErrorKind::PermissionDenied => {
                format!("only root may use it ({LOWEST}): choose one from 1024 on")
            }
            io::ErrorKind::AddrNotAvailable => "the host does not have this address".to_owned(),
            _ => error.to_string(),
        };
        let at = self.address.map_or_else(String::new, |it| format!("'s address {it}"));
        let is_in_use = error.kind() == io::ErrorKind::AddrInUse;
        PortError { port, at, why, is_in_use }
    }

    /// Formats the ports for pasta's options.
    fn spec(&self) -> String {
        let address = self.address.map_or_else(String::new, |it| format!("{it}/"));
        match self.count.get() {
            1 => format!("{address}{}:{}", self.host, self.container),
            _ => {
                let (last, inside) = (self.last(), self.last_inside());
                format!("{address}{}-{last}:{}-{inside}", self.host, self.container)
            }
        }
    }

    /// Writes the forwarded ports into the container's folder.
    pub(crate) fn note(ports: &[Self], folder: &Path) -> io::Result<()> {
        match ports {
            [] => Ok(()),
            ports => std::fs::write(folder.join(PORTS), serde_json::to_vec(ports)?),
        }
    }

    /// Returns the ports that are forwarded to the container with this folder; empty if unknown.
    #[must_use]
    pub fn noted(folder: &Path) -> Vec<Self> {
        let text = std::fs::read(folder.join(PORTS)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }
}

/// Listens at a port for a moment, at all addresses if `address` is `None`. Returns the port.
fn listen(address: Option<IpAddr>, port: u16, protocol: Protocol) -> io::Result<u16> {
    // The first address is for both IPv4 and IPv6, if the host has both.
    let any = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    let places = address.map_or(any.to_vec(), |it| vec![it]);
    let places: Vec<_> = places.into_iter().map(|it| SocketAddr::new(it, port)).collect();
    let listened = match protocol {
        Protocol::Tcp => TcpListener::bind(&*places)?.local_addr(),
        Protocol::Udp => UdpSocket::bind(&*places)?.local_addr(),
    };
    Ok(listened?.port())
}

/// Returns a port of the host that is currently free.
pub fn free_port(address: Option<IpAddr>, protocol: Protocol) -> Result<u16, PortError> {
    let ports = Ports { address, host: 0, container: 0, count: NonZeroU16::MIN, protocol };
    listen(address, 0, protocol).map_err(|error| ports.refused(0, &error))
}

impl Pasta {
    /// Whether pasta needs rights that only root has: to listen at a low port, or to open a device that other users
    /// may not open.
    fn needs_root(&self) -> bool {
        let lowest = std::fs::read_to_string(LOWEST).ok().and_then(|it| it.trim().parse().ok());
        self.ports.iter().any(|it| it.host < lowest.unwrap_or(1024)) || !is_tun_for_all()
    }

    fn words(&self, network: &Path) -> Vec<OsString> {
        let mut words = ["-f", "-q", "--config-net"].map(OsString::from).to_vec();
        // Unless the user wants it, the host's loopback must not be reachable from the container, neither by the
        // gateway's address nor by the container's loopback.
        if !self.options.maps_gateway() && !self.options.has("--no-map-gw", "--no-map-gw") {
            words.push("--no-map-gw".into());
        }
        for (option, name) in [("-T", "--tcp-ns"), ("-U", "--udp-ns")] {
            if !self.options.has(option, name) {
                words.extend([option.into(), "none".into()]);
            }
        }
        for (option, name, protocol) in
            [("-t", "--tcp-ports", Protocol::Tcp), ("-u", "--udp-ports", Protocol::Udp)]
        {
            let specs: Vec<_> =
                self.ports.iter().filter(|it| it.protocol == protocol).map(Ports::spec).collect();
            let is_none = specs.is_empty() && !self.options.has(option, name);
            for spec in specs.into_iter().chain(is_none.then(|| "none".to_owned())) {
                words.extend([option.into(), spec.into()]);
            }
        }
        words.extend(self.options.words().map(OsString::from));
        words.extend(["--dns-forward", FORWARDER, "-P", "/proc/self/fd/1"].map(OsString::from));
        words.extend(["--netns".into(), network.into()]);
        words
    }
}

/// A running pasta, which is killed on drop.
#[derive(Debug)]
pub(crate) struct Connection {
    process: Process,
    said: PipeReader,
    /// Standard output of pasta. It must stay open, because otherwise a signal would kill pasta.
    ready: PipeReader,
}

impl Connection {
    /// Creates the container's network below `folder`, to which pasta has access, and connects it.
    pub(crate) fn start(
        pasta: &Pasta,
        folder: &Path,
        who: Who,
        signals: &Signals,
    ) -> Result<Self, NetworkError> {
        let nobody = who.is_host_root().then(own_namespace).transpose()?;
        let network = kernel::process::network_namespace(nobody.as_ref().map(OwnedFd::as_fd))
            .map_err(OperationError::of("make", "a network for the container"))?;
        Self::connect(pasta, network.as_fd(), nobody.as_ref(), folder, signals)
    }

    /// Connects a network, which belongs to the user namespace `nobody` if pasta runs as its root. Shows it to pasta
    /// below `folder`.
    pub(crate) fn connect(
        pasta: &Pasta,
        network: BorrowedFd<'_>,
        nobody: Option<&OwnedFd>,
        folder: &Path,
        signals: &Signals,
    ) -> Result<Self, NetworkError> {
        let place = folder.join(NETWORK);
        File::create_new(&place).map_err(OperationError::at("write", &place))?;
        kernel::mount::bind(network, Reach::One)
            .and_then(|it| it.attach_at(&place))
            .map_err(OperationError::at("show the container's network to pasta in", &place))?;

        let needs_root = nobody.is_some() && pasta.needs_root();
        let root_of = nobody.filter(|_| !needs_root);
        // pasta reports that it is ready by writing its pid. It writes the pid into a pipe, because AppArmor may
        // restrict the files that it can write.
        let pipe_failed = OperationError::of("make", "a pipe to pasta");
        let errno_failed = OperationError::of("make", "a pipe to pasta");
        let (ready, number) = io::pipe().map_err(pipe_failed)?;
        if root_of.is_some() {
            let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
            let owned = rustix::fs::fchown(&number, Some(user), Some(group));
            owned.map_err(errno_failed)?;
        }
        let mut command = Command::new(&pasta.program);
        command.args(pasta.words(&place));
        if needs_root {
            // Without this option, pasta would change its user to nobody, who may not listen at such ports.
            command.args(["--runas", "0"]);
        }
        let (said, output) = io::pipe().map_err(pipe_failed)?;
        // Later messages are read only after pasta's end, so reading must not block.
        rustix::fs::fcntl_setfl(&output, OFlags::NONBLOCK).map_err(errno_failed)?;
        command.env_clear().stdin(Stdio::null()).stdout(number).stderr(output);
        let setup = Setup {
            die_with_parent: Some(Signal::KILL),
            own_session: true,
            root_of: root_of.map(OwnedFd::as_fd),
            ..Setup::default()
        };
        let process = spawn(command, &setup).map_err(OperationError::of("run", "pasta"))?.process;
        let connection = Self { process, said, ready };
        let is_ready = connection.is_ready(signals);
        if !is_ready.map_err(errno_failed)? {
            if signals.ending().is_some() {
                return Err(NetworkError::Interrupted);
            }
            let program = pasta.program.display().to_string();
            let mut said = connection.end();
            if said.contains("tun") && !can_make_interfaces() {
                said +=
                    &format!(" (this user may not open {TUN}, which is usually open to all users)");
            }
            return Err(NetworkError::Refused { program, said });
        }
        Ok(connection)
    }

    /// Waits until pasta has connected the network. Returns whether it succeeded.
    fn is_ready(&self, signals: &Signals) -> Result<bool, Errno> {
        let since = Instant::now();
        loop {
            let rest = PATIENCE.saturating_sub(since.elapsed());
            let rest = Timespec::try_from(rest).ok();
            let mut fds = [
                PollFd::from_borrowed_fd(self.ready.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.process.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            ];
            match rustix::event::poll(&mut fds, rest.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) if fds[0].revents().contains(PollFlags::IN) => return Ok(true),
                Ok(_) if !fds[1].revents().is_empty() || signals.ending().is_some() => {
                    return Ok(false);
                }
                // Other signals are forwarded once the container runs.
                Ok(_) if !fds[2].revents().is_empty() => std::thread::sleep(GLANCE),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Whether pasta has exited by itself.
    pub(crate) fn is_over(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.process.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|it| it > 0)
    }

    /// Kills pasta, and returns its error message.
    pub(crate) fn end(mut self) -> String {
        self.kill();
        let mut said = Vec::new();
        // The write end is closed now.
        let _all = self.said.by_ref().take(64 << 10).read_to_end(&mut said);
        sentence(&String::from_utf8_lossy(&said))
    }

    fn kill(&self) {
        // pasta may have already exited, and this process may have reaped it together with its other children.
        let _gone = self.process.signal(Signal::KILL);
        let _waited = self.process.wait();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the last message of pasta that concerns the error. Messages about the system log and about running as root
/// are left out.
fn sentence(said: &str) -> String {
    let is_about_it = |line: &&str| {
        let line = line.trim();
        !line.is_empty()
            && !line.contains("bytes to syslog")
            && !line.starts_with("Don't run as root")
            && !line.contains("Started as root")
    };
    let last = said.lines().rfind(is_about_it).map(|it| it.trim().to_owned());
    last.unwrap_or_else(|| "it gave no reason".to_owned())
}

/// Whether this user may create interfaces in a new network namespace.
#[must_use]
pub fn can_make_interfaces() -> bool {
    File::options().read(true).write(true).open(TUN).is_ok()
}

/// Whether all users may create interfaces in their network namespaces, which is udev's default.
fn is_tun_for_all() -> bool {
    let mode = std::fs::metadata(TUN).map(|it| it.permissions().mode());
    mode.is_ok_and(|it| it & 0o006 == 0o006)
}

/// Creates a user namespace whose root is an otherwise unused user of the host.
fn own_namespace() -> Result<OwnedFd, NetworkError> {
    let map = [IdRange { inside: 0, outside: NOBODY, count: 1 }];
    let made = kernel::process::user_namespace(&map, &map);
    Ok(made.map_err(OperationError::of("make", "a network for the container"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(address: Option<&str>, host: u16, count: u16, protocol: Protocol) -> Ports {
        let address = address.map(|it| it.parse().unwrap());
        let count = NonZeroU16::new(count).unwrap();
        Ports { address, host, container: 80, count, protocol }
    }

    /// The options are those of pasta(1).
    #[test]
    fn what_pasta_is_told() {
        let told = |ports: &[Ports], options: PastaOptions| {
            let pasta = Pasta { program: "pasta".into(), ports: ports.to_vec(), options };
            let words = pasta.words(Path::new("/n"));
            let words: Vec<_> = words.iter().map(|it| it.to_str().unwrap()).collect();
            words.join(" ")
        };
        let pasta = |ports: &[Ports]| told(ports, PastaOptions::default());
        let text = pasta(&[]);
        for expect in ["-T none", "-U none", "-t none", "-u none", "--no-map-gw", "--netns /n"] {
            assert!(text.contains(expect), "{text}");
        }
        let text = pasta(&[
            ports(None, 8080, 1, Protocol::Tcp),
            ports(Some("127.0.0.1"), 9000, 3, Protocol::Tcp),
            ports(Some("::1"), 53, 1, Protocol::Udp),
        ]);
        let expect = "-t 8080:80 -t 127.0.0.1/9000-9002:80-82 -u ::1/53:80 --dns-forward";
        assert!(text.contains(expect), "{text}");
        let text = told(&[], "--tcp-ports,8080,--map-gw,-6".parse().unwrap());
        assert!(text.contains(" --tcp-ports 8080 -6 "), "{text}");
        assert!(text.contains("-u none") && text.contains("-T none"), "{text}");
        assert!(!text.contains("-t none") && !text.contains("map-gw"), "{text}");
    }

    #[test]
    fn a_port_in_use_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let mine = |protocol| ports(Some("127.0.0.1"), port, 1, protocol);
        let error = mine(Protocol::Tcp).check().unwrap_err().to_string();
        assert!(
            error.contains(&port.to_string()) && error.contains("address already in use"),
            "{error}"
        );
        mine(Protocol::Udp).check().unwrap();
        drop(taken);
        mine(Protocol::Tcp).check().unwrap();
        let elsewhere = ports(Some("192.0.2.77"), 8080, 1, Protocol::Tcp).check().unwrap_err();
        assert!(elsewhere.to_string().contains("192.0.2.77"), "{elsewhere}");
    }

    #[test]
    fn what_pasta_says_of_itself_is_left_out() {
        let said = "Failed to send 47 bytes to syslog\nDon't run as root. Changing to nobody...\n\
                    Couldn't switch to pasta namespaces\nFailed to send 42 bytes to syslog\n\n";
        assert_eq!(sentence(said), "Couldn't switch to pasta namespaces");
        assert_eq!(sentence(""), "it gave no reason");
    }

    #[test]
    fn ports_are_noted_in_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Ports::noted(folder.path()), []);
        let all = [ports(Some("::1"), 1, 2, Protocol::Udp), ports(None, 8080, 1, Protocol::Tcp)];
        Ports::note(&all, folder.path()).unwrap();
        assert_eq!(Ports::noted(folder.path()), all);
    }
}
