//! Versions of files: detects that a file may have changed since it was read.

use std::ffi::CStr;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, Statx, StatxFlags, statx};
use rustix::io::Errno;

/// Identifies an inode while it exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct FileKey {
    device: (u32, u32),
    inode: u64,
}

/// Identity and metadata of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) key: FileKey,
    mode: u16,
    links: u32,
    owner: (u32, u32),
    number: (u32, u32),
    size: u64,
    modified: (i64, u32),
    changed: (i64, u32),
}

/// A stamp, and whether a later change could have the same stamp.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    stamp: Stamp,
    is_recent: bool,
}

/// Resolution of the times of file systems that have no nanoseconds, in nanoseconds: one second for ext3 and for ext4
/// with small inodes, two for FAT.
const WHOLE_SECONDS: i128 = 2_000_000_000;

impl Stamp {
    pub(super) const fn of(stat: &Statx) -> Self {
        Self {
            key: FileKey { device: (stat.stx_dev_major, stat.stx_dev_minor), inode: stat.stx_ino },
            mode: stat.stx_mode,
            links: stat.stx_nlink,
            owner: (stat.stx_uid, stat.stx_gid),
            number: (stat.stx_rdev_major, stat.stx_rdev_minor),
            size: stat.stx_size,
            modified: (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec),
            changed: (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec),
        }
    }

    /// Whether the file is a whiteout device.
    pub(super) fn is_whiteout(&self) -> bool {
        FileType::from_raw_mode(self.mode.into()) == FileType::CharacterDevice
            && self.number == (0, 0)
    }

    /// Whether a change after `tick`, the time of a tick before the stamp was taken, could have the stamp's time.
    fn is_recent(&self, tick: i128) -> bool {
        let (seconds, nanoseconds) = self.changed;
        let changed = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        let resolution = if nanoseconds == 0 { WHOLE_SECONDS } else { 0 };
        // One tick would be enough for a clock that all processors see alike.
        changed + resolution + 2 * kernel::clock::tick() >= tick
    }
}

impl Seen {
    /// Whether a file with the stamp `now` cannot have changed since.
    pub(super) fn is_unchanged(&self, now: &Stamp) -> bool {
        !self.is_recent && self.stamp == *now
    }

    pub(super) fn key(&self) -> FileKey {
        self.stamp.key
    }

    pub(super) fn is_whiteout(&self) -> bool {
        self.stamp.is_whiteout()
    }
}

pub(super) fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// Examines a file behind a descriptor.
pub(super) fn stat(file: impl AsFd) -> Result<Statx, Errno> {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// Examines a file behind a descriptor, before its data and xattrs are read.
pub(super) fn look(file: impl AsFd) -> Result<(Statx, Seen), Errno> {
    // The clock is read first: every change after `stat` gets this time or a later one.
    let tick = kernel::clock::last_tick();
    let stat = stat(file)?;
    let stamp = Stamp::of(&stat);
    Ok((stat, Seen { stamp, is_recent: stamp.is_recent(tick) }))
}

/// Examines a name in a directory, without following a symbolic link.
pub(super) fn stat_at(directory: impl AsFd, name: &CStr) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    statx(directory, name, flags, StatxFlags::BASIC_STATS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_the_same_tick_counts_as_recent() {
        let second = 1_000_000_000;
        let check = |changed: (i64, u32), tick: i128, expect: bool| {
            let stat = stat(std::fs::File::open(".").unwrap()).unwrap();
            let stamp = Stamp { changed, ..Stamp::of(&stat) };
            assert_eq!(stamp.is_recent(tick), expect, "{changed:?} at {tick}");
        };
        check((10, 5), 10 * second + 5, true);
        check((10, 5), 10 * second, true);
        check((10, 5), 11 * second, false);
        // The file system has only whole seconds.
        check((10, 0), 11 * second, true);
        check((10, 0), 13 * second, false);
        // The clock was set back.
        check((10, 5), 5 * second, true);
        check((i64::MAX, 5), 5 * second, true);
    }
}
