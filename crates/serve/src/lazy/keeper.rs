//! The keeper: a small process that holds the fanotify group and the devices of a service, and that outlives the
//! service.
//!
//! When the last descriptor of the group is closed, the kernel no longer blocks readers, and they read zeros. So a
//! service must not hold the only descriptor when it dies. While a service runs, the keeper answers no event. If the
//! service dies, the keeper starts another one and hands everything over, with the journal of the events that the dead
//! service had taken. If no service comes, all readers get I/O errors.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use image::digest::Digest;
use kernel::fanotify::{Group, PrecontentError};
use kernel::fuse::{FuseConnection, FuseError, RequestBuffer, TakenRequest};
use kernel::process::{Setup, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use store::OperationError;

use super::door::ConnectionId;
use super::journal::{Journal, NUMBERS, TakenEvent};
use super::last_holder;
use super::restart_policy::{AfterDeath, Deaths};
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

/// Why a keeper cannot begin, or ended too early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeeperError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// A fanotify call failed.
    #[error(transparent)]
    Kernel(#[from] PrecontentError),
}

/// The program of a keeper or a service.
#[derive(Debug, Clone)]
pub struct Program {
    /// Path of the executable.
    pub path: PathBuf,
    pub arguments: Vec<std::ffi::OsString>,
}

impl Program {
    /// Starts the program in a new session, with a socket as its standard input.
    fn start(&self, socket: Option<OwnedFd>) -> Result<(), kernel::process::ProcessError> {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments).current_dir("/");
        // Only the service that the service manager started may notify it.
        command.env_remove("NOTIFY_SOCKET");
        command.stdin(socket.map_or_else(Stdio::null, Stdio::from)).stdout(Stdio::null());
        // The end of the process is detected by the other end of the socket, so this thread only reaps the process.
        let started = spawn(command, &Setup { own_session: true, ..Setup::default() })?;
        std::thread::spawn(move || drop(started.process.wait()));
        Ok(())
    }
}

/// Everything that a service begins with.
#[derive(Debug)]
pub(super) struct Succession {
    pub(super) keeper: Keeper,
    pub(super) group: Group,
    pub(super) instance: String,
    pub(super) journal: Journal,
    /// Unanswered events of the previous service.
    pub(super) inherited: Vec<TakenEvent>,
    pub(super) devices: Vec<KeptDevice>,
    pub(super) connections: Vec<(ConnectionId, KeptConnection)>,
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
    /// Starts a keeper and passes it the group and the journal.
    pub(super) fn start(
        program: &Program,
        group: &Group,
        instance: &str,
        journal: &Journal,
    ) -> io::Result<Self> {
        let (socket, theirs) = wire::pair()?;
        program.start(Some(theirs)).map_err(io::Error::other)?;
        let keeper = Self { socket };
        let begin = begin(numbers(), instance, false);
        wire::send(keeper.as_fd(), &begin, Some(group.as_fd()))?;
        match wire::expect(wire::receive(keeper.as_fd()))? {
            (Told::Keeps { .. }, None) => {
                keeper.tell(&ToKeeper::Journal, Some(journal.as_fd()))?;
            }
            // A keeper of an older version: if this service dies, readers whose events it has taken get an I/O error.
            (Told::Done, None) => {}
            _ => return Err(unknown()),
        }
        Ok(keeper)
    }

