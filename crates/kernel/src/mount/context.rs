//! The file system context of the new mount API: sets options, makes the superblock, then the mount.

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use super::{Detached, KernelMessages, MountError, Step};

/// A file system context. After a failed step its log is read, because `EINVAL` does not identify the cause.
pub(super) struct Context<'a> {
    fd: OwnedFd,
    object: &'a dyn fmt::Display,
}

impl<'a> Context<'a> {
    pub(super) fn open(kind: &str, object: &'a dyn fmt::Display) -> Result<Self, MountError> {
        let fd = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)
            .map_err(|errno| MountError::call(Step::Open, object, errno))?;
        Ok(Self { fd, object })
    }

    pub(super) fn flag(&self, key: &str) -> Result<(), MountError> {
        rustix::mount::fsconfig_set_flag(self.fd.as_fd(), key)
            .map_err(|errno| self.failed(Step::Set(key.to_owned()), errno))
    }

    pub(super) fn string(&self, key: &str, value: &str) -> Result<(), MountError> {
        rustix::mount::fsconfig_set_string(self.fd.as_fd(), key, value)
            .map_err(|errno| self.failed(Step::Set(format!("{key}={value}")), errno))
    }

    pub(super) fn descriptor(&self, key: &str, value: BorrowedFd<'_>) -> Result<(), MountError> {
        rustix::mount::fsconfig_set_fd(self.fd.as_fd(), key, value)
            .map_err(|errno| self.failed(Step::Set(key.to_owned()), errno))
    }

    pub(super) fn create(&self) -> Result<(), MountError> {
        rustix::mount::fsconfig_create(self.fd.as_fd())
            .map_err(|errno| self.failed(Step::Create, errno))
    }

    /// Makes the superblock in a thread with this working directory, to which the source is relative.
    pub(super) fn create_in(&self, directory: BorrowedFd<'_>) -> Result<(), MountError> {
        let fd = self.fd.as_fd();
        let create = || {
            super::thread::enter_in_thread(directory)?;
            rustix::mount::fsconfig_create(fd)
        };
        let created = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().spawn_scoped(scope, create);
            let thread = thread.map_err(|it| Errno::from_io_error(&it).unwrap_or(Errno::AGAIN))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        created.map_err(|errno| self.failed(Step::Create, errno))
    }

    pub(super) fn mount(&self, attributes: MountAttrFlags) -> Result<Detached, MountError> {
        rustix::mount::fsmount(self.fd.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
            .map(Detached::from_fd)
            .map_err(|errno| self.failed(Step::Mount, errno))
    }

    fn failed(&self, step: Step, source: Errno) -> MountError {
        MountError::Call { step, object: self.object.to_string(), messages: self.log(), source }
    }

    /// Whether a message in the log contains this word. Consumes the log.
    pub(super) fn said(&self, word: &str) -> bool {
        self.log().0.iter().any(|message| message.contains(word))
    }

    /// Reads and consumes the log. Each read returns one message, and `ENODATA` at the end.
    fn log(&self) -> KernelMessages {
        let mut messages = Vec::new();
        // For longer messages the kernel returns EMSGSIZE and drops them.
        let mut buffer = [0; 4096];
        // The kernel's ring buffer holds eight messages (fs/fs_context.c, struct fc_log).
        for _ in 0..8 {
            let Ok(length) = rustix::io::read(&self.fd, &mut buffer) else { break };
            let line = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
            let line = line.trim_end();
            // The prefix "e ", "w " or "i " is the level.
            let text = line.split_once(' ').filter(|(level, _)| level.len() == 1);
            messages.push(text.map_or(line, |(_, text)| text).to_owned());
        }
        KernelMessages(messages)
    }
}
