//! Runs work in a forked child that no process waits for.
#![expect(unsafe_code, reason = "fork has no safe form")]

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::Pid;

use super::inherited::close_left_open;
use super::namespaces::end_child;
use super::signals::SignalMask;
use super::{Process, ProcessError};

/// The process that does the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// This process.
    Here,
    /// A child, which has its own copies of all descriptors and is in the same mount namespace. This process should
    /// exit now.
    Behind,
}

/// Does work such as unmounting in the background: in a child with its own session, with `/dev/null` as standard input,
/// output and error, and without other descriptors that this program's caller left open ([`super::settle`]). A process
/// that waits for this one, or reads its output, does not wait for the child. If the fork fails, or if this process has
/// several threads, this process does the work itself. (A child would have only this thread, but the locks of all
/// threads.) `work` is called with the process that runs it.
pub fn finish_behind(work: impl FnOnce(Done)) -> Done {
    if !is_alone() {
        work(Done::Here);
        return Done::Here;
    }
    // SAFETY: there is one thread, so the child is a complete copy of this process and no other thread holds a lock.
    match unsafe { libc::fork() } {
        -1 => {
            work(Done::Here);
            Done::Here
        }
        0 => {
            quiet();
            // A panic must not unwind into the stack frames of the parent's code.
            let ended = catch_unwind(AssertUnwindSafe(|| work(Done::Behind)));
            // SAFETY: ends the process. Buffered output and exit handlers belong to the parent.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        _ => Done::Behind,
    }
}

/// Starts work that outlives this process, such as a container's monitor, in a child like that of [`finish_behind`].
/// The work gets the writing end of a pipe to report its start. Returns the reading end, which reports end of file
/// when the work closes its end or dies, and the child, for signals. The caller need not wait for the child.
///
/// # Errors
/// [`ProcessError`] if the fork fails, if this process has several threads, or if the child cannot be opened. There is
/// then no child, although `work` may have begun.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn start_behind(work: impl FnOnce(OwnedFd)) -> Result<(OwnedFd, Process), ProcessError> {
    if !is_alone_soon() {
        return Err(ProcessError::Call {
            step: "fork a process that has threads",
            source: Errno::BUSY,
        });
    }
    let (answer, report) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(ProcessError::call("make a pipe"))?;
    // SAFETY: as in `finish_behind`.
    match unsafe { libc::fork() } {
        -1 => {
            let errno = Errno::from_io_error(&std::io::Error::last_os_error());
            let source = errno.unwrap_or(Errno::AGAIN);
            Err(ProcessError::Call { step: "make a child", source })
        }
        0 => {
            drop(answer);
            quiet();
            let ended = catch_unwind(AssertUnwindSafe(|| work(report)));
            // SAFETY: as in `finish_behind`.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        child => {
            let pid = Pid::from_raw(child).expect("fork returns a pid");
            // The child has not been reaped, so the pid is still its own.
            let process = Process::open(pid).inspect_err(|_| {
                // The caller takes an error for work that was not started.
                end_child(pid);
            })?;
            Ok((answer, process))
        }
    }
}

/// Starts a server: a child like that of [`start_behind`] with this process's memory, only the descriptors `keep`, no
/// blocked signals, and `/` as its working directory. `prepare` and `work` must not use other descriptors of this
/// process. Returns when `prepare` has succeeded in the child.
///
/// # Errors
/// Those of [`start_behind`], and the error of `prepare`, after which the child has exited.
///
/// # Panics
/// Those of [`start_behind`].
pub fn start_server(
    keep: &[BorrowedFd<'_>],
    prepare: impl FnOnce() -> Result<(), Errno>,
    work: impl FnOnce(),
) -> Result<Process, ProcessError> {
    let mut keep: Vec<RawFd> = keep.iter().map(AsRawFd::as_raw_fd).collect();
    let (answer, process) = start_behind(|report| {
        keep.push(report.as_raw_fd());
        close_others(&keep);
        // With an empty set the call cannot fail.
        let _before = SignalMask::empty().apply(libc::SIG_SETMASK);
        // If this fails, the file system of the working directory is busy and cannot be unmounted.
        let _moved = std::env::set_current_dir("/");
        let prepared = prepare();
        let errno = prepared.err().map_or(0, Errno::raw_os_error);
        // A parent that has exited needs no report.
        let _told = rustix::io::write(&report, &errno.to_le_bytes());
        drop(report);
        if errno == 0 {
            work();
        }
    })?;
    let step = "prepare a server";
    let mut errno = [0; 4];
    let read = File::from(answer).read_exact(&mut errno);
    // Without a report, the child has died.
    let errno = if read.is_ok() { i32::from_le_bytes(errno) } else { libc::ESRCH };
    if errno == 0 {
        return Ok(process);
    }
    match Errno::from_raw_os_error(errno) {
        // The kernel reports a reached limit of namespaces as ENOSPC (user_namespaces(7)); disk space is not the
        // cause.
        Errno::NOSPC => Err(ProcessError::Limit { step }),
        source => Err(ProcessError::Call { step, source }),
    }
}

/// Closes all descriptors except these and standard input, output and error.
fn close_others(keep: &[RawFd]) {
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = all.filter_map(|it| it.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    // The list is completed before the first close, because one of the numbers belongs to the open directory itself.
    let numbers: Vec<_> = numbers.filter(|it| *it > 2 && !keep.contains(it)).collect();
    for number in numbers {
        // SAFETY: the owners are in the parent. This child is a copy that never returns and uses only the kept
        // descriptors.
        unsafe { libc::close(number) };
    }
}

/// Waits up to one second for joined threads: `std::thread::scope` waits for their work, not for their exit in the
/// kernel.
fn is_alone_soon() -> bool {
    (0..200).any(|_| {
        let is_alone = is_alone();
        if !is_alone {
            std::thread::sleep(Duration::from_millis(5));
        }
        is_alone
    })
}

/// Whether this process has only one thread.
pub(super) fn is_alone() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

/// Detaches from the terminal and from pipes. After a failure, other processes may only wait longer.
fn quiet() {
    let _ours_already = rustix::process::setsid();
    close_left_open();
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let Ok(null) = rustix::fs::open("/dev/null", flags, Mode::empty()) else { return };
    let _closed = [
        rustix::stdio::dup2_stdin(&null),
        rustix::stdio::dup2_stdout(&null),
        rustix::stdio::dup2_stderr(&null),
    ];
}
