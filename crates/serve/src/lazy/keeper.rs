//! The keeper: a small process that holds the connections and the devices of a service, and that outlives the service.
//!
//! When the last descriptor of a connection is closed, its readers get I/O errors. So a service must not hold the only
//! descriptor when it dies. While a service runs, the keeper takes no request. If the service dies, the keeper starts
//! another one and hands everything over. If no service comes, all readers get I/O errors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use image::digest::Digest;
use kernel::fuse::{FuseConnection, FuseError, RequestBuffer, TakenRequest};
use kernel::process::{ProcessError, Setup, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use store::OperationError;

use super::fuse::connections::ConnectionId;
use super::restart_policy::{AfterDeath, Deaths};
use super::runtime_dir;
use super::wire::{self, KeptState, PROTOCOL, ToKeeper, Told};

/// Name of the socket at which a new service takes over.
pub(super) const SOCKET: &str = "keeper";
/// How long readers wait for the next service before they get I/O errors.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// The first pause before another service is started. It doubles each time.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// The first pause after services died repeatedly. Readers get I/O errors before it is over.
const REST: Duration = Duration::from_secs(15);
/// How long the keeper waits for a service before it checks whether anything is still in use.
const LOOK: Duration = Duration::from_secs(1);
/// Largest number of descriptors of a service and of a keeper.
const DESCRIPTORS_MAX: u64 = 1 << 16;

/// The program of a keeper or a service.
#[derive(Debug, Clone)]
pub struct Program {
    /// Path of the executable.
    pub path: PathBuf,
    pub arguments: Vec<std::ffi::OsString>,
}

impl Program {
    /// Starts the program in a new session, with a socket as its standard input.
    ///
    /// Returns the thread that waits for the end of the process.
    fn start(&self, socket: Option<OwnedFd>) -> Result<JoinHandle<()>, ProcessError> {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments).current_dir("/");
        // Only the service that the service manager started may notify it.
        command.env_remove("NOTIFY_SOCKET");
        command.stdin(socket.map_or_else(Stdio::null, Stdio::from)).stdout(Stdio::null());
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        // The thread also starts the process, so that no process starts without a thread that waits for it.
        let work = move || {
            let setup = Setup { own_session: true, ..Setup::default() };
            match spawn(command, &setup) {
                Ok(started) => {
                    drop(sender.send(Ok(())));
                    drop(started.process.wait());
                }
                Err(error) => drop(sender.send(Err(error))),
            }
        };
        let failed =
            |source| ProcessError::Spawn { program: self.path.display().to_string(), source };
        let thread = std::thread::Builder::new().name("waiter".to_owned()).spawn(work);
        let thread = thread.map_err(failed)?;
        let ended = |_| Err(failed(io::Error::other("the thread has ended")));
        receiver.recv().unwrap_or_else(ended).map(|()| thread)
    }
}

/// Everything that a service begins with.
#[derive(Debug)]
pub(super) struct Succession {
    pub(super) keeper: Keeper,
    pub(super) devices: Vec<KeptDevice>,
    pub(super) connections: Vec<(ConnectionId, KeptConnection)>,
}

/// The result of looking for a keeper.
#[derive(Debug)]
pub(super) enum FoundKeeper {
    /// A keeper, with everything that it held.
    Succession(Succession),
    /// A keeper of another version of Quire, which cannot hand its devices over.
    OtherVersion,
    None,
}

/// A device that a keeper holds.
#[derive(Debug)]
pub(super) struct KeptDevice {
    /// Id of the device.
    pub(super) device: String,
    pub(super) file: File,
    pub(super) state: KeptState,
}

/// A FUSE connection that a keeper holds. Its file stands for a device.
#[derive(Debug)]
pub(super) struct KeptConnection {
    /// Id of the device.
    pub(super) device: String,
    /// Manifest of the image that the device was handed out for.
    pub(super) manifest: Option<Digest>,
    pub(super) connection: FuseConnection,
}

/// The service's connection to its keeper.
#[derive(Debug)]
pub(super) struct Keeper {
    socket: OwnedFd,
}

