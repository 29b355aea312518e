//! Names files behind descriptors, for errors and for system calls that need a path.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;

/// Returns the path by which other system calls can name the file of a descriptor.
pub(crate) fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Returns the path of an open file as the kernel knows it. Use the path only in messages, because the file may have
/// been moved since.
pub(crate) fn name_of(fd: BorrowedFd<'_>) -> String {
    match rustix::fs::readlink(proc_path(fd), Vec::new()) {
        Ok(path) => OsStr::from_bytes(path.as_bytes()).display().to_string(),
        Err(_) => format!("descriptor {}", fd.as_raw_fd()),
    }
}
