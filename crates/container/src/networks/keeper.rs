//! The network namespace in which a user without root has bridges, and the process that keeps it.
//!
//! All containers of a user that join networks are in one user namespace, because only its root has rights over the
//! network namespace of the bridges. The keeper is the first process of a pid namespace: when it ends, even by
//! `kill -9`, the kernel ends pasta and aardvark-dns, and the bridges and rules of the firewall disappear with the
//! network namespace. Each process of a container holds a shared lock on the file `users`; the keeper waits for an
//! exclusive lock on that file, and then ends.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, PipeWriter, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kernel::mount::{Propagation, Reach, Unmount};
use kernel::process::{Namespace, Pid, Process, ProcessIdentity, Signals};
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use store::OperationError;

use super::NetworksError;
use super::place::{ATTACHED, LAST, NAMESPACES, NETAVARK, NetworkPlace, TOOLS, read, remove_file};
use super::programs::SYSTEM;
use crate::bundle::etc_files::FORWARDER;
use crate::folder::NETWORK;
use crate::network::{Connection, Pasta, PastaOptions};

/// File that the processes of containers lock.
const USERS: &str = "users";
/// File with the identity of the keeper.
const KEEPER: &str = "keeper";
const TOOL_NAMES: [&str; 6] =
    ["iptables", "ip6tables", "iptables-restore", "ip6tables-restore", "nft", "sysctl"];
/// File that aardvark-dns reads instead of the host's.
const RESOLVER: &str = "resolv.conf";
const HOST_RESOLVER: &str = "/etc/resolv.conf";

/// The lock of this process and its children, which ends with them.
static HELD: OnceLock<OwnedFd> = OnceLock::new();

impl NetworkPlace {
    /// Returns the keeper, if it runs.
    #[must_use]
    pub fn keeper(&self) -> Option<Process> {
        let text = String::from_utf8(read(&self.path(KEEPER)).ok()?).ok()?;
        text.parse::<ProcessIdentity>().ok()?.open()
    }

    /// Whether this process has rights over the bridges, or there are none any more.
    pub(super) fn is_within(&self) -> bool {
        let Some(keeper) = self.keeper() else { return true };
        let its = kernel::process::user_namespace_of(Some(keeper.pid()));
        its.is_some() && its == kernel::process::user_namespace_of(None)
    }

    /// Prevents the keeper from ending while this process or a later child lives. If the keeper is about to end, this
    /// waits for its end.
    ///
    /// # Errors
    /// If the file cannot be locked.
    pub fn hold(&self) -> Result<(), NetworksError> {
        let path = self.path(USERS);
        let failed = OperationError::at("lock", &path);
        let users = self.open(USERS).map_err(failed)?;
        lock(&users, FlockOperation::LockShared).map_err(failed)?;
        // A process has one user, so a second call has the same lock.
        drop(HELD.set(users));
        Ok(())
    }

