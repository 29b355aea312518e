//! The tracer, which follows the processes and threads of a program from system call to system call.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::calls::{Call, Injection};
use super::{Fault, Mode, RunEnvironment, Traced};

/// Waits for a line, and then executes the program, which is thus traced from its start.
const STUB: &str = "read -r line; exec \"$@\"";

pub(super) fn run(
    words: &[&OsStr],
    place: &RunEnvironment<'_>,
    fault: Option<Fault<'_>>,
    limit: Duration,
) -> io::Result<Traced> {
    let program = fs::canonicalize(words.first().ok_or(io::ErrorKind::InvalidInput)?)?;
    let mut command = Command::new("/bin/sh");
    command.args(["-c", STUB, "sh"]).args(words).current_dir(place.folder);
    command.env_clear().envs(place.variables.iter().copied());
    command.stdin(Stdio::piped()).stdout(File::create(place.output)?);
    let mut child = command.stderr(File::create(place.errors)?).spawn()?;
    let main = Pid::from_raw(i32::try_from(child.id()).expect("process ids are positive"));
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(main, options)?;
    ptrace::interrupt(main)?;
    give_input(&mut child, place.input);
    let mut tracer = Tracer::new(main, program, fault);
    let watchdog = Watchdog::start(limit);
    tracer.follow()?;
    let timed_out = watchdog.stop();
    Ok(Traced {
        code: tracer.code,
        timed_out,
        candidates: tracer.candidates,
        failed: tracer.failed,
    })
}

/// Writes the line that the stub waits for, followed by the input. A thread writes, because a pipe's buffer is
/// limited.
fn give_input(child: &mut Child, input: &[u8]) {
    let mut pipe = child.stdin.take().expect("standard input is piped");
    let input = [b"\n", input].concat();
    // A program need not read its input.
    thread::spawn(move || pipe.write_all(&input).is_ok());
}

/// Kills all traced processes when the time limit is over.
struct Watchdog {
    done: mpsc::Sender<()>,
    thread: thread::JoinHandle<bool>,
}

impl Watchdog {
    fn start(limit: Duration) -> Self {
        let (done, is_done) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut late = false;
            let mut wait = limit;
            while is_done.recv_timeout(wait) == Err(mpsc::RecvTimeoutError::Timeout) {
                late = true;
                wait = Duration::from_millis(100);
                for pid in traced_by(std::process::id()) {
                    // The process may have exited just now.
                    let _ended = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
            }
            late
        });
        Self { done, thread }
    }

    fn stop(self) -> bool {
        // The thread ends only when this sender is dropped.
        drop(self.done);
        self.thread.join().expect("the watchdog does not panic")
    }
}

/// Returns the processes that a process traces. `TracerPid` is the id of the tracing thread.
fn traced_by(tracer: u32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{tracer}/task")).into_iter().flatten().flatten();
    let threads: BTreeSet<_> =
        threads.filter_map(|it| it.file_name().to_str().map(String::from)).collect();
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = all.filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let tracer = text.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        tracer.is_some_and(|it| threads.contains(it.trim()))
    })
    .collect()
}

/// A traced thread.
#[derive(Debug, Clone, Copy, Default)]
struct Thread {
    /// Whether the thread runs the program, and `main` has begun.
    is_in_main: bool,
    /// Action when the current call returns.
    pending: Option<Pending>,
}

#[derive(Debug, Clone, Copy)]
enum Pending {
    /// Returns this error.
    Fail(Errno),
    /// Restores the value of the argument with this number.
    Restore(usize, u64),
}

struct Tracer<'a> {
    main: Pid,
    program: PathBuf,
    /// Whether the stub has executed the program.
    has_begun: bool,
    fault: Option<Fault<'a>>,
    threads: BTreeMap<Pid, Thread>,
    /// Threads that stopped before their parent reported them.
    early: BTreeSet<Pid>,
    code: Option<i32>,
    candidates: [u64; super::Kind::ALL.len()],
    /// Number of calls so far to which `fault` applies.
    seen: u64,
    failed: Vec<String>,
}

impl<'a> Tracer<'a> {
    fn new(main: Pid, program: PathBuf, fault: Option<Fault<'a>>) -> Self {
        let threads = BTreeMap::from([(main, Thread::default())]);
        Self {
            main,
            program,
            has_begun: false,
            fault,
            threads,
            early: BTreeSet::new(),
            code: None,
            candidates: [0; super::Kind::ALL.len()],
            seen: 0,
            failed: Vec::new(),
        }
    }

