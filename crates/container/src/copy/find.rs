//! Finds a file by its path, inside a root.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, openat};
use rustix::io::Errno;

use super::{DIRECTORY, HOLD, kind, stat};

/// Maximum number of links at the end of a path. Source: path_resolution(7).
const LINKS_MAX: usize = 40;

/// Maximum number of directories above a file in a path of at most `PATH_MAX` bytes.
const DIRECTORIES_MAX: usize = 4096;

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
            let file = open_directory(root, &path)?;
            let kind = Some(FileType::Directory);
            return Ok(Place { directory: path, name: Vec::new(), file: Some(file), kind });
        }
        let parent = open_directory(root, directory)?;
        let (directory, name) = (directory.to_vec(), name.to_vec());
        let opened = openat(&parent, &*name, HOLD, Mode::empty());
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

/// Device and inode of a file.
type Identity = (u32, u32, u64);

/// Returns the path among `mounts` that leads to the file at `place`, or to a directory above it. All paths begin at
/// `root`, and links in them are followed, so the text of the paths does not matter.
///
/// # Errors
/// An error of the kernel.
pub fn mount_above<'m>(
    root: BorrowedFd<'_>,
    place: &Place,
    mounts: &'m [String],
) -> Result<Option<&'m str>, Errno> {
    let parent = open_directory(root, &place.directory)?;
    let absent = match &place.file {
        Some(_) => None,
        None => Some((identity(&parent)?, &place.name)),
    };
    let mut above = Vec::new();
    if let Some(file) = &place.file {
        above.push(identity(file)?);
    }
    let end = identity(root)?;
    let mut directory = parent;
    loop {
        let here = identity(&directory)?;
        above.push(here);
        if here == end || above.len() > DIRECTORIES_MAX {
            break;
        }
        directory = openat(&directory, c"..", DIRECTORY | OFlags::PATH, Mode::empty())?;
    }
    for mount in mounts {
        let found = match find(root, mount.as_bytes()) {
            Ok(found) => found,
            // The runtime makes the directories of a mount point, so now nothing is below it.
            Err(Errno::NOENT | Errno::NOTDIR) => continue,
            Err(errno) => return Err(errno),
        };
        let is_above = match &found.file {
            Some(file) => above.contains(&identity(file)?),
            None => {
                let parent = identity(open_directory(root, &found.directory)?)?;
                absent == Some((parent, &found.name))
            }
        };
        if is_above {
            return Ok(Some(mount));
        }
    }
    Ok(None)
}

fn identity(file: impl AsFd) -> Result<Identity, Errno> {
    let found = stat(file)?;
    Ok((found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
}

/// Opens the directory at a path, which begins at the root.
fn open_directory(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { &b"."[..] } else { path };
    kernel::files::open_resolved(root, path, DIRECTORY | OFlags::PATH, INSIDE)
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

    #[test]
    fn mounts_are_found_behind_links() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir_all(root.join("run/data/sub")).unwrap();
        std::fs::create_dir_all(root.join("etc/deep")).unwrap();
        std::fs::write(root.join("etc/file"), "").unwrap();
        std::fs::create_dir(root.join("var")).unwrap();
        std::os::unix::fs::symlink("/run", root.join("var/run")).unwrap();
        std::os::unix::fs::symlink("../etc/deep", root.join("run/deep")).unwrap();
        let fd = rustix::fs::open(root, DIRECTORY, Mode::empty()).unwrap();
        let check = |mount: &str, path: &str, expect: bool| {
            let place = find(fd.as_fd(), path.as_bytes()).unwrap();
            let mounts = ["/none/at/all".to_owned(), mount.to_owned()];
            let found = mount_above(fd.as_fd(), &place, &mounts).unwrap();
            assert_eq!(found, expect.then_some(mount), "{mount} {path}");
        };
        for mount in ["/run/data", "/var/run/data/", "//etc/../run/./data"] {
            for path in ["/run/data", "/var/run/data", "/run/data/sub/new", "//var/run/data/sub"] {
                check(mount, path, true);
            }
            // With the link, `..` is the root.
            for path in ["/", "/run", "/run/other", "/run/data/../other", "/var/run/../etc/file"] {
                check(mount, path, false);
            }
        }
        // The link leads to /etc/deep, and the directory above that is /etc.
        check("/etc", "/run/deep/../file", true);
        check("/run/file", "/run/deep/../file", false);
        check("/etc/file", "/run/deep/../file", true);
        // A mount point that the image does not have.
        check("/var/run/new", "/run/new", true);
        check("/var/run/new", "/run/newer", false);
        check("/", "/etc/file", true);
    }
}
