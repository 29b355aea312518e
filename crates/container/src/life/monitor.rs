//! One container from start to end: a mount namespace of its own, the runtime in it, signals in, exit code out.
//!
//! The root is attached in a private mount namespace, so the kernel takes it down when the last process in there ends,
//! for whatever reason. Files in the container's folder are left then, and perhaps a cgroup: [`crate::life::teardown`]
//! removes both.

use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use kernel::mount::{Detached, Propagation};
use kernel::process::{Exit, ProcessError, Prompt, Setup, Signal, Signals, Who};

use crate::bundle::spec::{RuntimeSpec, SpecError};
use crate::bundle::view::{View, WorkingDirError};
use crate::bundle::{Process, Terminal};
use crate::folder::{CONFIG, PID, RUNTIME_LOG, RUNTIME_PATH, RUNTIME_STATE};
use crate::life::causes;
use crate::life::memory::Ear;
use crate::life::spared::Terms;
use crate::life::stage::{Stage, StageError};
use crate::life::state::{End, Reason};
use crate::network::{Connection, NetworkError, Pasta};
use crate::notes::Notes;
use crate::root::headroom::Headroom;
use crate::runtime::call::{
    AskError, KILLING, add_log, chain, command, complaint, complaints, finish, hide_obstacle,
};
use crate::runtime::compiled::{Compiled, Lesson};
use crate::runtime::program::{Named, ProgramError, Refusal, Within, too_long};
use crate::runtime::streams::Streams;
use crate::runtime::{Kind, Runtime};

/// Something that has to be seen to as long as a container lives.
pub trait Watch: std::fmt::Debug {
    /// Does what is due, and answers when it is to be called again.
    fn look(&self) -> Duration;
}

/// Everything that one container needs.
#[derive(Debug)]
pub struct Start<'a> {
    /// Its name to the runtime: letters, digits, `_`, `-`, `.`.
    pub id: &'a str,
    /// A folder of its own, absolute, which exists and stays.
    pub folder: &'a Path,
    /// The locked file that says that the container lives, which must not be a directory: the runtime inherits it.
    pub lock: Option<BorrowedFd<'a>>,
    /// Its root.
    pub root: &'a Detached,
    /// Where that is attached, and what else is.
    pub stage: &'a Stage,
    /// Command to execute.
    pub process: &'a Process,
    /// User and group that own its files on the host, if they differ from those in the container.
    pub owner: Option<(u32, u32)>,
    /// The bundle's configuration, with the stage's root as its root.
    pub spec: RuntimeSpec,
    /// Whether the configuration gives it a terminal of its own: then the runtime's standard error is not its.
    pub terminal: Terminal,
    /// Where the runtime is to send the terminal, if this process or its parent has that socket.
    pub console: Option<&'a str>,
    /// Who executes it.
    pub runtime: &'a Runtime,
    /// Signals to forward to the container.
    pub signals: &'a Signals,
    /// Who looks after its filestores meanwhile.
    pub headrooms: &'a [Headroom],
    /// What else has to be seen to meanwhile.
    pub watch: Option<&'a dyn Watch>,
    /// Limit of its log, in bytes, if it has one; `None` for no limit.
    pub log_size: Option<NonZeroU64>,
    /// After how long it is killed.
    pub timeout: Option<Duration>,
    /// Who connects its network to the host's, if somebody does, and who this process is.
    pub pasta: Option<(&'a Pasta, Who)>,
    /// A folder for notes that hold until the next start of the machine.
    pub notes: Option<&'a Notes>,
}

impl Start<'_> {
    /// Looks come in time also when the host's processors have much else to do: what a container writes cannot wait for the room
    /// that is made for it.
    pub(crate) fn be_prompt(&self) -> Option<Prompt> {
        if self.headrooms.is_empty() {
            return None;
        }
        let late = |error: &std::io::Error| {
            tracing::debug!(id = self.id, %error, "room may be made too late on a busy host");
        };
        kernel::process::be_prompt().inspect_err(late).ok()
    }

    /// What is done while the container runs; answers when it is to be done again.
    pub(crate) fn look(&self) -> Option<Duration> {
        let watched = self.watch.map(Watch::look);
        self.headrooms.iter().map(Headroom::look).chain(watched).min()
    }

    /// Drops the seccomp filter from the configuration. Only the runtime needs it, and it takes as much memory as the rest.
    pub(crate) fn forget_calls(&mut self) {
        self.spec.linux.seccomp = None;
    }
}

