//! Processes: starts them with a defined environment, identifies them by pidfds, waits for them, and forwards signals
//! to them.

mod allocator;
mod appearance;
mod at_rest;
mod constants;
mod daemonize;
mod holders;
mod identity;
mod inherited;
mod name_services;
mod namespaces;
mod pause;
mod peer;
mod scheduling;
mod signals;
mod socket_activation;
mod spawn;
mod user_namespace;
mod waitid;
mod who;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, WaitId, WaitIdOptions};

pub use allocator::{keep_little_heap, trim_heap, use_one_heap};
pub use appearance::{hide_environment, show_as};
use at_rest::Waiter;
pub use at_rest::{ExpectedWait, shrink};
pub use daemonize::{Done, finish_behind, start_behind, start_server};
pub use holders::{Holder, holders};
pub use identity::{IdentityError, ProcessIdentity, boot_id};
pub use inherited::{StackError, changed_limits, left_open, settle};
pub use name_services::use_own_name_services;
pub use namespaces::{
    IdMaps, IdRange, MountsBefore, Namespace, enter, enter_network, id_maps, namespace_kind,
    network_namespace, own_mounts, owner_of_user_namespace, ranges_of, unshare, user_namespace,
    user_namespace_of,
};
pub(crate) use namespaces::{
    close_all_but, end_child, enter_owned, set_root_propagation, sorted, wait_to_read,
};
pub use pause::{Pause, WatchedSpace};
pub use peer::{is_peer_its_users_own, is_unread};
pub use rustix::process::{Pid, Resource, Rlimit, Signal};
pub use scheduling::{Prompt, be_idle, be_prompt};
pub use signals::{Received, Sender, Signals, die_of};
pub use socket_activation::given_descriptors;
pub use spawn::{Setup, Spawned, spawn};
pub use user_namespace::{IdService, Mapped, Mapper, OwnNamespaceError, enter_own};
pub use who::{UNUSED_IDS, UserNamespace, Who};

/// An error of a system call on processes.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// A system call failed.
    #[error("cannot {step}")]
    Call { step: &'static str, source: Errno },
    /// A system call on one process failed.
    #[error("cannot {step} process {pid}")]
    Process { step: &'static str, pid: i32, source: Errno },
    /// The limit on namespaces is reached.
    #[error("cannot {step}: the limit is reached (see /proc/sys/user)")]
    Limit { step: &'static str },
    #[error("cannot start {program}")]
    Spawn {
        program: String,
        /// `NotFound` and `PermissionDenied` refer to the program itself or to its interpreter.
        source: std::io::Error,
    },
}

impl ProcessError {
    fn call(step: &'static str) -> impl Fn(Errno) -> Self {
        move |source| Self::Call { step, source }
    }
}

/// A process, identified by a pidfd.
#[derive(Debug)]
pub struct Process {
    fd: OwnedFd,
    pid: Pid,
}

/// Whether a process has called exec since its fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    /// The process has called exec.
    Yes,
    /// The process exited without calling exec.
    Never,
    /// The process had not called exec before the timeout, or the kernel does not report this.
    Unknown,
}

/// The exit status of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The process exited with a code from 0 to 255.
    Code(i32),
    /// A signal with this number ended the process.
    Signal(i32),
}

