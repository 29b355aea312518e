//! Starting a program with its surroundings in order.
#![expect(unsafe_code, reason = "what runs between fork and exec must be async-signal-safe")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::process::{ChildStderr, ChildStdin, ChildStdout, Command};

use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, Signal};
use rustix::thread::{Gid, ThreadNameSpaceType, Uid, UnshareFlags};

use super::namespaces::set_root_propagation;
use super::signals::SignalMask;
use super::{Process, ProcessError, Signals};
use crate::propagation::Propagation;

/// Settings of a child that [`Command`] does not have. The default changes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup<'a> {
    /// The signals that this process reads: the child gets back the mask from before.
    pub signals: Option<&'a Signals>,
    /// The signal that the child gets when the *thread* that starts it ends. An exec of a set-uid
    /// program clears it.
    pub die_with_parent: Option<Signal>,
    /// A mount namespace of its own; see [`super::own_mounts`].
    pub own_mounts: Option<Propagation>,
    /// A session of its own, away from the terminal.
    pub own_session: bool,
    /// A user namespace whose root the child becomes, and no one else any more.
    pub root_of: Option<BorrowedFd<'a>>,
    /// Descriptors that it inherits, under their numbers here. It inherits no others besides standard input, output and
    /// error.
    pub keep: &'a [BorrowedFd<'a>],
}

/// A started program.
#[derive(Debug)]
pub struct Spawned {
    /// The child; wait for it, lest it stays a zombie.
    pub process: Process,
    /// Its standard input, if that was to be a pipe.
    pub stdin: Option<ChildStdin>,
    /// Its standard output, if that was to be a pipe.
    pub stdout: Option<ChildStdout>,
    /// Its standard error, if that was to be a pipe.
    pub stderr: Option<ChildStderr>,
}

/// Starts a program. The command is taken, since the setup stays in it.
///
/// # Errors
/// [`ProcessError::Spawn`] when the program cannot be executed or a part of the setup is refused.
///
/// # Panics
/// If the kernel gives the child a pid that is none.
pub fn spawn(mut command: Command, setup: &Setup<'_>) -> Result<Spawned, ProcessError> {
    let plan = Plan::new(setup);
    // SAFETY: the plan owns no memory it would free and makes nothing but system calls.
    unsafe { command.pre_exec(move || plan.run().map_err(io::Error::from)) };
    let mut child = command.spawn().map_err(|source| ProcessError::Spawn {
        program: command.get_program().display().to_string(),
        source,
    })?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a pid");
    // It cannot have been waited for, so the number is still its.
    let process = Process::open(pid).inspect_err(|_| {
        // Without a descriptor of it nobody could watch over it. The first error counts.
        let _ended = child.kill().and_then(|()| child.wait());
    })?;
    Ok(Spawned {
        process,
        stdin: child.stdin.take(),
        stdout: child.stdout.take(),
        stderr: child.stderr.take(),
    })
}

/// A [`Setup`] with everything looked up before the fork.
struct Plan {
    mask: Option<SignalMask>,
    die_with_parent: Option<(Signal, Option<Pid>)>,
    own_mounts: Option<Propagation>,
    own_session: bool,
    root_of: Option<RawFd>,
    keep: Vec<RawFd>,
}

impl Plan {
    fn new(setup: &Setup<'_>) -> Self {
        Self {
            mask: setup.signals.map(Signals::before),
            die_with_parent: setup
                .die_with_parent
                .map(|signal| (signal, Some(rustix::process::getpid()))),
            own_mounts: setup.own_mounts,
            own_session: setup.own_session,
            root_of: setup.root_of.map(|it| it.as_raw_fd()),
            keep: setup.keep.iter().map(|fd| fd.as_raw_fd()).collect(),
        }
    }

    /// In the child, between fork and exec: system calls only, no allocation, no locks.
    fn run(&self) -> Result<(), Errno> {
        // First, since the kernel forgets a signal at the parent's death with the ids.
        if let Some(namespace) = self.root_of {
            // SAFETY: the borrowed descriptor outlives `spawn`, which waits for the exec.
            become_root_of(unsafe { BorrowedFd::borrow_raw(namespace) })?;
        }
        if let Some((signal, parent)) = self.die_with_parent {
            rustix::process::set_parent_process_death_signal(Some(signal))?;
            // It may have died before that.
            if rustix::process::getppid() != parent {
                return Err(Errno::SRCH);
            }
        }
        if self.own_session {
            rustix::process::setsid()?;
        }
        if let Some(from_host) = self.own_mounts {
            // SAFETY: without FILES, no thread loses sight of a descriptor.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
            set_root_propagation(from_host)?;
        }
        close_others()?;
        for &number in &self.keep {
            // SAFETY: the borrowed descriptors outlive `spawn`, which waits for the exec.
            let fd = unsafe { BorrowedFd::borrow_raw(number) };
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        if let Some(mask) = self.mask {
            // Last, so that no signal cuts the setup short.
            mask.apply(libc::SIG_SETMASK)?;
        }
        Ok(())
    }
}

/// Only for a process with one thread: the other threads would stay who they are.
fn become_root_of(namespace: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::thread::move_into_thread_name_spaces(namespace, ThreadNameSpaceType::USER)?;
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)
}

/// Closes everything but standard input, output and error at the exec: also what our caller left open without
/// close-on-exec, of which we know nothing.
fn close_others() -> Result<(), Errno> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: it marks descriptors, and closes none before the exec.
    let result = unsafe {
        libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}