/// When a container's time is over.
#[derive(Debug)]
pub(crate) struct Deadline {
    at: Option<Instant>,
    is_over: bool,
}

impl Deadline {
    pub(crate) fn of(start: &Start<'_>) -> Self {
        let at = start.timeout.and_then(|it| Instant::now().checked_add(it));
        Self { at, is_over: false }
    }

    /// Answers how long it is until then, and kills at that time.
    pub(crate) fn look(&mut self, kill: impl FnOnce()) -> Option<Duration> {
        let rest = self.at?.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            (self.at, self.is_over) = (None, true);
            kill();
            return None;
        }
        Some(rest)
    }

    /// How the container ended. A program that was faster has its own code. `lacked_memory` is asked about one that was killed.
    pub(crate) fn end(&self, exit: Exit, lacked_memory: impl FnOnce() -> bool) -> End {
        match (exit.shell_code() == KILLED, self.is_over) {
            // As podman has it.
            (true, true) => End { exit: Exit::Code(255), reason: Some(Reason::Timeout) },
            (true, false) if lacked_memory() => End { exit, reason: Some(Reason::Memory) },
            _ => End { exit, reason: None },
        }
    }
}

/// Exit code of a killed program.
pub const KILLED: i32 = 128 + Signal::KILL.as_raw();

/// A container that did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be executed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A private mount namespace cannot be had.
    #[error("cannot make a mount namespace (this needs root)")]
    Namespace(#[source] ProcessError),
    /// Files or mounts for the runtime could not be put in place.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// It has no network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// A file in the container's folder cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file in the container's folder cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The runtime cannot be started, or not be waited for.
    #[error("cannot run {}", path.display())]
    Runtime {
        /// The program.
        path: PathBuf,
        /// Why.
        #[source]
        source: ProcessError,
    },
    /// Its output did not reach its file.
    #[error("cannot forward the standard streams of container {id}")]
    Streams {
        /// The container.
        id: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A standard stream is a directory, from which a program can go to all others of the host.
    #[error(
        "{0} is a directory of the host, which a container must not get: redirect it elsewhere"
    )]
    Directory(&'static str),
    /// A further program cannot start where it should.
    #[error(transparent)]
    WorkingDir(#[from] WorkingDirError),
    /// Its configuration cannot be read.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The container's names of users and groups, which the runtime reads.
    #[error("cannot look up the container's users")]
    Users(#[source] crate::bundle::user::LookupError),
    /// The caller interrupted it.
    #[error("interrupted while starting container {0}")]
    Interrupted(String),
    /// The runtime could not start the container.
    #[error("{runtime} could not start the container: {message}{cause}")]
    Refused {
        /// The program.
        runtime: String,
        /// Message in the runtime's log.
        message: String,
        /// The likely cause, as the end of the text; may be empty.
        cause: String,
    },
    /// The runtime could not start a further program, and has said why on our own standard error.
    #[error("{runtime} could not start \"{program}\" in the container: see its message above")]
    NotExecuted {
        /// The runtime's program.
        runtime: String,
        /// As the command names it.
        program: String,
        /// Kind of failure, as far as the message tells.
        why: Refusal,
    },
    /// The runtime could not start the container, and has said why on our own standard error.
    #[error("{runtime} could not start the container: see its message above{cause}")]
    RefusedAloud {
        /// The program.
        runtime: String,
        /// The likely cause, as the end of the text; may be empty.
        cause: String,
    },
}

/// The exit code where Quire, or the runtime, could not do it.
pub const FAILED: u8 = 125;

impl RunError {
    /// The exit code for a container that did not run. Source: Docker, "Exit status"; POSIX `env` for 126 and 127.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program(error) if error.is_absent() => 127,
            Self::Program(_) | Self::NotExecuted { why: Refusal::Unusable, .. } => 126,
            Self::NotExecuted { why: Refusal::Absent, .. } => 127,
            _ => FAILED,
        }
    }
}

