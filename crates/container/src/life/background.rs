//! Containers that outlive the command that started them: each container has a monitor process, and other commands use
//! the container.

mod behind;
mod restarts;
mod terminal;
mod watch;

use std::fs::File;
use std::os::fd::{AsFd as _, RawFd};
use std::path::{Path, PathBuf};

use kernel::process::{Exit, Setup, Signal, Signals};
use store::{ContainerDir, OperationError};

use crate::backoff::GLANCE;
use crate::bundle::path_resolver::{View, check_inside};
use crate::bundle::security::{of_caller, of_user};
use crate::bundle::spec::{RuntimeSpec, SpecProcess, SpecUser};
use crate::bundle::user::User;
use crate::bundle::{DEFAULT_TERM, Home, Terminal};
use crate::folder::{EXEC, OVER, PID, RUNTIME_PATH, STOPPED, UNWANTED};
use crate::life::monitor::RunError;
use crate::life::signal::signal_number;
use crate::life::state::{State, StateBefore};
use crate::runtime::call::{
    ANSWER, Asked, DELETION, HeldFolder, KILLING, add_log, ask, chain, complaint, complaints, enter,
};
use crate::runtime::caller_fds::CallerFds;
use crate::runtime::gvisor_stdio::Streams;
use crate::runtime::program::{NamedProgram, Refusal, Within};
use crate::runtime::{Kind, Runtime};

pub use behind::exec_behind;
pub use watch::{Last, WatchCalls, watch};

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
    /// Descriptors of this process's caller that the program gets, by their numbers.
    pub fds: Vec<RawFd>,
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
        // As for a container with a terminal.
        if process.terminal && !process.env.iter().any(|it| it.starts_with("TERM=")) {
            process.env.push(DEFAULT_TERM.to_owned());
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
    socket: PathBuf,
}

impl Notes {
    fn new(folder: &Path) -> Self {
        let name = |end: &str| folder.join(format!("{EXEC}{}.{end}", std::process::id()));
        let (process, pid, log, socket) = (name("json"), name("pid"), name("log"), name("sock"));
        let notes = Self { process, pid, log, socket };
        // If a process was killed, its files must not be used for another process with the same pid.
        notes.remove();
        notes
    }

    fn remove(&self) {
        for path in [&self.process, &self.pid, &self.log, &self.socket] {
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
    let fds = CallerFds::find(&more.fds, runtime.kind).map_err(RunError::Descriptor)?;
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
    exec.arg("exec");
    fds.pass(&mut exec);
    exec.arg("--process").arg(&notes.process).arg("--pid-file").arg(&notes.pid);
    let exit = if has_terminal {
        terminal::exec(exec, folder, id, &runtime, &notes.pid, &notes.socket, signals)?
    } else {
        exec.arg(id);
        let streams = Streams::replace_stdio(&mut exec, runtime.kind, &spec, &process);
        let streams = streams.map_err(streams_failed)?;
        enter(&runtime, folder).map_err(runtime_failed)?;
        let keep = fds.inherited(None, None);
        let setup = Setup { signals: Some(signals), keep: &keep, ..Setup::default() };
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

/// Records that a user stops a container, if it has a restart policy, and `signal` is one that ends programs or the
/// container's own signal to stop. Then its program is not started again now, and perhaps not at the next boot. Call it
/// before the container is signalled.
///
/// # Errors
/// If it cannot be recorded.
pub fn note_stopped(folder: &Path, signal: u8) -> std::io::Result<()> {
    let Some(state) = State::load(folder)? else { return Ok(()) };
    let is_own = || signal_number(&state.stop_signal).is_ok_and(|own| own == signal);
    if state.restarts.is_none() || !(ENDING.contains(&signal) || is_own()) {
        return Ok(());
    }
    let file = File::create(folder.join(STOPPED))?;
    file.sync_all()?;
    File::open(folder)?.sync_all()
}

/// The numbers of `INT`, `QUIT`, `KILL` and `TERM`. Programs often read their settings again at `HUP`.
const ENDING: [u8; 4] = [2, 3, 9, 15];

/// Returns whether a user has stopped a container with a restart policy.
#[must_use]
pub fn is_stopped_by_user(folder: &Path) -> bool {
    folder.join(STOPPED).exists()
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
            fds: Vec::new(),
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