impl Keeper {
    /// Starts a keeper.
    pub(super) fn start(program: &Program) -> io::Result<Self> {
        allow_descriptors();
        let (socket, theirs) = wire::pair()?;
        // The end of the process is detected by the other end of the socket.
        let _reaper = program.start(Some(theirs)).map_err(io::Error::other)?;
        let keeper = Self { socket };
        keeper.tell(&ToKeeper::Begin { protocol: PROTOCOL }, None)?;
        Ok(keeper)
    }

    /// Takes over from a keeper, if there is one.
    pub(super) fn succeed(folder: &Path) -> io::Result<FoundKeeper> {
        allow_descriptors();
        let Some(socket) = wire::connect(&folder.join(SOCKET))? else {
            return Ok(FoundKeeper::None);
        };
        match wire::expect(wire::receive(socket.as_fd())) {
            Ok((Told::Keeps { protocol: PROTOCOL }, None)) => {}
            Ok(_) => return Ok(FoundKeeper::OtherVersion),
            Err(error) if wire::is_unknown(&error) => return Ok(FoundKeeper::OtherVersion),
            Err(error) => return Err(error),
        }
        let (mut devices, mut connections) = (Vec::new(), Vec::new());
        loop {
            match wire::expect(wire::receive(socket.as_fd()))? {
                (Told::Device { device, state }, Some(file)) => {
                    devices.push(KeptDevice { device, file: File::from(file), state });
                }
                (Told::Connection { connection: id, device, manifest }, Some(descriptor)) => {
                    let connection = FuseConnection::adopt(descriptor);
                    connections.push((id, KeptConnection { device, manifest, connection }));
                }
                (Told::Done, None) => break,
                _ => return Err(unknown()),
            }
        }
        let keeper = Self { socket };
        Ok(FoundKeeper::Succession(Succession { keeper, devices, connections }))
    }

    /// Sends the keeper a message and waits for the reply.
    pub(super) fn tell(
        &self,
        message: &ToKeeper,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        wire::send(self.socket.as_fd(), message, descriptor)?;
        match wire::expect(wire::receive(self.socket.as_fd()))? {
            (Told::Done, None) => Ok(()),
            (Told::Refused { reason }, None) => Err(io::Error::other(reason)),
            _ => Err(unknown()),
        }
    }

    /// The socket, which becomes readable when the keeper exits.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn unknown() -> io::Error {
    io::Error::other("the keeper sent an unknown message")
}

/// The state of a keeper.
struct Kept {
    /// The devices, by id.
    devices: BTreeMap<String, KeptDevice>,
    connections: BTreeMap<ConnectionId, KeptConnection>,
    /// Path of the keeper's socket.
    path: PathBuf,
    /// Waits for the end of the service that was started last.
    started: Option<JoinHandle<()>>,
}

/// Runs a keeper: holds the connections and the devices of the service at the other end of `socket`, and of later
/// services, until a service ends while no device is in use, or until no device is in use while no service runs.
/// `service` is the program that starts another service in `folder`.
///
/// # Errors
/// If the first service cannot be reached, or is of another version of Quire.
pub fn keep(socket: OwnedFd, folder: &Path, service: &Program) -> Result<(), OperationError> {
    // Keeps the kernel from killing this process when memory is short. This needs CAP_SYS_RESOURCE, which root may
    // lack.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::debug!(%error, "the kernel can kill the keeper when memory is short");
    }
    allow_descriptors();
    let path = folder.join(SOCKET);
    let failed = OperationError::of("reach", "the service that started this keeper");
    match wire::expect(wire::receive(socket.as_fd())).map_err(failed)? {
        (ToKeeper::Begin { protocol: PROTOCOL }, None) => {}
        _ => return Err(failed(io::Error::other("it is of another version of Quire"))),
    }
    let mut kept = Kept {
        devices: BTreeMap::new(),
        connections: BTreeMap::new(),
        path: path.clone(),
        started: None,
    };
    let listener = wire::listen(&path).map_err(OperationError::at("listen on", &path))?;
    wire::send(socket.as_fd(), &Told::Done, None).map_err(failed)?;
    let (mut current, mut deaths) = (Some(socket), Deaths::default());
    loop {
        let begun = Instant::now();
        let ended = match current.take() {
            Some(socket) => kept.with(&socket),
            None => Ended::Died,
        };
        // The program that starts the next service, and the pause before it is started, if no service connects
        // earlier.
        let mut next = None;
        match ended {
            Ended::Over => return Ok(()),
            Ended::Left => {}
            Ended::Died => {
                tracing::error!("the service died");
                match deaths.died(begun.elapsed()) {
                    AfterDeath::Rest => {
                        tracing::error!(
                            "services repeatedly die: the next one starts after a pause"
                        );
                        next = Some((service, REST));
                    }
                    AfterDeath::Again => {
                        kept.start(service);
                        next = Some((service, PAUSE));
                    }
                }
            }
        }
        match kept.without(listener.as_fd(), next) {
            Some(next) => current = Some(next),
            None => break,
        }
    }
    let _gone = std::fs::remove_file(&path);
    runtime_dir::remove(folder);
    Ok(())
}

