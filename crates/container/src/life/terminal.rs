//! Connects a container's terminal to the caller's: copies bytes both ways, sets the size, and handles the few keys
//! that Quire interprets.
//!
//! The runtime creates the terminal and passes its master side ([`kernel::terminal::Receiver`]). If the runtime
//! copied the bytes itself, the caller could not detach, and crun 1.8 would not set the size.

use std::io::{PipeReader, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernel::process::{Pid, ProcessError, Signal, Signals};
use kernel::terminal::{Modes, Receiver, interrupted_by_ctrl_c, receive, resize, send, size};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::bundle::spec::{ConsoleSize, SpecProcess};
use crate::life::init_signals::{first_process, is_spared};
use crate::life::log::record::LogStream;
use crate::life::log::{Log, LogLimit};

/// Ctrl-C, and the two keys by which a caller detaches from a container, as in Docker.
const CTRL_C: u8 = 3;
const CTRL_P: u8 = 16;
const CTRL_Q: u8 = 17;

/// Ctrl-D, by which a terminal's reader gets an end of file. Source: termios(3), `VEOF`.
const CTRL_D: u8 = 4;

/// Time in which a further Ctrl-C counts as the second one.
pub const SHORT_MOMENT: Duration = Duration::from_secs(2);

/// Interval between checks whether a process has opened a terminal again that was not open anywhere.
const REOPENED: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Writes the size of the caller's terminal into a process's configuration, so that the program starts with it.
pub fn note_size(process: &mut SpecProcess, terminal: BorrowedFd<'_>) {
    if let Some(size) = size(terminal) {
        process.console_size = Some(ConsoleSize { height: size.ws_row, width: size.ws_col });
    }
}

/// How the copying ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The container has ended.
    Ended,
    /// The caller has typed Ctrl-P Ctrl-Q.
    Detached,
}

/// A caller's terminal that is connected to a container's.
#[derive(Debug)]
pub struct Attached<'a> {
    pub input: BorrowedFd<'a>,
    /// Destination of the container's output.
    pub output: BorrowedFd<'a>,
    /// Signals that arrive during the connection.
    pub signals: &'a Signals,
    /// Readable when the container has ended.
    pub over: BorrowedFd<'a>,
    /// Whether the caller can detach.
    pub can_detach: bool,
}

/// Handles events other than data.
pub trait Events {
    /// Handles a signal that does not concern the terminal itself.
    ///
    /// # Errors
    /// An error ends the connection.
    fn signal(&mut self, signal: Signal) -> Result<(), ProcessError>;

    /// Handles a Ctrl-C that interrupts this process group. `since` is the time since the last one.
    fn interrupted(&mut self, group: Pid, since: Option<Duration>);

    /// Handles output of the container, which is also written to the caller's terminal.
    fn output(&mut self, _bytes: &[u8]) {}
}

/// The log of a kept container, which the process at its terminal writes.
#[derive(Debug)]
pub struct TerminalLog {
    folder: PathBuf,
    limit: LogLimit,
    log: Option<Log>,
}

impl TerminalLog {
    pub(crate) fn new(folder: &Path, limit: LogLimit) -> Self {
        Self { folder: folder.to_owned(), limit, log: None }
    }

    /// Adds output to the log. Output is lost if the log cannot be opened.
    pub fn write(&mut self, bytes: &[u8]) {
        if self.log.is_none() {
            let failed = |error: &std::io::Error| {
                tracing::debug!(%error, "the log lacks output of the terminal");
            };
            self.log = Log::open(&self.folder, self.limit).inspect_err(failed).ok();
        }
        if let Some(log) = &mut self.log {
            log.write(LogStream::Output, bytes);
        }
    }
}

/// Restores the caller's terminal on drop.
struct Raw<'a>(&'a Modes);

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        self.0.restore();
    }
}

