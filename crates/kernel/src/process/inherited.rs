//! Resets state that a process inherits from its caller across exec and that would change its behaviour.
#![expect(unsafe_code, reason = "signal dispositions, and descriptors that only have numbers")]

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use super::signals::{SignalMask, action, is_ignored};

/// Stack limit of the main thread that [`settle`] tries to set, in bytes. It is the usual limit of Linux systems.
const STACK: u64 = 8 << 20;

/// Smallest stack limit with which this program works, in bytes.
const LEAST_STACK: u64 = 512 << 10;

/// The last standard signal, before the real-time signals. Source: signal(7).
const LAST: libc::c_int = 31;

/// Resource limits that this program may change for itself.
const CHANGED: [Resource; 2] = [Resource::Stack, Resource::Nofile];

/// The limits of [`CHANGED`] that the caller had set.
static AT_START: OnceLock<[Rlimit; CHANGED.len()]> = OnceLock::new();

/// Descriptors that the caller had left open, besides standard input, output and error.
static LEFT_OPEN: OnceLock<Vec<RawFd>> = OnceLock::new();

/// The caller's stack limit is too low.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the stack is limited to {} KiB, and Quire needs {} KiB: raise the limit (`ulimit -Hs`)",
    bytes >> 10,
    LEAST_STACK >> 10
)]
pub struct StackError {
    /// The limit in bytes.
    bytes: u64,
}

/// Makes this process independent of its caller's state. Call it first, before a second thread starts.
///
/// - Unblocks all signals, and resets ignored ones except `PIPE`. `HUP`, `INT` and `QUIT` also stay ignored, because
///   a caller that ignores them wants this program to survive them (nohup(1); background jobs of scripts).
/// - A write beyond the caller's file size limit fails with `EFBIG` instead of ending this process.
/// - Raises the stack limit to the usual size. [`changed_limits`] returns the caller's limits, for other programs
///   that this process starts.
/// - Notes the descriptors that the caller has left open, which processes such as a container's monitor close. This
///   process keeps them, because its arguments may name them (`/dev/fd/3`).
///
/// State that callers set for their children by convention stays: priority, working directory, umask.
///
/// # Errors
/// [`StackError`] if the stack limit cannot be raised enough.
pub fn settle() -> Result<(), StackError> {
    // With an empty set the call cannot fail.
    let _before = SignalMask::empty().apply(libc::SIG_SETMASK);
    let kept = [Signal::PIPE, Signal::HUP, Signal::INT, Signal::QUIT];
    // Real-time signals are left out, because callers have no reason to ignore them.
    let all = (1..=LAST).filter(|it| !kept.iter().any(|kept| kept.as_raw() == *it));
    for number in all.filter(|it| is_ignored(*it)) {
        // SAFETY: the default action runs no code of this process.
        let _before = unsafe { libc::signal(number, libc::SIG_DFL) };
    }
    // A handler instead of `SIG_IGN`, because exec resets a handler to the default action.
    let handler: extern "C" fn(libc::c_int) = do_nothing;
    // SAFETY: the handler does nothing.
    let _before = unsafe { libc::signal(libc::SIGXFSZ, handler as libc::sighandler_t) };
    AT_START.get_or_init(|| CHANGED.map(getrlimit));
    LEFT_OPEN.get_or_init(all_left_open);
    raise_stack()
}

// The compiler makes copies of small functions, and the address of this one is compared.
#[inline(never)]
extern "C" fn do_nothing(_signal: libc::c_int) {}

/// Whether a signal may call a function of this process that does something. Handlers of faults do not count: Rust's
/// report that the stack is full, before the process ends.
pub(super) fn handles_signals() -> bool {
    let mut others =
        (1..=libc::SIGRTMAX()).filter(|it| ![libc::SIGSEGV, libc::SIGBUS].contains(it));
    others.any(handles)
}

fn handles(signal: libc::c_int) -> bool {
    let nothing: extern "C" fn(libc::c_int) = do_nothing;
    let harmless = [libc::SIG_DFL, libc::SIG_IGN, nothing as libc::sighandler_t];
    action(signal).is_some_and(|it| !harmless.contains(&it))
}

