//! The service: takes connections, has a process speak with each client, and lends images.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use container::bundle::userns::IdMap;
use image::verity::{Algorithm, Hasher, ImageId};
use kernel::mount::OVERLAY_USER_DATA;
use kernel::process::{
    IdMaps, IdRange, Process, ProcessError, Setup, Signal, is_peer_its_users_own, spawn,
    user_namespace,
};
use kernel::version::KernelVersion;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::SealFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use store::Who;
use tokio::io::Interest;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use zlink::connection::socket::FetchPeerCredentials as _;
use zlink::tokio::unix::Stream;

use super::connection::{LendAnswer, PIECE_MAX};
use super::images::{Copies, Copy, CopyKey};
use super::namespace;
use super::users::{LineNumber, MountPolicy, Peer, TurnOf, UserCounts};
use super::wire::{DescribeReply, LendReply, MountsError};
use super::writer;
use crate::descriptor::{receive_piece, send_piece};

/// How long a refused client has to read why.
const REFUSED: Duration = Duration::from_secs(1);
/// The most refused clients that are told why at once. Others are not.
const REFUSED_MAX: usize = 64;
/// How long a connection waits in its user's line while that does not move: none that is served ends. One that asks nothing ends
/// within this time.
const CROWDED: Duration = Duration::from_secs(15);
/// The most copies at a time that take long.
const SLOW_MAX: usize = 1;
/// How often copies are looked for that nobody has mounted any more.
const SWEEP: Duration = Duration::from_secs(20);
/// How long requests that are being answered may take when the service is to end.
const LAST: Duration = Duration::from_secs(5);

/// What a service needs of its surroundings.
pub struct MountSurroundings {
    /// Who may ask: read at each request, so that a change has effect at once.
    pub policy: Box<dyn Fn() -> Result<MountPolicy, String> + Send + Sync>,
    /// Which ids a user with this group may have in a user namespace, besides its own.
    pub ids: Box<dyn Fn(u32, u32) -> IdMap + Send + Sync>,
    /// A program that calls [`write_for_user`](super::write_for_user) with what it is told.
    pub writer: Box<dyn Fn(String) -> Command + Send + Sync>,
    /// A program that calls [`speak_with_client`](super::speak_with_client) with what it is told.
    pub speaker: Box<dyn Fn(String) -> Command + Send + Sync>,
    /// The user and group on the host of the processes without rights. No other process should be that user, since it could end
    /// them.
    pub id: u32,
    /// A directory on a file system from whose files the kernel mounts images, not on tmpfs. Files in it have no names.
    pub copies: OwnedFd,
    /// Which version of the service this is, for clients to show.
    pub version: &'static str,
}

impl std::fmt::Debug for MountSurroundings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MountSurroundings").field("copies", &self.copies).finish_non_exhaustive()
    }
}