impl Exit {
    /// Returns the exit code that a shell would show: for a signal, 128 plus its number.
    #[must_use]
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

impl Process {
    /// Opens a pidfd of a process. Unless the process is a child that is not reaped, check afterwards that it is
    /// still the intended one, because pids are reused.
    ///
    /// # Errors
    /// `ESRCH` if no process has this pid.
    pub fn open(pid: Pid) -> Result<Self, ProcessError> {
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|errno| Self::failed("open a descriptor of", pid, errno))?;
        Ok(Self { fd, pid })
    }

    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a signal to the process.
    ///
    /// # Errors
    /// `ESRCH` if the process has exited, `EPERM` if this process may not signal it.
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        rustix::process::pidfd_send_signal(&self.fd, signal)
            .map_err(|errno| Self::failed("signal", self.pid, errno))
    }

    /// Duplicates one of the process's descriptors, by its number in that process.
    ///
    /// # Errors
    /// `EPERM` without the right to trace the process (Yama may require `CAP_SYS_PTRACE`), `EBADF` if it has no such
    /// descriptor.
    pub fn descriptor(&self, number: RawFd) -> Result<OwnedFd, ProcessError> {
        rustix::process::pidfd_getfd(&self.fd, number, PidfdGetfdFlags::empty())
            .map_err(|errno| Self::failed("take a descriptor of", self.pid, errno))
    }

    /// Waits until the process exits, and reaps it. It must be a child of this process, or have become one
    /// ([`Process::adopt`]).
    ///
    /// # Errors
    /// `ECHILD` if it is not a child or has been reaped.
    ///
    /// # Panics
    /// If the kernel reports neither an exit code nor a signal.
    pub fn wait(&self) -> Result<Exit, ProcessError> {
        loop {
            let id = WaitId::PidFd(self.fd.as_fd());
            match rustix::process::waitid(id, WaitIdOptions::EXITED) {
                Ok(Some(status)) => {
                    let by_itself = status.exit_status().map(Exit::Code);
                    let by_signal = status.terminating_signal().map(Exit::Signal);
                    return Ok(by_itself.or(by_signal).expect("WEXITED reports only these"));
                }
                Ok(None) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Self::failed("wait for", self.pid, errno)),
            }
        }
    }

    /// Waits until the process exits, for at most `most`. Returns `None` on timeout. The process must be a child, as
    /// for [`Process::wait`].
    ///
    /// # Errors
    /// Those of [`Process::wait`].
    pub fn wait_at_most(&self, most: Duration) -> Result<Option<Exit>, ProcessError> {
        let since = Instant::now();
        loop {
            let rest = Timespec::try_from(most.saturating_sub(since.elapsed())).ok();
            let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)];
            match rustix::event::poll(&mut fds, rest.as_ref()) {
                Ok(0) => return Ok(None),
                Ok(_) => return self.wait().map(Some),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Self::failed("wait for", self.pid, errno)),
            }
        }
    }

    /// Waits until the process is a child of this process. Its current parent must be about to exit, and this process
    /// must be a subreaper ([`set_subreaper`]). Reaps all other children that exit before then, so no other code may
    /// wait for children of this process.
    ///
    /// # Errors
    /// `ECHILD` if this process has no descendants left from which it could inherit the process.
    pub fn adopt(&self) -> Result<(), ProcessError> {
        let failed = |errno| Self::failed("become the parent of", self.pid, errno);
        let peek = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        loop {
            let patience = match rustix::process::waitid(WaitId::PidFd(self.fd.as_fd()), peek) {
                Ok(_) => waitid::Patience::None,
                Err(Errno::CHILD) => waitid::Patience::Endless,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed(errno)),
            };
            // WNOWAIT, because the child may be this very process, which `wait` reaps.
            match waitid::ended_child(patience).map_err(failed)? {
                Some(ended) if ended != self.pid => {
                    match rustix::process::waitid(WaitId::Pid(ended), WaitIdOptions::EXITED) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(failed(errno)),
                    }
                }
                _ if patience == waitid::Patience::Endless => {}
                _ => return Ok(()),
            }
        }
    }

    /// Waits until the process has called exec since its fork, has exited, or `most` has passed. It must be a child
    /// of this process, so that its pid is not reused.
    pub fn wait_for_exec(&self, most: Duration) -> Result<Executed, ProcessError> {
        const GLANCE: Duration = Duration::from_millis(2);
        let since = Instant::now();
        let patience = Timespec::try_from(GLANCE).ok();
        loop {
            let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)];
            match rustix::event::poll(&mut fds, patience.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Self::failed("wait for", self.pid, errno)),
            }
            // The state is read before `has_executed`, because the process may call exec and exit in between.
            let is_over = !fds[0].revents().is_empty();
            match has_executed(self.pid) {
                Some(true) => return Ok(Executed::Yes),
                Some(false) if is_over => return Ok(Executed::Never),
                None if is_over => return Ok(Executed::Unknown),
                _ if since.elapsed() >= most => return Ok(Executed::Unknown),
                _ => {}
            }
        }
    }

    /// Waits until the process exits, and forwards every signal that arrives until then.
    ///
    /// A signal from the terminal reaches the whole foreground process group. So it is forwarded only to a process in
    /// another group, because otherwise the process would get one Ctrl-C twice.
    ///
    /// A program may ignore requests to exit. `asked` is called after each request, with the number of requests so
    /// far ([`Requests`]), so that the caller can escalate. `meanwhile` is called before each wait, and returns the
    /// timeout of that wait, if any.
    ///
    /// # Errors
    /// Those of [`Process::wait`]. A process that exits before a signal reaches it is not an error.
    pub fn supervise(
        &self,
        signals: &Signals,
        asked: &mut dyn FnMut(u32),
        meanwhile: &mut dyn FnMut() -> Option<Duration>,
    ) -> Result<Exit, ProcessError> {
        let mut deliver = |signal| self.signal(signal);
        let mut meanwhile = || meanwhile().into();
        self.supervise_by(signals, &mut deliver, asked, &mut meanwhile, None, ExpectedWait::Short)
    }

    /// Like [`Process::supervise`], but forwards signals by calling `deliver`. A wait also ends when `also` is
    /// readable; `meanwhile` is called next, and must read it. A wait also ends when the free space changes that
    /// `meanwhile` returns.
    ///
    /// # Errors
    /// Those of [`Process::supervise`] and of `deliver`.
    pub fn supervise_by<'a>(
        &self,
        signals: &Signals,
        deliver: &mut dyn FnMut(Signal) -> Result<(), ProcessError>,
        asked: &mut dyn FnMut(u32),
        meanwhile: &mut dyn FnMut() -> Pause<'a>,
        also: Option<BorrowedFd<'_>>,
        expected: ExpectedWait,
    ) -> Result<Exit, ProcessError> {
        let mut count = Requests::default();
        let mut waiter = Waiter::new(expected);
        loop {
            let pause = meanwhile();
            let fds = [self.fd.as_fd(), signals.as_fd(), also.unwrap_or(self.fd.as_fd())];
            let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match waiter.poll(&mut fds, &pause) {
                Ok(()) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Self::failed("wait for", self.pid, errno)),
            }
            let ended = !fds[0].revents().is_empty();
            while let Some(received) = signals.next()? {
                if received.sender == Sender::Process || !self.is_in_our_group() {
                    match deliver(received.signal) {
                        Ok(()) | Err(ProcessError::Process { source: Errno::SRCH, .. }) => {}
                        Err(error) => return Err(error),
                    }
                }
                if let Some(requests) = count.add(received.signal) {
                    asked(requests);
                }
            }
            if ended {
                return self.wait();
            }
        }
    }

    fn is_in_our_group(&self) -> bool {
        rustix::process::getpgid(Some(self.pid)) == Ok(rustix::process::getpgrp())
    }

    fn failed(step: &'static str, pid: Pid, source: Errno) -> ProcessError {
        ProcessError::Process { step, pid: pid.as_raw_nonzero().get(), source }
    }
}

