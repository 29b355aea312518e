//! The monitor of a container: starts its program, waits for its end, and records it.

use std::io::{self, PipeWriter};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kernel::process::{Executed, Exit, ExpectedWait, MountsBefore, Pid, Process, Setup, Signal};
use store::OperationError;

use super::restarts::{Restarts, is_request_to_end};
use super::signal;
use crate::backoff::GLANCE;
use crate::folder::{PID, RUNTIME_LOG};
use crate::life::causes;
use crate::life::init_signals::Terms;
use crate::life::log::record::LogStream;
use crate::life::log::{Log, add_sentence, newer_text};
use crate::life::monitor::{
    CallerStreams, DISCONNECTED, Deadline, Prepared, RunError, Start, TWICE, prepare,
};
use crate::life::state::{Code, End, State};
use crate::network::Connection;
use crate::plan::Stop;
use crate::restart_policy::RestartPolicy;
use crate::runtime::call::{add_log, chain, command, complaint, complaints, complaints_in};
use crate::runtime::gvisor_stdio::{Pump, Streams};
use crate::runtime::program::ProgramError;
use crate::runtime::seccomp_cache::Lesson;

/// How long to wait for the exec of a program that probably cannot be executed. The exec is the runtime's last step,
/// and follows its report that the container runs. If a program takes longer, such as a file that the runtime itself
/// interprets, its end is reported later.
const EXECUTED: std::time::Duration = std::time::Duration::from_secs(2);

/// The writable layer of a container that has ended.
#[derive(Debug, Default)]
pub struct Last {
    /// Replaces the program's exit code if the disk has lost some of its writes.
    pub exit: Option<Exit>,
    /// Size of the writable layer, in bytes; `None` if unknown.
    pub written: Option<u64>,
}

/// A program that the runtime has started, and the pipes to it.
struct LaunchedProgram {
    process: Process,
    /// Copies its output into the log.
    pump: Pump,
    /// Open as long as the program's standard input is.
    _input: Option<PipeWriter>,
    /// Thread that reads this process's standard input for the program.
    streams: Streams,
}

