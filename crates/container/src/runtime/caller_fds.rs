//! Descriptors of the caller that a program in a container gets, as by `--preserve-fds` of podman.

use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::process::Command;

use kernel::process::left_open;
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::runtime::Kind;

/// The first descriptor behind the standard streams.
pub const FIRST: RawFd = 3;

/// Descriptors that the caller of this process has left open. The program gets them under the same numbers.
#[derive(Debug, Clone, Default)]
pub struct CallerFds(Vec<BorrowedFd<'static>>);

/// Reason why a program cannot get a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallerFdError {
    #[error("the caller of this command has no open descriptor {0}")]
    Absent(RawFd),
    /// A program could reach all directories of the host from it.
    #[error("descriptor {0} is a directory of the host, which a container must not access")]
    Directory(RawFd),
    /// runsc cannot pass descriptors on, and runc only all from 3 to the last one.
    #[error("the runtime cannot pass on these descriptors: use --runtime crun")]
    Runtime,
}

impl CallerFds {
    /// Finds descriptors by their numbers, for a runtime of this kind.
    pub fn find(numbers: &[RawFd], kind: Kind) -> Result<Self, CallerFdError> {
        let mut sorted = numbers.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let is_row = sorted.iter().zip(FIRST..).all(|(number, expect)| *number == expect);
        match kind {
            Kind::Runsc if !sorted.is_empty() => return Err(CallerFdError::Runtime),
            Kind::Runc if !is_row => return Err(CallerFdError::Runtime),
            _ => {}
        }
        let find = |number: RawFd| {
            let found = left_open(number).ok_or(CallerFdError::Absent(number))?;
            let stat = rustix::fs::fstat(found);
            // A file whose kind is unknown may be a directory.
            let kind = stat.map_or(FileType::Directory, |it| FileType::from_raw_mode(it.st_mode));
            match kind {
                FileType::Directory => Err(CallerFdError::Directory(number)),
                _ => Ok(found),
            }
        };
        sorted.into_iter().map(find).collect::<Result<_, _>>().map(Self)
    }

    /// Makes the runtime pass them on. The command's last argument so far is the runtime's own command.
    pub(crate) fn pass(&self, command: &mut Command) {
        if let Some(last) = self.last() {
            command.arg("--preserve-fds").arg((last - FIRST + 1).to_string());
        }
    }

    fn last(&self) -> Option<RawFd> {
        self.0.last().map(AsRawFd::as_raw_fd)
    }

    /// Returns a copy of the descriptor `lock`, which only the runtime gets, under a number that the runtime does not
    /// pass on. `None` if it passes on none.
    pub(crate) fn lift(&self, lock: Option<BorrowedFd<'_>>) -> Result<Option<OwnedFd>, Errno> {
        let (Some(last), Some(lock)) = (self.last(), lock) else { return Ok(None) };
        rustix::io::fcntl_dupfd_cloexec(lock, last + 1).map(Some)
    }

    /// Returns the descriptors that the runtime inherits: these, and the lock.
    pub(crate) fn inherited<'a>(
        &self,
        lifted: Option<&'a OwnedFd>,
        lock: Option<BorrowedFd<'a>>,
    ) -> Vec<BorrowedFd<'a>> {
        let lock = lifted.map(|it| it.as_fd()).or(lock);
        self.0.iter().copied().chain(lock).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runtimes_pass_on_what_they_can() {
        for kind in [Kind::Crun, Kind::Runc, Kind::Runsc] {
            assert_eq!(CallerFds::find(&[], kind).unwrap().0.len(), 0, "{kind:?}");
        }
        let error = |numbers: &[RawFd], kind| CallerFds::find(numbers, kind).unwrap_err();
        assert_eq!(error(&[3], Kind::Runsc), CallerFdError::Runtime);
        assert_eq!(error(&[4], Kind::Runc), CallerFdError::Runtime);
        // This test has opened its descriptors itself.
        assert_eq!(error(&[900], Kind::Crun), CallerFdError::Absent(900));
        assert_eq!(error(&[4, 3], Kind::Runc), CallerFdError::Absent(3));
    }
}
