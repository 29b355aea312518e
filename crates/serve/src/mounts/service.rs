//! The service: accepts connections, starts a process for each client, and mounts images for them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::pin::pin;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use container::bundle::userns::IdMap;
use image::verity::Algorithm;
use kernel::mount::OVERLAY_USER_DATA;
use kernel::process::{
    IdMaps, IdRange, Process, Setup, Signal, is_peer_its_users_own, spawn, user_namespace,
};
use kernel::version::KernelVersion;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::SealFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use store::{OperationError, Who};
use tokio::io::Interest;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use zlink::connection::socket::FetchPeerCredentials as _;
use zlink::tokio::unix::Stream;

use super::connection::{LendAnswer, PIECE_MAX};
use super::images::{Copies, Copy, CopyKey, image_id};
use super::namespace;
use super::users::{LineNumber, MountPolicy, Peer, TurnOf, UserCounts};
use super::wire::{DescribeReply, LendReply, MountsError};
use super::writer;
use crate::descriptor::{receive_piece, send_piece};
use crate::unpoisoned::lock;

/// How long a refused client has to read the reason.
const REFUSED: Duration = Duration::from_secs(1);
/// Largest number of refused clients that get a reason at the same time. Further connections are closed without a
/// reason.
const REFUSED_MAX: usize = 64;
/// How long a connection waits in its user's queue while none of the user's served connections ends. An idle
/// connection is closed within this time.
const CROWDED: Duration = Duration::from_secs(15);
/// Largest number of slow copies at the same time.
const SLOW_MAX: usize = 1;
/// Interval at which unmounted copies are looked for.
const SWEEP: Duration = Duration::from_secs(20);
/// How long running requests may take after the service was asked to stop.
const LAST: Duration = Duration::from_secs(5);

/// The environment of a service.
pub struct MountResources {
    /// Returns the policy. It is read again for each request, so that a change has effect at once.
    pub policy: Box<dyn Fn() -> Result<MountPolicy, String> + Send + Sync>,
    /// Returns the ids that a user with this group may map in a user namespace, besides its own.
    pub ids: Box<dyn Fn(u32, u32) -> IdMap + Send + Sync>,
    /// Returns a program that calls [`write_for_user`](super::write_for_user) with the given string.
    pub writer: Box<dyn Fn(String) -> Command + Send + Sync>,
    /// Returns a program that calls [`speak_with_client`](super::speak_with_client) with the given string.
    pub speaker: Box<dyn Fn(String) -> Command + Send + Sync>,
    /// User and group id on the host of the unprivileged processes. Other processes must not have this id, because
    /// they could kill them.
    pub id: u32,
    /// A directory for unnamed files, on a file system from whose files the kernel can mount images, so not on tmpfs.
    pub copies: OwnedFd,
    /// Version of the service, for clients to show.
    pub version: &'static str,
}

impl std::fmt::Debug for MountResources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MountResources").field("copies", &self.copies).finish_non_exhaustive()
    }
}

/// Why a service cannot serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountServiceError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The kernel cannot redirect an overlay to objects in a user namespace.
    #[error("the mount service needs Linux {OVERLAY_USER_DATA} or newer, but this is {0}")]
    Kernel(KernelVersion),
}

/// Listens at a socket to which every user may connect.
///
/// # Errors
/// [`MountServiceError`] if the socket cannot be created, or other users could replace it.
pub fn listen_for_mounts(path: &Path, who: Who) -> Result<UnixListener, MountServiceError> {
    let listener = crate::socket::listen(path, who, 0o666);
    Ok(listener.map_err(OperationError::at("listen on", path))?)
}