/// Lets the runtime start the program in the container that [`prepare`] has made. `doubt` is the reason why the program
/// will probably not run.
fn launch(
    start: &Start<'_>,
    doubt: Option<ProgramError>,
    lesson: Option<Lesson>,
) -> Result<LaunchedProgram, RunError> {
    let runtime_failed = OperationError::at("run", &start.runtime.path);
    let write_failed = OperationError::at("write", start.folder);
    let mut written = Log::open(start.folder, start.log_size).map_err(write_failed)?;
    let (output_reader, output) = io::pipe().map_err(write_failed)?;
    let (error_reader, errors) = io::pipe().map_err(write_failed)?;
    if let Some((user, group)) = start.owner {
        for pipe in [&output, &errors] {
            // Otherwise a program could not open its own `/dev/stdout`.
            std::os::unix::fs::fchown(pipe, Some(user), Some(group)).map_err(write_failed)?;
        }
    }
    let mut run = command(start.runtime, start.folder);
    let log = start.folder.join(RUNTIME_LOG);
    add_log(&mut run, start.runtime, &log, "json");
    let pid_file = start.folder.join(PID);
    run.args(["run", "--detach"]);
    start.fds.pass(&mut run);
    run.arg("--bundle").arg(start.folder);
    if let Some(socket) = start.console {
        run.args(["--console-socket", socket]);
    }
    run.arg("--pid-file").arg(&pid_file).arg(start.id);
    let mut streams = Streams::default();
    // A program that reads from a pipe with a writer waits, as it would wait for a caller.
    let input = match start.owner {
        _ if start.streams.is_some_and(|it| it.input) => {
            let (kind, spec) = (start.runtime.kind, &start.spec);
            let replaced = Streams::replace_stdin(&mut run, kind, spec, &spec.process);
            streams = replaced.map_err(write_failed)?;
            None
        }
        _ if start.has_open_stdin => {
            let (reader, writer) = io::pipe().map_err(write_failed)?;
            run.stdin(reader);
            Some(writer)
        }
        // crun would change the owner of the host's /dev/null to the container's user. Reading from a pipe without a
        // writer also gives no bytes.
        Some(_) => {
            run.stdin(io::pipe().map_err(write_failed)?.0);
            None
        }
        None => {
            run.stdin(Stdio::null());
            None
        }
    };
    run.stdout(output).stderr(errors);
    let lifted = start.fds.lift(start.lock).map_err(|errno| write_failed(errno.into()))?;
    let keep = start.fds.inherited(lifted.as_ref(), start.lock);
    let setup = Setup { signals: Some(start.signals), keep: &keep, ..Setup::default() };
    let runtime = kernel::process::spawn(run, &setup).map_err(runtime_failed)?;
    let has_started = Arc::new(AtomicBool::new(false));
    let mut copy = start.streams.map(|streams| OutputCopy { streams, is_unread: false });
    let copies = Arc::clone(&has_started);
    let sink = move |pipe: usize, bytes: &[u8]| {
        let stream = if pipe == 0 { LogStream::Output } else { LogStream::Errors };
        written.write(stream, bytes);
        // Before that, the output is the runtime's, and becomes an error.
        if let Some(copy) = copy.as_mut().filter(|_| copies.load(Ordering::SeqCst)) {
            copy.write(stream, bytes);
        }
        Ok(())
    };
    let pump = Pump::new(vec![output_reader, error_reader], sink).map_err(write_failed)?;
    // The command that waits for the start may have given up.
    let mut is_unwanted = false;
    let mut undo = |_requests| {
        is_unwanted = true;
        // The runtime may have just exited. The caller cleans up after an interrupted start.
        let _gone = runtime.process.signal(Signal::KILL);
    };
    let exit = runtime
        .process
        .supervise(start.signals, &mut undo, &mut || None)
        .map_err(runtime_failed)?;
    if is_unwanted {
        return Err(RunError::Interrupted(start.id.to_owned()));
    }
    let pid = std::fs::read_to_string(&pid_file).ok();
    let pid = pid.and_then(|text| text.trim().parse().ok()).and_then(Pid::from_raw);
    let (Exit::Code(0), Some(pid)) = (exit, pid) else {
        pump.finish().map_err(write_failed)?;
        // The runtime reports errors in its options before it opens its log.
        let message = complaint(&complaints(&log), start.runtime.kind)
            .or_else(|| complaint(&complaints_in(&newer_text(start.folder)), start.runtime.kind));
        let message = message.unwrap_or_else(|| "it gave no reason".to_owned());
        let cause = causes::likely(start.runtime, &start.spec.process.rlimits, &message);
        let runtime = start.runtime.path.display().to_string();
        return Err(doubt.map_or(RunError::Refused { runtime, message, cause }, RunError::from));
    };
    if let Some(lesson) = lesson {
        lesson.learn();
    }
    let process = Process::open(pid).map_err(runtime_failed)?;
    // crun starts the process from a child, which may outlive crun for a moment. Then it becomes a child of this
    // process.
    process.adopt().map_err(runtime_failed)?;
    if let Some(doubt) = doubt
        && process.wait_for_exec(EXECUTED).map_err(runtime_failed)? == Executed::Never
    {
        process.wait().map_err(runtime_failed)?;
        return Err(doubt.into());
    }
    has_started.store(true, Ordering::SeqCst);
    Ok(LaunchedProgram { process, pump, _input: input, streams })
}

/// Copies a container's output to this process's streams.
#[derive(Debug)]
struct OutputCopy {
    streams: CallerStreams,
    /// Whether the reader of a stream is gone.
    is_unread: bool,
}

impl OutputCopy {
    /// Writes output. If its reader is gone, the container is asked to end, because without a log its program would get
    /// `SIGPIPE`. Other failures lose the output, which is still in the log.
    fn write(&mut self, stream: LogStream, bytes: &[u8]) {
        let written = match stream {
            LogStream::Output if self.streams.output => write_whole(io::stdout().lock(), bytes),
            LogStream::Errors if self.streams.errors => write_whole(io::stderr().lock(), bytes),
            LogStream::Output | LogStream::Errors => Ok(()),
        };
        let is_broken = written.is_err_and(|it| it.kind() == io::ErrorKind::BrokenPipe);
        if is_broken && !std::mem::replace(&mut self.is_unread, true) {
            let own = rustix::process::getpid();
            // The signal is blocked, and read together with those of other processes.
            let _asked = rustix::process::kill_process(own, Signal::TERM);
        }
    }
}

fn write_whole(mut stream: impl io::Write, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes)?;
    stream.flush()
}

