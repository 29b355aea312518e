//! Who is at the other end of a socket.
#![expect(unsafe_code, reason = "rustix has neither SO_PEERPIDFD nor the calls of pidfds")]

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::process::DumpableBehavior;
use rustix::thread::{Gid, Uid};

use super::ProcessError;

/// Whether the process that has connected a socket is one that this user may look into by itself, as any other program of the
/// user's could. One in a user namespace of somebody else is not, also if it has the user's number there: for example because
/// that was given to the other user. `user` and `group` are those of the process, and this one's are root's.
///
/// # Errors
/// An error of the kernel: `ESRCH` if the process has ended.
///
/// # Panics
/// Never: if the thread could not become root again, the process is aborted.
pub fn is_peer_its_users_own(
    socket: BorrowedFd<'_>,
    (user, group): (u32, u32),
) -> Result<bool, ProcessError> {
    // Source: Linux `include/uapi/linux/pidfd.h`, `_IO(0xff, 9)`: since Linux 6.11.
    const PIDFD_GET_USER_NAMESPACE: libc::Ioctl = 0xff09;
    let step = "ask for the user namespace of a process";
    let process = peer_process(socket)?;
    let become_user = BecomeUser::new(user, group).map_err(ProcessError::call(step))?;
    // The kernel compares ids, and asks for the rights in the process's namespace: Linux `kernel/ptrace.c`,
    // `__ptrace_may_access`. They are those of its maker, and so of who made the namespaces around it.
    // SAFETY: it has no argument, and the descriptor is open.
    let file = unsafe { libc::ioctl(process.as_fd().as_raw_fd(), PIDFD_GET_USER_NAMESPACE, 0) };
    let found = match file {
        // SAFETY: the kernel has just opened it, and nothing else knows of it.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(file) }),
        _ => Err(crate::last_errno()),
    };
    drop(become_user);
    match found {
        Ok(_namespace) => Ok(true),
        Err(Errno::ACCESS | Errno::PERM) => Ok(false),
        Err(errno) => Err(ProcessError::call(step)(errno)),
    }
}

/// As long as it lives, this thread has the rights of a user, and no more. It can be sent no signals by that user, since its
/// real user stays.
struct BecomeUser {
    dumpable: DumpableBehavior,
    _alone: MutexGuard<'static, ()>,
}

impl BecomeUser {
    fn new(user: u32, group: u32) -> Result<Self, Errno> {
        // Two at once would take each other's state for the usual one.
        static ALONE: Mutex<()> = Mutex::new(());
        let become_user = Self {
            _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
            dumpable: rustix::process::dumpable_behavior()?,
        };
        // The group is set while the thread may.
        rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::from_raw(group), Gid::ROOT)?;
        rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::from_raw(user), Uid::ROOT)?;
        Ok(become_user)
    }

    fn back(&self) -> Result<(), Errno> {
        rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
        rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
        // The kernel has changed that for the whole process (Linux `kernel/cred.c`, `commit_creds`), and its children could not
        // be looked into.
        rustix::process::set_dumpable_behavior(self.dumpable)
    }
}

impl Drop for BecomeUser {
    fn drop(&mut self) {
        if self.back().is_err() {
            // Whatever it did next would be done as somebody else.
            std::process::abort();
        }
    }
}

/// The process that has connected a socket, also when it has passed that on.
fn peer_process(socket: BorrowedFd<'_>) -> Result<OwnedFd, ProcessError> {
    let mut pidfd: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of_val(&pidfd)).expect("four");
    // SAFETY: it writes an int to its argument, which lives as long as the call.
    let result = unsafe {
        let pidfd = (&raw mut pidfd).cast();
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERPIDFD);
        libc::getsockopt(socket.as_raw_fd(), level, option, pidfd, &raw mut length)
    };
    match result {
        // SAFETY: the kernel has just opened it, and nothing else knows of it.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(pidfd) }),
        _ => Err(ProcessError::call("ask for the process behind a socket")(crate::last_errno())),
    }
}