/// Mounts images for clients until `stop` returns. Calls `ready` when clients can connect.
pub fn serve_mounts(
    environment: MountResources,
    listener: UnixListener,
    stop: impl FnOnce() + Send + 'static,
    ready: impl FnOnce(),
) -> Result<(), MountServiceError> {
    if let Some(running) = KernelVersion::running().filter(|it| *it < OVERLAY_USER_DATA) {
        return Err(MountServiceError::Kernel(running));
    }
    let nobody = [IdRange { inside: 0, outside: environment.id, count: 1 }];
    let object = "a user namespace for unprivileged processes";
    let nobody = user_namespace(&nobody, &nobody).map_err(OperationError::of("make", object))?;
    let failed = OperationError::of("serve", "mounts");
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(threads.saturating_mul(2).saturating_add(4))
        .enable_io()
        .enable_time()
        .build()
        .map_err(failed)?;
    let service = Arc::new(Service {
        environment,
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
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = tokio::net::UnixListener::from_std(listener);
        let listener = listener.map_err(failed)?;
        let stopped = tokio::task::spawn_blocking(stop);
        ready();
        let sweeper = Arc::clone(&service);
        let sweep = async {
            loop {
                tokio::time::sleep(SWEEP).await;
                let service = Arc::clone(&sweeper);
                // If a sweep panics, copies only stay longer.
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
    environment: MountResources,
    /// A user namespace whose root is an id of the host that owns nothing, so other processes have no rights in it.
    nobody: OwnedFd,
    copies: Copies,
    counts: Mutex<UserCounts>,
    /// One permit for each user, so that a user's requests run one at a time and do not block those of others.
    turns: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
    /// Limits the requests of all users that run at the same time.
    work: Arc<Semaphore>,
    /// Limits the slow copies among these requests.
    slow: Arc<Semaphore>,
    /// Notified when a served connection of a user ends, or a queue moves.
    left: Notify,
    /// Limits the connections that are being refused.
    refused: Semaphore,
}

/// A counted open connection of a user. Dropping it allows another connection.
struct ConnectionSlot {
    service: Arc<Service>,
    user: u32,
}

impl ConnectionSlot {
    fn take(service: &Arc<Service>, user: u32) -> Option<Self> {
        let is_taken = lock(&service.counts).open(user, Instant::now());
        is_taken.then(|| Self { service: Arc::clone(service), user })
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        lock(&self.service.counts).close(self.user, Instant::now());
        let mut turns = lock(&self.service.turns);
        turns.retain(|user, turn| *user != self.user || Arc::strong_count(turn) > 1);
    }
}

/// A counted served connection. Dropping it lets the next one in.
struct ServedConnection<'a>(&'a ConnectionSlot);

impl Drop for ServedConnection<'_> {
    fn drop(&mut self) {
        let ConnectionSlot { service, user } = self.0;
        lock(&service.counts).leave(*user, Instant::now());
        service.left.notify_waiters();
    }
}

/// A connection in its user's queue.
struct LineUp<'a> {
    place: &'a ConnectionSlot,
    number: LineNumber,
}

impl<'a> LineUp<'a> {
    fn new(place: &'a ConnectionSlot) -> Self {
        let number = lock(&place.service.counts).line_up(place.user, Instant::now());
        Self { place, number }
    }
}

impl Drop for LineUp<'_> {
    fn drop(&mut self) {
        let ConnectionSlot { service, user } = self.place;
        lock(&service.counts).step_out(*user, self.number);
        // The next connection may be the first now.
        service.left.notify_waiters();
    }
}

/// The permit of a request that is running.
struct WorkTurn {
    _permit: OwnedSemaphorePermit,
    slow: Arc<Semaphore>,
}

impl WorkTurn {
    /// Exchanges the permit for the permit of a slow copy, so that other requests can run. Returns `false` if no such
    /// permit is free.
    fn be_slow(&mut self) -> bool {
        let Ok(permit) = Arc::clone(&self.slow).try_acquire_owned() else { return false };
        self._permit = permit;
        true
    }
}

/// The process that talks to a client, and the socket on which it sends requests.
struct Speaker {
    process: Process,
    asks: tokio::net::UnixStream,
}

