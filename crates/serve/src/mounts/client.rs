//! How a program of a user's has an image lent.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use container::root::LentMount;
use kernel::mount::Detached;
use rustix::fs::{MemfdFlags, SealFlags};

use super::wire::{DescribeReply, LendAsk, LendReply, MountsError};
use crate::varlink::{CallError, Client, Patience};

/// How long the service may take once it has read what is asked. It works on one request of a user's at a time.
const ANSWER: Duration = Duration::from_secs(25);
/// How long a user's connections may wait for each other. The service refuses them much earlier if none has its turn.
const LINE: Duration = Duration::from_secs(120);
const PATIENCE: Patience = Patience { answer: ANSWER, line: LINE };
/// How long it may take to say who it is.
const DESCRIBED: Duration = Duration::from_secs(2);
/// Source: `linux/magic.h`, EROFS_SUPER_MAGIC_V1.
const EROFS_SUPER_MAGIC: i64 = 0xe0f5_e1e2;

/// Why no image is lent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountClientError {
    /// The service says why.
    #[error("the mount service refuses: {0}")]
    Refused(MountsError),
    /// It cannot be talked to.
    #[error("cannot talk to the mount service: {0}")]
    Talk(String),
    /// The image cannot be sent.
    #[error("cannot send the image to the mount service")]
    Send(#[source] io::Error),
}

/// A connection to the mount service.
#[derive(Debug)]
pub struct MountClient(Client);

impl MountClient {
    /// Connects to the service at a socket. `None` if there is none. No thread is started.
    ///
    /// # Errors
    /// When a socket is there, and cannot be connected to.
    pub fn connect(socket: &Path) -> io::Result<Option<Self>> {
        Ok(Client::connect(socket)?.map(Self))
    }

    /// Has an image lent to a user namespace: a mount that is attached nowhere. `places` are files that it is to have.
    ///
    /// # Errors
    /// [`MountClientError`].
    pub fn lend(
        &mut self,
        image: BorrowedFd<'_>,
        user_namespace: OwnedFd,
        places: &[&str],
    ) -> Result<LentMount, MountClientError> {
        let image = sealed_copy(image).map_err(MountClientError::Send)?;
        let ask = LendAsk {
            image_file_descriptor: 0,
            user_namespace_file_descriptor: 1,
            places: places.iter().map(ToString::to_string).collect(),
        };
        let parameters = serde_json::to_value(ask).map_err(talk)?;
        let (reply, descriptors): (LendReply, _) =
            self.call("io.quire.Mounts.Lend", parameters, vec![image, user_namespace], PATIENCE)?;
        let mount = descriptors.into_iter().nth(reply.mount_file_descriptor);
        let mount = mount.ok_or_else(|| MountClientError::Talk("it sent no mount".to_owned()))?;
        match rustix::fs::fstatfs(&mount) {
            Ok(found) if found.f_type == EROFS_SUPER_MAGIC => {
                tracing::debug!(image = reply.image, copy = reply.copy, "an image was lent");
                if reply.devices > 0 {
                    tracing::info!(
                        devices = reply.devices,
                        "device nodes of the image are left out"
                    );
                }
                let of = reply.image.parse().map_err(talk)?;
                Ok(LentMount { mount: Detached::from_fd(mount), of })
            }
            _ => Err(MountClientError::Talk(
                "it sent something else than a mount of an image".to_owned(),
            )),
        }
    }

    /// Asks for the version and the limits: whether this user may ask at all.
    ///
    /// # Errors
    /// [`MountClientError`].
    pub fn describe(&mut self) -> Result<String, MountClientError> {
        let nothing = serde_json::Value::Null;
        let (reply, _): (DescribeReply, _) =
            self.call("io.quire.Mounts.Describe", nothing, Vec::new(), DESCRIBED)?;
        Ok(reply.version)
    }

    fn call<R: serde::de::DeserializeOwned + std::fmt::Debug>(
        &mut self,
        method: &str,
        parameters: serde_json::Value,
        descriptors: Vec<OwnedFd>,
        patience: impl Into<Patience>,
    ) -> Result<(R, Vec<OwnedFd>), MountClientError> {
        self.0.call(method, parameters, descriptors, patience).map_err(|error| match error {
            CallError::Refused(error) => MountClientError::Refused(error),
            CallError::Unknown(error) => MountClientError::Talk(error.to_string()),
            CallError::Talk(why) => MountClientError::Talk(why),
        })
    }
}

fn talk(error: impl std::fmt::Display) -> MountClientError {
    MountClientError::Talk(error.to_string())
}

/// The bytes of a file, in memory, where nobody can change them any more.
fn sealed_copy(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let copy = rustix::fs::memfd_create(c"quire-image", flags)?;
    let length = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or_default();
    let mut position = 0;
    while position < length {
        let left = usize::try_from(length - position).unwrap_or(usize::MAX);
        match rustix::fs::sendfile(&copy, file, Some(&mut position), left) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    rustix::fs::fcntl_add_seals(
        &copy,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(copy)
}