/// Runs a container to its end, and returns how it ended. This *process* keeps the mount namespace that it makes.
///
/// `SIGTERM` ends a container whose first process does not handle it, as it ends other programs. A container that
/// ignores `SIGINT` or `SIGTERM` is killed at the third request. At the second, `remark` gets a sentence that says so.
///
/// # Errors
/// [`RunError`] when it did not start.
pub fn run(start: &Start<'_>, remark: &dyn Fn(&str)) -> Result<End, RunError> {
    crate::runtime::streams::check().map_err(RunError::Directory)?;
    let Prepared { doubt, lesson, connection } = prepare(start)?;
    let runtime_failed = |source| RunError::Runtime { path: start.runtime.path.clone(), source };
    let mut command = command(start.runtime, start.folder);
    let streams_failed = |source| RunError::Streams { id: start.id.to_owned(), source };
    let kind = start.runtime.kind;
    let streams = Streams::of(&mut command, kind, &start.spec, &start.spec.process);
    let streams = streams.map_err(streams_failed)?;
    // Runtimes write their errors to standard error as well as into their log, and to the former for people only if
    // there is a log. A container with a terminal of its own does not share standard error: then that is covered, and
    // we say what is in the log. Otherwise the runtime speaks for itself, but runsc, whose helpers have the log only.
    let covered = start.terminal == Terminal::New;
    let logs = covered || kind == Kind::Runsc;
    let log = if logs { start.folder.join(RUNTIME_LOG) } else { PathBuf::from("/dev/null") };
    // What crun says to the container's terminal has the log's format too.
    let format = if kind == Kind::Crun { "text" } else { "json" };
    add_log(&mut command, start.runtime, &log, format);
    if covered {
        command.stderr(Stdio::null());
    }
    let pid_file = start.folder.join(PID);
    command.arg("run").arg("--bundle").arg(start.folder).arg("--pid-file").arg(&pid_file);
    command.arg(start.id);
    // Without a terminal runsc passes no signals on. They would end it, and nobody would tell the program: so it gets none,
    // those of our terminal's keys neither.
    let deaf = kind == Kind::Runsc && !covered;
    let (signals, keep) = (Some(start.signals), start.lock.as_slice());
    let setup = Setup { signals, keep, own_session: deaf, ..Setup::default() };
    let ear = Ear::of(&start.spec.linux).map_err(streams_failed)?;
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
        2 => remark("the container was asked to end twice: once more kills it"),
        _ => kill(start, &child.process),
    };
    let mut deadline = Deadline::of(start);
    let mut meanwhile = || {
        let again = terms.look(|| kill(start, &child.process));
        let rest = deadline.look(|| kill(start, &child.process));
        again.into_iter().chain(rest).chain(start.look()).min()
    };
    let exit = child
        .process
        .supervise_by(start.signals, &mut deliver, &mut asked, &mut meanwhile)
        .map_err(runtime_failed)?;
    drop(prompt);
    if connection.is_some_and(|it| it.is_over()) {
        remark(DISCONNECTED);
    }
    let exit = terms.exit(exit);
    // Always, so that this process has one thread again.
    let lacked_memory = {
        let was_killed = exit.shell_code() == KILLED;
        ear.is_some_and(|ear| ear.finish(was_killed, start.folder))
    };
    let end = deadline.end(exit, || lacked_memory);
    streams.finish().map_err(streams_failed)?;
    // crun and runc write it when all is set up and only the exec is left to do. What they log later does not make the
    // program's exit code another one.
    let started = pid_file.exists() && !(kind == Kind::Runsc && runsc_failed(exit, &log));
    if let Some(lesson) = lesson {
        lesson.finish(started);
    }
    if let (Exit::Code(1..), false) = (exit, started) {
        let runtime = start.runtime.path.display().to_string();
        // What others find out at the exec, runsc does before.
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
            None => "it does not say why".to_owned(),
        };
        return Err(RunError::Refused { runtime, message, cause });
    }
    // The exec is the runtime's very last step: when that fails, the runtime ends with a code that the program could
    // have ended with.
    match doubt {
        Some(error) if matches!(exit, Exit::Code(1 | 255)) => Err(error.into()),
        _ => Ok(end),
    }
}

