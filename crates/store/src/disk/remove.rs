//! Removes directory trees.

use rustix::fs::{AtFlags, FileType, Mode};
use rustix::io::Errno;

use super::{DIRECTORY, Directory, DiskError, INSIDE, Listed, Renamed};

impl Directory {
    /// Removes a directory tree of any depth with three descriptors, by moving deeper directories up first. Mounts
    /// are not entered: the call fails with `EXDEV` or `EBUSY`.
    pub(crate) fn remove_tree(&self, name: impl AsRef<[u8]>) -> Result<(), DiskError> {
        let name = name.as_ref();
        let Some(top) = self.open_to_empty(name)? else { return Ok(()) };
        let mut moved = 0_u64;
        loop {
            let mut found = false;
            for Listed { name, kind } in top.list()? {
                found = true;
                if !matches!(kind, FileType::Directory | FileType::Unknown) {
                    top.unlink_sealed(&name)?;
                    continue;
                }
                let inner = match top.open_to_empty(&name) {
                    Err(error) if error.is(Errno::NOTDIR) => {
                        top.unlink_sealed(&name)?;
                        continue;
                    }
                    other => other?,
                };
                let Some(inner) = inner else { continue };
                for deeper in inner.list()? {
                    if deeper.kind == FileType::Directory {
                        inner.move_up(&deeper.name, &top, &mut moved)?;
                    } else if let Err(error) = inner.unlink_sealed(&deeper.name) {
                        // The file system does not report entry types, and this entry is a directory.
                        if !error.is(Errno::ISDIR) {
                            return Err(error);
                        }
                        inner.move_up(&deeper.name, &top, &mut moved)?;
                    }
                }
                top.remove_directory(&name)?;
            }
            if !found {
                break;
            }
        }
        self.remove_directory(name)?;
        Ok(())
    }

    /// Moves a directory up into the directory that [`remove_tree`](Self::remove_tree) empties.
    fn move_up(&self, name: &[u8], top: &Self, moved: &mut u64) -> Result<(), DiskError> {
        let mut opened_up = false;
        loop {
            let new = moved.to_string();
            match self.rename_new(name, top, &new) {
                Ok(Renamed::Now) => return Ok(()),
                Ok(Renamed::Taken) => *moved += 1,
                // The rename changes the directory's `..`, so users other than root need write permission on it.
                Err(error) if error.is(Errno::ACCESS) => {
                    if opened_up || self.open_up(name).is_err() {
                        return Err(error);
                    }
                    opened_up = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn open_to_empty(&self, name: &[u8]) -> Result<Option<Self>, DiskError> {
        let open = || rustix::fs::openat2(&self.fd, name, DIRECTORY, Mode::empty(), INSIDE);
        let fd = match open() {
            // overlayfs leaves a work directory with mode 000 behind.
            Err(Errno::ACCESS) => {
                self.open_up(name)?;
                open()
            }
            other => other,
        };
        if let Ok(fd) = &fd {
            let stat = rustix::fs::fstat(fd).map_err(|errno| self.failed("stat", name, errno))?;
            if !Mode::from_raw_mode(stat.st_mode).contains(Mode::RWXU) {
                self.open_up(name)?;
            }
        }
        match fd {
            Ok(fd) => Ok(Some(self.inner(fd, name))),
            Err(Errno::NOENT) => Ok(None),
            // A symlink has taken the place of the directory.
            Err(Errno::LOOP) => Err(self.failed("open directory", name, Errno::NOTDIR)),
            Err(errno) => Err(self.failed("open directory", name, errno)),
        }
    }

    fn open_up(&self, name: &[u8]) -> Result<(), DiskError> {
        rustix::fs::chmodat(&self.fd, name, Mode::RWXU, AtFlags::empty())
            .map_err(|errno| self.failed("make accessible", name, errno))
    }
}
