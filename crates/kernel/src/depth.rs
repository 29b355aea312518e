//! Walks directory trees of any depth.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat, fstat, openat, openat2, statat,
};
use rustix::io::Errno;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Programs may change the tree during a walk. With these flags, opening a name never leads out of the tree.
const INSIDE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// Outcome of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Walked {
    /// Every file that existed throughout the walk was shown.
    All,
    /// A directory on the path was moved during the walk, so the walk could not return to its parent.
    Moved,
}

/// A directory on the path to the directory that is being read.
struct Level {
    /// Device and inode number, which identify the directory on the way back.
    is: (u64, u64),
    /// Names of its subdirectories that are still to be read.
    left: Vec<CString>,
}

/// Size of the buffer for directory entries, in bytes.
const LISTING: usize = 32 << 10;

/// Calls `show` for a directory (with the name `.`) and for each file below it, with the parent directory and the
/// name. Opens one directory at a time, relative to its parent and not by a path, because a tree may be deeper than
/// the longest path. Skips files that are removed during the walk or that the caller may not access, and does not
/// cross mount points.
///
/// # Errors
/// An error of the kernel or of `show`.
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
                // The directory was removed, or replaced by another file.
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
        // After a move, `..` may lead out of the tree.
        if identity(&fstat(&back)?) != above.is {
            return Ok(Walked::Moved);
        }
        here = back;
    }
    Ok(Walked::All)
}

/// Calls `show` for each entry of one directory, and returns the names of its subdirectories.
fn list(
    directory: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    show: &mut dyn FnMut(BorrowedFd<'_>, &CStr, &Stat) -> io::Result<()>,
) -> io::Result<Vec<CString>> {
    let mut directories = Vec::new();
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    while let Some(entry) = entries.next() {
        let entry = match entry {
            // The directory was removed.
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

    /// A walk could miss a directory that is moved during the walk, or follow its `..` out of the tree.
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