    /// Runs until no thread is traced any more.
    fn follow(&mut self) -> io::Result<()> {
        // Only children of this thread, because other threads may wait for theirs.
        let flags = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        while !self.threads.is_empty() {
            match waitpid(None, Some(flags)) {
                Ok(status) => self.stopped(status)?,
                Err(Errno::ECHILD) => break,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn stopped(&mut self, status: WaitStatus) -> io::Result<()> {
        match status {
            WaitStatus::Exited(pid, code) => {
                self.ended(pid, Some(code));
                Ok(())
            }
            WaitStatus::Signaled(pid, ..) => {
                self.ended(pid, None);
                Ok(())
            }
            WaitStatus::PtraceSyscall(pid) => {
                let resumed = self.call(pid).and_then(|()| ptrace::syscall(pid, None));
                gone_is_fine(resumed)
            }
            WaitStatus::PtraceEvent(pid, _, event) => gone_is_fine(self.event(pid, event)),
            WaitStatus::Stopped(pid, signal) => gone_is_fine(ptrace::syscall(pid, signal)),
            WaitStatus::Continued(_) | WaitStatus::StillAlive => Ok(()),
        }
    }

    fn ended(&mut self, pid: Pid, code: Option<i32>) {
        self.threads.remove(&pid);
        self.early.remove(&pid);
        if pid == self.main {
            self.code = code;
        }
    }

    fn event(&mut self, pid: Pid, event: i32) -> nix::Result<()> {
        match event {
            libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK | libc::PTRACE_EVENT_CLONE => {
                let child = ptrace::getevent(pid)?;
                let child = Pid::from_raw(i32::try_from(child).unwrap_or(0));
                let parent = self.threads.get(&pid).copied().unwrap_or_default();
                self.threads.insert(child, Thread { pending: None, ..parent });
                if self.early.remove(&child) {
                    gone_is_fine_errno(ptrace::syscall(child, None))?;
                }
            }
            libc::PTRACE_EVENT_EXEC => {
                let now = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                // When a thread executes a program, it gets the id of its process.
                let before = Pid::from_raw(i32::try_from(ptrace::getevent(pid)?).unwrap_or(0));
                self.threads.remove(&before);
                self.has_begun |= now == self.program;
                if self.has_begun && now != self.program {
                    self.threads.remove(&pid);
                    return ptrace::detach(pid, None);
                }
                self.threads.insert(pid, Thread::default());
            }
            // The first stop of a new thread may be reported before its parent's.
            libc::PTRACE_EVENT_STOP if !self.threads.contains_key(&pid) => {
                self.early.insert(pid);
                return Ok(());
            }
            _ => {}
        }
        ptrace::syscall(pid, None)
    }

    /// Handles the start or return of a call.
    fn call(&mut self, pid: Pid) -> nix::Result<()> {
        let info = ptrace::syscall_info(pid)?;
        let thread = self.threads.entry(pid).or_default();
        if info.op == libc::PTRACE_SYSCALL_INFO_EXIT {
            if let Some(pending) = thread.pending.take() {
                let mut registers = ptrace::getregs(pid)?;
                match pending {
                    Pending::Fail(errno) => {
                        registers.rax = i64::from(errno as i32).wrapping_neg().cast_unsigned();
                    }
                    Pending::Restore(argument, value) => {
                        *argument_of(&mut registers, argument) = value;
                    }
                }
                ptrace::setregs(pid, registers)?;
            }
            return Ok(());
        }
        let mut registers = ptrace::getregs(pid)?;
        let number = registers.orig_rax;
        if !thread.is_in_main {
            // Right before `main`, the standard library sets a signal stack for the main thread.
            thread.is_in_main =
                number == libc::SYS_sigaltstack.cast_unsigned() && registers.rdi != 0;
            return Ok(());
        }
        let arguments = [0, 1, 2, 3, 4, 5].map(|it| *argument_of(&mut registers, it));
        let call = Call { pid: pid.as_raw(), number, arguments };
        let Some(candidate) = call.candidate() else { return Ok(()) };
        for kind in candidate.kinds() {
            self.candidates[kind.index()] += 1;
        }
        let Some(fault) = self.fault else { return Ok(()) };
        let Some(injection) = candidate.injection(fault.kind) else { return Ok(()) };
        if fault.only.is_some_and(|only| !candidate.text.contains(only)) {
            return Ok(());
        }
        self.seen += 1;
        let hit = match fault.mode {
            Mode::Once => self.seen == fault.nth,
            Mode::FromThenOn => self.seen >= fault.nth,
        };
        if !hit {
            return Ok(());
        }
        self.failed.push(candidate.text);
        let pending = match injection {
            Injection::Error => {
                // This is not a valid number, so the kernel does nothing.
                registers.orig_rax = u64::MAX;
                Pending::Fail(fault.kind.errno())
            }
            Injection::Shorten(argument, less) => {
                *argument_of(&mut registers, argument) = less;
                Pending::Restore(argument, arguments[argument])
            }
        };
        ptrace::setregs(pid, registers)?;
        self.threads.entry(pid).or_default().pending = Some(pending);
        Ok(())
    }
}

/// Returns the register with an argument of a call.
fn argument_of(registers: &mut libc::user_regs_struct, argument: usize) -> &mut u64 {
    match argument {
        0 => &mut registers.rdi,
        1 => &mut registers.rsi,
        2 => &mut registers.rdx,
        3 => &mut registers.r10,
        4 => &mut registers.r8,
        _ => &mut registers.r9,
    }
}

/// A stopped process may be killed before it is resumed, which is not an error.
fn gone_is_fine(result: nix::Result<()>) -> io::Result<()> {
    Ok(gone_is_fine_errno(result)?)
}

fn gone_is_fine_errno(result: nix::Result<()>) -> nix::Result<()> {
    if result == Err(Errno::ESRCH) { Ok(()) } else { result }
}
