//! One container from start to end: a mount namespace of its own, the runtime in it, signals in, exit code out.
//!
//! The root is attached in a private mount namespace, so the kernel takes it down when the last process in there has
//! gone, however that came about. What is left then are files in the container's folder and perhaps a cgroup, which
//! [`crate::teardown`] removes.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kernel::mount::{Detached, MountError, Propagation, Reach};
use kernel::process::{Exit, ProcessError, Setup, Signals};
use serde::Deserialize;
use serde_json::Value;

use crate::bundle::Process;
use crate::files::{Executable, executable};
use crate::runtime::{Kind, Runtime};

/// Everything that one container needs.
#[derive(Debug)]
pub struct Start<'a> {
    /// Its name to the runtime: letters, digits, `_`, `-`, `.`.
    pub id: &'a str,
    /// A folder of its own, absolute, which exists and stays.
    pub folder: &'a Path,
    /// The locked file that says that the container lives: the runtime inherits it.
    pub lock: BorrowedFd<'a>,
    /// Its root.
    pub root: &'a Detached,
    /// What is executed.
    pub process: &'a Process,
    /// The bundle's configuration, with [`ROOT`] as its root.
    pub config: &'a Value,
    /// Who executes it.
    pub runtime: &'a Runtime,
    /// What is sent on to the container.
    pub signals: &'a Signals,
}

/// The root's place in the bundle.
pub const ROOT: &str = "rootfs";
/// The runtime's own records, in the container's folder.
pub(crate) const STATE: &str = "runtime";
const LOG: &str = "runtime.log";
/// Which runtime runs the container, for whoever has to clear up after it.
const RUNTIME: &str = "runtime.path";

/// A container that did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program is nowhere in the image.
    #[error("the image has no \"{program}\"{searched}")]
    NotFound {
        /// As the command names it.
        program: String,
        /// Where it was searched, or nothing.
        searched: String,
    },
    /// The program is there and can not be executed.
    #[error("\"{0}\" in the image is not an executable file")]
    NotExecutable(String),
    /// A private mount namespace can not be had.
    #[error("cannot make a mount namespace (this needs root)")]
    Namespace(#[source] ProcessError),
    /// The root can not be put in its place.
    #[error("cannot attach the root of container {id}")]
    Attach {
        /// The container.
        id: String,
        /// The kernel's answer.
        #[source]
        source: MountError,
    },
    /// A file in the container's folder can not be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The runtime can not be started, or not be waited for.
    #[error("cannot run {}", path.display())]
    Runtime {
        /// The program.
        path: PathBuf,
        /// Why.
        #[source]
        source: ProcessError,
    },
    /// The runtime could not start the container.
    #[error("{runtime} could not start the container: {message}")]
    Refused {
        /// The program.
        runtime: String,
        /// What it wrote into its log.
        message: String,
    },
}

/// Runs a container to its end, and answers how it ended. This *process* keeps the mount namespace that it makes.
///
/// # Errors
/// [`RunError`] when it did not start.
pub fn run(start: &Start<'_>) -> Result<Exit, RunError> {
    find_program(start)?;
    kernel::process::own_mounts(Propagation::Downstream).map_err(RunError::Namespace)?;
    let attach_failed = |source| RunError::Attach { id: start.id.to_owned(), source };
    hide_obstacle(start.runtime, start.folder).map_err(attach_failed)?;
    let root = start.folder.join(ROOT);
    let write_failed = |path: &Path| {
        let path = path.to_owned();
        move |source| RunError::Write { path, source }
    };
    std::fs::create_dir(&root).map_err(write_failed(&root))?;
    start.root.attach_at(&root).map_err(attach_failed)?;
    let config = start.folder.join("config.json");
    std::fs::write(&config, start.config.to_string()).map_err(write_failed(&config))?;

    let record = start.folder.join(RUNTIME);
    let runtime_path = start.runtime.path.as_os_str().as_bytes();
    std::fs::write(&record, runtime_path).map_err(write_failed(&record))?;

    let runtime_failed = |source| RunError::Runtime { path: start.runtime.path.clone(), source };
    let mut command = command(start.runtime, start.folder);
    command.arg("run").arg("--bundle").arg(start.folder).arg(start.id);
    let setup = Setup { signals: Some(start.signals), keep: &[start.lock], ..Setup::default() };
    let child = kernel::process::spawn(command, &setup).map_err(runtime_failed)?;
    let exit = child.process.supervise(start.signals).map_err(runtime_failed)?;
    if exit != Exit::Code(0)
        && let Some(message) = complaint(&start.folder.join(LOG))
    {
        let runtime = start.runtime.path.display().to_string();
        return Err(RunError::Refused { runtime, message });
    }
    Ok(exit)
}

