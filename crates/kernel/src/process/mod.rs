//! Processes: started with their surroundings in order, named by descriptors that cannot come to
//! mean another process, waited for, and sent what we are sent.

mod allocator;
mod appearance;
mod daemonize;
mod holders;
mod identity;
mod inherited;
mod namespaces;
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

pub use allocator::{keep_little_heap, trim_heap};
pub use appearance::{hide_environment, show_as};
pub use daemonize::{Done, finish_behind, start_behind, start_server};
pub use holders::{Holder, holders};
pub use identity::{IdentityError, ProcessIdentity, boot_id};
pub use inherited::{StackError, changed_limits, settle};
pub use namespaces::{
    IdMaps, IdRange, Namespace, enter, id_maps, namespace_kind, network_namespace, own_mounts,
    owner_of_user_namespace, ranges_of, unshare, user_namespace, user_namespace_of,
};
pub(crate) use namespaces::{
    close_all_but, end_child, enter_owned, set_root_propagation, sorted, wait_to_read,
};
pub use peer::{is_peer_its_users_own, is_unread};
pub use rustix::process::{Pid, Resource, Rlimit, Signal};
pub use scheduling::{Prompt, be_idle, be_prompt};
pub use signals::{Received, Sender, Signals, die_of};
pub use socket_activation::given_descriptors;
pub use spawn::{Setup, Spawned, spawn};
pub use user_namespace::{IdService, Mapped, Mapper, OwnNamespaceError, enter_own};
pub use who::{UNUSED_IDS, UserNamespace, Who};

/// An error of a call on processes.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The kernel refused a step.
    #[error("cannot {step}")]
    Call {
        /// Step that failed.
        step: &'static str,
        /// An error of the kernel.
        source: Errno,
    },
    /// The kernel refused something about one process.
    #[error("cannot {step} process {pid}")]
    Process {
        /// Step that failed.
        step: &'static str,
        /// The process.
        pid: i32,
        /// An error of the kernel.
        source: Errno,
    },
    /// The limit of namespaces is reached.
    #[error("cannot {step}: the limit is reached (see /proc/sys/user)")]
    Limit {
        /// Step that failed.
        step: &'static str,
    },
    /// The program could not be started.
    #[error("cannot start {program}")]
    Spawn {
        /// The program.
        program: String,
        /// Why: `NotFound` and `PermissionDenied` mean the program itself, or its interpreter.
        source: std::io::Error,
    },
}

impl ProcessError {
    fn call(step: &'static str) -> impl Fn(Errno) -> Self {
        move |source| Self::Call { step, source }
    }
}

/// A process, held by a descriptor.
#[derive(Debug)]
pub struct Process {
    fd: OwnedFd,
    pid: Pid,
}

/// Whether a process has executed a program since its fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    /// It has.
    Yes,
    /// It has ended without.
    Never,
    /// It has not yet, or the kernel does not tell.
    Unknown,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with a code from 0 to 255.
    Code(i32),
    /// By a signal, by its number.
    Signal(i32),
}

impl Exit {
    /// The exit code that a shell would show: 128 and the signal's number if one ended it.
    #[must_use]
    pub fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

impl Process {
    /// Takes hold of a process by its number. Unless it is a child that has not been waited for,
    /// make sure afterwards that it is still the one that was meant.
    ///
    /// # Errors
    /// `ESRCH` if there is none.
    pub fn open(pid: Pid) -> Result<Self, ProcessError> {
        let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|errno| Self::failed("take hold of", pid, errno))?;
        Ok(Self { fd, pid })
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// `ESRCH` when it has ended, `EPERM` when it is not ours to signal.
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        rustix::process::pidfd_send_signal(&self.fd, signal)
            .map_err(|errno| Self::failed("signal", self.pid, errno))
    }

    /// A duplicate of one of its descriptors, by its number there.
    ///
    /// # Errors
    /// `EPERM` without the right to trace it (Yama may want `CAP_SYS_PTRACE`), `EBADF` when it has
    /// no such descriptor.
    pub fn descriptor(&self, number: RawFd) -> Result<OwnedFd, ProcessError> {
        rustix::process::pidfd_getfd(&self.fd, number, PidfdGetfdFlags::empty())
            .map_err(|errno| Self::failed("take a descriptor of", self.pid, errno))
    }

    /// Waits until it ends. It must be a child of this process, or have become one
    /// ([`Process::adopt`]).
    ///
    /// # Errors
    /// `ECHILD` when it is not, or has been waited for.
    ///
    /// # Panics
    /// If the kernel reports an end that is neither a code nor a signal.
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

    /// Waits until it ends, but for no longer than `most`; returns how it ended, or none if it has not. It must be a child,
    /// as for [`Process::wait`].
    ///
    /// # Errors
    /// As [`Process::wait`].
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

    /// Waits until it is a child of this process, whose own parent ends now ([`set_subreaper`]). All other children
    /// that have ended by then are waited for, so no other code may wait for children of this process.
    ///
    /// # Errors
    /// `ECHILD` if no process is left that could leave it to this one.
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
            // Only looked at: it may be this very process, which is left to `wait`.
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