/// How one run of a container's program ended.
struct EndedRun {
    end: End,
    /// Whether this process got a signal that ends containers, for example when the host is shut down.
    is_asked: bool,
}

/// Waits for the end of the program, and copies its output into the log.
fn attend(
    start: &Start<'_>,
    program: LaunchedProgram,
    remark: &dyn Fn(&str),
) -> Result<EndedRun, RunError> {
    let LaunchedProgram { process, mut pump, _input, streams } = program;
    let runtime_failed = OperationError::at("run", &start.runtime.path);
    let write_failed = OperationError::at("write", start.folder);
    let arrival = pump.arrival().map_err(write_failed)?;
    let prompt = start.be_prompt();
    let terms = Terms::new(start.folder, start.runtime.kind);
    let mut deadline = Deadline::from_start(start);
    let mut is_asked = false;
    let mut deliver = |signal| {
        is_asked |= is_request_to_end(signal);
        terms.note(signal);
        process.signal(signal)
    };
    let mut meanwhile = || {
        if let Err(error) = pump.look() {
            tracing::debug!(%error, "cannot pass on the container's output");
        }
        // The container may have ended just now.
        let again = terms.look(|| drop(process.signal(Signal::KILL)));
        let rest = deadline.look(|| kill(start, &process));
        start.look(again.into_iter().chain(rest).min())
    };
    // The caller of a container in the foreground can only send signals.
    let mut asked = |requests| match requests {
        _ if start.streams.is_none() => {}
        0 | 1 => {}
        2 => remark(TWICE),
        _ => kill(start, &process),
    };
    let signals = start.signals;
    let also = Some(arrival.as_fd());
    let exit = process.supervise_by(
        signals,
        &mut deliver,
        &mut asked,
        &mut meanwhile,
        also,
        ExpectedWait::Long,
    );
    drop(prompt);
    let exit = terms.exit(exit.map_err(runtime_failed)?);
    let lacked_memory =
        || crate::life::cgroup::memory::was_lacking(&start.spec.linux, start.folder);
    let end = deadline.end(exit, lacked_memory);
    pump.finish().map_err(write_failed)?;
    streams.finish().map_err(write_failed)?;
    Ok(EndedRun { end, is_asked })
}

/// Functions by which [`watch`] reports, and asks for the container's writable layer.
#[expect(missing_debug_implementations, reason = "functions have no debug output")]
pub struct WatchCalls<'a> {
    /// Returns the time, in seconds since 1970.
    pub now: &'a dyn Fn() -> i64,
    /// Called when the container runs for the first time.
    pub started: &'a mut dyn FnMut(),
    /// Whether the disk has lost some of the container's writes.
    pub has_lost: &'a dyn Fn() -> bool,
    /// Called at the end. Returns the state of the container's writable layer.
    pub ended: &'a mut dyn FnMut() -> Last,
    /// Gets sentences for the caller of a container in the foreground.
    pub remark: &'a dyn Fn(&str),
}

