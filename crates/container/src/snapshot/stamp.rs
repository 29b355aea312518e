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

/// Time that asynchronous direct I/O usually takes at most, in nanoseconds. It changes the `ctime` of its file when it is
/// submitted, and bytes later.
const DIRECT_IO: i128 = 100_000_000;

/// Age from which on a regular file can count as unchanged, in nanoseconds. Tests change files all the time, and would
/// find no other fault if all of these were copied again.
const SETTLED: i128 = if cfg!(test) { 0 } else { DIRECT_IO };

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

    /// Whether a change after `tick`, the time of a tick before the stamp was taken, could have the stamp's time, or could
    /// be a part of the stamp's change. `settled` is the age from which on a regular file is settled.
    fn is_recent(&self, tick: i128, settled: i128) -> bool {
        let (seconds, nanoseconds) = self.changed;
        let changed = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        let resolution = if nanoseconds == 0 { WHOLE_SECONDS } else { 0 };
        let is_regular = FileType::from_raw_mode(self.mode.into()) == FileType::RegularFile;
        // One tick would be enough for a clock that all processors see alike.
        let ticks = 2 * kernel::clock::tick();
        let margin = if is_regular { ticks.max(settled) } else { ticks };
        changed + resolution + margin >= tick
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
    Ok((stat, Seen { stamp, is_recent: stamp.is_recent(tick, SETTLED) }))
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
        let [file, directory] = [std::env::current_exe().unwrap(), "/".into()]
            .map(|it| Stamp::of(&stat(std::fs::File::open(it).unwrap()).unwrap()));
        let check_of = |of: Stamp, changed: (i64, u32), tick: i128, expect: bool| {
            let stamp = Stamp { changed, ..of };
            assert_eq!(stamp.is_recent(tick, DIRECT_IO), expect, "{changed:?} at {tick}");
        };
        let check = |changed, tick, expect| {
            check_of(file, changed, tick, expect);
            check_of(directory, changed, tick, expect);
        };
        check((10, 5), 10 * second + 5, true);
        check((10, 5), 10 * second, true);
        check((10, 5), 11 * second, false);
        // The file system has only whole seconds.
        check((10, 0), 11 * second, true);
        check((10, 0), 13 * second, false);
        // Direct I/O may be in progress.
        check_of(file, (10, 5), 10 * second + 90_000_000, true);
        check_of(file, (10, 5), 10 * second + 110_000_000, false);
        check_of(directory, (10, 5), 10 * second + 90_000_000, false);
        // The clock was set back.
        check((10, 5), 5 * second, true);
        check((i64::MAX, 5), 5 * second, true);
    }
}
