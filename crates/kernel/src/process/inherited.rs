//! State that a process inherits from its caller over an exec, and that would change how it works.
#![expect(unsafe_code, reason = "signal dispositions, and the memory of the arguments")]

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use super::signals::{SignalMask, is_ignored};

/// The stack that the main thread gets if the limits allow it, in bytes. It is the usual limit of Linux systems.
const STACK: u64 = 8 << 20;

/// The least stack with which this program works, in bytes.
const LEAST_STACK: u64 = 512 << 10;

/// The last signal that is no real-time signal. Source: signal(7).
const LAST: libc::c_int = 31;

/// Limits that this program may change for itself.
const CHANGED: [Resource; 2] = [Resource::Stack, Resource::Nofile];

/// The limits of [`CHANGED`] as the caller set them.
static AT_START: OnceLock<[Rlimit; CHANGED.len()]> = OnceLock::new();

/// The caller's limit of the stack is too low.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the stack is limited to {} KiB, and Quire needs {} KiB: raise the limit (`ulimit -Hs`)",
    bytes >> 10,
    LEAST_STACK >> 10
)]
pub struct StackError {
    /// The limit.
    bytes: u64,
}

/// Makes this process independent of its caller's state. Call it first, before there is a second thread.
///
/// - No signal is blocked, and none is ignored but `PIPE`. A caller that ignores `HUP`, `INT` or `QUIT` wants that this
///   program survives them (nohup(1); background jobs of scripts): these stay ignored.
/// - A file that becomes larger than the caller's limit is an error (`EFBIG`), and does not end this process.
/// - The stack may grow to the usual size. [`changed_limits`] has the limits of the caller, for programs of others.
///
/// What a program sets for its children by habit stays: priority, the current directory, the file mode mask.
///
/// # Errors
/// [`StackError`] if the stack cannot be large enough.
pub fn settle() -> Result<(), StackError> {
    // With an empty set this cannot fail.
    let _before = SignalMask::empty().apply(libc::SIG_SETMASK);
    let kept = [Signal::PIPE, Signal::HUP, Signal::INT, Signal::QUIT];
    // Real-time signals have no effect that anybody ignores.
    let all = (1..=LAST).filter(|it| !kept.iter().any(|kept| kept.as_raw() == *it));
    for number in all.filter(|it| is_ignored(*it)) {
        // SAFETY: the default action runs no code of this process.
        let _before = unsafe { libc::signal(number, libc::SIG_DFL) };
    }
    // A handler, and not `SIG_IGN`: at an exec it becomes the default action again.
    let handler: extern "C" fn(libc::c_int) = do_nothing;
    // SAFETY: the handler touches nothing.
    let _before = unsafe { libc::signal(libc::SIGXFSZ, handler as libc::sighandler_t) };
    AT_START.get_or_init(|| CHANGED.map(getrlimit));
    raise_stack()
}

extern "C" fn do_nothing(_signal: libc::c_int) {}

/// The kernel looks at the limit when the stack grows, and keeps at least 128 MiB of addresses free for that.
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

/// The limits of this process that are not as its caller set them, with the caller's values.
#[must_use]
pub fn changed_limits() -> Vec<(Resource, Rlimit)> {
    let Some(at_start) = AT_START.get() else { return Vec::new() };
    let all = CHANGED.into_iter().zip(at_start.iter().copied());
    all.filter(|(resource, limit)| getrlimit(*resource) != *limit).collect()
}
