//! Descriptors that a service manager passes to a process (socket activation).
#![expect(unsafe_code, reason = "they are passed as numbers")]

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{Errno, FdFlags};

use super::ProcessError;

/// Number of the first descriptor. Source: sd_listen_fds(3), `SD_LISTEN_FDS_START`.
const FIRST: RawFd = 3;

/// Takes the descriptors that a service manager passed to this process, in order. Child processes do not inherit
/// them. `count` is the number that the service manager states (`LISTEN_FDS`).
///
/// # Errors
/// `EBADF` if one of them is not open, or if they were taken before.
pub fn given_descriptors(count: usize) -> Result<Vec<OwnedFd>, ProcessError> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let failed = ProcessError::call("take over the descriptors of a service manager");
    if count == 0 {
        return Ok(Vec::new());
    }
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Err(failed(Errno::BADF));
    }
    let numbers = (FIRST..).take(count);
    let take = |number| {
        // SAFETY: the service manager opened the descriptor for this process, and nothing took it before. The
        // number belongs to no other file, because it was in use from the start. If it is not open, it is forgotten
        // below.
        let given = unsafe { OwnedFd::from_raw_fd(number) };
        match rustix::io::fcntl_setfd(&given, FdFlags::CLOEXEC) {
            Ok(()) => Ok(given),
            Err(errno) => {
                // The descriptor is not open, so the drop must not close it.
                std::mem::forget(given);
                Err(failed(errno))
            }
        }
    };
    numbers.map(take).collect()
}
