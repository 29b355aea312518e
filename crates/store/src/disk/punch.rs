//! Frees the disk space of parts of a file.

use std::os::fd::AsFd as _;

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{Change, Directory, DiskError, PUBLISHED};

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

impl Directory {
    /// Punches holes into a published file: these ranges read as zeros and take no disk space afterwards. The file
    /// keeps its length, its mode and the immutable flag. Returns `false`, without any change, if the file system
    /// cannot punch holes.
    pub(crate) fn punch(
        &self,
        name: impl AsRef<[u8]>,
        ranges: &[(u64, u64)],
    ) -> Result<bool, DiskError> {
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
        let mut punched = Ok(());
        for (from, until) in ranges {
            let allowed = self.trace.allow().and_then(|()| self.trace.allow_hole(false));
            punched =
                allowed.and_then(|()| rustix::fs::fallocate(&file, PUNCH, *from, until - from));
            if punched.is_err() {
                break;
            }
            self.trace.record(|| Change::Punch(self.path_of(name), *from, *until));
        }
        if was_sealed && let Err(error) = kernel::seal::set_immutable(file.as_fd()) {
            tracing::warn!(%error, "cannot set the immutable flag again");
        }
        match punched {
            Err(Errno::OPNOTSUPP) => {
                tracing::debug!(directory = %self.path.display(), "the file system cannot free parts of files");
                Ok(false)
            }
            other => other.map(|()| true).map_err(failed),
        }
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
