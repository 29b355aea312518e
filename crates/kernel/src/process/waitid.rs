//! Finds an exited child without reaping it (waitid, `WNOWAIT`).
#![expect(unsafe_code, reason = "rustix does not return which process waitid found")]

use std::mem::MaybeUninit;

use rustix::io::Errno;
use rustix::process::Pid;

/// Whether to wait for a child to exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Return at once.
    None,
    /// Wait without a timeout.
    Endless,
}

/// Returns a child that has exited but is not reaped. `None` if no child has exited, or if a signal interrupted the
/// call.
///
/// # Errors
/// `ECHILD` if this process has no children.
pub(super) fn ended_child(patience: Patience) -> Result<Option<Pid>, Errno> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let hang = if patience == Patience::None { libc::WNOHANG } else { 0 };
    let options = libc::WEXITED | libc::WNOWAIT | hang;
    // SAFETY: waitid only writes to the buffer that it is given, which has the right type.
    if unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), options) } != 0 {
        return match crate::last_errno() {
            Errno::INTR => Ok(None),
            errno => Err(errno),
        };
    }
    // SAFETY: an all-zero siginfo_t is valid, and waitid has written one.
    let info = unsafe { info.assume_init() };
    // SAFETY: waitid sets si_pid, to zero if it found no child (waitid(2)).
    Ok(Pid::from_raw(unsafe { info.si_pid() }))
}
