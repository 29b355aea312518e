//! Mounts images by FUSE. The servers are background processes.

use std::os::fd::AsFd as _;
use std::path::Path;

use container::bundle::userns::OwnIds;
use container::root::{
    Above, LendImage, LentMount, ServeImage, ServedImage, TrustedImage, WithXattrs,
};
use kernel::fuse::{FuseConnection, FuseError};
use kernel::mount::{Detached, FuseAccess, FuseOptions};
use kernel::process::{UserNamespace, Who};
use rustix::fs::FileType;
use store::OpenImage;

use super::fusermount;
use super::open::{StoreTree, open};
use super::start::{Mounts, start};
use super::tree::FuseView;
use super::xattr_layer::set_apart;

/// Starts FUSE servers as background processes.
#[derive(Debug)]
pub struct FuseServer(Who);

impl FuseServer {
    /// Serves images to this user.
    #[must_use]
    pub const fn new(who: Who) -> Self {
        Self(who)
    }
}

/// This user cannot open `/dev/fuse`.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error(
    "/dev/fuse does not exist, or is not open to users: load the module `fuse`, or give the device mode 666"
)]
pub struct NoFuseDevice;

/// Checks that this user can open `/dev/fuse`.
///
/// # Errors
/// [`NoFuseDevice`], with advice.
pub fn check_device() -> Result<(), NoFuseDevice> {
    FuseConnection::open().map(drop).or(Err(NoFuseDevice))
}

/// Why an image was not mounted.
type Failed = Box<dyn std::error::Error + Send + Sync>;

impl ServeImage for FuseServer {
    fn serve(
        &self,
        image: &TrustedImage,
        name: &str,
        with_xattrs: WithXattrs,
        above: Above,
    ) -> Result<ServedImage, Failed> {
        let connection = connect()?;
        let ids = ids(self.0)?;
        let mut tree = open(image.image(), FuseView::Namespace, ids)?;
        let apart = match with_xattrs {
            WithXattrs::Served => None,
            WithXattrs::Apart => set_apart(&mut tree, name).unwrap_or_else(|error| {
                tracing::info!(
                    error = &*Failed::from(error),
                    "serving all files with their xattrs"
                );
                None
            }),
        };
        if apart.is_none() && above == Above::Nothing {
            tree.set_view(FuseView::Alone);
        }
        Ok(ServedImage { mount: self.mount_tree(&connection, &tree, name)?, apart })
    }
}

/// Lends mounts with the names and attributes of an image, whose files lead an overlay to objects. A server answers
/// their requests.
impl LendImage for FuseServer {
    fn lend(&self, image: &OpenImage, places: &[&str]) -> Result<Option<LentMount>, Failed> {
        let connection = connect()?;
        let mut tree = open(image, FuseView::Objects, ids(self.0)?)?;
        tree.add_places(places)?;
        let mount = self.mount_tree(&connection, &tree, LENT)?;
        Ok(Some(LentMount { mount, of: image.id }))
    }
}

/// Opens a connection. This is the step that fails on most machines on which FUSE does not work, so it is the first.
fn connect() -> Result<FuseConnection, Failed> {
    FuseConnection::open().map_err(|error| match error {
        FuseError::Open(errno) => format!("{NoFuseDevice} ({errno})").into(),
        error => Failed::from(error),
    })
}

/// Source of a mount that is part of an overlay, and that no list of mounts shows.
const LENT: &str = "quire-names";

/// Returns the ids that the user namespace maps, or `None` in the initial namespace, which has all.
fn ids(who: Who) -> std::io::Result<Option<OwnIds>> {
    match who.namespace {
        UserNamespace::Initial => Ok(None),
        UserNamespace::Other => OwnIds::read().map(Some),
    }
}

impl FuseServer {
    /// Mounts a tree, detached, and starts its server.
    fn mount_tree(
        &self,
        connection: &FuseConnection,
        tree: &StoreTree,
        name: &str,
    ) -> Result<Detached, Failed> {
        let options = FuseOptions {
            root: FileType::Directory,
            owner: (self.0.user, self.0.group),
            access: FuseAccess::Everybody,
            name,
        };
        let mount = kernel::mount::fuse(connection.as_fd(), &options)?;
        start(connection, tree, Mounts::Few)?;
        Ok(mount)
    }

    /// Verifies an image and mounts it detached, for root. `source` is the source in lists of mounts.
    ///
    /// # Errors
    /// If the image is damaged, or the kernel refuses.
    pub fn mount(&self, image: &TrustedImage, source: &str) -> Result<Detached, Failed> {
        image.check()?;
        Ok(self.serve(image, source, WithXattrs::Served, Above::Nothing)?.mount)
    }

    /// Mounts an image on a directory of the host, for its user only. `program` is the path of `fusermount3`, which
    /// mounts and unmounts the file system.
    ///
    /// # Errors
    /// If the image cannot be read, or `fusermount3` fails.
    pub fn mount_at(
        &self,
        image: &TrustedImage,
        name: &str,
        program: &Path,
        directory: &Path,
        executable: fusermount::Executable,
    ) -> Result<(), Failed> {
        let tree = open(image.image(), FuseView::Owner, ids(self.0)?)?;
        let connection = fusermount::mount(program, directory, name, executable)?;
        let started = start(&connection, &tree, Mounts::Same);
        if started.is_err() {
            // The error of `start` matters more than that of the unmount.
            drop(fusermount::unmount(program, directory, true));
        }
        started?;
        Ok(())
    }
}
