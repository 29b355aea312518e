//! The keeper: a small process that has the group and the devices of a service open, and outlives it.
//!
//! Without any descriptor of the group, the kernel lets readers pass, and they see zeros. So a service that dies must not be
//! the last one to have it. The keeper answers nobody as long as there is a service. If that dies, it gives an I/O error to
//! the readers whose events the service had taken, starts another service, and hands all over to it. If none comes, all
//! readers get I/O errors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kernel::precontent::{EventBuffer, Group, PrecontentError};
use kernel::process::{Setup, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::watch;
use super::wire::{self, ToKeeper, Told};

/// The socket at which a service takes over.
pub(super) const SOCKET: &str = "keeper";
/// How long readers wait for the next service before they get I/O errors.
const PATIENCE: Duration = Duration::from_secs(10);
/// The first pause before another service is started. Each further one is twice as long.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How often it is looked whether anything is still in use, while there is no service.
const LOOK: Duration = Duration::from_secs(1);
/// The most descriptors that a service has: its events are known by their numbers, and a keeper tries all of them.
pub(super) const NUMBERS: u64 = 1 << 16;

/// Why a keeper cannot begin, or ended before it was told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeeperError {
    /// The service does not say what a keeper has to know.
    #[error("cannot talk to the service that started this keeper")]
    Service(#[source] io::Error),
    /// It cannot listen for the next service.
    #[error("cannot listen at {}", path.display())]
    Listen {
        /// Its socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] PrecontentError),
}

/// How the program of a keeper or a service is started.
#[derive(Debug, Clone)]
pub struct Program {
    /// The file.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<std::ffi::OsString>,
}

impl Program {
    /// Starts it in a session of its own, with a socket as its standard input.
    fn start(&self, socket: Option<OwnedFd>) -> Result<(), kernel::process::ProcessError> {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments).current_dir("/");
        // A service manager hears of the service that it started itself.
        command.env_remove("NOTIFY_SOCKET");
        command.stdin(socket.map_or_else(Stdio::null, Stdio::from)).stdout(Stdio::null());
        // It is not waited for: who is at the other end of its socket sees its end.
        let started = spawn(command, &Setup { own_session: true, ..Setup::default() })?;
        std::thread::spawn(move || drop(started.process.wait()));
        Ok(())
    }
}

/// What a service begins with.
#[derive(Debug)]
pub(super) struct Succession {
    pub(super) keeper: Keeper,
    pub(super) group: Group,
    pub(super) instance: String,
    /// By their ids.
    pub(super) devices: Vec<(String, File)>,
}

/// A keeper, as its service sees it.
#[derive(Debug)]
pub(super) struct Keeper {
    socket: OwnedFd,
}

impl Keeper {
    /// Starts a keeper and has it hold these.
    pub(super) fn start(
        program: &Program,
        (group, instance): (&Group, &str),
        devices: &[(String, BorrowedFd<'_>)],
    ) -> io::Result<Self> {
        let (socket, theirs) = wire::pair()?;
        program.start(Some(theirs)).map_err(io::Error::other)?;
        let keeper = Self { socket };
        let begin = ToKeeper::Group { numbers: numbers(), instance: instance.to_owned() };
        keeper.tell(&begin, Some(group.as_fd()))?;
        for (device, file) in devices {
            keeper.tell(&ToKeeper::Keep { device: device.clone() }, Some(*file))?;
        }
        Ok(keeper)
    }

    /// Takes over what a keeper has; `None` if there is no keeper.
    pub(super) fn succeed(folder: &Path) -> io::Result<Option<Succession>> {
        let Some(socket) = wire::connect(&folder.join(SOCKET))? else { return Ok(None) };
        let (mut group, mut instance, mut devices) = (None, String::new(), Vec::new());
        loop {
            match wire::expect(wire::receive(socket.as_fd()))? {
                (Told::Group { instance: known }, Some(descriptor)) => {
                    (group, instance) = (Some(Group::adopt(descriptor)), known);
                }
                (Told::Device { device }, Some(file)) => devices.push((device, File::from(file))),
                (Told::Done, None) => break,
                _ => return Err(io::Error::other("the keeper sent what is unknown")),
            }
        }
        let group = group.ok_or_else(|| io::Error::other("the keeper has no group"))?;
        let keeper = Self { socket };
        let go_on = ToKeeper::Group { numbers: numbers(), instance: instance.clone() };
        keeper.tell(&go_on, None)?;
        Ok(Some(Succession { keeper, group, instance, devices }))
    }

    /// Tells it something, and returns when that is done.
    pub(super) fn tell(
        &self,
        message: &ToKeeper,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        wire::send(self.socket.as_fd(), message, descriptor)?;
        match wire::expect(wire::receive(self.socket.as_fd()))? {
            (Told::Done, None) => Ok(()),
            _ => Err(io::Error::other("the keeper sent what is unknown")),
        }
    }

    /// Readable when the keeper is gone.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What a keeper has.
struct Kept {
    group: Group,
    instance: String,
    /// The events of a service have numbers below this.
    numbers: RawFd,
    devices: BTreeMap<String, File>,
    /// Its socket.
    path: PathBuf,
}

/// Is a keeper: holds the group and the devices of the service at the other end of `socket`, and of those after it, until a
/// service says that it is over, or nothing is in use. `service` is how another service is started, in `folder`.
///
/// # Errors
/// [`KeeperError`]. Before the first service was told that all is held, it holds nothing.
pub fn keep(socket: OwnedFd, folder: &Path, service: &Program) -> Result<(), KeeperError> {
    // Nobody is to choose it when memory is short. It takes a right that not every root has.
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::debug!(%error, "the keeper can be killed when memory is short");
    }
    let path = folder.join(SOCKET);
    let (first, group) =
        wire::expect(wire::receive(socket.as_fd())).map_err(KeeperError::Service)?;
    let (ToKeeper::Group { numbers, instance }, Some(group)) = (first, group) else {
        return Err(KeeperError::Service(io::Error::other("it sent no group")));
    };
    let group = Group::adopt(group);
    let _life = watch::live(folder, &instance).map_err(KeeperError::Service)?;
    let devices = BTreeMap::new();
    let mut kept = Kept { group, instance, numbers, devices, path: path.clone() };
    let listener =
        wire::listen(&path).map_err(|source| KeeperError::Listen { path: path.clone(), source })?;
    wire::send(socket.as_fd(), &Told::Done, None).map_err(KeeperError::Service)?;
    let mut current = Some(socket);
    loop {
        let ended = match current.take() {
            Some(socket) => kept.with(&socket),
            None => Ended::Died,
        };
        match ended {
            Ended::Over => return Ok(()),
            Ended::Left => {}
            Ended::Died => {
                let denied = kept.group.deny_taken(kept.numbers)?;
                tracing::error!(denied, "the service died: it is started again");
            }
        }
        match kept.without(listener.as_fd(), (ended == Ended::Died).then_some(service))? {
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
    /// With nothing in use.
    Over,
    /// As it was told to.
    Left,
    /// In any other way.
    Died,
}

impl Kept {
    /// Does what a service says until it ends.
    fn with(&mut self, socket: &OwnedFd) -> Ended {
        let mut ended = Ended::Died;
        loop {
            let (message, descriptor) = match wire::receive::<ToKeeper>(socket.as_fd()) {
                Ok(Some(received)) => received,
                Ok(None) => return ended,
                Err(error) => {
                    tracing::error!(%error, "the service sent what is unknown");
                    return Ended::Died;
                }
            };
            match (message, descriptor) {
                (ToKeeper::Group { numbers, .. }, None) => self.numbers = self.numbers.max(numbers),
                (ToKeeper::Keep { device }, Some(file)) => {
                    let _before = self.devices.insert(device, File::from(file));
                }
                (ToKeeper::Forget { device }, None) => drop(self.devices.remove(&device)),
                (ToKeeper::Leave, None) => ended = Ended::Left,
                // Who says so is wrong if there are devices: then they are held on.
                (ToKeeper::End, None) if self.devices.is_empty() => {
                    // Before the service goes on: another one may make all this again then.
                    let _gone = std::fs::remove_file(&self.path);
                    ended = Ended::Over;
                }
                (ToKeeper::End, None) => ended = Ended::Left,
                _ => return Ended::Died,
            }
            if wire::send(socket.as_fd(), &Told::Done, None).is_err() {
                return ended;
            }
        }
    }

    /// Waits for a service, which is started unless somebody else does. `None` if nothing is in use any more.
    fn without(
        &self,
        listener: BorrowedFd<'_>,
        service: Option<&Program>,
    ) -> Result<Option<OwnedFd>, KeeperError> {
        let begun = Instant::now();
        let (mut pause, mut start) = (PAUSE, Instant::now());
        let mut buffer = EventBuffer::default();
        loop {
            let now = Instant::now();
            if let Some(service) = service
                && now >= start
            {
                if let Err(error) = service.start(None) {
                    tracing::error!(%error, "cannot start the service again");
                }
                start = now + pause;
                pause = (pause * 2).min(PAUSE_MAX);
            }
            // As long as somebody may come soon, readers wait in the queue.
            let is_patient = now.duration_since(begun) < PATIENCE;
            let listening = PollFd::from_borrowed_fd(listener, PollFlags::IN);
            let events = PollFd::new(&self.group, PollFlags::IN);
            let second = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
            let mut both = [listening, events];
            let watched = if is_patient { &mut both[..1] } else { &mut both[..] };
            let _ready = poll(watched, Some(&second));
            if watched[0].revents().contains(PollFlags::IN)
                && let Some(next) = self.hand_over(listener)
            {
                return Ok(Some(next));
            }
            if !is_patient {
                for event in self.events(&mut buffer)? {
                    if let Err(error) = self.group.deny(event) {
                        tracing::debug!(%error, "its reader is gone");
                    }
                }
            }
            if now.duration_since(begun) >= LOOK && !self.is_in_use() {
                return Ok(None);
            }
        }
    }

    fn events(
        &self,
        buffer: &mut EventBuffer,
    ) -> Result<Vec<kernel::precontent::ReadEvent>, KeeperError> {
        use rustix::io::Errno;
        match self.group.read(buffer) {
            // The kernel has denied the event for which there was no descriptor.
            Err(PrecontentError::Call {
                source: Errno::MFILE | Errno::NFILE | Errno::NOMEM,
                ..
            }) => Ok(Vec::new()),
            events => Ok(events?),
        }
    }

    /// Gives all to the service that connects.
    fn hand_over(&self, listener: BorrowedFd<'_>) -> Option<OwnedFd> {
        let give = || {
            let socket = wire::accept(listener)?;
            let told = Told::Group { instance: self.instance.clone() };
            wire::send(socket.as_fd(), &told, Some(self.group.as_fd()))?;
            for (device, file) in &self.devices {
                let told = Told::Device { device: device.clone() };
                wire::send(socket.as_fd(), &told, Some(file.as_fd()))?;
            }
            wire::send(socket.as_fd(), &Told::Done, None)?;
            io::Result::Ok(socket)
        };
        give().inspect_err(|error| tracing::error!(%error, "cannot hand over to a service")).ok()
    }

    /// When in doubt, yes.
    fn is_in_use(&self) -> bool {
        let mut files = self.devices.values();
        files.any(|file| kernel::lease::in_use(file.as_fd()).unwrap_or(true))
    }
}

/// Sets how many descriptors this process can have, and returns how many: all its events have numbers below that.
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
