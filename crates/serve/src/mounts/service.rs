//! The service: takes connections, and lends images.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use container::bundle::userns::IdMap;
use image::verity::{Algorithm, Hasher, ImageId};
use kernel::mount::OVERLAY_USER_DATA;
use kernel::process::{IdMaps, IdRange};
use kernel::version::KernelVersion;
use rustix::fs::SealFlags;
use serde::Serialize;
use store::Who;
use tokio::sync::Semaphore;
use zlink::connection::socket::FetchPeerCredentials as _;
use zlink::tokio::unix::Stream;
use zlink::{Connection, Reply};

use super::bounded::Bounded;
use super::images::{Copies, Copy, CopyKey};
use super::namespace;
use super::users::{MountPolicy, Peer, UserCounts};
use super::wire::{
    DESCRIPTION, DescribeReply, INTERFACE, LendAsk, LendReply, MethodCall, MountsAsk, MountsError,
    SERVICE, WrongCall,
};
use super::writer;

/// How long a client may take to ask.
const QUIET: Duration = Duration::from_secs(10);
/// How long a client may take to read an answer.
const ANSWER: Duration = Duration::from_secs(10);
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
    /// A program that calls [`write_for_user`](super::write_for_user) with its last argument.
    pub writer: Box<dyn Fn() -> Command + Send + Sync>,
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
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(threads.saturating_mul(2).saturating_add(2))
        .enable_io()
        .enable_time()
        .build()
        .map_err(MountServiceError::Start)?;
    let service = Arc::new(Service {
        surroundings,
        copies: Copies::default(),
        counts: Mutex::default(),
        turns: Mutex::default(),
        work: Semaphore::new(threads),
    });
    let served = runtime.block_on(async {
        listener.set_nonblocking(true).map_err(MountServiceError::Start)?;
        let listener =
            tokio::net::UnixListener::from_std(listener).map_err(MountServiceError::Start)?;
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
    copies: Copies,
    counts: Mutex<UserCounts>,
    /// One request of a user's is worked on at a time, so that none keeps others from their turn.
    turns: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
    /// Of all users.
    work: Semaphore,
}

/// What a client gets.
enum Given {
    Info(InfoReply),
    Description(DescriptionReply),
    Described(DescribeReply),
    Lent(LendReply, OwnedFd),
}

/// Source: varlink's `org.varlink.service`, `GetInfo`.
#[derive(Debug, Serialize)]
struct InfoReply {
    vendor: &'static str,
    product: &'static str,
    version: &'static str,
    url: &'static str,
    interfaces: [&'static str; 2],
}

/// Source: varlink's `org.varlink.service`, `GetInterfaceDescription`.
#[derive(Debug, Serialize)]
struct DescriptionReply {
    description: &'static str,
}

/// As varlink describes its own interface.
const SERVICE_DESCRIPTION: &str = include_str!("org.varlink.service.varlink");

impl Service {
    async fn accept(self: &Arc<Self>, listener: tokio::net::UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let service = Arc::clone(self);
                    drop(tokio::spawn(async move { service.connection(stream).await }));
                }
                Err(error) => {
                    tracing::warn!(%error, "no connection can be taken");
                    // There may be no descriptors for a moment.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Sees to a client until it has gone, or is quiet.
    async fn connection(self: Arc<Self>, stream: tokio::net::UnixStream) {
        let Ok(stream) = Stream::try_from(stream) else { return };
        let peer = match peer_of(&stream).await {
            Ok(peer) => peer,
            Err(error) => {
                tracing::warn!(%error, "it is not known who has connected");
                return;
            }
        };
        let mut connection = Connection::new(Bounded(stream));
        let policy = match (self.surroundings.policy)() {
            Ok(policy) => policy,
            Err(reason) => {
                tracing::error!(reason, "the policy of the mount service cannot be read");
                MountPolicy {
                    users: Some(std::collections::BTreeSet::new()),
                    ..MountPolicy::default()
                }
            }
        };
        let taken = policy
            .admits(&peer)
            .and_then(|()| lock(&self.counts).connect(peer.user, &policy.limits, Instant::now()));
        if let Err(error) = taken {
            tracing::info!(user = peer.user, %error, "a connection is refused");
            // Whoever asks is told, and who does not ask is not waited for.
            let _asked = receive(&mut connection).await;
            let _told = answer(&mut connection, Err(Refusal::Mounts(error))).await;
            return;
        }
        while let Some((call, descriptors)) = receive(&mut connection).await {
            let given = self.call(&peer, call, descriptors).await;
            if answer(&mut connection, given).await.is_none() {
                break;
            }
        }
        lock(&self.counts).disconnect(peer.user, Instant::now());
        lock(&self.turns).retain(|user, turn| *user != peer.user || Arc::strong_count(turn) > 1);
    }

    async fn call(
        self: &Arc<Self>,
        peer: &Peer,
        call: MethodCall,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Given, Refusal> {
        let policy = (self.surroundings.policy)();
        let policy = policy.map_err(|reason| {
            Refusal::Mounts(MountsError::denied(format!("the policy cannot be read: {reason}")))
        })?;
        policy.admits(peer)?;
        match call.ask()? {
            MountsAsk::Info => Ok(Given::Info(InfoReply {
                vendor: "Quire",
                product: "quire serve --mounts",
                version: self.surroundings.version,
                url: "",
                interfaces: [SERVICE, INTERFACE],
            })),
            MountsAsk::Description { interface } => {
                let description =
                    if interface == INTERFACE { DESCRIPTION } else { SERVICE_DESCRIPTION };
                Ok(Given::Description(DescriptionReply { description }))
            }
            MountsAsk::Describe => Ok(Given::Described(DescribeReply {
                version: self.surroundings.version.to_owned(),
                image_bytes_max: policy.limits.image_bytes,
                inodes_max: policy.limits.inodes,
                images_max: policy.limits.images,
                bytes_max: policy.limits.bytes,
                requests_per_second: policy.limits.requests,
            })),
            MountsAsk::Lend(ask) => {
                let wait = lock(&self.counts).turn(peer.user, &policy.limits, Instant::now())?;
                tokio::time::sleep(wait).await;
                let turn = {
                    let mut turns = lock(&self.turns);
                    Arc::clone(
                        turns.entry(peer.user).or_insert_with(|| Arc::new(Semaphore::new(1))),
                    )
                };
                let ended = || MountsError::Failed { reason: "the service ends".to_owned() };
                let _turn = turn.acquire().await.map_err(|_closed| ended())?;
                let _work = self.work.acquire().await.map_err(|_closed| ended())?;
                let (service, of_task, begun) = (Arc::clone(self), peer.clone(), Instant::now());
                // A panic is an error of this one request.
                let lent = tokio::task::spawn_blocking(move || {
                    service.lend(&of_task, &policy, &ask, &descriptors)
                });
                let lent = lent.await.unwrap_or_else(|error| {
                    Err(MountsError::failed("the request was given up", &error))
                });
                let took = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                match &lent {
                    Ok((reply, _)) => tracing::info!(
                        user = peer.user,
                        image = reply.image,
                        elapsed_ms = took,
                        "lent"
                    ),
                    Err(error) => {
                        tracing::info!(user = peer.user, %error, elapsed_ms = took, "not lent");
                    }
                }
                lent.map(|(reply, mount)| Given::Lent(reply, mount)).map_err(Refusal::Mounts)
            }
        }
    }

    fn lend(
        &self,
        peer: &Peer,
        policy: &MountPolicy,
        ask: &LendAsk,
        descriptors: &[OwnedFd],
    ) -> Result<(LendReply, OwnedFd), MountsError> {
        let get = |number: usize, name: &str| {
            let missing =
                || MountsError::invalid(format!("{name}: there is no descriptor {number}"));
            descriptors.get(number).map(OwnedFd::as_fd).ok_or_else(missing)
        };
        let image = get(ask.image_file_descriptor, "imageFileDescriptor")?;
        let user_namespace =
            get(ask.user_namespace_file_descriptor, "userNamespaceFileDescriptor")?;
        let image = sealed(image, policy)?;
        let given = (self.surroundings.ids)(peer.user, peer.group);
        let maps = namespace::check(user_namespace, peer, &given)?;
        let id = hash(image.as_fd())?;
        policy.allows(&id)?;
        let copy = self.copy(peer, policy, (id, image), (&maps, &ask.places))?;
        let mount = copy.mount()?.lend(user_namespace);
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
        (image, file): (ImageId, OwnedFd),
        (maps, places): (&IdMaps, &[String]),
    ) -> Result<Arc<Copy>, MountsError> {
        let inside = |ranges: &[IdRange]| ranges.iter().map(|it| (it.inside, it.count)).collect();
        let ids = [inside(&maps.users), inside(&maps.groups)];
        let key = CopyKey { user: peer.user, image, ids, places: places.to_vec() };
        if let Some(copy) = self.copies.find(&key) {
            return Ok(copy);
        }
        self.copies.check_room(peer.user, &policy.limits)?;
        let failed = |error: rustix::io::Errno| {
            MountsError::failed("cannot write a copy of the image", &error)
        };
        let into =
            kernel::files::unnamed(self.surroundings.copies.as_fd(), 0o400).map_err(failed)?;
        let program = (self.surroundings.writer)();
        let written = writer::copy(program, file, into.as_fd(), (maps, places), &policy.limits)?;
        // What the disk has no room for would be zeros once it is read again.
        rustix::fs::fdatasync(&into).map_err(failed)?;
        let file = kernel::files::reopen_read_only(into.as_fd()).map_err(failed)?;
        drop(into);
        self.copies.keep(key, Copy::new(file, written), &policy.limits)
    }
}

/// Takes a client's image: bytes that nobody can change, in memory, so that nobody can make a reader wait. It is open anew, since
/// the client could move the place at which its own descriptor reads.
fn sealed(image: BorrowedFd<'_>, policy: &MountPolicy) -> Result<OwnedFd, MountsError> {
    let wanted = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    // Only files in memory have seals.
    let seals = rustix::fs::fcntl_get_seals(image);
    if !seals.is_ok_and(|it| it.contains(wanted)) {
        return Err(MountsError::invalid(
            "imageFileDescriptor is no memfd with the seals WRITE, SHRINK and GROW: copy the image into one",
        ));
    }
    let failed = |errno: rustix::io::Errno| MountsError::failed("cannot open the image", &errno);
    let bytes =
        u64::try_from(rustix::fs::fstat(image).map_err(failed)?.st_size).unwrap_or(u64::MAX);
    if bytes > policy.limits.image_bytes {
        return Err(MountsError::too_much(format!(
            "the image has {bytes} bytes, and may have {}: `image-bytes` below [mounts] in /etc/quire/serve.toml",
            policy.limits.image_bytes
        )));
    }
    kernel::files::reopen_read_only(image).map_err(failed)
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

/// Who is at the other end.
async fn peer_of(stream: &Stream) -> io::Result<Peer> {
    let found = stream.fetch_peer_credentials().await?;
    let group = found.unix_primary_group_id().as_raw();
    let others = found.unix_supplementary_group_ids().iter().map(|it| it.as_raw());
    let groups = others.chain([group]).collect();
    Ok(Peer { user: found.unix_user_id().as_raw(), group, groups })
}

type ServerConnection = Connection<Bounded>;

/// The next call. `None` if there is none, or it is no call.
async fn receive(connection: &mut ServerConnection) -> Option<(MethodCall, Vec<OwnedFd>)> {
    let call = tokio::time::timeout(QUIET, connection.receive_call::<MethodCall>());
    let (call, descriptors) = call.await.ok()?.ok()?;
    Some((call.method().clone(), descriptors))
}

/// Why a call is not answered.
#[derive(Debug)]
enum Refusal {
    Mounts(MountsError),
    Call(WrongCall),
}

impl From<MountsError> for Refusal {
    fn from(error: MountsError) -> Self {
        Self::Mounts(error)
    }
}

impl From<WrongCall> for Refusal {
    fn from(error: WrongCall) -> Self {
        Self::Call(error)
    }
}

/// `None` if the client has gone.
async fn answer(connection: &mut ServerConnection, given: Result<Given, Refusal>) -> Option<()> {
    let told = async {
        match given {
            Ok(Given::Info(it)) => connection.send_reply(&Reply::new(Some(it)), Vec::new()).await,
            Ok(Given::Description(it)) => {
                connection.send_reply(&Reply::new(Some(it)), Vec::new()).await
            }
            Ok(Given::Described(it)) => {
                connection.send_reply(&Reply::new(Some(it)), Vec::new()).await
            }
            Ok(Given::Lent(it, mount)) => {
                connection.send_reply(&Reply::new(Some(it)), vec![mount]).await
            }
            Err(Refusal::Mounts(error)) => connection.send_error(&error, Vec::new()).await,
            Err(Refusal::Call(wrong)) => {
                use zlink::varlink_service::Error;
                let error = match wrong {
                    WrongCall::Method(method) => Error::MethodNotFound { method: method.into() },
                    WrongCall::Interface(interface) => {
                        Error::InterfaceNotFound { interface: interface.into() }
                    }
                    WrongCall::Parameter(parameter) => {
                        Error::InvalidParameter { parameter: parameter.into() }
                    }
                };
                connection.send_error(&error, Vec::new()).await
            }
        }
    };
    tokio::time::timeout(ANSWER, told).await.ok()?.ok()
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
