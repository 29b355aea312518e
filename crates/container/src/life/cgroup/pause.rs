//! Pauses a container while its changes are read: by its runtime, or faster by the kernel's freezer.

use std::fs::File;
use std::io::{PipeWriter, Read, Write as _};
use std::path::{Path, PathBuf};

use kernel::process::{Exit, start_behind};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use store::OperationError;

use crate::backoff::GLANCE;
use crate::folder::PAUSE;
use crate::life::cgroup::cgroups::{self, Freezer};
use crate::life::state::State;
use crate::runtime::Kind;
use crate::runtime::call::{ANSWER, Asked, HeldFolder, ask, chain};

/// A container whose processes are paused until this value is dropped. Then a child of this process resumes them. The
/// child also does so if this process is killed.
#[derive(Debug)]
pub struct Paused {
    /// The child resumes the container when this end is closed.
    hold: Option<PipeWriter>,
    /// Pipe from the child, which writes a byte after resuming. The pipe ends without that byte if the child was
    /// killed.
    report: File,
    folder: PathBuf,
    id: String,
    by: Pauser,
    /// Keeps other commands from resuming the container earlier. The child has a copy.
    lock: File,
}

/// The way to pause a container.
#[derive(Debug)]
enum Pauser {
    /// Its program has ended, and its monitor does not start it again as long as the lock is held.
    Nothing,
    Runtime,
    Freezer(Freezer),
}

impl Pauser {
    fn resume(&self, folder: &Path, id: &str) {
        match self {
            Self::Nothing => {}
            Self::Runtime => resume(folder, id),
            Self::Freezer(freezer) => freezer.thaw(),
        }
    }
}

/// Marks the lock's file: the container is paused. The file gets a length without data, because the container may have
/// filled the disk.
fn mark(lock: &File) -> std::io::Result<()> {
    lock.set_len(1)
}

/// Clears the mark. An error is harmless: the next command resumes the container once more.
fn unmark(lock: &File) {
    if let Err(error) = lock.set_len(0) {
        tracing::debug!(%error, "the next command resumes the container again");
    }
}

/// Waits until no process has the container paused. Resumes it if both the pausing process and its child were killed.
/// Returns false if `is_asked_to_end` was true first.
pub fn pass(folder: &Path, id: &str, is_asked_to_end: &dyn Fn() -> bool) -> std::io::Result<bool> {
    let lock = match File::options().write(true).open(folder.join(PAUSE)) {
        Ok(lock) => lock,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error),
    };
    loop {
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::WOULDBLOCK) if is_asked_to_end() => return Ok(false),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(GLANCE),
            Err(errno) => return Err(errno.into()),
        }
    }
    if lock.metadata()?.len() > 0 {
        resume(folder, id);
        // The runtime may not know that the kernel's freezer was used without it.
        cgroups::thaw(folder);
        unmark(&lock);
    }
    Ok(true)
}

