//! How a mount asks the service for its devices.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::Duration;

use image::digest::Digest;
use image::verity::{DeviceId, ImageId};
use kernel::fanotify::Group;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::process::{PidfdFlags, pidfd_open};
use store::Store;

use super::last_holder::LazyWatch;
use super::runtime_dir::folder_of;
use super::service::{LEAVE, SOCKET};
use super::wire::{self, Answer, Ask, DeviceStatus};

/// How long a service may take to answer: it waits for no source and reads no device meanwhile.
const ANSWER: Duration = Duration::from_secs(20);

/// Why a service lends no device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// It says why.
    #[error("the service for lazy devices refuses: {0}")]
    Refused(String),
    /// It has begun to end, and goes on.
    #[error("the service for lazy devices has not ended within {} seconds", LEAVE.as_secs())]
    Stays,
    /// It cannot be talked to.
    #[error("cannot talk to the service for lazy devices")]
    Talk(#[from] io::Error),
}

/// A connection to the service that fills the lazy devices of a store.
#[derive(Debug)]
pub struct LazyService {
    socket: OwnedFd,
    /// Of the image that is asked for.
    manifest: Option<Digest>,
}

impl LazyService {
    /// Connects to the service in a folder: see [`folder_of`](super::folder_of). `None` if there is none.
    ///
    /// # Errors
    /// When a socket is there, and cannot be connected to.
    pub fn connect(folder: &Path) -> io::Result<Option<Self>> {
        let Some(socket) = wire::connect(&folder.join(SOCKET))? else { return Ok(None) };
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER))?;
        Ok(Some(Self { socket, manifest: None }))
    }

    /// The same, for the image of a manifest: its devices are filled by its own index, from its own registries.
    #[must_use]
    pub fn of(self, manifest: Option<Digest>) -> Self {
        Self { manifest, ..self }
    }

    /// A lazy device, open for reading. Its readers wait until the service has filled what they want, also through files
    /// that are opened by way of this descriptor.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn lend(&self, device: &DeviceId) -> Result<File, ClientError> {
        let ask = Ask::Lend { device: device.to_string(), manifest: self.manifest };
        match self.ask(&ask)? {
            (Answer::Lent, Some(file)) => Ok(file.into()),
            (Answer::Refused { reason }, None) => Err(ClientError::Refused(reason)),
            _ => Err(unknown()),
        }
    }

    /// Has the service bring what a trace of an image has, before it is read; without a name, the one that it is set to. Only
    /// devices that it lends are meant. Returns whether the image has such a trace.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn bring(&self, image: &ImageId, trace: Option<&str>) -> Result<bool, ClientError> {
        let (image, trace) = (image.to_string(), trace.map(ToOwned::to_owned));
        let ask = Ask::Bring { image, trace, manifest: self.manifest };
        match self.ask(&ask)? {
            (Answer::Done, None) => Ok(true),
            (Answer::Absent, None) => Ok(false),
            (Answer::Refused { reason }, None) => Err(ClientError::Refused(reason)),
            _ => Err(unknown()),
        }
    }

    /// Has the service bring all of an image, behind what its readers wait for. Only devices that it lends are meant.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn complete(&self, image: &ImageId) -> Result<(), ClientError> {
        let ask = Ask::Complete { image: image.to_string(), manifest: self.manifest };
        match self.ask(&ask)? {
            (Answer::Done, None) => Ok(()),
            (Answer::Refused { reason }, None) => Err(ClientError::Refused(reason)),
            _ => Err(unknown()),
        }
    }

    /// Holds the group of the service, too: then readers never see bytes that are not there, whoever dies.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn watch(&self, folder: &Path) -> Result<LazyWatch, ClientError> {
        match self.ask(&Ask::Watch)? {
            (Answer::Watched { instance }, Some(group)) => {
                Ok(LazyWatch::new(Group::adopt(group), instance, folder.to_owned()))
            }
            (Answer::Refused { reason }, None) => Err(ClientError::Refused(reason)),
            _ => Err(unknown()),
        }
    }

    /// Has the service let go at once of what nothing else has open, so that it can be removed.
    ///
    /// # Errors
    /// [`ClientError::Talk`].
    pub fn release(&self) -> Result<(), ClientError> {
        match self.ask(&Ask::Release)? {
            (Answer::Done, None) => Ok(()),
            _ => Err(unknown()),
        }
    }

    /// How far each device is that is in use.
    ///
    /// # Errors
    /// [`ClientError::Talk`].
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

    /// Asks the service to end, so that another takes over.
    ///
    /// # Errors
    /// [`ClientError::Talk`].
    pub fn leave(&self) -> Result<(), ClientError> {
        match self.ask(&Ask::Leave)? {
            (Answer::Done, None) => Ok(()),
            _ => Err(unknown()),
        }
    }

    /// Asks the service to end, and waits until it has: unless devices that it fills are in use.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if they are; else [`ClientError::Stays`] or [`ClientError::Talk`].
    pub fn stop(self) -> Result<(), ClientError> {
        let asked = socket_peercred(&self.socket).map_err(io::Error::from)?;
        // It may have ended by itself.
        let process = pidfd_open(asked.pid, PidfdFlags::empty()).ok();
        match self.ask(&Ask::Stop)? {
            (Answer::Done, None) => {}
            (Answer::Refused { reason }, None) => return Err(ClientError::Refused(reason)),
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

    fn ask(&self, ask: &Ask) -> io::Result<(Answer, Option<OwnedFd>)> {
        wire::send(self.socket.as_fd(), ask, None)?;
        self.answer()
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
                        "it{process} has not answered within {} seconds: it stands still, or its keeper does. Let them go \
                         on (`kill -CONT`)",
                        ANSWER.as_secs()
                    ),
                ))
            }
            answer => answer,
        }
    }
}

fn unknown() -> ClientError {
    ClientError::Talk(io::Error::other("it sent what is unknown"))
}

/// Has the service of a store, if there is one, let go of what nothing else has open.
pub fn release(store: &Store) {
    let asked = folder_of(store.path()).and_then(|folder| LazyService::connect(&folder));
    match asked.map(|service| service.map(|it| it.release())) {
        Ok(None | Some(Ok(()))) => {}
        // It keeps what it has: then so does `gc`.
        Ok(Some(Err(error))) => {
            tracing::warn!(%error, "the service for lazy devices does not let go");
        }
        Err(error) => tracing::debug!(%error, "cannot ask the service for lazy devices"),
    }
}
