//! Signals that a container's first process does not get. To process 1 of a pid namespace, the kernel delivers only
//! signals that the process handles, except for `SIGKILL` and `SIGSTOP` from outside (pid_namespaces(7)). The same
//! signals would end other processes.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use kernel::process::{Exit, Pid, Signal, has_executed, waits_for_signals};

use crate::backoff::GLANCE;
use crate::folder::PID;
use crate::runtime::Kind;
use crate::runtime::call::HeldFolder;

/// Returns the pid of a container's first process, as soon as the runtime has recorded it.
pub(crate) fn first_process(folder: &Path) -> Option<Pid> {
    let pid = std::fs::read_to_string(folder.join(PID)).ok()?;
    pid.trim().parse().ok().and_then(Pid::from_raw)
}

/// Effect of a signal on process 1 of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The kernel drops the signal.
    Spared,
    /// The process handles or ignores the signal.
    Taken,
    /// The process blocks the signal: permanently, while it waits for the signal, or only while it creates a child.
    Blocked,
}

/// Whether the kernel drops a signal to this process if it is process 1 of its namespace, because the process neither
/// handles, ignores nor blocks the signal.
pub(crate) fn is_spared(pid: Pid, signal: Signal) -> bool {
    fate(pid, signal) == Some(Fate::Spared)
}

fn fate(pid: Pid, signal: Signal) -> Option<Fate> {
    // sigtimedwait(2) unblocks the signals that it waits for until it returns, but the kernel still delivers them. So
    // this is tested before and after the masks are read, because a process that has got its signal no longer waits.
    // Source: Linux `kernel/signal.c`, `do_sigtimedwait`, `sig_ignored`.
    let waited = waits_for_signals(pid);
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
    match fate_by(&status.ok()?, signal)? {
        Fate::Spared if waited || waits_for_signals(pid) => Some(Fate::Taken),
        fate => Some(fate),
    }
}

/// How often a blocked signal is tested. Shells block all signals for a moment whenever they create a child.
const LOOKS: u32 = 100;

/// Emulates `SIGTERM` for containers: the signal ends a first process that does not handle it, as it would outside of
/// a container.
#[derive(Debug)]
pub struct Terms<'a> {
    folder: &'a Path,
    /// Runtime of the container; `None` if unknown.
    kind: Option<Kind>,
    /// Remaining number of tests whether a sent signal was dropped.
    looks: Cell<u32>,
    /// Whether the last test found that the kernel drops the signal. A single test may fall between two waits.
    is_deaf: Cell<bool>,
    is_killed: Cell<bool>,
}

impl<'a> Terms<'a> {
    pub(crate) const fn new(folder: &'a Path, kind: Kind) -> Self {
        Self::with(folder, Some(kind))
    }

    /// Creates the emulation for a container that another process monitors, by its folder.
    #[must_use]
    pub fn for_folder(folder: &'a Path) -> Self {
        let runtime = HeldFolder::open(folder).ok().and_then(|it| it.runtime().ok()?);
        Self::with(folder, runtime.map(|it| it.kind))
    }

    const fn with(folder: &'a Path, kind: Option<Kind>) -> Self {
        let (is_deaf, is_killed) = (Cell::new(false), Cell::new(false));
        Self { folder, kind, looks: Cell::new(0), is_deaf, is_killed }
    }

    /// Call this before a signal is sent. If the process handles the signal now, it gets this signal, even if it would
    /// not handle a second one: many programs remove their handler at the first signal.
    pub fn note(&self, signal: Signal) {
        // Processes in gVisor have another kernel, whose signal masks are not visible on the host.
        if signal != Signal::TERM || self.kind.is_none_or(|it| it == Kind::Runsc) {
            return;
        }
        if self.executed().and_then(|pid| fate(pid, signal)) != Some(Fate::Taken) {
            self.looks.set(LOOKS);
            self.is_deaf.set(false);
        }
    }

    /// Returns the first process, if it has executed its program.
    fn executed(&self) -> Option<Pid> {
        first_process(self.folder).filter(|pid| has_executed(*pid) == Some(true))
    }

