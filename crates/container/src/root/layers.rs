//! What a root is assembled of.

use std::os::fd::BorrowedFd;

use kernel::mount::{Acl, Backing, Detached, XattrNamespace};
use store::Presence;

/// What is mounted: descriptors that the store has checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layers<'a> {
    /// Name in messages, and the source of an overlay in `mountinfo`.
    pub(crate) name: &'a str,
    /// Source of an EROFS in `mountinfo`; `None` for the path that the kernel opens.
    pub(crate) source: Option<&'a str>,
    /// The EROFS image, open for reading.
    pub(crate) image: BorrowedFd<'a>,
    /// Where the bytes of files are that are not in the image.
    pub(crate) data: Data<'a>,
    /// Whether any inode of the image has a POSIX ACL.
    pub(crate) acl: Acl,
    /// With which other images over devices the pages of equal files are in memory once, where the kernel can: all of one
    /// domain have to be trusted alike. Nobody, if there is none.
    pub(crate) domain: Option<&'a str>,
    /// What the kernel reads an image over devices from. Its files can be read with `O_DIRECT` from [`Backing::Loop`] only,
    /// and shares no pages then. Of others, overlayfs has the files of the disk.
    pub(crate) backing: Backing,
    /// Whether all bytes of the devices are there.
    pub(crate) presence: Presence,
    /// Files of the image that its mount does not show, with their directories: a layer below it.
    pub(crate) apart: Option<&'a Detached>,
    /// Where the overlay finds and keeps its records: root's are in the image, those of a user namespace in a
    /// [tree](crate::root::tree) that is made of it.
    pub(crate) records: XattrNamespace,
}

impl Layers<'_> {
    /// What a mount of the image depends on: its files, by inode, and how it is mounted. `None` when that cannot be found
    /// out. Inodes are good names as long as something has the files open or mounted.
    #[must_use]
    pub(crate) fn identity(&self) -> Option<String> {
        let (devices, domain, backing): (&[_], _, _) = match self.data {
            Data::Objects(_) => (&[], None, Backing::File),
            Data::Devices(devices) => (devices, self.domain, self.backing),
        };
        if self.presence == Presence::Partial {
            // What is mounted of a lazy image shows bytes that are not here yet. It is mounted anew, by a service that is there.
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

/// Where the bytes of an image's files are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Data<'a> {
    /// In directories that hold objects, searched in this order: overlayfs goes there.
    Objects(&'a [BorrowedFd<'a>]),
    /// In devices, open for reading, in the order of the image's device table; their number and lengths were compared
    /// with what it says. EROFS reads them itself, so there is no overlay where nothing is written.
    Devices(&'a [BorrowedFd<'a>]),
}

impl<'a> Layers<'a> {
    pub(super) const fn objects(&self) -> &'a [BorrowedFd<'a>] {
        match self.data {
            Data::Objects(directories) => directories,
            Data::Devices(_) => &[],
        }
    }
}

/// Who checks what is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checked {
    /// The kernel, at every read: fs-verity on the image and on the objects.
    ByKernel,
    /// No reads are verified after the import.
    AtImport,
}
