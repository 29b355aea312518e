//! Descriptors that a service manager gives a process.
#![expect(unsafe_code, reason = "they come as numbers")]

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, FdFlags};

use super::ProcessError;

/// The number of the first one. Source: sd_listen_fds(3), `SD_LISTEN_FDS_START`.
const FIRST: RawFd = 3;

/// Takes the descriptors that this process was started with, in their order, if it has not taken them. No program that it
/// starts inherits them. `count` is how many the service manager says there are.
///
/// # Errors
/// `EBADF` if one of them is not open, or all were taken before.
pub fn given_descriptors(count: usize) -> Result<Vec<OwnedFd>, ProcessError> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let failed = ProcessError::call("take the descriptors of a service manager");
    if count == 0 {
        return Ok(Vec::new());
    }
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(failed(Errno::BADF));
    }
    let numbers = (FIRST..).take(count);
    let take = |number| {
        // SAFETY: whoever started this process opened it for us, and nobody took it before. Nothing else has opened a
        // descriptor under a number of these: they were in use from the start. It is looked at before it is used.
        let given = unsafe { OwnedFd::from_raw_fd(number) };
        match rustix::io::fcntl_setfd(&given, FdFlags::CLOEXEC) {
            Ok(()) => Ok(given),
            Err(errno) => {
                // It is not open, so there is nothing to close.
                std::mem::forget(given);
                Err(failed(errno))
            }
        }
    };
    numbers.map(take).collect()
}