/// Why a service cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountServiceError {
    /// There is no socket.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No threads could be started, or the socket cannot be used.
    #[error("cannot serve mounts")]
    Start(#[source] io::Error),
    /// There can be no user namespace.
    #[error("cannot make a user namespace for processes without rights")]
    Namespace(#[source] ProcessError),
    /// The kernel lets no user lead an overlay to objects.
    #[error("lending images needs Linux {OVERLAY_USER_DATA} or newer, and this is {0}")]
    Kernel(KernelVersion),
}

/// Listens at a socket to which everybody may connect.
///
/// # Errors
/// [`MountServiceError::Listen`]: also where others could put a socket of their own in its place.
pub fn listen_for_mounts(path: &Path, who: Who) -> Result<UnixListener, MountServiceError> {
    crate::socket::listen(path, who, 0o666)
        .map_err(|source| MountServiceError::Listen { path: path.to_owned(), source })
}

/// Lends images to those who connect, until `stop` is done. `ready` is called once they can.
///
/// # Errors
/// [`MountServiceError`].
pub fn serve_mounts(
    surroundings: MountSurroundings,
    listener: UnixListener,
    stop: impl FnOnce() + Send + 'static,
    ready: impl FnOnce(),
) -> Result<(), MountServiceError> {
    if let Some(running) = KernelVersion::running().filter(|it| *it < OVERLAY_USER_DATA) {
        return Err(MountServiceError::Kernel(running));
    }
    let nobody = [IdRange { inside: 0, outside: surroundings.id, count: 1 }];
    let nobody = user_namespace(&nobody, &nobody).map_err(MountServiceError::Namespace)?;
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(threads.saturating_mul(2).saturating_add(4))
        .enable_io()
        .enable_time()
        .build()
        .map_err(MountServiceError::Start)?;
    let service = Arc::new(Service {
        surroundings,
        nobody,
        copies: Copies::default(),
        counts: Mutex::default(),
        turns: Mutex::default(),
        work: Arc::new(Semaphore::new(threads.saturating_add(1))),
        slow: Arc::new(Semaphore::new(SLOW_MAX)),
        left: Notify::new(),
        refused: Semaphore::new(REFUSED_MAX),
    });
    let served = runtime.block_on(async {
        listener.set_nonblocking(true).map_err(MountServiceError::Start)?;
        let listener = tokio::net::UnixListener::from_std(listener);
        let listener = listener.map_err(MountServiceError::Start)?;
        let stopped = tokio::task::spawn_blocking(stop);
        ready();
        let sweeper = Arc::clone(&service);
        let sweep = async {
            loop {
                tokio::time::sleep(SWEEP).await;
                let service = Arc::clone(&sweeper);
                // It forgets nothing if it fails.
                let _swept = tokio::task::spawn_blocking(move || service.copies.sweep()).await;
            }
        };
        tokio::select! {
            () = service.accept(listener) => {}
            () = sweep => {}
            _ = stopped => {}
        }
        Ok(())
    });
    runtime.shutdown_timeout(LAST);
    served
}

struct Service {
    surroundings: MountSurroundings,
    /// Its root is a user of the host who has nothing else: no other process has rights in it.
    nobody: OwnedFd,
    copies: Copies,
    counts: Mutex<UserCounts>,
    /// One request of a user's is worked on at a time, so that none keeps others from their turn.
    turns: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
    /// For requests of all users.
    work: Arc<Semaphore>,
    /// For those of them whose copies take long.
    slow: Arc<Semaphore>,
    /// Notified when a user is served one connection less.
    left: Notify,
    /// For connections that are refused.
    refused: Semaphore,
}

/// A place that a user has for a connection.
struct Place {
    service: Arc<Service>,
    user: u32,
}

impl Place {
    fn take(service: &Arc<Service>, user: u32) -> Option<Self> {
        let is_taken = lock(&service.counts).open(user, Instant::now());
        is_taken.then(|| Self { service: Arc::clone(service), user })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.service.counts).close(self.user, Instant::now());
        let mut turns = lock(&self.service.turns);
        turns.retain(|user, turn| *user != self.user || Arc::strong_count(turn) > 1);
    }
}

/// A connection that is served.
struct ServedConnection<'a>(&'a Place);

impl Drop for ServedConnection<'_> {
    fn drop(&mut self) {
        let Place { service, user } = self.0;
        lock(&service.counts).leave(*user, Instant::now());
        service.left.notify_waiters();
    }
}

/// A connection in its user's line.
struct LineUp<'a> {
    place: &'a Place,
    number: LineNumber,
}

impl<'a> LineUp<'a> {
    fn new(place: &'a Place) -> Self {
        let number = lock(&place.service.counts).line_up(place.user, Instant::now());
        Self { place, number }
    }
}

impl Drop for LineUp<'_> {
    fn drop(&mut self) {
        let Place { service, user } = self.place;
        lock(&service.counts).step_out(*user, self.number);
        // The next one may be the first now.
        service.left.notify_waiters();
    }
}