    /// Waits until it has executed a program since its fork; returns whether it has. It has not if it ends before, or
    /// takes longer than `most`. It must be a child of this process, so that its number stays its own.
    ///
    /// # Errors
    /// An error of the kernel.
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
            // Asked before: it may execute one and end between the two.
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

    /// Waits until it ends, and forwards to it every signal that arrives in the meantime.
    ///
    /// A signal from the terminal reaches the whole foreground process group, so it is forwarded only to a process
    /// outside of ours: no process gets one Ctrl-C twice.
    ///
    /// A program may ignore requests to end. `asked` is called after each request, with their number so far as
    /// [`Requests`] counts them, so that the caller can insist. `meanwhile` is called now and then, and returns after how much time
    /// to call it again, if at all.
    ///
    /// # Errors
    /// As [`Process::wait`]. A process that ends before a signal reaches it is not an error.
    pub fn supervise(
        &self,
        signals: &Signals,
        asked: &mut dyn FnMut(u32),
        meanwhile: &mut dyn FnMut() -> Option<Duration>,
    ) -> Result<Exit, ProcessError> {
        self.supervise_by(signals, &mut |signal| self.signal(signal), asked, meanwhile)
    }

    /// As [`Process::supervise`], for a process that signals are passed on to in another way.
    ///
    /// # Errors
    /// As [`Process::supervise`], and what `deliver` answers.
    pub fn supervise_by(
        &self,
        signals: &Signals,
        deliver: &mut dyn FnMut(Signal) -> Result<(), ProcessError>,
        asked: &mut dyn FnMut(u32),
        meanwhile: &mut dyn FnMut() -> Option<Duration>,
    ) -> Result<Exit, ProcessError> {
        let mut count = Requests::default();
        loop {
            let most = meanwhile().and_then(|it| Timespec::try_from(it).ok());
            let mut fds = [
                PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            ];
            match rustix::event::poll(&mut fds, most.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
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

/// Counts requests to end: `SIGINT` and `SIGTERM`.
#[derive(Debug, Default)]
pub struct Requests {
    count: u32,
    last: Option<(Signal, Instant)>,
}

/// What sends a signal to a process and to its group, as timeout(1) does, has sent both by then.
const SAME_REQUEST: Duration = Duration::from_millis(100);

impl Requests {
    /// Counts a signal that has arrived. Returns the number of requests so far; none if it is no request, or the same one
    /// once more.
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
    /// Readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether a process has executed a program since its fork; none if there is none of this number. Source: proc_pid_stat(5),
/// field 9, and `PF_FORKNOEXEC` in Linux `include/linux/sched.h`.
#[must_use]
pub fn has_executed(pid: Pid) -> Option<bool> {
    const FORK_NO_EXEC: u64 = 0x40;
    stat_field(pid, 9).map(|flags| flags & FORK_NO_EXEC == 0)
}

/// When a process started, in clock ticks since the boot; none if there is none of this number. With the number, this names
/// a process for as long as the machine runs: [`ProcessIdentity`] is for what may be read after the next boot. Source: proc_pid_stat(5), field 22.
#[must_use]
pub fn start_of(pid: Pid) -> Option<u64> {
    stat_field(pid, 22)
}

/// The number of a process's parent. Source: proc_pid_stat(5), field 4.
#[must_use]
pub fn parent_of(pid: Pid) -> Option<Pid> {
    stat_field(pid, 4).and_then(|it| Pid::from_raw(i32::try_from(it).ok()?))
}

/// A number from proc_pid_stat(5), by the number of its field there, from 4 on.
fn stat_field(pid: Pid, field: usize) -> Option<u64> {
    stat_of(pid)?.split_whitespace().nth(field.checked_sub(3)?)?.parse().ok()
}

/// The fields of proc_pid_stat(5), from the third on.
fn stat_of(pid: Pid) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The second field is the program's name, in parentheses, and may have any of them in it.
    stat.rsplit_once(')').map(|(_, rest)| rest.to_owned())
}

/// Whether the first thread of a process is in `rt_sigtimedwait`, as by sigwait(3). Programs of another word size than this
/// one have another number for it and are not recognised. Source: proc_pid_syscall(5).
#[must_use]
pub fn waits_for_signals(pid: Pid) -> bool {
    let call = std::fs::read_to_string(format!("/proc/{}/syscall", pid.as_raw_nonzero()));
    let number = call.as_deref().ok().and_then(|it| it.split_whitespace().next());
    number.and_then(|it| it.parse().ok()) == Some(libc::SYS_rt_sigtimedwait)
}

/// Makes this process the new parent of descendants whose own parent dies, so that it can wait
/// for a container that its runtime left behind.
///
/// # Errors
/// An error of the kernel.
pub fn set_subreaper() -> Result<(), ProcessError> {
    // PR_SET_CHILD_SUBREAPER takes a boolean; rustix wants a pid, any.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(ProcessError::call("become the parent of orphans"))
}