impl Attached<'_> {
    /// Waits for the terminal that a runtime creates; `None` if the runtime exits first.
    ///
    /// # Errors
    /// Errors of the kernel and of `events`.
    pub fn wait(
        &self,
        receiver: &Receiver,
        events: &mut dyn Events,
    ) -> Result<Option<OwnedFd>, ProcessError> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(receiver.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.over, PollFlags::IN),
            ];
            wait_for(&mut fds, None)?;
            let is_over = !fds[2].revents().is_empty();
            while let Some(received) = self.signals.next()? {
                if received.signal != Signal::WINCH {
                    events.signal(received.signal)?;
                }
            }
            let received = receiver.receive().map_err(|error| ProcessError::Call {
                step: "receive the container's terminal",
                source: Errno::from_io_error(&error).unwrap_or(Errno::IO),
            })?;
            if let Some(master) = &received {
                // Set immediately, because this is the first size for a program that crun executes in a container.
                self.resize(master.as_fd());
            }
            if received.is_some() || is_over {
                return Ok(received);
            }
        }
    }

    /// Sets the size of the container's terminal to the caller's.
    fn resize(&self, master: BorrowedFd<'_>) {
        if let Some(size) = size(self.input)
            && let Err(error) = resize(master, size)
        {
            tracing::debug!(%error, "cannot resize the container's terminal");
        }
    }

    /// Copies until the container ends or the caller detaches. When this returns, all output until then is written.
    ///
    /// # Errors
    /// Errors of the kernel and of `events`. The caller's terminal is restored in any case.
    ///
    /// `modes` are those of the caller's terminal. `None` if the input is none: its end is typed as Ctrl-D.
    pub fn copy(
        &self,
        modes: Option<&Modes>,
        master: OwnedFd,
        events: &mut dyn Events,
    ) -> Result<(Left, Option<OwnedFd>), ProcessError> {
        let failed = |source| ProcessError::Call { step: "connect terminals", source };
        let flags = rustix::fs::fcntl_getfl(&master).map_err(failed)?;
        rustix::fs::fcntl_setfl(&master, flags | OFlags::NONBLOCK).map_err(failed)?;
        let raw = modes.map(Raw);
        let _hung_up = modes.map(Modes::set_raw);
        let mut copying = Copying {
            attached: self,
            master: Some(master),
            pending: Vec::new(),
            keys: Keys { can_detach: self.can_detach && modes.is_some(), ..Keys::default() },
            has_input: true,
            is_terminal: modes.is_some(),
            is_idle: false,
            last: None,
        };
        copying.follow_size();
        let left = copying.run(modes, events);
        drop(raw);
        Ok((left?, copying.master))
    }
}

struct Copying<'a> {
    attached: &'a Attached<'a>,
    /// `None` if the caller's terminal was hung up, or the reader of its output is gone.
    master: Option<OwnedFd>,
    /// Typed bytes that the container has not taken yet.
    pending: Vec<u8>,
    keys: Keys,
    has_input: bool,
    /// Whether the input is a terminal.
    is_terminal: bool,
    /// Whether no process has the container's side open.
    is_idle: bool,
    last: Option<Instant>,
}

