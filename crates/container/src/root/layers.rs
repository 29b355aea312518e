//! The parts from which a root is assembled.

use std::os::fd::BorrowedFd;

use kernel::mount::{Acl, Backing, Detached, XattrNamespace};
use store::Presence;

/// The files to mount: descriptors that the store has checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layers<'a> {
    /// Name in messages, and source of an overlay in `mountinfo`.
    pub(crate) name: &'a str,
    /// Source of an EROFS in `mountinfo`; `None` for the path that the kernel opens.
    pub(crate) source: Option<&'a str>,
    /// The EROFS image, open for reading.
    pub(crate) image: BorrowedFd<'a>,
    /// Location of file data that is not in the image.
    pub(crate) data: ImageData<'a>,
    /// Whether any inode of the image has a POSIX ACL.
    pub(crate) acl: Acl,
    /// Domain of images with devices. If the kernel can, it keeps the pages of equal files of a domain in memory only
    /// once. All images of a domain must be equally trusted. `None` means that pages are not shared.
    pub(crate) domain: Option<&'a str>,
    /// Source from which the kernel reads an image with devices. `O_DIRECT` reads of its files work only with
    /// [`Backing::Loop`], which shares no pages. For other images, overlayfs reads the objects from the disk.
    pub(crate) backing: Backing,
    /// Whether all bytes of the devices are downloaded.
    pub(crate) presence: Presence,
    /// Read-ahead of the image's mount, in KiB; `None` for the usual one.
    pub(crate) read_ahead: Option<u32>,
    /// Files of the image that its mount does not show, with their directories: a layer below the mount.
    pub(crate) apart: Option<&'a Detached>,
    /// Namespace of the xattrs in which the overlay keeps its marks. For root, the marks are in the image; in a user
    /// namespace, they are in a [tree](crate::root::tree) that was made from the image.
    pub(crate) records: XattrNamespace,
}

impl Layers<'_> {
    /// Returns a digest of everything that a mount of the image depends on: its files, by inode, and the mount
    /// options. `None` if unknown. Inodes are valid identifiers as long as the files are open or mounted.
    #[must_use]
    pub(crate) fn identity(&self) -> Option<String> {
        let (devices, domain, backing): (&[_], _, _) = match self.data {
            ImageData::Objects(_) => (&[], None, Backing::File),
            ImageData::Devices(devices) => (devices, self.domain, self.backing),
        };
        if self.presence == Presence::Partial {
            // A mount of a lazy image depends on the service that fills its devices, so it is not shared: the image is
            // mounted again with the current service.
            return None;
        }
        let mut text = format!("{:?} {domain:?} {backing:?}", self.acl);
        for file in std::iter::once(&self.image).chain(devices) {
            let stat = rustix::fs::fstat(file).ok()?;
            text += &format!(" {}:{}", stat.st_dev, stat.st_ino);
        }
        Some(store::Digest::sha256(text.as_bytes()).to_string())
    }
}

/// Location of the data of an image's files.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ImageData<'a> {
    /// In directories with objects, which overlayfs searches in this order.
    Objects(&'a [BorrowedFd<'a>]),
    /// The data is in these devices, which are open for reading. Their order, number and lengths match the image's
    /// device table. EROFS reads the devices itself, so a read-only root needs no overlay.
    Devices(&'a [BorrowedFd<'a>]),
}

impl<'a> Layers<'a> {
    pub(super) const fn objects(&self) -> &'a [BorrowedFd<'a>] {
        match self.data {
            ImageData::Objects(directories) => directories,
            ImageData::Devices(_) => &[],
        }
    }
}

/// How reads are verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checked {
    /// By the kernel at every read, with fs-verity on the image and on the objects.
    ByKernel,
    /// Only at the import.
    AtImport,
}