/// How a service ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// All devices and connections were released.
    Over,
    /// The service was asked to exit.
    Left,
    /// The service ended in any other way.
    Died,
}

impl Kept {
    /// Handles the messages of a service until it ends.
    fn with(&mut self, socket: &OwnedFd) -> Ended {
        let mut ended = Ended::Died;
        loop {
            let (message, descriptor) = match wire::receive::<ToKeeper>(socket.as_fd()) {
                Ok(Some(received)) => received,
                Ok(None) => return ended,
                // A service of a later version can continue without this message.
                Err(error) if wire::is_unknown(&error) => {
                    if !self.refuse(socket, &error) {
                        return ended;
                    }
                    continue;
                }
                Err(error) => {
                    tracing::error!(%error, "lost the connection to the service");
                    return Ended::Died;
                }
            };
            match (message, descriptor) {
                (ToKeeper::Keep { device, state }, Some(file)) => {
                    let file = File::from(file);
                    let kept = KeptDevice { device: device.clone(), file, state };
                    drop(self.devices.insert(device, kept));
                }
                (ToKeeper::Connect { connection: id, device, manifest }, Some(descriptor)) => {
                    let connection = FuseConnection::adopt(descriptor);
                    let kept = KeptConnection { device, manifest, connection };
                    drop(self.connections.insert(id, kept));
                }
                (ToKeeper::Disconnect { connection }, None) => {
                    drop(self.connections.remove(&connection));
                }
                (ToKeeper::Forget { device }, None) => drop(self.devices.remove(&device)),
                (ToKeeper::Leave, None) => ended = Ended::Left,
                (ToKeeper::End, None) => ended = self.end(),
                (message, _) => {
                    let error = format!(
                        "{message:?} came with an unexpected descriptor, or without a \
                            required one"
                    );
                    if !self.refuse(socket, &io::Error::other(error)) {
                        return ended;
                    }
                    continue;
                }
            }
            if wire::send(socket.as_fd(), &Told::Done, None).is_err() {
                return ended;
            }
        }
    }

    /// Ends together with a service, unless something is in use.
    fn end(&mut self) -> Ended {
        // The last mount may have ended after the service looked for connections that have ended.
        self.connections.retain(|_, it| it.connection.is_mounted().unwrap_or(true));
        if !self.devices.is_empty() || !self.connections.is_empty() {
            return Ended::Left;
        }
        // The socket is removed before the reply, because after the reply, another service may start with a new keeper.
        let _gone = std::fs::remove_file(&self.path);
        Ended::Over
    }

    /// Refuses a message. Returns whether the reply was sent.
    fn refuse(&self, socket: &OwnedFd, error: &io::Error) -> bool {
        tracing::warn!(%error, folder = %self.path.display(), "the service sent an unknown message");
        let refused = Told::Refused { reason: error.to_string() };
        wire::send(socket.as_fd(), &refused, None).is_ok()
    }

    fn start(&mut self, service: &Program) {
        match service.start(None) {
            Ok(started) => self.started = Some(started),
            Err(error) => {
                tracing::error!(%error, folder = %self.path.display(), "cannot restart the service");
            }
        }
    }

    /// Returns whether the service that was started last has not exited.
    fn is_starting(&self) -> bool {
        self.started.as_ref().is_some_and(|it| !it.is_finished())
    }

