//! Calls of a container's runtime: its program with the arguments of every call, its place for the container, and its
//! error messages.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kernel::mount::{MountError, Propagation, Reach};
use kernel::process::{Exit, ProcessError, Setup};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::Deserialize;

use crate::folder::{RUNTIME_PATH, RUNTIME_STATE};
use crate::runtime::{Kind, Runtime};

/// The runtime with the options that every call of it for this container needs.
pub(crate) fn command(runtime: &Runtime, folder: &Path) -> Command {
    let mut command = Command::new(&runtime.path);
    command.arg("--root").arg(folder.join(RUNTIME_STATE));
    if runtime.kind == Kind::Runsc {
        // Networks are namespaces of the bundle here, not of gVisor's own stack.
        command.arg("--network=host");
        // By default what is written goes to a layer of its own, and the root's would never see it.
        command.arg("--overlay2=none");
    }
    command
}

/// A container's folder for a call that others may be faster than: it is the same one when it is moved away meanwhile.
/// crun makes the directory of its records wherever it is sent. By the folder's path, one that comes too late would make a
/// folder again, of a container that is gone, and nobody else could have its name.
#[derive(Debug)]
pub(crate) struct HeldFolder(OwnedFd);

impl HeldFolder {
    pub(crate) fn open(folder: &Path) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(folder, flags, Mode::empty()).map(Self)
    }

    /// As a child of this process finds it, as long as this lives. The child has no descriptor of it.
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()))
    }

    /// As [`command`].
    pub(crate) fn command(&self, runtime: &Runtime) -> Command {
        command(runtime, &self.path())
    }
}

/// Has the runtime kill what still runs in a container, and forget it.
pub(crate) fn delete(folder: &Path, id: &str) {
    match ask(folder, &["delete", "--force", id]) {
        None | Some(Ok(Exit::Code(0))) => {}
        Some(Ok(exit)) => tracing::debug!(id, ?exit, "the runtime did not delete the container"),
        Some(Err(error)) => tracing::warn!(id, %error, "the runtime could not be asked to delete"),
    }
}

/// Calls the runtime that runs a container; `None` if it is not known, or the container is gone.
pub(crate) fn ask(folder: &Path, arguments: &[&str]) -> Option<Result<Exit, ProcessError>> {
    let held = match HeldFolder::open(folder) {
        Ok(held) => held,
        Err(Errno::NOENT) => return None,
        Err(source) => {
            let step = "open the folder of the container";
            return Some(Err(ProcessError::Call { step, source }));
        }
    };
    let runtime = runtime_of(folder)?;
    let mut command = held.command(&runtime);
    command.args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // In a thread, since the mount namespace that it makes stays with it: the runtime has to find the cgroups as it
    // left them.
    let exit = std::thread::scope(|scope| {
        let work = || {
            enter(&runtime, folder)?;
            kernel::process::spawn(command, &Setup::default())?.process.wait()
        };
        scope.spawn(work).join()
    });
    match exit {
        Ok(exit) => Some(exit),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// The runtime that a container was started with.
pub(crate) fn runtime_of(folder: &Path) -> Option<Runtime> {
    let path = std::fs::read(folder.join(RUNTIME_PATH)).ok()?;
    Some(Runtime::at(PathBuf::from(OsStr::from_bytes(&path))))
}

/// A mount namespace for this thread in which the runtime works as it did when it started the container.
pub(crate) fn enter(runtime: &Runtime, folder: &Path) -> Result<(), ProcessError> {
    kernel::process::own_mounts(Propagation::Downstream)?;
    if let Err(error) = hide_obstacle(runtime, folder) {
        tracing::debug!(%error, "the runtime may refuse this host");
    }
    Ok(())
}

/// Covers what keeps a runtime from working, in this mount namespace, with a folder. (To unmount it would do too, but
/// that waits for an RCU grace period, which takes as long as all the rest.)
pub(crate) fn hide_obstacle(runtime: &Runtime, folder: &Path) -> Result<(), MountError> {
    let Some(path) = runtime.obstacle() else { return Ok(()) };
    // Opened only now: a descriptor from before shows the mount of the namespace that we left, which cannot be bound.
    let folder = match std::fs::File::open(folder) {
        Ok(folder) => folder,
        Err(error) => {
            tracing::debug!(%error, "no folder to cover cgroup2 with");
            return Ok(());
        }
    };
    kernel::mount::bind(folder.as_fd(), Reach::One)?.attach_at(path)
}

/// The error that tells why: of what runsc and its helpers say the first, of others' the last.
pub(crate) fn complaint(complaints: &[String], kind: Kind) -> Option<String> {
    let found = if kind == Kind::Runsc { complaints.first() } else { complaints.last() };
    found.cloned()
}

/// The errors that a runtime wrote into its log: in objects of JSON, which runsc writes without ends of lines, or else the
/// whole lines.
pub(crate) fn complaints(log: &Path) -> Vec<String> {
    #[derive(Deserialize)]
    struct Entry {
        #[serde(default)]
        level: String,
        msg: String,
    }
    let text = std::fs::read_to_string(log).unwrap_or_default();
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
    fn only_a_container_that_is_gone_has_nothing_to_ask() {
        let folder = tempfile::tempdir().unwrap();
        assert!(ask(&folder.path().join("gone"), &["kill"]).is_none());
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let Some(Err(ProcessError::Call { source, .. })) = ask(&file, &["kill"]) else { panic!() };
        assert_eq!(source, Errno::NOTDIR);
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
