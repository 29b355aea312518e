//! Runs a container from start to end: a private mount namespace, the runtime in it, forwarded signals, and the exit
//! code.
//!
//! The root is attached in a private mount namespace, so the kernel unmounts it when the last process in that
//! namespace ends, for whatever reason. Then only files in the container's folder, and perhaps a cgroup, are left:
//! [`crate::life::end::teardown`] removes both.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use kernel::mount::{Detached, Propagation};
use kernel::process::{Exit, ExpectedWait, Pause, Prompt, Setup, Signal, Signals, Who};
use store::OperationError;

use crate::boot_cache::Notes;
use crate::bundle::path_resolver::{View, WorkingDirError};
use crate::bundle::spec::{RuntimeSpec, SpecError, SpecLinux, SpecProcess};
use crate::bundle::{Process, Terminal};
use crate::folder::{CONFIG, PID, RUNTIME_LOG, RUNTIME_PATH, RUNTIME_STATE};
use crate::life::causes;
use crate::life::cgroup::memory::Ear;
use crate::life::init_signals::Terms;
use crate::life::log::LogLimit;
use crate::life::mount_staging::Stage;
use crate::life::state::{End, Reason};
use crate::network::{Connection, NetworkError, Pasta};
use crate::networks::NetworksError;
use crate::networks::attachment::{Connected, Reservation};
use crate::restart_policy::RestartPolicy;
use crate::root::headroom::Headroom;
use crate::runtime::call::{
    AskError, KILLING, add_log, chain, command, complaint, complaints, finish, hide_obstacle,
};
use crate::runtime::caller_fds::{CallerFdError, CallerFds};
use crate::runtime::gvisor_stdio::Streams;
use crate::runtime::program::{NamedProgram, ProgramError, Refusal, Within, too_long};
use crate::runtime::seccomp_cache::{Compiled, Lesson};
use crate::runtime::{Kind, Runtime};

/// Everything that one container needs.
#[derive(Debug)]
pub struct Start<'a> {
    /// Name for the runtime: letters, digits, `_`, `-`, `.`.
    pub id: &'a str,
    /// Folder of the container: an absolute path that exists and is not removed.
    pub folder: &'a Path,
    /// Locked file that marks the container as alive. It must not be a directory, because the runtime inherits it.
    pub lock: Option<BorrowedFd<'a>>,
    pub root: &'a Detached,
    /// The folder with the mount points of the root and of all other mounts.
    pub stage: &'a Stage,
    pub process: &'a Process,
    /// User and group that own the container's files on the host, if they differ from those in the container.
    pub owner: Option<(u32, u32)>,
    /// Configuration of the bundle, with the stage's root as its root.
    pub spec: RuntimeSpec,
    /// Whether the configuration requests a new terminal. If so, the container does not share the runtime's standard
    /// error.
    pub terminal: Terminal,
    /// Whether standard input of a container in the background stays open.
    pub has_open_stdin: bool,
    /// Descriptors of this process's caller that the program gets.
    pub fds: &'a CallerFds,
    /// Streams of this process that the program uses, if the container is in the foreground and recorded.
    pub streams: Option<CallerStreams>,
    /// Path of the socket to which the runtime sends the terminal, if this process or its parent has that socket.
    pub console: Option<&'a str>,
    pub runtime: &'a Runtime,
    pub signals: &'a Signals,
    /// Reservers of disk space for the container's filestores.
    pub headrooms: &'a [Headroom],
    /// How much of the output the log keeps, if the container has one.
    pub log_size: LogLimit,
    /// When the program is started again after its end. Only a container in the background is.
    pub restart: RestartPolicy,
    /// Time after which the container is killed.
    pub timeout: Option<Duration>,
    /// The process that connects the network to the host's, if any, and the user of this process.
    pub pasta: Option<(&'a Pasta, Who)>,
    /// The container's addresses in networks of the store.
    pub networks: Option<&'a Reservation>,
    /// Notes that are valid until the next boot.
    pub notes: Option<&'a Notes>,
}

