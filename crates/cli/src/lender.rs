//! Asks the mount service for images.

use std::fs::File;
use std::path::{Path, PathBuf};

use container::root::{LendImage, LentMount};
use serve::mounts::MountClient;
use store::OpenImage;

/// Asks the service at a socket.
#[derive(Debug)]
pub(crate) struct Lender(PathBuf);

impl Lender {
    pub(crate) fn at(socket: &Path) -> Self {
        Self(socket.to_owned())
    }
}

impl LendImage for Lender {
    fn lend(
        &self,
        image: &OpenImage,
        places: &[&str],
    ) -> Result<Option<LentMount>, Box<dyn std::error::Error + Send + Sync>> {
        let Some(mut client) = MountClient::connect(&self.0)? else { return Ok(None) };
        let user_namespace = File::open("/proc/self/ns/user")?;
        Ok(Some(client.lend(image.image.fd(), user_namespace.into(), places)?))
    }
}

/// Whether this user may ask the service, in a word for people. `None` if it is not there.
pub(crate) fn describe(socket: &Path) -> Option<Result<(), String>> {
    match MountClient::connect(socket) {
        Ok(None) => None,
        Ok(Some(mut client)) => Some(client.describe().map(drop).map_err(|it| it.to_string())),
        Err(error) => Some(Err(format!("{}: {error}", socket.display()))),
    }
}
