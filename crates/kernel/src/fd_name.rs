//! How an error names the file behind a descriptor.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;

/// The path by which other system calls can name what this descriptor is open on.
pub(crate) fn proc_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// What a person would call the file behind this descriptor: its path as the kernel knows it.
/// Only for messages: the file may have moved since.
pub(crate) fn name_of(fd: BorrowedFd<'_>) -> String {
    match rustix::fs::readlink(proc_path(fd), Vec::new()) {
        Ok(path) => OsStr::from_bytes(path.as_bytes()).display().to_string(),
        Err(_) => format!("descriptor {}", fd.as_raw_fd()),
    }
}
