//! A network of a container's own that pasta connects to the host's. Source: pasta(1), package passt.
//!
//! Pasta opens a connection of the host's for each that the container opens, so a user needs no right over the host's
//! network. It is a child of the monitor, and dies with it. For root it is nobody, in a user namespace that has the
//! container's network and nothing else, unless it has to do what only root may.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::num::NonZeroU16;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kernel::mount::{MountError, Reach};
use kernel::process::{
    IdRange, Process, ProcessError, Setup, Signal, Signals, UNUSED_IDS, Who, spawn,
};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Gid, OFlags, Uid};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::bundle::names::FORWARDER;
use crate::folder::{NETWORK, PORTS};
use crate::pace::GLANCE;

/// A protocol that has ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
}

/// Ports of the host that lead to ports of a container, one to one and in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ports {
    /// The address of the host to listen at; none for all that it has.
    pub address: Option<IpAddr>,
    /// The first port of the host, not 0.
    pub host: u16,
    /// The first port of the container, not 0.
    pub container: u16,
    /// How many there are; the last ones are 65535 at most.
    pub count: NonZeroU16,
    /// For which packets.
    pub protocol: Protocol,
}

/// A container's connection to the host's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pasta {
    /// The program.
    pub program: PathBuf,
    /// What leads into the container.
    pub ports: Vec<Ports>,
}

