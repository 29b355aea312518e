//! Calls of a container's runtime: its program with the arguments that all calls share, the container's folder, and
//! the runtime's error messages.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use kernel::mount::{MountError, Propagation, Reach};
use kernel::process::{Exit, Process, ProcessError, Setup, Signal};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::Deserialize;
use store::OperationError;

pub(crate) use crate::error_chain::chain;
use crate::folder::{RUNTIME_PATH, RUNTIME_STATE};
use crate::runtime::{Kind, Runtime};

/// Returns the runtime's command with the options that every call for this container needs.
pub(crate) fn command(runtime: &Runtime, folder: &Path) -> Command {
    let mut command = Command::new(&runtime.path);
    command.arg("--root").arg(folder.join(RUNTIME_STATE));
    if runtime.kind == Kind::Runsc {
        // The bundle's network namespace is used instead of gVisor's own network stack.
        command.arg("--network=host");
        // By default, runsc writes changes to an internal overlay, so they would never reach the root's writable
        // layer.
        command.arg("--overlay2=none");
    }
    command
}

/// Makes the runtime write its messages into a file. crun takes the text before the first colon as the type of the
/// log. Source: crun(1), `--log`.
pub(crate) fn add_log(command: &mut Command, runtime: &Runtime, log: &Path, format: &str) {
    let mut place = OsString::new();
    if runtime.kind == Kind::Crun {
        place.push("file:");
    }
    place.push(log);
    command.arg("--log").arg(place).args(["--log-format", format]);
}

/// A container's folder, held open for a call that may race with the container's removal. The descriptor stays valid
/// if the folder is moved away. crun creates its state directory if it does not exist. So if a late call got the
/// folder's path, crun would create the folder of a removed container again, which would block the container's name.
#[derive(Debug)]
pub(crate) struct HeldFolder(OwnedFd);

impl HeldFolder {
    pub(crate) fn open(folder: &Path) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(folder, flags, Mode::empty()).map(Self)
    }

    /// Returns the folder's path for a child process, valid as long as `self` exists. The child does not inherit a
    /// descriptor of the folder.
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()))
    }

    /// Returns the runtime that the container was started with, or `None` if the container has not started.
    pub(crate) fn runtime(&self) -> io::Result<Option<Runtime>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.0, RUNTIME_PATH, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let mut path = Vec::new();
        File::from(file).read_to_end(&mut path)?;
        Ok(Some(Runtime::at(PathBuf::from(OsStr::from_bytes(&path)))))
    }

    /// Returns [`command`] with the path of the open folder.
    pub(crate) fn command(&self, runtime: &Runtime) -> Command {
        command(runtime, &self.path())
    }
}

/// Reason why a container's runtime cannot be called.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The runtime cannot be started or waited for.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The runtime did not end before the timeout.
    #[error(
        "{} did not finish its call `{call}` within {} seconds, and was killed",
        runtime.display(),
        most.as_secs()
    )]
    Late {
        runtime: PathBuf,
        /// The runtime's command, for example `kill`.
        call: String,
        /// The timeout.
        most: Duration,
    },
}

/// Timeout of a runtime call that does not end the container.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// Timeout of a runtime's `kill` command. After this time, Quire itself kills the container.
pub(crate) const KILLING: Duration = Duration::from_secs(4);

/// Timeout of a runtime's delete. It is shorter than the time after which `rm --force` kills a monitor that does not
/// end.
pub(crate) const DELETION: Duration = Duration::from_secs(6);

/// Time in which the kernel ends a killed runtime. A runtime that waits for a dead disk does not end.
const DEATH: Duration = Duration::from_secs(1);

/// Waits for a runtime call, and kills the runtime's process if the call takes longer than `most`.
pub(crate) fn finish(
    process: &Process,
    runtime: &Runtime,
    call: &str,
    most: Duration,
) -> Result<Exit, AskError> {
    if let Some(exit) = process.wait_at_most(most)? {
        return Ok(exit);
    }
    // The process may have exited just now.
    let _gone = process.signal(Signal::KILL);
    let _exit = process.wait_at_most(DEATH)?;
    Err(AskError::Late { runtime: runtime.path.clone(), call: call.to_owned(), most })
}

