//! The rest of a process's work, done by a child that no process waits for.
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

use super::signals::SignalMask;
use super::{Process, ProcessError};

/// Who did the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// It is done.
    Here,
    /// A child does it, which has its own copies of all descriptors and is in the same mount namespace. This process
    /// should end now.
    Behind,
}

/// Does work in the background, such as unmounting, and tells it by whom: in a child with its own session, and with `/dev/null` as standard
/// input, output and error. A process that waits for this one, or reads its output, does not wait for the child.
/// Without such a child, or in a process with several threads, the work is done here. (A child would have only this
/// thread, but the locks of all.)
pub fn finish_behind(work: impl FnOnce(Done)) -> Done {
    if !is_alone() {
        work(Done::Here);
        return Done::Here;
    }
    // SAFETY: there is one thread, so the child is a whole copy of this process: no lock is held by anybody else.
    match unsafe { libc::fork() } {
        -1 => {
            work(Done::Here);
            Done::Here
        }
        0 => {
            quiet();
            // A panic must not go on in what is the parent's part of the stack.
            let ended = catch_unwind(AssertUnwindSafe(|| work(Done::Behind)));
            // SAFETY: ends the process; what is buffered or registered for its end is the parent's.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        _ => Done::Behind,
    }
}

/// Starts work that outlives this process, such as a container's monitor: in a child as that of [`finish_behind`]. The
/// work gets one end of a pipe, to report how it began. Returns the other end, which ends when the work closes its own
/// or dies. Also returns the child, for signals; it need not be waited for.
///
/// # Errors
/// [`ProcessError`] if a child cannot be made, or this process has several threads.
///
/// # Panics
/// If `fork` returns an invalid pid.
pub fn start_behind(work: impl FnOnce(OwnedFd)) -> Result<(OwnedFd, Process), ProcessError> {
    if !is_alone_soon() {
        return Err(ProcessError::Call {
            step: "leave a process with threads to a child",
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
            let pid = Pid::from_raw(child).expect("fork answers a pid");
            // It has not been waited for, so the number is its.
            Ok((answer, Process::open(pid)?))
        }
    }
}

/// Starts a server: a child as that of [`start_behind`] that has this process's memory, these descriptors and no others, no
/// blocked signals, and `/` as its directory. Nothing that it does may use what else is open in this process. Returns when
/// `prepare` has succeeded there.
///
/// # Errors
/// As [`start_behind`], and the error of `prepare`. There is no server then.
///
/// # Panics
/// As [`start_behind`].
pub fn start_server(
    keep: &[BorrowedFd<'_>],
    prepare: impl FnOnce() -> Result<(), Errno>,
    work: impl FnOnce(),
) -> Result<Process, ProcessError> {
    let mut keep: Vec<RawFd> = keep.iter().map(AsRawFd::as_raw_fd).collect();
    let (answer, process) = start_behind(|report| {
        keep.push(report.as_raw_fd());
        close_others(&keep);
        // With an empty set this cannot fail.
        let _before = SignalMask::empty().apply(libc::SIG_SETMASK);
        // If it fails, a file system may be busy for somebody who unmounts it.
        let _moved = std::env::set_current_dir("/");
        let prepared = prepare();
        let errno = prepared.err().map_or(0, Errno::raw_os_error);
        // A parent that has ended needs no answer.
        let _told = rustix::io::write(&report, &errno.to_le_bytes());
        drop(report);
        if errno == 0 {
            work();
        }
    })?;
    let step = "prepare a server";
    let mut errno = [0; 4];
    let read = File::from(answer).read_exact(&mut errno);
    // It died if it reported nothing.
    let errno = if read.is_ok() { i32::from_le_bytes(errno) } else { libc::ESRCH };
    if errno == 0 {
        return Ok(process);
    }
    match Errno::from_raw_os_error(errno) {
        // The kernel's word for a limit of namespaces (user_namespaces(7)), which has nothing to do with disks.
        Errno::NOSPC => Err(ProcessError::Limit { step }),
        source => Err(ProcessError::Call { step, source }),
    }
}

/// Closes all descriptors but these, and standard input, output and error.
fn close_others(keep: &[RawFd]) {
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return };
    let numbers = all.filter_map(|it| it.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    // As a list first, since one of them is that of the folder.
    let numbers: Vec<_> = numbers.filter(|it| *it > 2 && !keep.contains(it)).collect();
    for number in numbers {
        // SAFETY: who owns it is the parent, of which this is a copy that never returns and uses only what is kept.
        unsafe { libc::close(number) };
    }
}

/// The kernel may still have threads whose work is over, and that were waited for: `std::thread::scope` waits for the work.
fn is_alone_soon() -> bool {
    (0..200).any(|_| {
        let is_alone = is_alone();
        if !is_alone {
            std::thread::sleep(Duration::from_millis(5));
        }
        is_alone
    })
}

fn is_alone() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

/// Lets go of the terminal and of pipes. What fails only makes somebody wait.
fn quiet() {
    let _ours_already = rustix::process::setsid();
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let Ok(null) = rustix::fs::open("/dev/null", flags, Mode::empty()) else { return };
    let _closed = [
        rustix::stdio::dup2_stdin(&null),
        rustix::stdio::dup2_stdout(&null),
        rustix::stdio::dup2_stderr(&null),
    ];
}
