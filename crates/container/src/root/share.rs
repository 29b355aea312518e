//! Shares an EROFS superblock among all containers of an image. A process that has a mount of the superblock records
//! the mount's descriptor in the container's folder, and the next process copies that descriptor. The superblock is
//! freed when no process holds it any more.

use std::os::fd::AsFd as _;
use std::path::Path;

use kernel::mount::{Backing, Detached, Reach, bind};
use rustix::fs::{Mode, OFlags};

use crate::folder::SUPERBLOCK;

/// Source: `linux/magic.h`, EROFS_SUPER_MAGIC_V1.
const EROFS_SUPER_MAGIC: i64 = 0xe0f5_e1e2;

/// Source: `linux/magic.h`, TMPFS_MAGIC.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// A detached mount of an image.
#[derive(Debug)]
pub struct Superblock {
    pub mount: Detached,
    /// How the kernel reads the image.
    pub backing: Backing,
    /// Digest of the files and options of the mount; `None` if unknown.
    pub(crate) identity: Option<String>,
}

impl Superblock {
    /// Offers the mount to other processes, as long as this process has it open.
    ///
    /// # Errors
    /// An error of the disk; then the mount is not shared.
    pub fn offer(&self, folder: &Path) -> std::io::Result<()> {
        let backing = match self.backing {
            Backing::File => "file",
            Backing::Loop => "loop",
        };
        let identity = self.identity.as_deref().unwrap_or_default();
        crate::fd_handoff::offer(&folder.join(SUPERBLOCK), self.mount.as_fd(), &[backing, identity])
    }

    /// Whether the mount is a tree in memory with many files, which takes longer to free than a process takes to
    /// start.
    pub(crate) fn takes_long_to_free(&self) -> bool {
        let mount = self.mount.as_fd();
        rustix::fs::fstatfs(mount).is_ok_and(|it| it.f_type == TMPFS_MAGIC)
            && crate::root::upper_dir::takes_long_to_free(mount)
    }

    /// Returns another mount of the superblock, for a holder without a folder. `None` if the kernel cannot clone it
    /// (before Linux 6.15).
    #[must_use]
    pub fn again(&self) -> Option<Self> {
        let mount = self.mount.clone_detached().ok()?;
        Some(Self { mount, backing: self.backing, identity: self.identity.clone() })
    }

    /// Returns the identity, if the kernel reads the image from its file. [`Superblock::attached`] accepts it for the
    /// same mount.
    #[must_use]
    pub fn file_identity(&self) -> Option<&str> {
        match self.backing {
            Backing::File => self.identity.as_deref(),
            Backing::Loop => None,
        }
    }

    /// Opens a mount that another process has attached at a path and may have left. `None` if no image is mounted at
    /// this path.
    #[must_use]
    pub fn attached(path: &Path, identity: String) -> Option<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let mount = bind(opened.as_fd(), Reach::One).ok()?;
        let is_image = rustix::fs::fstatfs(&mount).ok()?.f_type == EROFS_SUPER_MAGIC;
        is_image.then_some(Self { mount, backing: Backing::File, identity: Some(identity) })
    }

    /// Whether this superblock has the given identity, so that a new mount would show the same files with the same
    /// options. Comparing the image's name is not sufficient, because damaged files are replaced under the same name.
    #[must_use]
    pub(crate) fn is_of(&self, identity: Option<&str>) -> bool {
        self.identity.is_some() && self.identity.as_deref() == identity
    }

    /// Takes the mount that a container of the same image offers. `None` if there is no offer, if its process has
    /// exited, or if the kernel cannot clone the mount (before Linux 6.15).
    #[must_use]
    pub fn take(folder: &Path) -> Option<Self> {
        let (taken, words) = crate::fd_handoff::take(&folder.join(SUPERBLOCK))?;
        let backing = match words.first().map(String::as_str) {
            Some("file") => Backing::File,
            Some("loop") => Backing::Loop,
            _ => return None,
        };
        // The process may be ending, and may have reused the descriptor's number.
        if rustix::fs::fstatfs(&taken).ok()?.f_type != EROFS_SUPER_MAGIC {
            return None;
        }
        let mount = Detached::from_fd(taken).clone_detached().ok()?;
        let identity = words.into_iter().nth(1);
        Some(Self { mount, backing, identity })
    }
}
