//! Names the source of a file system that opens its source by path.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Component, Path};

use rustix::fs::{Mode, mkdirat, symlinkat};
use rustix::io::Errno;

use super::{Detached, MountError, TmpfsOptions, tmpfs};

/// A detached tmpfs, in which a name is a symlink to a file of the caller.
#[derive(Debug)]
pub(super) struct NamedSource(Detached);

impl NamedSource {
    /// Makes the name a symlink to the path `target`. `None` if the name is not a relative path without `.` and `..`.
    pub(super) fn new(name: &str, target: &str) -> Result<Option<Self>, MountError> {
        let parts = Path::new(name).components().map(|it| match it {
            Component::Normal(part) => Some(part),
            _ => None,
        });
        let Some(parts) = parts.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let directory =
            tmpfs(&TmpfsOptions { name: "quire-source", bytes: None, inodes: None, mode: 0o700 })?;
        // The link fails, for example, if a component of the name has more than 255 bytes.
        Ok(link(directory.as_fd(), &parts, target).is_ok().then_some(Self(directory)))
    }
}

impl AsFd for NamedSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn link(directory: BorrowedFd<'_>, parts: &[&OsStr], target: &str) -> Result<(), Errno> {
    let (last, parents) = parts.split_last().ok_or(Errno::NOENT)?;
    let mut parent = std::path::PathBuf::new();
    for part in parents {
        parent.push(part);
        mkdirat(directory, &parent, Mode::RWXU)?;
    }
    symlinkat(target, directory, parent.join(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_that_lead_downwards_are_names() {
        // Each name is refused before a tmpfs is mounted.
        for name in ["/debian", "../debian", "a/../b", "./debian"] {
            assert!(NamedSource::new(name, "/dev/null").unwrap().is_none(), "{name}");
        }
        let folder = tempfile::tempdir().unwrap();
        let at = std::fs::File::open(folder.path()).unwrap();
        link(at.as_fd(), &["docker.io", "library", "debian:12"].map(OsStr::new), "target").unwrap();
        let made = std::fs::read_link(folder.path().join("docker.io/library/debian:12")).unwrap();
        assert_eq!(made, Path::new("target"));
        let long = "a".repeat(256);
        assert_eq!(link(at.as_fd(), &[OsStr::new(&long)], "target"), Err(Errno::NAMETOOLONG));
        assert_eq!(link(at.as_fd(), &[], "target"), Err(Errno::NOENT));
    }
}
