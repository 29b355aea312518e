//! Images by FUSE: for users who may not have the kernel read one.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use container::bundle::userns::OwnIds;
use container::root::{Above, ServeImage, ServedImage, TrustedImage, WithXattrs};
use kernel::fuse::{FuseConnection, FuseError};
use kernel::mount::{Detached, FuseAccess, FuseOptions};
use kernel::process::{UserNamespace, Who};
use rustix::fs::FileType;
use serve::fuse::{FuseView, Mounts, host, open, set_apart, start};

/// Serves images from processes that stay behind.
#[derive(Debug)]
pub(crate) struct Server(Who);

impl Server {
    pub(crate) const fn new(who: Who) -> Self {
        Self(who)
    }
}

const NO_DEVICE: &str =
    "/dev/fuse is not there, or not for users: load the module `fuse`, or give the device mode 666";

/// Whether this user may use FUSE, and if not, why.
pub(crate) fn is_there() -> Result<(), &'static str> {
    FuseConnection::open().map(drop).or(Err(NO_DEVICE))
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

impl ServeImage for Server {
    fn serve(
        &self,
        image: &TrustedImage,
        name: &str,
        with_xattrs: WithXattrs,
        above: Above,
    ) -> Result<ServedImage, Failed> {
        let ids = ids(self.0)?;
        let mut tree = open(image, FuseView::Namespace, ids)?;
        let apart = match with_xattrs {
            WithXattrs::Served => None,
            WithXattrs::Apart => set_apart(&mut tree, name).unwrap_or_else(|error| {
                tracing::info!(
                    error = &*Failed::from(error),
                    "all files are served with their xattrs"
                );
                None
            }),
        };
        if apart.is_none() && above == Above::Nothing {
            tree.set_view(FuseView::Alone);
        }
        let connection = FuseConnection::open().map_err(|error| match error {
            FuseError::Open(errno) => format!("{NO_DEVICE} ({errno})").into(),
            error => Failed::from(error),
        })?;
        let options = FuseOptions {
            root: FileType::Directory,
            owner: (self.0.user, self.0.group),
            access: FuseAccess::Everybody,
            name,
        };
        let mount = kernel::mount::fuse(connection.as_fd(), &options)?;
        start(&connection, &tree, Mounts::Few)?;
        Ok(ServedImage { mount, apart })
    }
}

/// The ids that there are, if not all.
fn ids(who: Who) -> std::io::Result<Option<OwnIds>> {
    match who.namespace {
        UserNamespace::Initial => Ok(None),
        UserNamespace::Other => OwnIds::read().map(Some),
    }
}

/// Mounts a checked image for root, attached nowhere.
pub(crate) fn mount_for_root(
    who: Who,
    image: &TrustedImage,
    source: &str,
) -> anyhow::Result<Detached> {
    image.check()?;
    let served = Server::new(who).serve(image, source, WithXattrs::Served, Above::Nothing);
    Ok(served.map_err(|it| anyhow::anyhow!(it))?.mount)
}

/// Why users cannot mount.
pub(crate) const NO_PROGRAM: &str =
    "fusermount3 is not installed, without which only root can mount (Debian: package fuse3)";

/// The program that mounts and unmounts for users.
pub(crate) fn program() -> Option<PathBuf> {
    crate::helpers::find("fusermount3")
}

/// Mounts an image on a directory of the host, for its user alone.
pub(crate) fn mount_for_user(
    who: Who,
    image: &TrustedImage,
    name: &str,
    directory: &Path,
    executable: host::Executable,
) -> anyhow::Result<()> {
    let program = program().context(NO_PROGRAM)?;
    let tree = open(image, FuseView::Owner, ids(who)?)?;
    let connection = host::mount(&program, directory, name, executable)?;
    let started = start(&connection, &tree, Mounts::Same);
    started.inspect_err(|_| drop(host::unmount(&program, directory, true)))?;
    Ok(())
}

/// Ends such a mount.
pub(crate) fn unmount_for_user(directory: &Path, lazy: bool) -> anyhow::Result<()> {
    Ok(host::unmount(&program().context(NO_PROGRAM)?, directory, lazy)?)
}