/// Standard streams of a container's monitor that the program uses. Output also goes to the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallerStreams {
    pub input: bool,
    pub output: bool,
    pub errors: bool,
}

impl CallerStreams {
    /// All streams.
    pub const ALL: Self = Self { input: true, output: true, errors: true };
    /// Those for output.
    pub const OUTPUTS: Self = Self { input: false, output: true, errors: true };
}

impl Start<'_> {
    /// Raises the priority of this process, so that disk space is reserved in time even on a busy host. The
    /// container's writes cannot wait for it.
    pub(crate) fn be_prompt(&self) -> Option<Prompt> {
        if self.headrooms.is_empty() {
            return None;
        }
        let late = |error: &std::io::Error| {
            tracing::debug!(id = self.id, %error, "the reserve of disk space may grow too late on a busy host");
        };
        kernel::process::be_prompt().inspect_err(late).ok()
    }

    /// Does the periodic work while the container runs. Returns the time until the next call, which is at most `also`.
    pub(crate) fn look(&self, also: Option<Duration>) -> Pause<'_> {
        let pause = Headroom::look_at_all(self.headrooms);
        Pause { most: also.into_iter().chain(pause.most).min(), ..pause }
    }

    /// Drops the parts of the configuration that only the runtime needs, which reads them from the bundle. They are
    /// hundreds of small pieces of memory.
    pub(crate) fn forget_setup(&mut self) {
        let RuntimeSpec { process, linux, .. } = std::mem::take(&mut self.spec);
        let process = SpecProcess { rlimits: process.rlimits, ..SpecProcess::default() };
        let SpecLinux { resources, cgroups_path, .. } = linux;
        let linux = SpecLinux { resources, cgroups_path, ..SpecLinux::default() };
        self.spec = RuntimeSpec { process, linux, ..RuntimeSpec::default() };
    }
}

/// Deadline of a container with a timeout.
#[derive(Debug)]
pub(crate) struct Deadline {
    at: Option<Instant>,
    is_over: bool,
}

impl Deadline {
    pub(crate) fn from_start(start: &Start<'_>) -> Self {
        let at = start.timeout.and_then(|it| Instant::now().checked_add(it));
        Self { at, is_over: false }
    }

    /// Returns the time until the deadline, and calls `kill` when it is reached.
    pub(crate) fn look(&mut self, kill: impl FnOnce()) -> Option<Duration> {
        let rest = self.at?.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            (self.at, self.is_over) = (None, true);
            kill();
            return None;
        }
        Some(rest)
    }

    /// Returns how the container ended. A program that ended before the kill keeps its exit code. `lacked_memory` is
    /// called for a program that was killed before its deadline.
    pub(crate) fn end(&self, exit: Exit, lacked_memory: impl FnOnce() -> bool) -> End {
        match (exit.shell_code() == KILLED, self.is_over) {
            // podman has the same exit code.
            (true, true) => End { exit: Exit::Code(255), reason: Some(Reason::Timeout) },
            (true, false) if lacked_memory() => End { exit, reason: Some(Reason::Memory) },
            _ => End { exit, reason: None },
        }
    }
}

/// Exit code of a killed program.
pub const KILLED: i32 = 128 + Signal::KILL.as_raw();

