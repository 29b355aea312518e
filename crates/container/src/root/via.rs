//! How an image gets into a user namespace, in which the kernel reads none.

use image::verity::ImageId;
use kernel::mount::Detached;
use store::OpenImage;

use crate::root::trust::TrustedImage;

/// How an image gets into a user namespace, where the kernel reads none.
#[derive(Debug, Clone, Copy)]
pub enum Via<'a> {
    /// As suits the image and the kernel: lent by a service if there is one, or by a tree if it has few files and the kernel
    /// can lead an overlay to objects, and by a server if there is one. If there is no room for a tree, by the server, too.
    Auto {
        /// The service.
        lender: Option<&'a dyn LendImage>,
        /// The server.
        server: Option<&'a dyn ServeImage>,
    },
    /// Lent by a service.
    Service(&'a dyn LendImage),
    /// By a tree.
    Tree,
    /// By a server.
    Fuse(&'a dyn ServeImage),
}

/// Asks a service for mounts of images.
pub trait LendImage: std::fmt::Debug {
    /// A mount of the image's names and attributes, attached nowhere, that leads an overlay with `userxattr` to objects.
    /// `places` are files, and directories with a slash at the end, that are to be there. `None` if there is no service.
    ///
    /// # Errors
    /// Why it lends none.
    fn lend(&self, image: &OpenImage, places: &[&str]) -> Result<Option<LentMount>, AnyError>;
}

/// A mount that is lent.
#[derive(Debug)]
pub struct LentMount {
    /// The mount.
    pub mount: Detached,
    /// The digest of the bytes that it was made of.
    pub of: ImageId,
}

pub(super) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Serves images by FUSE.
pub trait ServeImage: std::fmt::Debug {
    /// Mounts the files of an image, attached nowhere. They are served as long as the mount lives.
    ///
    /// # Errors
    /// Why it cannot be.
    fn serve(
        &self,
        image: &TrustedImage,
        name: &str,
        with_xattrs: WithXattrs,
        above: Above,
    ) -> Result<ServedImage, AnyError>;
}

/// An image that is served.
#[derive(Debug)]
pub struct ServedImage {
    /// Its files.
    pub mount: Detached,
    /// Those that are not there: a layer below, with their directories.
    pub apart: Option<Detached>,
}

/// What is stacked on a served image whose files are all in one layer. An overlay takes xattrs with its own prefix for its
/// marks, and removes the escape from those that are escaped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Above {
    /// An overlay: such xattrs of the image are escaped.
    Overlay,
    /// Nothing: they are shown as they are.
    Nothing,
}

/// Where the files of a served image are that have xattrs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithXattrs {
    /// With all others.
    Served,
    /// If they are few, in a file system of their own. The kernel asks the server for no xattrs then.
    Apart,
}
