//! The rest of a process's work, done by a child of which nobody waits.
#![expect(unsafe_code, reason = "fork has no safe form")]

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::Pid;

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

/// Does work that nobody has to wait for, such as taking mounts down: in a child with a session of its own and with
/// `/dev/null` for standard input, output and error; whoever waits for this process or reads its output does not wait for
/// the child. Where there can be no such child, or this process has more than one thread (of which a child would have only
/// this one, and the locks of all), the work is done here.
pub fn finish_behind(work: impl FnOnce()) -> Done {
    if !is_alone() {
        work();
        return Done::Here;
    }
    // SAFETY: there is one thread, so the child is a whole copy of this process: no lock is held by anybody else.
    match unsafe { libc::fork() } {
        -1 => {
            work();
            Done::Here
        }
        0 => {
            quiet();
            // A panic must not go on in what is the parent's part of the stack.
            let ended = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: ends the process; what is buffered or registered for its end is the parent's.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        _ => Done::Behind,
    }
}

/// Starts work that outlives this process, such as to watch over a container: in a child as that of [`finish_behind`]. The
/// work is given the end of a pipe to say how it began; the answer is the other end, which is at its end when the work has
/// closed its own, or has died; and the child, for signals (nobody has to wait for it).
///
/// # Errors
/// [`ProcessError`] when there can be no child, or this process has more than one thread.
///
/// # Panics
/// If `fork` answers a pid that is none.
pub fn start_behind(work: impl FnOnce(OwnedFd)) -> Result<(OwnedFd, Process), ProcessError> {
    if !is_alone() {
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