/// A network that cannot be connected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The kernel gives no network.
    #[error("cannot make a network for the container")]
    Namespace(#[source] ProcessError),
    /// It cannot be put where pasta finds it.
    #[error("cannot show the container's network to pasta in {}", path.display())]
    Attach {
        /// Where.
        path: PathBuf,
        /// An error of the kernel.
        source: MountError,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No pipe can be made.
    #[error("cannot make a pipe to pasta")]
    Pipe(#[source] io::Error),
    /// A signal came first.
    #[error("interrupted while pasta connected the container to the host's network")]
    Interrupted,
    /// The program cannot be executed.
    #[error("cannot run pasta")]
    Pasta(#[source] ProcessError),
    /// It ended, or did nothing.
    #[error(
        "{program} cannot connect the container to the host's network: {said}; --network none does without"
    )]
    Refused {
        /// The program.
        program: String,
        /// What it said.
        said: String,
    },
}

/// A port of the host that cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at port {port} of the host{at}: {why}")]
pub struct PortError {
    port: u16,
    at: String,
    why: String,
}

/// How long pasta may take: it asks the kernel for addresses and routes, and nobody else.
const PATIENCE: Duration = Duration::from_secs(20);

/// The user and group on the host of root's pasta.
const NOBODY: u32 = *UNUSED_IDS.start();

/// Makes interfaces. Source: Linux `Documentation/networking/tuntap.rst`.
pub const TUN: &str = "/dev/net/tun";

/// Below are ports that take a right to listen at, unless the host says otherwise. Source: Linux
/// `Documentation/networking/ip-sysctl.rst`.
const LOWEST: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";

impl Ports {
    /// The last port of the host.
    #[must_use]
    pub const fn last(&self) -> u16 {
        self.host.saturating_add(self.count.get() - 1)
    }

    /// The last port of the container.
    #[must_use]
    pub const fn last_inside(&self) -> u16 {
        self.container.saturating_add(self.count.get() - 1)
    }

    /// Whether a port of the host is in both, at whatever address: pasta does not tell these apart.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (own, its) = (self.host..=self.last(), other.host..=other.last());
        self.protocol == other.protocol && own.start() <= its.end() && its.start() <= own.end()
    }

    /// Finds out whether this process could listen at the ports now.
    ///
    /// # Errors
    /// [`PortError`] names the first that it could not.
    pub fn check(&self) -> Result<(), PortError> {
        (self.host..=self.last()).try_for_each(|port| {
            let listened = listen(self.address, port, self.protocol);
            listened.map(drop).map_err(|error| self.refused(port, &error))
        })
    }

    fn refused(&self, port: u16, error: &io::Error) -> PortError {
        let why = match error.kind() {
            io::ErrorKind::AddrInUse => "it is in use: take another one".to_owned(),
            io::ErrorKind::PermissionDenied => {
                format!("it takes root, as {LOWEST} says: take one from 1024 on")
            }
            io::ErrorKind::AddrNotAvailable => "the host has no such address".to_owned(),
            _ => error.to_string(),
        };
        let at = self.address.map_or_else(String::new, |it| format!("'s address {it}"));
        PortError { port, at, why }
    }

    /// As pasta's options have it.
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

    /// Notes what leads into a container, in its folder.
    pub(crate) fn note(ports: &[Self], folder: &Path) -> io::Result<()> {
        match ports {
            [] => Ok(()),
            ports => std::fs::write(folder.join(PORTS), serde_json::to_vec(ports)?),
        }
    }

    /// What leads into the container with this folder; nothing if that is not known.
    #[must_use]
    pub fn noted(folder: &Path) -> Vec<Self> {
        let text = std::fs::read(folder.join(PORTS)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }
}

/// Listens at a port for a moment, at all addresses if there is none; answers which port it was.
fn listen(address: Option<IpAddr>, port: u16, protocol: Protocol) -> io::Result<u16> {
    // The first is for both kinds of addresses, if the host has both.
    let any = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    let places = address.map_or(any.to_vec(), |it| vec![it]);
    let places: Vec<_> = places.into_iter().map(|it| SocketAddr::new(it, port)).collect();
    let listened = match protocol {
        Protocol::Tcp => TcpListener::bind(&*places)?.local_addr(),
        Protocol::Udp => UdpSocket::bind(&*places)?.local_addr(),
    };
    Ok(listened?.port())
}

/// A port of the host that nobody listens at now.
///
/// # Errors
/// [`PortError`].
pub fn free_port(address: Option<IpAddr>, protocol: Protocol) -> Result<u16, PortError> {
    let ports = Ports { address, host: 0, container: 0, count: NonZeroU16::MIN, protocol };
    listen(address, 0, protocol).map_err(|error| ports.refused(0, &error))
}

impl Pasta {
    /// Whether it has to do what only root may: listen at a low port, or open a device that others may not open here.
    fn needs_root(&self) -> bool {
        let lowest = std::fs::read_to_string(LOWEST).ok().and_then(|it| it.trim().parse().ok());
        self.ports.iter().any(|it| it.host < lowest.unwrap_or(1024)) || !is_tun_for_all()
    }

    fn words(&self, network: &Path) -> Vec<OsString> {
        // Nothing of the host's loopback is to be seen from inside: not as the gateway, and not as the container's own.
        let mut words = ["-f", "-q", "--config-net", "--no-map-gw", "-T", "none", "-U", "none"]
            .map(OsString::from)
            .to_vec();
        for (option, protocol) in [("-t", Protocol::Tcp), ("-u", Protocol::Udp)] {
            let specs: Vec<_> =
                self.ports.iter().filter(|it| it.protocol == protocol).map(Ports::spec).collect();
            let none = specs.is_empty().then(|| "none".to_owned());
            for spec in specs.into_iter().chain(none) {
                words.extend([option.into(), spec.into()]);
            }
        }
        words.extend(["--dns-forward", FORWARDER, "-P", "/proc/self/fd/1"].map(OsString::from));
        words.extend(["--netns".into(), network.into()]);
        words
    }
}

/// A running pasta. Dropped, it ends.
#[derive(Debug)]
pub(crate) struct Connection {
    process: Process,
    said: PipeReader,
    /// Its standard output: closed, it would end pasta with a signal.
    ready: PipeReader,
}

impl Connection {
    /// Makes the container's network at `folder`, which pasta can get to, and connects it.
    pub(crate) fn start(
        pasta: &Pasta,
        folder: &Path,
        who: Who,
        signals: &Signals,
    ) -> Result<Self, NetworkError> {
        let write_failed = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| NetworkError::Write { path, source }
        };
        let nobody = who.is_host_root().then(own_namespace).transpose()?;
        let network = kernel::process::network_namespace(nobody.as_ref().map(OwnedFd::as_fd))
            .map_err(NetworkError::Namespace)?;
        let place = folder.join(NETWORK);
        File::create_new(&place).map_err(write_failed(&place))?;
        kernel::mount::bind(network.as_fd(), Reach::One)
            .and_then(|it| it.attach_at(&place))
            .map_err(|source| NetworkError::Attach { path: place.clone(), source })?;

        let needs_root = nobody.is_some() && pasta.needs_root();
        let root_of = nobody.as_ref().filter(|_| !needs_root);
        // It says that it is ready by writing its number. Into a pipe, since AppArmor may let it write to few files.
        let (ready, number) = io::pipe().map_err(NetworkError::Pipe)?;
        if root_of.is_some() {
            let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
            let owned = rustix::fs::fchown(&number, Some(user), Some(group));
            owned.map_err(|errno| NetworkError::Pipe(errno.into()))?;
        }
        let mut command = Command::new(&pasta.program);
        command.args(pasta.words(&place));
        if needs_root {
            // Else it would become nobody by itself, who may not listen there.
            command.args(["--runas", "0"]);
        }
        let (said, output) = io::pipe().map_err(NetworkError::Pipe)?;
        // What it says later is read when it has ended: it must never wait for that.
        rustix::fs::fcntl_setfl(&output, OFlags::NONBLOCK)
            .map_err(|errno| NetworkError::Pipe(errno.into()))?;
        command.env_clear().stdin(Stdio::null()).stdout(number).stderr(output);
        let setup = Setup {
            die_with_parent: Some(Signal::KILL),
            own_session: true,
            root_of: root_of.map(OwnedFd::as_fd),
            ..Setup::default()
        };
        let process = spawn(command, &setup).map_err(NetworkError::Pasta)?.process;
        let connection = Self { process, said, ready };
        let is_ready = connection.is_ready(signals);
        if !is_ready.map_err(|errno| NetworkError::Pipe(errno.into()))? {
            if signals.ending().is_some() {
                return Err(NetworkError::Interrupted);
            }
            let program = pasta.program.display().to_string();
            let mut said = connection.end();
            if said.contains("tun") && !can_make_interfaces() {
                said +=
                    &format!(" (this user may not open {TUN}, which others leave to everybody)");
            }
            return Err(NetworkError::Refused { program, said });
        }
        Ok(connection)
    }

    /// Waits until it has connected the network; answers whether it has.
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
                // Others are passed on to a container that runs.
                Ok(_) if !fds[2].revents().is_empty() => std::thread::sleep(GLANCE),
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Whether it has ended by itself.
    pub(crate) fn is_over(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.process.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec::default())).is_ok_and(|it| it > 0)
    }

    /// Ends it, and answers what it said, for people.
    pub(crate) fn end(mut self) -> String {
        self.kill();
        let mut said = Vec::new();
        // The other end is closed.
        let _all = self.said.by_ref().take(64 << 10).read_to_end(&mut said);
        sentence(&String::from_utf8_lossy(&said))
    }

    fn kill(&self) {
        // It may have ended just now, and have been waited for with all others.
        let _gone = self.process.signal(Signal::KILL);
        let _waited = self.process.wait();
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last thing that it said. What it has to say of the system's log, and of what it does about root, is about itself.
fn sentence(said: &str) -> String {
    let is_about_it = |line: &&str| {
        let line = line.trim();
        !line.is_empty()
            && !line.contains("bytes to syslog")
            && !line.starts_with("Don't run as root")
            && !line.contains("Started as root")
    };
    let last = said.lines().rfind(is_about_it).map(|it| it.trim().to_owned());
    last.unwrap_or_else(|| "it does not say why".to_owned())
}

/// Whether this user may make interfaces of a network of its own.
#[must_use]
pub fn can_make_interfaces() -> bool {
    File::options().read(true).write(true).open(TUN).is_ok()
}

/// Whether everybody may make interfaces of a network that is theirs, as udev has it.
fn is_tun_for_all() -> bool {
    let mode = std::fs::metadata(TUN).map(|it| it.permissions().mode());
    mode.is_ok_and(|it| it & 0o006 == 0o006)
}

/// A user namespace whose root is a user outside who has nothing else.
fn own_namespace() -> Result<OwnedFd, NetworkError> {
    let map = [IdRange { inside: 0, outside: NOBODY, count: 1 }];
    kernel::process::user_namespace(&map, &map).map_err(NetworkError::Namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports(address: Option<&str>, host: u16, count: u16, protocol: Protocol) -> Ports {
        let address = address.map(|it| it.parse().unwrap());
        let count = NonZeroU16::new(count).unwrap();
        Ports { address, host, container: 80, count, protocol }
    }

    /// As pasta(1) has it.
    #[test]
    fn what_pasta_is_told() {
        let pasta = |ports: &[Ports]| {
            let pasta = Pasta { program: "pasta".into(), ports: ports.to_vec() };
            let words = pasta.words(Path::new("/n"));
            let words: Vec<_> = words.iter().map(|it| it.to_str().unwrap()).collect();
            words.join(" ")
        };
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
    }

    #[test]
    fn a_port_in_use_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let mine = |protocol| ports(Some("127.0.0.1"), port, 1, protocol);
        let error = mine(Protocol::Tcp).check().unwrap_err().to_string();
        assert!(error.contains(&port.to_string()) && error.contains("in use"), "{error}");
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
        assert_eq!(sentence(""), "it does not say why");
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
