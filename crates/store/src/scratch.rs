//! Temporary files of commands, below `tmp/`.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use rustix::fs::{Access, AtFlags};

use crate::disk::{DiskError, DiskRoom};
use crate::staging::Workspace;
use crate::store::Store;

/// A directory for temporary files, which is removed on drop. If the process is killed, the next command removes it.
#[derive(Debug)]
pub struct Scratch {
    work: Workspace,
    room: DiskRoom,
}

impl Scratch {
    /// Path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.work.directory.path()
    }

    /// The open directory.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.work.directory.as_fd()
    }

    /// Limit on disk space, which the caller applies to each file.
    #[must_use]
    pub const fn room(&self) -> &DiskRoom {
        &self.room
    }
}

impl Store {
    /// Makes a directory for temporary files with names.
    ///
    /// # Errors
    /// [`DiskError`] if the directory cannot be made.
    pub fn scratch(&self) -> Result<Scratch, DiskError> {
        Ok(Scratch { work: Workspace::make_copy(&self.tmp)?, room: self.tmp.room()? })
    }

    /// Returns the directory for temporary files without names; `None` if this user cannot write to the store.
    #[must_use]
    pub fn scratch_path(&self) -> Option<&Path> {
        let access = Access::WRITE_OK | Access::EXEC_OK;
        let allowed = rustix::fs::accessat(self.tmp.as_fd(), c".", access, AtFlags::EACCESS);
        allowed.ok().map(|()| self.tmp.path())
    }
}
