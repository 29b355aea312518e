//! Handles signals while a verb works.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use kernel::process::{Signal, Signals};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use store::Store;

use crate::output::report;

/// Signals that a user's Ctrl-C, a service manager or a terminal may send. `SIGKILL` and `SIGSTOP` cannot be
/// forwarded.
pub(crate) const FORWARDED: [Signal; 9] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::WINCH,
    Signal::CONT,
    Signal::ALARM,
];

/// Lets an interrupt end the wait for a lock of the store.
pub(crate) fn give_up_when(store: &Store, cancel: &Arc<AtomicBool>) {
    let cancel = Arc::clone(cancel);
    store.give_up_when(move || cancel.load(Ordering::Relaxed));
}

/// Runs `work` and sets `cancel` when SIGINT, SIGTERM or SIGHUP arrives; a second signal kills the process.
pub(crate) fn until_signal<T: Send>(
    cancel: &AtomicBool,
    work: impl FnOnce() -> T + Send,
) -> anyhow::Result<T> {
    until_stopped(cancel, |_| Heard::ToEnd, work)
}

/// Effect of a signal on the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// The work must end.
    ToEnd,
    /// The signal was handled, and the work continues.
    Done,
}

/// Like [`until_signal`], for work that uses some of these signals itself: `hear` gets each of them first.
pub(crate) fn until_stopped<T: Send>(
    cancel: &AtomicBool,
    hear: impl Fn(Signal) -> Heard,
    work: impl FnOnce() -> T + Send,
) -> anyhow::Result<T> {
    let signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let done = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
        .context("cannot make an event descriptor")?;
    let result = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let result = work();
            // The write blocks only if the eventfd's counter would exceed 2^64 - 2.
            let _told = rustix::io::write(&done, &1_u64.to_le_bytes());
            result
        });
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(done.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            ];
            // After a failed or interrupted poll, the loop polls again. The loop ends when the worker ends.
            let _ready = rustix::event::poll(&mut fds, None);
            if !fds[0].revents().is_empty() {
                break;
            }
            if let Ok(Some(received)) = signals.next()
                && hear(received.signal) == Heard::ToEnd
            {
                // The work checks `cancel` at least ten times per second, unless a disk or a network file system
                // blocks it. The store survives a kill: its state stays valid, and the next command removes the
                // leftovers.
                if cancel.swap(true, Ordering::Relaxed) {
                    report::error_line("quire: stopped at once");
                    let _gone = rustix::process::kill_process(
                        rustix::process::getpid(),
                        rustix::process::Signal::KILL,
                    );
                }
            }
        }
        worker.join()
    });
    match result {
        Ok(result) => Ok(result),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
