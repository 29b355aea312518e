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

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_below_something_in_use_goes_back() {
        // Bytes that are this process's own.
        let private = || {
            let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
            let line = rollup.lines().find(|it| it.starts_with("Private_Dirty:")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
        };
        // Below the size from which each piece is a mapping of its own.
        let mut pieces: Vec<_> = (0..1024).map(|_| vec![1u8; 64 << 10]).collect();
        let last = pieces.pop();
        let before = private();
        drop(pieces);
        trim_heap();
        // Other tests may have some by now, but not as much.
        assert!(private() + (32 << 20) < before, "{} after {before}", private());
        drop(last);
    }
}
