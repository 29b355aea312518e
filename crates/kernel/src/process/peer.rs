//! Who is at the other end of a socket.
#![expect(unsafe_code, reason = "rustix has neither SO_PEERPIDFD nor the calls of pidfds")]

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::DumpableBehavior;
use rustix::thread::{Gid, Uid};

use super::ProcessError;

/// Whether the process that has connected a socket is its user's own. One in a user namespace of somebody else is not, also if
/// it has the user's number there: for example because that was given to the other user. `user` and `group` are those of the
/// process, and this one's are root's.
///
/// Of a process in another user namespace than this one's the kernel is asked whether the user may look into it, as any other
/// program of the user's could. It refuses that as well for a program that is kept from its own user: one that is set-group-id,
/// that has more rights in its namespace than the user has there, or that the user cannot read.
///
/// # Errors
/// An error of the kernel: `ESRCH` if the process has ended.
pub fn is_peer_its_users_own(
    socket: BorrowedFd<'_>,
    (user, group): (u32, u32),
) -> Result<bool, ProcessError> {
    // Source: Linux `include/uapi/linux/pidfd.h`, `_IO(0xff, 9)`: since Linux 6.11.
    const PIDFD_GET_USER_NAMESPACE: libc::Ioctl = 0xff09;
    let step = "ask for the user namespace of a process";
    let failed = ProcessError::call(step);
    let process = peer_process(socket)?;
    if is_among_us(socket, process.as_fd()).map_err(&failed)? {
        return Ok(true);
    }
    let become_user = BecomeUser::new(user, group).map_err(&failed)?;
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
        Err(errno) => Err(failed(errno)),
    }
}

/// Whether the other end of a socket of the local machine has not read yet all that was written to this one. Nobody knows it of
/// a socket that is broken: `false`.
#[must_use]
pub fn is_unread(socket: BorrowedFd<'_>) -> bool {
    // Source: Linux `include/uapi/linux/sockios.h`, `SIOCOUTQ`; `net/unix/af_unix.c`, `unix_outq_len`: the memory that messages
    // take until they are read.
    const SIOCOUTQ: rustix::ioctl::Opcode = 0x5411;
    // SAFETY: the ioctl writes one int.
    let unread = unsafe { rustix::ioctl::Getter::<SIOCOUTQ, libc::c_int>::new() };
    // SAFETY: as above; it lives through the call.
    let found = unsafe { rustix::ioctl::ioctl(socket, unread) };
    found.is_ok_and(|it| it > 0)
}

/// Whether a process is in this process's own user namespace, as far as its map tells, which everybody may read: no user makes
/// one with this map.
fn is_among_us(socket: BorrowedFd<'_>, process: BorrowedFd<'_>) -> Result<bool, Errno> {
    let read = |path: &str| {
        std::fs::read_to_string(path)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    };
    let number = rustix::net::sockopt::socket_peercred(socket)?.pid.as_raw_nonzero();
    let map = match read(&format!("/proc/{number}/uid_map")) {
        Err(Errno::NOENT) => return Err(Errno::SRCH),
        map => map?,
    };
    // If it has ended, the number may have been another one's.
    let mut ended = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    if rustix::event::poll(&mut ended, Some(&Timespec::default()))? > 0 {
        return Err(Errno::SRCH);
    }
    Ok(map == read("/proc/self/uid_map")?)
}

/// As long as it lives, this thread has the rights of a user, and no more. That user can neither send it signals, since its real
/// user stays, nor schedule it, since the rights stay that it may have again.
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
        // be looked into. No process may set what only the kernel sets (prctl(2), PR_SET_DUMPABLE); it is as strict as this then.
        let _may_be_strict = rustix::process::set_dumpable_behavior(self.dumpable);
        Ok(())
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_unread_is_known_until_it_is_read() {
        use std::io::{Read as _, Write as _};
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        assert!(!is_unread(ours.as_fd()));
        ours.write_all(b"ab").unwrap();
        assert!(is_unread(ours.as_fd()) && !is_unread(theirs.as_fd()));
        let mut byte = [0];
        theirs.read_exact(&mut byte).unwrap();
        assert!(is_unread(ours.as_fd()), "one byte is left");
        theirs.read_exact(&mut byte).unwrap();
        assert!(!is_unread(ours.as_fd()));
        assert!(!is_unread(std::fs::File::open("/dev/null").unwrap().as_fd()));
    }

    /// Real, effective and saved user, and the same of the group.
    fn ids() -> Vec<String> {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let lines = status.lines().filter(|it| it.starts_with("Uid:") || it.starts_with("Gid:"));
        lines.map(|it| it.split_whitespace().take(4).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn a_thread_becomes_a_user_for_a_while() {
        if ids() != ["Uid: 0 0 0", "Gid: 0 0 0"] {
            testing::skipped("becoming another user needs root");
            return;
        }
        let dumpable = rustix::process::dumpable_behavior().unwrap();
        let become_user = BecomeUser::new(1234, 5678).unwrap();
        assert_eq!(ids(), ["Uid: 0 1234 0", "Gid: 0 5678 0"]);
        drop(become_user);
        assert_eq!(ids(), ["Uid: 0 0 0", "Gid: 0 0 0"]);
        assert_eq!(rustix::process::dumpable_behavior().unwrap(), dumpable);
    }

    #[test]
    fn a_process_of_this_namespace_is_its_users_own() {
        let (one, _other) = UnixStream::pair().unwrap();
        // This process, whose rights are more than those of any user.
        assert!(is_peer_its_users_own(one.as_fd(), (1234, 5678)).unwrap());
    }
}
