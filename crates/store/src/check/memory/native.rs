//! The files of a native image, and their pages in the page cache of a mount.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};

use image::erofs::read::{ByteOffset, Cached, DeviceSlot, FileType, Image, RunPlace};
use image::verity::DeviceId;
use kernel::Errno;
use kernel::cache;
use kernel::process::Who;
use rustix::fs::{AtFlags, FileType as Kind, Mode, OFlags, ResolveFlags};

use super::DataIdentity;
use crate::disk::length;
use crate::shelf::images::{ContentsError, ImageFile};

/// Files of an image that EROFS may have in memory.
#[derive(Debug)]
pub(super) struct Native {
    pub(super) inodes: u64,
    pub(super) root: u64,
    /// The files, depth first, so that directories precede their entries.
    files: Vec<Inode>,
    /// Device, range in bytes, and index in `files` of each part of a file.
    parts: Vec<(DeviceId, Range<u64>, usize)>,
}

/// A file or directory that is not empty.
#[derive(Debug)]
struct Inode {
    /// Path below the root.
    path: Box<[u8]>,
    nid: u64,
    size: u64,
    is_directory: bool,
    data: DataIdentity,
}

/// Pages of a mount that are in memory.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Data, number of pages, and whether the pages belong to a domain.
    pub(super) found: Vec<(DataIdentity, u64, bool)>,
    pub(super) unseen: u64,
}

impl Native {
    /// Reads the image with the number `at`.
    pub(super) fn read(at: usize, file: &ImageFile) -> Result<Self, ContentsError> {
        let image = Image::open(Cached::new(file))?;
        // Refuses images whose few bytes describe so many ranges that reading them would take forever.
        image.device_ranges(|_| {})?;
        let devices: Vec<_> = image.devices().iter().map(DeviceSlot::device_id).collect();
        let superblock = image.superblock();
        let mut native = Self {
            inodes: superblock.inodes,
            root: superblock.root.0,
            files: Vec::new(),
            parts: Vec::new(),
        };
        let mut walk = image.walk();
        while let Some(step) = walk.next()? {
            let inode = step.inode;
            let is_directory = inode.file_type() == FileType::Directory;
            let is_file = inode.file_type() == FileType::Regular && !inode.is_compressed();
            if !step.is_new || inode.size() == 0 || !(is_file || is_directory) {
                continue;
            }
            let nid = inode.nid().0;
            let mut data = DataIdentity::Only(at, nid);
            if is_file {
                data = image.fingerprint(&inode)?.map_or(data, DataIdentity::Content);
                let mut offset = 0_u64;
                while let Some(extent) = image.map(&inode, ByteOffset(offset))? {
                    offset = offset.saturating_add(extent.len);
                    if let RunPlace::Data(device, start) = extent.place
                        && let Some(Some(device)) = device.slot().and_then(|slot| devices.get(slot))
                    {
                        let range = start.0..start.0.saturating_add(extent.len);
                        native.parts.push((*device, range, native.files.len()));
                    }
                }
            }
            let path = step.path.strip_prefix(b"/").unwrap_or(step.path);
            let path = if path.is_empty() { b"." } else { path };
            let (path, size) = (path.into(), inode.size());
            native.files.push(Inode { path, nid, size, is_directory, data });
        }
        Ok(native)
    }

    /// Returns the ranges of devices that contain the image's files.
    pub(super) fn parts(&self) -> impl Iterator<Item = (DeviceId, Range<u64>, DataIdentity)> + '_ {
        self.parts
            .iter()
            .map(|(device, range, file)| (*device, range.clone(), self.files[*file].data))
    }

    /// Examines each file of a mount. Returns `None` if the mount is of another image.
    pub(super) fn look(&self, root: BorrowedFd<'_>, shares: bool, who: Who) -> Option<Look> {
        let mut cold = Vec::new();
        let look = self.look_at_each(root, shares, who, &mut cold);
        // Lookups read directories into memory. Parents are dropped from memory last, because the paths of their
        // entries lead through them.
        for inode in cold.iter().rev() {
            if let Ok(file) = inode.open(root) {
                // A failure is harmless: the pages stay in memory.
                let _dropped = cache::drop_pages(file.as_fd(), &(0..inode.size));
            }
        }
        look
    }

    /// Examines each file, and adds the directories that were not in memory to `cold`.
    fn look_at_each<'n>(
        &'n self,
        root: BorrowedFd<'_>,
        shares: bool,
        who: Who,
        cold: &mut Vec<&'n Inode>,
    ) -> Option<Look> {
        let mut look = Look::default();
        for inode in &self.files {
            let file = match inode.open(root) {
                Ok(file) => file,
                // Without permission, this user cannot find out whether it is the same image.
                Err(Errno::ACCESS | Errno::PERM) => {
                    look.unseen += 1;
                    continue;
                }
                Err(_) => return None,
            };
            let all = 0..inode.size;
            let (pages, is_shared) = match cache::resident(file.as_fd(), &all, who) {
                Ok(0) if shares && !inode.is_directory => {
                    // Pages that mounts share belong to an internal file of the kernel, which is only accessible by a
                    // mapping.
                    match cache::resident_mapped(file.as_fd(), &all, who) {
                        Ok(pages) => (pages, true),
                        Err(_) => (0, false),
                    }
                }
                Ok(pages) => (pages, false),
                Err(_) => {
                    look.unseen += 1;
                    continue;
                }
            };
            match pages {
                0 if inode.is_directory => cold.push(inode),
                0 => {}
                _ => look.found.push((inode.data, pages, is_shared)),
            }
        }
        Some(look)
    }
}

impl Inode {
    /// Opens the inode if it matches the image. Other files are not opened, because opening a device may have side
    /// effects.
    fn open(&self, root: BorrowedFd<'_>) -> Result<File, Errno> {
        let stat = rustix::fs::statat(root, &*self.path, AtFlags::SYMLINK_NOFOLLOW)?;
        let expected = if self.is_directory { Kind::Directory } else { Kind::RegularFile };
        let is_it = Kind::from_raw_mode(stat.st_mode) == expected
            && (stat.st_ino, length(&stat)) == (self.nid, self.size);
        if !is_it {
            return Err(Errno::STALE);
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let fd = rustix::fs::openat2(root, &*self.path, flags, Mode::empty(), resolve)?;
        Ok(fd.into())
    }
}