    /// Waits for a service, and starts one again from time to time. Returns `None` when nothing is in use any more.
    fn without(
        &mut self,
        listener: BorrowedFd<'_>,
        service: Option<(&Program, Duration)>,
    ) -> Option<OwnedFd> {
        let begun = Instant::now();
        let mut service = service.map(|(program, pause)| (program, pause, begun + pause));
        loop {
            let now = Instant::now();
            // While another service may still start soon, readers wait in the kernel's queue.
            let is_patient = now.duration_since(begun) < PATIENCE;
            // A service that does not connect may still wait for the end of the dead one. A second one would replace
            // it.
            if let Some((program, pause, start)) = &mut service
                && now >= *start
                && !(is_patient && self.is_starting())
            {
                self.start(program);
                *pause = (*pause * 2).min(PAUSE_MAX);
                *start = now + *pause;
            }
            let second = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            let mut watched = vec![PollFd::from_borrowed_fd(listener, PollFlags::IN)];
            if !is_patient {
                let readers = self.connections.values().map(|it| it.connection.as_fd());
                watched.extend(readers.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)));
            }
            let _ready = poll(&mut watched, Some(&second));
            if watched[0].revents().contains(PollFlags::IN)
                && let Some(next) = self.hand_over(listener)
            {
                return Some(next);
            }
            drop(watched);
            if !is_patient {
                self.refuse_reads();
            }
            if now.duration_since(begun) >= LOOK && !self.is_in_use() {
                return None;
            }
        }
    }

    /// Accepts a service and sends it everything.
    fn hand_over(&self, listener: BorrowedFd<'_>) -> Option<OwnedFd> {
        let give = || {
            let socket = wire::accept(listener)?;
            wire::send(socket.as_fd(), &Told::Keeps { protocol: PROTOCOL }, None)?;
            for KeptDevice { device, file, state } in self.devices.values() {
                let told = Told::Device { device: device.clone(), state: *state };
                wire::send(socket.as_fd(), &told, Some(file.as_fd()))?;
            }
            for (id, KeptConnection { device, manifest, connection }) in &self.connections {
                let (device, manifest) = (device.clone(), *manifest);
                let told = Told::Connection { connection: *id, device, manifest };
                wire::send(socket.as_fd(), &told, Some(connection.as_fd()))?;
            }
            wire::send(socket.as_fd(), &Told::Done, None)?;
            io::Result::Ok(socket)
        };
        give().inspect_err(|error| tracing::error!(%error, "cannot hand over to a service")).ok()
    }

    /// Returns whether a connection is in use. Errors count as in use.
    fn is_in_use(&self) -> bool {
        self.connections.values().any(|it| it.connection.is_mounted().unwrap_or(true))
    }

    /// Gives an I/O error to all pending reads of files on FUSE. Drops the connections that have ended.
    fn refuse_reads(&mut self) {
        self.connections.retain(|_, KeptConnection { device, connection, .. }| {
            match refused(connection) {
                Ok(is_over) => !is_over,
                Err(error) => {
                    tracing::error!(%error, device, "readers of a device may wait");
                    true
                }
            }
        });
    }
}

/// Refuses the pending requests of a connection, including those that a dead service had taken. Returns whether the
/// connection has ended.
fn refused(connection: &FuseConnection) -> Result<bool, FuseError> {
    // If the kernel cannot resend requests, it has already failed those of a dead service.
    let _resent = connection.resend()?;
    let mut buffer = RequestBuffer::default();
    loop {
        let request = match connection.take(&mut buffer)? {
            TakenRequest::Request(request) => request,
            TakenRequest::Nothing => return Ok(false),
            TakenRequest::Over => return Ok(true),
        };
        if request.operation.has_reply()
            && let Err(error) = connection.refuse(request.unique, Errno::IO)
        {
            tracing::debug!(%error, "the reader has exited");
        }
    }
}

/// Raises this process's limit of descriptors, because each device of each mount needs a connection.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map_or(DESCRIPTORS_MAX, |it| it.min(DESCRIPTORS_MAX));
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit }) {
        tracing::debug!(%error, "cannot raise the limit of descriptors");
    }
}
