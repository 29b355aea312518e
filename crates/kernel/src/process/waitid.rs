//! Which child has ended, without waiting for it.
#![expect(unsafe_code, reason = "rustix does not say which process waitid found")]

use std::mem::MaybeUninit;

use rustix::io::Errno;
use rustix::process::Pid;

/// How long to wait for a child's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Not at all.
    None,
    /// As long as it takes.
    Endless,
}

/// A child that has ended; it is still to be waited for. None when there is none yet, or a signal came first.
///
/// # Errors
/// `ECHILD` when there is no child.
pub(super) fn ended_child(patience: Patience) -> Result<Option<Pid>, Errno> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let hang = if patience == Patience::None { libc::WNOHANG } else { 0 };
    let options = libc::WEXITED | libc::WNOWAIT | hang;
    // SAFETY: waitid only writes to what it is given, which is of the right type.
    if unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), options) } != 0 {
        return match crate::last_errno() {
            Errno::INTR => Ok(None),
            errno => Err(errno),
        };
    }
    // SAFETY: zeros are a siginfo_t, and waitid has written one.
    let info = unsafe { info.assume_init() };
    // SAFETY: what waitid writes has a process number, zero if there is none (waitid(2)).
    Ok(Pid::from_raw(unsafe { info.si_pid() }))
}
