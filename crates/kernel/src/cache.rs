//! The page cache: counts the cached pages of a file, and reads or drops them.
#![expect(unsafe_code, reason = "rustix has neither cachestat nor mincore")]

use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::null_mut;

use rustix::fs::Advice;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::last_errno;
use crate::process::Who;

/// Returns the size of a page in bytes.
#[must_use]
pub fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Returns how many pages of a byte range of a file are in memory, without reading any.
///
/// Counts only the file's own page cache, which is empty for a file of an overlay and for a file whose pages EROFS
/// shares among mounts. Use [`resident_mapped`] for those.
///
/// # Errors
/// `EPERM` for a file of another user that the caller may not write.
pub fn resident(file: BorrowedFd<'_>, bytes: &Range<u64>, who: Who) -> Result<u64, Errno> {
    if bytes.is_empty() {
        return Ok(0);
    }
    match cachestat(file, bytes) {
        // The kernel is older than Linux 6.5, or a seccomp filter does not know the call.
        Err(Errno::NOSYS) => resident_mapped(file, bytes, who),
        result => result,
    }
}

/// Like [`resident`], but counts the pages that a mapping of the file would use, including pages in the cache of
/// another file.
///
/// # Errors
/// The errors of [`resident`]; `ENODEV` if the file cannot be mapped.
pub fn resident_mapped(file: BorrowedFd<'_>, bytes: &Range<u64>, who: Who) -> Result<u64, Errno> {
    if bytes.is_empty() {
        return Ok(0);
    }
    // For files that the caller may not write, mincore reports every page as present.
    let is_owner = rustix::fs::fstat(file)?.st_uid == who.user;
    if !is_owner && !who.is_host_root() {
        return Err(Errno::PERM);
    }
    let page = page_size();
    let (mut at, end) = (bytes.start / page * page, bytes.end);
    let mut pages = 0;
    while at < end {
        let length = (end - at).min(MAPPED * page);
        pages += mapped(file, at, length)?;
        at += MAPPED * page;
    }
    Ok(pages)
}

/// Number of pages to map at a time.
const MAPPED: u64 = 1 << 14;

