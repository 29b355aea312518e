//! Disk space that imports and copies leave free for other programs.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum number of bytes written between two checks.
const STEP: u64 = 32 << 20;

/// Minimum disk use of a file, in bytes: one block.
const BLOCK: u64 = 4096;

/// Bytes that stay free at most; on smaller disks 1 % of the disk.
const LEFT_MAX: u64 = 64 << 20;

/// Inodes that stay free at most; on smaller disks 1 % of them.
const LEFT_FILES_MAX: u64 = LEFT_MAX / BLOCK;

/// Number of failed checks, one millisecond apart, before an import fails. During writeback, ext4 briefly counts
/// blocks both as reserved and as allocated, for up to an extent of 128 MiB.
const LOOKS: u32 = 8;

/// Checks a file system's free space and inodes before an import or a copy writes its first byte, and at least every
/// 32 MiB. So an import of an image that is larger than the free space fails before the disk is full for other programs.
#[derive(Debug, Clone)]
pub struct DiskRoom(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Any file or directory on the file system.
    place: OwnedFd,
    /// Bytes that may be written before the next check.
    left: AtomicU64,
}

/// Too little is free.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Tight {
    #[error("writing {bytes} bytes would leave less than {kept} bytes free: {free} bytes are free")]
    Bytes { bytes: u64, free: u64, kept: u64 },
    #[error("another file would leave less than {kept} inodes free: {free} inodes are free")]
    Files { free: u64, kept: u64 },
}

impl DiskRoom {
    /// Returns the room of the file system that has this file or directory.
    ///
    /// # Errors
    /// If the descriptor cannot be duplicated.
    pub fn from_fd(place: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self(Arc::new(Inner { place: place.try_clone_to_owned()?, left: AtomicU64::new(0) })))
    }

    /// Reserves space for `bytes` bytes of a file that the caller is about to write, or for a file without data.
    ///
    /// # Errors
    /// [`StorageFull`](io::ErrorKind::StorageFull) if too little space would stay free.
    pub fn take(&self, bytes: u64) -> io::Result<()> {
        let Inner { place, left } = &*self.0;
        let bytes = bytes.max(BLOCK);
        let take = |left: u64| left.checked_sub(bytes);
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
            return Ok(());
        }
        let mut looks = 1;
        let room = loop {
            match look(place.as_fd(), bytes)? {
                Ok(room) => break room,
                Err(_) if looks < LOOKS => std::thread::sleep(Duration::from_millis(1)),
                Err(tight) => return Err(io::Error::new(io::ErrorKind::StorageFull, tight)),
            }
            looks += 1;
        };
        // Other programs write as well, so the next check comes sooner if less space is free.
        left.store(STEP.min(room / 8), Ordering::Relaxed);
        Ok(())
    }
}

/// Returns how many bytes may be written after `bytes`, according to the file system's free space.
fn look(place: BorrowedFd<'_>, bytes: u64) -> io::Result<Result<u64, Tight>> {
    let found = rustix::fs::fstatvfs(place)?;
    // The file system does not report its size.
    if found.f_blocks == 0 {
        return Ok(Ok(u64::MAX));
    }
    let [all, free] = [found.f_blocks, found.f_bavail].map(|it| it.saturating_mul(found.f_frsize));
    let files = check_files(found.f_files, found.f_favail);
    Ok(check(all, free, bytes).and_then(|room| Ok(room.min(files?.saturating_mul(BLOCK)))))
}

/// Returns how many bytes may be written after `bytes`.
fn check(all: u64, free: u64, bytes: u64) -> Result<u64, Tight> {
    let kept = (all / 100).min(LEFT_MAX);
    let left = free.checked_sub(kept).and_then(|it| it.checked_sub(bytes));
    left.ok_or(Tight::Bytes { bytes, free, kept })
}

/// Returns how many files may be made after one more.
fn check_files(all: u64, free: u64) -> Result<u64, Tight> {
    // Some file systems report no number of inodes, and some report only a total. If there is really none left, the
    // kernel refuses the next file.
    if all == 0 || free == 0 {
        return Ok(u64::MAX);
    }
    let kept = (all / 100).min(LEFT_FILES_MAX);
    let left = free.checked_sub(kept).and_then(|it| it.checked_sub(1));
    left.ok_or(Tight::Files { free, kept })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_hundredth_is_for_others() {
        const GIB: u64 = 1 << 30;
        let kept = GIB / 100;
        assert_eq!(check(GIB, kept + 5000, 5000), Ok(0));
        assert_eq!(
            check(GIB, kept + 4999, 5000),
            Err(Tight::Bytes { bytes: 5000, free: kept + 4999, kept })
        );
        assert_eq!(check(GIB, 0, 0), Err(Tight::Bytes { bytes: 0, free: 0, kept }));
        let text = check(100_000, 5000, 4096).unwrap_err().to_string();
        assert_eq!(
            text,
            "writing 4096 bytes would leave less than 1000 bytes free: 5000 bytes are free"
        );
        // The reserve of large disks is limited to `LEFT_MAX`.
        assert_eq!(check(1000 * GIB, 66 << 20, 1 << 20), Ok(1 << 20));
        assert!(check(1000 * GIB, 64 << 20, 1).is_err());
        assert_eq!(check(0, 0, 0), Ok(0));
    }

    #[test]
    fn the_last_inodes_are_for_others() {
        assert_eq!(check_files(1000, 11), Ok(0));
        assert_eq!(check_files(1000, 10), Err(Tight::Files { free: 10, kept: 10 }));
        assert_eq!(check_files(1 << 40, (1 << 14) + 2), Ok(1));
        assert_eq!(check_files(50, 1), Ok(0));
        // btrfs has no fixed number.
        assert_eq!(check_files(0, 0), Ok(u64::MAX));
        assert_eq!(check_files(1000, 0), Ok(u64::MAX));
    }

    #[test]
    fn many_small_files_count_by_their_blocks() {
        let file = tempfile::tempfile().unwrap();
        let room = DiskRoom::from_fd(file.as_fd()).unwrap();
        room.take(1).unwrap();
        assert_eq!(room.0.left.load(Ordering::Relaxed), STEP);
        for _ in 0..10 {
            room.take(1).unwrap();
        }
        assert_eq!(room.0.left.load(Ordering::Relaxed), STEP - 10 * BLOCK);
    }
}
