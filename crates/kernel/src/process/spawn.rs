//! Starts programs with a defined signal mask, namespaces and descriptors.
#![expect(unsafe_code, reason = "code between fork and exec must be async-signal-safe")]

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

/// Settings of a child that [`Command`] lacks. The default changes nothing but closes the descriptors of the caller.
#[derive(Clone, Copy, Debug, Default)]
pub struct Setup<'a> {
    /// The signals that this process reads. The child gets the mask from before they were blocked.
    pub signals: Option<&'a Signals>,
    /// The signal that the child gets when the *thread* that starts it exits. An exec of a set-uid program clears
    /// this setting.
    pub die_with_parent: Option<Signal>,
    /// Propagation of a new mount namespace for the child, see [`super::own_mounts`].
    pub own_mounts: Option<Propagation>,
    /// Whether the child gets a new session, without the terminal.
    pub own_session: bool,
    /// A user namespace that the child enters, and in which all its ids become root.
    pub root_of: Option<BorrowedFd<'a>>,
    /// Descriptors that the child inherits under the same numbers. It inherits no others besides standard input,
    /// output and error.
    pub keep: &'a [BorrowedFd<'a>],
}

#[derive(Debug)]
pub struct Spawned {
    /// The child. The caller must wait for it, because it would otherwise stay a zombie.
    pub process: Process,
    /// Its standard input, if [`Command`] made it a pipe.
    pub stdin: Option<ChildStdin>,
    /// Its standard output, if [`Command`] made it a pipe.
    pub stdout: Option<ChildStdout>,
    /// Its standard error, if [`Command`] made it a pipe.
    pub stderr: Option<ChildStderr>,
}

/// Starts a program. Takes ownership of the command, because the setup stays in it.
///
/// # Errors
/// [`ProcessError::Spawn`] if the program cannot be executed or a step of the setup fails.
///
/// # Panics
/// If the kernel returns an invalid pid.
pub fn spawn(mut command: Command, setup: &Setup<'_>) -> Result<Spawned, ProcessError> {
    let plan = PreparedSetup::new(setup);
    // SAFETY: the plan frees no memory and makes only system calls.
    unsafe { command.pre_exec(move || plan.run().map_err(io::Error::from)) };
    let mut child = command.spawn().map_err(|source| ProcessError::Spawn {
        program: command.get_program().display().to_string(),
        source,
    })?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a pid");
    // The child has not been reaped, so the pid is still its own.
    let process = Process::open(pid).inspect_err(|_| {
        // Without a pidfd, the child cannot be supervised, so it is killed. The first error is returned.
        let _ended = child.kill().and_then(|()| child.wait());
    })?;
    Ok(Spawned {
        process,
        stdin: child.stdin.take(),
        stdout: child.stdout.take(),
        stderr: child.stderr.take(),
    })
}

/// A [`Setup`] whose values were all determined before the fork.
struct PreparedSetup {
    mask: Option<SignalMask>,
    die_with_parent: Option<(Signal, Option<Pid>)>,
    own_mounts: Option<Propagation>,
    own_session: bool,
    root_of: Option<RawFd>,
    keep: Vec<RawFd>,
}

impl PreparedSetup {
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

    /// Runs in the child between fork and exec, with only system calls: no allocation, no locks.
    fn run(&self) -> Result<(), Errno> {
        // This comes first, because changing ids clears the parent-death signal.
        if let Some(namespace) = self.root_of {
            // SAFETY: the borrowed descriptor outlives `spawn`, which waits for the exec.
            become_root_of(unsafe { BorrowedFd::borrow_raw(namespace) })?;
        }
        if let Some((signal, parent)) = self.die_with_parent {
            rustix::process::set_parent_process_death_signal(Some(signal))?;
            // The parent may have exited before that call.
            if rustix::process::getppid() != parent {
                return Err(Errno::SRCH);
            }
        }
        if self.own_session {
            rustix::process::setsid()?;
        }
        if let Some(from_host) = self.own_mounts {
            // SAFETY: without CLONE_FILES, all threads keep the same descriptor table.
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
            // The mask is set last, so that no signal interrupts the setup.
            mask.apply(libc::SIG_SETMASK)?;
        }
        Ok(())
    }
}

/// Only for a process with one thread, because other threads would keep their ids.
fn become_root_of(namespace: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::thread::move_into_thread_name_spaces(namespace, ThreadNameSpaceType::USER)?;
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)
}

/// Closes all descriptors except standard input, output and error at the exec, including unknown descriptors that this
/// process's caller left open without close-on-exec.
fn close_others() -> Result<(), Errno> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the call marks descriptors, and closes none before the exec.
    let result = unsafe {
        libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
    };
    match result {
        0 => Ok(()),
        _ => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}