/// Starts a container, waits for its end, and starts its program again if the restart policy says so. This *process*
/// keeps the mount namespace that it makes, and becomes the parent of the container's orphans.
///
/// The runtime exits as soon as the container runs, so this process is the only one that each container needs. An
/// `INT` or `TERM` that arrives earlier ends the start.
///
/// A restart calls the runtime again with the same bundle: the root with its changes, the other mounts, the network and
/// the ports stay. Only what the runtime has made is removed between two runs.
///
/// # Errors
/// [`RunError`] if the container did not start.
pub fn watch(
    mut start: Start<'_>,
    stop: &Stop,
    calls: &mut WatchCalls<'_>,
) -> Result<End, RunError> {
    let runtime_failed = OperationError::at("run", &start.runtime.path);
    let write_failed = OperationError::at("write", start.folder);
    if start.streams.is_some()
        && let Some(stream) = crate::runtime::gvisor_stdio::directory()
    {
        return Err(RunError::Directory(stream));
    }
    kernel::process::set_subreaper().map_err(runtime_failed)?;
    kernel::process::use_one_heap();
    // Without `/proc`, this process stays in the namespace that it makes.
    let before = MountsBefore::open();
    let Prepared { doubt, lesson, connection, connected } = prepare(&start)?;
    let mut restarts = Restarts::new(start.folder, start.id, start.restart);
    let mut program = launch(&start, doubt, lesson)?;
    let mut state = State {
        monitor: std::process::id(),
        pid: 0,
        process: None,
        started: 0,
        stop_signal: stop.signal.clone(),
        finished: None,
        code: None,
        lost: false,
        reason: None,
        stop_timeout: stop.timeout,
        written: None,
        restarts: restarts.count(),
        delay: None,
    };
    state.note_run(&program.process, (calls.now)());
    let code = state.begin(start.folder).map_err(write_failed)?;
    (calls.started)();
    // From here on, this process only waits. The host has one such process for each container, so the process reduces
    // its memory.
    start.forget_setup();
    // pasta ends when the mount of its network does, and a restart needs the mounts.
    if connection.is_none() && start.restart == RestartPolicy::No {
        match before.and_then(MountsBefore::restore) {
            Ok(()) => start.stage.leave(),
            // This process may have a thread for the container's terminal.
            Err(error) => {
                tracing::debug!(id = start.id, %error, "the monitor keeps its mount namespace");
            }
        }
    } else {
        drop(before);
    }
    let mut is_disconnected = false;
    let (last, end) = loop {
        kernel::process::shrink();
        let EndedRun { mut end, is_asked } = attend(&start, program, calls.remark)?;
        if !is_disconnected && connection.as_ref().is_some_and(Connection::is_over) {
            is_disconnected = true;
            let _told = add_sentence(start.folder, DISCONNECTED);
            (calls.remark)(DISCONNECTED);
        }
        let next = loop {
            if is_asked || (calls.has_lost)() || !restarts.wants(end.exit) {
                break None;
            }
            state.pause(end, (calls.now)(), start.folder);
            if !restarts.wait(start.signals) {
                break None;
            }
            match launch_again(&start, &mut state, &mut restarts, calls.now) {
                Ok(program) => break Some(program),
                Err(RunError::Interrupted(_)) => break None,
                Err(error) => {
                    let _told = add_sentence(start.folder, &chain(&error));
                    end = End { exit: Exit::Code(error.exit_code().into()), reason: None };
                }
            }
        };
        match next {
            Some(next) => program = next,
            None => {
                drop(connected);
                break ((calls.ended)(), end);
            }
        }
    };
    state.lost = last.exit.is_some();
    (state.written, state.reason) = (last.written, end.reason);
    let exit = last.exit.unwrap_or(end.exit);
    finish(&mut state, exit, &code, (calls.now)(), start.folder).map_err(write_failed)?;
    Ok(End { exit, reason: end.reason })
}

/// Starts the program once more, and records it.
fn launch_again(
    start: &Start<'_>,
    state: &mut State,
    restarts: &mut Restarts<'_>,
    now: &dyn Fn() -> i64,
) -> Result<LaunchedProgram, RunError> {
    // A start that fails also counts, so that a maximum also ends such starts.
    state.restarts = restarts.add();
    let program = launch(start, None, None)?;
    state.note_run(&program.process, now());
    if let Err(error) = state.begin_again(start.folder) {
        // Other commands could not find it.
        kill(start, &program.process);
        let _ended = program.process.wait();
        return Err(OperationError::at("write", start.folder)(error).into());
    }
    // A user may have stopped the container before other commands could find the program.
    if restarts.is_stopped() {
        kill(start, &program.process);
    }
    restarts.release();
    Ok(program)
}

/// Kills a container that does not end. The runtime is called as by other commands, because this process may have left
/// the mount namespace in which it started the container.
fn kill(start: &Start<'_>, container: &Process) {
    if let Err(error) = signal(start.folder, start.id, "KILL") {
        tracing::warn!(id = start.id, error, "cannot signal the container by its runtime");
        // It may have ended just now.
        let _gone = container.signal(Signal::KILL);
    }
}

/// How long to retry recording the end of a container, because a disk may be full for a moment.
const NOTING: std::time::Duration = std::time::Duration::from_secs(5);

fn finish(state: &mut State, exit: Exit, code: &Code, now: i64, folder: &Path) -> io::Result<()> {
    let saved = again(|| state.finish(Some(exit), now, folder));
    let noted = again(|| code.note(state));
    saved.and(noted)
}

fn again(mut note: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let since = std::time::Instant::now();
    loop {
        match note() {
            Err(_) if since.elapsed() < NOTING => std::thread::sleep(GLANCE),
            result => return result,
        }
    }
}
