//! Scheduling priorities of threads: raised for urgent work, lowered for background work.
#![expect(unsafe_code, reason = "rustix does not set scheduling policies")]

use std::io;
use std::marker::PhantomData;

/// A raised scheduling priority of the thread that made this value, until it is dropped. It cannot be sent to another
/// thread.
#[derive(Debug)]
pub struct Prompt {
    /// The previous nice value, if it was changed.
    nice: Option<i32>,
    thread: PhantomData<*const ()>,
}

/// Makes the scheduler prefer this thread to ordinary threads. The thread gets the lowest realtime priority, or the
/// lowest nice value if control groups allow no realtime priority. Its children run with the default priority.
///
/// This is only for threads with short bursts of work, because a busy thread would block other threads on its
/// processor.
///
/// # Errors
/// `EPERM` without `CAP_SYS_NICE`. The priority is then unchanged.
pub fn be_prompt() -> io::Result<Prompt> {
    if set_policy(libc::SCHED_RR, 1).is_ok() {
        return Ok(Prompt { nice: None, thread: PhantomData });
    }
    // On Linux the nice value belongs to the thread, unlike in POSIX (setpriority(2), "C library/kernel
    // differences").
    let nice = rustix::process::getpriority_process(None)?;
    rustix::process::setpriority_process(None, -20)?;
    set_policy(libc::SCHED_OTHER, 0)?;
    Ok(Prompt { nice: Some(nice), thread: PhantomData })
}

/// Sets this thread's I/O priority to *idle* and its nice value to the highest, for background work. The scheduling
/// policy stays the default: a `SCHED_IDLE` thread might not run for a long time while it holds the file system's
/// journal, and then all writers would wait for it.
pub fn be_idle() {
    // Source: Linux `include/uapi/linux/ioprio.h`.
    const WHO_PROCESS: libc::c_int = 1;
    const IDLE: libc::c_int = 3 << 13;
    let nice = rustix::process::setpriority_process(None, 19);
    // SAFETY: the call takes numbers; 0 is the calling thread.
    let io = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, IDLE) };
    // If either fails, the work competes with other threads.
    let _done = (nice, io);
}

/// Sets the policy of this thread. Its children get the default policy. Source: sched(7), "Reset scheduling policy
/// for child processes".
fn set_policy(policy: i32, sched_priority: i32) -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority };
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the pointer is to a live parameter; 0 is the calling thread.
    match unsafe { libc::sched_setscheduler(0, policy, &raw const parameter) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Prompt {
    fn drop(&mut self) {
        // A thread that may raise its priority may also lower it.
        let _ordinary = set_policy(libc::SCHED_OTHER, 0);
        if let Some(nice) = self.nice {
            let _as_before = rustix::process::setpriority_process(None, nice);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns fields 19 and 41 of proc_pid_stat(5): nice value and policy.
    fn scheduling(stat: &str) -> (i32, i32) {
        let after = stat.rsplit_once(')').unwrap().1;
        let fields: Vec<_> = after.split_whitespace().collect();
        (fields[16].parse().unwrap(), fields[38].parse().unwrap())
    }

    #[test]
    fn only_this_thread_is_prompt() {
        std::thread::spawn(|| {
            let own = || {
                let id = rustix::thread::gettid().as_raw_nonzero();
                let path = format!("/proc/self/task/{id}/stat");
                scheduling(&std::fs::read_to_string(path).unwrap())
            };
            let before = own();
            let Ok(prompt) = be_prompt() else {
                testing::skipped("realtime priorities: only with CAP_SYS_NICE");
                assert_eq!(own(), before);
                return;
            };
            let (nice, policy) = own();
            assert!(policy == libc::SCHED_RR || nice == -20, "{nice} {policy}");
            let child = std::process::Command::new("sh")
                .args(["-c", "read it < /proc/self/stat; echo \"$it\""])
                .output()
                .unwrap();
            let child = scheduling(&String::from_utf8(child.stdout).unwrap());
            assert!(child.0 >= 0 && child.1 == libc::SCHED_OTHER, "{child:?}");
            drop(prompt);
            assert_eq!(own(), before);
        })
        .join()
        .unwrap();
    }
}
