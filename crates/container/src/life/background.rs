//! Containers that outlive the command that started them: each container has a monitor process, and other commands use
//! the container.

mod behind;
mod terminal;

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use kernel::process::{
    Executed, Exit, ExpectedWait, MountsBefore, Pid, Process, ProcessIdentity, Setup, Signal,
    Signals,
};
use store::{ContainerDir, OperationError};

use crate::backoff::GLANCE;
use crate::bundle::path_resolver::{View, check_inside};
use crate::bundle::security::{of_caller, of_user};
use crate::bundle::spec::{RuntimeSpec, SpecProcess, SpecUser};
use crate::bundle::user::User;
use crate::bundle::{Home, Terminal};
use crate::folder::{EXEC, OVER, PID, RUNTIME_LOG, RUNTIME_PATH, UNWANTED};
use crate::life::causes;
use crate::life::init_signals::Terms;
use crate::life::log::record::LogStream;
use crate::life::log::{Log, add_sentence, newer_text};
use crate::life::monitor::{DISCONNECTED, Deadline, Prepared, RunError, Start, prepare};
use crate::life::state::{Code, End, State, StateBefore};
use crate::plan::Stop;
use crate::runtime::call::{
    ANSWER, Asked, DELETION, HeldFolder, KILLING, add_log, ask, chain, command, complaint,
    complaints, complaints_in, enter,
};
use crate::runtime::gvisor_stdio::{Pump, Streams};
use crate::runtime::program::{NamedProgram, Refusal, Within};
use crate::runtime::{Kind, Runtime};

pub use behind::exec_behind;

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