/// Locks out commands that pause a container, before its monitor starts the program again. Returns the lock, or `None`
/// if such a command reads the container's changes.
///
/// # Errors
/// If the lock cannot be made.
pub(crate) fn lock_out(folder: &Path) -> std::io::Result<Option<File>> {
    let lock = File::options().create(true).truncate(false).write(true).open(folder.join(PAUSE))?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(lock)),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Reason why a container cannot be paused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PauseError {
    #[error(transparent)]
    Failed(#[from] OperationError),
    /// The runtime does not support pausing, or it failed.
    #[error("the runtime did not pause the container")]
    Refused,
    /// The runtime cannot be called; the full reason, from the child.
    #[error("cannot pause the container by its runtime: {0}")]
    Unasked(String),
}

const RESUMES: &str = "that the container resumes";

/// Pauses a container by its runtime. If another process has paused it, waits until it is resumed. This process must
/// have only one thread, and must not wait for children elsewhere.
///
/// # Errors
/// [`PauseError`]; the container is not paused then.
pub fn pause(folder: &Path, id: &str) -> Result<Paused, PauseError> {
    pause_by(folder, id, Pauser::Runtime)
}

/// Pauses a container by the kernel's freezer, which takes less time than a call of its runtime, and returns when none
/// of its processes runs. Otherwise like [`pause`], which is used for runtimes such as gVisor, whose programs are
/// not processes of the host, and where this process may not use the freezer.
///
/// # Errors
/// [`PauseError`]; the container is not paused then.
pub fn freeze(folder: &Path, id: &str) -> Result<Paused, PauseError> {
    let runtime = HeldFolder::open(folder).ok().and_then(|it| it.runtime().ok().flatten());
    let is_plain = runtime.is_some_and(|it| it.kind != Kind::Runsc);
    match Freezer::of(folder).filter(|_| is_plain) {
        Some(freezer) => pause_by(folder, id, Pauser::Freezer(freezer)),
        None => pause(folder, id),
    }
}

fn pause_by(folder: &Path, id: &str, by: Pauser) -> Result<Paused, PauseError> {
    let lock = File::options().create(true).truncate(false).write(true).open(folder.join(PAUSE));
    let lock_failed = OperationError::of("keep", "other commands from resuming the container");
    let lock = lock.map_err(lock_failed)?;
    let locked = rustix::fs::flock(&lock, FlockOperation::LockExclusive);
    locked.map_err(|errno| lock_failed(errno.into()))?;
    mark(&lock).map_err(lock_failed)?;
    let is_between_runs = matches!(State::load(folder), Ok(Some(State { delay: Some(_), .. })));
    let by = if is_between_runs { Pauser::Nothing } else { by };
    let copy = lock.try_clone().map_err(lock_failed)?;
    let (held, hold) = std::io::pipe().map_err(OperationError::of("ensure", RESUMES))?;
    let mut parent_end = Some(hold);
    let mut own_end = Some(held);
    let report = start_behind(|report| {
        // The parent must have the only open write end.
        drop(parent_end.take());
        let mut report = File::from(report);
        let paused = match &by {
            Pauser::Runtime => answer(ask(folder, &["pause", id], ANSWER)),
            // The parent freezes the container as soon as this process can thaw it.
            Pauser::Freezer(_) | Pauser::Nothing => vec![PAUSED],
        };
        let _heard = report.write_all(&paused);
        if let Some(mut held) = own_end.take() {
            // Waits until the other end is closed, for whatever reason.
            let _nothing = held.read(&mut [0]);
        }
        // The container is resumed even after a failed pause, because some of its processes may have been paused.
        by.resume(folder, id);
        unmark(&copy);
        let _heard = report.write_all(&[1]);
    });
    let (report, _child) = report.map_err(OperationError::of("ensure", RESUMES))?;
    let mut report = File::from(report);
    drop(own_end);
    let answered = read_answer(&mut report);
    let (folder, id) = (folder.to_owned(), id.to_owned());
    let paused = Paused { hold: parent_end, report, folder, id, by, lock };
    // On an error, `paused` is dropped, because some processes may have been paused, or the child may have been killed.
    answered?;
    if let Pauser::Freezer(freezer) = &paused.by {
        freezer.freeze().map_err(OperationError::of("freeze", "the container's processes"))?;
    }
    Ok(paused)
}

/// Encodes the child's report of the pause: a byte, and if the runtime was not called, the length of the reason and
/// the reason.
fn answer(asked: Asked) -> Vec<u8> {
    let reason = match asked {
        Asked::Answer(Ok(Exit::Code(0))) => return vec![PAUSED],
        Asked::Answer(Ok(_)) => return vec![REFUSED],
        Asked::Answer(Err(error)) => chain(&error),
        Asked::Unknown => "it has not started".to_owned(),
        Asked::Gone => "it no longer exists".to_owned(),
    };
    let len = u16::try_from(reason.len()).unwrap_or(u16::MAX);
    let mut bytes = vec![UNASKED];
    bytes.extend(len.to_le_bytes());
    bytes.extend(&reason.as_bytes()[..len.into()]);
    bytes
}

const REFUSED: u8 = 0;
const PAUSED: u8 = 1;
const UNASKED: u8 = 2;

/// Decodes a report made by [`answer`].
fn read_answer(report: &mut impl Read) -> Result<(), PauseError> {
    let mut kind = [0];
    report.read_exact(&mut kind).map_err(OperationError::of("ensure", RESUMES))?;
    match kind {
        [PAUSED] => Ok(()),
        [UNASKED] => {
            let mut len = [0; 2];
            report.read_exact(&mut len).map_err(OperationError::of("ensure", RESUMES))?;
            let mut reason = vec![0; u16::from_le_bytes(len).into()];
            report.read_exact(&mut reason).map_err(OperationError::of("ensure", RESUMES))?;
            Err(PauseError::Unasked(String::from_utf8_lossy(&reason).into_owned()))
        }
        _ => Err(PauseError::Refused),
    }
}

/// Resumes a paused container, without its runtime if the runtime fails. Has no effect if the container is not
/// paused.
pub fn resume(folder: &Path, id: &str) {
    match ask(folder, &["resume", id], ANSWER) {
        Asked::Unknown | Asked::Gone | Asked::Answer(Ok(Exit::Code(0))) => return,
        Asked::Answer(Ok(exit)) => {
            tracing::debug!(id, ?exit, "the runtime did not resume the container");
        }
        Asked::Answer(Err(error)) => {
            tracing::warn!(id, error = chain(&error), "cannot resume a container by its runtime");
        }
    }
    cgroups::thaw(folder);
}

impl Drop for Paused {
    /// Returns after the container was resumed.
    fn drop(&mut self) {
        // The container need not wait for the child.
        if let Pauser::Freezer(freezer) = &self.by {
            freezer.thaw();
        }
        drop(self.hold.take());
        // The child may have been killed before it could resume the container.
        if self.report.read_exact(&mut [0]).is_err() {
            self.by.resume(&self.folder, &self.id);
            unmark(&self.lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full disk has no block for the mark.
    #[test]
    fn a_pause_is_marked_on_a_full_disk() {
        if !rustix::process::geteuid().is_root() {
            testing::skipped("a mount needs root");
            return;
        }
        let options = kernel::mount::TmpfsOptions {
            name: "test",
            bytes: std::num::NonZeroU64::new(4096),
            inodes: None,
            mode: 0o755,
        };
        let mount = kernel::mount::tmpfs(&options).unwrap();
        let at = |name: &str| {
            let root = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&mount));
            PathBuf::from(format!("/proc/self/fd/{root}/{name}"))
        };
        let lock = File::options().create(true).truncate(false).write(true).open(at(PAUSE));
        let lock = lock.unwrap();
        std::fs::write(at("large"), [0; 1 << 16]).unwrap_err();
        mark(&lock).unwrap();
        assert!(lock.metadata().unwrap().len() > 0);
        unmark(&lock);
        assert_eq!(lock.metadata().unwrap().len(), 0);
    }

    #[test]
    fn why_a_container_was_not_paused_passes_the_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let told = |asked| match read_answer(&mut &answer(asked)[..]) {
            Ok(()) => "paused".to_owned(),
            Err(error) => error.to_string(),
        };
        assert_eq!(told(Asked::Answer(Ok(Exit::Code(0)))), "paused");
        assert_eq!(told(Asked::Answer(Ok(Exit::Code(1)))), PauseError::Refused.to_string());
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let text = told(ask(&file, &["pause"], ANSWER));
        assert!(text.contains("file: Not a directory"), "{text}");
        assert!(told(Asked::Gone).ends_with("it no longer exists"));
        assert!(read_answer(&mut &[UNASKED, 9, 0, b'x'][..]).is_err());
    }
}
