//! A container that is paused while its changes are read.

use std::fs::File;
use std::io::{PipeWriter, Read, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use kernel::process::{Exit, start_behind};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::folder::PAUSE;
use crate::life::cgroups;
use crate::pace::GLANCE;
use crate::runtime::call::{ANSWER, Asked, ask, chain};

/// A container whose processes are paused until this is dropped. A child of this process then resumes them, also if
/// this process is killed.
#[derive(Debug)]
pub struct Paused {
    /// Closed to have it go on.
    hold: Option<PipeWriter>,
    /// Says when it does; at its end without that if the child was killed.
    report: File,
    folder: PathBuf,
    id: String,
    /// Keeps other commands from resuming it earlier. The child has a copy.
    lock: File,
}

/// The text of the lock's file until the container goes on.
const MARK: &[u8] = b"paused";

/// Nothing that is not there any more can be lost by this.
fn unmark(lock: &File) {
    if let Err(error) = lock.set_len(0) {
        tracing::debug!(%error, "the next one has the container go on once more");
    }
}

/// Waits until no process has the container paused. Resumes it if its pauser was killed, and the pauser's child too.
/// Returns false if `is_asked_to_end` was true first.
///
/// # Errors
/// An error of the disk.
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
        unmark(&lock);
    }
    Ok(true)
}

/// Why a container does not stand still.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PauseError {
    /// No child to have it go on again.
    #[error("cannot make sure that the container continues afterwards")]
    Watch(#[source] kernel::process::ProcessError),
    /// No pipe.
    #[error("cannot make sure that the container continues afterwards")]
    Pipe(#[source] std::io::Error),
    /// The lock that keeps others from it.
    #[error("cannot keep other commands from resuming the container meanwhile")]
    Lock(#[source] std::io::Error),
    /// The runtime cannot, or may not.
    #[error("the runtime does not pause the container")]
    Refused,
    /// The runtime cannot be asked: the whole reason, from the child.
    #[error("cannot ask the runtime to pause the container: {0}")]
    Unasked(String),
}

/// Pauses a container; waits while another process has it paused. This process must have only one thread, and not wait
/// for children elsewhere.
///
/// # Errors
/// [`PauseError`]; then it is not paused.
pub fn pause(folder: &Path, id: &str) -> Result<Paused, PauseError> {
    let lock = File::options().create(true).truncate(false).write(true).open(folder.join(PAUSE));
    let lock = lock.map_err(PauseError::Lock)?;
    let locked = rustix::fs::flock(&lock, FlockOperation::LockExclusive);
    locked.map_err(|errno| PauseError::Lock(errno.into()))?;
    lock.write_all_at(MARK, 0).map_err(PauseError::Lock)?;
    let mark = lock.try_clone().map_err(PauseError::Lock)?;
    let (held, hold) = std::io::pipe().map_err(PauseError::Pipe)?;
    let mut parent_end = Some(hold);
    let mut own_end = Some(held);
    let report = start_behind(|report| {
        // The parent's end has to be the only one.
        drop(parent_end.take());
        let mut report = File::from(report);
        let _heard = report.write_all(&answer(ask(folder, &["pause", id], ANSWER)));
        if let Some(mut held) = own_end.take() {
            // Until the other end is closed, by whatever.
            let _nothing = held.read(&mut [0]);
        }
        // Also when it said no: it may have paused a part.
        resume(folder, id);
        unmark(&mark);
        let _heard = report.write_all(&[1]);
    });
    let (report, _child) = report.map_err(PauseError::Watch)?;
    let mut report = File::from(report);
    drop(own_end);
    let answered = read_answer(&mut report);
    let (folder, id) = (folder.to_owned(), id.to_owned());
    let paused = Paused { hold: parent_end, report, folder, id, lock };
    // Dropped on an error: the child may have paused a part, or been killed.
    answered.map(|()| paused)
}

/// What the child reports of its question: a byte, and then the reason with its length if the runtime was not asked.
fn answer(asked: Asked) -> Vec<u8> {
    let reason = match asked {
        Asked::Answer(Ok(Exit::Code(0))) => return vec![PAUSED],
        Asked::Answer(Ok(_)) => return vec![REFUSED],
        Asked::Answer(Err(error)) => chain(&error),
        Asked::Unknown => "it has not started".to_owned(),
        Asked::Gone => "it is gone".to_owned(),
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

/// Reads what [`answer`] made.
fn read_answer(report: &mut impl Read) -> Result<(), PauseError> {
    let mut kind = [0];
    report.read_exact(&mut kind).map_err(PauseError::Pipe)?;
    match kind {
        [PAUSED] => Ok(()),
        [UNASKED] => {
            let mut len = [0; 2];
            report.read_exact(&mut len).map_err(PauseError::Pipe)?;
            let mut reason = vec![0; u16::from_le_bytes(len).into()];
            report.read_exact(&mut reason).map_err(PauseError::Pipe)?;
            Err(PauseError::Unasked(String::from_utf8_lossy(&reason).into_owned()))
        }
        _ => Err(PauseError::Refused),
    }
}

/// Resumes a paused container, without its runtime if that does not do it; does nothing if it is not paused.
pub fn resume(folder: &Path, id: &str) {
    match ask(folder, &["resume", id], ANSWER) {
        Asked::Unknown | Asked::Gone | Asked::Answer(Ok(Exit::Code(0))) => return,
        Asked::Answer(Ok(exit)) => {
            tracing::debug!(id, ?exit, "the runtime does not resume the container");
        }
        Asked::Answer(Err(error)) => {
            tracing::warn!(id, error = chain(&error), "cannot ask the runtime to resume");
        }
    }
    cgroups::thaw(folder);
}

impl Drop for Paused {
    /// Returns when the container goes on.
    fn drop(&mut self) {
        drop(self.hold.take());
        // The child may have been killed before it could have the container go on.
        if self.report.read_exact(&mut [0]).is_err() {
            resume(&self.folder, &self.id);
            unmark(&self.lock);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(told(Asked::Gone).ends_with("it is gone"));
        assert!(read_answer(&mut &[UNASKED, 9, 0, b'x'][..]).is_err());
    }
}
