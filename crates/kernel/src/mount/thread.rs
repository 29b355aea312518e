//! A thread with a working directory of its own.
#![expect(unsafe_code, reason = "unshare, which rustix calls unsafe")]

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::thread::UnshareFlags;

/// Changes the working directory of this *thread* only.
pub(super) fn enter_in_thread(directory: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: without FILES, no thread loses sight of a descriptor.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
    rustix::process::fchdir(directory)
}
