//! Images that a service has written for users, and lends to their user namespaces.

use std::os::fd::BorrowedFd;

use kernel::mount::{Acl, Attributes, Detached, ErofsOptions, Io, MountAttrFlags, MountError};

/// A mount of an image that this program has written, attached nowhere. It has no data: files of which it has none lead an
/// overlay with `userxattr` to objects.
#[derive(Debug)]
pub struct LentImage(Detached);

impl LentImage {
    /// Mounts a file. Nobody else can write to it, and Quire's own writer made every byte of it.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn mount(file: BorrowedFd<'_>, acl: Acl) -> Result<Self, MountError> {
        let options = ErofsOptions { io: Io::Buffered, acl, ..ErofsOptions::default() };
        Ok(Self(kernel::mount::erofs(file, &options)?.mount))
    }

    /// One more mount of it, for the root of a user namespace, which belongs to `owner`, a user and a group: its files' owners are those of the namespace, and that it is read-only,
    /// and has neither devices, programs nor set-user-id, cannot be changed there. (An overlay on it has flags of its own.)
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
