//! Memory of this process's allocator.
#![cfg_attr(
    target_env = "gnu",
    expect(unsafe_code, reason = "rustix has no calls of the allocator")
)]

/// Returns freed memory to the kernel. Short-lived threads leave much of it in the allocator.
pub fn give_back() {
    // Only glibc's allocator keeps freed memory.
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim takes no pointers and locks the allocator.
    unsafe {
        libc::malloc_trim(0);
    }
}