impl Copying<'_> {
    fn run(
        &mut self,
        modes: Option<&Modes>,
        events: &mut dyn Events,
    ) -> Result<Left, ProcessError> {
        loop {
            let wants_room = !self.pending.is_empty() && !self.is_idle;
            let mut wanted = if self.is_idle { PollFlags::empty() } else { PollFlags::IN };
            wanted.set(PollFlags::OUT, wants_room);
            let mut fds = vec![
                PollFd::from_borrowed_fd(self.attached.over, PollFlags::IN),
                PollFd::from_borrowed_fd(self.attached.signals.as_fd(), PollFlags::IN),
            ];
            let takes_input = self.has_input && self.pending.is_empty() && self.master.is_some();
            if takes_input {
                fds.push(PollFd::from_borrowed_fd(self.attached.input, PollFlags::IN));
            }
            let master = self.master.as_ref().filter(|_| !self.is_idle);
            if let Some(master) = master {
                fds.push(PollFd::from_borrowed_fd(master.as_fd(), wanted));
            }
            let patience = (self.is_idle && self.master.is_some()).then_some(REOPENED);
            wait_for(&mut fds, patience.as_ref())?;
            let is_over = !fds[0].revents().is_empty();
            let is_typed = takes_input && !fds[2].revents().is_empty();
            drop(fds);
            while let Some(received) = self.attached.signals.next()? {
                match received.signal {
                    Signal::WINCH => self.follow_size(),
                    signal => {
                        if signal == Signal::CONT {
                            // A shell may have changed the modes of the terminal.
                            let _hung_up = modes.map(Modes::set_raw);
                        }
                        events.signal(signal)?;
                    }
                }
            }
            // This is also done once after the end, for output that was written before the end.
            self.show(events);
            if is_over {
                return Ok(Left::Ended);
            }
            if is_typed && self.take_typed(events) {
                return Ok(Left::Detached);
            }
            self.give();
        }
    }

    fn follow_size(&self) {
        if let Some(master) = &self.master {
            self.attached.resize(master.as_fd());
        }
    }

    /// Writes the container's output so far.
    fn show(&mut self, events: &mut dyn Events) {
        let mut bytes = [0; 1 << 14];
        while let Some(master) = &self.master {
            match rustix::io::read(master, &mut bytes) {
                Ok(length @ 1..) => {
                    self.is_idle = false;
                    events.output(&bytes[..length]);
                    if !write_all(self.attached.output, &bytes[..length]) {
                        // Handled like a closed terminal window.
                        self.master = None;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    self.is_idle = false;
                    return;
                }
                // EIO: no process has the terminal open, but a process may open it again.
                Ok(0) | Err(_) => {
                    self.is_idle = true;
                    return;
                }
            }
        }
    }

    /// Reads the typed bytes. Returns whether they were the keys to detach.
    fn take_typed(&mut self, events: &mut dyn Events) -> bool {
        let mut bytes = [0; 4096];
        let length = match rustix::io::read(self.attached.input, &mut bytes) {
            Ok(length @ 1..) => length,
            Err(Errno::INTR | Errno::AGAIN) => return false,
            Ok(0) if !self.is_terminal => {
                self.has_input = false;
                self.pending.push(CTRL_D);
                return false;
            }
            Ok(0) | Err(_) => {
                // The caller's terminal was hung up, so the container's terminal is hung up as well.
                self.has_input = false;
                self.master = None;
                return false;
            }
        };
        let typed = self.keys.read(&bytes[..length], &mut self.pending);
        let group = self.master.as_ref().and_then(|it| interrupted_by_ctrl_c(it.as_fd()));
        for _ in 0..typed.interrupts {
            let since = self.last.replace(Instant::now()).map(|it| it.elapsed());
            if let Some(group) = group {
                events.interrupted(group, since);
            }
        }
        typed.detach
    }

    /// Passes as many typed bytes to the container as it accepts.
    fn give(&mut self) {
        let Some(master) = &self.master else {
            self.pending.clear();
            return;
        };
        match rustix::io::write(master, &self.pending) {
            Ok(taken) => drop(self.pending.drain(..taken)),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => {
                tracing::debug!(%error, "lost input from the terminal");
                self.pending.clear();
            }
        }
    }
}

fn wait_for(fds: &mut [PollFd<'_>], most: Option<&Timespec>) -> Result<(), ProcessError> {
    match poll(fds, most) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(source) => Err(ProcessError::Call { step: "wait for a terminal", source }),
    }
}

/// Whether all bytes could be written.
fn write_all(to: BorrowedFd<'_>, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match rustix::io::write(to, bytes) {
            Ok(0) => return false,
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let _waited = poll(&mut [PollFd::from_borrowed_fd(to, PollFlags::OUT)], None);
            }
            Err(_) => return false,
        }
    }
    true
}

/// Interprets keys.
#[derive(Debug, Default)]
struct Keys {
    can_detach: bool,
    /// Whether a Ctrl-P waits for the next key.
    held: bool,
}

#[derive(Debug, PartialEq, Eq)]
struct Typed {
    interrupts: usize,
    detach: bool,
}

impl Keys {
    /// Adds the bytes for the container to `pass`. Bytes after the keys to detach are dropped.
    fn read(&mut self, typed: &[u8], pass: &mut Vec<u8>) -> Typed {
        let mut interrupts = 0;
        for &byte in typed {
            if std::mem::take(&mut self.held) {
                if byte == CTRL_Q {
                    return Typed { interrupts, detach: true };
                }
                pass.push(CTRL_P);
            }
            if byte == CTRL_P && self.can_detach {
                self.held = true;
                continue;
            }
            interrupts += usize::from(byte == CTRL_C);
            pass.push(byte);
        }
        Typed { interrupts, detach: false }
    }
}

/// Whether the kernel drops a `SIGINT` of the terminal for the container's first process. This is so if the process is
/// in this process group, and neither handles, ignores nor waits for the signal.
#[must_use]
pub fn is_spared_interrupts(folder: &Path, group: Pid) -> bool {
    let is_of_group = |pid| rustix::process::getpgid(Some(pid)) == Ok(group);
    first_process(folder).is_some_and(|pid| is_of_group(pid) && is_spared(pid, Signal::INT))
}

