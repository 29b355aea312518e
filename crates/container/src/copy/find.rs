//! Finds a file by its path, inside a root.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::{DIRECTORY, HOLD, kind, stat};

/// Maximum number of links at the end of a path. Source: path_resolution(7).
const LINKS_MAX: usize = 40;

/// How paths are resolved inside the root of a container.
pub(super) const INSIDE: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

/// A path, resolved inside a root.
#[derive(Debug)]
pub struct Place {
    /// Path of the directory that has the name. The kernel resolves it again when it is used.
    pub directory: Vec<u8>,
    /// Name of the file, which is no link. Empty if the path names a directory without naming an entry of its parent:
    /// `/`, or a path that ends with `.` or `..`.
    pub name: Vec<u8>,
    /// The file, opened with `O_PATH`. `None` if the directory has no file of this name.
    pub file: Option<OwnedFd>,
    /// Type of the file; `None` if there is none.
    pub kind: Option<FileType>,
}

impl Place {
    /// Returns whether the path leads to a directory.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        self.kind == Some(FileType::Directory)
    }

    /// Returns the path of the file inside the root.
    #[must_use]
    pub fn path(&self) -> Vec<u8> {
        join(&self.directory, &self.name)
    }
}

/// Finds the file at a path inside `root`, and follows links also at its end. The path begins at the root.
///
/// # Errors
/// An error of the kernel: `ENOENT` if a directory of the path does not exist, `ENOTDIR` if it is none.
pub fn find(root: BorrowedFd<'_>, path: &[u8]) -> Result<Place, Errno> {
    let mut path = path.to_vec();
    for _ in 0..LINKS_MAX {
        let (directory, name) = split(&path);
        if matches!(name, b"" | b"." | b"..") {
            let text = if path.is_empty() { &b"."[..] } else { path.as_slice() };
            let file = kernel::files::open_resolved(root, text, DIRECTORY | OFlags::PATH, INSIDE)?;
            let kind = Some(FileType::Directory);
            return Ok(Place { directory: path, name: Vec::new(), file: Some(file), kind });
        }
        let text = if directory.is_empty() { &b"."[..] } else { directory };
        let parent = kernel::files::open_resolved(root, text, DIRECTORY | OFlags::PATH, INSIDE)?;
        let (directory, name) = (directory.to_vec(), name.to_vec());
        let opened = rustix::fs::openat(&parent, &*name, HOLD, Mode::empty());
        let file = match opened {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(Place { directory, name, file: None, kind: None }),
            Err(errno) => return Err(errno),
        };
        let found = kind(&stat(file.as_fd())?);
        if found != FileType::Symlink {
            return Ok(Place { directory, name, file: Some(file), kind: Some(found) });
        }
        let target = rustix::fs::readlinkat(&file, c"", Vec::new())?.into_bytes();
        path = if target.starts_with(b"/") { target } else { join(&directory, &target) };
    }
    Err(Errno::LOOP)
}

/// Splits a path into that of its directory and its last name, without slashes at the end.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let length = path.iter().rposition(|it| *it != b'/').map_or(0, |at| at + 1);
    let (path, _) = path.split_at(length);
    match path.iter().rposition(|it| *it == b'/') {
        // The slash stays, so that the root is no empty path.
        Some(at) => path.split_at(at + 1),
        None => path.split_at(0),
    }
}

/// Joins two paths.
pub(super) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() || name.is_empty() || directory.ends_with(b"/") {
        return [directory, name].concat();
    }
    [directory, b"/", name].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_a_directory_and_a_name() {
        let check = |path: &str, directory: &str, name: &str| {
            assert_eq!(split(path.as_bytes()), (directory.as_bytes(), name.as_bytes()), "{path}");
        };
        check("", "", "");
        check("/", "", "");
        check("a", "", "a");
        check("a//", "", "a");
        check("/a", "/", "a");
        check("/a/b/", "/a/", "b");
        check("/a/.", "/a/", ".");
        check("a/..", "a/", "..");
        assert_eq!(join(b"", b"a"), b"a");
        assert_eq!(join(b"/", b"a"), b"/a");
        assert_eq!(join(b"/a", b"b"), b"/a/b");
        assert_eq!(join(b"/a", b""), b"/a");
    }
}