fn all_left_open() -> Vec<RawFd> {
    let Ok(all) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let numbers = all.filter_map(|it| it.ok()?.file_name().to_str()?.parse().ok());
    // The directory of the list itself is closed on exec.
    numbers.filter(|it| *it > 2 && stays_at_exec(*it)).collect()
}

fn stays_at_exec(number: RawFd) -> bool {
    // SAFETY: the call only reads; the number of a closed descriptor is an error.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    flags >= 0 && flags & libc::FD_CLOEXEC == 0
}

/// Returns a descriptor that this process's caller had left open, by its number. `None` if there is none, or this process
/// has taken it over.
#[must_use]
pub fn left_open(number: RawFd) -> Option<BorrowedFd<'static>> {
    let is_left = LEFT_OPEN.get()?.contains(&number) && stays_at_exec(number);
    // SAFETY: the descriptor was open before this program began, and only `close_left_open` closes it, in a child that
    // then no longer uses it.
    is_left.then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

/// Closes the descriptors that the caller had left open and that this process has not taken over. For a child that
/// outlives its parent: a script may wait until a lock or a pipe is closed everywhere.
pub(super) fn close_left_open() {
    let numbers = LEFT_OPEN.get().into_iter().flatten().copied();
    // This process opens its own descriptors with close-on-exec, and sets that for those that it takes over.
    for number in numbers.filter(|it| stays_at_exec(*it)) {
        // SAFETY: the descriptor was open before this program began, and none of its code owns it.
        unsafe { libc::close(number) };
    }
}

/// Raises the stack limit. The kernel checks the limit when the stack grows, and keeps at least 128 MiB of address
/// space free for its growth.
fn raise_stack() -> Result<(), StackError> {
    let limit = getrlimit(Resource::Stack);
    if limit.current.is_none_or(|it| it >= STACK) {
        return Ok(());
    }
    let maximum = limit.maximum.map(|it| it.max(STACK));
    let whole = Rlimit { current: Some(STACK), maximum };
    if setrlimit(Resource::Stack, whole).is_ok() {
        return Ok(());
    }
    // Only root may raise the hard limit.
    let most = Rlimit { current: limit.maximum, ..limit };
    let bytes = match (setrlimit(Resource::Stack, most), limit.maximum) {
        (Ok(()), Some(maximum)) => maximum,
        _ => limit.current.unwrap_or(STACK),
    };
    if bytes < LEAST_STACK { Err(StackError { bytes }) } else { Ok(()) }
}

/// Returns the limits that this process has changed, with the caller's values.
#[must_use]
pub fn changed_limits() -> Vec<(Resource, Rlimit)> {
    let Some(at_start) = AT_START.get() else { return Vec::new() };
    let all = CHANGED.into_iter().zip(at_start.iter().copied());
    all.filter(|(resource, limit)| getrlimit(*resource) != *limit).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    static IS_CALLED: AtomicBool = AtomicBool::new(false);

    extern "C" fn note(_signal: libc::c_int) {
        IS_CALLED.store(true, Ordering::Relaxed);
    }

    #[test]
    fn handlers_that_do_something_are_found() {
        let set = |handler: libc::sighandler_t| {
            // SAFETY: the handlers only store a value, or do nothing.
            let before = unsafe { libc::signal(libc::SIGRTMAX(), handler) };
            assert_ne!(before, libc::SIG_ERR);
        };
        // Other tests of this process may handle other signals at the same time.
        let is_handled = || handles(libc::SIGRTMAX());
        assert!(!is_handled());
        let nothing: extern "C" fn(libc::c_int) = do_nothing;
        set(nothing as libc::sighandler_t);
        assert!(!is_handled());
        let something: extern "C" fn(libc::c_int) = note;
        set(something as libc::sighandler_t);
        assert!(is_handled());
        assert!(handles_signals());
        set(libc::SIG_IGN);
        assert!(!is_handled());
        set(libc::SIG_DFL);
    }
}
