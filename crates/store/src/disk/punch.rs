//! Frees the disk space of parts of a file.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{Change, Directory, DiskError, PUBLISHED, Trace};

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// A published file, open to punch holes. Dropping it sets the immutable flag again if the file had it.
#[derive(Debug)]
pub(crate) struct ToPunch {
    file: OwnedFd,
    path: PathBuf,
    trace: Trace,
    was_sealed: bool,
}

impl Directory {
    /// Opens a published file to punch holes.
    pub(crate) fn to_punch(&self, name: impl AsRef<[u8]>) -> Result<ToPunch, DiskError> {
        let name = name.as_ref();
        let failed = |errno| self.failed("free a part of", name, errno);
        let mut was_sealed = false;
        let open = |mode_needed: bool| {
            if mode_needed {
                // The owner may change the mode of a file without write permission.
                rustix::fs::chmodat(
                    self,
                    name,
                    PUBLISHED | Mode::WUSR,
                    rustix::fs::AtFlags::empty(),
                )?;
            }
            let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let opened = rustix::fs::openat(self, name, flags, Mode::empty());
            if mode_needed {
                rustix::fs::chmodat(self, name, PUBLISHED, rustix::fs::AtFlags::empty())?;
            }
            opened
        };
        let mut opened = open(false);
        if opened.as_ref().is_err_and(|it| *it == Errno::PERM) {
            self.unseal(name, failed(Errno::PERM))?;
            was_sealed = true;
            opened = open(false);
        }
        if opened.as_ref().is_err_and(|it| *it == Errno::ACCESS) {
            opened = open(true);
        }
        let file = opened.map_err(failed)?;
        Ok(ToPunch { file, path: self.path_of(name), trace: self.trace.clone(), was_sealed })
    }

    /// Whether the file system of the directory can punch holes. This is tested with an unnamed temporary file; if
    /// none can be created, the result is `true`.
    pub(crate) fn can_punch(&self) -> bool {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(self, ".", flags, Mode::RUSR | Mode::WUSR) else {
            return true;
        };
        let punched = self.trace.allow_hole(true);
        let punched = punched.and_then(|()| rustix::fs::fallocate(&file, PUNCH, 0, 4096));
        punched != Err(Errno::OPNOTSUPP)
    }
}

impl ToPunch {
    /// Punches holes: these ranges read as zeros and take no disk space afterwards. The file keeps its length and its
    /// mode. Returns `false`, without any change, if the file system cannot punch holes.
    pub(crate) fn punch(&self, ranges: &[(u64, u64)]) -> Result<bool, DiskError> {
        for (from, until) in ranges {
            let allowed = self.trace.allow().and_then(|()| self.trace.allow_hole(false));
            let punched = allowed
                .and_then(|()| rustix::fs::fallocate(&self.file, PUNCH, *from, until - from));
            match punched {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP) => {
                    tracing::debug!(file = %self.path.display(), "the file system cannot free parts of files");
                    return Ok(false);
                }
                Err(errno) => {
                    let (path, source) = (self.path.clone(), errno.into());
                    return Err(DiskError { action: "free a part of", path, source });
                }
            }
            self.trace.record(|| Change::Punch(self.path.clone(), *from, *until));
        }
        Ok(true)
    }
}

impl Drop for ToPunch {
    fn drop(&mut self) {
        if self.was_sealed
            && let Err(error) = kernel::seal::set_immutable(self.file.as_fd())
        {
            tracing::warn!(%error, "cannot set the immutable flag again");
        }
    }
}
