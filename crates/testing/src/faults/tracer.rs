//! The tracer: follows the processes and threads of one program from call to call.

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
use super::{Fault, Mode, Place, Traced};

/// Waits for a line, and becomes the program: so it is traced before it begins.
const STUB: &str = "read -r line; exec \"$@\"";

pub(super) fn run(
    words: &[&OsStr],
    place: &Place<'_>,
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

/// The line that the stub waits for, and all that comes after it. A thread writes, since a pipe has an end.
fn give_input(child: &mut Child, input: &[u8]) {
    let mut pipe = child.stdin.take().expect("standard input is piped");
    let input = [b"\n", input].concat();
    // A program that does not read its input is no failure.
    thread::spawn(move || pipe.write_all(&input).is_ok());
}

/// Kills everything that this process has started, when it is late.
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
                    // It may have ended just now.
                    let _ended = kill(Pid::from_raw(pid), Signal::SIGKILL);
                }
            }
            late
        });
        Self { done, thread }
    }

    fn stop(self) -> bool {
        // The thread ends on its own only when this sender is gone.
        drop(self.done);
        self.thread.join().expect("the watchdog does not panic")
    }
}

/// The processes that a process traces. The tracer of a thread is named by its own thread's id.
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

/// A thread that is traced.
#[derive(Debug, Clone, Copy, Default)]
struct Thread {
    /// It runs the program, and `main` has begun.
    is_in_main: bool,
    /// What is done when the call that it is in returns.
    pending: Option<Pending>,
}

#[derive(Debug, Clone, Copy)]
enum Pending {
    /// Return this error.
    Fail(Errno),
    /// Give the argument, by number, its value back.
    Restore(usize, u64),
}

struct Tracer<'a> {
    main: Pid,
    program: PathBuf,
    /// The stub has become the program.
    has_begun: bool,
    fault: Option<Fault<'a>>,
    threads: BTreeMap<Pid, Thread>,
    /// Threads that stopped before their parent told of them.
    early: BTreeSet<Pid>,
    code: Option<i32>,
    candidates: [u64; super::Kind::ALL.len()],
    /// Calls so far that `fault` could mean.
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

    /// Until nothing is traced any more.
    fn follow(&mut self) -> io::Result<()> {
        // Of this thread's own children only: others may wait for theirs.
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
                // When a thread executes something, it takes over the id of its process.
                let before = Pid::from_raw(i32::try_from(ptrace::getevent(pid)?).unwrap_or(0));
                self.threads.remove(&before);
                self.has_begun |= now == self.program;
                if self.has_begun && now != self.program {
                    self.threads.remove(&pid);
                    return ptrace::detach(pid, None);
                }
                self.threads.insert(pid, Thread::default());
            }
            // A new thread's first stop: it may be seen before its parent's.
            libc::PTRACE_EVENT_STOP if !self.threads.contains_key(&pid) => {
                self.early.insert(pid);
                return Ok(());
            }
            _ => {}
        }
        ptrace::syscall(pid, None)
    }

    /// A call begins or returns.
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
            // The standard library gives the main thread a stack for signals right before `main`.
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
                // No call has this number, so nothing is done.
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

/// The register that has an argument of a call.
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

/// A process that is killed while it is stopped is gone before it is told to go on.
fn gone_is_fine(result: nix::Result<()>) -> io::Result<()> {
    Ok(gone_is_fine_errno(result)?)
}

fn gone_is_fine_errno(result: nix::Result<()>) -> nix::Result<()> {
    if result == Err(Errno::ESRCH) { Ok(()) } else { result }
}