/// The right of a request to be worked on.
struct WorkTurn {
    _permit: OwnedSemaphorePermit,
    slow: Arc<Semaphore>,
}

impl WorkTurn {
    /// Lets others have their turn, if this may be one of the slow ones.
    fn be_slow(&mut self) -> bool {
        let Ok(permit) = Arc::clone(&self.slow).try_acquire_owned() else { return false };
        self._permit = permit;
        true
    }
}

/// The process that speaks with a client, and the socket at which it asks.
struct Speaker {
    process: Process,
    asks: tokio::net::UnixStream,
}

impl Speaker {
    /// Ends the process, which has nothing left to do, and waits for it. Its client may keep it from its end.
    async fn end(self) {
        // It may have ended.
        let _ended = self.process.signal(Signal::KILL);
        let mut pause = Duration::from_millis(1);
        loop {
            let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
            match poll(&mut fds, Some(&Timespec::default())) {
                Ok(0) => {}
                // It has ended, or nobody knows.
                _ => break,
            }
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(Duration::from_secs(1));
        }
        drop(self.process.wait());
    }
}

impl Service {
    async fn accept(self: &Arc<Self>, listener: tokio::net::UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => self.take(stream).await,
                Err(error) => {
                    tracing::warn!(%error, "no connection can be taken");
                    // There may be no descriptors for a moment.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Finds out whose a connection is, before it takes anything that others need. A user who has all that one may have is
    /// dropped without a word, at the price of one system call.
    async fn take(self: &Arc<Self>, stream: tokio::net::UnixStream) {
        let Ok(found) = rustix::net::sockopt::socket_peercred(&stream) else { return };
        if !lock(&self.counts).has_room(found.uid.as_raw()) {
            return;
        }
        let peer = match peer_of(&stream).await {
            Ok(peer) => peer,
            Err(error) => {
                // A client that has gone, for one: it could fill the log.
                tracing::debug!(?error, "it is not known who has connected");
                return;
            }
        };
        let service = Arc::clone(self);
        if let Err(error) = check_own(&peer) {
            // Whoever that is could have any number of users.
            drop(tokio::spawn(async move { service.refuse(&stream, &error).await }));
            return;
        }
        let Some(place) = Place::take(self, peer.user) else { return };
        drop(tokio::spawn(async move { service.connection(stream, &peer, &place).await }));
    }

    /// Serves a client until it has gone, or is quiet. Nothing is read of it in this process.
    async fn connection(
        self: Arc<Self>,
        stream: tokio::net::UnixStream,
        peer: &Peer,
        place: &Place,
    ) {
        let admitted = match self.admit(peer) {
            Ok((policy, wait)) => {
                tokio::time::sleep(wait).await;
                self.wait_to_be_served(place, &policy).await.map(|served| (policy, served))
            }
            Err(error) => Err(error),
        };
        let (policy, served) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => return self.refuse(&stream, &error).await,
        };
        if has_gone(&stream) {
            return;
        }
        let service = Arc::clone(&self);
        let started = tokio::task::spawn_blocking(move || service.speaker(stream, &policy));
        let speaker = match started.await.map_err(io::Error::other).and_then(|it| it) {
            Ok(speaker) => speaker,
            Err(error) => {
                tracing::error!(%error, "no process can speak with a client");
                return;
            }
        };
        if let Err(error) = self.requests(peer, &speaker).await {
            tracing::debug!(%error, user = peer.user, "a connection has failed");
        }
        // Until then it is in the client's count.
        speaker.end().await;
        drop(served);
    }

    /// Whether a user may have connections, and how long this one waits, so that there are not too many in a second.
    fn admit(&self, peer: &Peer) -> Result<(MountPolicy, Duration), MountsError> {
        let policy = self.policy()?;
        policy.admits(peer)?;
        let mut counts = lock(&self.counts);
        let (user, limits) = (peer.user, &policy.limits);
        let wait = counts.turn(TurnOf::Connection, user, limits, Instant::now())?;
        Ok((policy, wait))
    }

    /// Waits until the connection is the first of its user's, and the user may have one more that is served: as long as others
    /// end, however long the line is.
    async fn wait_to_be_served<'p>(
        &self,
        place: &'p Place,
        policy: &MountPolicy,
    ) -> Result<ServedConnection<'p>, MountsError> {
        let user = place.user;
        let in_line = LineUp::new(place);
        loop {
            let mut left = pin!(self.left.notified());
            // Before the look, so that none is missed.
            left.as_mut().enable();
            let moved = {
                let mut counts = lock(&self.counts);
                if counts.serve(user, in_line.number, &policy.limits) {
                    return Ok(ServedConnection(place));
                }
                counts.moved(user)
            };
            let patience = moved.map_or(Duration::ZERO, |it| CROWDED.saturating_sub(it.elapsed()));
            if patience.is_zero() {
                return Err(MountsError::too_much(format!(
                    "user {user} has {} connections to the mount service, and none has ended for {} seconds: wait until one \
                     has, or raise `connections` below [mounts] in /etc/quire/serve.toml",
                    policy.limits.connections,
                    CROWDED.as_secs()
                )));
            }
            // Whether it moved is looked at again.
            let _timed_out = tokio::time::timeout(patience, left).await;
        }
    }

    fn policy(&self) -> Result<MountPolicy, MountsError> {
        (self.surroundings.policy)().map_err(|reason| {
            tracing::error!(reason, "the policy of the mount service cannot be read");
            MountsError::denied(format!("the policy cannot be read: {reason}"))
        })
    }

    /// Tells a client why, whatever it asks.
    async fn refuse(&self, stream: &tokio::net::UnixStream, error: &MountsError) {
        let Ok(_place) = self.refused.try_acquire() else { return };
        tracing::info!(%error, "a connection is refused");
        let Ok(mut told) = serde_json::to_vec(error) else { return };
        told.push(0);
        // There is room in a new socket.
        let _told = stream.try_write(&told);
        tokio::time::sleep(REFUSED).await;
    }

    fn speaker(&self, stream: tokio::net::UnixStream, policy: &MountPolicy) -> io::Result<Speaker> {
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        let limits = &policy.limits;
        let told = DescribeReply {
            version: self.surroundings.version.to_owned(),
            image_bytes_max: limits.image_bytes,
            inodes_max: limits.inodes,
            images_max: limits.images,
            bytes_max: limits.bytes,
            requests_per_second: limits.requests,
        };
        let mut program = (self.surroundings.speaker)(serde_json::to_string(&told)?);
        program.stdin(OwnedFd::from(stream)).stdout(theirs).current_dir("/");
        let process = spawn(program, &self.without_rights()).map_err(io::Error::other)?;
        // tokio's own type for sockets: it asks nothing of them that depends on their kind.
        let ours = std::os::unix::net::UnixStream::from(ours);
        Ok(Speaker { process: process.process, asks: tokio::net::UnixStream::from_std(ours)? })
    }

    fn without_rights(&self) -> Setup<'_> {
        Setup { own_session: true, root_of: Some(self.nobody.as_fd()), ..Setup::default() }
    }

    /// Answers the requests that a process passes on, until it has ended.
    async fn requests(self: &Arc<Self>, peer: &Peer, speaker: &Speaker) -> io::Result<()> {
        let mut buffer = vec![0; PIECE_MAX];
        loop {
            let received = speaker
                .asks
                .async_io(Interest::READABLE, || receive_piece(speaker.asks.as_fd(), &mut buffer));
            let (count, descriptors) = received.await?;
            if count == 0 {
                return Ok(());
            }
            let places = serde_json::from_slice(buffer.get(..count).unwrap_or_default())?;
            let lent = self.request(peer, places, descriptors).await;
            let (answer, mount) = match lent {
                Ok((reply, mount)) => (LendAnswer::Lent(reply), Some(mount)),
                Err(error) => (LendAnswer::Refused(error), None),
            };
            let told = serde_json::to_vec(&answer)?;
            let mount: Vec<_> = mount.iter().map(OwnedFd::as_fd).collect();
            let sent = speaker
                .asks
                .async_io(Interest::WRITABLE, || send_piece(speaker.asks.as_fd(), &told, &mount));
            sent.await?;
        }
    }

    async fn request(
        self: &Arc<Self>,
        peer: &Peer,
        places: Vec<String>,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(LendReply, OwnedFd), MountsError> {
        let policy = self.policy()?;
        policy.admits(peer)?;
        let (user, limits) = (peer.user, &policy.limits);
        let wait = lock(&self.counts).turn(TurnOf::Request, user, limits, Instant::now())?;
        tokio::time::sleep(wait).await;
        let turn = {
            let mut turns = lock(&self.turns);
            Arc::clone(turns.entry(peer.user).or_insert_with(|| Arc::new(Semaphore::new(1))))
        };
        let ended = || MountsError::Failed { reason: "the service ends".to_owned() };
        let _turn = turn.acquire().await.map_err(|_closed| ended())?;
        let permit = Arc::clone(&self.work).acquire_owned().await.map_err(|_closed| ended())?;
        let mut work = WorkTurn { _permit: permit, slow: Arc::clone(&self.slow) };
        let (service, of_task, begun) = (Arc::clone(self), peer.clone(), Instant::now());
        // A panic is an error of this one request.
        let lent = tokio::task::spawn_blocking(move || {
            service.lend(&of_task, &policy, &places, &descriptors, &mut work)
        });
        let lent = lent
            .await
            .unwrap_or_else(|error| Err(MountsError::failed("the request was given up", &error)));
        let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        match &lent {
            Ok((reply, _)) => {
                tracing::info!(user = peer.user, image = reply.image, elapsed_ms, "lent");
            }
            Err(error) => tracing::info!(user = peer.user, %error, elapsed_ms, "not lent"),
        }
        lent
    }

    fn lend(
        &self,
        peer: &Peer,
        policy: &MountPolicy,
        places: &[String],
        descriptors: &[OwnedFd],
        work: &mut WorkTurn,
    ) -> Result<(LendReply, OwnedFd), MountsError> {
        let [image, user_namespace] = descriptors else {
            return Err(MountsError::invalid("two descriptors are needed"));
        };
        check_sealed(image.as_fd(), policy)?;
        let given = (self.surroundings.ids)(peer.user, peer.group);
        let maps = namespace::check(user_namespace.as_fd(), peer, &given)?;
        let id = hash(image.as_fd())?;
        policy.allows(&id)?;
        let copy = self.copy(peer, policy, (id, image.as_fd()), (&maps, places), work)?;
        copy.check(&policy.limits)?;
        let owner = (peer.user, peer.group);
        let mount = copy.mount()?.lend(user_namespace.as_fd(), owner);
        let mount = mount.map_err(|error| MountsError::failed("cannot lend the image", &error))?;
        let reply = LendReply {
            mount_file_descriptor: 0,
            image: id.to_string(),
            copy: copy.written.copy.clone(),
            inodes: copy.written.inodes,
            devices: copy.written.devices,
        };
        Ok((reply, mount.into()))
    }

    /// The copy of an image: the one that is there, or a new one.
    fn copy(
        &self,
        peer: &Peer,
        policy: &MountPolicy,
        (image, file): (ImageId, BorrowedFd<'_>),
        (maps, places): (&IdMaps, &[String]),
        work: &mut WorkTurn,
    ) -> Result<Arc<Copy>, MountsError> {
        let inside = |ranges: &[IdRange]| ranges.iter().map(|it| (it.inside, it.count)).collect();
        let ids = [inside(&maps.users), inside(&maps.groups)];
        let key = CopyKey { user: peer.user, image, ids, places: places.to_vec() };
        if let Some(copy) = self.copies.find(&key) {
            return Ok(copy);
        }
        self.copies.check_room(peer.user, &policy.limits)?;
        let begun = Instant::now();
        lock(&self.counts).check_copying(peer.user, begun)?;
        let failed = |error: &(dyn std::error::Error + 'static)| {
            MountsError::failed("cannot write a copy of the image", error)
        };
        let into = kernel::files::unnamed(self.surroundings.copies.as_fd(), 0o400);
        let into = into.map_err(|errno| failed(&errno))?;
        let file = file.try_clone_to_owned().map_err(|error| failed(&error))?;
        let (told, limits) = (writer::tell(maps, places, &policy.limits)?, &policy.limits);
        let program = (self.surroundings.writer)(told);
        let mut may_be_slow = || work.be_slow();
        let setup = self.without_rights();
        let written = writer::copy(program, &setup, file, into.as_fd(), &mut may_be_slow);
        lock(&self.counts).charge_copying(peer.user, begun.elapsed(), Instant::now());
        let written = written?;
        // What the disk has no room for would be zeros once it is read again. After a crash there is no such file.
        kernel::files::write_back(into.as_fd()).map_err(|errno| failed(&errno))?;
        let file = kernel::files::reopen_read_only(into.as_fd()).map_err(|errno| failed(&errno))?;
        drop(into);
        self.copies.keep(key, Copy::new(file, written), limits)
    }
}

/// The process that speaks with a client passes on nothing else. It is looked at once more, which takes no time.
fn check_sealed(image: BorrowedFd<'_>, policy: &MountPolicy) -> Result<(), MountsError> {
    let wanted = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    let seals = rustix::fs::fcntl_get_seals(image);
    let is_sealed = seals.is_ok_and(|it| it.contains(wanted));
    let bytes = rustix::fs::fstat(image).map_or(u64::MAX, |it| it.st_size.unsigned_abs());
    if is_sealed && bytes <= policy.limits.image_bytes {
        return Ok(());
    }
    Err(MountsError::invalid("the image is not sealed, or too large"))
}

fn hash(image: BorrowedFd<'_>) -> Result<ImageId, MountsError> {
    let mut hasher = Hasher::new(Algorithm::Sha256);
    let mut piece = vec![0; 1 << 18];
    let mut position = 0;
    loop {
        let read = kernel::files::read_full(image, &mut piece, position);
        let read = read.map_err(|errno| MountsError::failed("cannot read the image", &errno))?;
        hasher.update(&piece[..read]);
        position += read as u64;
        if read < piece.len() {
            return Ok(ImageId::new(hasher.finish()));
        }
    }
}

/// Whether a client counts as the user that it is.
fn check_own(peer: &Peer) -> Result<(), MountsError> {
    if peer.is_users_own {
        return Ok(());
    }
    Err(MountsError::denied(format!(
        "user {} is in a user namespace of another user: ask as that one (or the program that asks is kept from its own \
         user: it is set-group-id, has capabilities, or cannot be read)",
        peer.user
    )))
}

/// Whether a client has closed its connection.
fn has_gone(stream: &tokio::net::UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// Who is at the other end.
async fn peer_of(stream: &tokio::net::UnixStream) -> io::Result<Peer> {
    // Of another descriptor of the same socket, since zlink takes it.
    let again = std::os::unix::net::UnixStream::from(stream.as_fd().try_clone_to_owned()?);
    let again = Stream::try_from(again).map_err(io::Error::other)?;
    let found = again.fetch_peer_credentials().await?;
    let group = found.unix_primary_group_id().as_raw();
    let others = found.unix_supplementary_group_ids().iter().map(|it| it.as_raw());
    let groups = others.chain([group]).collect();
    let user = found.unix_user_id().as_raw();
    let is_users_own = is_peer_its_users_own(stream.as_fd(), (user, group));
    let is_users_own = is_users_own.map_err(io::Error::other)?;
    Ok(Peer { user, group, groups, is_users_own })
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