/// Reason why a container, or a program in it, did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be executed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The container's network cannot be set up.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The container cannot be connected to its networks.
    #[error(transparent)]
    Networks(#[from] NetworksError),
    /// A standard stream is a directory, through which a program could reach all other directories of the host.
    #[error(
        "{0} is a directory of the host, which a container must not access: redirect it elsewhere"
    )]
    Directory(&'static str),
    /// The working directory of an additional program is not usable.
    #[error(transparent)]
    WorkingDir(#[from] WorkingDirError),
    /// The container's configuration cannot be read.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// An additional program cannot get a descriptor of the caller.
    #[error("--preserve-fds: {0}")]
    Descriptor(CallerFdError),
    /// The caller interrupted the start.
    #[error("interrupted while starting container {0}")]
    Interrupted(String),
    /// The runtime could not start the container.
    #[error("{runtime} could not start the container: {message}{cause}")]
    Refused {
        runtime: String,
        /// Message in the runtime's log.
        message: String,
        /// Likely cause, as the end of the text; may be empty.
        cause: String,
    },
    /// The runtime could not start an additional program, and has written the reason to this process's standard
    /// error.
    #[error("{runtime} could not start \"{program}\" in the container: see its message above")]
    NotExecuted {
        runtime: String,
        /// Program as named in the command.
        program: String,
        /// Kind of failure, as far as the message shows.
        why: Refusal,
    },
    /// The runtime could not start the container, and has written the reason to this process's standard error.
    #[error("{runtime} could not start the container: see its message above{cause}")]
    RefusedAloud {
        runtime: String,
        /// Likely cause, as the end of the text; may be empty.
        cause: String,
    },
}

/// Exit code if Quire or the runtime failed.
pub const FAILED: u8 = 125;

impl RunError {
    /// Returns the exit code for a container that did not run. Source: Docker, "Exit status"; POSIX `env` for 126 and
    /// 127.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program(error) if error.is_absent() => 127,
            // The port is podman's.
            Self::Program(_)
            | Self::NotExecuted { why: Refusal::Unusable, .. }
            | Self::Networks(NetworksError::Port { .. }) => 126,
            Self::NotExecuted { why: Refusal::Absent, .. } => 127,
            _ => FAILED,
        }
    }
}

