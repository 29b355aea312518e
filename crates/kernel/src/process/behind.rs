//! The rest of a process's work, done by a child of which nobody waits.
#![expect(unsafe_code, reason = "fork has no safe form")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::fs::{Mode, OFlags};

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
