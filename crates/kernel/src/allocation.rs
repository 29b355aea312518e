//! Allocates, frees and locates the blocks of a file.
#![expect(unsafe_code, reason = "rustix has no FS_IOC_FIEMAP")]

use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::fs::{FallocateFlags, IFlags};
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Updater};

/// Allocates blocks for a range of a file, so that a later write to it cannot fail with `ENOSPC`. Existing data is
/// kept. A range beyond the end extends the file.
///
/// # Errors
/// `ENOSPC`; `EOPNOTSUPP` if the file system does not support this.
pub fn allocate(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<(), Errno> {
    fallocate(file, FallocateFlags::empty(), range)
}

/// Frees the blocks of a range of a file. The range then reads as zeros, and the file keeps its length.
///
/// # Errors
/// `EOPNOTSUPP` if the file system does not support this.
pub fn release(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<(), Errno> {
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, range)
}

fn fallocate(file: BorrowedFd<'_>, flags: FallocateFlags, range: &Range<u64>) -> Result<(), Errno> {
    let length = range.end.saturating_sub(range.start);
    if length == 0 {
        return Ok(());
    }
    loop {
        match rustix::fs::fallocate(file, flags, range.start, length) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Makes writes to an empty file overwrite its blocks in place, on file systems that copy on write by default (btrfs).
/// Without this, blocks from [`allocate`] would be used only by the first write on btrfs.
///
/// # Errors
/// An error of the kernel. On other file systems, this has no effect and is not an error.
pub fn overwrite_in_place(file: BorrowedFd<'_>) -> Result<(), Errno> {
    // Source: Linux include/uapi/linux/magic.h, BTRFS_SUPER_MAGIC.
    if rustix::fs::fstatfs(file)?.f_type != 0x9123_683e {
        return Ok(());
    }
    let flags = rustix::fs::ioctl_getflags(file)?;
    rustix::fs::ioctl_setflags(file, flags | IFlags::NOCOW)
}

/// A run of contiguous blocks of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the file, in bytes.
    pub logical: u64,
    /// Offset on the disk of the file's file system, in bytes.
    pub physical: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Returns the allocated extents, written or not, in a range of a file, in order and cut off at the range's ends.
/// Returns at most as many as one ioctl reports (64); an empty result means that the range has none.
///
/// # Errors
/// An error of the kernel; `EOPNOTSUPP` if the file system does not support this.
pub fn extents(file: BorrowedFd<'_>, range: &Range<u64>) -> Result<Vec<Extent>, Errno> {
    let mut map = Fiemap {
        start: range.start,
        length: range.end.saturating_sub(range.start),
        flags: 0,
        mapped: 0,
        count: EXTENTS,
        reserved: 0,
        extents: [RawExtent::ZERO; EXTENTS as usize],
    };
    // SAFETY: FS_IOC_FIEMAP takes the head of this struct and writes at most `count` extents behind it, for which
    // there is space.
    let fiemap = unsafe { Updater::<FIEMAP, Fiemap>::new(&mut map) };
    // SAFETY: as above; the argument lives through the call.
    unsafe { rustix::ioctl::ioctl(file, fiemap) }?;
    let found = map.extents.iter().take(map.mapped as usize).filter_map(|it| {
        let from = it.logical.max(range.start);
        let to = it.logical.saturating_add(it.length).min(range.end);
        (from < to).then(|| Extent {
            logical: from,
            physical: it.physical.saturating_add(from - it.logical),
            length: to - from,
        })
    });
    Ok(found.collect())
}

/// Number of extents that one ioctl returns at most.
const EXTENTS: u32 = 64;

// Source: Linux include/uapi/linux/fiemap.h and fs.h: `_IOWR('f', 11, struct fiemap)`, whose size excludes the
// extents.
const FIEMAP: Opcode = rustix::ioctl::opcode::read_write::<[u64; 4]>(b'f', 11);

/// `struct fiemap` with its extents.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [RawExtent; EXTENTS as usize],
}
const _: () = assert!(size_of::<Fiemap>() == 32 + EXTENTS as usize * 56);

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    reserved_more: [u32; 3],
}
const _: () = assert!(size_of::<RawExtent>() == 56);

impl RawExtent {
    const ZERO: Self = Self {
        logical: 0,
        physical: 0,
        length: 0,
        reserved: [0; 2],
        flags: 0,
        reserved_more: [0; 3],
    };
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn blocks_come_and_go() {
        let file = tempfile::tempfile().unwrap();
        let blocks = || file.metadata().unwrap().blocks() * 512;
        allocate(file.as_fd(), &(MIB..3 * MIB)).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 3 * MIB);
        assert!((2 * MIB..3 * MIB).contains(&blocks()), "{}", blocks());
        let found = match extents(file.as_fd(), &(0..3 * MIB)) {
            Err(Errno::OPNOTSUPP | Errno::NOTTY) => {
                writeln!(std::io::stderr(), "SKIPPED: no FIEMAP on this file system").unwrap();
                return;
            }
            found => found.unwrap(),
        };
        let total: u64 = found.iter().map(|it| it.length).sum();
        assert_eq!((found[0].logical, total), (MIB, 2 * MIB));
        let cut = extents(file.as_fd(), &(MIB + 4096..MIB + 8192)).unwrap();
        let expect =
            Extent { logical: MIB + 4096, physical: found[0].physical + 4096, length: 4096 };
        assert_eq!(cut, [expect]);
        release(file.as_fd(), &(MIB..2 * MIB)).unwrap();
        assert_eq!(extents(file.as_fd(), &(0..2 * MIB)).unwrap(), []);
        assert!(blocks() < 2 * MIB, "{}", blocks());
        allocate(file.as_fd(), &(5..5)).unwrap();
        overwrite_in_place(File::open("/").unwrap().as_fd()).unwrap();
    }
}
