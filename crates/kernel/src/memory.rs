//! Memory of this process.
#![cfg_attr(
    target_env = "gnu",
    expect(unsafe_code, reason = "rustix has no calls of the allocator")
)]

/// Gives the kernel back what this process has freed. Threads that work for a while and end leave much of it.
pub fn give_back() {
    // Only this allocator keeps it.
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and locks what it looks at.
    unsafe {
        libc::malloc_trim(0);
    }
}
