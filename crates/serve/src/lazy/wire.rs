//! Messages between the service, its keeper and its clients: one JSON document each, optionally with a descriptor.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use image::digest::Digest;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use super::fuse::connections::ConnectionId;
use super::metrics::{LastFailure, LazyCounts};
use crate::descriptor;

/// Version of the messages. Processes of different versions do not take over from each other. Earlier versions had
/// devices with fanotify marks.
pub(super) const PROTOCOL: u32 = 2;
/// Beginning of a service's reply to a request that its version does not have.
pub(super) const UNSUPPORTED: &str = "this service does not support the request";
/// Name of the service's socket for clients.
pub(super) const SERVICE_SOCKET: &str = "service";
/// How long a service that was asked to exit may take.
pub(super) const LEAVE: Duration = Duration::from_secs(60);
/// Largest message, in bytes.
const MESSAGE_MAX: usize = 16 << 10;

/// A message of a service to its keeper. The reply to each is [`Told::Done`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum ToKeeper {
    /// The first message to a keeper that the service has started.
    Begin { protocol: u32 },
    /// Hold the attached file of a device.
    Keep {
        device: String,
        #[serde(flatten)]
        state: KeptState,
    },
    /// Release a device.
    Forget { device: String },
    /// Hold the attached connection of a file on FUSE that stands for a device.
    Connect {
        connection: ConnectionId,
        device: String,
        /// Manifest of the image that the device was handed out for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// Release a connection.
    Disconnect { connection: ConnectionId },
    /// The service exits as requested, and devices are still in use.
    Leave,
    /// The service exits, and no device is in use.
    End,
}

/// The state of a device for the next service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct KeptState {
    /// Whether the device is complete and verified: it has connections, but needs no filler.
    pub(super) is_complete: bool,
    /// Whether the whole device should be fetched, even without readers.
    pub(super) is_completing: bool,
    /// Manifest of the image that the device is filled for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) manifest: Option<Digest>,
}

/// A message of a keeper to a service.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Told {
    /// The first message to the next service; devices and connections follow.
    Keeps { protocol: u32 },
    /// The file of a device is attached.
    Device {
        device: String,
        #[serde(flatten)]
        state: KeptState,
    },
    /// A connection is attached.
    Connection {
        connection: ConnectionId,
        device: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// The list is complete, or the request was carried out.
    Done,
    /// The request was not carried out, for example because it is of a later version. The connection stays open.
    Refused { reason: String },
}

/// A request of a client to a service.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Ask {
    /// Open a device, for the image of a manifest.
    Open {
        device: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// Prefetch a trace of an image; without a name, the default trace. Affects only devices that were handed out.
    Bring {
        image: String,
        trace: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// Fetch all devices of an image, with the lowest priority. Affects only devices that were handed out.
    Complete {
        image: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// Release unused devices at once.
    Release,
    /// Return the progress of all devices.
    Status,
    /// Return the options for registries.
    Options,
    /// Exit even if devices are in use, because another service with this version of the messages takes over.
    Leave { protocol: u32 },
    /// Exit, unless devices are in use.
    Stop,
}

/// A reply of a service.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Answer {
    /// The device is attached, open for reading.
    Opened,
    /// The request failed for this reason.
    Refused { reason: String },
    /// The trace does not exist.
    Absent,
    /// The image's hot pack is being loaded.
    Loading,
    /// The options for registries, as on a command line.
    Options { options: Vec<String> },
    /// The status of one device.
    Device(Box<DeviceStatus>),
    /// The list is complete, or the request will be carried out.
    Done,
}

/// The progress of a lazy device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    /// Id of the device.
    pub device: String,
    /// Digest of the blob that the device is filled from.
    pub blob: String,
    /// Length of the device, in bytes.
    pub bytes: u64,
    /// Number of units of 64 KiB that are known to be filled.
    pub filled: u64,
    /// Number of all units.
    pub units: u64,
    /// Whether the whole device should be fetched, even without readers.
    #[serde(default)]
    pub is_completing: bool,
    /// Whether the device is mounted or open.
    #[serde(default)]
    pub is_mounted: bool,
    /// The last error of a write to the disk. `None` after a successful write.
    #[serde(default)]
    pub disk_error: Option<String>,
    /// The last failure of which a reader got an I/O error.
    #[serde(default)]
    pub last_failure: Option<LastFailure>,
    /// Why all readers of the device get I/O errors, if they do.
    #[serde(default)]
    pub broken: Option<String>,
    /// Manifest of the version of the image whose start was prefetched.
    #[serde(default)]
    pub start_of: Option<Digest>,
    /// Counters since the service began.
    #[serde(default)]
    pub counts: LazyCounts,
}

