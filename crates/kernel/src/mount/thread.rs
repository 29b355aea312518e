//! A separate working directory for one thread.
#![expect(unsafe_code, reason = "unshare, which rustix calls unsafe")]

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::thread::UnshareFlags;

/// Changes the working directory of this *thread* only.
pub(super) fn enter_in_thread(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: without CLONE_FILES, all threads keep the same descriptor table.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
    rustix::process::fchdir(directory)
}
