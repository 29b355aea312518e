//! Reserves space on the host's disk for a container's next writes.
//!
//! Free blocks of a filestore's file system are allocated on the host's disk. The container's monitor reserves more
//! before these are used up, and releases blocks that the container frees. All other blocks belong to the balloon, a
//! file in the filestore. To reserve space, the host's range is allocated first, and then removed from the balloon; to
//! release space, the order is reversed. So if this process is killed at any time, every free block is still allocated
//! on the disk. Then no more blocks are reserved, and the container gets `ENOSPC` when it has used them up.
//! `docs/decisions/0014-headroom.md` has the reasons.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kernel::allocation::{Extent, allocate, extents, release};
use kernel::mount::Durability;
use kernel::process::{Pause, WatchedSpace};
use rustix::fs::{Mode, OFlags, StatVfs};
use rustix::io::Errno;
use store::OperationError;

use crate::root::filestore::{BALLOON, Geometry, TABLES, take};

const MIB: u64 = 1 << 20;

/// Divisor of the disk's free space: all containers of a store together reserve at most this part ahead of their
/// writes.
const PART: u64 = 8;

/// Minimum and maximum reserve of a container that does not write, in bytes.
const SHARE: Range<u64> = 8 * MIB..1024 * MIB;

/// Maximum initial reserve in bytes, and how long it applies: many containers end soon, without having written.
const AT_FIRST: (u64, Duration) = (256 * MIB, Duration::from_secs(1));

/// Maximum reserve of a container that writes, in bytes. The reserve grows with the container's data.
const WRITING_MAX: u64 = 4096 * MIB;

/// A container counts as writing if its data has changed by more than this number of bytes in this time.
const WRITES: (u64, Duration) = (4 * MIB, Duration::from_secs(5));

/// Maximum speed of a program: bytes that memory accepts in a microsecond, and microseconds per new file. The next
/// check comes before a program of this speed uses up the reserve.
const FASTEST: u64 = 4096;
const FASTEST_FILE: u64 = 5;

/// Minimum and maximum time until the next check.
const WAIT: Range<Duration> = Duration::from_millis(4)..Duration::from_millis(250);

/// Time until the next check per existing container, so that all monitors together make at most two thousand checks a
/// second.
const WAIT_EACH: Duration = Duration::from_micros(500);

/// Time until the next check of a container that does not write, as long as the free space does not change. Only the
/// number of containers can make a difference.
const WAIT_CALM: Duration = Duration::from_secs(60);

/// Divisor of the disk's free space: if less than this part of it is used up, nothing is released.
const CALM_PART: u64 = 8;

/// Time until the next check of a full disk.
const WAIT_FULL: Duration = Duration::from_millis(100);

/// How long the number of containers is cached.
const COUNTED: Duration = Duration::from_secs(30);

/// Minimum and maximum size of one allocation, in bytes.
const PIECE: Range<u64> = 64 << 10..512 * MIB;

/// Free space of a filestore at rest, in bytes. When it is mounted again, overlayfs makes directories in it before a
/// process reserves more.
const AT_REST: u64 = 256 << 10;

/// Maximum number of bytes that are released at once, and the time until the next release. If freed blocks are
/// discarded (mount option `discard`), a release takes a while, and the monitor has other work.
const BACK: (u64, Duration) = (64 * MIB, Duration::from_millis(20));

/// The reserve of one filestore.
#[derive(Debug)]
pub struct Headroom {
    balloon: OwnedFd,
    file: File,
    path: PathBuf,
    durability: Durability,
    geometry: Geometry,
    begin: Instant,
    /// Number of groups, from the first one, whose inode tables are on the host's disk.
    tables: Cell<u64>,
    /// Time of the last change of the used space, and the used space after that change, in bytes.
    change: Cell<(Instant, u64)>,
    count: Cell<Option<(Instant, u64)>>,
    /// Number of containers that share the disk, if the caller counts them.
    among: Option<Arc<AtomicU64>>,
    next: Cell<Option<Instant>>,
    calm: Cell<Option<Calm>>,
}

/// Free space of a container that does not write. While it does not change, the reserve is as it should be.
#[derive(Debug, Clone, Copy)]
struct Calm {
    /// Free blocks and inodes of the filestore's file system.
    blocks: u64,
    inodes: u64,
    /// Minimum free blocks of the host's disk.
    room: u64,
    /// Time in which a program could use up the reserve.
    wait: Duration,
}

