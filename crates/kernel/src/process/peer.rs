//! Checks the process at the other end of a socket.
#![expect(unsafe_code, reason = "rustix has neither SO_PEERPIDFD nor the calls of pidfds")]

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::DumpableBehavior;
use rustix::thread::{Gid, Uid};

use super::ProcessError;

/// Tests whether the process that connected a socket belongs to the user whose id it has. A process in another user's
/// namespace does not belong to that user, even if it has the user's id in the namespace, for example because the id
/// was assigned to the other user. `user` and `group` are the ids of the process. The caller must be root.
///
/// If the process is in another user namespace than the caller, the test asks the kernel whether the user may trace
/// the process, as any other program of the user could. The kernel also refuses for a program that is protected from
/// its own user: one that is set-group-id, that has more capabilities in its namespace than the user has there, or
/// that the user cannot read.
///
/// # Errors
/// An error of the kernel: `ESRCH` if the process has exited.
pub fn is_peer_its_users_own(
    socket: BorrowedFd<'_>,
    user: u32,
    group: u32,
) -> Result<bool, ProcessError> {
    // Source: Linux `include/uapi/linux/pidfd.h`, `_IO(0xff, 9)`, since Linux 6.11.
    const PIDFD_GET_USER_NAMESPACE: libc::Ioctl = 0xff09;
    let step = "read the user namespace of a process";
    let failed = ProcessError::call(step);
    let process = peer_process(socket)?;
    if is_among_us(socket, process.as_fd()).map_err(&failed)? {
        return Ok(true);
    }
    let become_user = BecomeUser::new(user, group).map_err(&failed)?;
    // The kernel compares ids, and requires capabilities in the process's namespace (Linux `kernel/ptrace.c`,
    // `__ptrace_may_access`). The maker of that namespace and the makers of its ancestors have them.
    // SAFETY: the ioctl has no argument, and the descriptor is open.
    let file = unsafe { libc::ioctl(process.as_fd().as_raw_fd(), PIDFD_GET_USER_NAMESPACE, 0) };
    let found = match file {
        // SAFETY: the kernel has just opened the descriptor, and nothing else owns it.
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

/// Whether the peer of a Unix socket has not yet read all data that was written to this end. `false` for a broken
/// socket, because its state is unknown.
#[must_use]
pub fn is_unread(socket: BorrowedFd<'_>) -> bool {
    // Source: Linux `include/uapi/linux/sockios.h`, `SIOCOUTQ`; `net/unix/af_unix.c`, `unix_outq_len`, which counts
    // the memory of unread messages.
    const SIOCOUTQ: rustix::ioctl::Opcode = 0x5411;
    // SAFETY: the ioctl writes one int.
    let unread = unsafe { rustix::ioctl::Getter::<SIOCOUTQ, libc::c_int>::new() };
    // SAFETY: as above; the argument lives through the call.
    let found = unsafe { rustix::ioctl::ioctl(socket, unread) };
    found.is_ok_and(|it| it > 0)
}

/// Whether a process is in this process's user namespace, according to its uid map, which all users may read. A user
/// cannot make a namespace with the same map.
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
    // If the process has exited, the pid may have been reused.
    let mut ended = [PollFd::from_borrowed_fd(process, PollFlags::IN)];
    if rustix::event::poll(&mut ended, Some(&Timespec::default()))? > 0 {
        return Err(Errno::SRCH);
    }
    Ok(map == read("/proc/self/uid_map")?)
}

/// Gives this thread the effective user and group of a user until this value is dropped. That user can neither signal
/// the thread, because its real user stays root, nor schedule it, because its permitted capabilities stay.
struct BecomeUser {
    dumpable: DumpableBehavior,
    _alone: MutexGuard<'static, ()>,
}

impl BecomeUser {
    fn new(user: u32, group: u32) -> Result<Self, Errno> {
        // If there were two instances at a time, each would save the changed state of the other.
        static ALONE: Mutex<()> = Mutex::new(());
        let become_user = Self {
            _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
            dumpable: rustix::process::dumpable_behavior()?,
        };
        // The group is set first, because the thread may not set it after it has changed its user.
        rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::from_raw(group), Gid::ROOT)?;
        rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::from_raw(user), Uid::ROOT)?;
        Ok(become_user)
    }

    fn back(&self) -> Result<(), Errno> {
        rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)?;
        rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
        // The kernel has changed the flag for the whole process (Linux `kernel/cred.c`, `commit_creds`), which would
        // prevent tracing of its children. A process cannot set the value 2 (prctl(2), PR_SET_DUMPABLE). If the old
        // value was 2, the kernel has set a value that is equally strict.
        let _may_be_strict = rustix::process::set_dumpable_behavior(self.dumpable);
        Ok(())
    }
}

impl Drop for BecomeUser {
    fn drop(&mut self) {
        if self.back().is_err() {
            // Without the abort, all further actions of the thread would be made as the wrong user.
            std::process::abort();
        }
    }
}

/// Returns a pidfd of the process that connected a socket, even if that process has passed the socket on.
fn peer_process(socket: BorrowedFd<'_>) -> Result<OwnedFd, ProcessError> {
    let mut pidfd: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of_val(&pidfd)).expect("four");
    // SAFETY: the call writes an int to its argument, which lives through the call.
    let result = unsafe {
        let pidfd = (&raw mut pidfd).cast();
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERPIDFD);
        libc::getsockopt(socket.as_raw_fd(), level, option, pidfd, &raw mut length)
    };
    match result {
        // SAFETY: the kernel has just opened the descriptor, and nothing else owns it.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(pidfd) }),
        _ => Err(ProcessError::call("find the process behind a socket")(crate::last_errno())),
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

    /// Returns the real, effective and saved user ids of this thread, and the same for groups.
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
        // The peer is this process, which has more capabilities than any user.
        assert!(is_peer_its_users_own(one.as_fd(), 1234, 5678).unwrap());
    }
}