    /// Takes over from a keeper. Returns `None` if there is none.
    pub(super) fn succeed(folder: &Path) -> io::Result<Option<Succession>> {
        let Some(socket) = wire::connect(&folder.join(SOCKET))? else { return Ok(None) };
        let (mut group, mut instance) = (None, String::new());
        let (mut devices, mut connections) = (Vec::new(), Vec::new());
        let mut keepers = 0;
        loop {
            match wire::expect(wire::receive(socket.as_fd()))? {
                (Told::Group { instance: known, protocol }, Some(descriptor)) => {
                    (group, instance) = (Some(Group::adopt(descriptor)), known);
                    keepers = protocol;
                }
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
        let group = group.ok_or_else(|| io::Error::other("the keeper has no event group"))?;
        let keeper = Self { socket };
        // This precedes the opening of any temporary descriptor, because the descriptor numbers of unanswered events
        // must stay free.
        let numbers = numbers();
        let left = if keepers == 0 { None } else { keeper.inherit()? };
        let (journal, inherited) = match left {
            Some(journal) => {
                let inherited = journal.inherit();
                (journal, inherited)
            }
            None => {
                let journal = Journal::new().map_err(io::Error::other)?;
                if keepers > 0 {
                    keeper.tell(&ToKeeper::Journal, Some(journal.as_fd()))?;
                }
                (journal, Vec::new())
            }
        };
        keeper.tell(&begin(numbers, &instance, keepers > 0), None)?;
        Ok(Some(Succession { keeper, group, instance, journal, inherited, devices, connections }))
    }

    /// Gets the journal of the previous service. Returns `None` if there is none, or if its version is unknown.
    fn inherit(&self) -> io::Result<Option<Journal>> {
        wire::send(self.as_fd(), &ToKeeper::Inherit, None)?;
        match wire::expect(wire::receive(self.as_fd()))? {
            (Told::Done, Some(journal)) => match Journal::adopt(journal) {
                Ok(journal) => Ok(Some(journal)),
                Err(error) => {
                    tracing::warn!(%error, "readers of the previous service get I/O errors");
                    Ok(None)
                }
            },
            (Told::Done, None) => Ok(None),
            _ => Err(unknown()),
        }
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

/// Returns the first message of a new service to a keeper, or the last one of a takeover.
fn begin(numbers: RawFd, instance: &str, has_journal: bool) -> ToKeeper {
    let instance = instance.to_owned();
    ToKeeper::Group { numbers, instance, protocol: PROTOCOL, has_journal }
}

/// The state of a keeper.
struct Kept {
    group: Group,
    instance: String,
    /// Journal of the current or the last service.
    journal: Option<Journal>,
    /// Upper limit of the descriptor numbers of the service's events.
    numbers: RawFd,
    /// The devices, by id.
    devices: BTreeMap<String, KeptDevice>,
    connections: BTreeMap<ConnectionId, KeptConnection>,
    /// Path of the keeper's socket.
    path: PathBuf,
}

/// Runs a keeper: holds the group and the devices of the service at the other end of `socket`, and of later services,
/// until a service ends while no device is in use, or until no device is in use while no service runs. `service` is
/// the program that starts another service in `folder`.
///
/// # Errors
/// If an error occurs before the first service got a reply, the group and the devices are released.
pub fn keep(socket: OwnedFd, folder: &Path, service: &Program) -> Result<(), KeeperError> {
    // Keeps the kernel from killing this process when memory is short. This needs CAP_SYS_RESOURCE, which root may
    // lack.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::debug!(%error, "the kernel can kill the keeper when memory is short");
    }
    // Raises the limit of descriptors, because each device of each mount needs a connection.
    let _most = self::numbers();
    let path = folder.join(SOCKET);
    let failed = OperationError::of("reach", "the service that started this keeper");
    let (first, group) = wire::expect(wire::receive(socket.as_fd())).map_err(failed)?;
    let (ToKeeper::Group { numbers, instance, protocol, .. }, Some(group)) = (first, group) else {
        return Err(failed(io::Error::other("it sent no event group")).into());
    };
    let group = Group::adopt(group);
    let _life = last_holder::live(folder, &instance).map_err(failed)?;
    let mut kept = Kept {
        group,
        instance,
        journal: None,
        numbers,
        devices: BTreeMap::new(),
        connections: BTreeMap::new(),
        path: path.clone(),
    };
    let listener = wire::listen(&path).map_err(OperationError::at("listen on", &path))?;
    let keeps = if protocol == 0 { Told::Done } else { Told::Keeps { protocol: PROTOCOL } };
    wire::send(socket.as_fd(), &keeps, None).map_err(failed)?;
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
                let left = kept.journal.as_ref().map(Journal::left).unwrap_or_default();
                let after = deaths.died(&left, begun.elapsed());
                if after == AfterDeath::WithoutReaders {
                    tracing::error!("services repeatedly die of one reader: it gets an I/O error");
                    kept.drop_journal();
                }
                if after == AfterDeath::Rest {
                    tracing::error!("services repeatedly die: the next one starts after a pause");
                    next = Some((service, REST));
                } else {
                    // The service is started first, because readers wait for it.
                    kept.start(service);
                    next = Some((service, PAUSE));
                }
                kept.deny_unknown()?;
            }
        }
        match kept.without(listener.as_fd(), next)? {
            Some(next) => current = Some(next),
            None => break,
        }
    }
    let _gone = std::fs::remove_file(&path);
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
                (ToKeeper::Group { numbers, has_journal, .. }, None) => {
                    self.numbers = self.numbers.max(numbers);
                    if !has_journal {
                        // The new service does not know the events in the journal, so its own events may get their
                        // descriptor numbers.
                        self.drop_journal();
                    }
                }
                (ToKeeper::Inherit, None) => {
                    let journal = self.journal.as_ref().map(Journal::as_fd);
                    if wire::send(socket.as_fd(), &Told::Done, journal).is_err() {
                        return ended;
                    }
                    continue;
                }
                (ToKeeper::Journal, Some(memory)) => {
                    self.drop_journal();
                    self.journal = Journal::adopt(memory)
                        .inspect_err(|error| tracing::warn!(%error, "cannot use a journal"))
                        .ok();
                }
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
                // A service that has devices must not send this message. If it does, the keeper continues to hold the
                // devices.
                (ToKeeper::End, None) if self.devices.is_empty() && self.connections.is_empty() => {
                    // The socket is removed before the reply, because after the reply, another service may start with
                    // a new keeper.
                    let _gone = std::fs::remove_file(&self.path);
                    ended = Ended::Over;
                }
                (ToKeeper::End, None) => ended = Ended::Left,
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

