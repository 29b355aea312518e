//! The service: lends lazy devices to those who mount them, and fills them while they are read.

mod lend;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use container::life::monitor::Watch as _;
use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use kernel::fanotify::{Group, PrecontentError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use store::{Store, Trace};
use transfer::lazy::LayerIndex;

use super::complete::Completer;
use super::door::{Door, DoorError, DoorKind, DoorWish, Unread};
use super::fill::{LayerFiller, LayerSource};
use super::journal::Journal;
use super::keeper::{Keeper, PATIENCE, Program, Succession};
use super::last_holder::{self, LazyWatch};
use super::readahead;
use super::retry::SourcePatience;
use super::runtime_dir::{self, Replace};
use super::wire::{self, Answer, Ask, DeviceStatus, KeptState, ToKeeper};

/// The socket at which clients ask.
pub(super) const SOCKET: &str = "service";
/// How often devices are looked for that nothing has open any more.
const LOOK: Duration = Duration::from_secs(2);
/// How often it is looked whether the disk has kept what was filled.
const CHECK: Duration = Duration::from_secs(1);
/// How often a service looks whether it is to end.
const TURN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How often a thread that waits for the keeper looks whether all ends.
const COMPLETE: Duration = Duration::from_millis(50);
/// The pause after which it is tried again to start a keeper.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a client may take to read an answer, or to ask the next question.
const CLIENT: Duration = Duration::from_secs(5);
/// The most clients that are listened to at once. The others wait.
const CLIENTS_MAX: usize = 64;
/// How long a service that is asked to leave may take.
pub(super) const LEAVE: Duration = Duration::from_secs(60);

/// An error of any kind.
pub(super) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Where a service has the indexes and the bytes of devices from.
pub trait Supply: Sync {
    /// How a device is filled for the image of a manifest; `None` if there is no index of it. Without a manifest, by any.
    ///
    /// # Errors
    /// When an index is there, and cannot be used.
    fn index(
        &self,
        device: &DeviceId,
        manifest: Option<&Digest>,
    ) -> Result<Option<LayerIndex>, AnyError>;

    /// Who has the blob of this index, for the image of this manifest.
    fn source(&self, index: &LayerIndex, manifest: Option<&Digest>) -> LayerSource<'_>;

    /// A trace of an image; `None` if it has none of this name. Without a name, it is the one that is usual here.
    ///
    /// # Errors
    /// When it cannot be used.
    fn trace(&self, image: &ImageId, name: Option<&str>) -> Result<Option<Trace>, AnyError>;

    /// Where the files of a device are, in bytes and in their order: what is near a read may be wanted soon. None if that is
    /// not known.
    fn files(&self, device: &DeviceId) -> Vec<Range<u64>> {
        let _unknown = device;
        Vec::new()
    }

    /// All bytes of a device are here and synced, and match its id. Makes those images complete that have all of theirs now.
    /// It ends soon once `cancel` is set. If it fails, it is called again later.
    ///
    /// # Errors
    /// When an image cannot be made complete.
    fn sealed(&self, device: &DeviceId, cancel: &AtomicBool) -> Result<(), AnyError>;
}

/// Which devices are brought as a whole, behind what is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Completion {
    /// Those for which clients ask.
    #[default]
    Asked,
    /// All that are lent.
    Always,
}

/// What a service needs besides the store.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Indexes and bytes.
    pub supply: &'a dyn Supply,
    /// Where it listens: see [`folder_of`](super::folder_of).
    pub folder: &'a Path,
    /// How a keeper is started. It calls [`keep`](super::keep) with its standard input.
    pub keeper: &'a Program,
    /// Which devices are brought as a whole: asked for each.
    pub complete: &'a (dyn Fn() -> Completion + Sync),
    /// How readers wait: asked for each device that is lent.
    pub door: &'a (dyn Fn() -> DoorWish + Sync),
    /// How patient it is with sources.
    pub patience: &'a SourcePatience,
    /// How long nothing is in use before it ends by itself; `None` if it does not.
    pub idle: Option<Duration>,
    /// Set to end the service.
    pub stop: &'a AtomicBool,
}