/// Runs a container to its end, and returns how it ended. This *process* keeps the mount namespace that it makes.
///
/// If the first process of a container does not handle `SIGTERM`, the signal ends the container, as it ends other
/// programs. A container that ignores `SIGINT` or `SIGTERM` is killed at the third request. At the second request,
/// `remark` gets a sentence about this.
///
/// # Errors
/// [`RunError`] if the container did not start.
pub fn run(start: &Start<'_>, remark: &dyn Fn(&str)) -> Result<End, RunError> {
    if let Some(stream) = crate::runtime::gvisor_stdio::directory() {
        return Err(RunError::Directory(stream));
    }
    let Prepared { doubt, lesson, connection, connected } = prepare(start)?;
    let runtime_failed = OperationError::at("run", &start.runtime.path);
    let mut command = command(start.runtime, start.folder);
    let streams_failed = OperationError::of("forward the standard streams of container", start.id);
    let kind = start.runtime.kind;
    let streams = Streams::replace_stdio(&mut command, kind, &start.spec, &start.spec.process);
    let streams = streams.map_err(streams_failed)?;
    // Runtimes write errors both to their log and to standard error. Their format on standard error is readable only
    // if there is a log. If the container has a terminal, it does not use standard error, so standard error is
    // discarded, and Quire reports the error from the log. Otherwise the runtime itself reports the error. runsc also
    // gets a log, because its helpers write only to the log.
    let covered = start.terminal == Terminal::New;
    let logs = covered || kind == Kind::Runsc;
    let log = if logs { start.folder.join(RUNTIME_LOG) } else { PathBuf::from("/dev/null") };
    // crun writes errors to the container's terminal in the format of its log.
    let format = if kind == Kind::Crun { "text" } else { "json" };
    add_log(&mut command, start.runtime, &log, format);
    if covered {
        command.stderr(Stdio::null());
    }
    let pid_file = start.folder.join(PID);
    command.arg("run");
    start.fds.pass(&mut command);
    command.arg("--bundle").arg(start.folder).arg("--pid-file").arg(&pid_file);
    command.arg(start.id);
    // Without a terminal, runsc does not forward signals: they would end runsc, and the program would not get them. So
    // runsc runs in a separate session, in which it gets no signals, not even those of the terminal's keys.
    let deaf = kind == Kind::Runsc && !covered;
    let lifted = start.fds.lift(start.lock).map_err(|errno| streams_failed(errno.into()))?;
    let keep = start.fds.inherited(lifted.as_ref(), start.lock);
    let signals = Some(start.signals);
    let setup = Setup { signals, keep: &keep, own_session: deaf, ..Setup::default() };
    let ear = Ear::start(&start.spec.linux).map_err(streams_failed)?;
    let lesson = lesson.map(|it| it.wait(&pid_file));
    let child = kernel::process::spawn(command, &setup).map_err(runtime_failed)?;
    let prompt = start.be_prompt();
    let terms = Terms::new(start.folder, kind);
    let mut deliver = |signal: Signal| {
        terms.note(signal);
        match deaf && send(start, signal) {
            true => Ok(()),
            false => child.process.signal(signal),
        }
    };
    let mut asked = |requests| match requests {
        0 | 1 => {}
        2 => remark(TWICE),
        _ => kill(start, &child.process),
    };
    let mut deadline = Deadline::from_start(start);
    let mut meanwhile = || {
        let again = terms.look(|| kill(start, &child.process));
        let rest = deadline.look(|| kill(start, &child.process));
        start.look(again.into_iter().chain(rest).min())
    };
    let exit = child
        .process
        .supervise_by(
            start.signals,
            &mut deliver,
            &mut asked,
            &mut meanwhile,
            None,
            ExpectedWait::Short,
        )
        .map_err(runtime_failed)?;
    drop((prompt, connected));
    if connection.is_some_and(|it| it.is_over()) {
        remark(DISCONNECTED);
    }
    let exit = terms.exit(exit);
    // This is called in any case, so that this process has only one thread again.
    let lacked_memory = {
        let was_killed = exit.shell_code() == KILLED;
        ear.is_some_and(|ear| ear.finish(was_killed, start.folder))
    };
    let end = deadline.end(exit, || lacked_memory);
    streams.finish().map_err(streams_failed)?;
    // crun and runc write the pid file after the setup, when only the exec remains to be done. Later errors in their
    // log do not change the program's exit code.
    let started = pid_file.exists() && !(kind == Kind::Runsc && runsc_failed(exit, &log));
    if let Some(lesson) = lesson {
        lesson.finish(started);
    }
    if let (Exit::Code(1..), false) = (exit, started) {
        let runtime = start.runtime.path.display().to_string();
        // Some errors that other runtimes detect at the exec are detected by runsc before it.
        if let (Kind::Runsc, Some(error)) = (kind, doubt) {
            return Err(error.into());
        }
        let complaints = complaints(&log);
        let limits = &start.spec.process.rlimits;
        let cause = causes::likely(start.runtime, limits, &complaints.join("\n"));
        let message = match complaint(&complaints, kind) {
            _ if !covered && complaints.len() < 2 => {
                return Err(RunError::RefusedAloud { runtime, cause });
            }
            Some(message) => message,
            None => "it gave no reason".to_owned(),
        };
        return Err(RunError::Refused { runtime, message, cause });
    }
    // The exec is the runtime's last step. If it fails, the runtime exits with a code that the program could also have
    // returned.
    match doubt {
        Some(error) if matches!(exit, Exit::Code(1 | 255)) => Err(error.into()),
        _ => Ok(end),
    }
}

/// Remark at the second request to end.
pub(crate) const TWICE: &str = "the container was signalled twice: a third signal kills it";

/// Results of [`prepare`].
pub(crate) struct Prepared<'a> {
    /// Reason why the program will probably not run.
    pub(crate) doubt: Option<ProgramError>,
    /// The compiled seccomp filter that this start provides.
    pub(crate) lesson: Option<Lesson>,
    /// Connection of the container's network to the host's.
    pub(crate) connection: Option<Connection>,
    /// Connection of the container to networks of the store.
    pub(crate) connected: Option<Connected<'a>>,
}

/// Remark at the end of a container whose network connection ended earlier.
pub(crate) const DISCONNECTED: &str =
    "pasta exited before the container: the container lost its network";