/// Creates a seqpacket socket, which keeps messages whole.
pub(super) fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Creates two connected sockets.
pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Listens at a path. An existing socket there is replaced.
pub(super) fn listen(path: &Path) -> io::Result<OwnedFd> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 64)?;
    Ok(socket)
}

/// Connects to a socket. Returns `None` if no process listens there.
pub(super) fn connect(path: &Path) -> io::Result<Option<OwnedFd>> {
    let socket = socket()?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(Some(socket)),
        Err(Errno::NOENT | Errno::CONNREFUSED) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

pub(super) fn accept(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(socket, SocketFlags::CLOEXEC)?)
}

/// Sends a message, optionally with a descriptor.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    loop {
        let sent = rustix::net::sendmsg(
            socket,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        );
        match sent {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop).map_err(Into::into),
        }
    }
}

/// Returns whether an unknown message was received, perhaps of another version. The connection can still be used.
pub(super) fn is_unknown(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

/// Receives a message with its descriptor. Returns `None` at the end of the connection.
pub(super) fn receive<T: for<'de> Deserialize<'de>>(
    socket: BorrowedFd<'_>,
) -> io::Result<Option<(T, Option<OwnedFd>)>> {
    let mut bytes = vec![0; MESSAGE_MAX];
    let got = descriptor::receive(socket, &mut bytes)?;
    let descriptor = got.descriptor;
    if got.bytes == 0 && descriptor.is_none() {
        return Ok(None);
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("the message is too long"));
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // The connection can still be used.
        let error = "cannot receive the descriptor of a message";
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    let message = serde_json::from_slice(&bytes[..got.bytes]);
    let message = message.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Some((message, descriptor)))
}

/// Makes the end of the connection an error.
pub(super) fn expect<T>(received: io::Result<Option<T>>) -> io::Result<T> {
    received?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn messages_bring_descriptors() {
        let (one, other) = pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "bytes").unwrap();
        let file = File::open(&path).unwrap();
        let keep = ToKeeper::Keep { device: "a".to_owned(), state: KeptState::default() };
        send(one.as_fd(), &keep, Some(file.as_fd())).unwrap();
        send(one.as_fd(), &ToKeeper::Leave, None).unwrap();
        let (message, descriptor) = expect(receive::<ToKeeper>(other.as_fd())).unwrap();
        assert!(matches!(message, ToKeeper::Keep { device, .. } if device == "a"));
        let mut text = String::new();
        File::from(descriptor.unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "bytes");
        let (message, descriptor) = expect(receive::<ToKeeper>(other.as_fd())).unwrap();
        assert!(matches!(message, ToKeeper::Leave) && descriptor.is_none());
        rustix::io::write(&one, b"no message").unwrap();
        assert!(is_unknown(&receive::<ToKeeper>(other.as_fd()).unwrap_err()));
        rustix::io::write(&one, br#"{"later":{"device":"a"}}"#).unwrap();
        assert!(is_unknown(&receive::<ToKeeper>(other.as_fd()).unwrap_err()));
        // Unknown fields are ignored.
        rustix::io::write(&one, br#"{"keep":{"device":"b","later":1}}"#).unwrap();
        let (message, _) = expect(receive::<ToKeeper>(other.as_fd())).unwrap();
        assert!(matches!(message, ToKeeper::Keep { device, .. } if device == "b"));
        drop(one);
        assert!(receive::<ToKeeper>(other.as_fd()).unwrap().is_none());
        assert!(connect(&path.with_extension("none")).unwrap().is_none());
    }
}