/// Counts requests to exit: `SIGINT` and `SIGTERM`.
#[derive(Debug, Default)]
pub struct Requests {
    count: u32,
    last: Option<(Signal, Instant)>,
}

/// Equal signals within this time are one request, because a program such as timeout(1) signals both the process and
/// its group.
const SAME_REQUEST: Duration = Duration::from_millis(100);

impl Requests {
    /// Counts a signal that has arrived. Returns the number of requests so far, or `None` if the signal is not a
    /// request or repeats the last one.
    pub fn add(&mut self, signal: Signal) -> Option<u32> {
        if !matches!(signal, Signal::INT | Signal::TERM) {
            return None;
        }
        let before = self.last.replace((signal, Instant::now()));
        if before.is_some_and(|(it, at)| it == signal && at.elapsed() < SAME_REQUEST) {
            return None;
        }
        self.count = self.count.saturating_add(1);
        Some(self.count)
    }
}

impl AsFd for Process {
    /// The descriptor is readable once the process has exited.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Returns whether a process has called exec since its fork. `None` if no process has this pid. Source:
/// proc_pid_stat(5), field 9, and `PF_FORKNOEXEC` in Linux `include/linux/sched.h`.
#[must_use]
pub fn has_executed(pid: Pid) -> Option<bool> {
    const FORK_NO_EXEC: u64 = 0x40;
    stat_field(pid, 9).map(|flags| flags & FORK_NO_EXEC == 0)
}

/// Returns the start time of a process in clock ticks since boot. `None` if no process has this pid. Pid and start
/// time identify a process until the next boot. [`ProcessIdentity`] identifies it across boots. Source:
/// proc_pid_stat(5), field 22.
#[must_use]
pub fn start_of(pid: Pid) -> Option<u64> {
    stat_field(pid, 22)
}

/// Returns the pid of a process's parent. Source: proc_pid_stat(5), field 4.
#[must_use]
pub fn parent_of(pid: Pid) -> Option<Pid> {
    stat_field(pid, 4).and_then(|it| Pid::from_raw(i32::try_from(it).ok()?))
}

/// Returns the number of the processor that a thread, or the first thread of a process, last ran on. Source:
/// proc_pid_stat(5), field 39.
#[must_use]
pub fn last_processor(thread: u32) -> Option<usize> {
    let thread = Pid::from_raw(i32::try_from(thread).ok()?)?;
    usize::try_from(stat_field(thread, 39)?).ok()
}

/// Returns a numeric field of proc_pid_stat(5). `field` is its number in the manual page, from 4 on.
fn stat_field(pid: Pid, field: usize) -> Option<u64> {
    stat_of(pid)?.split_whitespace().nth(field.checked_sub(3)?)?.parse().ok()
}

/// Returns the fields of proc_pid_stat(5) from the third on.
fn stat_of(pid: Pid) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The second field is the program's name in parentheses, which may itself contain parentheses.
    stat.rsplit_once(')').map(|(_, rest)| rest.to_owned())
}

/// Whether the first thread of a process is in `rt_sigtimedwait`, as called by sigwait(3). Programs with another word
/// size than this one use another system call number and are not recognised. Source: proc_pid_syscall(5).
#[must_use]
pub fn waits_for_signals(pid: Pid) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{}/syscall", pid.as_raw_nonzero()));
    let number = call.as_deref().ok().and_then(|it| it.split_whitespace().next());
    number.and_then(|it| it.parse().ok()) == Some(libc::SYS_rt_sigtimedwait)
}

/// Makes this process the new parent of orphaned descendants, so that it can wait for a container whose runtime has
/// exited.
pub fn set_subreaper() -> Result<(), ProcessError> {
    // PR_SET_CHILD_SUBREAPER takes a boolean. rustix takes a pid, of which any value means true.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(ProcessError::call("become the parent of orphans"))
}