/// Result of a call of a container's runtime.
#[derive(Debug)]
pub(crate) enum Asked {
    /// The container's folder names no runtime, because the container has not started.
    Unknown,
    /// The container was removed.
    Gone,
    /// Exit of the runtime, or the reason why it could not be called.
    Answer(Result<Exit, AskError>),
}

/// Makes the runtime kill a container's remaining processes and delete its state, within the time `most`.
pub(crate) fn delete(folder: &Path, id: &str, most: Duration) {
    match ask(folder, &["delete", "--force", id], most) {
        Asked::Unknown | Asked::Gone | Asked::Answer(Ok(Exit::Code(0))) => {}
        Asked::Answer(Ok(exit)) => {
            tracing::debug!(id, ?exit, "the runtime did not delete the container");
        }
        Asked::Answer(Err(error)) => {
            tracing::warn!(id, error = chain(&error), "cannot delete a container by its runtime");
        }
    }
}

/// Calls a container's runtime, and kills the runtime's process if the call takes longer than `most`.
pub(crate) fn ask(folder: &Path, arguments: &[&str], most: Duration) -> Asked {
    let held = match HeldFolder::open(folder) {
        Ok(held) => held,
        Err(Errno::NOENT) => return Asked::Gone,
        Err(errno) => {
            return Asked::Answer(Err(OperationError::at("open", folder)(errno).into()));
        }
    };
    let runtime = match held.runtime() {
        Ok(Some(runtime)) => runtime,
        // The container may have been removed in between: its files are removed before its folder.
        Ok(None) if folder.exists() => return Asked::Unknown,
        Ok(None) => return Asked::Gone,
        Err(error) => {
            let failed = OperationError::at("read", &folder.join(RUNTIME_PATH))(error);
            return Asked::Answer(Err(failed.into()));
        }
    };
    let mut command = held.command(&runtime);
    command.args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // This runs in a thread, because the mount namespace that `enter` makes stays with the thread. In that namespace,
    // the runtime finds the cgroups as it left them.
    let exit = std::thread::scope(|scope| {
        let work = || {
            match enter(&runtime, folder) {
                // A user outside of the container's user namespace cannot hide the mount, and rarely needs to do so.
                Err(ProcessError::Call { source: Errno::PERM, .. }) => {}
                entered => entered?,
            }
            // If a monitor is killed while it waits, no hanging runtime must be left.
            let setup = Setup { die_with_parent: Some(Signal::KILL), ..Setup::default() };
            let process = kernel::process::spawn(command, &setup)?.process;
            finish(&process, &runtime, arguments.first().copied().unwrap_or_default(), most)
        };
        scope.spawn(work).join()
    });
    match exit {
        Ok(exit) => Asked::Answer(exit),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Moves this thread into a new mount namespace, in which the runtime works as it did when it started the container.
pub(crate) fn enter(runtime: &Runtime, folder: &Path) -> Result<(), ProcessError> {
    kernel::process::own_mounts(Propagation::Downstream)?;
    if let Err(error) = hide_obstacle(runtime, folder) {
        tracing::debug!(%error, "the runtime may not work on this host");
    }
    Ok(())
}

/// Mounts a folder, in this mount namespace, over the mount that prevents a runtime from working. (Unmounting that
/// mount would also work, but it waits for an RCU grace period, which takes as long as all other steps together.)
pub(crate) fn hide_obstacle(runtime: &Runtime, folder: &Path) -> Result<(), MountError> {
    let Some(path) = runtime.obstacle() else { return Ok(()) };
    // The folder is opened only now, because an earlier descriptor refers to a mount of the previous namespace, from
    // which a bind mount is not possible.
    let folder = match std::fs::File::open(folder) {
        Ok(folder) => folder,
        Err(error) => {
            tracing::debug!(%error, "cannot open a directory to cover cgroup2 with");
            return Ok(());
        }
    };
    kernel::mount::bind(folder.as_fd(), Reach::One)?.attach_at(path)
}

/// Returns the message that names the cause: the first one of runsc and its helpers, the last one of other runtimes.
pub(crate) fn complaint(complaints: &[String], kind: Kind) -> Option<String> {
    let found = if kind == Kind::Runsc { complaints.first() } else { complaints.last() };
    found.cloned()
}

/// Reads the errors in a runtime's log.
pub(crate) fn complaints(log: &Path) -> Vec<String> {
    complaints_in(&std::fs::read_to_string(log).unwrap_or_default())
}

/// Returns the errors in the text of a runtime: JSON objects, which runsc writes without newlines between them, or else
/// whole lines.
pub(crate) fn complaints_in(text: &str) -> Vec<String> {
    #[derive(Deserialize)]
    struct Entry {
        #[serde(default)]
        level: String,
        msg: String,
    }
    let mut complaints = Vec::new();
    for line in text.lines() {
        let entries = serde_json::Deserializer::from_str(line).into_iter::<Entry>();
        match entries.collect::<Result<Vec<_>, _>>() {
            Ok(entries) => complaints.extend(
                entries
                    .into_iter()
                    .filter(|it| matches!(it.level.as_str(), "error" | "fatal"))
                    .map(|it| it.msg),
            ),
            Err(_) => complaints.push(line.to_owned()),
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_that_cannot_be_asked_is_not_one_that_is_unknown() {
        let folder = tempfile::tempdir().unwrap();
        let told = |folder: &Path| match ask(folder, &["kill"], ANSWER) {
            Asked::Answer(Err(error)) => chain(&error),
            other => format!("{other:?}"),
        };
        let path = folder.path();
        assert_eq!(told(&path.join("gone")), "Gone");
        assert_eq!(told(path), "Unknown");
        let name = path.join(RUNTIME_PATH);
        std::fs::write(&name, path.join("none").as_os_str().as_bytes()).unwrap();
        let text = told(&name);
        let open = format!("cannot open {}: Not a directory", name.display());
        assert!(text.starts_with(&open), "{text}");
        std::fs::remove_file(&name).unwrap();
        std::os::unix::fs::symlink(RUNTIME_PATH, &name).unwrap();
        let text = told(path);
        let read = format!("cannot read {}: Too many levels", name.display());
        assert!(text.starts_with(&read), "{text}");
        let said = crate::life::background::signal(path, "c1", "TERM").unwrap_err();
        assert_eq!(said, format!("cannot send TERM to c1: {text}"));
    }

    #[test]
    fn a_runtime_that_does_not_answer_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("hanging");
        testing::script(&program, "#!/bin/sh\necho $$ >\"$2\"/../pid\nexec sleep 1000\n");
        std::fs::write(folder.path().join(RUNTIME_PATH), program.as_os_str().as_bytes()).unwrap();
        std::fs::create_dir(folder.path().join(RUNTIME_STATE)).unwrap();
        let since = std::time::Instant::now();
        let asked = ask(folder.path(), &["pause", "c1"], Duration::from_secs(2));
        assert!(since.elapsed() < Duration::from_secs(60));
        let Asked::Answer(Err(error)) = asked else { panic!("{asked:?}") };
        let expect = format!(
            "{} did not finish its call `pause` within 2 seconds, and was killed",
            program.display()
        );
        assert_eq!(chain(&error), expect);
        let pid = std::fs::read_to_string(folder.path().join("pid")).unwrap();
        assert!(!Path::new("/proc").join(pid.trim()).exists());
    }

    #[test]
    fn complaints_are_found_in_logs() {
        let check = |text: &str, kind, expect: Option<&str>| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            let found = complaint(&complaints(file.path()), kind);
            assert_eq!(found.as_deref(), expect, "{text}");
        };
        let json = r#"{"level":"error","msg":"first"}
            {"level":"warning","msg":"not one"}
            {"level":"error","msg":"last","time":"t"}
            {"level":"info","msg":"nor this"}"#;
        check(json, Kind::Runc, Some("last"));
        check(json, Kind::Runsc, Some("first"));
        check(&json.replace('\n', ""), Kind::Runsc, Some("first"));
        check("one line\nand another\n", Kind::Crun, Some("and another"));
        check(r#"{"level":"info","msg":"fine"}"#, Kind::Runc, None);
        check("", Kind::Runsc, None);
    }
}