/// Whether the host's disk had the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    Fine,
    Full,
}

impl Headroom {
    /// Opens the reserve of a mounted filestore with the file `path`; `inside` is a directory directly below its
    /// root. Reserves the initial space.
    pub(crate) fn open(
        inside: BorrowedFd<'_>,
        path: &Path,
        durability: Durability,
    ) -> Result<Self, OperationError> {
        let failed = OperationError::at::<Errno>("reserve space for", path);
        let open = || {
            let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let balloon = Path::new("..").join(BALLOON);
            let balloon = rustix::fs::openat(inside, balloon, flags, Mode::empty())?;
            let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
            let geometry = Geometry::read(file.as_fd())?;
            let now = Instant::now();
            let this = Self {
                balloon,
                file,
                path: path.to_owned(),
                durability,
                geometry,
                begin: now,
                tables: Cell::new(TABLES.min(geometry.groups)),
                change: Cell::new((now, 0)),
                count: Cell::new(None),
                among: None,
                next: Cell::new(None),
                calm: Cell::new(None),
            };
            let wait = this.tend()?;
            this.next.set(Some(now + wait));
            Ok(this)
        };
        open().map_err(failed)
    }

    /// Sets a counter of the containers that share the disk. Without it, the entries in the parent of the container's
    /// folder are counted.
    #[must_use]
    pub fn among(self, count: Arc<AtomicU64>) -> Self {
        Self { among: Some(count), ..self }
    }

    /// Reserves or releases space if it is time for that. Returns the time until the next call.
    pub fn look(&self) -> Duration {
        let wait = self.next.get().map(|it| it.saturating_duration_since(Instant::now()));
        if let Some(wait) = wait.filter(|wait| !wait.is_zero()) {
            return wait;
        }
        let wait = self.tend().unwrap_or_else(|error| {
            tracing::debug!(%error, filestore = %self.path.display(), "cannot reserve disk space");
            WAIT.end
        });
        self.next.set(Some(Instant::now() + wait));
        wait
    }

