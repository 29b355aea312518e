//! Client of the mount service: sends an image and gets a mount of it.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use container::root::LentMount;
use image::verity::Algorithm;
use kernel::mount::Detached;
use rustix::fs::{MemfdFlags, SealFlags};

use super::images::image_id;
use super::wire::{DescribeReply, LendAsk, LendReply, MountsError};
use crate::varlink::{CallError, Client, Patience};

/// Timeout of a reply, from the time when the service has read the request. The service works on one request of each
/// user at a time.
const ANSWER: Duration = Duration::from_secs(25);
/// Longest time in the queue of the user's connections. If the queue does not move, the service refuses the connection
/// much earlier.
const LINE: Duration = Duration::from_secs(120);
const PATIENCE: Patience = Patience { answer: ANSWER, line: LINE };
/// Timeout of `Describe`.
const DESCRIBED: Duration = Duration::from_secs(2);
/// Source: `linux/magic.h`, EROFS_SUPER_MAGIC_V1.
const EROFS_SUPER_MAGIC: i64 = 0xe0f5_e1e2;

/// Why the service mounted no image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountClientError {
    /// The service refused, with a reason.
    #[error("the mount service refused: {0}")]
    Refused(MountsError),
    /// Exchanging messages with the service failed.
    #[error("cannot reach the mount service: {0}")]
    Talk(String),
    /// The image could not be copied into a memfd.
    #[error("cannot send the image to the mount service")]
    Send(#[source] io::Error),
}

/// A connection to the mount service.
#[derive(Debug)]
pub struct MountClient(Client);

impl MountClient {
    /// Connects to the service at a socket. Returns `None` if no service listens there. Starts no thread.
    ///
    /// # Errors
    /// If the socket exists, but the connection fails.
    pub fn connect(socket: &Path) -> io::Result<Option<Self>> {
        Ok(Client::connect(socket)?.map(Self))
    }

    /// Gets a detached mount of an image for a user namespace. `places` are the paths that the mount must contain as
    /// mount points. `algorithm` is that of the image's id.
    pub fn lend(
        &mut self,
        image: BorrowedFd<'_>,
        algorithm: Algorithm,
        user_namespace: OwnedFd,
        places: &[&str],
    ) -> Result<LentMount, MountClientError> {
        let image = sealed_copy(image).map_err(MountClientError::Send)?;
        // The service sends the id with SHA-256. The copy is sealed, so another id of it is that of the same bytes.
        let hash = |algorithm| {
            let hashed = image_id(image.as_fd(), algorithm);
            hashed.map_err(|errno| MountClientError::Send(errno.into()))
        };
        let own = match algorithm {
            Algorithm::Sha256 => None,
            other => Some((hash(Algorithm::Sha256)?, hash(other)?)),
        };
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
                tracing::debug!(image = reply.image, copy = reply.copy, "received an image");
                if reply.devices > 0 {
                    tracing::info!(
                        devices = reply.devices,
                        "leaving out device nodes of the image"
                    );
                }
                let told = reply.image.parse().map_err(talk)?;
                let of = match own {
                    Some((sent, own)) if sent == told => own,
                    _ => told,
                };
                Ok(LentMount { mount: Detached::from_fd(mount), of })
            }
            _ => Err(MountClientError::Talk(
                "it sent a descriptor that is not a mount of an image".to_owned(),
            )),
        }
    }

    /// Returns the service's version. Fails if this user may not use the service.
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

/// Copies a file into a memfd and seals it, so that its bytes can no longer change.
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