    /// Refuses a message. Returns whether the reply was sent.
    fn refuse(&self, socket: &OwnedFd, error: &io::Error) -> bool {
        tracing::warn!(%error, folder = %self.path.display(), "the service sent an unknown message");
        let refused = Told::Refused { reason: error.to_string() };
        wire::send(socket.as_fd(), &refused, None).is_ok()
    }

    /// Gives an I/O error to all readers in the journal, and removes the journal.
    fn drop_journal(&mut self) {
        let Some(journal) = self.journal.take() else { return };
        match journal.deny(&self.group) {
            Ok(0) => {}
            Ok(denied) => {
                tracing::error!(denied, "readers got I/O errors: no service can answer them");
            }
            Err(error) => tracing::error!(%error, "readers of a lazy device may wait forever"),
        }
    }

    /// Gives I/O errors to readers whose events a dead service had taken, if the journal does not contain these
    /// events.
    fn deny_unknown(&self) -> Result<(), KeeperError> {
        let left = self.journal.as_ref().map(Journal::left).unwrap_or_default();
        let known: BTreeSet<_> = left.iter().map(|it| it.number).collect();
        let others = (0..self.numbers).filter(|it| !known.contains(it));
        let denied = self.group.deny_taken(others)?;
        tracing::info!(left = left.len(), denied, "readers wait for the next service");
        Ok(())
    }

    fn start(&self, service: &Program) {
        if let Err(error) = service.start(None) {
            tracing::error!(%error, folder = %self.path.display(), "cannot restart the service");
        }
    }

    /// Waits for a service, and starts one again from time to time. Returns `None` when nothing is in use any more.
    fn without(
        &mut self,
        listener: BorrowedFd<'_>,
        service: Option<(&Program, Duration)>,
    ) -> Result<Option<OwnedFd>, KeeperError> {
        let begun = Instant::now();
        let mut service = service.map(|(program, pause)| (program, pause, begun + pause));
        loop {
            let now = Instant::now();
            if let Some((program, pause, start)) = &mut service
                && now >= *start
            {
                self.start(program);
                *pause = (*pause * 2).min(PAUSE_MAX);
                *start = now + *pause;
            }
            // While another service may still start soon, readers wait in the kernel's queue.
            let is_patient = now.duration_since(begun) < PATIENCE;
            let second = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            let mut watched = vec![PollFd::from_borrowed_fd(listener, PollFlags::IN)];
            if !is_patient {
                let connections = self.connections.values().map(|it| it.connection.as_fd());
                let readers = std::iter::once(self.group.as_fd()).chain(connections);
                watched.extend(readers.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)));
            }
            let _ready = poll(&mut watched, Some(&second));
            if watched[0].revents().contains(PollFlags::IN)
                && let Some(next) = self.hand_over(listener)
            {
                return Ok(Some(next));
            }
            drop(watched);
            if !is_patient {
                self.refuse_reads();
                // Events that are taken below may get the descriptor numbers of events in the journal.
                self.drop_journal();
                last_holder::deny_all(&self.group)?;
            }
            if now.duration_since(begun) >= LOOK && !self.is_in_use() {
                return Ok(None);
            }
        }
    }

    /// Accepts a service and sends it everything.
    fn hand_over(&self, listener: BorrowedFd<'_>) -> Option<OwnedFd> {
        let give = || {
            let socket = wire::accept(listener)?;
            let told = Told::Group { instance: self.instance.clone(), protocol: PROTOCOL };
            wire::send(socket.as_fd(), &told, Some(self.group.as_fd()))?;
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

    /// Returns whether a device or a connection is in use. Errors count as in use.
    fn is_in_use(&self) -> bool {
        let mut files = self.devices.values().map(|it| it.file.as_fd());
        let mut connections = self.connections.values();
        files.any(|file| kernel::lease::in_use(file).unwrap_or(true))
            || connections.any(|it| it.connection.is_mounted().unwrap_or(true))
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

/// Raises this process's limit of descriptors, and returns it. The descriptor numbers of events are below this limit.
fn numbers() -> RawFd {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map_or(NUMBERS, |it| it.min(NUMBERS));
    let set = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit });
    let numbers = match set {
        Ok(()) => most,
        Err(_) => limit.current.unwrap_or(u64::MAX),
    };
    RawFd::try_from(numbers).unwrap_or(RawFd::MAX)
}