    /// Does the work of [`look`](Self::look) for all reserves of a process, and returns the time until the next call.
    /// If no container writes, this is a long time, unless the free space changes.
    pub(crate) fn look_at_all(all: &[Self]) -> Pause<'_> {
        let most = all.iter().map(Self::look).min();
        let calm: Option<Vec<_>> = all.iter().map(|it| Some((it, it.calm.get()?))).collect();
        let calm = calm.unwrap_or_default();
        let Some(interval) = calm.iter().map(|(_, calm)| calm.wait).min() else {
            return most.into();
        };
        let watched = calm.iter().flat_map(|(it, calm)| {
            let (file, blocks) = (it.balloon.as_fd(), calm.blocks..=calm.blocks);
            let inside = WatchedSpace { file, blocks, inodes: calm.inodes..=calm.inodes };
            let (file, blocks) = (it.file.as_fd(), calm.room..=u64::MAX);
            [inside, WatchedSpace { file, blocks, inodes: 0..=u64::MAX }]
        });
        Pause { most: Some(WAIT_CALM), watched: watched.collect(), interval }
    }

    /// Releases the free space of the file system after the last write, except for 256 KiB.
    pub fn settle(&self) -> Result<(), OperationError> {
        let failed = OperationError::at("reserve space for", &self.path);
        let free = rustix::fs::fstatvfs(&self.balloon).map(|it| it.f_bavail * it.f_frsize);
        free.and_then(|free| self.shrink(free.saturating_sub(AT_REST))).map_err(failed)
    }

    fn tend(&self) -> Result<Duration, Errno> {
        self.calm.set(None);
        let inside = rustix::fs::fstatvfs(&self.balloon)?;
        let host = rustix::fs::fstatvfs(&self.file)?;
        let held = held(self.balloon.as_fd())?;
        let used = used(&inside, held);
        let free = inside.f_bavail.saturating_mul(inside.f_frsize);
        let containers = self.containers();
        let inodes = inside.f_files.saturating_sub(inside.f_ffree);
        if self.take_tables(inodes)? == Disk::Full {
            // A new file without data needs only an inode, which is already allocated. So all free blocks are
            // released, and then few directories have space for another name.
            self.shrink(free)?;
            return Ok(WAIT_FULL);
        }
        let now = Instant::now();
        let (since, before) = self.change.get();
        if used.abs_diff(before) > WRITES.0 {
            self.change.set((now, used));
        }
        let writes = used.abs_diff(before) > WRITES.0 || now.duration_since(since) < WRITES.1;
        let room = host.f_bavail.saturating_mul(host.f_frsize);
        let mut target = (room / PART / containers).clamp(SHARE.start, self.share_max()?);
        if self.begin.elapsed() < AT_FIRST.1 {
            target = target.min(AT_FIRST.0);
        }
        if writes {
            target = target.max(used.min(WRITING_MAX));
        }
        let mut disk = Disk::Fine;
        let mut is_calm = !writes && self.begin.elapsed() >= AT_FIRST.1;
        if free < target / 4 * 3 && held > 0 {
            is_calm = false;
            // Other programs also write, so the last free space is reserved in ever smaller steps.
            let bytes = (target - free).min((room / 2).max(MIB)).min(room);
            disk = if bytes < PIECE.start { Disk::Full } else { self.grow(bytes)? };
        } else if !writes && free > target / 4 * 5 + SHARE.start / 2 {
            self.shrink((free - target).min(BACK.0))?;
            return Ok(BACK.1);
        }
        if disk == Disk::Full {
            return Ok(WAIT_FULL);
        }
        let free = rustix::fs::fstatvfs(&self.balloon)?.f_bavail.saturating_mul(inside.f_frsize);
        let tables = self.tables.get();
        let mut wait = WAIT.end;
        // A balloon that is smaller than this may consist only of its extent map.
        if held > MIB {
            wait = wait.min(Duration::from_micros(free / FASTEST));
        }
        if tables < self.geometry.groups {
            let rest = (tables * self.geometry.inodes_per_group).saturating_sub(inodes);
            wait = wait.min(Duration::from_micros(rest * FASTEST_FILE));
        }
        let each = WAIT_EACH * u32::try_from(containers).unwrap_or(u32::MAX);
        let wait = wait.max(WAIT.start).max(each).min(WAIT.end);
        self.calm.set(is_calm.then_some(Calm {
            blocks: inside.f_bavail,
            inodes: inside.f_ffree,
            room: host.f_bavail - host.f_bavail / CALM_PART,
            wait,
        }));
        Ok(wait)
    }

    /// Returns the number of containers in the store, at least 1.
    fn containers(&self) -> u64 {
        if let Some(count) = &self.among {
            return count.load(Ordering::Relaxed).max(1);
        }
        if let Some((since, count)) = self.count.get()
            && since.elapsed() < COUNTED
        {
            return count;
        }
        let folder = self.path.parent().and_then(Path::parent);
        let entries = folder.and_then(|it| std::fs::read_dir(it).ok());
        // Names that start with a dot are templates.
        let is_one =
            |entry: &std::fs::DirEntry| !entry.file_name().as_encoded_bytes().starts_with(b".");
        let count = entries.into_iter().flatten().flatten().filter(is_one).count();
        let count = u64::try_from(count).unwrap_or(u64::MAX).max(1);
        self.count.set(Some((Instant::now(), count)));
        count
    }

    /// Returns the maximum reserve of a container that does not write. On a tmpfs, the usual maximum would take too
    /// much memory.
    fn share_max(&self) -> Result<u64, Errno> {
        // Source: Linux include/uapi/linux/magic.h, TMPFS_MAGIC.
        let is_memory = rustix::fs::fstatfs(&self.file)?.f_type == 0x0102_1994;
        Ok(if is_memory { SHARE.start } else { SHARE.end })
    }

    /// Allocates inode tables for twice the number of used inodes, and for one more group. The kernel allocates
    /// inodes in ascending order, because all groups form one flexible group.
    fn take_tables(&self, inodes: u64) -> Result<Disk, Errno> {
        let geometry = &self.geometry;
        let wanted = (inodes * 2).div_ceil(geometry.inodes_per_group).max(TABLES);
        let needed = (inodes + geometry.inodes_per_group / 2) / geometry.inodes_per_group + 1;
        while self.tables.get() < wanted.min(geometry.groups) {
            let group = self.tables.get();
            match take(self.file.as_fd(), &geometry.table(self.file.as_fd(), group)?) {
                Ok(()) => self.tables.set(group + 1),
                Err(Errno::NOSPC) if group >= needed => break,
                Err(Errno::NOSPC) => return Ok(Disk::Full),
                Err(errno) => return Err(errno),
            }
        }
        Ok(Disk::Fine)
    }

    /// Allocates `bytes` on the host's disk and removes them from the balloon. Allocates less if the disk or the
    /// balloon has less.
    fn grow(&self, mut bytes: u64) -> Result<Disk, Errno> {
        let mut disk = Disk::Fine;
        'held: while bytes >= PIECE.start && disk == Disk::Fine {
            let Some(first) = self.first()? else { break };
            let mut length = bytes.min(first.length).min(PIECE.end);
            loop {
                let range = first.physical..first.physical + length;
                match take(self.file.as_fd(), &range) {
                    Ok(()) => break,
                    Err(Errno::NOSPC) => {
                        // A part may have been allocated.
                        release(self.file.as_fd(), &range)?;
                        disk = Disk::Full;
                        length = (length / 2) & !(PIECE.start - 1);
                        if length == 0 {
                            break 'held;
                        }
                    }
                    Err(errno) => return Err(errno),
                }
            }
            release(self.balloon.as_fd(), &(first.logical..first.logical + length))?;
            bytes -= length;
        }
        if self.durability == Durability::Durable {
            // Blocks that were removed from a file are free only after the journal's commit.
            rustix::fs::fsync(&self.balloon)?;
        }
        Ok(disk)
    }

    /// Moves `bytes` into the balloon, and releases them on the host's disk; fewer if fewer are free.
    fn shrink(&self, bytes: u64) -> Result<(), Errno> {
        let end = rustix::fs::fstat(&self.balloon)?.st_size.unsigned_abs();
        let mut start = self.first()?.map_or(end, |first| first.logical);
        let mut rest = bytes.min(start);
        while rest >= PIECE.start {
            let length = rest.min(PIECE.end) & !(PIECE.start - 1);
            let range = start - length..start;
            let allocated = allocate(self.balloon.as_fd(), &range);
            // The range is also released after a failed allocation, which may have allocated a part of it.
            self.release_below(&range)?;
            match allocated {
                Err(Errno::NOSPC) => break,
                result => result?,
            }
            start -= length;
            rest -= length;
        }
        Ok(())
    }

    /// Releases the blocks of the host's file below this range of the balloon.
    fn release_below(&self, range: &Range<u64>) -> Result<(), Errno> {
        let mut from = range.start;
        loop {
            let found = extents(self.balloon.as_fd(), &(from..range.end))?;
            let Some(last) = found.last() else { return Ok(()) };
            from = last.logical + last.length;
            for Extent { physical, length, .. } in found {
                match release(self.file.as_fd(), &(physical..physical + length)) {
                    Err(Errno::OPNOTSUPP) => {}
                    result => result?,
                }
            }
        }
    }

    /// Returns the balloon's first extent.
    fn first(&self) -> Result<Option<Extent>, Errno> {
        let end = rustix::fs::fstat(&self.balloon)?.st_size.unsigned_abs();
        Ok(extents(self.balloon.as_fd(), &(0..end))?.into_iter().next())
    }
}

/// Returns the size of the balloon's blocks, in bytes. Source: stat(2): blocks of 512 bytes, whatever the file
/// system's block size is.
fn held(balloon: BorrowedFd<'_>) -> Result<u64, Errno> {
    Ok(rustix::fs::fstat(balloon)?.st_blocks.unsigned_abs().saturating_mul(512))
}

fn used(inside: &StatVfs, held: u64) -> u64 {
    let used = inside.f_blocks.saturating_sub(inside.f_bfree).saturating_mul(inside.f_frsize);
    used.saturating_sub(held)
}

/// Returns the size of the data in the filestore that has this directory directly below its root, in bytes, including
/// data that is not yet on disk.
pub fn written(inside: BorrowedFd<'_>) -> Result<u64, Errno> {
    let numbers = rustix::fs::fstatvfs(inside)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = match rustix::fs::openat(inside, Path::new("..").join(BALLOON), flags, Mode::empty())
    {
        Ok(balloon) => held(balloon.as_fd())?,
        Err(Errno::NOENT) => 0,
        Err(errno) => return Err(errno),
    };
    Ok(used(&numbers, held))
}
