//! Images that a service has written for users, and mounts in their user namespaces.

use std::os::fd::BorrowedFd;

use kernel::mount::{Acl, Attributes, Detached, ErofsOptions, Io, MountAttrFlags, MountError};

/// A detached mount of an image that this program has written. The image contains no file data: its files redirect an
/// overlay with `userxattr` to objects.
#[derive(Debug)]
pub struct LentImage(Detached);

impl LentImage {
    /// Mounts a file. The file must have been written by Quire's own writer, and other programs must not be able to
    /// write to it.
    pub fn mount(file: BorrowedFd<'_>, acl: Acl) -> Result<Self, MountError> {
        let options = ErofsOptions { io: Io::Buffered, acl, ..ErofsOptions::default() };
        Ok(Self(kernel::mount::erofs(file, &options)?.mount))
    }

    /// Returns another mount of the image, for the root of a user namespace, which belongs to the user and group
    /// `owner`. The owners of files are shown as ids of the namespace. The namespace cannot change that the mount is
    /// read-only, `nodev`, `noexec` and `nosuid`. (An overlay on it has its own flags.)
    ///
    /// # Errors
    /// An error of the kernel: [`MountError::Unsupported`] before Linux 6.15.
    pub fn lend(
        &self,
        user_namespace: BorrowedFd<'_>,
        owner: (u32, u32),
    ) -> Result<Detached, MountError> {
        let mount = self.0.clone_detached()?;
        let set = MountAttrFlags::MOUNT_ATTR_RDONLY
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        mount.set(&Attributes { set, idmap: Some(user_namespace), ..Attributes::default() })?;
        mount.locked_for(user_namespace, owner)
    }
}