impl std::fmt::Debug for Surroundings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Surroundings").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Why a service cannot begin, or ended before it was told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// Another service has the folder.
    #[error(
        "another process fills the lazy devices of this store already: `quire serve --lazy --replace` takes over"
    )]
    Another,
    /// The service that was asked to leave goes on.
    #[error("the service that was asked to leave has not ended within {} seconds", LEAVE.as_secs())]
    Stays,
    /// Another user could write into the folder.
    #[error("{} belongs to another user, or others can write into it: remove it", .0.display())]
    Folder(PathBuf),
    /// The folder, or a socket in it.
    #[error("cannot use {}", path.display())]
    Path {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The keeper.
    #[error("cannot start the process that keeps lazy devices safe if the service dies")]
    Keeper(#[source] io::Error),
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] PrecontentError),
    /// The door.
    #[error(transparent)]
    Door(#[from] DoorError),
}

/// Serves the lazy devices of a store until `stop` is set, and returns how many are in use then. Their readers wait some
/// seconds for another service, and get I/O errors after that. `ready` is called as soon as clients can ask.
///
/// # Errors
/// [`ServiceError`].
pub fn serve(
    store: &Store,
    surroundings: &Surroundings<'_>,
    replace: Replace,
    ready: impl FnOnce(),
) -> Result<Left, ServiceError> {
    let folder = surroundings.folder;
    let (_lock, watch) = runtime_dir::lock(folder, store.who().user, replace)?;
    let Succession { keeper, group, instance, journal, inherited, devices, connections } =
        begin(surroundings)?;
    // The keeper died just as the service before left: its readers get I/O errors.
    let orphans = watch.filter(|it| it.is_of_another(&instance));
    let door = Door::succeed(group, journal, inherited)?.with_cancel(surroundings.stop);
    let completer = Completer::new(store, surroundings.supply, &door);
    let (readers, completer) = (&door, &completer);
    let is_replaced = AtomicBool::new(false);
    let service = Service {
        store,
        surroundings,
        door: readers,
        completer,
        instance: &instance,
        orphans,
        is_replaced,
    };
    service.take_over(&keeper, devices, connections);
    let path = folder.join(SOCKET);
    let failed = |source| ServiceError::Path { path: path.clone(), source };
    let listener = wire::listen(&path).map_err(failed)?;
    let end = AtomicBool::new(false);
    let (forget, forgotten) = mpsc::channel();
    thread::scope(|scope| {
        let door = scope.spawn(|| {
            let served = readers.serve(&end);
            // Then nothing else goes on either.
            end.store(true, Ordering::Relaxed);
            served
        });
        let completing = scope.spawn(|| {
            let forget = |device: &DeviceId| {
                let (done, is_done) = mpsc::channel();
                let _waiting = forget.send((device.to_string(), done));
                // At the end it is done below.
                while !end.load(Ordering::Relaxed) {
                    if is_done.recv_timeout(COMPLETE) != Err(mpsc::RecvTimeoutError::Timeout) {
                        break;
                    }
                }
            };
            completer.work(&end, &forget);
        });
        let checking = scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                readers.check_written();
                // At the end it is woken.
                thread::park_timeout(CHECK);
            }
        });
        ready();
        let talked = service.talk(listener.as_fd(), keeper, &forgotten, &end);
        end.store(true, Ordering::Relaxed);
        readers.wake();
        let served = door.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        checking.thread().unpark();
        completing.thread().unpark();
        completing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let _gone = fs::remove_file(&path);
        served?;
        let keeper = talked?;
        for (device, _) in forgotten.try_iter() {
            service.is_complete(&keeper, &device);
        }
        let left = service.release(&keeper, Unread::Go)?;
        service.leave(keeper, left);
        if left == 0 {
            // Nothing needs it until the next service. That makes it anew if it waits for this lock.
            let _gone = fs::remove_file(folder.join(runtime_dir::LOCK));
            let _gone = fs::remove_file(folder.join(last_holder::LIFE));
            let _gone = fs::remove_dir(folder);
        }
        Ok(match (left, service.is_replaced.load(Ordering::Relaxed)) {
            (0, _) => Left::Nothing,
            (_, true) => Left::ToAnother,
            (left, false) => Left::InUse(left),
        })
    })
}

