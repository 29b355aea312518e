//! The service: hands out lazy devices to mounts, and fills them while they are read.

mod lend;
mod settler;
mod starts;
mod status;
mod window_queue;

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use store::{DEFAULT_TRACE, Store, Trace};

use super::client::Brought;
use super::complete::Completer;
use super::end_guard::Ending;
use super::fill::LayerFiller;
use super::fuse::{DeviceServer, DeviceServerError, Unread};
use super::keeper::{FoundKeeper, Keeper, PATIENCE, Program, Succession};
use super::retry::SourcePatience;
use super::runtime_dir::{self, FolderError, Replace};
use super::supply::Supply;
use super::wire::{self, Answer, Ask, KeptState, PROTOCOL, SERVICE_SOCKET, ToKeeper, UNSUPPORTED};
use crate::any_error::{AnyError, text};
use settler::Settler;
use window_queue::WindowQueue;

/// How often unused devices are looked for.
const LOOK: Duration = Duration::from_secs(2);
/// How often it is checked whether the disk has kept the filled bytes.
const CHECK: Duration = Duration::from_secs(1);
/// Timeout of a poll: the longest time until a service notices its end.
const TURN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// How often a thread that waits for the keeper checks whether the service ends.
const COMPLETE: Duration = Duration::from_millis(50);
/// Pause between attempts to start a keeper.
const AGAIN: Duration = Duration::from_millis(200);
/// How long a client may take to read a reply, or to send the next request.
const CLIENT: Duration = Duration::from_secs(5);
/// Largest number of connected clients. Others wait in the socket's queue.
const CLIENTS_MAX: usize = 64;

/// Which devices are fetched as a whole, with less priority than their readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Completion {
    /// Devices that clients request.
    #[default]
    Asked,
    /// Also those that have been in use for this time, as long as they are in use.
    After(Duration),
    /// All that are handed out.
    Always,
}

/// The environment of a service, besides the store.
#[derive(Clone, Copy)]
pub struct LazyResources<'a> {
    /// The source of indexes and bytes.
    pub supply: &'a Supply<'a>,
    /// The service's folder: see [`folder_of`](super::folder_of).
    pub folder: &'a Path,
    /// The program of a keeper. It calls [`keep`](super::keep) with its standard input.
    pub keeper: &'a Program,
    /// Returns which devices are fetched as a whole. Called for each device, and every other second.
    pub complete: &'a (dyn Fn() -> Completion + Sync),
    /// The service's options for registries, as on a command line.
    pub options: &'a [String],
    /// The timeouts of sources.
    pub patience: &'a SourcePatience,
    /// The service exits when nothing was in use for this long; `None` for never.
    pub idle: Option<Duration>,
    /// Set to end the service.
    pub stop: &'a AtomicBool,
}