fn mapped(file: BorrowedFd<'_>, at: u64, length: u64) -> Result<u64, Errno> {
    let length = usize::try_from(length).map_err(|_too_long| Errno::OVERFLOW)?;
    let count = length.div_ceil(rustix::param::page_size());
    let mut found = vec![0_u8; count];
    // SAFETY: the mapping is new, so it overlaps nothing, and no code reads or writes through it.
    let address = unsafe {
        rustix::mm::mmap(null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, at)
    }?;
    // SAFETY: the range is the mapping, and the vector has a byte for each of its pages.
    let result = match unsafe { libc::mincore(address, length, found.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    };
    // SAFETY: the mapping is ours, and nothing points into it.
    unsafe { rustix::mm::munmap(address, length) }?;
    // The other bits are reserved.
    result.map(|()| found.iter().map(|it| u64::from(it & 1)).sum())
}

/// Source: Linux `arch/*/kernel/syscalls/`. The number is the same on all of Rust's architectures; libc has it for a
/// few.
const SYS_CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range`. Source for both structs: Linux include/uapi/linux/mman.h.
#[repr(C)]
struct CacheRange {
    offset: u64,
    length: u64,
}
const _: () = assert!(size_of::<CacheRange>() == 16);

/// `struct cachestat`.
#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}
const _: () = assert!(size_of::<CacheStat>() == 40);

fn cachestat(file: BorrowedFd<'_>, bytes: &Range<u64>) -> Result<u64, Errno> {
    let range = CacheRange { offset: bytes.start, length: bytes.end - bytes.start };
    let mut found = CacheStat::default();
    let fd = file.as_raw_fd();
    // SAFETY: the kernel reads the first struct and fills the second, whose sizes are asserted above; both live
    // through the call. There are no flags.
    let result = unsafe {
        libc::syscall(SYS_CACHESTAT, fd, &raw const range, &raw mut found, 0 as libc::c_uint)
    };
    if result == 0 { Ok(found.cached) } else { Err(last_errno()) }
}

/// Starts to read a part of a file into the page cache, without waiting for the data.
pub fn read_ahead(file: BorrowedFd<'_>, bytes: &Range<u64>) -> Result<(), Errno> {
    advise(file, bytes, Advice::WillNeed)
}

/// Drops a part of a file from the page cache, except pages that are dirty, mapped or in use.
pub fn drop_pages(file: BorrowedFd<'_>, bytes: &Range<u64>) -> Result<(), Errno> {
    advise(file, bytes, Advice::DontNeed)
}

fn advise(file: BorrowedFd<'_>, bytes: &Range<u64>, advice: Advice) -> Result<(), Errno> {
    // posix_fadvise takes a length of 0 as "to the end of the file".
    match std::num::NonZeroU64::new(bytes.end.saturating_sub(bytes.start)) {
        Some(length) => rustix::fs::fadvise(file, bytes.start, Some(length), advice),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd as _;
    use std::time::{Duration, Instant};

    use super::*;

    /// Makes a file of `pages` pages and one byte and drops it from the page cache. Skips the test on tmpfs, which is
    /// always in memory.
    fn cold(pages: u64) -> Option<(tempfile::TempDir, File)> {
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        let folder = tempfile::tempdir().unwrap();
        if rustix::fs::statfs(folder.path()).unwrap().f_type == TMPFS_MAGIC {
            testing::skipped("the temporary directory is in memory");
            return None;
        }
        let path = folder.path().join("file");
        let mut file = File::create(&path).unwrap();
        let length = usize::try_from(pages * page_size() + 1).unwrap();
        file.write_all(&vec![1; length]).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let file = File::open(&path).unwrap();
        drop_pages(file.as_fd(), &(0..u64::MAX / 2)).unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::Random).unwrap();
        Some((folder, file))
    }

    #[test]
    fn what_is_read_is_in_memory_and_nothing_else() {
        let page = page_size();
        let Some((_folder, mut file)) = cold(8) else { return };
        let all = 0..8 * page + 1;
        let looks = [resident, resident_mapped];
        for look in looks {
            assert_eq!(look(file.as_fd(), &all, Who::this_process()), Ok(0));
        }
        file.read_exact(&mut vec![0; usize::try_from(page).unwrap() * 3]).unwrap();
        let there = resident(file.as_fd(), &all, Who::this_process()).unwrap();
        // A file system may read more than was requested, but never less.
        assert!((3..=8).contains(&there), "{there}");
        file.read_to_end(&mut Vec::new()).unwrap();
        for look in looks {
            let count = |range| look(file.as_fd(), &range, Who::this_process()).unwrap();
            assert_eq!(count(all.clone()), 9);
            assert_eq!(count(0..0), 0);
            assert_eq!(count(page - 1..page + 1), 2);
            assert_eq!(count(8 * page..8 * page + 1), 1);
            assert_eq!(count(page..3 * page), 2);
        }
        drop_pages(file.as_fd(), &(0..page)).unwrap();
        let left = resident(file.as_fd(), &all, Who::this_process()).unwrap();
        assert_eq!(resident_mapped(file.as_fd(), &all, Who::this_process()), Ok(left));
        drop_pages(file.as_fd(), &(0..9 * page)).unwrap();
        assert_eq!(resident(file.as_fd(), &all, Who::this_process()), Ok(0));
    }

    #[test]
    fn what_is_read_ahead_comes() {
        let Some((_folder, file)) = cold(300) else { return };
        let all = 0..300 * page_size() + 1;
        assert_eq!(resident(file.as_fd(), &all, Who::this_process()), Ok(0));
        read_ahead(file.as_fd(), &all).unwrap();
        let started = Instant::now();
        while resident(file.as_fd(), &all, Who::this_process()).unwrap() < 301 {
            assert!(started.elapsed() < Duration::from_secs(120), "it does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        read_ahead(file.as_fd(), &(5..5)).unwrap();
    }

    #[test]
    fn a_map_of_many_parts_is_counted_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let page = page_size();
        let file = File::options().create_new(true).read(true).write(true).open(path).unwrap();
        file.set_len(3 * MAPPED * page).unwrap();
        for at in [0, MAPPED, 2 * MAPPED + 1] {
            std::os::unix::fs::FileExt::write_all_at(&file, b"x", at * page).unwrap();
        }
        let all = 0..3 * MAPPED * page;
        assert_eq!(resident_mapped(file.as_fd(), &all, Who::this_process()), Ok(3));
        assert_eq!(
            resident_mapped(file.as_fd(), &(page..3 * MAPPED * page), Who::this_process()),
            Ok(2)
        );
        assert_eq!(resident(file.as_fd(), &all, Who::this_process()), Ok(3));
    }
}
