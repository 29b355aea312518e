//! Returns freed heap memory to the kernel.
#![expect(unsafe_code, reason = "rustix has no allocator")]

/// Returns whole free pages of the heap to the kernel, which the allocator would keep. This is for a process that has
/// done much work and then waits for a long time; a host may have thousands of these. Source: malloc_trim(3). Does
/// nothing with a C library other than glibc.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes the allocator's locks and does not touch memory in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Frees what this thread's cache of the allocator has. The cache keeps some freed pieces of each small size, and
/// [`trim_heap`] returns no page with such a piece. glibc frees them at the end of a thread, so another thread gets
/// them. Does nothing with a C library other than glibc.
pub(super) fn empty_thread_cache() {
    /// Sizes of the pieces in bytes, and their number for each size: 7, and 16 from glibc 2.42 on. Source:
    /// malloc/malloc.c, `TCACHE_SMALL_BINS`, `TCACHE_FILL_COUNT`.
    #[cfg(target_env = "gnu")]
    const CACHED: (std::ops::RangeInclusive<usize>, usize) = (24..=1032, 16);
    #[cfg(target_env = "gnu")]
    {
        let (sizes, count) = CACHED;
        let sizes = sizes.step_by(16).flat_map(|size| std::iter::repeat_n(size, count));
        let pieces: Vec<_> =
            sizes.map(|it| std::hint::black_box(Vec::<u8>::with_capacity(it))).collect();
        let other = std::thread::Builder::new().stack_size(64 << 10);
        // Without another thread, the pieces return to the cache.
        if let Ok(thread) = other.spawn(move || drop(pieces)) {
            let _ended = thread.join();
        }
    }
}

/// Makes the allocator return memory as soon as it is free, for a long-lived process with many threads. Without this,
/// each thread's arena keeps up to 64 MiB at its end, which [`trim_heap`] does not return. Source: mallopt(3): the two
/// limits grow automatically unless they are set. Does nothing with a C library other than glibc.
pub fn keep_little_heap() {
    /// The allocator's initial limits, in bytes.
    #[cfg(target_env = "gnu")]
    const LIMIT: libc::c_int = 128 << 10;
    #[cfg(target_env = "gnu")]
    for limit in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: the call takes two numbers and the allocator's locks.
        let _is_known = unsafe { libc::mallopt(limit, LIMIT) };
    }
}

/// Makes all threads share one heap, for a process that rarely has a second thread and must be small. Without this,
/// glibc makes another heap for that thread, which outlives it. Does nothing with a C library other than glibc.
pub fn use_one_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes two numbers and the allocator's locks.
    let _is_known = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Serialises the tests, because each measures the whole process.
    static ALONE: Mutex<()> = Mutex::new(());

    /// Returns the private dirty memory of this process, in bytes.
    fn private() -> Option<u64> {
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
        let line = rollup.lines().find(|it| it.starts_with("Private_Dirty:"))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    }

    #[test]
    fn what_is_free_below_something_in_use_goes_back() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // The pieces are smaller than the size from which the allocator maps each piece separately.
        let mut pieces: Vec<_> = (0..1024).map(|_| vec![1u8; 64 << 10]).collect();
        let last = pieces.pop();
        let before = private().unwrap();
        drop(pieces);
        trim_heap();
        // Other tests may have allocated memory by now, but less than the limit below.
        let after = private().unwrap();
        assert!(after + (32 << 20) < before, "{after} after {before}");
        drop(last);
    }

    #[test]
    fn threads_give_back_what_they_freed() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        keep_little_heap();
        let before = private().unwrap();
        // The first allocation raises the limits, unless they are set. Then the other allocations would be below the
        // limits.
        std::thread::scope(|scope| {
            let work = || {
                drop(vec![1u8; 24 << 20]);
                drop((0..256).map(|_| vec![1u8; 100 << 10]).collect::<Vec<_>>());
                trim_heap();
                private().unwrap()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().for_each(|it| assert!(it.join().unwrap() > 0));
            // Each thread had allocated 25 MB.
            let after = private().unwrap();
            assert!(after < before + (40 << 20), "{after} after {before}");
        });
    }
}
