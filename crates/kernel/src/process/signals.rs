//! Receives signals by reading a descriptor (signalfd).
#![expect(unsafe_code, reason = "rustix has neither signal masks nor signalfd")]

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::Signal;
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout};

use super::ProcessError;

/// Blocked signals, which are read from a descriptor instead.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
    before: SignalMask,
}

/// A signal that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    pub signal: Signal,
    pub sender: Sender,
}

/// The sender of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// The kernel, above all the terminal, which signals the whole foreground process group.
    Kernel,
    /// A process, by `kill` and similar calls.
    Process,
}

/// Restores the default action of a signal that this process ignores, as every Rust program ignores `SIGPIPE`.
pub fn die_of(signal: Signal) -> Result<(), ProcessError> {
    // SAFETY: the default action runs no code of this process.
    let before = unsafe { libc::signal(signal.as_raw(), libc::SIG_DFL) };
    if before == libc::SIG_ERR {
        return Err(ProcessError::call("restore the default action of a signal")(
            crate::last_errno(),
        ));
    }
    Ok(())
}

/// Whether this process ignores a signal. `false` for an invalid number.
pub(super) fn is_ignored(signal: i32) -> bool {
    action(signal) == Some(libc::SIG_IGN)
}

/// Returns the action of a signal: its handler, `SIG_DFL` or `SIG_IGN`. `None` for an invalid number.
pub(super) fn action(signal: i32) -> Option<libc::sighandler_t> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call only writes to the buffer that it is given, which has the right type.
    if unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: sigaction has initialised it.
    Some(unsafe { action.assume_init() }.sa_sigaction)
}

impl Signals {
    /// Blocks signals permanently for this thread and its later threads, so that they are only received through
    /// [`Signals::next`]. Call it before any other thread starts, because a signal to the process goes to any thread
    /// that does not block it.
    ///
    /// Signals that the process ignores stay ignored and are not received, because the caller has requested this
    /// (nohup(1)).
    ///
    /// # Errors
    /// An error of the kernel, such as `EMFILE`.
    pub fn block(signals: &[Signal]) -> Result<Self, ProcessError> {
        let failed = ProcessError::call("receive signals");
        let mut set = SignalMask::empty();
        for signal in signals.iter().filter(|it| !is_ignored(it.as_raw())) {
            // SAFETY: the set is initialised; an invalid number is only an error.
            if unsafe { libc::sigaddset(&raw mut set.0, signal.as_raw()) } != 0 {
                return Err(failed(crate::last_errno()));
            }
        }
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: the set is initialised and only read.
        let fd = unsafe { libc::signalfd(-1, &raw const set.0, flags) };
        if fd < 0 {
            return Err(failed(crate::last_errno()));
        }
        // SAFETY: signalfd has just made the descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let before = set.apply(libc::SIG_BLOCK).map_err(failed)?;
        Ok(Self { fd, before })
    }

    /// Returns the next signal that has arrived, if any, without waiting. To wait, poll the descriptor.
    pub fn next(&self) -> Result<Option<Received>, ProcessError> {
        let mut info = SignalInfo::new_zeroed();
        loop {
            match rustix::io::read(&self.fd, info.as_mut_bytes()) {
                Ok(_) => break,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(source) => return Err(ProcessError::Call { step: "read a signal", source }),
            }
        }
        let number = i32::try_from(info.signal).unwrap_or(0);
        // Codes above zero come from the kernel (sigaction(2), si_code).
        let sender = if info.code > 0 { Sender::Kernel } else { Sender::Process };
        Ok(Signal::from_named_raw(number).map(|signal| Received { signal, sender }))
    }

    /// Returns, without waiting, the first received signal that is a request to end, if there is one. Discards the
    /// signals that were received before it.
    #[must_use]
    pub fn ending(&self) -> Option<Signal> {
        while let Ok(Some(received)) = self.next() {
            let signal = received.signal;
            if matches!(signal, Signal::HUP | Signal::INT | Signal::QUIT | Signal::TERM) {
                return Some(signal);
            }
        }
        None
    }

    /// Waits until a signal arrives, or until another descriptor is readable or at its end.
    pub fn wait_or(&self, other: BorrowedFd<'_>) -> Result<(), ProcessError> {
        let mut fds = [
            PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(other, PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(source) => Err(ProcessError::Call { step: "wait for a signal", source }),
        }
    }

    /// Returns the previous signal mask of this thread, with which a child should start.
    pub(super) fn before(&self) -> SignalMask {
        self.before
    }
}

impl AsFd for Signals {
    /// The descriptor is readable when a signal has arrived.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[derive(Clone, Copy)]
pub(super) struct SignalMask(libc::sigset_t);

impl SignalMask {
    pub(super) fn empty() -> Self {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the whole set and cannot fail.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        // SAFETY: initialised just now.
        Self(unsafe { set.assume_init() })
    }

    /// Changes this thread's signal mask and returns the previous one. Makes only a system call, so it may run
    /// between fork and exec.
    pub(super) fn apply(self, how: i32) -> Result<Self, Errno> {
        let mut before = Self::empty();
        // SAFETY: both sets are initialised and live through the call.
        match unsafe { libc::pthread_sigmask(how, &raw const self.0, &raw mut before.0) } {
            0 => Ok(before),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }
}

impl std::fmt::Debug for SignalMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SignalMask")
    }
}

/// `struct signalfd_siginfo` of include/uapi/linux/signalfd.h, with the unused fields as `rest`.
#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
struct SignalInfo {
    signal: u32,
    errno: i32,
    code: i32,
    rest: [u8; 116],
}
const _: () = assert!(size_of::<SignalInfo>() == 128);