/// The lazy devices that a service leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// None.
    Nothing,
    /// Another service has asked for them.
    ToAnother,
    /// So many are in use, and wait for another service.
    InUse(usize),
}

/// Takes over from a keeper, or starts one.
fn begin(surroundings: &Surroundings<'_>) -> Result<Succession, ServiceError> {
    // A keeper that has just found that nothing is in use ends meanwhile.
    for _ in 0..2 {
        match Keeper::succeed(surroundings.folder) {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => break,
            Err(error) => tracing::info!(%error, "the keeper was about to end"),
        }
    }
    // The filler has a file of its own. So events can be had also where the disk cannot be written any more.
    let group = Group::to_watch()?;
    let instance = container::life::prepare::random_id();
    let instance = instance.map_err(|error| ServiceError::Keeper(io::Error::other(error)))?;
    let journal = Journal::new().map_err(|error| ServiceError::Keeper(io::Error::other(error)))?;
    let keeper = Keeper::start(surroundings.keeper, (&group, &instance), &journal);
    let keeper = keeper.map_err(ServiceError::Keeper)?;
    let (inherited, devices, connections) = (Vec::new(), Vec::new(), Vec::new());
    Ok(Succession { keeper, group, instance, journal, inherited, devices, connections })
}

/// Who asks.
struct Client {
    socket: OwnedFd,
    /// When it came, or asked last.
    asked: Instant,
}

impl Client {
    /// The next that has connected.
    fn accept(listener: BorrowedFd<'_>) -> io::Result<Self> {
        let socket = wire::accept(listener)?;
        for side in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, side, Some(CLIENT))?;
        }
        Ok(Self { socket, asked: Instant::now() })
    }
}

struct Service<'s, 'a> {
    store: &'a Store,
    surroundings: &'a Surroundings<'a>,
    door: &'s Door<'a>,
    completer: &'s Completer<'s, 'a>,
    /// By which those know the group who watch it.
    instance: &'s str,
    /// The readers of a group that nobody else has.
    orphans: Option<LazyWatch>,
    /// Whether another service has asked for its place.
    is_replaced: AtomicBool,
}

/// Devices that the keeper need not hold any more, and who is told when that is done.
type Forgotten = mpsc::Receiver<(String, mpsc::Sender<()>)>;

