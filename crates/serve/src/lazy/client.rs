//! Client of the lazy service: gets lazy devices for a mount.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::process::{PidfdFlags, pidfd_open};

use super::wire::{self, Answer, Ask, DeviceStatus, LEAVE, PROTOCOL, SERVICE_SOCKET, UNSUPPORTED};

/// Timeout of a reply. The service waits for no source and reads no device before it replies.
const ANSWER: Duration = Duration::from_secs(20);

/// Why a request to the service failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The service refused, with a reason.
    #[error("the service for lazy devices refused: {0}")]
    Refused(String),
    /// The service is of another version of Quire.
    #[error(
        "the running service for lazy devices is of another version of Quire: stop its containers, \
        unmount its images, and end it with `quire serve --lazy --stop`"
    )]
    OtherVersion,
    /// The service has begun to stop, but has not exited.
    #[error("the service for lazy devices has not exited within {} seconds", LEAVE.as_secs())]
    Stays,
    /// Exchanging messages with the service failed.
    #[error("cannot reach the service for lazy devices")]
    Talk(#[from] io::Error),
}

/// The data that a service began to prefetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Brought {
    /// The blocks of the image's hot pack, which the store has.
    HotPack,
    /// The parts of a trace.
    Trace,
    /// The image has no such trace.
    Nothing,
}

/// A connection to the service that fills the lazy devices of a store.
#[derive(Debug)]
pub struct LazyService {
    socket: OwnedFd,
    /// Manifest of the image that the requests are for.
    manifest: Option<Digest>,
}

impl LazyService {
    /// Connects to the service in a folder: see [`folder_of`](super::folder_of). Returns `None` if no service
    /// listens there.
    ///
    /// # Errors
    /// If the socket exists, but the connection fails.
    pub fn connect(folder: &Path) -> io::Result<Option<Self>> {
        let Some(socket) = wire::connect(&folder.join(SERVICE_SOCKET))? else { return Ok(None) };
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER))?;
        Ok(Some(Self { socket, manifest: None }))
    }

    /// Sets how long a response may take.
    ///
    /// # Errors
    /// If the timeout cannot be set.
    pub fn with_patience(self, patience: Duration) -> io::Result<Self> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(patience))?;
        Ok(self)
    }

    /// Sets the image that devices are requested for, so that they are filled with its index and from its registries.
    #[must_use]
    pub fn with_manifest(self, manifest: Option<Digest>) -> Self {
        Self { manifest, ..self }
    }

    /// Opens a lazy device for reading. Reads wait until the service has filled the bytes. This also holds for
    /// descriptors that are opened through this one.
    pub fn lend(&self, device: &DeviceId) -> Result<File, ClientError> {
        let ask = Ask::Open { device: device.to_string(), manifest: self.manifest };
        match self.ask(&ask)? {
            (Answer::Opened, Some(file)) => Ok(file.into()),
            _ => Err(unknown()),
        }
    }

    /// Makes the service prefetch a trace of an image; without a name, the default trace. This affects only devices
    /// that the service has handed out.
    pub fn bring(&self, image: &ImageId, trace: Option<&str>) -> Result<Brought, ClientError> {
        let (image, trace) = (image.to_string(), trace.map(ToOwned::to_owned));
        let ask = Ask::Bring { image, trace, manifest: self.manifest };
        match self.ask(&ask)? {
            (Answer::Loading, None) => Ok(Brought::HotPack),
            (Answer::Done, None) => Ok(Brought::Trace),
            (Answer::Absent, None) => Ok(Brought::Nothing),
            _ => Err(unknown()),
        }
    }

    /// Makes the service fetch all of an image, with less priority than its readers. This affects only devices that
    /// the service has handed out.
    pub fn complete(&self, image: &ImageId) -> Result<(), ClientError> {
        let ask = Ask::Complete { image: image.to_string(), manifest: self.manifest };
        match self.ask(&ask)? {
            (Answer::Done, None) => Ok(()),
            _ => Err(unknown()),
        }
    }

    /// Makes the service release unused devices at once, so that they can be removed.
    pub fn release(&self) -> Result<(), ClientError> {
        match self.ask(&Ask::Release)? {
            (Answer::Done, None) => Ok(()),
            _ => Err(unknown()),
        }
    }

    /// Returns the progress of each device that is in use.
    pub fn status(&self) -> Result<Vec<DeviceStatus>, ClientError> {
        let mut devices = Vec::new();
        let mut next = self.ask(&Ask::Status)?;
        loop {
            match next {
                (Answer::Device(status), None) => devices.push(*status),
                (Answer::Done, None) => return Ok(devices),
                _ => return Err(unknown()),
            }
            next = self.answer()?;
        }
    }

    /// Returns the service's options for registries, as on a command line.
    pub(super) fn options(&self) -> Result<Vec<String>, ClientError> {
        match self.ask(&Ask::Options)? {
            (Answer::Options { options }, None) => Ok(options),
            _ => Err(unknown()),
        }
    }

    /// Asks the service to exit, so that another one takes over.
    ///
    /// # Errors
    /// [`ClientError::OtherVersion`] if it could not take over.
    pub fn leave(&self) -> Result<(), ClientError> {
        match self.ask(&Ask::Leave { protocol: PROTOCOL })? {
            (Answer::Done, None) => Ok(()),
            _ => Err(unknown()),
        }
    }

    /// Asks the service to exit, and waits for that. The service refuses if devices that it fills are in use.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if they are; else [`ClientError::Stays`] or [`ClientError::Talk`].
    pub fn stop(self) -> Result<(), ClientError> {
        let asked = socket_peercred(&self.socket).map_err(io::Error::from)?;
        // The service may have exited in the meantime.
        let process = pidfd_open(asked.pid, PidfdFlags::empty()).ok();
        match self.ask(&Ask::Stop)? {
            (Answer::Done, None) => {}
            _ => return Err(unknown()),
        }
        let Some(process) = process else { return Ok(()) };
        let ended = PollFd::new(&process, PollFlags::IN);
        let most = Timespec::try_from(LEAVE).ok();
        match poll(&mut [ended], most.as_ref()).map_err(io::Error::from)? {
            0 => Err(ClientError::Stays),
            _ => Ok(()),
        }
    }

    fn ask(&self, ask: &Ask) -> Result<(Answer, Option<OwnedFd>), ClientError> {
        wire::send(self.socket.as_fd(), ask, None)?;
        match self.answer()? {
            (Answer::Refused { reason }, None) if reason.starts_with(UNSUPPORTED) => {
                Err(ClientError::OtherVersion)
            }
            (Answer::Refused { reason }, None) => Err(ClientError::Refused(reason)),
            answer => Ok(answer),
        }
    }

    fn answer(&self) -> io::Result<(Answer, Option<OwnedFd>)> {
        match wire::expect(wire::receive(self.socket.as_fd())) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let process = socket_peercred(&self.socket).map(|it| it.pid.as_raw_nonzero());
                let process =
                    process.map_or_else(|_| String::new(), |it| format!(" (process {it})"));
                Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "it{process} has not replied within {} seconds: the service or its keeper \
                        is stopped. Resume both (`kill -CONT`)",
                        ANSWER.as_secs()
                    ),
                ))
            }
            answer => answer,
        }
    }
}

fn unknown() -> ClientError {
    ClientError::Talk(io::Error::other("it sent an unknown message"))
}
