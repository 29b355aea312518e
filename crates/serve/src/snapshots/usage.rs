//! What was written to a root: bytes on disk, and files.

use std::collections::HashSet;
use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, fsync, openat, openat2,
    statat,
};
use rustix::io::Errno;

/// Size of what a snapshot has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
}

/// Source: stat(2), `st_blocks`.
const BLOCK: u64 = 512;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What runs in the root changes the directory meanwhile: no path leads out of it.
const INSIDE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

impl Usage {
    fn add(&mut self, stat: &Stat) {
        self.inodes += 1;
        self.bytes += stat.st_blocks.unsigned_abs().saturating_mul(BLOCK);
    }
}

/// The use of a directory and all in it. What vanishes meanwhile, or is too deep for a path, counts nothing.
///
/// # Errors
/// When a directory cannot be read.
pub(super) fn usage_of(directory: &Path) -> io::Result<Usage> {
    Ok(measured(directory)?.0)
}

/// Also says whether nothing was too deep.
fn measured(directory: &Path) -> io::Result<(Usage, bool)> {
    let mut usage = Usage::default();
    let mut seen = HashSet::new();
    let is_all = walk(directory, &mut |_, _, stat| {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if is_directory || stat.st_nlink <= 1 || seen.insert((stat.st_dev, stat.st_ino)) {
            usage.add(stat);
        }
        Ok(())
    })?;
    Ok((usage, is_all))
}

/// The most files that are synced one by one. For more of them, or too deep ones, all of the file system is.
const SYNCED_ALONE: u64 = 256;

/// Makes a directory, on which nothing is written any more, outlive a crash of the host.
///
/// # Errors
/// When some of it cannot be read or written.
pub(super) fn sync(directory: &Path) -> io::Result<()> {
    let top = openat(CWD, directory, DIRECTORY, Mode::empty())?;
    let (usage, is_all) = measured(directory)?;
    if !is_all || usage.inodes > SYNCED_ALONE {
        return Ok(rustix::fs::syncfs(&top)?);
    }
    let open = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    walk(directory, &mut |parent, name, stat| {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Directory => {
                Ok(fsync(openat(parent, name, open, Mode::empty())?)?)
            }
            // All of it is in its directory.
            _ => Ok(()),
        }
    })?;
    Ok(fsync(top)?)
}

/// Shows a directory, as `.` in itself, and all in it, with the directory and the name there. Answers whether nothing was
/// too deep for a path.
fn walk(
    directory: &Path,
    show: &mut dyn FnMut(BorrowedFd<'_>, &CStr, &Stat) -> io::Result<()>,
) -> io::Result<bool> {
    let mut is_all = true;
    let top = match openat(CWD, directory, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(true),
        top => top?,
    };
    show(top.as_fd(), c".", &fstat(&top)?)?;
    let mut left = vec![PathBuf::from(".")];
    while let Some(path) = left.pop() {
        let opened = match openat2(&top, &path, DIRECTORY, Mode::empty(), INSIDE) {
            // It is gone, or something else is there by now.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => continue,
            // Programs can make paths that are longer than the kernel takes.
            Err(Errno::NAMETOOLONG) => {
                is_all = false;
                continue;
            }
            opened => opened?,
        };
        let mut entries = Dir::new(opened)?;
        while let Some(entry) = entries.read() {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            let stat = match statat(entries.fd()?, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                stat => stat?,
            };
            show(entries.fd()?, name, &stat)?;
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                left.push(path.join(OsStr::from_bytes(name.to_bytes())));
            }
        }
    }
    Ok(is_all)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{RenameFlags, renameat_with};

    use super::*;

    /// What runs in a root may put a link in the place of a directory at any moment.
    #[test]
    fn nothing_outside_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let (upper, host) = (folder.path().join("upper"), folder.path().join("host"));
        let (directory, link) = (upper.join("directory"), upper.join("link"));
        for path in [&upper, &host, &directory] {
            fs::create_dir(path).unwrap();
        }
        for number in 0..100 {
            fs::write(host.join(number.to_string()), "").unwrap();
        }
        symlink(&host, &link).unwrap();
        let end = AtomicBool::new(false);
        let most = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    renameat_with(CWD, &directory, CWD, &link, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let counted = (0..20_000).map(|_| usage_of(&upper).map(|it| it.inodes));
            let most = counted.collect::<io::Result<Vec<_>>>().map(|it| it.into_iter().max());
            end.store(true, Ordering::Relaxed);
            most
        });
        assert_eq!(most.unwrap(), Some(3));
    }

    /// What cannot be synced alone is known to be there.
    #[test]
    fn what_is_too_deep_is_not_taken_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(measured(folder.path()).unwrap().1);
        let name = "d".repeat(255);
        let mut here = openat(CWD, folder.path(), DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..20 {
            rustix::fs::mkdirat(&here, &name, Mode::RWXU).unwrap();
            here = openat(&here, &name, DIRECTORY, Mode::empty()).unwrap();
        }
        let (usage, is_all) = measured(folder.path()).unwrap();
        assert!(!is_all && usage.inodes < 21, "{usage:?}");
        sync(folder.path()).unwrap();
    }
}
