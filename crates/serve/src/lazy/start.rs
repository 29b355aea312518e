//! Starts the lazy service when a mount needs it and none runs.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kernel::mount::Propagation;
use kernel::process::{ProcessError, Setup, Who, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use store::OperationError;

use super::client::LazyService;
use super::keeper::Program;

/// Idle time in seconds after which a service that a mount started exits.
pub const STARTED_IDLE: u32 = 300;
/// How long a service may take until it accepts clients.
const BEGIN: Duration = Duration::from_secs(30);
/// How long to wait for another service. A new service exits at once if it finds that another one is starting.
const OTHER: Duration = Duration::from_secs(5);
const TURN: Duration = Duration::from_millis(10);
/// Largest part of the service's messages that is shown, in bytes.
const TOLD: u64 = 2048;

/// How to find or start the service of a store.
pub struct Starter {
    /// The program to start. It prints a line when it accepts clients, and exits [`STARTED_IDLE`] seconds after its
    /// last use.
    pub program: Program,
    /// Options for registries, as on a command line, which a running service does not know.
    pub options: Vec<String>,
    /// The user: only the host's root starts a service.
    pub who: Who,
    /// Shows a message to the user.
    pub remark: Box<dyn Fn(&str) + Send + Sync>,
}

impl std::fmt::Debug for Starter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Starter").field("program", &self.program).finish_non_exhaustive()
    }
}

/// Reason why no service is available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The service does not run, and this user may not start it.
    #[error("no service fills the lazy devices of this store: as root, start `quire serve --lazy`")]
    NotRoot,
    /// The service does not run, and starting it failed.
    #[error(
        "no service fills the lazy devices of this store, and starting one failed (its messages \
        are in {})", log.display()
    )]
    Start {
        /// Path of the file with its messages.
        log: PathBuf,
        source: NotStarted,
    },
    /// The socket exists, but the connection failed.
    #[error("cannot connect to the service for lazy devices")]
    Connect(#[source] io::Error),
}

/// Why a service did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NotStarted {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The program cannot be started.
    #[error(transparent)]
    Spawn(#[from] ProcessError),
    /// The service exited; the text contains its messages.
    #[error("it exited: {0}")]
    Ended(String),
    /// The service did not accept clients before the timeout.
    #[error("it did not reply within {} seconds", BEGIN.as_secs())]
    Silent,
}

impl Starter {
    /// Connects to the service in a folder (see [`folder_of`](super::folder_of)), and starts it if none runs.
    pub fn service(&self, folder: &Path) -> Result<LazyService, StartError> {
        if let Some(service) = LazyService::connect(folder).map_err(StartError::Connect)? {
            if !self.options.is_empty() && !service.options().is_ok_and(|it| it == self.options) {
                let options = self.options.join(" ");
                (self.remark)(&format!(
                    "the running service fetches with its own credentials and settings: `quire \
                    serve --lazy --replace {options}` starts one with these options"
                ));
            }
            return Ok(service);
        }
        if !self.who.is_host_root() {
            return Err(StartError::NotRoot);
        }
        let log = log_of(folder);
        self.start(folder, &log).map_err(|source| StartError::Start { log, source })
    }

    fn start(&self, folder: &Path, log: &Path) -> Result<LazyService, NotStarted> {
        if let Some(parent) = log.parent() {
            // With the same mode as the service uses.
            let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
            made.map_err(OperationError::at("make", parent))?;
        }
        let mut options = File::options();
        options.append(true).create(true).mode(0o600);
        let messages = options.open(log).and_then(|it| it.set_len(0).map(|()| it));
        let messages = messages.map_err(OperationError::at("make", log))?;
        let mut command = Command::new(&self.program.path);
        command.args(&self.program.arguments).current_dir("/").env_remove("NOTIFY_SOCKET");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::from(messages));
        let setup = Setup { own_session: true, own_mounts: own_mounts(), ..Setup::default() };
        let started = spawn(command, &setup)?;
        let mut output = started.stdout.expect("its output is a pipe");
        let begun = Instant::now();
        let unreached = OperationError::of("reach", "it");
        let (mut ended, mut is_ready) = (None, false);
        loop {
            let found = LazyService::connect(folder).map_err(unreached)?;
            // Another process may have started the found service at the same moment.
            let is_known = is_ready || ended.is_some() || begun.elapsed() > BEGIN;
            if let Some(service) = found.filter(|_| is_known) {
                if is_ready {
                    (self.remark)(&format!(
                        "started `quire serve --lazy`, which exits {} minutes after its last use",
                        STARTED_IDLE / 60
                    ));
                }
                return Ok(service);
            }
            match ended {
                None if begun.elapsed() > BEGIN => return Err(NotStarted::Silent),
                Some(ended) if Instant::now() > ended => return Err(NotStarted::Ended(told(log))),
                Some(_) => thread::sleep(TURN),
                None => {
                    let wait = Timespec { tv_sec: 0, tv_nsec: TURN.subsec_nanos().into() };
                    let ready = poll(
                        &mut [PollFd::from_borrowed_fd(output.as_fd(), PollFlags::IN)],
                        Some(&wait),
                    );
                    // The service prints a line when it is ready, and the end of the pipe means that it exited.
                    if ready.is_ok_and(|it| it > 0) {
                        match output.read(&mut [0; 256]).map_err(unreached)? {
                            0 => ended = Some(Instant::now() + OTHER),
                            _ => is_ready = true,
                        }
                    }
                }
            }
        }
    }
}

/// Returns the propagation for the service's copy of the mount namespace, or `None` in the namespace of process 1. The
/// service outlives the command that starts it. If the command runs in a namespace that should end with it, the
/// service would keep that namespace and its lazy mounts alive, and the service exits only when no such mounts are
/// left. So the service runs in a copy of the namespace, which is made before the mount.
fn own_mounts() -> Option<Propagation> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    (namespace("1")? != namespace("self")?).then_some(Propagation::Downstream)
}

/// Returns the file for messages of a service that a mount started. It stays when the service exits.
#[must_use]
pub fn log_of(folder: &Path) -> PathBuf {
    folder.with_extension("log")
}

/// Removes the message file of a service that exits, if it is empty.
pub fn remove_empty_log(folder: &Path) {
    let log = log_of(folder);
    if fs::metadata(&log).is_ok_and(|it| it.is_file() && it.len() == 0) {
        let _it_is_in_nobodys_way = fs::remove_file(&log);
    }
}

/// Returns the beginning of the service's messages in one line.
fn told(log: &Path) -> String {
    let mut text = String::new();
    let read = File::open(log).and_then(|it| it.take(TOLD).read_to_string(&mut text));
    match read {
        Ok(0) | Err(_) => "it printed no messages".to_owned(),
        Ok(_) => text.lines().map(str::trim).collect::<Vec<_>>().join("; "),
    }
}

/// Leaves the cgroup of the process that needed the mount. If a service manager killed all processes of that cgroup,
/// keeper and service would die at the same time, and readers of other mounts would get I/O errors.
pub fn leave_group() {
    let root = Path::new("/sys/fs/cgroup");
    if !root.join("cgroup.controllers").exists() {
        tracing::debug!("no cgroup of version 2");
        return;
    }
    let group = root.join("quire-lazy");
    let made = match fs::create_dir(&group) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => fs::write(group.join("cgroup.procs"), "0"),
    };
    if let Err(error) = made {
        tracing::debug!(%error, "the service stays in the cgroup of the mount");
    }
}
