//! The process that talks to one client. Only this process receives the client's descriptors, because closing a
//! hostile descriptor, or forking while it is open, may block as long as the client likes. The process passes only
//! sealed memfds and user namespaces to the service. It runs without privileges and with low resource limits.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use kernel::process::{Namespace, namespace_kind};
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Rlimit, setrlimit};
use serde::{Deserialize, Serialize};
use zlink::tokio::unix::Stream;
use zlink::{Connection, Reply};

use super::wire::{
    DESCRIPTION, DescribeReply, INTERFACE, LendAsk, LendReply, MountsAsk, MountsError, ask_of,
};
use crate::descriptor::{receive_piece, send_piece};
use crate::varlink::{
    Bounded, DescriptionReply, InfoReply, MethodCall, SERVICE_DESCRIPTION, WrongCall,
};

/// How long a client may take to send a call.
const QUIET: Duration = Duration::from_secs(10);
/// How long a client may take to read a reply.
const ANSWER: Duration = Duration::from_secs(10);
/// Largest message between this process and the service, in bytes. It has room for the places of a request with JSON
/// escapes.
pub(super) const PIECE_MAX: usize = 64 << 10;
/// Limit of open descriptors of this process.
const DESCRIPTORS_MAX: u64 = 64;
/// Limit of this process's address space, in bytes.
const MEMORY_MAX: u64 = 512 << 20;

/// The reply of the service to this process. The mount's descriptor comes with it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LendAnswer {
    Lent(LendReply),
    Refused(MountsError),
}

/// The reply to a client.
enum Given {
    Info(InfoReply),
    Description(DescriptionReply),
    Described(DescribeReply),
    Lent(LendReply, OwnedFd),
}

/// Runs such a process. Standard input is the client's socket, and standard output is the service's. `told` is a
/// `DescribeReply` of the service as JSON. Returns the exit code.
#[must_use]
pub fn speak_with_client(told: &str) -> u8 {
    let spoken = serde_json::from_str(told).map_err(io::Error::other).and_then(|limits| {
        give_up_room()?;
        let client = io::stdin().as_fd().try_clone_to_owned()?;
        let service = io::stdout().as_fd().try_clone_to_owned()?;
        speak(client, &service, &limits)
    });
    // The peers see that their connections are closed.
    u8::from(spoken.is_err())
}

/// Sets resource limits for this process and blocks new privileges.
fn give_up_room() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let limits = [
        (Resource::As, MEMORY_MAX),
        (Resource::Nofile, DESCRIPTORS_MAX),
        (Resource::Nproc, 0),
        (Resource::Fsize, 0),
        (Resource::Core, 0),
    ];
    for (resource, most) in limits {
        setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
    }
    Ok(())
}

fn speak(client: OwnedFd, service: &OwnedFd, limits: &DescribeReply) -> io::Result<()> {
    // A current-thread runtime, because the process may not start threads.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let stream = std::os::unix::net::UnixStream::from(client);
        let stream = Stream::try_from(stream).map_err(io::Error::other)?;
        let mut connection = Connection::new(Bounded(stream));
        loop {
            let call = tokio::time::timeout(QUIET, connection.receive_call::<MethodCall>());
            let Ok(Ok((call, descriptors))) = call.await else { return Ok(()) };
            let given = answer_to(call.method(), &descriptors, service, limits);
            drop(descriptors);
            // varlink's one-way calls get no reply.
            if !call.oneway() {
                let told = tokio::time::timeout(ANSWER, answer(&mut connection, given));
                let Ok(Ok(())) = told.await else { return Ok(()) };
            }
        }
    })
}

/// The error that a client gets.
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

fn answer_to(
    call: &MethodCall,
    descriptors: &[OwnedFd],
    service: &OwnedFd,
    limits: &DescribeReply,
) -> Result<Given, Refusal> {
    Ok(match ask_of(call)? {
        MountsAsk::Info => {
            Given::Info(InfoReply::new("quire serve --mounts", &limits.version, INTERFACE))
        }
        MountsAsk::Description { interface } => {
            let is_own = interface == INTERFACE;
            let description = if is_own { DESCRIPTION } else { SERVICE_DESCRIPTION };
            Given::Description(DescriptionReply { description })
        }
        MountsAsk::Describe => Given::Described(limits.clone()),
        MountsAsk::Lend(ask) => {
            let (reply, mount) = lend(&ask, descriptors, service, limits)?;
            Given::Lent(reply, mount)
        }
    })
}