    /// Calls `kill` if two consecutive tests found that the kernel drops the signal. Returns the time until the next
    /// test, or `None` if the result is final. Until the first process executes its program, its masks are those of
    /// the runtime.
    pub fn look(&self, kill: impl FnOnce()) -> Option<Duration> {
        let left = self.looks.get().checked_sub(1)?;
        let Some(pid) = self.executed() else { return Some(GLANCE) };
        let fate = fate(pid, Signal::TERM);
        let was_deaf = self.is_deaf.replace(fate == Some(Fate::Spared));
        match fate {
            Some(Fate::Blocked) if left > 0 => {
                self.looks.set(left);
                return Some(GLANCE);
            }
            Some(Fate::Spared) if !was_deaf => {
                self.looks.set(left.max(1));
                return Some(GLANCE);
            }
            Some(Fate::Spared) => {
                self.is_killed.set(true);
                kill();
            }
            _ => {}
        }
        self.looks.set(0);
        None
    }

    /// Returns the container's exit, as if the signal had been delivered.
    pub(crate) fn exit(&self, exit: Exit) -> Exit {
        let killed = Exit::Signal(Signal::KILL.as_raw());
        match self.is_killed.get() && exit.shell_code() == killed.shell_code() {
            true => Exit::Signal(Signal::TERM.as_raw()),
            false => exit,
        }
    }
}

/// Parses the masks `SigBlk`, `SigIgn` and `SigCgt`: hexadecimal numbers, whose lowest bit is signal 1. Source:
/// proc(5).
fn fate_by(status: &str, signal: Signal) -> Option<Fate> {
    let bit = 1_u64 << (signal.as_raw() - 1);
    let has = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(u64::from_str_radix(line.trim(), 16).ok()? & bit != 0)
    };
    Some(match (has("SigIgn:")? || has("SigCgt:")?, has("SigBlk:")?) {
        (true, _) => Fate::Taken,
        (false, true) => Fate::Blocked,
        (false, false) => Fate::Spared,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Node.js does this with `process.once('SIGTERM', …)`.
    #[test]
    fn who_gives_up_a_handler_has_got_the_signal() {
        use std::io::{BufRead as _, BufReader};

        let script =
            "trap 'trap - TERM; echo down; exec cat' TERM; echo up; while :; do sleep 0.01; done";
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", script]).stdin(std::process::Stdio::piped());
        let mut child = shell.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(PID), child.id().to_string()).unwrap();
        let terms = Terms::new(folder.path(), Kind::Crun);
        let looked = || {
            let killed = Cell::new(false);
            for _ in 0..2 {
                terms.look(|| killed.set(true));
            }
            killed.get()
        };
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "up");
        terms.note(Signal::TERM);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        assert_eq!(lines.next().unwrap().unwrap(), "down");
        assert!(is_spared(pid, Signal::TERM) && !looked());
        // Process 1 would not get a second signal.
        terms.note(Signal::TERM);
        assert!(looked());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// tini and docker-init wait for signals in this way.
    #[test]
    fn who_waits_for_a_signal_gets_it() {
        let script = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); print(flush=True); \
                      signal.sigwait([15])";
        let Some(python) = testing::program("python3") else {
            testing::skipped("python3 is not here");
            return;
        };
        let mut python = std::process::Command::new(python);
        let mut child = python.args(["-c", script]).spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        while !waits_for_signals(pid) {
            assert_eq!(child.try_wait().unwrap(), None, "it has ended");
            std::thread::sleep(GLANCE);
        }
        // The masks alone would give the opposite result.
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        assert_eq!(fate_by(&status, Signal::TERM), Some(Fate::Spared));
        assert_eq!(fate(pid, Signal::TERM), Some(Fate::Taken));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Lines as printed by Linux 6.18 for `sleep`, bash, a program that ignores signals like under `nohup`, and one
    /// with signalfd.
    #[test]
    fn who_has_a_use_for_a_signal_is_read_from_the_masks() {
        let status = |blocked: &str, ignored: &str, caught: &str| {
            format!("Name:\tx\nSigBlk:\t{blocked}\nSigIgn:\t{ignored}\nSigCgt:\t{caught}\n")
        };
        let none = "0000000000000000";
        let check = |status: &str, interrupt: Fate, term: Fate| {
            let fates = [Signal::INT, Signal::TERM].map(|it| fate_by(status, it));
            assert_eq!(fates, [Some(interrupt), Some(term)], "{status}");
        };
        check(&status(none, none, none), Fate::Spared, Fate::Spared);
        check(&status(none, "0000000000001000", none), Fate::Spared, Fate::Spared);
        // An interactive bash ignores TERM and handles INT.
        check(&status(none, "0000000000380004", "000000004b817efb"), Fate::Taken, Fate::Taken);
        check(&status(none, "0000000000000002", none), Fate::Taken, Fate::Spared);
        check(&status("0000000000004002", none, none), Fate::Blocked, Fate::Blocked);
        assert_eq!(fate_by("", Signal::INT), None);
    }
}