impl<'a> Service<'_, 'a> {
    /// Answers clients, and sees to the keeper, until the service is to end.
    fn talk(
        &self,
        listener: BorrowedFd<'_>,
        mut keeper: Keeper,
        forgotten: &Forgotten,
        end: &AtomicBool,
    ) -> Result<Keeper, ServiceError> {
        let (mut looked, mut used) = (Instant::now(), Instant::now());
        let mut clients: Vec<Client> = Vec::new();
        // What has been fetched, and whether memory for that may have been freed since.
        let (mut fetched, mut may_trim) = (0, false);
        let is_to_end =
            || end.load(Ordering::Relaxed) || self.surroundings.stop.load(Ordering::Relaxed);
        while !is_to_end() {
            clients.retain(|it| it.asked.elapsed() < CLIENT);
            let has_room = clients.len() < CLIENTS_MAX;
            let comes = if has_room { PollFlags::IN } else { PollFlags::empty() };
            let mut all = vec![
                PollFd::from_borrowed_fd(listener, comes),
                PollFd::from_borrowed_fd(keeper.as_fd(), PollFlags::IN),
            ];
            let asking = clients.iter().map(|it| it.socket.as_fd());
            all.extend(asking.map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)));
            let _ready = poll(&mut all, Some(&TURN));
            let ready: Vec<_> = all.into_iter().map(|it| !it.revents().is_empty()).collect();
            if ready[1] {
                match self.keep_again() {
                    Ok(another) => keeper = another,
                    Err(error) => {
                        let error: &dyn std::error::Error = &error;
                        tracing::error!(error, "if this process dies now, readers see zeros");
                        thread::sleep(AGAIN);
                    }
                }
            }
            if let Some(orphans) = &self.orphans {
                let _pause = orphans.look();
            }
            let mut asks = ready[2..].iter();
            clients.retain_mut(|client| {
                !asks.next().is_some_and(|it| *it) || self.hear(client, &keeper, end)
            });
            if ready[0] {
                match Client::accept(listener) {
                    Ok(client) => clients.push(client),
                    Err(error) => tracing::warn!(%error, "cannot hear a client"),
                }
            }
            if !clients.is_empty() {
                used = Instant::now();
            }
            for (device, done) in forgotten.try_iter() {
                self.is_complete(&keeper, &device);
                let _told = done.send(());
            }
            if looked.elapsed() > LOOK {
                looked = Instant::now();
                let left = self.release(&keeper, Unread::Stay)?;
                self.door.complete_again();
                let before = std::mem::replace(&mut fetched, self.fetched());
                if fetched != before {
                    may_trim = true;
                } else if std::mem::take(&mut may_trim) {
                    // What the threads that fetch have freed between what is in use.
                    kernel::process::trim_heap();
                }
                if left > 0 || !self.completer.is_idle() {
                    used = Instant::now();
                }
                if self.surroundings.idle.is_some_and(|idle| used.elapsed() >= idle) {
                    tracing::info!("nothing is in use: the service ends");
                    break;
                }
            }
        }
        Ok(keeper)
    }

    /// Bytes of all blobs that were fetched for devices that are still filled.
    fn fetched(&self) -> u64 {
        self.door.fillers().iter().map(|it| it.counts().now().fetched).sum()
    }

    /// Starts another keeper after one died.
    fn keep_again(&self) -> Result<Keeper, ServiceError> {
        tracing::error!("the keeper died: another one is started");
        let group = (self.door.group(), self.instance);
        let keeper = Keeper::start(self.surroundings.keeper, group, self.door.journal());
        let keeper = keeper.map_err(ServiceError::Keeper)?;
        let tell = |message: &ToKeeper, file: BorrowedFd<'_>| {
            keeper.tell(message, Some(file)).map_err(ServiceError::Keeper)
        };
        self.door.files(|device, file, state| {
            tell(&ToKeeper::Keep { device: device.to_string(), state }, file.as_fd())
        })?;
        self.door.connections(|connection, (device, manifest), descriptor| {
            let device = device.to_string();
            tell(&ToKeeper::Connect { connection, device, manifest }, descriptor)
        })?;
        Ok(keeper)
    }

    /// Leaves the devices that are in use to the keeper, and returns when it has them. Until then this process must not end.
    fn leave(&self, mut keeper: Keeper, left: usize) {
        let word = if left == 0 { ToKeeper::End } else { ToKeeper::Leave };
        let begun = Instant::now();
        while let Err(error) = keeper.tell(&word, None) {
            if left == 0 {
                return;
            }
            tracing::error!(%error, "no keeper holds the devices that are in use");
            match self.keep_again() {
                Ok(another) => keeper = another,
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "this process holds them");
                    thread::sleep(AGAIN);
                }
            }
            if begun.elapsed() > PATIENCE {
                let denied = self.door.journal().deny(self.door.group());
                if let Err(error) = denied.and_then(|_| last_holder::deny_all(self.door.group())) {
                    tracing::error!(%error, "readers of a lazy device may wait for ever");
                }
            }
        }
    }

    /// Lets go of what nothing has open, and returns how many devices are left.
    fn release(&self, keeper: &Keeper, unread: Unread) -> Result<usize, ServiceError> {
        for connection in self.door.ended_connections() {
            if let Err(error) = keeper.tell(&ToKeeper::Disconnect { connection }, None) {
                tracing::warn!(%error, "the keeper holds a connection that has ended");
            }
        }
        let is_free = |file: &File| !kernel::lease::in_use(file.as_fd()).unwrap_or(true);
        let gone = |device: &DeviceId| {
            tracing::info!(%device, "nothing has the device open any more");
            forget(keeper, device.to_string());
        };
        Ok(self.door.disarm(is_free, gone, unread)?)
    }

    /// Answers a question that a client has asked. Returns whether it may ask another.
    fn hear(&self, client: &mut Client, keeper: &Keeper, end: &AtomicBool) -> bool {
        let answered = match wire::receive::<Ask>(client.socket.as_fd()) {
            Ok(Some((ask, _))) => self.answer(&client.socket, &ask, keeper, end),
            Ok(None) => return false,
            // It may be of a later version.
            Err(error) if wire::is_unknown(&error) => {
                let reason = format!("this service does not know the question: {error}");
                wire::send(client.socket.as_fd(), &Answer::Refused { reason }, None)
            }
            Err(error) => Err(error),
        };
        client.asked = Instant::now();
        if let Err(error) = &answered {
            tracing::warn!(%error, "cannot answer a client");
        }
        answered.is_ok()
    }

    fn answer(
        &self,
        client: &OwnedFd,
        ask: &Ask,
        keeper: &Keeper,
        end: &AtomicBool,
    ) -> io::Result<()> {
        let client = client.as_fd();
        match ask {
            Ask::Lend { device, manifest } => match self.lend(device, *manifest, keeper) {
                Ok(file) => wire::send(client, &Answer::Lent, Some(file.as_fd())),
                Err(error) => {
                    let reason = text(&error);
                    tracing::warn!(device, reason, "a device is not lent");
                    wire::send(client, &Answer::Refused { reason }, None)
                }
            },
            Ask::Bring { image, trace, manifest } => {
                match self.bring((image, manifest.as_ref()), trace.as_deref()) {
                    Ok(true) => wire::send(client, &Answer::Done, None),
                    Ok(false) => wire::send(client, &Answer::Absent, None),
                    Err(error) => {
                        let reason = text(&*error);
                        tracing::warn!(image, trace, reason, "a trace is not used");
                        wire::send(client, &Answer::Refused { reason }, None)
                    }
                }
            }
            Ask::Complete { image, manifest } => {
                match self.complete((image, manifest.as_ref()), keeper) {
                    Ok(()) => wire::send(client, &Answer::Done, None),
                    Err(error) => {
                        let reason = text(&*error);
                        wire::send(client, &Answer::Refused { reason }, None)
                    }
                }
            }
            Ask::Watch => {
                let watched = Answer::Watched { instance: self.instance.to_owned() };
                wire::send(client, &watched, Some(self.door.group().as_fd()))
            }
            Ask::Release => {
                if let Err(error) = self.release(keeper, Unread::Stay) {
                    tracing::warn!(%error, "cannot let go of devices");
                }
                wire::send(client, &Answer::Done, None)
            }
            Ask::Status => {
                for filler in self.door.fillers() {
                    let mut status = status(&filler);
                    status.doors = self.door.kinds(filler.device().id());
                    wire::send(client, &Answer::Device(Box::new(status)), None)?;
                }
                wire::send(client, &Answer::Done, None)
            }
            Ask::Leave => {
                self.is_replaced.store(true, Ordering::Relaxed);
                end.store(true, Ordering::Relaxed);
                wire::send(client, &Answer::Done, None)
            }
            Ask::Stop => {
                // If it goes on, so does what it fetches though nobody has it open.
                let refused = match self.release(keeper, Unread::Stay) {
                    Ok(left) => match left.saturating_sub(self.unread()) {
                        0 => None,
                        used => Some(format!("{used} lazy devices are in use")),
                    },
                    Err(error) => Some(text(&error)),
                };
                let answer = match refused {
                    Some(reason) => Answer::Refused { reason },
                    None => {
                        // Nobody waits for what a source may still give.
                        self.surroundings.stop.store(true, Ordering::Relaxed);
                        Answer::Done
                    }
                };
                wire::send(client, &answer, None)
            }
        }
    }

    /// How many devices nothing has open: they are completed, or a silent source has not given what a reader wanted that has
    /// ended.
    fn unread(&self) -> usize {
        let is_unread = |it: &&Arc<LayerFiller<'_>>| {
            !self.door.kinds(it.device().id()).contains(&DoorKind::Fuse)
                && !kernel::lease::in_use(it.device().file().as_fd()).unwrap_or(true)
        };
        self.door.fillers().iter().filter(is_unread).count()
    }

    /// Begins to bring what a trace has of devices that are lent. Returns whether there is the trace.
    fn bring(
        &self,
        (image, manifest): (&str, Option<&Digest>),
        name: Option<&str>,
    ) -> Result<bool, AnyError> {
        let image = ImageId::from_str(image)?;
        let Some(trace) = self.surroundings.supply.trace(&image, name)? else { return Ok(false) };
        let fillers: HashMap<_, _> =
            self.door.fillers_for(manifest).into_iter().map(|it| (*it.device().id(), it)).collect();
        let runs = trace.runs.iter().filter_map(|run| {
            let filler = Arc::clone(fillers.get(&run.device)?);
            let most = filler.index().head.units.len();
            let [start, units] =
                [run.unit, run.units].map(|it| usize::try_from(it).unwrap_or(usize::MAX));
            Some((filler, start..start.saturating_add(units), most))
        });
        // A trace may come from elsewhere.
        self.door.bring_ahead(readahead::bounded(runs).collect());
        Ok(true)
    }

    /// Begins to bring all of the devices of an image that are lent.
    fn complete(
        &self,
        (image, manifest): (&str, Option<&Digest>),
        keeper: &Keeper,
    ) -> Result<(), AnyError> {
        let devices = self.store.lazy_devices(&ImageId::from_str(image)?)?;
        for filler in self.door.fillers_for(manifest) {
            if devices.contains(filler.device().id()) {
                self.complete_device(&filler, keeper);
            }
        }
        Ok(())
    }

    /// Begins to bring all of a device.
    fn complete_device(&self, filler: &Arc<LayerFiller<'a>>, keeper: &Keeper) {
        self.door.complete(filler);
        // The next service goes on with it.
        let (device, file) = kept(filler);
        let manifest = filler.manifest().copied();
        let state = KeptState { is_completing: true, manifest, ..KeptState::default() };
        if let Err(error) = keeper.tell(&ToKeeper::Keep { device, state }, Some(file)) {
            tracing::warn!(%error, "if this process dies, a device is not completed");
        }
    }
}

/// Has the keeper let a device go.
fn forget(keeper: &Keeper, device: String) {
    if let Err(error) = keeper.tell(&ToKeeper::Forget { device }, None) {
        tracing::warn!(%error, "the keeper holds a device that is not in use");
    }
}

/// What a keeper holds of a device.
fn kept<'f>(filler: &'f LayerFiller<'_>) -> (String, BorrowedFd<'f>) {
    (filler.device().id().to_string(), filler.device().file().as_fd())
}

fn status(filler: &LayerFiller<'_>) -> DeviceStatus {
    let head = &filler.index().head;
    DeviceStatus {
        device: head.device.to_string(),
        blob: head.blob.to_string(),
        bytes: head.device_bytes,
        filled: filler.filled() as u64,
        units: head.units.len() as u64,
        is_completing: filler.is_completing(),
        doors: Vec::new(),
        disk_error: filler.disk_error(),
        counts: filler.counts().now(),
    }
}

/// An error with its causes, in a line.
fn text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += ": ";
        text += &cause.to_string();
        source = cause.source();
    }
    text
}
