//! How an image gets into a user namespace, in which the kernel reads none.

use image::verity::ImageId;
use kernel::mount::Detached;
use store::OpenImage;

use crate::root::trust::TrustedImage;

/// How an image is made available in a user namespace, where the kernel mounts no EROFS.
#[derive(Debug, Clone, Copy)]
pub enum Via<'a> {
    /// The best way for the image and the kernel. This is a service, if one runs; or FUSE for names and objects for
    /// data, if the kernel can redirect an overlay to objects; or a FUSE server for everything; or a tree, if FUSE does
    /// not work.
    Auto {
        lender: Option<&'a dyn LendImage>,
        /// Serves names by FUSE.
        names: Option<&'a dyn LendImage>,
        /// The FUSE server for everything.
        server: Option<&'a dyn ServeImage>,
    },
    /// As a mount from a service.
    Service(&'a dyn LendImage),
    /// Names and attributes by a FUSE server, data from the objects.
    FuseObjects(&'a dyn LendImage),
    /// As a tree in memory.
    Tree,
    /// By a FUSE server.
    Fuse(&'a dyn ServeImage),
}

/// Provides mounts of images whose files redirect an overlay to objects.
pub trait LendImage: std::fmt::Debug {
    /// Returns a detached mount with the image's names and attributes, whose files redirect an overlay with
    /// `userxattr` to objects. `places` are the paths of files, and of directories with a slash at the end, that must
    /// exist in the mount. `None` if there is no service.
    ///
    /// # Errors
    /// The reason why the service returns no mount.
    fn lend(&self, image: &OpenImage, places: &[&str]) -> Result<Option<LentMount>, AnyError>;
}

/// A mount from a service.
#[derive(Debug)]
pub struct LentMount {
    pub mount: Detached,
    /// Digest of the image from which the mount was made.
    pub of: ImageId,
}

pub(super) type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// A FUSE server for images.
pub trait ServeImage: std::fmt::Debug {
    /// Mounts the files of an image, detached. They are served as long as the mount exists.
    fn serve(
        &self,
        image: &TrustedImage,
        name: &str,
        with_xattrs: WithXattrs,
        above: Above,
    ) -> Result<ServedImage, AnyError>;
}

/// An image that is served by FUSE.
#[derive(Debug)]
pub struct ServedImage {
    pub mount: Detached,
    /// Files that the mount lacks, with their directories. They become a layer below the mount.
    pub apart: Option<Detached>,
}

/// Mount over a served image with all files in one layer. An overlay interprets xattrs with its own prefix as marks,
/// and removes the escape prefix from escaped xattrs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Above {
    /// An overlay, for which such xattrs of the image are escaped.
    Overlay,
    /// No overlay, so xattrs are shown unchanged.
    Nothing,
}

/// Where the files with xattrs are in a served image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithXattrs {
    /// With all other files.
    Served,
    /// In a separate file system, if they are few. Then the kernel does not send the server requests for xattrs.
    Apart,
}