/// A container that can be started.
pub(crate) struct Prepared {
    /// Why the program will probably not run.
    pub(crate) doubt: Option<ProgramError>,
    /// What is to be learned from the start.
    pub(crate) lesson: Option<Lesson>,
    /// Its network's connection to the host's.
    pub(crate) connection: Option<Connection>,
}

/// Said at the end of a container whose network ended before.
pub(crate) const DISCONNECTED: &str =
    "pasta had ended before the container: it had no network any more";

/// Attaches the root in a mount namespace of this process's own and writes the bundle.
pub(crate) fn prepare(start: &Start<'_>) -> Result<Prepared, RunError> {
    // Asked before the container can change its root, and believed only afterwards: a kernel may have learned formats
    // that are not known here.
    let view = View::of_bundle(start.root.as_fd(), &start.spec);
    let named = start.process.args.first().map(|program| Named {
        program,
        working_dir: &start.process.working_dir,
        search: start.process.variable("PATH").unwrap_or_default(),
        within: Within::Image,
    });
    let doubt = match named {
        Some(named) => named.doubt(&view, &named.find(&view)?),
        None => None,
    };
    let doubt = doubt.or_else(|| too_long(&start.process.args, &start.process.env));
    kernel::process::own_mounts(Propagation::Downstream).map_err(RunError::Namespace)?;
    hide_obstacle(start.runtime, start.folder)
        .map_err(|source| StageError::Attach { id: start.id.to_owned(), source })?;
    start.stage.set_up(start.id, start.root)?;
    let connect = |(pasta, who)| Connection::start(pasta, start.stage.base(), who, start.signals);
    let connection = start.pasta.map(connect).transpose()?;
    let write_failed = |path: &Path| {
        let path = path.to_owned();
        move |source| RunError::Write { path, source }
    };
    let config = start.folder.join(CONFIG);
    let made = start.folder.join(RUNTIME_STATE).join(start.id).join("seccomp.bpf");
    let (bytes, lesson) = match Compiled::of(start.runtime, &start.spec, made, start.notes) {
        Some(Compiled::Known(filter)) => {
            let mut spec = start.spec.clone();
            Compiled::annotate(&filter, &mut spec);
            (serde_json::to_vec(&spec), None)
        }
        Some(Compiled::Unknown(lesson)) => (serde_json::to_vec(&start.spec), Some(lesson)),
        None => (serde_json::to_vec(&start.spec), None),
    };
    let written = bytes.map_err(Into::into).and_then(|bytes| std::fs::write(&config, bytes));
    written.map_err(write_failed(&config))?;

    let record = start.folder.join(RUNTIME_PATH);
    let runtime_path = start.runtime.path.as_os_str().as_bytes();
    std::fs::write(&record, runtime_path).map_err(write_failed(&record))?;
    Ok(Prepared { doubt, lesson, connection })
}

/// Ends a container that will not. Without its first process the kernel ends all others, and then the runtime. If the
/// runtime cannot be asked that, it ends itself, and [`crate::life::teardown::clear`] what it leaves.
pub(crate) fn kill(start: &Start<'_>, runtime: &kernel::process::Process) {
    crate::life::memory::note_kill(start.folder);
    if !send(start, Signal::KILL) {
        // It may have ended just now.
        let _gone = runtime.signal(Signal::KILL);
    }
}

/// Has the runtime send a signal to the container's first process; answers whether it did.
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

/// runsc notes the process before it has set up everything, and ends with this code when it fails then: so may the program,
/// but that does not write into the log. Source: gVisor `runsc/cmd/util/util.go`, `Fatalf`.
fn runsc_failed(exit: Exit, log: &Path) -> bool {
    exit == Exit::Code(128) && !complaints(log).is_empty()
}
