//! Gets mounts of images for containers from the mount service.

use std::fs::File;
use std::path::{Path, PathBuf};

use container::root::{LendImage, LentMount};
use store::OpenImage;

use super::client::MountClient;

/// A mount service at a socket. Each image uses a new connection.
#[derive(Debug)]
pub struct MountLender(PathBuf);

impl MountLender {
    /// Creates a lender for the service at this path, which need not run.
    #[must_use]
    pub fn at(socket: &Path) -> Self {
        Self(socket.to_owned())
    }
}

impl LendImage for MountLender {
    fn lend(
        &self,
        image: &OpenImage,
        places: &[&str],
    ) -> Result<Option<LentMount>, Box<dyn std::error::Error + Send + Sync>> {
        let Some(mut client) = MountClient::connect(&self.0)? else { return Ok(None) };
        let user_namespace = File::open("/proc/self/ns/user")?;
        let algorithm = image.id.algorithm();
        Ok(Some(client.lend(image.image.fd(), algorithm, user_namespace.into(), places)?))
    }
}

/// Asks the service whether this user may use it. Returns `None` if the service does not run. The error is a sentence
/// for users.
#[must_use]
pub fn access_to_mounts(socket: &Path) -> Option<Result<(), String>> {
    match MountClient::connect(socket) {
        Ok(None) => None,
        Ok(Some(mut client)) => Some(client.describe().map(drop).map_err(|it| it.to_string())),
        Err(error) => Some(Err(format!("{}: {error}", socket.display()))),
    }
}