impl Speaker {
    /// Kills the process and waits for its end. The wait is asynchronous, because the client may delay the end.
    async fn end(self) {
        // The process may have exited already.
        let _ended = self.process.signal(Signal::KILL);
        let mut pause = Duration::from_millis(1);
        loop {
            let mut fds = [PollFd::new(&self.process, PollFlags::IN)];
            match poll(&mut fds, Some(&Timespec::default())) {
                Ok(0) => {}
                // The process has exited, or polling failed.
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
                    tracing::warn!(%error, "cannot accept a connection");
                    // Descriptors may have run out for a moment.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Finds the user of a connection before it uses shared resources. A user with too many connections is dropped
    /// without a reply, which costs one system call.
    async fn take(self: &Arc<Self>, stream: tokio::net::UnixStream) {
        let Ok(found) = rustix::net::sockopt::socket_peercred(&stream) else { return };
        if !lock(&self.counts).has_room(found.uid.as_raw()) {
            return;
        }
        let peer = match peer_of(&stream).await {
            Ok(peer) => peer,
            Err(error) => {
                // The client may have closed the connection. The level is `debug`, because a client could fill the log
                // with errors.
                tracing::debug!(?error, "cannot identify a client");
                return;
            }
        };
        let service = Arc::clone(self);
        if let Err(error) = check_own(&peer) {
            // This client could appear as any number of users, so it is not counted for a user.
            drop(tokio::spawn(async move { service.refuse(&stream, &error).await }));
            return;
        }
        let Some(place) = ConnectionSlot::take(self, peer.user) else { return };
        drop(tokio::spawn(async move { service.connection(stream, &peer, &place).await }));
    }

    /// Serves a client until it disconnects or times out. This process reads nothing from the client.
    async fn connection(
        self: Arc<Self>,
        stream: tokio::net::UnixStream,
        peer: &Peer,
        place: &ConnectionSlot,
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
                tracing::error!(%error, "cannot start a process for a client");
                return;
            }
        };
        if let Err(error) = self.requests(peer, &speaker).await {
            tracing::debug!(%error, user = peer.user, "a connection failed");
        }
        // Until the process has exited, it counts for the user.
        speaker.end().await;
        drop(served);
    }

    /// Checks whether a user may connect, and returns how long this connection must wait to stay below the limit per
    /// second.
    fn admit(&self, peer: &Peer) -> Result<(MountPolicy, Duration), MountsError> {
        let policy = self.policy()?;
        policy.admits(peer)?;
        let mut counts = lock(&self.counts);
        let (user, limits) = (peer.user, &policy.limits);
        let wait = counts.turn(TurnOf::Connection, user, limits, Instant::now())?;
        Ok((policy, wait))
    }

    /// Waits until the connection is the first in its user's queue and the user may have another served connection.
    /// The wait is unlimited as long as other connections end.
    async fn wait_to_be_served<'p>(
        &self,
        place: &'p ConnectionSlot,
        policy: &MountPolicy,
    ) -> Result<ServedConnection<'p>, MountsError> {
        let user = place.user;
        let in_line = LineUp::new(place);
        loop {
            let mut left = pin!(self.left.notified());
            // Registered before the check, so that no notification is missed.
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
                    "user {user} has {} connections to the mount service, and none was closed for \
                    {} seconds: wait, or raise `connections` below [mounts] in \
                    /etc/quire/serve.toml",
                    policy.limits.connections,
                    CROWDED.as_secs()
                )));
            }
            // After a timeout, the loop checks again whether the queue moved.
            let _timed_out = tokio::time::timeout(patience, left).await;
        }
    }

    fn policy(&self) -> Result<MountPolicy, MountsError> {
        (self.environment.policy)().map_err(|reason| {
            tracing::error!(reason, "cannot read the policy of the mount service");
            MountsError::denied(format!("cannot read the policy: {reason}"))
        })
    }

    /// Sends a client the reason of a refusal before it has sent a call.
    async fn refuse(&self, stream: &tokio::net::UnixStream, error: &MountsError) {
        let Ok(_place) = self.refused.try_acquire() else { return };
        tracing::info!(%error, "refused a connection");
        let Ok(mut told) = serde_json::to_vec(error) else { return };
        told.push(0);
        // The buffer of a new socket has room.
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
            version: self.environment.version.to_owned(),
            image_bytes_max: limits.image_bytes,
            inodes_max: limits.inodes,
            images_max: limits.images,
            bytes_max: limits.bytes,
            requests_per_second: limits.requests,
        };
        let mut program = (self.environment.speaker)(serde_json::to_string(&told)?);
        program.stdin(OwnedFd::from(stream)).stdout(theirs).current_dir("/");
        let process = spawn(program, &self.without_rights()).map_err(io::Error::other)?;
        // tokio has no type for seqpacket sockets. Its stream type works, because it only waits for readiness.
        let ours = std::os::unix::net::UnixStream::from(ours);
        Ok(Speaker { process: process.process, asks: tokio::net::UnixStream::from_std(ours)? })
    }

    fn without_rights(&self) -> Setup<'_> {
        Setup { own_session: true, root_of: Some(self.nobody.as_fd()), ..Setup::default() }
    }

    /// Handles the requests that a process passes on, until the process exits.
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
        let ended = || MountsError::Failed { reason: "the service is shutting down".to_owned() };
        let _turn = turn.acquire().await.map_err(|_closed| ended())?;
        let permit = Arc::clone(&self.work).acquire_owned().await.map_err(|_closed| ended())?;
        let mut work = WorkTurn { _permit: permit, slow: Arc::clone(&self.slow) };
        let (service, of_task, begun) = (Arc::clone(self), peer.clone(), Instant::now());
        // A panic fails only this request.
        let lent = tokio::task::spawn_blocking(move || {
            service.lend(&of_task, &policy, &places, &descriptors, &mut work)
        });
        let lent = lent
            .await
            .unwrap_or_else(|error| Err(MountsError::failed("the request was aborted", &error)));
        let elapsed_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        match &lent {
            Ok((reply, _)) => {
                tracing::info!(
                    user = peer.user,
                    image = reply.image,
                    elapsed_ms,
                    "mounted an image for a user"
                );
            }
            Err(error) => tracing::info!(user = peer.user, %error, elapsed_ms, "refused a request"),
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
        let given = (self.environment.ids)(peer.user, peer.group);
        let maps = namespace::check(user_namespace.as_fd(), peer, &given)?;
        let hash = |algorithm| {
            let hashed = image_id(image.as_fd(), algorithm);
            hashed.map_err(|errno| MountsError::failed("cannot read the image", &errno))
        };
        let id = hash(Algorithm::Sha256)?;
        if !policy.allows(&id) {
            // In stores with other hashes, the image has another id.
            let others = policy.other_algorithms().map(hash);
            let others = others.collect::<Result<Vec<_>, _>>()?;
            if !others.iter().any(|it| policy.allows(it)) {
                return Err(MountPolicy::refusal(&id, &others));
            }
        }
        let inside = |ranges: &[IdRange]| ranges.iter().map(|it| (it.inside, it.count)).collect();
        let ids = [inside(&maps.users), inside(&maps.groups)];
        let key = CopyKey { user: peer.user, image: id, ids, places: places.to_vec() };
        let copy = self.copy(policy, key, image.as_fd(), &maps, work)?;
        copy.check(&policy.limits)?;
        let owner = (peer.user, peer.group);
        let mount = copy.mount()?.lend(user_namespace.as_fd(), owner);
        let mount = mount.map_err(|error| {
            MountsError::failed("cannot attach the image to the user namespace", &error)
        })?;
        let reply = LendReply {
            mount_file_descriptor: 0,
            image: id.to_string(),
            copy: copy.written.copy.clone(),
            inodes: copy.written.inodes,
            devices: copy.written.devices,
        };
        Ok((reply, mount.into()))
    }

    /// Returns the copy of an image. If it does not exist, writes it from `file`. `maps` are the id maps of the key.
    fn copy(
        &self,
        policy: &MountPolicy,
        key: CopyKey,
        file: BorrowedFd<'_>,
        maps: &IdMaps,
        work: &mut WorkTurn,
    ) -> Result<Arc<Copy>, MountsError> {
        if let Some(copy) = self.copies.lookup(&key) {
            return Ok(copy);
        }
        self.copies.check_room(key.user, &policy.limits)?;
        let begun = Instant::now();
        lock(&self.counts).check_copying(key.user, begun)?;
        let failed = |error: &(dyn std::error::Error + 'static)| {
            MountsError::failed("cannot write a copy of the image", error)
        };
        let into = kernel::files::unnamed(self.environment.copies.as_fd(), 0o400);
        let into = into.map_err(|errno| failed(&errno))?;
        let file = file.try_clone_to_owned().map_err(|error| failed(&error))?;
        let (told, limits) = (writer::tell(maps, &key.places, &policy.limits)?, &policy.limits);
        let program = (self.environment.writer)(told);
        let mut may_be_slow = || work.be_slow();
        let setup = self.without_rights();
        let written = writer::copy(program, &setup, file, into.as_fd(), &mut may_be_slow);
        lock(&self.counts).charge_copying(key.user, begun.elapsed(), Instant::now());
        let written = written?;
        // If the disk is full, pages that were not written back would later read as zeros. The file need not survive a
        // crash.
        kernel::files::write_back(into.as_fd()).map_err(|errno| failed(&errno))?;
        let file = kernel::files::reopen_read_only(into.as_fd()).map_err(|errno| failed(&errno))?;
        drop(into);
        self.copies.keep(key, Copy::new(file, written), limits)
    }
}