/// Attaches the root in a new mount namespace of this process, and writes the bundle.
pub(crate) fn prepare<'a>(start: &Start<'a>) -> Result<Prepared<'a>, RunError> {
    // The program is examined before the container can change its root. The result is used only if the start fails,
    // because the kernel may support additional formats.
    let view = View::of_bundle(start.root.as_fd(), &start.spec);
    let named = start.process.args.first().map(|program| NamedProgram {
        program,
        working_dir: &start.process.working_dir,
        search: start.process.variable("PATH").unwrap_or_default(),
        within: Within::Image,
    });
    let doubt = match named {
        Some(named) => named.doubt(&view, &named.resolve(&view)?),
        None => None,
    };
    let doubt = doubt.or_else(|| too_long(&start.process.args, &start.process.env));
    let connected = start.networks.map(|it| it.connect(start.signals)).transpose()?;
    kernel::process::own_mounts(Propagation::Downstream)
        .map_err(OperationError::of("make", "a mount namespace (this needs root)"))?;
    hide_obstacle(start.runtime, start.folder)
        .map_err(OperationError::of("attach the root of container", start.id))?;
    start.stage.set_up(start.id, start.root)?;
    let connect = |(pasta, who)| Connection::start(pasta, start.stage.base(), who, start.signals);
    let connection = start.pasta.map(connect).transpose()?;
    let config = start.folder.join(CONFIG);
    let made = start.folder.join(RUNTIME_STATE).join(start.id).join("seccomp.bpf");
    let (bytes, lesson) = match Compiled::lookup(start.runtime, &start.spec, made, start.notes) {
        Some(Compiled::Known(filter)) => {
            let mut spec = start.spec.clone();
            Compiled::annotate(&filter, &mut spec);
            (serde_json::to_vec(&spec), None)
        }
        Some(Compiled::Unknown(lesson)) => (serde_json::to_vec(&start.spec), Some(lesson)),
        None => (serde_json::to_vec(&start.spec), None),
    };
    let written = bytes.map_err(Into::into).and_then(|bytes| std::fs::write(&config, bytes));
    written.map_err(OperationError::at("write", &config))?;

    let record = start.folder.join(RUNTIME_PATH);
    let runtime_path = start.runtime.path.as_os_str().as_bytes();
    std::fs::write(&record, runtime_path).map_err(OperationError::at("write", &record))?;
    Ok(Prepared { doubt, lesson, connection, connected })
}

/// Kills a container that does not end. Without its first process, the kernel kills all others, and then the runtime
/// exits. If the runtime cannot send the signal, the runtime itself is killed, and
/// [`crate::life::end::teardown::clear`] removes the remains.
pub(crate) fn kill(start: &Start<'_>, runtime: &kernel::process::Process) {
    crate::life::cgroup::memory::note_kill(start.folder);
    if !send(start, Signal::KILL) {
        // The runtime may have exited just now.
        let _gone = runtime.signal(Signal::KILL);
    }
}

/// Makes the runtime send a signal to the container's first process. Returns whether it succeeded.
fn send(start: &Start<'_>, signal: Signal) -> bool {
    let mut command = command(start.runtime, start.folder);
    command.args(["kill", start.id]).arg(signal.as_raw().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let die_with_parent = Some(Signal::KILL);
    let setup = Setup { signals: Some(start.signals), die_with_parent, ..Setup::default() };
    let exit = kernel::process::spawn(command, &setup)
        .map_err(AskError::from)
        .and_then(|it| finish(&it.process, start.runtime, "kill", KILLING));
    match exit {
        Ok(Exit::Code(0)) => return true,
        Ok(exit) => {
            tracing::debug!(
                id = start.id,
                ?exit,
                ?signal,
                "the runtime did not signal the container"
            );
        }
        Err(error) => {
            tracing::warn!(id = start.id, error = chain(&error), "cannot signal the container");
        }
    }
    false
}

/// Whether runsc itself failed. runsc writes the pid file before its setup is complete. If it fails after that, it
/// exits with this code. The program may have the same exit code, but does not write into the log. Source: gVisor
/// `runsc/cmd/util/util.go`, `Fatalf`.
fn runsc_failed(exit: Exit, log: &Path) -> bool {
    exit == Exit::Code(128) && !complaints(log).is_empty()
}
