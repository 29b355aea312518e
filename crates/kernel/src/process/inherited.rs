//! Resets state that a process inherits from its caller across exec and that would change its behaviour.
#![expect(unsafe_code, reason = "signal dispositions, and the memory of the arguments")]

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use super::signals::{SignalMask, is_ignored};

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
    raise_stack()
}

extern "C" fn do_nothing(_signal: libc::c_int) {}

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