/// Checks the seals and the length of an image once more, although the process that talks to the client has done so.
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

/// Refuses a client whose user id may come from another user's namespace.
fn check_own(peer: &Peer) -> Result<(), MountsError> {
    if peer.is_users_own {
        return Ok(());
    }
    Err(MountsError::denied(format!(
        "user {} is in a user namespace of another user: call as that user (or the calling \
        program is protected from its own user, because it is set-group-id, has capabilities, or \
        is not readable)",
        peer.user
    )))
}

/// Returns whether a client has closed its connection.
fn has_gone(stream: &tokio::net::UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&Timespec::default()));
    polled.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

/// Returns the credentials of a connection's peer.
async fn peer_of(stream: &tokio::net::UnixStream) -> io::Result<Peer> {
    // This uses a duplicate of the descriptor, because zlink takes ownership.
    let again = std::os::unix::net::UnixStream::from(stream.as_fd().try_clone_to_owned()?);
    let again = Stream::try_from(again).map_err(io::Error::other)?;
    let found = again.fetch_peer_credentials().await?;
    let group = found.unix_primary_group_id().as_raw();
    let others = found.unix_supplementary_group_ids().iter().map(|it| it.as_raw());
    let groups = others.chain([group]).collect();
    let user = found.unix_user_id().as_raw();
    let is_users_own = is_peer_its_users_own(stream.as_fd(), user, group);
    let is_users_own = is_users_own.map_err(io::Error::other)?;
    Ok(Peer { user, group, groups, is_users_own })
}
