//! Messages between the service, its keeper and its clients: one JSON document each, perhaps with a descriptor.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use image::digest::Digest;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use super::door::{ConnectionId, DoorKind};
use super::metrics::LazyCounts;
use crate::descriptor;

/// What this version of service and keeper can say to each other. A message says which version its sender has; without
/// that, it is 0, which knows no journal.
pub(super) const PROTOCOL: u32 = 1;
/// The most bytes of a message.
const MESSAGE_MAX: usize = 16 << 10;

/// What a service tells its keeper. Each gets [`Told::Done`] for an answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum ToKeeper {
    /// Hold the group that comes along, or, without one, go on holding it. The service's events have numbers below this.
    /// Watchers know the group by `instance`. The answer to the first one is [`Told::Keeps`], from protocol 1 on.
    Group {
        numbers: i32,
        #[serde(default)]
        instance: String,
        #[serde(default)]
        protocol: u32,
        /// Whether the keeper's journal is this service's. If not, who stands in it gets an I/O error.
        #[serde(default)]
        has_journal: bool,
    },
    /// Give the journal of the service before. It comes along with [`Told::Done`], if there is one.
    Inherit,
    /// Hold the journal that comes along, instead of any other. Who stands in that one gets an I/O error.
    Journal,
    /// Hold the file of a device that comes along.
    Keep {
        device: String,
        #[serde(flatten)]
        state: KeptState,
    },
    /// Let a device go.
    Forget { device: String },
    /// Hold the connection that comes along, of a file on FUSE that stands for a device.
    Connect {
        connection: ConnectionId,
        device: String,
        /// Of the image that it was lent for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// Let a connection go.
    Disconnect { connection: ConnectionId },
    /// The service ends as it was told to, and devices are still in use.
    Leave,
    /// The service ends, and no device is in use.
    End,
}

/// What the next service has to know of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct KeptState {
    /// Whether all of it is here and verified: it has connections, and needs no filler.
    pub(super) is_complete: bool,
    /// Whether all of it is to come, though nobody reads it.
    pub(super) is_completing: bool,
    /// Of the image that it is filled for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) manifest: Option<Digest>,
}

/// What a keeper tells a service that comes to serve its group.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Told {
    /// The group comes along; devices follow.
    Group {
        instance: String,
        #[serde(default)]
        protocol: u32,
    },
    /// The keeper holds the group.
    Keeps { protocol: u32 },
    /// The file of a device comes along.
    Device {
        device: String,
        #[serde(flatten)]
        state: KeptState,
    },
    /// A connection comes along.
    Connection {
        connection: ConnectionId,
        device: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// That is all, or what was asked for is done.
    Done,
    /// It is not done: perhaps it is of a later version. The connection stays.
    Refused { reason: String },
}

/// What a client asks of a service.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Ask {
    /// To read a device, for the image of a manifest.
    Lend {
        device: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// To bring, ahead of its readers, what a trace of an image has; without a name, the trace that the service is set to. Its
    /// devices that are lent are meant.
    Bring {
        image: String,
        trace: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// To bring all of the devices of an image, behind all else. Those that are lent are meant.
    Complete {
        image: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
    },
    /// To hold the group, too.
    Watch,
    /// To let go at once of what nothing has open.
    Release,
    /// How far all devices are.
    Status,
    /// To end, whatever is in use, since another takes over.
    Leave,
    /// To end, unless something is in use.
    Stop,
}

/// What a service answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Answer {
    /// The device comes along, open to read.
    Lent,
    /// The group comes along, which is known by `instance`.
    Watched { instance: String },
    /// It cannot, for this reason.
    Refused { reason: String },
    /// There is no such thing.
    Absent,
    /// One device.
    Device(Box<DeviceStatus>),
    /// That is all, or it will be done.
    Done,
}

/// How far a lazy device is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    /// Its id.
    pub device: String,
    /// The blob that it is filled from.
    pub blob: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// How many of its units of 64 KiB are known to be there.
    pub filled: u64,
    /// How many it has.
    pub units: u64,
    /// Whether all of it is to come, though nobody reads it.
    #[serde(default)]
    pub is_completing: bool,
    /// How its readers wait. None if nothing has it open.
    #[serde(default)]
    pub doors: Vec<DoorKind>,
    /// Why the disk took nothing of it, and has taken nothing since.
    #[serde(default)]
    pub disk_error: Option<String>,
    /// What was done for it since the service began.
    #[serde(default)]
    pub counts: LazyCounts,
}

/// A socket of messages that are whole or not there.
pub(super) fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Two sockets that are connected.
pub(super) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Listens under a name. A socket that nobody listens at goes.
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

/// Connects to who listens under a name; `None` if nobody does.
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

/// Sends a message, with a descriptor or without.
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

/// Whether a message came that is not known, perhaps of another version. The next one may be.
pub(super) fn is_unknown(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

/// Receives a message, and the descriptor that came along; `None` at the end.
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
        return Err(io::Error::other("the message is longer than any that is known"));
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // The connection is as good as before.
        let error = "there is no room for the descriptor that came along";
        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
    }
    let message = serde_json::from_slice(&bytes[..got.bytes]);
    let message = message.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Some((message, descriptor)))
}

/// What must have come, and the end is none.
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
        // Fields that are not known are passed over.
        rustix::io::write(&one, br#"{"keep":{"device":"b","later":1}}"#).unwrap();
        let (message, _) = expect(receive::<ToKeeper>(other.as_fd())).unwrap();
        assert!(matches!(message, ToKeeper::Keep { device, .. } if device == "b"));
        drop(one);
        assert!(receive::<ToKeeper>(other.as_fd()).unwrap().is_none());
        assert!(connect(&path.with_extension("none")).unwrap().is_none());
    }
}
