//! Disk usage of directory trees, and syncing them.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use crate::depth::{Walked, walk};
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fsync, openat};
use rustix::io::Errno;

/// The disk usage of a directory and everything below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Allocated bytes.
    pub bytes: u64,
    pub inodes: u64,
}

/// Unit of `st_blocks`, in bytes. Source: stat(2).
const BLOCK: u64 = 512;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Usage {
    fn add(&mut self, stat: &Stat) {
        self.inodes += 1;
        self.bytes += stat.st_blocks.unsigned_abs().saturating_mul(BLOCK);
    }
}

/// Number of walks before a measurement fails because directories keep moving.
const TRIES: u32 = 4;

/// Returns the disk usage of a directory tree of any depth. Files that are removed during the walk are not counted.
///
/// # Errors
/// If a directory cannot be read, or if directories were moved during each walk, which could hide some of them.
pub fn usage_of(directory: &Path) -> io::Result<Usage> {
    for _ in 0..TRIES {
        if let Some(usage) = measured(directory)? {
            return Ok(usage);
        }
    }
    Err(io::Error::other("its directories moved during the measurement"))
}

/// Walks once. `None` if a directory was moved during the walk.
fn measured(directory: &Path) -> io::Result<Option<Usage>> {
    let mut usage = Usage::default();
    let mut seen = HashSet::new();
    let top = match openat(CWD, directory, DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(Some(usage)),
        top => top?,
    };
    let walked = walk(&top, &mut |_, _, stat| {
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if is_directory || stat.st_nlink <= 1 || seen.insert((stat.st_dev, stat.st_ino)) {
            usage.add(stat);
        }
        Ok(())
    })?;
    Ok((walked == Walked::All).then_some(usage))
}

/// Largest number of inodes that [`sync`] syncs one by one. For more, it syncs the whole file system.
const SYNCED_ALONE: u64 = 256;

/// Syncs a directory tree to disk, so that it survives a crash of the host. Its writers must have finished.
///
/// # Errors
/// If a part of the tree cannot be read or written.
pub fn sync(directory: &Path) -> io::Result<()> {
    let top = openat(CWD, directory, DIRECTORY, Mode::empty())?;
    if measured(directory)?.is_none_or(|it| it.inodes > SYNCED_ALONE) {
        return Ok(rustix::fs::syncfs(&top)?);
    }
    let open = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let walked = walk(&top, &mut |parent, name, stat| {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Directory => {
                Ok(fsync(openat(parent, name, open, Mode::empty())?)?)
            }
            // Other types, such as symlinks, are written with their directory.
            _ => Ok(()),
        }
    })?;
    match walked {
        Walked::All => Ok(fsync(top)?),
        Walked::Moved => Ok(rustix::fs::syncfs(&top)?),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{RenameFlags, renameat_with};

    use super::*;

    /// A program in a container may replace a directory by a symlink at any moment.
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

    /// Programs can make directories deeper than any path reaches (path_resolution(7), `PATH_MAX`).
    #[test]
    fn what_is_deeper_than_any_path_counts() {
        const DEPTH: u64 = 60;
        let folder = tempfile::tempdir().unwrap();
        let name = "d".repeat(255);
        let mut here = openat(CWD, folder.path(), DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..DEPTH {
            rustix::fs::mkdirat(&here, &name, Mode::RWXU).unwrap();
            // A sibling directory, to which the walk must come back.
            rustix::fs::mkdirat(&here, "beside", Mode::RWXU).unwrap();
            here = openat(&here, &name, DIRECTORY, Mode::empty()).unwrap();
        }
        let write = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = openat(&here, "file", write, Mode::RUSR).unwrap();
        rustix::io::write(&file, &[1; 1 << 20][..]).unwrap();
        fsync(&file).unwrap();
        let usage = usage_of(folder.path()).unwrap();
        assert_eq!(usage.inodes, 1 + 2 * DEPTH + 1);
        assert!(usage.bytes >= 1 << 20, "{usage:?}");
        sync(folder.path()).unwrap();
    }
}
