//! Walks through directories of any depth.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat, fstat, openat, openat2, statat,
};
use rustix::io::Errno;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Programs may change the directory meanwhile: no name leads out of it.
const INSIDE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// How a walk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walked {
    /// Everything was shown that stayed there.
    All,
    /// A directory on the way was moved, so the way back is lost.
    Moved,
}

/// A directory on the way to the one that is being read.
struct Level {
    /// Its device and inode number, by which it is known on the way back.
    is: (u64, u64),
    /// Directories in it that are still to be read.
    left: Vec<CString>,
}

/// Bytes of a listing that are read at once.
const LISTING: usize = 32 << 10;

/// Shows a directory, as `.` in itself, and all in it, with the directory and the name there. Only one directory is open
/// at a time, and none is named by a path: what is written there may be deeper than any path is long. What vanishes
/// meanwhile, or may not be looked at, is left out. Mounts are not entered.
///
/// # Errors
/// An error of the kernel, or of `show`.
pub fn walk(
    top: impl AsFd,
    show: &mut dyn FnMut(BorrowedFd<'_>, &CStr, &Stat) -> io::Result<()>,
) -> io::Result<Walked> {
    let mut here = openat(top, c".", DIRECTORY, Mode::empty())?;
    let stat = fstat(&here)?;
    show(here.as_fd(), c".", &stat)?;
    let mut buffer = Vec::with_capacity(LISTING);
    let left = list(here.as_fd(), &mut buffer, show)?;
    let mut levels = vec![Level { is: identity(&stat), left }];
    while let Some(level) = levels.last_mut() {
        if let Some(name) = level.left.pop() {
            let opened = match openat2(&here, name, DIRECTORY, Mode::empty(), INSIDE) {
                // It is gone, or something else is there by now.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV | Errno::ACCESS) => {
                    continue;
                }
                opened => opened?,
            };
            let is = identity(&fstat(&opened)?);
            let left = list(opened.as_fd(), &mut buffer, show)?;
            if !left.is_empty() {
                here = opened;
                levels.push(Level { is, left });
            }
            continue;
        }
        levels.pop();
        let Some(above) = levels.last() else { break };
        let back = openat(&here, c"..", DIRECTORY, Mode::empty())?;
        // It may lead out of the directory by now.
        if identity(&fstat(&back)?) != above.is {
            return Ok(Walked::Moved);
        }
        here = back;
    }
    Ok(Walked::All)
}

/// Shows all in one directory, and answers the directories in it.
fn list(
    directory: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    show: &mut dyn FnMut(BorrowedFd<'_>, &CStr, &Stat) -> io::Result<()>,
) -> io::Result<Vec<CString>> {
    let mut directories = Vec::new();
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = match entry {
            // It was removed.
            Err(Errno::NOENT) => break,
            entry => entry?,
        };
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let stat = match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT | Errno::ACCESS) => continue,
            stat => stat?,
        };
        show(directory, name, &stat)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            directories.push(name.to_owned());
        }
    }
    Ok(directories)
}

const fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// What was moved away while it was read could be missed, or lead out of the directory.
    #[test]
    fn a_directory_that_moves_is_no_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| folder.path().join(path);
        fs::create_dir_all(at("upper/a/b/c")).unwrap();
        fs::create_dir_all(at("host")).unwrap();
        fs::write(at("host/secret"), "").unwrap();
        let mut is_moved = false;
        let walked = walk(fs::File::open(at("upper")).unwrap(), &mut |_, name, _| {
            if name == c"c" {
                rustix::fs::rename(at("upper/a/b"), at("host/b")).unwrap();
                is_moved = true;
            }
            assert_ne!(name, c"secret");
            Ok(())
        });
        assert!(is_moved);
        assert_eq!(walked.unwrap(), Walked::Moved);
    }
}