/// Messages from the caller's process to its container's monitor: the caller detaches and passes the terminal, or the
/// caller is done.
const DETACH: u8 = b'd';
const DONE: u8 = b'.';

/// The caller's end of the connection to its container's monitor.
#[derive(Debug)]
pub struct Link(UnixStream);

/// The monitor's end of the connection.
#[derive(Debug)]
pub struct Keeper(UnixStream);

/// Creates the two ends of a connection.
pub fn link() -> std::io::Result<(Link, Keeper)> {
    let (one, other) = UnixStream::pair()?;
    Ok((Link(one), Keeper(other)))
}

impl Link {
    /// Leaves the terminal to the monitor.
    pub fn leave(self, master: BorrowedFd<'_>) -> std::io::Result<()> {
        Ok(send(&self.0, DETACH, master)?)
    }

    /// Reports that the caller's terminal is restored.
    pub fn done(mut self) {
        // The monitor may have exited.
        let _unheard = self.0.write_all(&[DONE]);
    }
}

impl Keeper {
    /// Takes over the container's terminal if the caller leaves it, and calls `takes_over`. Then it writes the
    /// terminal's output into the log in the container's folder. Restores the caller's terminal if the caller is
    /// killed. Returns when the caller is gone, or when no process has the container's terminal open.
    pub fn keep(
        self,
        modes: Option<Modes>,
        folder: &Path,
        log_size: LogLimit,
        takes_over: &dyn Fn(),
    ) {
        match receive(&self.0) {
            Ok((Some(DETACH), Some(master))) => {
                takes_over();
                drop((self, modes));
                keep_log(&master, folder, log_size);
            }
            Ok((Some(_), _)) => {}
            Ok((None, _)) | Err(_) => modes.iter().for_each(Modes::restore),
        }
    }
}

/// Waits for the terminal of a container that has no caller, and writes its output into the log in the container's
/// folder. Returns at the end of `over`, when no process has the terminal open. Each run of the program has its own
/// terminal.
pub(crate) fn keep_own(receiver: &Receiver, over: &PipeReader, folder: &Path, log_size: LogLimit) {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(receiver.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(over.as_fd(), PollFlags::IN),
        ];
        if wait_for(&mut fds, None).is_err() {
            return;
        }
        let is_over = !fds[1].revents().is_empty();
        match receiver.receive() {
            Ok(Some(master)) => {
                keep_log(&master, folder, log_size);
            }
            Ok(None) if !is_over => {}
            Ok(None) | Err(_) => return,
        }
    }
}

fn keep_log(master: &OwnedFd, folder: &Path, log_size: LogLimit) {
    let Ok(mut log) = Log::open(folder, log_size) else { return };
    let mut bytes = [0; 1 << 14];
    loop {
        match rustix::io::read(master, &mut bytes) {
            Ok(length @ 1..) => log.write(LogStream::Output, &bytes[..length]),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let _waited =
                    poll(&mut [PollFd::from_borrowed_fd(master.as_fd(), PollFlags::IN)], None);
            }
            Ok(0) | Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_to_leave_are_not_the_programs() {
        let check = |can_detach: bool, typed: &[&[u8]], expect: (&[u8], usize, bool)| {
            let mut keys = Keys { can_detach, held: false };
            let mut passed = Vec::new();
            let (mut interrupts, mut detach) = (0, false);
            for typed in typed {
                let typed = keys.read(typed, &mut passed);
                interrupts += typed.interrupts;
                detach |= typed.detach;
            }
            assert_eq!((&passed[..], interrupts, detach), expect, "{typed:?}");
        };
        check(true, &[b"ab\x03c"], (b"ab\x03c", 1, false));
        check(true, &[b"a\x10", b"\x11b"], (b"a", 0, true));
        check(true, &[b"\x10\x11\x03"], (b"", 0, true));
        check(true, &[b"\x10b\x11"], (b"\x10b\x11", 0, false));
        check(true, &[b"\x10\x10\x11"], (b"\x10", 0, true));
        check(true, &[b"\x10", b"\x03\x03"], (b"\x10\x03\x03", 2, false));
        check(false, &[b"\x10\x11"], (b"\x10\x11", 0, false));
    }
}