/// Starts a container, calls `started` when it runs, and waits for its end. Then calls `ended`, which returns the
/// state of the container's writable layer. This *process* keeps the mount namespace that it makes, and becomes the
/// parent of the container's orphans.
///
/// The runtime exits as soon as the container runs, so this process is the only one that each container needs. An
/// `INT` or `TERM` that arrives earlier ends the start.
///
/// # Errors
/// [`RunError`] if the container did not start.
pub fn watch(
    mut start: Start<'_>,
    stop: &Stop,
    now: &dyn Fn() -> i64,
    started: &mut dyn FnMut(),
    ended: &mut dyn FnMut() -> Last,
) -> Result<End, RunError> {
    let runtime_failed = OperationError::at("run", &start.runtime.path);
    let write_failed = OperationError::at("write", start.folder);
    kernel::process::set_subreaper().map_err(runtime_failed)?;
    kernel::process::use_one_heap();
    // Without `/proc`, this process stays in the namespace that it makes.
    let before = MountsBefore::open();
    let Prepared { doubt, lesson, connection, connected } = prepare(&start)?;
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
    run.args(["run", "--detach"]).arg("--bundle").arg(start.folder);
    if let Some(socket) = start.console {
        run.args(["--console-socket", socket]);
    }
    run.arg("--pid-file").arg(&pid_file).arg(start.id);
    // A program that reads from a pipe with a writer waits, as it would wait for a caller.
    let _writer = match start.owner {
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
    let setup =
        Setup { signals: Some(start.signals), keep: start.lock.as_slice(), ..Setup::default() };
    let runtime = kernel::process::spawn(run, &setup).map_err(runtime_failed)?;
    let sink = move |pipe: usize, bytes: &[u8]| {
        written.write(if pipe == 0 { LogStream::Output } else { LogStream::Errors }, bytes);
        Ok(())
    };
    let mut pump = Pump::new(vec![output_reader, error_reader], sink).map_err(write_failed)?;
    let arrival = pump.arrival().map_err(write_failed)?;
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
    let container = Process::open(pid).map_err(runtime_failed)?;
    // crun starts the process from a child, which may outlive crun for a moment. Then it becomes a child of this
    // process.
    container.adopt().map_err(runtime_failed)?;
    if let Some(doubt) = doubt
        && container.wait_for_exec(EXECUTED).map_err(runtime_failed)? == Executed::Never
    {
        container.wait().map_err(runtime_failed)?;
        return Err(doubt.into());
    }
    let mut state = State {
        monitor: std::process::id(),
        pid: pid.as_raw_nonzero().get().unsigned_abs(),
        process: ProcessIdentity::from_pid(pid),
        started: now(),
        stop_signal: stop.signal.clone(),
        finished: None,
        code: None,
        lost: false,
        reason: None,
        stop_timeout: stop.timeout,
        written: None,
    };
    let code = state.begin(start.folder).map_err(write_failed)?;
    started();
    // From here on, this process only waits. The host has one such process for each container, so the process reduces
    // its memory.
    start.forget_calls();
    // pasta ends when the mount of its network does.
    if connection.is_none() {
        match before.and_then(MountsBefore::restore) {
            Ok(()) => start.stage.leave(),
            // This process may have a thread for the container's terminal.
            Err(error) => {
                tracing::debug!(id = start.id, %error, "the monitor keeps its mount namespace");
            }
        }
    }
    kernel::process::shrink();
    let prompt = start.be_prompt();
    let terms = Terms::new(start.folder, start.runtime.kind);
    let mut deadline = Deadline::from_start(&start);
    let mut deliver = |signal| {
        terms.note(signal);
        container.signal(signal)
    };
    let mut meanwhile = || {
        if let Err(error) = pump.look() {
            tracing::debug!(%error, "cannot pass on the container's output");
        }
        // The container may have ended just now.
        let again = terms.look(|| drop(container.signal(Signal::KILL)));
        let rest = deadline.look(|| kill(&start, &container));
        again.into_iter().chain(rest).chain(start.look()).min()
    };
    let signals = start.signals;
    let also = Some(arrival.as_fd());
    let exit = container.supervise_by(
        signals,
        &mut deliver,
        &mut |_| {},
        &mut meanwhile,
        also,
        ExpectedWait::Long,
    );
    drop((prompt, connected));
    let exit = terms.exit(exit.map_err(runtime_failed)?);
    let lacked_memory =
        || crate::life::cgroup::memory::was_lacking(&start.spec.linux, start.folder);
    let End { exit, reason } = deadline.end(exit, lacked_memory);
    pump.finish().map_err(write_failed)?;
    if connection.is_some_and(|it| it.is_over()) {
        let _told = add_sentence(start.folder, DISCONNECTED);
    }
    let last = ended();
    state.lost = last.exit.is_some();
    (state.written, state.reason) = (last.written, reason);
    let exit = last.exit.unwrap_or(exit);
    finish(&mut state, exit, &code, now(), start.folder).map_err(write_failed)?;
    Ok(End { exit, reason })
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

/// Sends a signal, by number or name, to a container's first process. If `KILL` ends a container, the container does
/// not count as out of memory.
///
/// # Errors
/// A sentence for users.
pub fn signal(folder: &Path, id: &str, signal: &str) -> Result<(), String> {
    if is_kill(signal) {
        crate::life::cgroup::memory::note_kill(folder);
    }
    let most = if is_kill(signal) { KILLING } else { ANSWER };
    match ask(folder, &["kill", id, signal], most) {
        Asked::Answer(Ok(Exit::Code(0))) => Ok(()),
        Asked::Answer(asked) => signal_elsewhere(folder, signal).ok_or_else(|| match asked {
            Ok(_) => format!("the runtime did not send {signal} to {id}"),
            Err(error) => format!("cannot send {signal} to {id}: {}", chain(&error)),
        }),
        Asked::Unknown => Err(format!("{id} has not started")),
        Asked::Gone => Err(format!("container {id} no longer exists")),
    }
}

/// Signals the first process of a container in another user namespace of the same user. The runtime can only be
/// called inside that namespace, but the kernel allows the user to signal all processes in it.
fn signal_elsewhere(folder: &Path, signal: &str) -> Option<()> {
    let signal = crate::life::signal::signal_number(signal).ok()?;
    let signal = kernel::process::Signal::from_named_raw(signal.into())?;
    elsewhere(folder)?.signal(signal).ok()
}

/// Returns the first process of a container with a running monitor, if the process is in another user namespace than
/// this one. The pid is not reused before the monitor has waited for the process.
#[must_use]
pub fn elsewhere(folder: &Path) -> Option<kernel::process::Process> {
    let process = kernel::process::Process::open(first(folder)?).ok()?;
    let own = kernel::process::user_namespace_of(None)?;
    let other = kernel::process::user_namespace_of(Some(process.pid()))?;
    (own != other).then_some(process)
}

/// Returns the pid of a container's first process.
fn first(folder: &Path) -> Option<kernel::process::Pid> {
    let pid = std::fs::read_to_string(folder.join(PID)).ok()?;
    kernel::process::Pid::from_raw(pid.trim().parse().ok()?)
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

fn is_kill(signal: &str) -> bool {
    signal == "KILL" || signal.parse() == Ok(Signal::KILL.as_raw())
}

/// Waits until a container has ended or the time `most` is over, and returns whether it has ended. `is_alive` tries
/// the container's lock.
///
/// # Errors
/// The error of `is_alive`, which is returned immediately, because the wait would never end if the error persists.
pub fn wait<E>(
    most: Option<std::time::Duration>,
    is_alive: &dyn Fn() -> Result<bool, E>,
) -> Result<bool, E> {
    let since = std::time::Instant::now();
    while is_alive()? {
        if most.is_some_and(|most| since.elapsed() >= most) {
            return Ok(false);
        }
        std::thread::sleep(GLANCE);
    }
    Ok(true)
}

/// Returns the root of a running container. Returns `None` before the start, while the first process still has the
/// host's root.
#[must_use]
pub fn root(folder: &Path) -> Option<File> {
    use std::os::unix::fs::MetadataExt as _;
    let pid = first(folder)?.as_raw_nonzero();
    let root = File::open(format!("/proc/{pid}/root")).ok()?;
    let identity = |file: std::fs::Metadata| (file.dev(), file.ino());
    let own = std::fs::metadata("/").ok()?;
    (identity(root.metadata().ok()?) != identity(own)).then_some(root)
}

/// An additional program for a running container. A field that is `None` or empty has the value of the first program.
#[derive(Debug, Clone)]
pub struct More {
    pub args: Vec<String>,
    /// `NAME=VALUE`, which overrides the container's variables.
    pub env: Vec<String>,
    /// Directory in which the program starts.
    pub working_dir: Option<String>,
    pub user: Option<User>,
    pub terminal: Terminal,
}

impl More {
    /// Whether Quire connects the program to the caller's terminal. runsc does that itself.
    fn has_terminal_of_ours(&self, runtime: &Runtime) -> bool {
        self.terminal == Terminal::New && runtime.kind != Kind::Runsc
    }

    /// Returns the input of the runtime's `exec --process`, based on the first program in the container's bundle.
    /// `home` is the source of the container's `HOME`.
    fn process(self, first: SpecProcess, home: Home) -> SpecProcess {
        let mut process = first;
        process.args = self.args;
        process.terminal = self.terminal == Terminal::New;
        // The size of the first program's terminal does not apply.
        process.console_size = None;
        if self.terminal == Terminal::New {
            crate::life::terminal::note_size(&mut process, std::io::stdin().as_fd());
        }
        if let Some(directory) = self.working_dir {
            process.cwd = directory;
        }
        if let Some(user) = self.user {
            let umask = process.user.rest.remove("umask");
            process.user = SpecUser::new(&user);
            if let Some(umask) = umask {
                process.user.rest.insert("umask".to_owned(), umask);
            }
            if home == Home::Derived {
                process.env.retain(|it| !it.starts_with("HOME="));
                process.env.push(format!("HOME={}", user.home));
            }
            process.capabilities = of_user(process.capabilities.bounding, user.uid);
        }
        for variable in self.env {
            let name = variable.split_once('=').map_or("", |(name, _)| name).to_owned() + "=";
            process.env.retain(|it| !it.starts_with(&name));
            process.env.push(variable);
        }
        process
    }
}

/// Files of a call of the runtime's `exec`, in the container's folder. Their names contain this process's pid, and
/// they are removed on drop.
struct Notes {
    process: PathBuf,
    pid: PathBuf,
    log: PathBuf,
}

impl Notes {
    fn new(folder: &Path) -> Self {
        let name = |end: &str| folder.join(format!("{EXEC}{}.{end}", std::process::id()));
        let notes = Self { process: name("json"), pid: name("pid"), log: name("log") };
        // If a process was killed, its files must not be used for another process with the same pid.
        notes.remove();
        notes
    }

    fn remove(&self) {
        for path in [&self.process, &self.pid, &self.log] {
            drop(std::fs::remove_file(path));
        }
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Runs an additional program in a container, to its end. This *process* moves into a new mount namespace.
///
/// # Errors
/// [`RunError`] if the program cannot be executed, or the runtime cannot be called.
pub fn exec(folder: &Path, id: &str, more: More, signals: &Signals) -> Result<Exit, RunError> {
    if let Some(stream) = crate::runtime::gvisor_stdio::directory() {
        return Err(RunError::Directory(stream));
    }
    let held = HeldFolder::open(folder).map_err(OperationError::at("write", folder))?;
    let mut spec = RuntimeSpec::load(folder)?;
    let runtime = held.runtime();
    let runtime = runtime.map_err(OperationError::at("read", &folder.join(RUNTIME_PATH)))?;
    let runtime = runtime.unwrap_or_else(|| Runtime::at("the runtime".into()));
    let has_terminal = more.has_terminal_of_ours(&runtime);
    let mut process = more.process(std::mem::take(&mut spec.process), Home::from_spec(&spec));
    of_caller(&mut process);
    let working_dir = process.cwd.as_str();
    // gVisor's root is internal to its sandbox, and so are the descriptors that programs in the container can name.
    let root = if runtime.kind == Kind::Runsc { None } else { root(folder) };
    let view = root.as_ref().map(|root| View::of_running(root.as_fd()));
    let mut search = process.env.iter().filter_map(|it| it.strip_prefix("PATH="));
    let named = NamedProgram {
        program: process.args.first().map(String::as_str).unwrap_or_default(),
        working_dir,
        search: search.next_back().unwrap_or_default(),
        within: Within::Container,
    };
    let found = match (&root, &view) {
        (Some(root), Some(view)) => {
            check_inside(root.as_fd(), working_dir)?;
            if runtime.kind == Kind::Runc {
                // runc reads these files for any user, and would wait for a FIFO forever.
                crate::bundle::user::find_user(root.as_fd(), "0")
                    .map_err(OperationError::of("look up", "the container's users"))?;
            }
            Some((view, named.resolve(view)?))
        }
        _ => None,
    };
    let notes = Notes::new(folder);
    let text = serde_json::to_vec(&process).map_err(Into::into);
    let written = text.and_then(|text| std::fs::write(&notes.process, text));
    written.map_err(OperationError::at("write", &notes.process))?;
    let runtime_failed = OperationError::at("run", &runtime.path);
    let streams_failed = OperationError::of("forward the standard streams of container", id);
    let mut exec = held.command(&runtime);
    // crun writes its errors to the new terminal in the format of its log.
    let format = if has_terminal && runtime.kind == Kind::Crun { "text" } else { "json" };
    add_log(&mut exec, &runtime, &notes.log, format);
    exec.arg("exec").arg("--process").arg(&notes.process).arg("--pid-file").arg(&notes.pid);
    let exit = if has_terminal {
        terminal::exec(exec, folder, id, &runtime, &notes.pid, signals)?
    } else {
        exec.arg(id);
        let streams = Streams::replace_stdio(&mut exec, runtime.kind, &spec, &process);
        let streams = streams.map_err(streams_failed)?;
        enter(&runtime, folder).map_err(runtime_failed)?;
        let setup = Setup { signals: Some(signals), ..Setup::default() };
        let child = kernel::process::spawn(exec, &setup).map_err(runtime_failed)?.process;
        let mut insist = |requests| {
            // Until the program has started, no other process receives the signals.
            if requests > 1 && !notes.pid.exists() {
                let _gone = child.signal(Signal::KILL);
            }
        };
        let exit = child.supervise(signals, &mut insist, &mut || None).map_err(runtime_failed)?;
        streams.finish().map_err(streams_failed)?;
        exit
    };
    // As with `run`, the runtime writes the pid file after the setup, and the exec is its last step.
    let has_started = notes.pid.exists();
    match exit {
        Exit::Code(1 | 255) if has_started => {}
        Exit::Code(1..) if !has_started => {}
        _ => return Ok(exit),
    }
    if let Some(error) = found.and_then(|(view, path)| named.doubt(view, &path)) {
        return Err(error.into());
    }
    let said = complaint(&complaints(&notes.log), runtime.kind);
    let why = said.map_or(Refusal::Other, |said| Refusal::from_message(&said, named.program));
    if has_started && why == Refusal::Other {
        return Ok(exit);
    }
    let (runtime, program) = (runtime.path.display().to_string(), named.program.to_owned());
    Err(RunError::NotExecuted { runtime, program, why })
}

/// Records the end of a container whose monitor is gone. The caller holds the container's lock.
pub fn bury(dir: &ContainerDir, now: i64) -> std::io::Result<()> {
    bury_within(dir, now, DELETION).map(|_is_clear| ())
}

/// Like [`bury`], but the runtime has at most the time `most`. Returns whether all remains of the container are
/// removed.
pub(crate) fn bury_within(
    dir: &ContainerDir,
    now: i64,
    most: std::time::Duration,
) -> std::io::Result<bool> {
    let (folder, id) = (dir.path(), dir.id());
    if is_over(folder) {
        // A start of the container may have been interrupted before its program ran.
        StateBefore::restore(folder)?;
        return Ok(true);
    }
    crate::life::end::teardown::forget_earlier_boot(dir);
    // Processes that still run have to end first.
    let is_clear = crate::life::end::teardown::clear_within(folder, id, most);
    if let Some(mut state) = State::load(folder)?
        && state.finished.is_none()
    {
        state.finish(None, now, folder)?;
    }
    // A start in the folder of an ended container may have been interrupted.
    StateBefore::restore(folder)?;
    if is_clear {
        note_over(folder, id);
    }
    Ok(is_clear)
}

/// Asks the monitor of a running container to remove the container at its end. The monitor does this faster than a
/// caller that waits for it.
pub fn unwant(folder: &Path) -> std::io::Result<()> {
    std::fs::write(folder.join(UNWANTED), "")
}

/// Returns whether a command has called [`unwant`].
#[must_use]
pub fn is_unwanted(folder: &Path) -> bool {
    folder.join(UNWANTED).exists()
}

/// Like [`crate::life::end::teardown::clear`], for a container whose folder is kept and whose end is recorded. A note
/// in the folder avoids another call.
pub fn clear(folder: &Path, id: &str) {
    if crate::life::end::teardown::clear(folder, id) {
        note_over(folder, id);
    }
}

fn note_over(folder: &Path, id: &str) {
    if let Err(error) = std::fs::write(folder.join(OVER), "") {
        tracing::debug!(id, %error, "cannot record that the container is removed");
    }
}

/// Whether [`clear`] has succeeded. Every start tests this for each kept container.
#[must_use]
pub fn is_over(folder: &Path) -> bool {
    folder.join(OVER).exists()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn another_program_is_like_the_first_but_for_what_is_asked() {
        let first: SpecProcess = serde_json::from_value(json!({
            "args": ["first"], "env": ["A=1", "AB=2"], "cwd": "/w", "terminal": true,
            "user": {"uid": 7, "gid": 8}, "noNewPrivileges": true, "oomScoreAdj": 5,
            "consoleSize": {"height": 1, "width": 2}, "apparmorProfile": "p",
        }))
        .unwrap();
        let more = |env: &[&str], user| More {
            args: vec!["more".to_owned()],
            env: env.iter().map(|&it| it.to_owned()).collect(),
            working_dir: None,
            user,
            terminal: Terminal::None,
        };
        let process = more(&[], None).process(first.clone(), Home::Derived);
        let args = vec!["more".to_owned()];
        let terminal = false;
        assert_eq!(process, SpecProcess { args, terminal, console_size: None, ..first.clone() });
        assert_eq!(process.rest["oomScoreAdj"], 5);
        assert_eq!(process.apparmor_profile.as_deref(), Some("p"));
        let user = User { uid: 1, gid: 2, groups: vec![3], home: "/".to_owned() };
        let process = more(&["A=3"], Some(user.clone())).process(first.clone(), Home::Given);
        assert_eq!(process.env, ["AB=2", "A=3"]);
        assert_eq!(process.user, SpecUser::new(&user));
        assert!(process.capabilities.effective.is_empty());
        // As in podman and Docker, a `HOME` that the caller or the image sets is kept; otherwise it is the user's
        // home directory.
        let first = SpecProcess { env: vec!["HOME=/root".to_owned(), "B=1".to_owned()], ..first };
        let check = |env: &[&str], user: Option<&User>, home, expect: &[&str]| {
            let process = more(env, user.cloned()).process(first.clone(), home);
            assert_eq!(process.env, expect);
        };
        let bob = User { home: "/srv/bob".to_owned(), ..user };
        check(&[], Some(&bob), Home::Derived, &["B=1", "HOME=/srv/bob"]);
        check(&[], Some(&bob), Home::Given, &["HOME=/root", "B=1"]);
        check(&[], None, Home::Derived, &["HOME=/root", "B=1"]);
        check(&["HOME=/k"], Some(&bob), Home::Derived, &["B=1", "HOME=/k"]);
    }
}