/// The runtime with the options that every call of it for this container needs.
pub(crate) fn command(runtime: &Runtime, folder: &Path) -> Command {
    let mut command = Command::new(&runtime.path);
    command.arg("--root").arg(folder.join(STATE));
    command.arg("--log").arg(folder.join(LOG)).args(["--log-format", "json"]);
    if runtime.kind == Kind::Runsc {
        // Networks are namespaces of the bundle here, not of gVisor's own stack.
        command.arg("--network=host");
    }
    command
}

/// Has the runtime kill what still runs in a container, and forget it.
pub(crate) fn delete(folder: &Path, id: &str) {
    let Ok(path) = std::fs::read(folder.join(RUNTIME)) else { return };
    let runtime = Runtime::at(PathBuf::from(OsStr::from_bytes(&path)));
    let mut command = command(&runtime, folder);
    command.args(["delete", "--force", id]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // In a thread, since the mount namespace that it makes stays with it: the runtime has to find the cgroups as it
    // left them.
    let exit = std::thread::scope(|scope| {
        let work = || {
            kernel::process::own_mounts(Propagation::Downstream)?;
            if let Err(error) = hide_obstacle(&runtime, folder) {
                tracing::debug!(id, %error, "the runtime may refuse this host");
            }
            kernel::process::spawn(command, &Setup::default())?.process.wait()
        };
        scope.spawn(work).join()
    });
    match exit {
        Ok(Ok(Exit::Code(0))) => {}
        Ok(Ok(exit)) => tracing::debug!(id, ?exit, "the runtime did not delete the container"),
        Ok(Err(error)) => tracing::warn!(id, %error, "the runtime could not be asked to delete"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Covers what keeps a runtime from working, in this mount namespace, with a folder. (To unmount it would do too, but
/// that waits for an RCU grace period, which takes as long as all the rest.)
fn hide_obstacle(runtime: &Runtime, folder: &Path) -> Result<(), MountError> {
    let Some(path) = runtime.obstacle() else { return Ok(()) };
    // Opened only now: a descriptor from before shows the mount of the namespace that we left, which can not be bound.
    let folder = match std::fs::File::open(folder) {
        Ok(folder) => folder,
        Err(error) => {
            tracing::debug!(%error, "no folder to cover cgroup2 with");
            return Ok(());
        }
    };
    kernel::mount::bind(folder.as_fd(), Reach::One)?.attach_at(path)
}

/// Answers early, and with the right exit code, when there is no such program.
fn find_program(start: &Start<'_>) -> Result<(), RunError> {
    let Some(program) = start.process.args.first() else { return Ok(()) };
    let root = start.root.as_fd();
    let mut refused = false;
    let mut try_path = |path: &Path| match executable(root, path.as_os_str().as_bytes()) {
        Executable::Yes => true,
        Executable::No => {
            refused = true;
            false
        }
        Executable::Absent => false,
    };
    let search = start.process.variable("PATH").unwrap_or_default();
    let found = if program.contains('/') {
        try_path(&Path::new(&start.process.working_dir).join(program))
    } else {
        let folders = std::env::split_paths(OsStr::new(search));
        folders.map(|it| it.join(program)).any(|path| try_path(&path))
    };
    match (found, refused) {
        (true, _) => Ok(()),
        (false, true) => Err(RunError::NotExecutable(program.clone())),
        (false, false) => {
            let searched =
                if program.contains('/') { String::new() } else { format!(" in {search}") };
            Err(RunError::NotFound { program: program.clone(), searched })
        }
    }
}

/// The last error that a runtime wrote into its log. A runtime that merely passes on an exit code writes none.
fn complaint(log: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(default)]
        level: String,
        msg: String,
    }
    let text = std::fs::read_to_string(log).ok()?;
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    let mut errors = lines.filter(|line| matches!(line.level.as_str(), "error" | "fatal"));
    errors.next_back().map(|it| it.msg)
}
