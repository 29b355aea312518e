//! Memory that a process keeps although it has freed it.
#![expect(unsafe_code, reason = "rustix has no allocator")]

/// Gives whole free pages of the heap back to the kernel. The allocator keeps them otherwise. Meant for a process that has
/// done much and then waits for long, of which a host may have thousands. Source: malloc_trim(3). Does nothing with a C
/// library other than GNU's.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes the allocator's own locks, and nothing that is in use is touched.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has the allocator give memory back as soon as it is free, for a process with many threads that lives for long. Otherwise
/// each thread's part of the heap keeps as much as 64 MiB at its end, which [`trim_heap`] does not reach. Source: mallopt(3):
/// the two limits grow by themselves unless they are set. Does nothing with a C library other than GNU's.
pub fn keep_little_heap() {
    /// In bytes: the limits that the allocator begins with.
    #[cfg(target_env = "gnu")]
    const LIMIT: libc::c_int = 128 << 10;
    #[cfg(target_env = "gnu")]
    for limit in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: it takes two numbers, and the allocator's own locks.
        let _is_known = unsafe { libc::mallopt(limit, LIMIT) };
    }
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// Both tests measure all of the process.
    static ALONE: Mutex<()> = Mutex::new(());

    /// Bytes that are this process's own.
    fn private() -> Option<u64> {
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
        let line = rollup.lines().find(|it| it.starts_with("Private_Dirty:"))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    }

    #[test]
    fn what_is_free_below_something_in_use_goes_back() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // Below the size from which each piece is a mapping of its own.
        let mut pieces: Vec<_> = (0..1024).map(|_| vec![1u8; 64 << 10]).collect();
        let last = pieces.pop();
        let before = private().unwrap();
        drop(pieces);
        trim_heap();
        // Other tests may have some by now, but not as much.
        let after = private().unwrap();
        assert!(after + (32 << 20) < before, "{after} after {before}");
        drop(last);
    }

    #[test]
    fn threads_give_back_what_they_freed() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        keep_little_heap();
        let before = private().unwrap();
        // The first one lets the limits grow, if they can. The others are below them then.
        std::thread::scope(|scope| {
            let work = || {
                drop(vec![1u8; 24 << 20]);
                drop((0..256).map(|_| vec![1u8; 100 << 10]).collect::<Vec<_>>());
                trim_heap();
                private().unwrap()
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
            threads.into_iter().for_each(|it| assert!(it.join().unwrap() > 0));
            // Each of them had 25 MB.
            let after = private().unwrap();
            assert!(after < before + (40 << 20), "{after} after {before}");
        });
    }
}