    /// Starts the keeper in the user namespace of this process, which has one thread, holds the lock of the place, and
    /// has called [`NetworkPlace::hold`].
    ///
    /// # Errors
    /// [`NetworksError::Keeper`] with its reason.
    pub fn start_keeper(&self, pasta: &Path) -> Result<(), NetworksError> {
        self.clear_keeper();
        self.make()?;
        let failed = OperationError::of("start", "the network of this user");
        let start_failed = OperationError::of("start", "the network of this user");
        let (mut reader, writer) = io::pipe().map_err(failed)?;
        let (report, starter) = kernel::process::start_behind(|report| {
            let started = self.start_in_namespaces(pasta, &writer);
            if let Err(error) = started {
                // The reader may be gone.
                let _told = (&writer).write_all(crate::error_chain::chain(&error).as_bytes());
            }
            drop(report);
        })
        .map_err(start_failed)?;
        drop(writer);
        // The report ends with the starter, after the keeper has written its message. The keeper has the pipe open.
        let _ended = File::from(report).read_to_end(&mut Vec::new());
        let _waited = starter.wait();
        let set = rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK);
        set.map_err(io::Error::from).map_err(failed)?;
        let mut said = Vec::new();
        let _end = reader.read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said).into_owned();
        match (said.trim(), self.keeper()) {
            ("", Some(_)) => Ok(()),
            ("", None) => Err(NetworksError::Keeper("its process has ended".to_owned())),
            (said, _) => Err(NetworksError::Keeper(said.to_owned())),
        }
    }

    /// In the starter: starts the keeper in a new pid namespace.
    fn start_in_namespaces(&self, pasta: &Path, said: &PipeWriter) -> Result<(), NetworksError> {
        let failed = OperationError::of("make", "namespaces");
        kernel::process::own_mounts(Propagation::Downstream).map_err(failed)?;
        // In the pid namespace, `/proc` has other numbers.
        let network = kernel::process::network_namespace(None).map_err(failed)?;
        kernel::process::unshare(&[Namespace::Pid]).map_err(failed)?;
        let kept = RefCell::new(None);
        let prepare = || {
            let prepared = self.prepare_keeper(pasta, network.as_fd());
            prepared.map(|it| *kept.borrow_mut() = Some(it)).map_err(|error| {
                let text = crate::error_chain::chain(&error);
                let mut said = said;
                // The reader may be gone.
                let _told = said.write_all(text.as_bytes());
                Errno::CANCELED
            })
        };
        let work = || {
            if let Some(kept) = kept.take() {
                self.keep(&kept);
            }
        };
        let started =
            kernel::process::start_server(&[said.as_fd(), network.as_fd()], prepare, work);
        match started {
            // The message is written.
            Err(kernel::process::ProcessError::Call { source: Errno::CANCELED, .. }) => Ok(()),
            started => Ok(started.map(drop).map_err(failed)?),
        }
    }

    /// In the keeper: makes the network.
    fn prepare_keeper(&self, pasta: &Path, network: BorrowedFd<'_>) -> Result<Kept, NetworksError> {
        let failed = OperationError::of("make", "the network of this user");
        let users = self.open(USERS).map_err(OperationError::at("open", &self.path(USERS)))?;
        self.link_tools()?;
        let signals = Signals::block(&[]).map_err(failed)?;
        let pasta = Pasta {
            program: pasta.to_owned(),
            ports: Vec::new(),
            options: PastaOptions::default(),
        };
        let connection = Connection::connect(&pasta, network, None, &self.folder, &signals)?;
        kernel::process::enter_network(network).map_err(failed)?;
        self.replace_resolver()?;
        // `/proc` shows the pid in the namespace of the other processes.
        let pid = std::fs::read_link("/proc/self").ok().and_then(|it| it.to_str()?.parse().ok());
        let identity = pid.and_then(Pid::from_raw).and_then(ProcessIdentity::from_pid);
        let identity =
            identity.ok_or_else(|| NetworksError::Keeper("/proc is not mounted".to_owned()))?;
        let path = self.path(KEEPER);
        let written = std::fs::write(&path, identity.to_string());
        written.map_err(OperationError::at("write", &path))?;
        Ok(Kept { users, _connection: connection })
    }

    fn link_tools(&self) -> Result<(), NetworksError> {
        let folder = self.path(TOOLS);
        let failed = OperationError::at("make", &folder);
        match std::fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error).into());
            }
            _ => {}
        }
        for name in TOOL_NAMES {
            let mut found = SYSTEM.iter().map(|it| Path::new(it).join(name));
            let Some(program) = found.find(|it| it.exists()) else { continue };
            let link = folder.join(name);
            remove_file(&link)
                .and_then(|()| std::os::unix::fs::symlink(program, link))
                .map_err(failed)?;
        }
        Ok(())
    }

    /// Lets aardvark-dns ask the address that pasta forwards to the host's name server.
    fn replace_resolver(&self) -> Result<(), NetworksError> {
        let own = self.path(RESOLVER);
        let failed = OperationError::at("write", &own);
        std::fs::write(&own, format!("nameserver {FORWARDER}\n")).map_err(failed)?;
        let Ok(host): io::Result<PathBuf> = std::fs::canonicalize(HOST_RESOLVER) else {
            return Ok(());
        };
        let file = File::open(&own).map_err(failed)?;
        let bound =
            kernel::mount::bind(file.as_fd(), Reach::One).and_then(|it| it.attach_at(&host));
        Ok(bound.map_err(OperationError::at("replace", Path::new(HOST_RESOLVER)))?)
    }

    /// In the keeper: waits until no container is left.
    fn keep(&self, kept: &Kept) {
        // Its first process reaps all processes of a pid namespace.
        let reap = || {
            while !matches!(
                rustix::process::wait(rustix::process::WaitOptions::empty()),
                Err(Errno::CHILD)
            ) {}
        };
        let _detached = std::thread::Builder::new().spawn(reap);
        kernel::process::shrink();
        if lock(&kept.users, FlockOperation::LockExclusive).is_ok() {
            self.clear_keeper();
        }
    }

    /// Removes the files of a keeper that ends or has ended.
    fn clear_keeper(&self) {
        // A file on which something is mounted in this mount namespace cannot be removed.
        let namespaces = std::fs::read_dir(self.path(NAMESPACES)).into_iter().flatten().flatten();
        for place in namespaces.map(|it| it.path()).chain([self.path(NETWORK)]) {
            if let Err(error) = kernel::mount::unmount(&place, Unmount::Lazy) {
                tracing::debug!(%error, "no mount to unmount");
            }
        }
        for name in [KEEPER, NETWORK, RESOLVER] {
            if let Err(error) = remove_file(&self.path(name)) {
                tracing::debug!(name, %error, "cannot remove a file of the keeper");
            }
        }
        for name in [ATTACHED, LAST, NAMESPACES, NETAVARK, TOOLS] {
            let path = self.path(name);
            match std::fs::remove_dir_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::debug!(name, %error, "cannot remove a directory of the keeper");
                }
                _ => {}
            }
        }
    }
}

/// Descriptors that the keeper keeps open.
struct Kept {
    users: OwnedFd,
    _connection: Connection,
}

fn lock(file: &OwnedFd, how: FlockOperation) -> io::Result<()> {
    loop {
        match flock(file, how) {
            Err(Errno::INTR) => {}
            locked => return Ok(locked?),
        }
    }
}