impl std::fmt::Debug for LazyResources<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LazyResources").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// Why a service cannot begin, or ended too early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The socket for clients cannot be created.
    #[error("cannot listen on {}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    /// The keeper that an earlier service has left cannot hand its devices over.
    #[error(
        "another version of Quire holds lazy devices of this store: stop the lazy containers, \
        unmount the lazy images, and try again"
    )]
    OtherVersion,
    /// The keeper cannot be started.
    #[error("cannot start the keeper, which protects readers if the service dies")]
    Keeper(#[source] io::Error),
    /// The server of devices failed.
    #[error(transparent)]
    Devices(#[from] DeviceServerError),
}

/// Serves the lazy devices of a store until `stop` is set, and returns whether devices are still in use. Their
/// readers wait some seconds for another service, and get I/O errors after that. `ready` is called when clients can
/// connect.
pub fn serve(
    store: &Store,
    environment: &LazyResources<'_>,
    replace: Replace,
    ready: impl FnOnce(),
) -> Result<Left, ServiceError> {
    let folder = environment.folder;
    let _lock = runtime_dir::lock(folder, store.who().user, replace)?;
    let Succession { keeper, devices, connections } = begin(environment)?;
    let server = DeviceServer::new()?.with_cancel(environment.stop);
    let completer = Completer::new(store, environment.supply, &server);
    let (readers, completer) = (&server, &completer);
    let is_replaced = AtomicBool::new(false);
    let windows = Arc::new(WindowQueue::default());
    let service = Service {
        store,
        environment,
        devices: readers,
        completer,
        is_replaced,
        windows: Arc::clone(&windows),
    };
    service.take_over(&keeper, devices, connections);
    let path = folder.join(SERVICE_SOCKET);
    let failed = |source| ServiceError::Listen { path: path.clone(), source };
    let listener = wire::listen(&path).map_err(failed)?;
    let ending = Ending::default();
    let end = &ending.end;
    let (forget, forgotten) = mpsc::channel();
    thread::scope(|scope| {
        // If a thread fails or panics, all others end as well. After a panic the process ends, and the keeper starts
        // another service, which gets the readers.
        let _ended = ending.guard();
        let serving = scope.spawn(|| {
            let _ended = ending.guard();
            readers.serve(end)
        });
        let completing = scope.spawn(|| {
            let _ended = ending.guard();
            let forget = |device: &DeviceId| {
                let (done, is_done) = mpsc::channel();
                let _waiting = forget.send((device.to_string(), done));
                // When the service ends, the remaining devices are released below.
                while !end.load(Ordering::Relaxed) {
                    if is_done.recv_timeout(COMPLETE) != Err(mpsc::RecvTimeoutError::Timeout) {
                        break;
                    }
                }
            };
            completer.work(end, &forget);
        });
        scope.spawn(|| {
            let _ended = ending.guard();
            let mut settler = Settler::default();
            while !end.load(Ordering::Relaxed) {
                readers.check_written();
                settler.look(store);
                ending.pause(CHECK);
            }
            settler.settle(store);
        });
        scope.spawn(|| {
            let _ended = ending.guard();
            while !end.load(Ordering::Relaxed) {
                windows.store(environment.supply, end);
                starts::keep_ended(readers, environment.supply);
                ending.pause(CHECK);
            }
            // Windows that still wait are dropped, and so are starts that are still recorded: this would wait for locks
            // of the store, and both only save time.
        });
        ready();
        let talked = service.talk(listener.as_fd(), keeper, &forgotten, end);
        ending.begin();
        readers.wake();
        let served = serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        completing.thread().unpark();
        completing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let _gone = fs::remove_file(&path);
        // The keeper starts another service only if this one does not say goodbye.
        ending.pass_panic_on();
        served?;
        let keeper = talked?;
        for (device, _) in forgotten.try_iter() {
            service.is_complete(&keeper, &device);
        }
        let left = service.release(&keeper, Unread::Go);
        service.leave(keeper, left);
        if left == 0 {
            // The folder is not needed until the next service starts.
            runtime_dir::remove_locked(folder);
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
    Nothing,
    /// Devices that another service has asked for.
    ToAnother,
    /// Number of devices that are in use and wait for another service.
    InUse(usize),
}

/// Takes over from a keeper, or starts one.
fn begin(environment: &LazyResources<'_>) -> Result<Succession, ServiceError> {
    // A keeper that has just found that nothing is in use may exit during the first attempt.
    for _ in 0..2 {
        match Keeper::succeed(environment.folder) {
            Ok(FoundKeeper::Succession(found)) => return Ok(found),
            Ok(FoundKeeper::OtherVersion) => return Err(ServiceError::OtherVersion),
            Ok(FoundKeeper::None) => break,
            Err(error) => tracing::info!(%error, "the keeper was about to exit"),
        }
    }
    let keeper = Keeper::start(environment.keeper).map_err(ServiceError::Keeper)?;
    Ok(Succession { keeper, devices: Vec::new(), connections: Vec::new() })
}

/// A connected client.
struct Client {
    socket: OwnedFd,
    /// When it connected or sent its last request.
    asked: Instant,
}

impl Client {
    /// Accepts the next connection.
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
    environment: &'a LazyResources<'a>,
    devices: &'s DeviceServer<'a>,
    completer: &'s Completer<'s, 'a>,
    /// Whether another service has asked this one to exit.
    is_replaced: AtomicBool,
    /// Windows that readers needed, to be stored.
    windows: Arc<WindowQueue>,
}

/// Ids of devices that the keeper can release, each with a channel to signal that this is done.
type Forgotten = mpsc::Receiver<(String, mpsc::Sender<()>)>;

impl<'a> Service<'_, 'a> {
    /// Handles clients and watches the keeper until the service ends.
    fn talk(
        &self,
        listener: BorrowedFd<'_>,
        mut keeper: Keeper,
        forgotten: &Forgotten,
        end: &AtomicBool,
    ) -> Result<Keeper, ServiceError> {
        let (mut looked, mut used) = (Instant::now(), Instant::now());
        let mut clients: Vec<Client> = Vec::new();
        // Number of fetched bytes, and whether their buffers may have been freed since.
        let (mut fetched, mut may_trim) = (0, false);
        let is_to_end =
            || end.load(Ordering::Relaxed) || self.environment.stop.load(Ordering::Relaxed);
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
                        tracing::error!(
                            error,
                            "no keeper is running: if this process dies, readers get I/O errors"
                        );
                        thread::sleep(AGAIN);
                    }
                }
            }
            let mut asks = ready[2..].iter();
            clients.retain_mut(|client| {
                !asks.next().is_some_and(|it| *it) || self.hear(client, &keeper, end)
            });
            if ready[0] {
                match Client::accept(listener) {
                    Ok(client) => clients.push(client),
                    Err(error) => tracing::warn!(%error, "cannot accept a client"),
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
                let left = self.release(&keeper, Unread::Stay);
                let after = match (self.environment.complete)() {
                    Completion::After(time) => Some(time),
                    // Devices that were handed out before the setting changed.
                    Completion::Always => Some(Duration::ZERO),
                    Completion::Asked => None,
                };
                self.devices.complete_used(after, looked);
                self.devices.complete_again();
                self.end_completions(&keeper);
                let before = std::mem::replace(&mut fetched, self.fetched());
                if fetched != before {
                    may_trim = true;
                } else if std::mem::take(&mut may_trim) {
                    // Returns memory to the system that the fetching threads have freed between blocks in use.
                    kernel::process::trim_heap();
                }
                if left > 0 || !self.completer.is_idle() {
                    used = Instant::now();
                }
                if self.environment.idle.is_some_and(|idle| used.elapsed() >= idle) {
                    tracing::info!("all devices are unused: the service exits");
                    break;
                }
            }
        }
        Ok(keeper)
    }

    /// Returns the number of fetched bytes of all devices that are still being filled.
    fn fetched(&self) -> u64 {
        self.devices.fillers().iter().map(|it| it.counts().now().fetched).sum()
    }

    /// Starts another keeper after one died.
    fn keep_again(&self) -> Result<Keeper, ServiceError> {
        tracing::error!("the keeper died: starting another one");
        let keeper = Keeper::start(self.environment.keeper).map_err(ServiceError::Keeper)?;
        let tell = |message: &ToKeeper, file: BorrowedFd<'_>| {
            keeper.tell(message, Some(file)).map_err(ServiceError::Keeper)
        };
        self.devices.files(|device, file, state| {
            tell(&ToKeeper::Keep { device: device.to_string(), state }, file.as_fd())
        })?;
        self.devices.connections(|connection, (device, manifest), descriptor| {
            let device = device.to_string();
            tell(&ToKeeper::Connect { connection, device, manifest }, descriptor)
        })?;
        Ok(keeper)
    }

    /// Passes the used devices to the keeper, and returns when the keeper has them, or after a while. Without a keeper,
    /// readers get I/O errors when this process exits.
    fn leave(&self, mut keeper: Keeper, left: usize) {
        let word = if left == 0 { ToKeeper::End } else { ToKeeper::Leave };
        let begun = Instant::now();
        while let Err(error) = keeper.tell(&word, None) {
            if left == 0 {
                return;
            }
            tracing::error!(%error, "no keeper holds the used devices");
            let another = self.keep_again();
            if begun.elapsed() > PATIENCE {
                return;
            }
            match another {
                Ok(another) => keeper = another,
                Err(error) => {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(error, "this process keeps holding the devices for a while");
                    thread::sleep(AGAIN);
                }
            }
        }
    }

    /// Releases unused devices, and returns how many are left.
    fn release(&self, keeper: &Keeper, unread: Unread) -> usize {
        for connection in self.devices.ended_connections() {
            if let Err(error) = keeper.tell(&ToKeeper::Disconnect { connection }, None) {
                tracing::warn!(%error, "the keeper holds a closed connection");
            }
        }
        let gone = |device: &DeviceId| {
            tracing::info!(%device, "a device is no longer open");
            forget(keeper, device.to_string());
        };
        self.devices.remove_unused(gone, unread)
    }

    /// Handles a request of a client. Returns whether the client may send another one.
    fn hear(&self, client: &mut Client, keeper: &Keeper, end: &AtomicBool) -> bool {
        let answered = match wire::receive::<Ask>(client.socket.as_fd()) {
            Ok(Some((ask, _))) => self.answer(&client.socket, &ask, keeper, end),
            Ok(None) => return false,
            // The client may be of a later version.
            Err(error) if wire::is_unknown(&error) => {
                let reason = format!("{UNSUPPORTED}: {error}");
                wire::send(client.socket.as_fd(), &Answer::Refused { reason }, None)
            }
            Err(error) => Err(error),
        };
        client.asked = Instant::now();
        if let Err(error) = &answered {
            tracing::warn!(%error, "cannot reply to a client");
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
            Ask::Open { device, manifest } => match self.lend(device, *manifest, keeper) {
                Ok(file) => wire::send(client, &Answer::Opened, Some(file.as_fd())),
                Err(error) => {
                    let reason = text(&error);
                    tracing::warn!(device, reason, "refused a device");
                    wire::send(client, &Answer::Refused { reason }, None)
                }
            },
            Ask::Bring { image, trace, manifest } => {
                match self.bring(image, manifest.as_ref(), trace.as_deref()) {
                    Ok(Brought::HotPack) => wire::send(client, &Answer::Loading, None),
                    Ok(Brought::Trace) => wire::send(client, &Answer::Done, None),
                    Ok(Brought::Nothing) => wire::send(client, &Answer::Absent, None),
                    Err(error) => {
                        let reason = text(&*error);
                        tracing::warn!(image, trace, reason, "cannot use a trace");
                        wire::send(client, &Answer::Refused { reason }, None)
                    }
                }
            }
            Ask::Complete { image, manifest } => {
                match self.complete(image, manifest.as_ref(), keeper) {
                    Ok(()) => wire::send(client, &Answer::Done, None),
                    Err(error) => {
                        let reason = text(&*error);
                        wire::send(client, &Answer::Refused { reason }, None)
                    }
                }
            }
            Ask::Release => {
                self.release(keeper, Unread::Stay);
                wire::send(client, &Answer::Done, None)
            }
            Ask::Status => {
                for status in status::all(self.devices) {
                    wire::send(client, &Answer::Device(Box::new(status)), None)?;
                }
                wire::send(client, &Answer::Done, None)
            }
            Ask::Options => {
                let options = self.environment.options.to_vec();
                wire::send(client, &Answer::Options { options }, None)
            }
            Ask::Leave { protocol: PROTOCOL } => {
                self.is_replaced.store(true, Ordering::Relaxed);
                end.store(true, Ordering::Relaxed);
                wire::send(client, &Answer::Done, None)
            }
            Ask::Leave { protocol } => {
                let reason = format!("{UNSUPPORTED}: the messages have version {protocol}");
                wire::send(client, &Answer::Refused { reason }, None)
            }
            Ask::Stop => {
                // If the service continues, it also continues to fetch devices that are not open.
                let left = self.release(keeper, Unread::Stay);
                let answer = match left.saturating_sub(self.devices.unread()) {
                    0 => {
                        // Pending fetches have no readers, so they are cancelled.
                        self.environment.stop.store(true, Ordering::Relaxed);
                        Answer::Done
                    }
                    used => Answer::Refused { reason: format!("{used} lazy devices are in use") },
                };
                wire::send(client, &answer, None)
            }
        }
    }

    /// Starts to prefetch a trace or its hot pack, for devices that were handed out.
    fn bring(
        &self,
        image: &str,
        manifest: Option<&Digest>,
        name: Option<&str>,
    ) -> Result<Brought, AnyError> {
        let image = ImageId::from_str(image)?;
        let supply = self.environment.supply;
        let Some(trace) = supply.trace(&image, name)? else {
            if let Some(manifest) = manifest.filter(|_| supply.may_prefetch_start(name)) {
                self.prefetch_start(image, *manifest);
            }
            return Ok(Brought::Nothing);
        };
        if self.load_hot_pack(manifest, &trace)? {
            return Ok(Brought::HotPack);
        }
        self.devices.bring_ahead(starts::units_of(&trace.runs, &self.fillers_by_device(manifest)));
        Ok(Brought::Trace)
    }

    /// Starts to load the hot pack of a manifest, if it has one for this trace. Returns whether it replaces the trace.
    fn load_hot_pack(&self, manifest: Option<&Digest>, trace: &Trace) -> Result<bool, AnyError> {
        let Some(manifest) = manifest.filter(|_| trace.name == DEFAULT_TRACE) else {
            return Ok(false);
        };
        let Some(pack) = self.store.downloads.hot_pack(manifest)? else { return Ok(false) };
        let (pack, mut frames) = (Arc::new(pack), Vec::new());
        for filler in self.devices.fillers_for(Some(manifest)) {
            if filler.manifest() != Some(manifest) {
                continue;
            }
            frames.extend((0..filler.use_hot_pack(&pack)).map(|it| (Arc::clone(&filler), it)));
        }
        let has_frames = !frames.is_empty();
        self.devices.load(frames);
        Ok(has_frames)
    }

    /// Starts to complete the devices of an image that were handed out.
    fn complete(
        &self,
        image: &str,
        manifest: Option<&Digest>,
        keeper: &Keeper,
    ) -> Result<(), AnyError> {
        let devices = self.store.lazy_devices(&ImageId::from_str(image)?)?;
        for filler in self.devices.fillers_for(manifest) {
            if devices.contains(filler.device().id()) {
                self.complete_device(&filler, keeper);
            }
        }
        Ok(())
    }

    /// Starts to complete a device.
    fn complete_device(&self, filler: &Arc<LayerFiller<'a>>, keeper: &Keeper) {
        self.devices.complete(filler);
        // The keeper stores this state, so that the next service continues.
        if let Err(error) = keep_completing(filler, keeper, true) {
            tracing::warn!(%error, "if this process dies, a device is not completed");
        }
    }

    /// Makes the keeper forget that full devices should be fetched, because the next service would read all of them
    /// again.
    fn end_completions(&self, keeper: &Keeper) {
        for filler in self.devices.take_completed() {
            if let Err(error) = keep_completing(&filler, keeper, false) {
                tracing::warn!(%error, "the next service reads a full device again");
            }
        }
    }
}

/// Makes the keeper release a device.
fn forget(keeper: &Keeper, device: String) {
    if let Err(error) = keeper.tell(&ToKeeper::Forget { device }, None) {
        tracing::warn!(%error, "the keeper holds an unused device");
    }
}

/// Makes the keeper hold a device, and store whether the whole device should be fetched.
fn keep_completing(
    filler: &LayerFiller<'_>,
    keeper: &Keeper,
    is_completing: bool,
) -> io::Result<()> {
    let (device, file) = kept(filler);
    let manifest = filler.manifest().copied();
    let state = KeptState { is_completing, manifest, ..KeptState::default() };
    keeper.tell(&ToKeeper::Keep { device, state }, Some(file))
}

/// Returns the id and the descriptor of a device for the keeper.
fn kept<'f>(filler: &'f LayerFiller<'_>) -> (String, BorrowedFd<'f>) {
    (filler.device().id().to_string(), filler.device().file().as_fd())
}