/// Passes a request on to the service and returns its reply.
fn lend(
    ask: &LendAsk,
    descriptors: &[OwnedFd],
    service: &OwnedFd,
    limits: &DescribeReply,
) -> Result<(LendReply, OwnedFd), MountsError> {
    let get = |number: usize, name: &str| {
        let missing =
            || MountsError::invalid(format!("{name}: the message has no descriptor {number}"));
        descriptors.get(number).map(OwnedFd::as_fd).ok_or_else(missing)
    };
    let image = get(ask.image_file_descriptor, "imageFileDescriptor")?;
    let namespace = get(ask.user_namespace_file_descriptor, "userNamespaceFileDescriptor")?;
    let image = sealed(image, limits.image_bytes_max)?;
    check_namespace(namespace)?;
    let failed = |error: io::Error| MountsError::failed("cannot reach the mount service", &error);
    let asked = serde_json::to_vec(&ask.places).map_err(|error| failed(error.into()))?;
    send_piece(service.as_fd(), &asked, &[image.as_fd(), namespace]).map_err(failed)?;
    let mut buffer = vec![0; PIECE_MAX];
    let (count, mut mounts) = receive_piece(service.as_fd(), &mut buffer).map_err(failed)?;
    let answer = buffer.get(..count).unwrap_or_default();
    match serde_json::from_slice(answer).map_err(|error| failed(error.into()))? {
        LendAnswer::Lent(reply) => {
            let lacks = || failed(io::ErrorKind::UnexpectedEof.into());
            Ok((reply, mounts.pop().ok_or_else(lacks)?))
        }
        LendAnswer::Refused(error) => Err(error),
    }
}

/// Checks that a client's image is a sealed memfd of at most `bytes_max` bytes. Returns a new open file description,
/// because the client can change the file offset of the descriptor that it sent.
fn sealed(image: BorrowedFd<'_>, bytes_max: u64) -> Result<OwnedFd, MountsError> {
    let wanted = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW;
    // Only files in memory have seals, so this call fails for other files. Until it succeeds, no other call is made on
    // the file.
    let seals = rustix::fs::fcntl_get_seals(image);
    if !seals.is_ok_and(|it| it.contains(wanted)) {
        return Err(MountsError::invalid(
            "imageFileDescriptor is not a memfd with the seals WRITE, SHRINK and GROW: copy the \
            image into one",
        ));
    }
    let failed =
        |errno: Errno| MountsError::invalid(format!("cannot open imageFileDescriptor: {errno}"));
    let bytes = rustix::fs::fstat(image).map_err(failed)?.st_size;
    let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
    if bytes > bytes_max {
        return Err(MountsError::too_much(format!(
            "the image has {bytes} bytes, more than {bytes_max}: `image-bytes` below [mounts] in \
            /etc/quire/serve.toml sets the limit",
        )));
    }
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    // With a lease of the client on the file, `O_NONBLOCK` makes the open fail instead of wait.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(failed)
}

/// Refuses a descriptor that is not a user namespace.
fn check_namespace(file: BorrowedFd<'_>) -> Result<(), MountsError> {
    // The name is checked first, because an ioctl on a file of a user's FUSE mount could block as long as the user
    // likes.
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let is_named = link.is_ok_and(|it| it.as_os_str().as_encoded_bytes().starts_with(b"user:["));
    if is_named && matches!(namespace_kind(file), Ok(Some(Namespace::User))) {
        return Ok(());
    }
    Err(MountsError::invalid(
        "userNamespaceFileDescriptor is not a user namespace: send /proc/self/ns/user",
    ))
}

async fn answer(
    connection: &mut Connection<Bounded>,
    given: Result<Given, Refusal>,
) -> zlink::Result<()> {
    match given {
        Ok(Given::Info(it)) => connection.send_reply(&Reply::new(Some(it)), Vec::new()).await,
        Ok(Given::Description(it)) => {
            connection.send_reply(&Reply::new(Some(it)), Vec::new()).await
        }
        Ok(Given::Described(it)) => connection.send_reply(&Reply::new(Some(it)), Vec::new()).await,
        Ok(Given::Lent(it, mount)) => {
            connection.send_reply(&Reply::new(Some(it)), vec![mount]).await
        }
        Err(Refusal::Mounts(error)) => connection.send_error(&error, Vec::new()).await,
        Err(Refusal::Call(wrong)) => connection.send_error(&wrong.error(), Vec::new()).await,
    }
}
